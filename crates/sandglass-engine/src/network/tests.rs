//! The stand-in for a guest is a thread in the inner namespace, with the kernel's own network stack: it can send
//! whatever a guest could.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use sandglass_egress::policy::Openings;
use sandglass_linux::namespace::{Netns, PinFolder};
use sandglass_linux::netlink::{Mac, Rtnetlink, VethPeer};
use sandglass_linux::nft;
use sandglass_linux::redirect::original_destination;
use sandglass_types::InstanceId;

use super::*;
use crate::engine::AirlockSocket;

mod held_up;

use held_up::logged;

/// Upper bound for what must happen.
const PATIENCE: Duration = Duration::from_secs(10);

/// The first retransmission of a connection request comes after a second: what is answered sooner was answered.
const AT_ONCE: Duration = Duration::from_millis(900);

struct Bench {
    pins: Arc<PinFolder>,
    instance: InstanceId,
    directory: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let directory = tempfile::tempdir().unwrap();
        let pins = Arc::new(PinFolder::open(directory.path()).unwrap());
        Self { pins, instance: InstanceId::random(), directory }
    }

    fn slot(&self) -> Slot {
        self.slot_behind(&[])
    }

    /// A slot where these ranges are opened.
    fn slot_behind(&self, opened: &[&str]) -> Slot {
        Slot::create(&self.pins, &self.instance, &filter(opened)).unwrap()
    }

    fn pin_names(&self) -> Vec<String> {
        self.pins.names().unwrap()
    }

    fn inner(&self, slot: &Slot) -> Netns {
        self.pins.netns(&slot.name().inner_pin()).unwrap()
    }

    fn airlock(&self, slot: &Slot) -> Netns {
        self.pins.netns(&slot.name().airlock_pin()).unwrap()
    }

    /// Runs `work` where the guest is.
    fn guest<T: Send>(&self, slot: &Slot, work: impl FnOnce() -> T + Send) -> T {
        self.inner(slot).run(work).unwrap()
    }
}

fn airlock_socket(slot: &Slot, socket: AirlockSocket) -> Result<OwnedFd, NetworkError> {
    Ok(slot.airlock_sockets(&[socket])?.remove(0))
}

impl Drop for Bench {
    fn drop(&mut self) {
        for name in self.pin_names() {
            self.pins.unpin(&name).unwrap();
        }
        unmount(self.directory.path(), UnmountFlags::NOFOLLOW).unwrap();
    }
}

fn filter(opened: &[&str]) -> Filter {
    let ranges: Vec<_> = opened.iter().map(|range| range.parse().unwrap()).collect();
    Filter::new(&Openings::try_from(ranges).unwrap())
}

fn udp(fd: OwnedFd) -> UdpSocket {
    let socket = UdpSocket::from(fd);
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn guest_udp(slot: &Slot, bench: &Bench) -> UdpSocket {
    let socket = bench.guest(slot, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap());
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Sends a name query and waits until the server has it: whatever the guest sent before has been dealt with by then.
fn fence(guest: &UdpSocket, server: &UdpSocket) {
    let token: [u8; 16] = rand::random();
    guest.send_to(&token, "8.8.8.8:53").unwrap();
    let mut buffer = [0; 64];
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let (len, _) = server.recv_from(&mut buffer).unwrap();
        if buffer[..len] == token {
            return;
        }
    }
    panic!("the query did not arrive");
}

fn silent(result: io::Result<usize>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

fn connect_from_guest(
    bench: &Bench,
    slot: &Slot,
    to: &str,
    timeout: Duration,
) -> (io::Result<TcpStream>, Duration) {
    let to: SocketAddr = to.parse().unwrap();
    bench.guest(slot, || {
        let start = Instant::now();
        let result = TcpStream::connect_timeout(&to, timeout);
        (result, start.elapsed())
    })
}

#[test]
fn a_name_query_to_any_address_reaches_the_server_and_its_answer_comes_back() {
    let bench = Bench::new();
    let slot = bench.slot();
    let server = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    let guest = guest_udp(&slot, &bench);
    let mut buffer = [0; 64];
    // One socket for several name servers, as some resolvers do, the airlock's own address included.
    for resolver in ["8.8.8.8:53", "1.1.1.1:53", "10.11.12.1:53"] {
        let resolver: SocketAddr = resolver.parse().unwrap();
        guest.send_to(b"query", resolver).unwrap();
        let (len, from) = server.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from.ip()), (b"query".as_slice(), IpAddr::from(GUEST_ADDRESS)));
        server.send_to(b"answer", from).unwrap();
        let (len, from) = guest.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from), (b"answer".as_slice(), resolver));
    }
    // A connected socket takes answers only from there.
    let guest = guest_udp(&slot, &bench);
    guest.connect("9.9.9.9:53").unwrap();
    guest.send(b"query").unwrap();
    let (_, from) = server.recv_from(&mut buffer).unwrap();
    server.send_to(b"answer", from).unwrap();
    assert_eq!(guest.recv(&mut buffer).unwrap(), 6);
}

