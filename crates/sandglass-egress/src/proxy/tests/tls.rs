//! Connections that are carried as they are: TLS, and all ports but 80.

use tokio::io::AsyncWriteExt as _;

use super::world::{OTHER, SITE, World, converse, hello, policy, soon, to};
use crate::policy::Effective;
use crate::receipt::{Kind, Outcome};

/// What OpenSSL 3.0 sends for `www.example.com`.
const OPENSSL: &[u8] = include_bytes!("../../../../../fuzz/seeds/client_hello/openssl");

const HOST: &str = r#"[{"id":"site","allow":"www.example.com"},{"allow":"c.example","ports":[22]}]"#;

#[tokio::test]
async fn what_shows_its_allowed_name_is_carried_as_it_is() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 443).await;
    let mut guest = world.send(SITE, 443, OPENSSL).await;
    let mut server = site.accept().await;
    assert_eq!(server.next(OPENSSL.len()).await, OPENSSL);
    converse(&mut guest, &mut server).await;
    let much = vec![7; 3_000_000];
    let (sent, received) = tokio::join!(guest.send(&much), server.next(much.len()));
    let ((), true) = (sent, received == much) else { panic!("they are other bytes") };
    guest.end().await;
    assert_eq!(server.rest().await, b"");
    server.send(b"the last word").await;
    server.end().await;
    assert_eq!(guest.rest().await, b"the last word");
    assert_eq!(world.dialled(), [to(SITE, 443)]);
    let receipt = world.receipt_after(0).await;
    assert_eq!((receipt.kind, receipt.outcome), (Kind::Connection, Outcome::Allowed));
    assert_eq!(receipt.rule.to_string(), "request/site within ceiling/rule-1");
    for text in [&receipt.name, &receipt.shown] {
        assert_eq!(text.as_ref().unwrap().to_string(), "www.example.com");
    }
    assert_eq!((receipt.address, receipt.port.unwrap().get()), (Some(SITE.parse().unwrap()), 443));
    let there = OPENSSL.len() + "thereand back".len() + much.len();
    assert_eq!(receipt.sent, u64::try_from(there).unwrap());
    assert_eq!(receipt.received, u64::try_from("thereand backthe last word".len()).unwrap());
}

#[tokio::test]
async fn a_hello_byte_by_byte_is_one() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 443).await;
    let mut guest = world.connect(SITE, 443).await;
    for byte in OPENSSL {
        assert!(site.is_untouched().await, "before all of it was there");
        guest.send(&[*byte]).await;
    }
    let mut server = site.accept().await;
    assert_eq!(server.next(OPENSSL.len()).await, OPENSSL);
    converse(&mut guest, &mut server).await;
}

#[tokio::test]
async fn what_shows_no_allowed_name_is_reset_and_nothing_of_it_leaves() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 443).await;
    let attempts = [
        hello(None, false),
        hello(Some("b.example"), false),
        hello(Some("c.example"), false),
        hello(Some("www.example.com.evil.example"), false),
        hello(Some("www.example.com"), true),
        hello(Some("www.example.com\0"), false),
        b"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\n".to_vec(),
        b"SSH-2.0-x\r\n".to_vec(),
    ];
    for (count, attempt) in attempts.iter().enumerate() {
        world.send(SITE, 443, attempt).await.is_reset().await;
        let receipt = world.receipt_after(count).await;
        assert_eq!((receipt.outcome, receipt.sent), (Outcome::Denied, 0), "{attempt:?}");
        assert_eq!(receipt.rule.to_string(), "request/default");
    }
    let shown = world.receipts(2).await[1].shown.clone().unwrap();
    assert_eq!(shown.to_string(), "b.example");
    assert_eq!(world.dialled(), []);
    // The control.
    let mut guest = world.send(SITE, 443, &hello(Some("www.example.com"), false)).await;
    let mut server = site.accept().await;
    server.next(hello(Some("www.example.com"), false).len()).await;
    converse(&mut guest, &mut server).await;
}

