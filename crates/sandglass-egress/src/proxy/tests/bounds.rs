//! What one sandbox can't take from its server.

use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use sandglass_types::net::{Hostname, Method, Port, RequestPath};

use super::world::{OTHER, SITE, World, converse, policy};
use crate::policy::{Connection, Host, Question, Seen, Transport, decide};
use crate::proxy::Caps;
use crate::receipt::Outcome;

const SSH: &str = r#"[{"allow":"c.example","ports":[22]},{"allow":"www.example.com"}]"#;

#[tokio::test]
async fn who_says_nothing_is_reset() {
    let world = World::with(SSH, Caps { head: Duration::from_millis(100), ..Caps::default() }).await;
    let (site, web) = (world.server(SITE, 443).await, world.server(SITE, 80).await);
    let mut silent = [
        world.connect(SITE, 443).await,
        world.connect(SITE, 80).await,
        world.send(SITE, 443, b"\x16\x03\x01").await,
        world.send(SITE, 80, b"GET / HTTP/1.1\r\nHost: www.example.com\r\n").await,
    ];
    for guest in &mut silent {
        guest.is_reset().await;
    }
    assert!(world.receipts(4).await.iter().all(|receipt| receipt.outcome == Outcome::Denied));
    assert!(site.is_untouched().await && web.is_untouched().await);
}

#[tokio::test]
async fn who_rests_for_too_long_is_reset() {
    let world = World::with(SSH, Caps { idle: Duration::from_millis(200), ..Caps::default() }).await;
    let ssh = world.server(OTHER, 22).await;
    let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
    converse(&mut guest, &mut server).await;
    guest.is_reset().await;
    server.is_reset().await;
}

#[tokio::test]
async fn all_connections_are_reset_whose_other_ends_are_gone_and_new_ones_are_carried() {
    let world = World::with(SSH, Caps::default()).await;
    let ssh = world.server(OTHER, 22).await;
    let mut cut = Vec::new();
    for _ in 0..3 {
        let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
        converse(&mut guest, &mut server).await;
        cut.push((guest, server));
    }
    for _ in 0..2 {
        world.enforcer.sever();
        for (mut guest, mut server) in cut.drain(..) {
            guest.is_reset().await;
            server.is_reset().await;
        }
        let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
        converse(&mut guest, &mut server).await;
        cut.push((guest, server));
    }
    // They were allowed, and it is written down what they carried.
    assert!(world.receipts(4).await.iter().all(|receipt| receipt.sent > 0));
}

#[tokio::test]
async fn one_connection_more_than_may_be_is_reset() {
    let world = World::with(SSH, Caps { flows: 2, ..Caps::default() }).await;
    let ssh = world.server(OTHER, 22).await;
    let mut flows = Vec::new();
    for _ in 0..2 {
        let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
        converse(&mut guest, &mut server).await;
        flows.push((guest, server));
    }
    world.connect(OTHER, 22).await.is_reset().await;
    assert_eq!(world.receipt_after(0).await.rule.to_string(), "limit/flows");
    for (guest, server) in &mut flows {
        converse(guest, server).await;
    }
    drop(flows.pop());
    // The receipt is written when the flow ends.
    world.receipts(2).await;
    let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
    converse(&mut guest, &mut server).await;
}

#[tokio::test]
async fn bytes_beyond_a_cap_are_not_carried() {
    let world = World::with(SSH, Caps { bytes: Some(34), ..Caps::default() }).await;
    let ssh = world.server(OTHER, 22).await;
    let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
    // 13 bytes each way.
    converse(&mut guest, &mut server).await;
    guest.send(b"12345678").await;
    assert_eq!(server.next(8).await, b"12345678");
    guest.send(b"9").await;
    guest.is_reset().await;
    server.is_reset().await;
    let receipts = world.receipts(2).await;
    assert_eq!((receipts[0].rule.to_string().as_str(), receipts[1].sent), ("limit/bytes", 21));
    world.connect(OTHER, 22).await.is_reset().await;
    assert_eq!(world.receipts(3).await[2].rule.to_string(), "limit/bytes");
    assert_eq!(world.dialled().len(), 1);
}

