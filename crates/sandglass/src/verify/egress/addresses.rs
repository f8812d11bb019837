//! Attacks on addresses that no rule can allow, from a sandbox that is allowed everything that can be.

use std::net::{IpAddr, Ipv4Addr};

use sandglass_engine::network::AIRLOCK_ADDRESS;
use sandglass_linux::netlink::Mac;
use sandglass_proto::leak::Leak;

use super::super::yard::{SERVICES, STRANGER, UPSTREAM, leading_to};
use super::aim::{Aim, Step, resolve};
use super::frame::{Ethernet, UDP, V4};

/// The address of most clouds' metadata service, in every notation that `inet_aton(3)` and IPv6 have for it.
const SPELLINGS: [&str; 8] = [
    "169.254.169.254",
    "2852039166",
    "0xa9fea9fe",
    "025177524776",
    "0251.0376.0251.0376",
    "169.254.43518",
    "169.16689662",
    "[::ffff:169.254.169.254]",
];

/// Names of it, and what a resolver that is too kind would take for it.
const METADATA_NAMES: [&str; 8] = [
    "metadata.google.internal",
    "metadata.google.internal.",
    "metadata",
    "instance-data",
    "2852039166",
    "0xa9fea9fe",
    "169.254.169.254",
    "to-169-254-169-254.verify.example",
];

/// Other metadata services: those of AWS for containers, Alibaba, Azure and Oracle.
const OTHER_METADATA: [&str; 4] = ["169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"];

/// One address of each private or special range, of which some look like what is there.
const PRIVATE: [&str; 10] = [
    "10.0.0.1",
    "10.255.255.254",
    "10.11.13.2",
    "172.16.0.1",
    "172.31.255.254",
    "192.168.0.1",
    "192.168.255.254",
    "100.64.0.1",
    "198.18.0.1",
    "169.254.1.1",
];

/// Ports of neighbours: SSH, HTTP, HTTPS, a database, and the guest API.
const PRIVATE_PORTS: [u16; 5] = [22, 80, 443, 5432, 49983];

pub(super) fn metadata_address(aim: &mut Aim<'_>) -> Vec<Step> {
    vec![Step::Inside(
        SPELLINGS.iter().map(|host| aim.get(&format!("{host}:80"), "169.254.169.254")).collect(),
    )]
}

pub(super) fn metadata_name(aim: &mut Aim<'_>) -> Vec<Step> {
    let by_name = METADATA_NAMES.iter().map(|name| aim.get("169.254.169.254:80", name)).collect();
    vec![resolve(&METADATA_NAMES), Step::Inside(by_name)]
}

pub(super) fn metadata_others(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks: Vec<Leak> =
        OTHER_METADATA.iter().map(|host| aim.get(&format!("{host}:80"), host)).collect();
    attacks.extend(OTHER_METADATA.iter().map(|host| aim.bytes(&format!("{host}:32526"))));
    vec![Step::Inside(attacks)]
}

pub(super) fn private_ranges(aim: &mut Aim<'_>) -> Vec<Step> {
    let names: Vec<String> = PRIVATE.iter().filter_map(|host| host.parse().ok()).map(leading_to).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let attacks =
        PRIVATE.iter().flat_map(|host| PRIVATE_PORTS.iter().map(move |port| format!("{host}:{port}")));
    let attacks: Vec<String> = attacks.collect();
    vec![resolve(&names), Step::Inside(attacks.iter().map(|to| aim.bytes(to)).collect())]
}

/// A guest's own loopback hides the server's, so only its kernel could try. The names are asked for so that they are
/// bound, if anything would.
pub(super) fn loopback(aim: &mut Aim<'_>) -> Vec<Step> {
    let addresses = [[127, 0, 0, 1], [127, 0, 0, 53], [127, 255, 255, 254], [0, 0, 0, 1]].map(Ipv4Addr::from);
    let names = addresses.map(leading_to);
    let names: Vec<&str> = names.iter().map(String::as_str).chain(["localhost", "a.localhost"]).collect();
    let frames = addresses.map(|to| {
        let word = aim.word(format!("UDP to {to}, on the link"));
        V4::to(to, UDP).datagram(80, word.as_bytes())
    });
    vec![resolve(&names), Step::OnLink(frames.to_vec())]
}