#[tokio::test]
async fn what_no_byte_could_get_allowed_is_reset_before_one_is_sent() {
    let world = World::new(r#"[{"allow":"www.example.com"},{"allow":"0.0.0.0/0","ports":[80,22,53]}]"#).await;
    let targets = [
        (OTHER, 443),
        ("169.254.169.254", 80),
        ("127.0.0.1", 22),
        ("10.0.0.1", 80),
        (SITE, 23),
        (SITE, 53),
        ("::ffff:10.0.0.1", 80),
        ("64:ff9b::a9fe:a9fe", 80),
    ];
    for (count, (address, port)) in targets.into_iter().enumerate() {
        world.connect(address, port).await.is_reset().await;
        assert_eq!(world.receipt_after(count).await.outcome, Outcome::Denied, "{address} {port}");
    }
    assert_eq!(world.dialled(), []);
    let ssh = world.server(SITE, 22).await;
    let mut guest = world.connect(SITE, 22).await;
    converse(&mut guest, &mut ssh.accept().await).await;
}

#[tokio::test]
async fn other_ports_are_carried_without_a_look() {
    let world = World::new(HOST).await;
    let ssh = world.server(OTHER, 22).await;
    let mut guest = world.connect(OTHER, 22).await;
    let mut server = ssh.accept().await;
    server.send(b"SSH-2.0-x\r\n").await;
    assert_eq!(guest.next(11).await, b"SSH-2.0-x\r\n", "the server speaks first");
    converse(&mut guest, &mut server).await;
    world.connect(SITE, 22).await.is_reset().await;
    assert_eq!(world.dialled(), [to(OTHER, 22)]);
}

#[tokio::test]
async fn an_address_that_is_allowed_needs_no_name_but_the_name_is_written_down() {
    let world = World::new(r#"[{"allow":"93.184.216.0/24"}]"#).await;
    let site = world.server(SITE, 443).await;
    for (count, first) in
        [hello(None, false), hello(Some("any.example"), true), b"SSH".to_vec()].iter().enumerate()
    {
        let mut guest = world.send(SITE, 443, first).await;
        let mut server = site.accept().await;
        assert_eq!(&server.next(first.len()).await, first);
        converse(&mut guest, &mut server).await;
        drop((guest, server));
        let shown = world.receipt_after(count).await.shown;
        assert_eq!(shown.map(|name| name.to_string()), (count == 1).then(|| "any.example".to_owned()));
    }
}

#[tokio::test]
async fn each_side_can_end_its_own_half() {
    let world = World::new(HOST).await;
    let ssh = world.server(OTHER, 22).await;
    for guest_first in [true, false] {
        let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
        let (one, other) = if guest_first { (&mut guest, &mut server) } else { (&mut server, &mut guest) };
        one.send(b"all that I have").await;
        one.end().await;
        assert_eq!(other.rest().await, b"all that I have");
        other.send(b"an answer").await;
        assert_eq!(one.next(9).await, b"an answer");
        other.end().await;
        assert_eq!(one.rest().await, b"");
    }
}

#[tokio::test]
async fn a_side_that_is_gone_takes_the_other_along() {
    let world = World::new(HOST).await;
    let ssh = world.server(OTHER, 22).await;
    for guest_goes in [true, false] {
        let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
        converse(&mut guest, &mut server).await;
        let (gone, mut left) = if guest_goes { (guest, server) } else { (server, guest) };
        gone.0.set_zero_linger().unwrap();
        drop(gone);
        left.is_reset().await;
    }
    assert_eq!(world.receipts(2).await.len(), 2);
}

#[tokio::test]
async fn a_server_that_is_not_there_is_a_reset_and_is_tried_once() {
    let world = World::new(HOST).await;
    world.send(SITE, 443, OPENSSL).await.is_reset().await;
    world.connect(OTHER, 22).await.is_reset().await;
    assert_eq!(world.dialled(), [to(SITE, 443), to(OTHER, 22)]);
    assert_eq!(world.receipts(2).await[1].sent, 0);
}

#[tokio::test]
async fn a_tighter_policy_ends_what_it_does_not_allow_and_nothing_else() {
    let world = World::new(HOST).await;
    let (site, ssh) = (world.server(SITE, 443).await, world.server(OTHER, 22).await);
    let mut tls = (world.send(SITE, 443, OPENSSL).await, site.accept().await);
    tls.1.next(OPENSSL.len()).await;
    let mut shell = (world.connect(OTHER, 22).await, ssh.accept().await);
    // Waits for what its peer is to send, so it must be told.
    world.enforcer.set_policy(policy(HOST));
    converse(&mut tls.0, &mut tls.1).await;
    converse(&mut shell.0, &mut shell.1).await;
    world.enforcer.set_policy(policy(r#"[{"allow":"c.example","ports":[22]}]"#));
    tls.0.is_reset().await;
    tls.1.is_reset().await;
    converse(&mut shell.0, &mut shell.1).await;
    let receipts = world.receipts(2).await;
    assert_eq!((receipts[0].outcome, receipts[1].outcome), (Outcome::Denied, Outcome::Allowed));
    assert_eq!(receipts[1].sent, u64::try_from(OPENSSL.len() + 13).unwrap());
    world.enforcer.set_policy(Effective::sealed());
    shell.0.is_reset().await;
    shell.1.is_reset().await;
}

#[tokio::test]
async fn a_policy_that_is_tightened_before_the_hello_is_there_counts() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 443).await;
    let (half, rest) = OPENSSL.split_at(100);
    let mut guest = world.send(SITE, 443, half).await;
    world.enforcer.set_policy(Effective::sealed());
    guest.send(rest).await;
    guest.is_reset().await;
    assert!(site.is_untouched().await);
    assert_eq!(world.dialled(), []);
}

#[tokio::test]
async fn without_the_proxy_nothing_is_carried() {
    let mut world = World::new(HOST).await;
    let ssh = world.server(OTHER, 22).await;
    let (mut guest, mut server) = (world.connect(OTHER, 22).await, ssh.accept().await);
    converse(&mut guest, &mut server).await;
    // More is under way than the server takes.
    let flood = vec![0; 8 << 20];
    let flooding = guest.0.write(&flood).await.unwrap();
    assert!(flooding > 0);
    soon("the end of the proxy", world.tasks.shutdown()).await;
    server.is_reset().await;
    assert_eq!(world.receipt_after(0).await.outcome, Outcome::Allowed);
}
