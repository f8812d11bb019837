//! Packets as a guest's kernel would send them that was taken over: byte by byte, onto the sandbox's own link.

use std::net::{Ipv4Addr, Ipv6Addr};

use sandglass_engine::network::{AIRLOCK_MAC, GUEST_ADDRESS, GUEST_MAC};
use sandglass_linux::netlink::Mac;

pub(super) const UDP: u8 = 17;
pub(super) const ICMP: u8 = 1;
pub(super) const SCTP: u8 = 132;
pub(super) const UDP_LITE: u8 = 136;
const ICMP_V6: u8 = 58;

const ETHERTYPE_V4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_V6: [u8; 2] = [0x86, 0xdd];

/// An address of its own that a guest could take.
const GUEST_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0x0a, 0x0a, 2);

/// Any port from which nobody expects anything.
const SOURCE_PORT: u16 = 40_000;

/// The tag of a frame with a priority and no VLAN (IEEE 802.1Q), which receivers take as if it had none.
const PRIORITY_TAG: [u8; 4] = [0x81, 0x00, 0xe0, 0x00];

/// Who a frame is from and for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ethernet {
    pub(super) from: Mac,
    pub(super) to: Mac,
    pub(super) tagged: bool,
}

impl Default for Ethernet {
    fn default() -> Self {
        Self { from: GUEST_MAC, to: AIRLOCK_MAC, tagged: false }
    }
}

impl Ethernet {
    fn frame(self, kind: [u8; 2], packet: &[u8]) -> Vec<u8> {
        let tag: &[u8] = if self.tagged { &PRIORITY_TAG } else { &[] };
        [&self.to.0, &self.from.0, tag, &kind, packet].concat()
    }
}

/// A packet of IPv4.
#[derive(Debug, Clone)]
pub(super) struct V4<'a> {
    pub(super) ethernet: Ethernet,
    pub(super) from: Ipv4Addr,
    pub(super) to: Ipv4Addr,
    pub(super) protocol: u8,
    /// Options, in words of four bytes.
    pub(super) options: &'a [u8],
}

impl V4<'_> {
    /// One of the guest's own address.
    pub(super) fn to(to: Ipv4Addr, protocol: u8) -> Self {
        Self { ethernet: Ethernet::default(), from: GUEST_ADDRESS, to, protocol, options: &[] }
    }

    /// It with this payload.
    pub(super) fn frame(&self, payload: &[u8]) -> Vec<u8> {
        self.piece(payload, 0, false)
    }

    /// It in two pieces, cut at `at`, a multiple of eight.
    pub(super) fn fragments(&self, payload: &[u8], at: usize) -> [Vec<u8>; 2] {
        let (first, second) = payload.split_at(at.min(payload.len()));
        [self.piece(first, 0, true), self.piece(second, at / 8, false)]
    }

    fn piece(&self, payload: &[u8], offset: usize, more: bool) -> Vec<u8> {
        let header = 20 + self.options.len();
        let flags = half(offset) | if more { 0x2000 } else { 0 };
        let mut packet = [
            &[0x40 | byte(header / 4), 0][..],
            &half(header + payload.len()).to_be_bytes(),
            &[0x5a, 0x5a],
            &flags.to_be_bytes(),
            &[64, self.protocol, 0, 0],
            &self.from.octets(),
            &self.to.octets(),
            self.options,
        ]
        .concat();
        let sum = checksum(&[&packet]);
        packet[10..12].copy_from_slice(&sum);
        packet.extend_from_slice(payload);
        self.ethernet.frame(ETHERTYPE_V4, &packet)
    }

    /// A datagram of UDP, or of UDP-Lite that covers all of it.
    pub(super) fn datagram(&self, port: u16, payload: &[u8]) -> Vec<u8> {
        self.frame(&self.udp(port, payload))
    }

    /// What is in one.
    pub(super) fn udp(&self, port: u16, payload: &[u8]) -> Vec<u8> {
        let len = half(8 + payload.len()).to_be_bytes();
        let pseudo = [&self.from.octets()[..], &self.to.octets(), &[0, self.protocol], &len].concat();
        with_checksum(&pseudo, port, len, payload)
    }
}

/// A datagram of UDP over IPv6.
pub(super) fn datagram_v6(to: Ipv6Addr, port: u16, payload: &[u8]) -> Vec<u8> {
    let len = half(8 + payload.len()).to_be_bytes();
    packet_v6(to, UDP, &with_checksum(&pseudo_v6(to, UDP, 8 + payload.len()), port, len, payload))
}