#[tokio::test]
async fn refusals_are_counted_when_they_are_too_many_to_be_written() {
    let world = World::with(SSH, Caps { refusals: NonZeroU32::MIN, ..Caps::default() }).await;
    let ssh = world.server(OTHER, 22).await;
    for _ in 0..200 {
        world.connect(SITE, 22).await.is_reset().await;
    }
    let (guest, server) = (world.connect(OTHER, 22).await, ssh.accept().await);
    drop((guest, server));
    let allowed = |receipt: &&crate::receipt::Receipt| receipt.outcome == Outcome::Allowed;
    let mut count = 1;
    let receipts = loop {
        let receipts = world.receipts(count).await;
        if receipts.iter().any(|receipt| allowed(&receipt)) {
            break receipts;
        }
        count = receipts.len() + 1;
    };
    let written = receipts.iter().filter(|receipt| !allowed(receipt)).count();
    let lost: u64 = receipts.iter().map(|receipt| receipt.lost).sum();
    assert!(written < 200, "{written}");
    assert_eq!(written as u64 + lost, 200, "each is either written or counted");
}

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_connections_at_a_time_are_carried_and_take_little_memory() {
    const COUNT: u64 = 1000;
    let world = World::with(SSH, Caps { flows: 1000, ..Caps::default() }).await;
    let ssh = world.server(OTHER, 22).await;
    let before = resident();
    let mut flows = Vec::new();
    for _ in 0..COUNT {
        flows.push((world.connect(OTHER, 22).await, ssh.accept().await));
    }
    for (guest, server) in &mut flows {
        converse(guest, server).await;
    }
    // With what the test itself needs for its ends of them.
    let each = resident().saturating_sub(before) / COUNT;
    assert!(each <= 64 << 10, "{each} bytes for each");
    for (guest, server) in &mut flows {
        converse(guest, server).await;
    }
    drop(flows);
    let sent: u64 = world.receipts(1000).await.iter().map(|receipt| receipt.sent).sum();
    assert_eq!(sent, COUNT * 2 * 13);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Of a connection that may go unseen, the proxy waits for nothing.
    #[test]
    fn what_may_go_unseen_may_go_whatever_it_shows(
        rules in proptest::collection::vec(
            (
                any::<bool>(),
                prop::sample::select(vec!["a.example", "*.example", "*", "0.0.0.0/0", "93.184.0.0/16", "8.8.8.8"]),
                prop::sample::select(vec!["", r#","ports":[80]"#, r#","methods":["GET"]"#, r#","paths":["/x"]"#, r#","protocol":"udp""#]),
            ),
            0..6,
        ),
    ) {
        let rules: Vec<String> = rules
            .into_iter()
            .map(|(allow, target, rest)| format!(r#"{{"{}":"{target}"{rest}}}"#, if allow { "allow" } else { "deny" }))
            .collect();
        let policy = policy(&format!("[{}]", rules.join(",")));
        let names: [Hostname; 2] = ["a.example".parse().unwrap(), "b.other".parse().unwrap()];
        let (method, path): (Method, RequestPath) = ("GET".parse().unwrap(), "/x".parse().unwrap());
        let nameless = Seen::Tls { sni: None, encrypted: false };
        for port in [Port::HTTP, Port::HTTPS] {
            for bound in [&names[..0], &names[..1], &names[..]] {
                let ask = |seen| {
                    let address = SITE.parse().unwrap();
                    let connection = Connection { transport: Transport::Tcp, address, port, bound, seen };
                    decide(&policy, Question::Connect(connection)).is_allowed()
                };
                if !ask(Seen::Nothing) {
                    continue;
                }
                prop_assert!(ask(nameless));
                for name in &names {
                    let (host, path) = (Host::Name(name), Ok(&path));
                    for seen in [
                        Seen::Tls { sni: Some(name), encrypted: false },
                        Seen::Tls { sni: Some(name), encrypted: true },
                        Seen::Http { host, port: Port::HTTP, method: &method, path },
                    ] {
                        prop_assert!(ask(seen), "{:?}", seen);
                    }
                }
            }
        }
    }
}
