use std::os::fd::AsFd as _;

use super::message::link;
use super::*;
use crate::namespace::Netns;

const HERE: Mac = Mac([2, 0, 0, 0, 0, 1]);
const THERE: Mac = Mac([2, 0, 0, 0, 0, 2]);

fn names(netns: &Netns) -> Vec<String> {
    netns
        .run(|| {
            Rtnetlink::open().unwrap().links().unwrap().into_iter().map(|link| link.name).collect::<Vec<_>>()
        })
        .unwrap()
}

fn pair() -> (Netns, Netns) {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let (here, there) = (Netns::create().unwrap(), Netns::create().unwrap());
    here.run(|| {
        let peer = VethPeer { name: "there0", mac: THERE, netns: there.as_fd() };
        Rtnetlink::open().unwrap().add_veth("here0", HERE, &peer).unwrap();
    })
    .unwrap();
    (here, there)
}

#[test]
fn a_pair_of_links_spans_two_namespaces_and_goes_as_one() {
    let (here, there) = pair();
    let far = there.run(|| Rtnetlink::open().unwrap().links().unwrap()).unwrap();
    let far = far.into_iter().find(|link| link.name == "there0").unwrap();
    assert_eq!((far.mac, far.up), (Some(THERE), false));
    here.run(|| {
        let mut netlink = Rtnetlink::open().unwrap();
        let index = netlink.index("here0").unwrap();
        netlink.set_up(index).unwrap();
        let near = netlink.links().unwrap().into_iter().find(|link| link.index == index).unwrap();
        assert_eq!(near, Link { index, name: "here0".into(), up: true, operational: false, mac: Some(HERE) });

        let peer = VethPeer { name: "there1", mac: THERE, netns: there.as_fd() };
        let taken = netlink.add_veth("here0", HERE, &peer).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
        netlink.delete_link(index).unwrap();
        assert_eq!(netlink.delete_link(index).unwrap_err().raw_os_error(), Some(libc::ENODEV));
        assert_eq!(netlink.index("here0").unwrap_err().raw_os_error(), Some(libc::ENODEV));
    })
    .unwrap();
    assert!(!names(&there).iter().any(|name| name.starts_with("there")));
}

#[test]
fn all_addresses_of_all_interfaces_are_found() {
    let (here, _there) = pair();
    let found = here
        .run(|| {
            let mut netlink = Rtnetlink::open().unwrap();
            assert_eq!(netlink.addresses().unwrap(), [] as [IpAddr; 0]);
            netlink.set_up(netlink.index("lo").unwrap()).unwrap();
            let index = netlink.index("here0").unwrap();
            for address in [[10, 1, 2, 1], [192, 0, 2, 9]] {
                netlink.add_address(index, address.into(), 30).unwrap();
            }
            netlink.addresses().unwrap()
        })
        .unwrap();
    let expected: [IpAddr; 4] =
        ["127.0.0.1", "10.1.2.1", "192.0.2.9", "::1"].map(|text| text.parse().unwrap());
    assert_eq!(found.len(), expected.len(), "{found:?}");
    assert!(expected.iter().all(|address| found.contains(address)), "{found:?}");
}

#[test]
fn addresses_routes_and_neighbours_carry_traffic() {
    let (here, there) = pair();
    let (a, b): (Ipv4Addr, Ipv4Addr) = ("10.1.2.1".parse().unwrap(), "10.1.2.2".parse().unwrap());
    for (netns, link, own, other, mac) in [(&here, "here0", a, b, THERE), (&there, "there0", b, a, HERE)] {
        netns
            .run(|| {
                let mut netlink = Rtnetlink::open().unwrap();
                let index = netlink.index(link).unwrap();
                netlink.add_address(index, own, 30).unwrap();
                let twice = netlink.add_address(index, own, 30).unwrap_err();
                assert_eq!(twice.kind(), io::ErrorKind::AlreadyExists);
                netlink.set_up(index).unwrap();
                netlink.add_permanent_neighbour(index, other, mac).unwrap();
                netlink.add_default_route(index, other).unwrap();
                assert!(netlink.add_default_route(index, other).is_err());
                let arp = std::fs::read_to_string("/proc/thread-self/net/arp").unwrap();
                // Flags 0x6: complete and permanent.
                assert!(arp.lines().any(|line| line.starts_with(&other.to_string())
                    && line.contains("0x6")
                    && line.contains(&mac.to_string())));
            })
            .unwrap();
    }
    let listener = there.run(|| std::net::TcpListener::bind((b, 0)).unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let client = here.run(|| std::net::TcpStream::connect(address).unwrap()).unwrap();
    let (_, from) = listener.accept().unwrap();
    assert_eq!(from, client.local_addr().unwrap());

    here.run(|| {
        let mut netlink = Rtnetlink::open().unwrap();
        let index = netlink.index("here0").unwrap();
        netlink.delete_address(index, a, 30).unwrap();
        let gone = netlink.delete_address(index, a, 30).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::EADDRNOTAVAIL));
        assert_eq!(
            std::net::TcpStream::connect(address).unwrap_err().kind(),
            io::ErrorKind::NetworkUnreachable
        );
    })
    .unwrap();
}

#[test]
fn names_that_are_none_are_refused_before_the_kernel_sees_them() {
    let netlink = Rtnetlink::open().unwrap();
    for name in ["", "a/b", "a b", "sixteen-letters-", "a\0", "a:1"] {
        assert_eq!(netlink.index(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name:?}");
    }
}

#[test]
fn broken_answers_are_errors_and_not_panics() {
    let mut sound = Message::new(libc::RTM_NEWLINK, 0, &link_header(7, 1, 0));
    sound.attribute(libc::IFLA_IFNAME, b"eth0\0");
    let sound = sound.finish(5).unwrap();
    let Some(Ok(Reply::Data { body, .. })) = replies(&sound, 5).next() else { panic!("no reply") };
    assert_eq!(
        link(body).unwrap(),
        Link { index: 7, name: "eth0".into(), up: true, operational: false, mac: None }
    );
    assert!(replies(&sound, 6).next().is_none(), "an answer to another request");

    for len in 0..sound.len() {
        for reply in replies(&sound[..len], 5) {
            assert!(reply.is_err(), "{len}");
        }
        let _ = link(&sound[..len]);
    }
    for at in 0..sound.len() {
        for value in [0, 1, 3, 15, 16, 255] {
            let mut broken = sound.clone();
            broken[at] = value;
            for reply in replies(&broken, 5) {
                if let Ok(Reply::Data { body, .. }) = reply {
                    let _ = link(body);
                }
            }
        }
    }
}