/// A message of ICMPv6: its type and what follows the checksum.
pub(super) fn icmp_v6(to: Ipv6Addr, kind: u8, body: &[u8]) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0][..], body].concat();
    let sum = checksum(&[&pseudo_v6(to, ICMP_V6, message.len()), &message]);
    message[2..4].copy_from_slice(&sum);
    packet_v6(to, ICMP_V6, &message)
}

fn pseudo_v6(to: Ipv6Addr, next: u8, len: usize) -> Vec<u8> {
    [&GUEST_V6.octets()[..], &to.octets(), &[0, 0], &half(len).to_be_bytes(), &[0, 0, 0, next]].concat()
}

fn packet_v6(to: Ipv6Addr, next: u8, payload: &[u8]) -> Vec<u8> {
    let len = half(payload.len()).to_be_bytes();
    // Neighbours speak to each other with this many hops left, and with no fewer.
    let hops = 255;
    let packet =
        [&[0x60, 0, 0, 0][..], &len, &[next, hops], &GUEST_V6.octets(), &to.octets(), payload].concat();
    Ethernet::default().frame(ETHERTYPE_V6, &packet)
}

/// An echo request.
pub(super) fn echo(payload: &[u8]) -> Vec<u8> {
    let mut message = [&[8, 0, 0, 0, 0, 0, 0, 1][..], payload].concat();
    let sum = checksum(&[&message]);
    message[2..4].copy_from_slice(&sum);
    message
}

/// A packet of SCTP that begins an association (RFC 9260, 3.3.2), with a parameter that nobody knows.
pub(super) fn sctp(payload: &[u8]) -> Vec<u8> {
    let parameter = [&[0xc0, 0x5a][..], &half(4 + payload.len()).to_be_bytes(), payload].concat();
    let init = [&[0, 0, 0, 1][..], &[0, 0, 0x10, 0], &[0, 1, 0, 1], &[0, 0, 0, 1], &parameter].concat();
    let chunk = [&[1, 0][..], &half(4 + init.len()).to_be_bytes(), &init].concat();
    let ports = [SOURCE_PORT.to_be_bytes(), 9_u16.to_be_bytes()].concat();
    [&ports[..], &[0; 8], &chunk].concat()
}

fn with_checksum(pseudo: &[u8], port: u16, len: [u8; 2], payload: &[u8]) -> Vec<u8> {
    let mut datagram = [&SOURCE_PORT.to_be_bytes()[..], &port.to_be_bytes(), &len, &[0, 0], payload].concat();
    let sum = match checksum(&[pseudo, &datagram]) {
        // Zero says that there is none.
        [0, 0] => [0xff, 0xff],
        sum => sum,
    };
    datagram[6..8].copy_from_slice(&sum);
    datagram
}

/// The checksum of the internet (RFC 1071). All parts but the last have an even length.
fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let mut sum = 0_u32;
    for pair in parts.iter().flat_map(|part| part.chunks(2)) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let [_, _, high, low] = sum.to_be_bytes();
    [!high, !low]
}

fn half(number: usize) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

fn byte(number: usize) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_right() {
        // What a receiver sums up is all ones.
        let packet = V4::to(Ipv4Addr::new(203, 0, 113, 10), UDP);
        let frame = packet.datagram(9, b"odd");
        assert_eq!(checksum(&[&frame[14..34]]), [0, 0]);
        let pseudo = [&frame[26..34], &[0, 17, 0, 11]].concat();
        assert_eq!(checksum(&[&pseudo, &frame[34..]]), [0, 0]);
        assert_eq!(checksum(&[&echo(b"even")]), [0, 0]);
        let frame = datagram_v6(Ipv6Addr::LOCALHOST, 9, b"even");
        let pseudo = [&frame[22..54], &[0, 0, 0, 12, 0, 0, 0, 17]].concat();
        assert_eq!(checksum(&[&pseudo, &frame[54..]]), [0, 0]);
        let frame = icmp_v6(Ipv6Addr::LOCALHOST, 128, b"even");
        let pseudo = [&frame[22..54], &[0, 0, 0, 8, 0, 0, 0, 58]].concat();
        assert_eq!(checksum(&[&pseudo, &frame[54..]]), [0, 0]);
    }

    #[test]
    fn pieces_make_up_the_whole() {
        let packet = V4::to(Ipv4Addr::new(203, 0, 113, 10), UDP);
        let payload = [7; 40];
        let [first, second] = packet.fragments(&payload, 16);
        assert_eq!((first.len(), second.len()), (14 + 20 + 16, 14 + 20 + 24));
        assert_eq!((&first[20..22], &second[20..22]), (&[0x20, 0][..], &[0, 2][..]));
    }
}
