//! The engine and the network together; what the network lets through is tested with the network.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddrV4, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use sandglass_engine::engine::{AirlockSocket, Engine as _};
use sandglass_types::SandboxId;

use crate::fixture::{Agent, Fixture, by_both, spec};

fn reaches_the_airlock(fixture: &Fixture, id: &SandboxId, agent: &mut Agent) {
    let socket = UdpSocket::from(fixture.engine().airlock_socket(id, AirlockSocket::DnsUdp).unwrap());
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    agent.send("busybox timeout 5 busybox nslookup example.com >/dev/null 2>&1 &");
    let mut query = [0; 512];
    let (len, from) = socket.recv_from(&mut query).unwrap();
    assert_eq!(from.ip().to_string(), "10.11.12.2");
    assert!(query[..len].windows(7).any(|name| name == b"example"), "{:?}", &query[..len]);
}

/// A connection to a server in the guest, which the kernel that holds the other end of the link must leave alone.
fn reaches_the_guest(fixture: &Fixture, id: &SandboxId, agent: &mut Agent) {
    agent.send("echo from the guest | busybox nc -l -p 7000 >/tmp/got & server=$!");
    let deadline = Instant::now() + Duration::from_secs(20);
    let to = SocketAddrV4::new([10, 11, 12, 2].into(), 7000);
    let mut stream = loop {
        let socket = fixture.engine().airlock_socket(id, AirlockSocket::TcpToGuest).unwrap();
        rustix::io::ioctl_fionbio(&socket, false).unwrap();
        match rustix::net::connect(&socket, &to) {
            Ok(()) => break TcpStream::from(socket),
            // The server in the guest is not there yet.
            Err(rustix::io::Errno::CONNREFUSED) => assert!(Instant::now() < deadline, "nobody listens"),
            Err(errno) => panic!("{errno}"),
        }
    };
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"from outside\n").unwrap();
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    assert_eq!(line, "from the guest\n");
    drop(stream);
    assert_eq!(agent.sh("wait $server; busybox cat /tmp/got"), "from outside\n<0>");
}

#[test]
fn a_guest_has_one_interface_that_ends_at_the_server() {
    by_both(|driver| {
        let mut fixture = Fixture::driven(true, driver);
        let (spec, mut agent) = fixture.run();
        let interfaces = agent.sh("busybox ifconfig -a");
        assert!(interfaces.contains("eth0") && interfaces.contains("10.11.12.2"), "{interfaces}");
        assert_eq!(interfaces.matches("Link encap").count(), 2, "{interfaces}");
        reaches_the_airlock(&fixture, &spec.id, &mut agent);
        reaches_the_guest(&fixture, &spec.id, &mut agent);
        // The slot is found again by a restarted host, which removes others.
        drop(agent);
        fixture.reopen();
        let mut agent = fixture.attach(&spec.id);
        reaches_the_airlock(&fixture, &spec.id, &mut agent);
        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
    });
}

#[test]
fn a_slot_is_removed_even_when_the_folder_of_its_owner_is_lost() {
    let fixture = Fixture::with_network();
    let (spec, _agent) = fixture.run();
    std::fs::remove_dir_all(fixture.sandbox_dir(&spec.id)).unwrap();
    fixture.engine().destroy(&spec.id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn a_restored_copy_has_a_network_of_its_own() {
    by_both(|driver| {
        let fixture = Fixture::driven(true, driver);
        let (parent, mut agent) = fixture.run();
        reaches_the_airlock(&fixture, &parent.id, &mut agent);
        let image = SandboxId::random();
        fixture.engine().pause(&parent.id).unwrap();
        fixture.engine().checkpoint(&parent.id, &image).unwrap();
        fixture.engine().resume(&parent.id).unwrap();
        let child = spec(parent.limits);
        fixture.engine().restore(&child, &image).unwrap();
        let mut other = fixture.attach(&child.id);
        reaches_the_airlock(&fixture, &child.id, &mut other);
        reaches_the_airlock(&fixture, &parent.id, &mut agent);
        fixture.engine().destroy(&parent.id).unwrap();
        reaches_the_airlock(&fixture, &child.id, &mut other);
        reaches_the_guest(&fixture, &child.id, &mut other);
        fixture.engine().destroy(&child.id).unwrap();
        fixture.assert_nothing_left();
    });
}