/// Bytes go from the guest to the server, and others back.
fn exchange(guest: &mut TcpStream, server: &mut TcpStream) {
    let mut buffer = [0; 5];
    guest.write_all(b"query").unwrap();
    server.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"query");
    server.write_all(b"reply").unwrap();
    guest.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"reply");
}

#[test]
fn a_name_query_over_tcp_reaches_the_server() {
    let bench = Bench::new();
    let slot = bench.slot();
    let server = TcpListener::from(airlock_socket(&slot, AirlockSocket::DnsTcp).unwrap());
    server.set_nonblocking(false).unwrap();
    let (guest, _) = connect_from_guest(&bench, &slot, "8.8.8.8:53", PATIENCE);
    let mut guest = guest.unwrap();
    let (mut accepted, from) = server.accept().unwrap();
    assert_eq!(from.ip(), IpAddr::from(GUEST_ADDRESS));
    exchange(&mut guest, &mut accepted);
}

#[test]
fn every_other_connection_is_reset_at_once() {
    let bench = Bench::new();
    let slot = bench.slot();
    let airlock = bench.airlock(&slot);
    // Something listens in the airlock, so that only the rules stand before it.
    let listener = airlock.run(|| TcpListener::bind((AIRLOCK_ADDRESS, 22)).unwrap()).unwrap();
    for to in ["93.184.216.34:443", "169.254.169.254:80", "10.11.12.1:22", "10.0.0.1:80", "8.8.8.8:853"] {
        let (result, took) = connect_from_guest(&bench, &slot, to, PATIENCE);
        assert_eq!(result.unwrap_err().kind(), ErrorKind::ConnectionRefused, "{to}");
        assert!(took < AT_ONCE, "{to}: {took:?}");
    }

    // Control: it is the rules that do this, and not the absence of a route alone.
    nft::apply(&airlock, "flush ruleset\n").unwrap();
    let (result, _) = connect_from_guest(&bench, &slot, "10.11.12.1:22", PATIENCE);
    result.unwrap();
    drop(listener);
    let (result, _) = connect_from_guest(&bench, &slot, "93.184.216.34:443", Duration::from_millis(300));
    assert_eq!(result.unwrap_err().kind(), ErrorKind::TimedOut, "without rules there is silence");
}

