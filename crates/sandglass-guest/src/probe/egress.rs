//! Attempts to get something out of the sandbox, side by side.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, Protocol, RawProtocol, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with,
};
use sandglass_proto::leak::Leak;

use super::{Attack, argument, tell};

/// By name.
pub(super) const ATTACKS: &[(&str, Attack)] = &[("egress", egress)];

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(2);

/// How long nothing may arrive before it is believed that nothing will. What was sent is on its way by then.
const SILENCE: Duration = Duration::from_millis(500);

/// Most that is read of an answer, in bytes.
const MAX_ANSWER: usize = 64 << 10;

/// Between two pieces of a stream.
const PACE: Duration = Duration::from_millis(20);

/// How many connections of a flood are tried at a time.
const FLOOD_WIDTH: u32 = 32;

/// How long a flood lasts after its last connection.
const FLOOD_REST: Duration = Duration::from_secs(1);

/// Tries all at once. How each went is printed in their order, as JSON: for people, since only a witness outside knows.
fn egress(args: &[String]) -> io::Result<()> {
    let leaks: Vec<Leak> = serde_json::from_str(argument(args, 0)?)?;
    tell(&serde_json::to_vec(&all(&leaks))?)
}

fn all(leaks: &[Leak]) -> Vec<String> {
    thread::scope(|scope| {
        let started: Vec<_> =
            leaks.iter().map(|leak| thread::Builder::new().spawn_scoped(scope, || attempt(leak))).collect();
        let ended = started.into_iter().map(|started| {
            let outcome =
                started.and_then(|thread| thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into())));
            outcome.unwrap_or_else(|error| error.to_string())
        });
        ended.collect()
    })
}

fn attempt(leak: &Leak) -> io::Result<String> {
    match leak {
        Leak::Tcp { to, send, one_by_one } => tcp(address(to)?, send, *one_by_one),
        Leak::Udp { to, send } => udp(address(to)?, send),
        Leak::Ping { to, send } => {
            let socket = socket(SocketType::DGRAM, ipproto::ICMP)?;
            // An echo request; the kernel fills in the checksum and what stands for the socket.
            let message = [&[8, 0, 0, 0, 0, 0, 0, 1], send.as_slice()].concat();
            give(&socket, *to, &message)
        }
        Leak::Raw { to, protocol, send } => {
            let number = RawProtocol::new(u32::from(*protocol)).ok_or(io::ErrorKind::InvalidInput)?;
            give(&socket(SocketType::RAW, Protocol::from_raw(number))?, *to, send)
        }
        Leak::Stream { to, send, millis } => stream(*to, send, Duration::from_millis((*millis).into())),
        Leak::Flood { to, send, count } => flood(*to, send, *count),
    }
}

fn tcp(to: SocketAddr, send: &[u8], one_by_one: bool) -> io::Result<String> {
    let mut connection = TcpStream::connect_timeout(&to, CONNECT)?;
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(SILENCE))?;
    for piece in send.chunks(if one_by_one { 1 } else { send.len().max(1) }) {
        connection.write_all(piece)?;
    }
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    let end = loop {
        match connection.read(&mut buffer) {
            Ok(0) => break "closed".to_owned(),
            Ok(_) if answer.len() >= MAX_ANSWER => break "without end".to_owned(),
            Ok(len) => answer.extend_from_slice(buffer.get(..len).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break "silent".to_owned(),
            Err(error) => break error.to_string(),
        }
    };
    let first = answer.split(|byte| *byte == b'\r' || *byte == b'\n').next().unwrap_or_default();
    Ok(format!(
        "{} bytes came ({}), then {end}",
        answer.len(),
        first.get(..80).unwrap_or(first).escape_ascii()
    ))
}

fn udp(to: SocketAddr, send: &[u8]) -> io::Result<String> {
    let any: SocketAddr =
        if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" }.parse().map_err(io::Error::other)?;
    let socket = UdpSocket::bind(any)?;
    socket.set_broadcast(true)?;
    socket.set_read_timeout(Some(SILENCE))?;
    socket.send_to(send, to)?;
    let mut buffer = [0; 1500];
    let (len, _) = socket.recv_from(&mut buffer)?;
    Ok(format!("{len} bytes came: {}", buffer.get(..len).unwrap_or_default().escape_ascii()))
}

fn socket(kind: SocketType, protocol: Protocol) -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::INET, kind, SocketFlags::CLOEXEC, Some(protocol))?)
}

fn give(socket: &OwnedFd, to: Ipv4Addr, bytes: &[u8]) -> io::Result<String> {
    sendto(socket, bytes, SendFlags::empty(), &SocketAddrV4::new(to, 0))?;
    Ok("sent".to_owned())
}

