//! Who says what arrived: by a word that was made for one attempt and is known to nobody else.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, UdpSocket};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rand::RngExt as _;
use rustix::net::{
    AddressFamily, Protocol, RawProtocol, SocketFlags, SocketType, bind, listen, socket_with, sockopt,
};
use sandglass_linux::namespace::Netns;
use sandglass_linux::{nft, packet, redirect};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use super::names;

/// What all words begin with, so that they are found in anything.
const MARK: &[u8] = b"sgnonce";

/// Length of a word, in bytes. It fits in a label of a name.
const NONCE_LEN: usize = 24;

/// Where the witness listens in a namespace of which all packets are for it. No probe tries these ports.
const TCP_PORT: u16 = 15_900;
const TCP6_PORT: u16 = 15_901;
const DNS_PORT: u16 = 15_953;

/// DNS where everybody expects it.
const DOMAIN: u16 = 53;

const BACKLOG: i32 = 4096;

/// Protocols of IP that are listened to, beside TCP: ICMP, IPIP, UDP, GRE, ESP, ICMPv6, SCTP, UDP-Lite, and one for
/// experiments (RFC 3692).
const PROTOCOLS: [u8; 8] = [1, 4, 17, 47, 50, 132, 136, 253];
const PROTOCOLS_V6: [u8; 3] = [17, 58, 253];

/// How long a connection may be silent before its witness leaves it.
const SILENCE: Duration = Duration::from_secs(30);

/// Buffer of a socket for frames, in bytes.
const LINK_BUFFER: u32 = 1 << 20;

/// Longest packet.
const MAX_PACKET: usize = 64 << 10;

/// A word of one attempt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in super::super) struct Nonce(String);

impl fmt::Display for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What is known of a word.
#[derive(Debug, Clone)]
pub(in super::super) struct Sighting {
    /// Where it was seen first.
    pub(in super::super) place: String,
    /// When anything was last seen on one of its connections.
    pub(in super::super) last: Instant,
    /// How many connections on which it was seen are open.
    pub(in super::super) open: usize,
    /// How many were open at once.
    pub(in super::super) most: usize,
}

/// Remembers which words arrived.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Witness(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// The words that were given out, with what was seen of them.
    words: Mutex<HashMap<Nonce, Option<Sighting>>>,
    /// How often the name was asked for that leads elsewhere each time.
    turns: AtomicUsize,
}

/// Listens until it is dropped.
#[derive(Debug)]
pub(in super::super) struct Post {
    _tasks: JoinSet<()>,
}

impl Witness {
    /// A new word.
    pub(in super::super) fn nonce(&self) -> Nonce {
        let mut rng = rand::rng();
        let mark = String::from_utf8_lossy(MARK);
        let random = (MARK.len()..NONCE_LEN).map(|_| char::from(b'a' + rng.random_range(0..26)));
        let nonce = Nonce(mark.chars().chain(random).collect());
        self.words().insert(nonce.clone(), None);
        nonce
    }

    /// What was seen of a word.
    pub(in super::super) fn saw(&self, nonce: &Nonce) -> Option<Sighting> {
        self.words().get(nonce).cloned().flatten()
    }