#[test]
fn a_connection_without_a_server_is_reset() {
    let bench = Bench::new();
    let slot = bench.slot();
    let server = egress(&slot);
    let control = connect_from_guest(&bench, &slot, "93.184.216.34:443", PATIENCE).0.unwrap();
    let (mut accepted, _) = server.accept().unwrap();
    // What is under way as the server dies, and what comes later.
    drop(server);
    accepted.write_all(b"half").unwrap();
    drop(accepted);
    let mut rest = Vec::new();
    let _reset = (&control).read_to_end(&mut rest);
    assert_eq!(rest, b"half");
    for to in ["8.8.8.8:53", "93.184.216.34:443"] {
        let (result, took) = connect_from_guest(&bench, &slot, to, PATIENCE);
        assert_eq!(result.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert!(took < AT_ONCE);
    }
}

fn egress(slot: &Slot) -> TcpListener {
    let server = TcpListener::from(airlock_socket(slot, AirlockSocket::TcpEgress).unwrap());
    server.set_nonblocking(false).unwrap();
    server
}

#[test]
fn a_connection_to_anywhere_reaches_the_server_which_knows_where_it_was_going() {
    let bench = Bench::new();
    let slot = bench.slot();
    let server = egress(&slot);
    for to in ["93.184.216.34:443", "93.184.216.34:80", "8.8.8.8:853", "1.2.3.4:15001", "9.9.9.9:65535"] {
        let mut guest = connect_from_guest(&bench, &slot, to, PATIENCE).0.unwrap();
        let (mut accepted, from) = server.accept().unwrap();
        assert_eq!(from.ip(), IpAddr::from(GUEST_ADDRESS));
        assert_eq!(original_destination(&accepted).unwrap().to_string(), to);
        assert_eq!(guest.peer_addr().unwrap().to_string(), to);
        exchange(&mut guest, &mut accepted);
    }
}

#[test]
fn what_is_always_denied_never_reaches_the_server() {
    let bench = Bench::new();
    let (closed, opened) = (bench.slot(), bench.slot_behind(&["10.0.0.0/9", "100.64.0.0/10"]));
    let refused = |slot: &Slot, to: &str| {
        let (result, took) = connect_from_guest(&bench, slot, to, PATIENCE);
        assert_eq!(result.unwrap_err().kind(), ErrorKind::ConnectionRefused, "{to}");
        assert!(took < AT_ONCE, "{to}: {took:?}");
    };
    let always = [
        "169.254.169.254:80",
        "169.254.170.2:80",
        "100.100.100.200:80",
        "168.63.129.16:80",
        "10.11.12.1:22",
        "10.11.12.1:15001",
        "192.168.1.1:80",
        "172.16.0.1:80",
        "192.0.2.1:443",
        "198.18.0.1:443",
        "240.0.0.1:443",
        "10.128.0.1:443",
    ];
    for slot in [&closed, &opened] {
        let server = egress(slot);
        always.iter().for_each(|to| refused(slot, to));
        server.set_nonblocking(true).unwrap();
        assert_eq!(server.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    }
    for to in ["10.1.2.3:80", "100.64.0.1:80"] {
        {
            let _server = egress(&closed);
            refused(&closed, to);
        }
        let server = egress(&opened);
        let guest = connect_from_guest(&bench, &opened, to, PATIENCE).0.unwrap();
        assert_eq!(original_destination(&server.accept().unwrap().0).unwrap().to_string(), to, "control");
        drop(guest);
    }
}

#[test]
fn a_guest_has_a_bounded_number_of_connections() {
    // Two descriptors for each.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let enough = rustix::process::Rlimit { current: Some(8192), maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, enough).unwrap();
    let bench = Bench::new();
    let slot = bench.slot();
    let server = egress(&slot);
    let mut held = Vec::new();
    for _ in 0..filter(&[]).connections {
        let guest = connect_from_guest(&bench, &slot, "93.184.216.34:443", PATIENCE).0.unwrap();
        held.push((guest, server.accept().unwrap().0));
    }
    let one_more = || connect_from_guest(&bench, &slot, "93.184.216.34:443", PATIENCE).0;
    let log = airlock_socket(&slot, AirlockSocket::FilterLog).unwrap();
    assert_eq!(one_more().unwrap_err().kind(), ErrorKind::ConnectionRefused);
    logged(&log, &[("connections", "93.184.216.34:443")]);
    // Names are still answered, and the place of one that ended is free again.
    let names = TcpListener::from(airlock_socket(&slot, AirlockSocket::DnsTcp).unwrap());
    connect_from_guest(&bench, &slot, "8.8.8.8:53", PATIENCE).0.unwrap();
    drop(names);
    let (guest, accepted) = held.pop().unwrap();
    drop(accepted);
    drop(guest);
    let deadline = Instant::now() + PATIENCE;
    while one_more().is_err() {
        assert!(Instant::now() < deadline, "the place of an ended connection stays taken");
    }
}

#[test]
fn datagrams_to_other_ports_vanish() {
    let bench = Bench::new();
    let slot = bench.slot();
    let airlock = bench.airlock(&slot);
    let server = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    let victim = airlock.run(|| UdpSocket::bind("0.0.0.0:9999").unwrap()).unwrap();
    victim.set_nonblocking(true).unwrap();
    let guest = guest_udp(&slot, &bench);
    let probe = guest_udp(&slot, &bench);
    probe.set_nonblocking(true).unwrap();
    probe.connect("10.11.12.1:9998").unwrap();
    probe.send(b"x").unwrap();
    for to in ["10.11.12.1:9999", "8.8.8.8:9999", "8.8.8.8:443", "10.11.12.3:9999", "224.0.0.1:9999"] {
        // The kernel of the stand-in may itself refuse; a guest's would not.
        let _ = guest.send_to(b"x", to);
    }
    fence(&guest, &server);
    assert!(silent(victim.recv(&mut [0; 8])));
    assert!(silent(probe.recv(&mut [0; 8])), "not even an error comes back");

    nft::apply(&airlock, "flush ruleset\n").unwrap();
    guest.send_to(b"x", "10.11.12.1:9999").unwrap();
    victim.set_nonblocking(false).unwrap();
    victim.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(victim.recv(&mut [0; 8]).unwrap(), 1, "control");
}

#[test]
fn pings_vanish() {
    let bench = Bench::new();
    let slot = bench.slot();
    let airlock = bench.airlock(&slot);
    let server = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    let guest = guest_udp(&slot, &bench);
    let ping = bench.guest(&slot, || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let icmp = Some(rustix::net::ipproto::ICMP);
        rustix::net::socket_with(AddressFamily::INET, SocketType::RAW, flags, icmp).unwrap()
    });
    // Echo request, identifier 0x1234, sequence 1, with its checksum.
    let echo = [8, 0, 0xe5, 0xca, 0x12, 0x34, 0, 1];
    let send = |to: [u8; 4]| {
        let to = SocketAddrV4::new(Ipv4Addr::from(to), 0);
        assert_eq!(rustix::net::sendto(&ping, &echo, SendFlags::empty(), &to).unwrap(), echo.len());
    };
    let answer = || rustix::net::recv(&ping, &mut [0; 128][..], RecvFlags::empty()).map(|(len, _)| len);
    send([10, 11, 12, 1]);
    send([8, 8, 8, 8]);
    fence(&guest, &server);
    assert_eq!(answer(), Err(rustix::io::Errno::AGAIN));

    nft::apply(&airlock, "flush ruleset\n").unwrap();
    airlock.run(|| fs::write("/proc/sys/net/ipv4/icmp_echo_ignore_all", "0").unwrap()).unwrap();
    send([10, 11, 12, 1]);
    let deadline = Instant::now() + PATIENCE;
    while answer().is_err() {
        assert!(Instant::now() < deadline, "control");
        std::thread::yield_now();
    }
}

#[test]
fn ipv6_is_off_inside_and_dead_outside() {
    let bench = Bench::new();
    let slot = bench.slot();
    let airlock = bench.airlock(&slot);
    let server = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    let guest = guest_udp(&slot, &bench);
    bench.guest(&slot, || {
        for to in ["[::1]:80", "[2001:db8::1]:80", "[fe80::1]:80"] {
            let error = TcpStream::connect_timeout(&to.parse().unwrap(), PATIENCE).unwrap_err();
            assert_ne!(error.kind(), ErrorKind::TimedOut, "{to}");
            assert_ne!(error.kind(), ErrorKind::ConnectionRefused, "{to}");
        }
        assert!(fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap().is_empty());
    });
    assert!(
        airlock.run(|| fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap()).unwrap().is_empty()
    );

    // A guest with a stack of its own speaks IPv6 all the same.
    let victim = airlock.run(|| UdpSocket::bind("[::]:9999").unwrap()).unwrap();
    victim.set_nonblocking(true).unwrap();
    let index = bench.guest(&slot, || {
        fs::write("/proc/sys/net/ipv6/conf/eth0/accept_dad", "0").unwrap();
        fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "0").unwrap();
        Rtnetlink::open().unwrap().index("eth0").unwrap()
    });
    let speaker = bench.guest(&slot, || UdpSocket::bind("[::]:0").unwrap());
    let all_nodes = SocketAddr::V6(std::net::SocketAddrV6::new("ff02::1".parse().unwrap(), 9999, 0, index));
    let send = || {
        let deadline = Instant::now() + PATIENCE;
        while speaker.send_to(b"x", all_nodes).is_err() {
            assert!(Instant::now() < deadline, "the stand-in has no address yet");
            std::thread::yield_now();
        }
    };
    send();
    fence(&guest, &server);
    assert!(silent(victim.recv(&mut [0; 8])));

    // The rules alone stop it ...
    let link = slot.name().airlock_link();
    airlock.run(|| fs::write(format!("/proc/sys/net/ipv6/conf/{link}/disable_ipv6"), "0").unwrap()).unwrap();
    send();
    fence(&guest, &server);
    assert!(silent(victim.recv(&mut [0; 8])));
    // ... and without both barriers it arrives.
    nft::apply(&airlock, "flush ruleset\n").unwrap();
    let deadline = Instant::now() + PATIENCE;
    while silent(victim.recv(&mut [0; 8])) {
        assert!(Instant::now() < deadline, "control");
        send();
        std::thread::yield_now();
    }
}

