//! Links, addresses, routes and neighbours, through `NETLINK_ROUTE` (`man 7 rtnetlink`), and what packet filters log,
//! through `NETLINK_NETFILTER`.
//!
//! Nine requests are all that a sandbox needs, so they are written and read here, without an asynchronous runtime
//! in a privileged process.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::net::netdevice::name_to_index;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recvfrom, sendto, socket_with,
};

mod log;
mod message;

pub use log::packet_log;
use message::{Message, Reply, replies};

/// `IFNAMSIZ` less its NUL byte: the longest name of an interface.
pub const MAX_LINK_NAME_LEN: usize = 15;

/// `VETH_INFO_PEER` of `linux/veth.h`.
const VETH_INFO_PEER: u16 = 1;

/// More than the kernel puts into one datagram of a dump.
const RECEIVE_BUFFER_LEN: usize = 64 * 1024;

/// `AF_INET`, as the headers below carry it.
const INET: u8 = 2;

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The far end of a new pair of links.
#[derive(Debug)]
pub struct VethPeer<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its address.
    pub mac: Mac,
    /// The network namespace in which it appears.
    pub netns: BorrowedFd<'a>,
}

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its number in its namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Whether it was set up by an administrator.
    pub up: bool,
    /// Whether the kernel has seen that it carries packets. The end of a pair that is set up first drops what is sent
    /// until then, which is a little after the other end was set up.
    pub operational: bool,
    /// Its address, if it is Ethernet's length.
    pub mac: Option<Mac>,
}

/// A socket to the routing part of the kernel, for the network namespace in which it was opened.
#[derive(Debug)]
pub struct Rtnetlink(Channel);

impl Rtnetlink {
    /// Opens a socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// No descriptor is free, or the kernel is out of memory.
    pub fn open() -> io::Result<Self> {
        // No protocol is protocol 0, which is `NETLINK_ROUTE`.
        Channel::open(None).map(Self)
    }

    /// The number of an interface.
    ///
    /// # Errors
    /// `ENODEV` if there is none of that name.
    pub fn index(&self, name: &str) -> io::Result<u32> {
        Ok(name_to_index(&self.0.socket, checked(name)?)?)
    }

    /// Makes two joined Ethernet interfaces, both down, one here and one in the namespace of `peer`.
    ///
    /// # Errors
    /// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if a name is taken, or no privilege.
    pub fn add_veth(&mut self, name: &str, mac: Mac, peer: &VethPeer<'_>) -> io::Result<()> {
        let netns = u32::try_from(peer.netns.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (name, peer_name) = (terminated(name)?, terminated(peer.name)?);
        let mut message =
            Message::new(libc::RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &link_header(0, 0, 0));
        message.attribute(libc::IFLA_IFNAME, &name).attribute(libc::IFLA_ADDRESS, &mac.0);
        message.nested(libc::IFLA_LINKINFO, |info| {
            info.attribute(libc::IFLA_INFO_KIND, b"veth");
            info.nested(libc::IFLA_INFO_DATA, |data| {
                data.nested(VETH_INFO_PEER, |far| {
                    far.raw(&link_header(0, 0, 0))
                        .attribute(libc::IFLA_IFNAME, &peer_name)
                        .attribute(libc::IFLA_ADDRESS, &peer.mac.0)
                        .attribute(libc::IFLA_NET_NS_FD, &netns.to_ne_bytes());
                });
            });
        });
        self.0.request(message)
    }

    /// Removes an interface, and with it the one that it is joined to.
    ///
    /// # Errors
    /// `ENODEV` if there is none of that number.
    pub fn delete_link(&mut self, index: u32) -> io::Result<()> {
        self.0.request(Message::new(libc::RTM_DELLINK, 0, &link_header(index, 0, 0)))
    }

    /// Sets an interface up.
    ///
    /// # Errors
    /// `ENODEV` if there is none of that number.
    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        const UP: u32 = 1;
        self.0.request(Message::new(libc::RTM_NEWLINK, 0, &link_header(index, UP, UP)))
    }

    /// Gives an interface an address; the network of `prefix_len` bits becomes reachable through it.
    ///
    /// # Errors
    /// [`AlreadyExists`](io::ErrorKind::AlreadyExists), or there is no such interface.
    pub fn add_address(&mut self, index: u32, address: Ipv4Addr, prefix_len: u8) -> io::Result<()> {
        self.change_address(
            libc::RTM_NEWADDR,
            libc::NLM_F_CREATE | libc::NLM_F_EXCL,
            index,
            address,
            prefix_len,
        )
    }

    /// Takes an address away, and with it the routes that came with it: much quicker than removing the interface,
    /// for which the kernel waits until no processor can still be using it.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` if the interface does not have it, `ENODEV` if there is no such interface.
    pub fn delete_address(&mut self, index: u32, address: Ipv4Addr, prefix_len: u8) -> io::Result<()> {
        self.change_address(libc::RTM_DELADDR, 0, index, address, prefix_len)
    }

