//! What the packet filter of a namespace logs, through `NETLINK_NETFILTER` (`linux/netfilter/nfnetlink_log.h`).

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::ioctl_fionbio;
use rustix::net::netlink::NETFILTER;
use rustix::net::sockopt::set_socket_recv_buffer_size;

use super::Channel;
use super::message::Message;

/// `NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_CONFIG`.
const CONFIGURE: u16 = 4 << 8 | 1;

/// Attributes of it.
const NFULA_CFG_CMD: u16 = 1;
const NFULA_CFG_MODE: u16 = 2;
const NFULA_CFG_TIMEOUT: u16 = 4;
const NFULA_CFG_FLAGS: u16 = 6;

const NFULNL_CFG_CMD_BIND: u8 = 1;
const NFULNL_COPY_PACKET: u8 = 2;
const NFULNL_CFG_F_SEQ: u16 = 1;

/// How long a packet may wait to be told together with others, in hundredths of a second.
const DELAY: u32 = 10;

/// Opens a socket on which the first bytes of each packet arrive that rules of the calling thread's network namespace log
/// to `group`: at most `most` of each, numbered without a gap from 0. Close-on-exec, not blocking. What does not fit in
/// `buffer` bytes is not told, but has had its numbers. To receive takes no privilege. It keeps the namespace alive.
///
/// # Errors
/// No privilege, another socket has the group, or the kernel has no such log.
pub fn packet_log(group: u16, most: u32, buffer: usize) -> io::Result<OwnedFd> {
    let mut channel = Channel::open(Some(NETFILTER))?;
    set_socket_recv_buffer_size(&channel.socket, buffer)?;
    let [high, low] = group.to_be_bytes();
    // `struct nfgenmsg`: of every family, version 0.
    let mut bind = Message::new(CONFIGURE, 0, &[0, 0, high, low]);
    let [a, b, c, d] = most.to_be_bytes();
    bind.attribute(NFULA_CFG_CMD, &[NFULNL_CFG_CMD_BIND])
        .attribute(NFULA_CFG_MODE, &[a, b, c, d, NFULNL_COPY_PACKET, 0])
        .attribute(NFULA_CFG_FLAGS, &NFULNL_CFG_F_SEQ.to_be_bytes())
        .attribute(NFULA_CFG_TIMEOUT, &DELAY.to_be_bytes());
    channel.request(bind)?;
    ioctl_fionbio(&channel.socket, true)?;
    Ok(channel.socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::time::{Duration, Instant};

    use rustix::net::{RecvFlags, recv};

    use super::*;
    use crate::namespace::Netns;
    use crate::netlink::Rtnetlink;
    use crate::nft;

    /// Needs root, as all that makes namespaces does.
    #[test]
    fn what_rules_log_arrives_once_the_group_is_bound() {
        let netns = Netns::create().unwrap();
        let rules = "table inet test { chain input { type filter hook input priority 0;
            tcp dport 99 log prefix \"refused\" group 7 reject with tcp reset;
        }
        }";
        nft::apply(&netns, rules).unwrap();
        let socket = netns
            .run(|| {
                let mut netlink = Rtnetlink::open().unwrap();
                netlink.set_up(netlink.index("lo").unwrap()).unwrap();
                let socket = packet_log(7, 80, 1 << 16).unwrap();
                let taken = packet_log(7, 80, 1 << 16).unwrap_err();
                assert_eq!(taken.raw_os_error(), Some(libc::EPERM));
                TcpStream::connect("127.0.0.1:99").unwrap_err();
                socket
            })
            .unwrap();
        let (mut datagram, deadline) = ([0; 4096], Instant::now() + Duration::from_secs(10));
        let len = loop {
            match recv(&socket, &mut datagram[..], RecvFlags::empty()) {
                Ok((_, len)) => break len,
                Err(error) if error == rustix::io::Errno::AGAIN && Instant::now() < deadline => {
                    std::thread::yield_now();
                }
                Err(error) => panic!("{error}"),
            }
        };
        let has = |wanted: &[u8]| datagram[..len].windows(wanted.len()).any(|window| window == wanted);
        assert!(has(b"refused\0"));
        assert!(has(&[127, 0, 0, 1, 127, 0, 0, 1]), "the head of the packet is in it");
        drop(socket);
        netns.run(|| packet_log(7, 80, 1 << 16).map(drop)).flatten().unwrap();
    }
}