#[test]
fn a_foreign_source_address_is_dropped() {
    let bench = Bench::new();
    let slot = bench.slot();
    let server = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    let guest = guest_udp(&slot, &bench);
    let send = |source: [u8; 4], text: &[u8; 8]| {
        // IPv4 header: 20 bytes, time to live 64, UDP; length and checksum are filled in by the kernel.
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend(source);
        packet.extend([8, 8, 8, 8]);
        // UDP header: ports 4000 and 53, 16 bytes, no checksum.
        packet.extend([0x0f, 0xa0, 0, 53, 0, 16, 0, 0]);
        packet.extend(text);
        bench.guest(&slot, || {
            let raw = Some(rustix::net::ipproto::RAW);
            let flags = SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::RAW, flags, raw).unwrap();
            let to = SocketAddrV4::new(Ipv4Addr::new(8, 8, 8, 8), 0);
            rustix::net::sendto(&socket, &packet, SendFlags::empty(), &to).unwrap();
        });
    };
    for source in [[10, 11, 12, 1], [10, 11, 12, 3], [10, 9, 9, 9], [127, 0, 0, 1], [169, 254, 169, 254]] {
        send(source, b"spoofed!");
    }
    // Control: made by hand as well, but right.
    send(GUEST_ADDRESS.octets(), b"honest!!");
    let mut buffer = [0; 64];
    let (len, from) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], b"honest!!", "the spoofed ones were sent before; this one from {from}");
    fence(&guest, &server);
}

