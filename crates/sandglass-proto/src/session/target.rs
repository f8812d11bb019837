//! Where a flow leads.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;

const GUEST_API: u8 = 1;
const TCP: u8 = 2;

/// What the agent connects a flow to.
///
/// On the wire: one byte for the variant; for TCP one more for the address family (4 or 6) and the port, most
/// significant byte first. Further bytes are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// The guest API: HTTP/1.1, answered by the agent itself.
    GuestApi,
    /// A TCP port on the guest's loopback.
    Tcp(Loopback),
}

/// A port on 127.0.0.1 or `::1`; no other address can be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Loopback {
    v6: bool,
    port: NonZeroU16,
}

impl Loopback {
    /// A port on 127.0.0.1.
    #[must_use]
    pub const fn v4(port: NonZeroU16) -> Self {
        Self { v6: false, port }
    }

    /// A port on `::1`.
    #[must_use]
    pub const fn v6(port: NonZeroU16) -> Self {
        Self { v6: true, port }
    }

    /// What to connect to.
    #[must_use]
    pub fn addr(self) -> SocketAddr {
        let ip = if self.v6 { IpAddr::V6(Ipv6Addr::LOCALHOST) } else { IpAddr::V4(Ipv4Addr::LOCALHOST) };
        SocketAddr::new(ip, self.port.get())
    }
}

impl Target {
    pub(super) fn encode(self) -> Vec<u8> {
        match self {
            Self::GuestApi => vec![GUEST_API],
            Self::Tcp(Loopback { v6, port }) => {
                let [high, low] = port.get().to_be_bytes();
                vec![TCP, if v6 { 6 } else { 4 }, high, low]
            }
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        match *bytes {
            [GUEST_API, ..] => Some(Self::GuestApi),
            [TCP, family @ (4 | 6), high, low, ..] => {
                let port = NonZeroU16::new(u16::from_be_bytes([high, low]))?;
                Some(Self::Tcp(Loopback { v6: family == 6, port }))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(number: u16) -> NonZeroU16 {
        NonZeroU16::new(number).unwrap()
    }

    #[test]
    fn the_wire_form_is_stable() {
        assert_eq!(Target::GuestApi.encode(), [1]);
        assert_eq!(Target::Tcp(Loopback::v4(port(8080))).encode(), [2, 4, 0x1F, 0x90]);
        assert_eq!(Target::Tcp(Loopback::v6(port(1))).encode(), [2, 6, 0, 1]);
    }

    #[test]
    fn decodes_what_it_encodes_and_ignores_what_is_added() {
        for target in
            [Target::GuestApi, Target::Tcp(Loopback::v4(port(u16::MAX))), Target::Tcp(Loopback::v6(port(22)))]
        {
            let mut bytes = target.encode();
            assert_eq!(Target::decode(&bytes), Some(target));
            bytes.extend_from_slice(b"later");
            assert_eq!(Target::decode(&bytes), Some(target));
        }
    }

    #[test]
    fn refuses_everything_else() {
        for bytes in [&[][..], &[0], &[3], &[2], &[2, 4], &[2, 4, 0], &[2, 4, 0, 0], &[2, 5, 0, 1]] {
            assert_eq!(Target::decode(bytes), None, "{bytes:?}");
        }
    }
}