    /// Makes a namespace whose packets, whatever they are and wherever they are for, end here. `link` is where they
    /// arrive; the rules that were there are gone.
    pub(in super::super) fn take_all(&self, netns: &Netns, link: &str) -> anyhow::Result<Post> {
        nft::apply(netns, &rules(link)).context("the packets of a namespace could not be taken")?;
        let sockets = netns.run(|| {
            open_up(link)?;
            let mut sockets = Sockets::default();
            sockets.tcp.push(listener(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, TCP_PORT).into())?);
            sockets.tcp.push(listener(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, TCP6_PORT, 0, 0).into())?);
            sockets.add_dns(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, DNS_PORT).into())?;
            sockets.add_raw()?;
            Ok::<_, io::Error>(sockets)
        })??;
        self.post(sockets)
    }

    /// Listens in a namespace as it is to what passes its filter, apart from TCP and DNS, which the server takes there.
    pub(in super::super) fn overhear(&self, netns: &Netns) -> anyhow::Result<Post> {
        let sockets = netns.run(|| {
            let mut sockets = Sockets::default();
            sockets.add_raw().map(|()| sockets)
        })??;
        self.post(sockets)
    }

    /// Looks at every frame on a link of which nobody else should know.
    pub(in super::super) fn watch(&self, netns: &Netns, link: &str) -> anyhow::Result<Post> {
        let sockets = netns.run(|| {
            let socket = packet::open(link, LINK_BUFFER)?;
            rustix::io::ioctl_fionbio(&socket, true)?;
            let mut sockets = Sockets::default();
            sockets.raw.push((None, socket.into()));
            Ok::<_, io::Error>(sockets)
        })??;
        self.post(sockets)
    }

    /// Listens on ports of all addresses of a namespace.
    pub(super) fn serve(&self, netns: &Netns, ports: &[u16]) -> anyhow::Result<Post> {
        let sockets = netns.run(|| {
            let mut sockets = Sockets::default();
            for port in ports {
                sockets.tcp.push(listener(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, *port).into())?);
                sockets.tcp.push(listener(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, *port, 0, 0).into())?);
            }
            Ok::<_, io::Error>(sockets)
        })??;
        self.post(sockets)
    }

    fn post(&self, sockets: Sockets) -> anyhow::Result<Post> {
        let mut tasks = JoinSet::new();
        for socket in sockets.tcp {
            let listener = tokio::net::TcpListener::from_std(socket)?;
            tasks.spawn(self.clone().accept(listener, Service::Anything));
        }
        for (udp, tcp) in sockets.dns {
            let listener = tokio::net::TcpListener::from_std(tcp)?;
            tasks.spawn(self.clone().accept(listener, Service::Dns));
            tasks.spawn(self.clone().answer(tokio::net::UdpSocket::from_std(udp)?));
        }
        for (protocol, socket) in sockets.raw {
            tasks.spawn(self.clone().overhear_one(protocol, tokio::net::UdpSocket::from_std(socket)?));
        }
        Ok(Post { _tasks: tasks })
    }

    async fn accept(self, listener: tokio::net::TcpListener, service: Service) {
        let mut connections = JoinSet::new();
        // The listener fails for lack of descriptors at most, and then all that follows is seen by nobody: no verdict
        // comes of that, since the attempt that shows that the way is open fails, too.
        while let Ok((connection, _)) = listener.accept().await {
            while connections.try_join_next().is_some() {}
            connections.spawn(self.clone().hear(connection, service));
        }
    }

    async fn hear(self, mut connection: tokio::net::TcpStream, service: Service) {
        let place = match redirect::original_destination(&connection) {
            Ok(to) => format!("TCP to {to}"),
            Err(_) => connection.local_addr().map_or_else(|_| "TCP".into(), |to| format!("TCP to {to}")),
        };
        let mut open = Open { witness: &self, nonces: Vec::new() };
        let mut heard = Vec::new();
        let mut buffer = vec![0; 4096];
        while let Ok(Ok(len @ 1..)) = tokio::time::timeout(SILENCE, connection.read(&mut buffer)).await {
            heard.extend_from_slice(&buffer[..len]);
            open.note(&heard, &place);
            let answer = match service {
                Service::Dns => heard.get(2..).and_then(|query| framed(self.names(query)?)),
                // So that who asks by HTTP does not wait.
                Service::Anything => heard.ends_with(b"\r\n\r\n").then(|| OK.to_vec()),
            };
            if let Some(answer) = answer
                && connection.write_all(&answer).await.is_err()
            {
                break;
            }
            // A word may be cut by the next read, and is in no more than this.
            heard.drain(..heard.len().saturating_sub(MAX_PACKET));
        }
    }

    async fn answer(self, socket: tokio::net::UdpSocket) {
        let mut buffer = vec![0; MAX_PACKET];
        loop {
            // An error is of one that asked before and is gone.
            let Ok((len, from)) = socket.recv_from(&mut buffer).await else { continue };
            let query = &buffer[..len];
            self.note(query, "DNS");
            if let Some(answer) = self.names(query) {
                let _lost = socket.send_to(&answer, from).await;
            }
        }
    }

    async fn overhear_one(self, protocol: Option<u8>, socket: tokio::net::UdpSocket) {
        let mut buffer = vec![0; MAX_PACKET];
        let place = protocol.map_or_else(
            || "a frame on the link of another sandbox".to_owned(),
            |protocol| format!("protocol {protocol} of IP"),
        );
        loop {
            // An error is of something that was sent here before, and says nothing of the next packet.
            let Ok(len) = socket.recv(&mut buffer).await else { continue };
            let packet = &buffer[..len];
            if !protocol.is_some_and(|protocol| is_dns(protocol, packet)) {
                self.note(packet, &place);
            }
        }
    }

    fn names(&self, query: &[u8]) -> Option<Vec<u8>> {
        names::answer(query, &self.0.turns)
    }

    fn note(&self, bytes: &[u8], place: &str) -> Vec<Nonce> {
        let found = nonces(bytes);
        if !found.is_empty() {
            let mut words = self.words();
            for nonce in &found {
                if let Some(word) = words.get_mut(nonce) {
                    let last = Instant::now();
                    word.get_or_insert_with(|| Sighting {
                        place: place.to_owned(),
                        last,
                        open: 0,
                        most: 0,
                    })
                    .last = last;
                }
            }
        }
        found
    }

    fn words(&self) -> MutexGuard<'_, HashMap<Nonce, Option<Sighting>>> {
        self.0.words.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a listener is for.