#[test]
fn the_server_reaches_the_guest_and_nothing_else() {
    let bench = Bench::new();
    let slot = bench.slot();
    let airlock = bench.airlock(&slot);
    let listener = bench.guest(&slot, || TcpListener::bind("0.0.0.0:8080").unwrap());
    let own = airlock.run(|| TcpListener::bind("0.0.0.0:8081").unwrap()).unwrap();

    let connect = |to: &str| {
        let fd = airlock_socket(&slot, AirlockSocket::TcpToGuest).unwrap();
        let to: SocketAddrV4 = to.parse().unwrap();
        // Not blocking, as it is made; the outcome is waited for with a bound.
        match rustix::net::connect(&fd, &to) {
            Err(rustix::io::Errno::INPROGRESS) => {}
            result => result?,
        }
        let mut poll = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::OUT)];
        let wait = rustix::time::Timespec { tv_sec: 0, tv_nsec: 300_000_000 };
        if rustix::event::poll(&mut poll, Some(&wait)).unwrap() == 0 {
            return Err(io::Error::from(ErrorKind::TimedOut));
        }
        rustix::net::sockopt::socket_error(&fd)??;
        let stream = TcpStream::from(fd);
        stream.set_nonblocking(false)?;
        io::Result::Ok(stream)
    };
    let mut stream = connect("10.11.12.2:8080").unwrap();
    let (mut accepted, from) = listener.accept().unwrap();
    assert_eq!(from.ip(), IpAddr::from(AIRLOCK_ADDRESS));
    let bulk = vec![7; 1 << 20];
    let mut echoed = Vec::new();
    let mut writer = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| writer.write_all(&bulk).unwrap());
        scope.spawn(|| {
            let mut received = vec![0; bulk.len()];
            accepted.read_exact(&mut received).unwrap();
            accepted.write_all(&received).unwrap();
            accepted.shutdown(std::net::Shutdown::Both).unwrap();
        });
        stream.read_to_end(&mut echoed).unwrap();
    });
    assert!(echoed == bulk);

    assert_eq!(
        connect("10.11.12.2:8079").unwrap_err().kind(),
        ErrorKind::ConnectionRefused,
        "the guest's own no"
    );
    for to in ["10.11.12.1:8081", "127.0.0.1:8081", "8.8.8.8:53", "10.11.12.3:80"] {
        assert!(connect(to).is_err(), "{to}");
    }
    drop(own);
}

