//! Raw Ethernet on one interface, for an engine that has a network stack of its own.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use crate::netlink::Rtnetlink;

/// `SOL_PACKET` of `linux/socket.h`, and an option of `linux/if_packet.h`.
const SOL_PACKET: libc::c_int = 263;
const PACKET_VNET_HDR: libc::c_int = 15;

/// `ETH_P_ALL` of `linux/if_ether.h`, in network order, as the kernel wants it.
const ALL_PROTOCOLS: u16 = 3_u16.to_be();

/// Opens a packet socket on one interface of the calling thread's network namespace: close-on-exec, blocking, with a
/// `virtio_net_hdr` before every frame, so that segments of up to 64 KiB pass whole. It keeps the namespace alive.
///
/// `buffer` is the size of each of its two buffers, in bytes, beyond what unprivileged sockets may have.
///
/// # Errors
/// There is no such interface, or no privilege.
pub fn open(interface: &str, buffer: u32) -> io::Result<OwnedFd> {
    let index = Rtnetlink::open()?.index(interface)?;
    let index = i32::try_from(index).map_err(io::Error::other)?;
    // Without a protocol it receives nothing until it is bound; also, to change the protocol later would make the
    // kernel wait for a grace period.
    // SAFETY: takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    set(&socket, SOL_PACKET, PACKET_VNET_HDR, 1)?;
    let buffer = libc::c_int::try_from(buffer).unwrap_or(libc::c_int::MAX);
    set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, buffer)?;
    set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, buffer)?;
    bind(&socket, index)?;
    Ok(socket)
}

fn set(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let len = length_of::<libc::c_int>();
    // SAFETY: the pointer is to a live local of the length that is given.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn bind(socket: &OwnedFd, index: i32) -> io::Result<()> {
    // SAFETY: all of it is numbers, for which zero is a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    address.sll_protocol = ALL_PROTOCOLS;
    address.sll_ifindex = index;
    let len = length_of::<libc::sockaddr_ll>();
    // SAFETY: the pointer is to a live local of the length that is given.
    let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sizes of small types of the C library.
#[allow(clippy::cast_possible_truncation, reason = "these types have a few bytes")]
const fn length_of<T>() -> libc::socklen_t {
    size_of::<T>() as libc::socklen_t
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use rustix::fd::AsFd as _;

    use super::*;
    use crate::namespace::Netns;

    /// Needs root, as all that makes namespaces does.
    #[test]
    fn frames_of_its_interface_arrive_with_a_header_and_no_others_do() {
        let netns = Netns::create().unwrap();
        let socket = netns
            .run(|| {
                let mut netlink = Rtnetlink::open().unwrap();
                netlink.set_up(netlink.index("lo").unwrap()).unwrap();
                let missing = open("eth0", 1 << 20).unwrap_err();
                assert_eq!(missing.raw_os_error(), Some(libc::ENODEV));
                let socket = open("lo", 1 << 20).unwrap();
                UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"to myself", "127.0.0.1:9").unwrap();
                socket
            })
            .unwrap();
        assert_eq!(Netns::of_socket(&socket).unwrap().inode().unwrap(), netns.inode().unwrap());
        // The kernel doubles what it is told, for its own bookkeeping.
        assert_eq!(rustix::net::sockopt::socket_recv_buffer_size(&socket).unwrap(), 2 << 20);
        assert_eq!(rustix::net::sockopt::socket_send_buffer_size(&socket).unwrap(), 2 << 20);
        let mut frame = [0; 2048];
        let flags = rustix::net::RecvFlags::DONTWAIT;
        let (_, len) = rustix::net::recv(socket.as_fd(), &mut frame[..], flags).unwrap();
        // 10 bytes of `virtio_net_hdr`, 14 of Ethernet, 20 of IPv4, 8 of UDP.
        assert_eq!(&frame[10 + 14 + 20 + 8..len], b"to myself");
    }
}
