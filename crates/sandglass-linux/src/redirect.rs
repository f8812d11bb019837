//! Connections that packet filter rules redirected.

use std::io;
use std::net::SocketAddrV4;
use std::os::fd::AsFd;

/// Where a connection was going before a rule redirected it; without such a rule, where it arrived
/// (`SO_ORIGINAL_DST` of `linux/netfilter_ipv4.h`). Needs no privilege, and no particular namespace.
///
/// # Errors
/// It is no connection, or connection tracking has forgotten it.
pub fn original_destination(connection: &impl AsFd) -> io::Result<SocketAddrV4> {
    Ok(rustix::net::sockopt::ip_original_dst(connection)?)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::namespace::Netns;
    use crate::netlink::Rtnetlink;
    use crate::nft;

    /// Needs root, as all that makes namespaces does.
    #[test]
    fn a_redirected_connection_says_where_it_was_going() {
        let netns = Netns::create().unwrap();
        let rules = "table ip test {
            chain output { type nat hook output priority -100; tcp dport 443 redirect to :8443; }
        }";
        nft::apply(&netns, rules).unwrap();
        let connect = |to: &'static str| {
            netns.run(|| {
                let mut netlink = Rtnetlink::open().unwrap();
                netlink.set_up(netlink.index("lo").unwrap()).unwrap();
                let listener = TcpListener::bind("127.0.0.1:8443").unwrap();
                let client = TcpStream::connect(to).unwrap();
                (client, listener.accept().unwrap().0)
            })
        };
        for to in ["127.9.8.7:443", "127.0.0.1:8443"] {
            let (client, accepted) = connect(to).unwrap();
            assert_eq!(original_destination(&accepted).unwrap().to_string(), to);
            drop(client);
        }
        let unconnected = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(original_destination(&unconnected).is_err());
    }
}