    fn change_address(
        &mut self,
        kind: u16,
        flags: libc::c_int,
        index: u32,
        address: Ipv4Addr,
        prefix_len: u8,
    ) -> io::Result<()> {
        let [a, b, c, d] = index.to_ne_bytes();
        let header = [INET, prefix_len, 0, libc::RT_SCOPE_UNIVERSE, a, b, c, d];
        let mut message = Message::new(kind, flags, &header);
        message.attribute(libc::IFA_LOCAL, &address.octets()).attribute(libc::IFA_ADDRESS, &address.octets());
        self.0.request(message)
    }

    /// Sends everything without a better route to `gateway`.
    ///
    /// # Errors
    /// The gateway is not reachable through the interface, or there is a default route already.
    pub fn add_default_route(&mut self, index: u32, gateway: Ipv4Addr) -> io::Result<()> {
        let header = [
            INET,
            0,
            0,
            0,
            libc::RT_TABLE_MAIN,
            libc::RTPROT_STATIC,
            libc::RT_SCOPE_UNIVERSE,
            libc::RTN_UNICAST,
            0,
            0,
            0,
            0,
        ];
        let mut message = Message::new(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &header);
        message
            .attribute(libc::RTA_GATEWAY, &gateway.octets())
            .attribute(libc::RTA_OIF, &index.to_ne_bytes());
        self.0.request(message)
    }

    /// Fixes the Ethernet address of a neighbour: it is never asked for, and no answer changes it.
    ///
    /// # Errors
    /// There is no such interface.
    pub fn add_permanent_neighbour(&mut self, index: u32, address: Ipv4Addr, mac: Mac) -> io::Result<()> {
        let [a, b, c, d] = index.to_ne_bytes();
        let [low, high] = libc::NUD_PERMANENT.to_ne_bytes();
        let header = [INET, 0, 0, 0, a, b, c, d, low, high, 0, libc::RTN_UNICAST];
        let mut message = Message::new(libc::RTM_NEWNEIGH, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, &header);
        message.attribute(libc::NDA_DST, &address.octets()).attribute(libc::NDA_LLADDR, &mac.0);
        self.0.request(message)
    }

    /// All interfaces.
    ///
    /// # Errors
    /// The kernel's answer can't be read.
    pub fn links(&mut self) -> io::Result<Vec<Link>> {
        self.dump(libc::RTM_GETLINK, &link_header(0, 0, 0), libc::RTM_NEWLINK, message::link)
    }

    /// All addresses of all interfaces, of both families. Needs no privilege.
    ///
    /// # Errors
    /// The kernel's answer can't be read.
    pub fn addresses(&mut self) -> io::Result<Vec<IpAddr>> {
        // `struct ifaddrmsg`: of every family, on every interface.
        self.dump(libc::RTM_GETADDR, &[0; 8], libc::RTM_NEWADDR, message::address)
    }

    fn dump<T>(
        &mut self,
        question: u16,
        fixed: &[u8],
        answer: u16,
        read: fn(&[u8]) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        let sequence = self.0.send(Message::new(question, libc::NLM_F_DUMP, fixed))?;
        let mut found = Vec::new();
        let mut buffer = vec![0; RECEIVE_BUFFER_LEN];
        loop {
            for reply in replies(self.0.receive(&mut buffer)?, sequence) {
                match reply? {
                    Reply::Data { kind, body } if kind == answer => found.extend(read(body)),
                    Reply::Data { .. } => {}
                    Reply::End(result) => return result.map(|()| found),
                }
            }
        }
    }
}

/// A socket to the kernel, for requests one after the other.
#[derive(Debug)]
struct Channel {
    socket: OwnedFd,
    sequence: u32,
}

impl Channel {
    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        Ok(Self { socket, sequence: 0 })
    }

    fn request(&mut self, message: Message) -> io::Result<()> {
        let sequence = self.send(message)?;
        let mut buffer = [0; 4096];
        loop {
            for reply in replies(self.receive(&mut buffer)?, sequence) {
                if let Reply::End(result) = reply? {
                    return result;
                }
            }
        }
    }

    fn send(&mut self, message: Message) -> io::Result<u32> {
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = message.finish(self.sequence)?;
        sendto(&self.socket, &bytes, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        Ok(self.sequence)
    }

    /// One datagram from the kernel; other processes may send here too, and are not listened to.
    fn receive<'buffer>(&self, buffer: &'buffer mut [u8]) -> io::Result<&'buffer [u8]> {
        loop {
            let (_, len, from) =
                rustix::io::retry_on_intr(|| recvfrom(&self.socket, &mut *buffer, RecvFlags::TRUNC))?;
            let from = from.and_then(|address| SocketAddrNetlink::try_from(address).ok());
            if from.is_some_and(|address| address.pid() == 0) {
                return buffer.get(..len).ok_or_else(message::malformed);
            }
        }
    }
}

fn checked(name: &str) -> io::Result<&str> {
    let valid = (1..=MAX_LINK_NAME_LEN).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    if valid { Ok(name) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, "not a name for a link")) }
}

fn terminated(name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = checked(name)?.as_bytes().to_vec();
    bytes.push(0);
    Ok(bytes)
}

/// `struct ifinfomsg`.
fn link_header(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&change.to_ne_bytes());
    header
}

#[cfg(test)]
mod tests;
