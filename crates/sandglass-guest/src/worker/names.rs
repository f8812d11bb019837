//! Addresses of names. The C library's way loads plug-ins of the guest's image and is not even linked, so the one question that is
//! asked here is asked by hand.

use std::fs::File;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::time::timeout;

/// Most that is read of a file of settings, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// How long one question may wait, and how often it is asked.
const WAIT: Duration = Duration::from_secs(2);
const TRIES: usize = 3;

/// A question for an address of IPv4: its type and its class (RFC 1035, 3.2.2 and 3.2.4).
const ADDRESS: [u8; 4] = [0, 1, 0, 1];

/// Bytes of a header, before the question.
const HEADER: usize = 12;

/// The address of a name, or of an address.
///
/// # Errors
/// Nobody knows it.
pub(super) async fn address(name: &str) -> io::Result<IpAddr> {
    if let Ok(address) = name.parse() {
        return Ok(address);
    }
    let hosts = read("/etc/hosts");
    if let Some(address) = in_hosts(&hosts, name) {
        return Ok(address);
    }
    let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("{name} has no address"));
    let query = query(name).ok_or_else(unknown)?;
    let servers = servers(&read("/etc/resolv.conf"));
    for _ in 0..TRIES {
        for server in &servers {
            if let Ok(Ok(answer)) = timeout(WAIT, ask(*server, &query)).await {
                return found(&answer).map(IpAddr::V4).ok_or_else(unknown);
            }
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("no name server told the address of {name}")))
}

fn read(path: &str) -> String {
    let mut text = Vec::new();
    let _ = File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut text));
    String::from_utf8_lossy(&text).into_owned()
}

fn in_hosts(hosts: &str, name: &str) -> Option<IpAddr> {
    hosts.lines().find_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let address = words.next()?.parse().ok()?;
        words.any(|word| word.eq_ignore_ascii_case(name)).then_some(address)
    })
}

fn servers(settings: &str) -> Vec<SocketAddr> {
    let address = |line: &str| line.strip_prefix("nameserver")?.trim().parse::<IpAddr>().ok();
    settings.lines().filter_map(address).map(|address| SocketAddr::new(address, 53)).collect()
}

/// The question, if it is a name at all.
fn query(name: &str) -> Option<Vec<u8>> {
    // One question, to be asked of others if need be. Nobody but the server that was asked can answer: the socket is connected.
    let mut query = vec![0x5a, 0x47, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.trim_end_matches('.').split('.') {
        let len = u8::try_from(label.len()).ok().filter(|len| (1..=63).contains(len))?;
        query.push(len);
        query.extend_from_slice(label.as_bytes());
    }
    query.push(0);
    query.extend_from_slice(&ADDRESS);
    (query.len() <= HEADER + 255 + ADDRESS.len()).then_some(query)
}

async fn ask(server: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = if server.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        "::".parse().map_err(io::Error::other)?
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut answer = vec![0; 4096];
    loop {
        let len = socket.recv(&mut answer).await?;
        if len >= HEADER && answer[..2] == query[..2] && answer[2] & 0x80 != 0 {
            answer.truncate(len);
            return Ok(answer);
        }
    }
}

/// The first address in an answer.
fn found(answer: &[u8]) -> Option<Ipv4Addr> {
    let number = |at: usize| Some(u16::from_be_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    let (questions, answers) = (number(4)?, number(6)?);
    let mut at = HEADER;
    for _ in 0..questions {
        at = after_name(answer, at)? + ADDRESS.len();
    }
    for _ in 0..answers {
        at = after_name(answer, at)?;
        let (head, len) = (answer.get(at..at + 4)?, usize::from(number(at + 8)?));
        let data = answer.get(at + 10..at + 10 + len)?;
        if head == ADDRESS
            && let Ok(address) = <[u8; 4]>::try_from(data)
        {
            return Some(address.into());
        }
        at += 10 + len;
    }
    None
}

/// Where a name has its end: at a label without length, or at a reference to another place.
fn after_name(answer: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *answer.get(at)? {
            0 => return Some(at + 1),
            reference if reference >= 0xc0 => return Some(at + 2),
            len => at += 1 + usize::from(len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_understood() {
        let hosts = "# 10.0.0.9 a\n127.0.0.1\tlocalhost  here # there\n\nx y\n::1 localhost";
        assert_eq!(in_hosts(hosts, "HERE"), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!((in_hosts(hosts, "there"), in_hosts(hosts, "a")), (None, None));
        let servers = servers("search x\nnameserver 169.254.1.1\nnameserver \t::1\nnameserver x\noptions y");
        assert_eq!(servers, ["169.254.1.1:53".parse().unwrap(), "[::1]:53".parse().unwrap()]);
    }

    #[test]
    fn an_address_is_found_behind_other_names() {
        let query = query("models.internal").unwrap();
        assert_eq!(&query[HEADER..], b"\x06models\x08internal\0\0\x01\0\x01");
        let mut answer = query.clone();
        (answer[2], answer[7]) = (0x81, 2);
        answer.extend_from_slice(b"\xc0\x0c\0\x05\0\x01\0\0\0\x3c\0\x04\x01a\xc0\x0c");
        answer.extend_from_slice(b"\x01a\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\xa9\xfe\x01\x02");
        assert_eq!(found(&answer), Some(Ipv4Addr::new(169, 254, 1, 2)));
        for len in 0..answer.len() {
            assert_eq!(found(&answer[..len]), None, "{len}");
        }
        answer[7] = 0;
        assert_eq!(found(&answer), None);
    }

    #[test]
    fn what_is_no_name_is_not_asked_for() {
        for name in ["", ".", "a..b", &"x".repeat(64), &"x.".repeat(200)] {
            assert_eq!(query(name), None, "{name}");
        }
        assert!(query("a.b.").is_some());
    }
}