fn stream(to: SocketAddr, send: &[u8], long: Duration) -> io::Result<String> {
    let end = Instant::now() + long;
    let (mut sent, mut ended) = (0_u32, 0_u32);
    while Instant::now() < end {
        if let Ok(mut connection) = TcpStream::connect_timeout(&to, CONNECT) {
            connection.set_nodelay(true)?;
            while Instant::now() < end && connection.write_all(send).is_ok() {
                sent += 1;
                thread::sleep(PACE);
            }
            ended += 1;
        }
        thread::sleep(PACE);
    }
    Ok(format!("{sent} times, over {ended} connections"))
}

fn flood(to: SocketAddr, send: &[u8], count: u32) -> io::Result<String> {
    let width = FLOOD_WIDTH.min(count).max(1);
    let open: Vec<TcpStream> = thread::scope(|scope| {
        let share = |index| count / width + u32::from(index < count % width);
        let workers: Vec<_> = (0..width)
            .map(|index| {
                thread::Builder::new().spawn_scoped(scope, move || {
                    let made = (0..share(index)).filter_map(|_| {
                        let mut connection = TcpStream::connect_timeout(&to, CONNECT).ok()?;
                        connection.write_all(send).ok()?;
                        Some(connection)
                    });
                    made.collect::<Vec<_>>()
                })
            })
            .collect();
        workers.into_iter().flatten().filter_map(|worker| worker.join().ok()).flatten().collect()
    });
    thread::sleep(FLOOD_REST);
    Ok(format!("{} of {count} were made", open.len()))
}

/// Reads an address as programs do that do not care which notation they get.
fn address(text: &str) -> io::Result<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let invalid = || io::Error::new(io::ErrorKind::InvalidInput, format!("{text:?} is no address"));
    let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
    let port = port.parse().map_err(|_| invalid())?;
    Ok(SocketAddr::from((aton(host).ok_or_else(invalid)?, port)))
}

/// `inet_aton(3)`, of which Rust has none: one to four numbers, each decimal, octal or hexadecimal.
fn aton(text: &str) -> Option<Ipv4Addr> {
    let number = |part: &str| match part.strip_prefix("0x").or_else(|| part.strip_prefix("0X")) {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None if part.len() > 1 && part.starts_with('0') => u32::from_str_radix(part, 8).ok(),
        None => part.parse().ok(),
    };
    let parts: Vec<u32> = text.split('.').map(number).collect::<Option<_>>()?;
    let (last, first) = parts.split_last()?;
    // The last one fills what the others leave.
    let left = 32_u32.checked_sub(8 * u32::try_from(first.len()).ok()?).filter(|left| *left >= 8)?;
    if first.iter().any(|part| *part > 0xff) || u64::from(*last) >> left != 0 {
        return None;
    }
    let high = first.iter().enumerate().fold(0, |high, (index, part)| high | part << (24 - 8 * index));
    Some(Ipv4Addr::from_bits(high | last))
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, TcpListener};

    use super::*;

    #[test]
    fn addresses_are_read_in_every_notation() {
        let metadata: IpAddr = "169.254.169.254".parse().unwrap();
        for text in [
            "169.254.169.254",
            "2852039166",
            "0xa9fea9fe",
            "0XA9FEA9FE",
            "025177524776",
            "169.254.43518",
            "169.16689662",
            "0251.0376.0251.0376",
            "0xa9.0xfe.169.254",
        ] {
            assert_eq!(address(&format!("{text}:80")).unwrap(), SocketAddr::from((metadata, 80)), "{text}");
        }
        assert_eq!(address("[::1]:80").unwrap(), "[::1]:80".parse().unwrap());
        for text in [
            "",
            ":80",
            "1.2.3.4",
            "1.2.3.4.5:80",
            "1.2.3.256:80",
            "256.1:80",
            "1.16777216:80",
            "a:80",
            "4294967296:80",
        ] {
            assert!(address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn attempts_are_made_side_by_side_and_told_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let leaks = [
            Leak::Tcp { to: to.to_string(), send: b"one".to_vec(), one_by_one: true },
            Leak::Udp { to: "no address".to_owned(), send: Vec::new() },
            Leak::Flood { to, send: b"two".to_vec(), count: 3 },
            Leak::Stream { to, send: Vec::new(), millis: 1 },
        ];
        let said = all(&leaks);
        assert_eq!(said.len(), leaks.len());
        assert_eq!(said[1..3], ["\"no address\" is no address", "3 of 3 were made"]);
        assert!(said[3].ends_with("over 1 connections"), "{said:?}");
        let mut all: Vec<String> = (0..5)
            .map(|_| {
                let mut text = String::new();
                listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
                text
            })
            .collect();
        all.sort();
        assert_eq!(all, ["", "one", "two", "two", "two"]);
        assert!(egress(&["nonsense".to_owned()]).is_err());
    }
}