#[test]
fn two_slots_with_the_same_addresses_do_not_meet() {
    let bench = Bench::new();
    let slots = [bench.slot(), bench.slot()];
    let servers = slots.each_ref().map(|slot| udp(airlock_socket(slot, AirlockSocket::DnsUdp).unwrap()));
    let guests = slots.each_ref().map(|slot| guest_udp(slot, &bench));
    let mut buffer = [0; 64];
    for (guest, text) in guests.iter().zip([b"from 0", b"from 1"]) {
        guest.send_to(text, "8.8.8.8:53").unwrap();
    }
    for (server, (text, answer)) in servers.iter().zip([(b"from 0", b"to 0"), (b"from 1", b"to 1")]) {
        let (len, from) = server.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], text);
        server.send_to(answer, from).unwrap();
    }
    for (guest, answer) in guests.iter().zip([b"to 0", b"to 1"]) {
        let (len, _) = guest.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], answer);
    }
    for server in &servers {
        server.set_nonblocking(true).unwrap();
        assert!(silent(server.recv(&mut buffer)), "nobody got a second one");
    }
}

#[test]
fn there_is_no_other_interface_and_no_other_route() {
    let bench = Bench::new();
    let slot = bench.slot();
    let look = |netns: &Netns| {
        let up = || {
            let links = Rtnetlink::open().unwrap().links().unwrap();
            links.into_iter().filter(|link| link.up).map(|link| (link.name, link.mac)).collect::<Vec<_>>()
        };
        netns.run(|| (up(), fs::read_to_string("/proc/thread-self/net/route").unwrap())).unwrap()
    };
    let (links, routes) = look(&bench.airlock(&slot));
    assert_eq!(links, [(slot.name().airlock_link(), Some(AIRLOCK_MAC))], "not even loopback is up");
    let routes: Vec<_> = routes.lines().skip(1).collect();
    assert_eq!(routes.len(), 1, "{routes:?}");
    // Destination in the byte order of the machine: 10.11.12.0.
    assert!(
        routes[0].starts_with(&format!("{}\t000C0B0A\t00000000", slot.name().airlock_link())),
        "{routes:?}"
    );

    let (links, routes) = look(&bench.inner(&slot));
    assert_eq!(links, [("lo".into(), Some(Mac([0; 6]))), ("eth0".into(), Some(GUEST_MAC))]);
    assert!(routes.contains("eth0\t00000000\t010C0B0A"), "{routes}");
    for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/route_localnet"] {
        let value =
            bench.airlock(&slot).run(|| fs::read_to_string(format!("/proc/sys/net/{setting}"))).unwrap();
        assert_eq!(value.unwrap().trim(), "0", "{setting}");
    }
}