pub(super) fn host_services(aim: &mut Aim<'_>) -> Vec<Step> {
    let addresses: Vec<Ipv4Addr> = aim
        .server
        .iter()
        .filter_map(|address| match address {
            // Inside, loopback is the guest's own.
            IpAddr::V4(address) if !address.is_loopback() => Some(*address),
            _ => None,
        })
        .collect();
    let mut attacks = Vec::new();
    for address in addresses {
        attacks.extend(SERVICES.map(|port| aim.bytes(&format!("{address}:{port}"))));
        attacks.push(aim.datagram(&format!("{address}:80")));
    }
    vec![Step::Inside(attacks)]
}

/// Every sandbox has the same addresses, so a neighbour is whoever else can be addressed in their networks, by Ethernet,
/// or by a broadcast.
pub(super) fn peers(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks = Vec::new();
    for to in [AIRLOCK_ADDRESS.to_string(), "10.11.12.6".into(), "10.11.12.10".into(), "10.11.13.2".into()] {
        attacks.extend(PRIVATE_PORTS.map(|port| aim.bytes(&format!("{to}:{port}"))));
        attacks.push(aim.datagram(&format!("{to}:9")));
    }
    let own = V4::to(Ipv4Addr::new(10, 11, 12, 2), UDP);
    let all = Ethernet { to: Mac([0xff; 6]), ..Ethernet::default() };
    let frames = [("by its address", own.clone()), ("by its address, to all", V4 { ethernet: all, ..own })];
    let frames = frames.map(|(way, packet)| packet.datagram(49983, aim.word(way).as_bytes()));
    vec![Step::Inside(attacks), Step::OnLink(frames.to_vec())]
}

pub(super) fn broadcast(aim: &mut Aim<'_>) -> Vec<Step> {
    let targets = ["255.255.255.255:67", "10.11.12.3:137", "224.0.0.1:9", "239.255.255.250:1900"];
    vec![Step::Inside(targets.iter().map(|to| aim.datagram(to)).collect())]
}

/// The names of neighbours: mDNS, LLMNR and NetBIOS.
pub(super) fn neighbour_names(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks = Vec::new();
    for (address, port) in
        [("224.0.0.251", 5353), ("224.0.0.252", 5355), ("10.11.12.3", 137), ("10.11.12.1", 5353)]
    {
        let word = aim.word(format!("a name asked of {address}, port {port}"));
        let query = super::wire::query_name(&format!("{word}.local"), super::wire::A);
        attacks.push(Leak::Udp { to: format!("{address}:{port}"), send: query });
    }
    vec![Step::Inside(attacks)]
}

pub(super) fn spoofed_source(aim: &mut Aim<'_>) -> Vec<Step> {
    let sources = [[203, 0, 113, 99], [203, 0, 113, 1], [169, 254, 169, 254], [10, 0, 0, 7], [10, 11, 12, 3]];
    let frames = sources.map(Ipv4Addr::from).map(|from| {
        let word = aim.word(format!("UDP from {from}, on the link"));
        V4 { from, ..V4::to(UPSTREAM, UDP) }.datagram(9, word.as_bytes())
    });
    vec![Step::OnLink(frames.to_vec())]
}

pub(super) fn odd_frames(aim: &mut Aim<'_>) -> Vec<Step> {
    let usual = V4::to(STRANGER, UDP);
    let stranger = Ethernet { from: Mac([2, 0, 0, 0, 0, 9]), ..Ethernet::default() };
    let word = aim.word("UDP from another Ethernet address");
    let foreign = V4 { ethernet: stranger, ..usual.clone() }.datagram(9, word.as_bytes());
    let word = aim.word("UDP with a tag of VLANs");
    let tag = Ethernet { tagged: true, ..Ethernet::default() };
    let tagged = V4 { ethernet: tag, ..usual.clone() }.datagram(9, word.as_bytes());
    // No operation, four times.
    let word = aim.word("UDP with IP options");
    let options = V4 { options: &[1, 1, 1, 1], ..usual.clone() }.datagram(9, word.as_bytes());
    let word = aim.word("UDP in fragments that cut the word");
    let pieces = usual.fragments(&usual.udp(9, word.as_bytes()), 16);
    vec![Step::OnLink([vec![foreign, tagged, options], pieces.to_vec()].concat())]
}