#[derive(Debug, Clone, Copy)]
enum Service {
    Dns,
    Anything,
}

/// The words that were seen on a connection, which are so on an open one until this is dropped.
struct Open<'a> {
    witness: &'a Witness,
    nonces: Vec<Nonce>,
}

impl Open<'_> {
    fn note(&mut self, heard: &[u8], place: &str) {
        for nonce in self.witness.note(heard, place) {
            if !self.nonces.contains(&nonce) {
                if let Some(Some(sighting)) = self.witness.words().get_mut(&nonce) {
                    sighting.open += 1;
                    sighting.most = sighting.most.max(sighting.open);
                }
                self.nonces.push(nonce);
            }
        }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let mut words = self.witness.words();
        for nonce in &self.nonces {
            if let Some(Some(sighting)) = words.get_mut(nonce) {
                sighting.open -= 1;
            }
        }
    }
}

/// Sockets that were made in a namespace.
#[derive(Debug, Default)]
struct Sockets {
    tcp: Vec<TcpListener>,
    dns: Vec<(UdpSocket, TcpListener)>,
    /// Packets of a protocol of IP, or all frames. To a runtime a socket for datagrams is one, whatever is in them.
    raw: Vec<(Option<u8>, UdpSocket)>,
}

impl Sockets {
    fn add_dns(&mut self, address: SocketAddr) -> io::Result<()> {
        let udp = UdpSocket::bind(address)?;
        udp.set_nonblocking(true)?;
        self.dns.push((udp, listener(address)?));
        Ok(())
    }

    fn add_raw(&mut self) -> io::Result<()> {
        let v4 = PROTOCOLS.map(|protocol| (AddressFamily::INET, protocol));
        let v6 = PROTOCOLS_V6.map(|protocol| (AddressFamily::INET6, protocol));
        for (family, protocol) in v4.into_iter().chain(v6) {
            let number = RawProtocol::new(protocol.into()).map(Protocol::from_raw);
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            self.raw.push((Some(protocol), socket_with(family, SocketType::RAW, flags, number)?.into()));
        }
        Ok(())
    }
}

fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Lets packets in that a host has no use for: with sources to which there is no way, with sums that nobody checks here,
/// and of IPv6.
fn open_up(link: &str) -> io::Result<()> {
    let settings = [
        ("ipv4/conf/all/rp_filter".to_owned(), "0"),
        (format!("ipv4/conf/{link}/rp_filter"), "0"),
        ("ipv4/icmp_echo_ignore_all".to_owned(), "1"),
        ("netfilter/nf_conntrack_checksum".to_owned(), "0"),
        (format!("ipv6/conf/{link}/accept_dad"), "0"),
        ("ipv6/conf/all/disable_ipv6".to_owned(), "0"),
        (format!("ipv6/conf/{link}/disable_ipv6"), "0"),
    ];
    for (name, value) in settings {
        match fs_err::write(format!("/proc/sys/net/{name}"), value) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
    }
    Ok(())
}

/// The rules of a namespace whose every packet is for the witness.
fn rules(link: &str) -> String {
    format!(
        r#"flush ruleset
table inet witness {{
	chain redirection {{
		type nat hook prerouting priority -100; policy accept;
		iifname != "{link}" accept
		udp dport {DOMAIN} redirect to :{DNS_PORT}
		tcp dport {DOMAIN} redirect to :{DNS_PORT}
		meta nfproto ipv4 meta l4proto tcp redirect to :{TCP_PORT}
		meta nfproto ipv6 meta l4proto tcp redirect to :{TCP6_PORT}
		redirect
	}}
}}
"#
    )
}

/// Whether a packet is a query to a name service, which is there for queries: the name service itself says what came out
/// of it.
fn is_dns(protocol: u8, packet: &[u8]) -> bool {
    const UDP: u8 = 17;
    // Of IPv4 the header is there, of IPv6 it is not.
    let header = match packet.first() {
        Some(first) if first >> 4 == 4 => usize::from(first & 15) * 4,
        _ => 0,
    };
    let port = packet.get(header + 2..header + 4).map(|port| u16::from_be_bytes([port[0], port[1]]));
    protocol == UDP && (port == Some(DOMAIN) || port == Some(DNS_PORT))
}

/// All words in there, whatever the case.
fn nonces(bytes: &[u8]) -> Vec<Nonce> {
    let mut found = Vec::new();
    for window in bytes.windows(NONCE_LEN) {
        if window[..MARK.len()].eq_ignore_ascii_case(MARK) && window.iter().all(u8::is_ascii_alphabetic) {
            found.push(Nonce(String::from_utf8_lossy(window).to_ascii_lowercase()));
        }
    }
    found
}

/// A message of DNS, as it goes over TCP.
fn framed(message: Vec<u8>) -> Option<Vec<u8>> {
    let len = u16::try_from(message.len()).ok()?;
    Some([len.to_be_bytes().to_vec(), message].concat())
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_anything() {
        let witness = Witness::default();
        let (first, second) = (witness.nonce(), witness.nonce());
        assert_ne!(first, second);
        assert_eq!(first.to_string().len(), NONCE_LEN);
        let bytes = format!("\0x{}\u{1}sgnonce..{first}.example\0", second.to_string().to_uppercase());
        assert_eq!(nonces(bytes.as_bytes()), [second.clone(), first.clone()]);
        assert!(witness.saw(&first).is_none());
        let mut open = Open { witness: &witness, nonces: Vec::new() };
        open.note(bytes.as_bytes(), "here");
        open.note(bytes.as_bytes(), "there");
        let seen = witness.saw(&first).unwrap();
        assert_eq!((seen.place.as_str(), seen.open, seen.most), ("here", 1, 1));
        drop(open);
        assert_eq!(witness.saw(&second).unwrap().open, 0);
        // Another's word is nobody's.
        let strange = Witness::default().nonce();
        witness.note(strange.to_string().as_bytes(), "here");
        assert!(witness.saw(&strange).is_none());
    }

    #[test]
    fn queries_are_told_from_other_packets() {
        let packet = |port: u16| {
            let mut packet = [0; 28];
            packet[0] = 0x45;
            packet[22..24].copy_from_slice(&port.to_be_bytes());
            packet
        };
        assert!(is_dns(17, &packet(53)));
        assert!(!is_dns(17, &packet(123)));
        assert!(!is_dns(132, &packet(53)));
        assert!(is_dns(17, &[0, 9, 0, 53]) && !is_dns(17, &[]));
    }
}