#[test]
fn a_flood_of_queries_costs_the_machine_little() {
    let bench = Bench::new();
    let slot = bench.slot();
    let airlock = bench.airlock(&slot);
    let server = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    let start = Instant::now();
    bench.guest(&slot, || {
        for _ in 0..4000 {
            let socket = UdpSocket::bind((GUEST_ADDRESS, 0)).unwrap();
            socket.send_to(b"x", "8.8.8.8:53").unwrap();
        }
    });
    let took = start.elapsed();
    let count: u64 = airlock
        .run(|| fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").unwrap())
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    // 400 at once and 200 a second.
    let limit = 400 + 200 * (took.as_secs() + 1);
    assert!(count > 0 && count <= limit && limit < 4000, "{count} entries after {took:?}");
    drop(server);
}

/// Says when a namespace ends: the far end of a link that is inside it.
struct Canary(Netns);

impl Canary {
    fn in_netns(watched: &Netns) -> Self {
        let home = Netns::create().unwrap();
        home.run(|| {
            let peer = VethPeer { name: "canary", mac: Mac([2, 0, 0, 0, 0, 2]), netns: watched.as_fd() };
            Rtnetlink::open().unwrap().add_veth("canary", Mac([2, 0, 0, 0, 0, 1]), &peer).unwrap();
        })
        .unwrap();
        Self(home)
    }

    fn alive(&self) -> bool {
        self.0.run(|| Rtnetlink::open().unwrap().index("canary").is_ok()).unwrap()
    }

    fn ends(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while self.alive() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        !self.alive()
    }
}

#[test]
fn nothing_is_left_of_a_destroyed_slot() {
    let bench = Bench::new();
    let slot = bench.slot();
    let canaries = [Canary::in_netns(&bench.inner(&slot)), Canary::in_netns(&bench.airlock(&slot))];
    let (inner, airlock) = slot.inodes().unwrap();
    assert_ne!(inner, airlock);
    let mounted =
        |inode: u64| fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&format!("net:[{inode}]"));
    assert!(mounted(inner) && mounted(airlock));

    let socket = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    let guest = guest_udp(&slot, &bench);
    fence(&guest, &socket);
    slot.destroy().unwrap();
    assert!(bench.pin_names().is_empty());
    assert_eq!(fs::read_dir(bench.directory.path()).unwrap().count(), 0);
    assert!(!mounted(inner) && !mounted(airlock));
    // The guest's process and the server's socket still hold theirs, but they are cut off from each other.
    assert!(canaries.iter().all(Canary::alive));
    let unreachable = socket.send_to(b"x", (GUEST_ADDRESS, 9)).unwrap_err();
    assert_eq!(unreachable.kind(), ErrorKind::NetworkUnreachable);
    guest.send_to(b"x", "8.8.8.8:53").unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(silent(socket.recv(&mut [0; 8])));
    drop(guest);
    assert!(canaries[0].ends());
    assert!(canaries[1].alive());
    drop(socket);
    assert!(canaries[1].ends());

    slot.destroy().unwrap();
    assert!(airlock_socket(&slot, AirlockSocket::DnsUdp).is_err());
    assert!(slot.inodes().is_err());
}

