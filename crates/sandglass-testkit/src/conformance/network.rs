//! A network that ends at the server. What it lets through in detail is tested with the network itself.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use sandglass_engine::engine::AirlockSocket;
use sandglass_engine::network::GUEST_ADDRESS;
use sandglass_types::SandboxId;

use super::{Fixture, LineAgent};

const ANSWER: Duration = Duration::from_secs(20);

/// What a server of this machine says to whoever reaches it.
const GREETING: &str = "you reached the machine";

/// What a server in the guest says.
const GUEST_SAYS: &str = "from the guest\n";

/// Addresses of this machine: its loopback, and the one that it would reach others from, if there is one.
fn addresses() -> Vec<IpAddr> {
    let mut found = vec![Ipv4Addr::LOCALHOST.into()];
    let probe = UdpSocket::bind("0.0.0.0:0").unwrap();
    // Sends nothing; the address is one for documentation.
    if probe.connect("192.0.2.1:9").is_ok() {
        found.push(probe.local_addr().unwrap().ip());
    }
    found
}

/// Tries to reach a server of this machine from inside, at every address; says at which it was reached.
pub(super) fn reached(agent: &mut LineAgent) -> Vec<IpAddr> {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    listener.set_nonblocking(true).unwrap();
    let mut reached = Vec::new();
    for address in addresses() {
        agent.ask(&format!("busybox timeout 2 busybox nc {address} {port} </dev/null"));
        let answer = loop {
            if let Ok((mut stream, _)) = listener.accept() {
                stream.write_all(GREETING.as_bytes()).unwrap();
            }
            if agent.says_something(Duration::from_millis(10)) {
                break agent.answer().unwrap();
            }
        };
        if answer.contains(GREETING) {
            reached.push(address);
        }
    }
    reached
}

pub(super) fn nothing_of_the_machine_is_reached(fixture: &mut Fixture<'_>) {
    let (_spec, mut agent) = fixture.run();
    assert_eq!(reached(&mut agent), [] as [IpAddr; 0]);
    // Nor by a route that it makes itself.
    agent.sh("busybox route add default gw 10.11.12.1; busybox ifconfig eth0:1 192.168.77.1");
    assert_eq!(reached(&mut agent), [] as [IpAddr; 0]);
}

fn reaches_the_airlock(fixture: &Fixture<'_>, id: &SandboxId, agent: &LineAgent) {
    let socket =
        UdpSocket::from(fixture.engine().airlock_sockets(id, &[AirlockSocket::DnsUdp]).unwrap().remove(0));
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(ANSWER)).unwrap();
    agent.send("busybox timeout 5 busybox nslookup example.com >/dev/null 2>&1 &");
    let mut query = [0; 512];
    let (len, from) = socket.recv_from(&mut query).unwrap();
    assert_eq!(from.ip(), IpAddr::V4(GUEST_ADDRESS));
    assert!(query[..len].windows(7).any(|name| name == b"example"), "{:?}", &query[..len]);
}

pub(super) fn a_guest_has_one_interface_that_ends_at_the_server(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run();
    let interfaces = agent.sh("busybox ifconfig -a");
    assert!(interfaces.contains(&GUEST_ADDRESS.to_string()), "{interfaces}");
    assert_eq!(interfaces.matches("Link encap").count(), 2, "{interfaces}");
    reaches_the_airlock(fixture, &spec.id, &agent);
    // The network is found again by a restarted host, which removes others'.
    drop(agent);
    fixture.reopen();
    let agent = fixture.attach(&spec.id);
    reaches_the_airlock(fixture, &spec.id, &agent);
}

/// A connection to a server in the guest, which the kernel that holds the other end of the link must leave alone.
pub(super) fn a_guest_is_reached_by_the_server_alone(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run();
    agent.send(&format!("echo {} | busybox nc -l -p 7000 > got & server=$!", GUEST_SAYS.trim_end()));
    let to = SocketAddrV4::new(GUEST_ADDRESS, 7000);
    assert_eq!(agent.sh("until busybox netstat -ltn | busybox grep -q :7000; do :; done"), "<0>");
    // From this process's own network, and so from that of any other program.
    let direct = || -> std::io::Result<String> {
        let stream = TcpStream::connect_timeout(&SocketAddr::V4(to), Duration::from_millis(300))?;
        stream.set_read_timeout(Some(Duration::from_millis(300)))?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(line)
    };
    // A proxy of the machine's own may take the connection, but nobody answers it.
    assert_ne!(direct().unwrap_or_default(), GUEST_SAYS);
    let socket = fixture.engine().airlock_sockets(&spec.id, &[AirlockSocket::TcpToGuest]).unwrap().remove(0);
    rustix::io::ioctl_fionbio(&socket, false).unwrap();
    rustix::net::connect(&socket, &to).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(ANSWER)).unwrap();
    stream.write_all(b"from outside\n").unwrap();
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    assert_eq!(line, GUEST_SAYS);
    drop(stream);
    assert_eq!(agent.sh("wait $server; busybox cat got"), "from outside\n<0>");
}
