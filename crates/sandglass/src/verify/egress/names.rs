//! Attacks by names, from a sandbox that is allowed a few of them.

use std::net::Ipv4Addr;

use sandglass_proto::leak::Leak;

use super::super::yard::{ALIAS, DENIED, REBOUND, STRANGER};
use super::aim::{Aim, Step, dns, resolve, tcp};
use super::wire::{A, Hello, TUNNELS, over_tcp, query, query_name};
use sandglass_engine::network::AIRLOCK_ADDRESS;

/// Resolvers that are not the sandbox's own.
const RESOLVERS: [&str; 3] = ["8.8.8.8", "9.9.9.9", "203.0.113.53"];

/// A host that is not allowed, by its name and by what its name leads to.
pub(super) fn unlisted_name(aim: &mut Aim<'_>) -> Vec<Step> {
    let word = aim.word("a name of which nobody said that it is allowed");
    let under = aim.word("a name below one that is allowed");
    let beside = aim.word("a name that begins like one that is allowed");
    let names = [
        format!("{word}.example"),
        format!("{under}.allowed.verify.example"),
        format!("allowed.verify.example.{beside}.example"),
    ];
    let asked =
        names.iter().map(|name| dns(query_name(name, A))).chain([dns(query_name(DENIED, A))]).collect();
    let attacks = vec![aim.get(&format!("{STRANGER}:80"), DENIED), aim.hello(STRANGER, DENIED)];
    vec![Step::Inside(asked), Step::Inside(attacks)]
}

/// Data in questions, of every type of record that tools for it use, in the longest labels that there are.
pub(super) fn tunnel(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks = Vec::new();
    for (name, kind) in TUNNELS {
        for way in ["UDP", "TCP"] {
            let word = aim.word(format!("a query for {name} over {way}"));
            let filling = [b'x'; 63];
            let mut first = word.into_bytes();
            first.resize(63, b'x');
            let query = query(&[&first, &filling, &filling, b"tunnel", b"example"], kind);
            attacks.push(match way {
                "TCP" => tcp(&format!("{AIRLOCK_ADDRESS}:53"), over_tcp(&query)),
                _ => dns(query),
            });
        }
    }
    vec![Step::Inside(attacks)]
}

pub(super) fn other_resolvers(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks = Vec::new();
    for resolver in RESOLVERS {
        let word = aim.word(format!("a query to {resolver} over UDP"));
        let send = query_name(&format!("{word}.example"), A);
        attacks.push(Leak::Udp { to: format!("{resolver}:53"), send });
        let word = aim.word(format!("a query to {resolver} over TCP"));
        attacks.push(tcp(&format!("{resolver}:53"), over_tcp(&query_name(&format!("{word}.example"), A))));
    }
    vec![Step::Inside(attacks)]
}

/// DNS over TLS, over QUIC and over HTTPS.
pub(super) fn encrypted_dns(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks = Vec::new();
    for resolver in RESOLVERS {
        for (port, name) in [(853, "dns.example"), (443, "dns.example"), (443, "dns.google")] {
            let word = aim.word(format!("TLS to {resolver}, port {port}, for {name}"));
            let hello = Hello { names: &[name.as_bytes()], ..Hello::default() }.bytes(&word);
            attacks.push(tcp(&format!("{resolver}:{port}"), hello));
        }
        attacks.push(aim.datagram(&format!("{resolver}:853")));
        attacks.push(aim.bytes(&format!("{resolver}:853")));
    }
    vec![Step::Inside(attacks)]
}

/// An allowed name that leads to an allowed address first, and then to others.
pub(super) fn rebinding(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut steps: Vec<Step> = (0..8).map(|_| resolve(&[REBOUND])).collect();
    let targets =
        [[169, 254, 169, 254], [10, 0, 0, 1], [192, 168, 0, 1], [203, 0, 113, 1]].map(Ipv4Addr::from);
    let attacks =
        targets.iter().flat_map(|to| [aim.get(&format!("{to}:80"), REBOUND), aim.hello(*to, REBOUND)]);
    steps.push(Step::Inside(attacks.collect()));
    steps
}

/// An allowed name that is another one for a name that is not.
pub(super) fn alias(aim: &mut Aim<'_>) -> Vec<Step> {
    let attacks = vec![
        aim.get(&format!("{STRANGER}:80"), DENIED),
        aim.hello(STRANGER, DENIED),
        aim.bytes(&format!("{STRANGER}:80")),
        aim.bytes(&format!("{STRANGER}:8080")),
    ];
    vec![resolve(&[ALIAS]), Step::Inside(attacks)]
}

/// Names whose end or middle one reader takes for something else than another does.
pub(super) fn odd_bytes(aim: &mut Aim<'_>) -> Vec<Step> {
    let ends: [(&str, &[&[u8]]); 9] = [
        ("NUL", &[b"x\0allowed", b"verify", b"example"]),
        ("NUL at the end", &[b"allowed", b"verify", b"example\0"]),
        ("CR LF", &[b"x\r\nallowed", b"verify", b"example"]),
        ("a dot in a label", &[b"x.allowed.verify.example"]),
        ("a space", &[b"x allowed", b"verify", b"example"]),
        ("a percent sign", &[b"x%00allowed", b"verify", b"example"]),
        ("another script", &["аllowed".as_bytes(), b"verify", b"example"]),
        ("punycode", &[b"xn--llowed-4ve", b"verify", b"example"]),
        ("a slash", &[b"x/allowed", b"verify", b"example"]),
    ];
    let mut attacks = Vec::new();
    for (what, labels) in ends {
        let word = aim.word(format!("a name with {what}"));
        let labels: Vec<&[u8]> = [word.as_bytes()].into_iter().chain(labels.iter().copied()).collect();
        attacks.push(dns(query(&labels, A)));
    }
    // Labels that go on where they are not, and a pointer to themselves.
    let word = aim.word("a name without end");
    let mut endless = query(&[word.as_bytes(), b"allowed"], A);
    let end = endless.len() - 5;
    endless.splice(end..end, [0xc0, 0x0c]);
    attacks.push(dns(endless));
    vec![Step::Inside(attacks)]
}