#[test]
fn a_slot_is_found_again_by_name() {
    let bench = Bench::new();
    let slot = bench.slot();
    let name: SlotName = slot.name().to_string().parse().unwrap();
    drop(slot);
    assert!(Slot::list(&bench.pins, &bench.instance).unwrap().iter().eq([&name]));
    assert!(Slot::list(&bench.pins, &InstanceId::random()).unwrap().is_empty());
    let slot = Slot::reopen(&bench.pins, &name).unwrap();
    let server = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    fence(&guest_udp(&slot, &bench), &server);
    // The port is free again once the socket is closed, as after the death of a server.
    assert!(airlock_socket(&slot, AirlockSocket::DnsUdp).is_err());
    drop(server);
    airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap();
    assert_eq!(slot.inner_path().unwrap(), bench.pins.path(&format!("{name}-in")).unwrap());

    bench.pins.unpin(&name.airlock_pin()).unwrap();
    assert!(Slot::reopen(&bench.pins, &name).is_err());
    Slot::named(&bench.pins, name).destroy().unwrap();
    assert!(bench.pin_names().is_empty());
}

#[test]
fn sockets_of_the_airlock_do_not_block_and_close_on_exec() {
    let bench = Bench::new();
    let slot = bench.slot();
    let (_, airlock) = slot.inodes().unwrap();
    for kind in [
        AirlockSocket::DnsUdp,
        AirlockSocket::DnsTcp,
        AirlockSocket::TcpEgress,
        AirlockSocket::FilterLog,
        AirlockSocket::TcpToGuest,
    ] {
        let fd = airlock_socket(&slot, kind).unwrap();
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        assert!(rustix::fs::fcntl_getfl(&fd).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
        assert_eq!(Netns::of_socket(&fd).unwrap().inode().unwrap(), airlock);
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_pool_gives_each_slot_once_and_refills() {
    let bench = Bench::new();
    let pool = Pool::start(Arc::clone(&bench.pins), bench.instance.clone(), filter(&[]), 2, &BTreeSet::new())
        .unwrap();
    eventually("two are ready", || pool.ready().len() == 2);
    let ready: HashSet<_> = pool.ready().into_iter().collect();
    let mut taken = HashSet::new();
    for _ in 0..5 {
        let slot = pool.take().unwrap();
        let server = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
        fence(&guest_udp(&slot, &bench), &server);
        assert!(taken.insert(slot.name().clone()), "given twice");
    }
    assert!(ready.is_subset(&taken));
    eventually("two are ready again", || pool.ready().len() == 2);
    assert_eq!(Slot::list(&bench.pins, &bench.instance).unwrap().len(), 7);
    pool.shutdown();
    let left: HashSet<_> = Slot::list(&bench.pins, &bench.instance).unwrap().into_iter().collect();
    assert_eq!(left, taken, "only what was taken stays");
}

#[test]
fn a_new_pool_removes_what_no_sandbox_of_its_instance_owns() {
    let bench = Bench::new();
    let (owned, lost, half) = (bench.slot(), bench.slot(), bench.slot());
    let foreign = Slot::create(&bench.pins, &InstanceId::random(), &filter(&[])).unwrap();
    bench.pins.unpin(&half.name().inner_pin()).unwrap();
    let canary = Canary::in_netns(&bench.airlock(&lost));
    let keep = BTreeSet::from([owned.name().clone()]);
    let pool = Pool::start(Arc::clone(&bench.pins), bench.instance.clone(), filter(&[]), 0, &keep).unwrap();
    assert_eq!(Slot::list(&bench.pins, &bench.instance).unwrap(), [owned.name().clone()]);
    foreign.inodes().unwrap();
    assert!(canary.ends());
    // A pool of size zero makes what is asked for.
    let slot = pool.take().unwrap();
    slot.inodes().unwrap();
    drop(pool);
    slot.inodes().unwrap();
}

#[test]
fn a_pool_that_cannot_make_slots_says_so_and_stops() {
    let bench = Bench::new();
    let pool = Pool::start(Arc::clone(&bench.pins), bench.instance.clone(), filter(&[]), 1, &BTreeSet::new())
        .unwrap();
    eventually("one is ready", || pool.ready().len() == 1);
    pool.take().unwrap().destroy().unwrap();
    drop(pool);
    assert!(bench.pin_names().is_empty());
}
