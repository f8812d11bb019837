//! Requests on port 80, and what tries to pass as a part of one.

use serde_json::Value;

use super::world::{GATEWAY, OTHER, Peer, SITE, World, converse, own_domain, policy, with_models};
use crate::policy::{Own, Service};
use crate::receipt::Outcome;

const HOST: &str = r#"[{"id":"site","allow":"www.example.com"}]"#;

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

fn get(path: &str, lines: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: www.example.com\r\n{lines}\r\n")
}

fn post(lines: &str, body: &str) -> String {
    format!("POST /a HTTP/1.1\r\nHost: www.example.com\r\n{lines}\r\n{body}")
}

/// What [`post`] becomes on its way.
fn posted(lines: &str, body: &str) -> Vec<u8> {
    post(&format!("{lines}Connection: close\r\n"), body).into_bytes()
}

/// The answer of the proxy instead of the server's.
async fn refusal(guest: &mut Peer, status: &str) -> Value {
    let answer = String::from_utf8(guest.rest().await).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    assert!(
        head.contains("\r\nContent-Type: application/json\r\n") && head.ends_with("\r\nConnection: close")
    );
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())));
    serde_json::from_str(body).unwrap()
}

#[tokio::test]
async fn a_request_is_carried_and_told_to_be_the_last() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    let lines = "Connection: keep-alive\r\nX: y\r\n";
    let mut guest = world.send(SITE, 80, get("/a?b", lines).as_bytes()).await;
    let mut server = site.accept().await;
    let arrived = get("/a?b", "X: y\r\nConnection: close\r\n");
    assert_eq!(server.next(arrived.len()).await, arrived.as_bytes());
    server.send(ANSWER).await;
    drop(server);
    assert_eq!(guest.rest().await, ANSWER);
    drop(guest);
    let receipt = world.receipt_after(0).await;
    assert_eq!(
        (receipt.outcome, receipt.rule.to_string().as_str()),
        (Outcome::Allowed, "request/site within ceiling/rule-1")
    );
    assert_eq!(receipt.shown.unwrap().to_string(), "www.example.com");
    assert_eq!((receipt.sent, receipt.received), (arrived.len() as u64, ANSWER.len() as u64));
}

#[tokio::test]
async fn what_is_for_the_server_s_own_domain_goes_to_its_edge_one_request_at_a_time() {
    let world = World::new("[]").await;
    world.enforcer.set_policy(own_domain(r#"[{"id":"peer","allow":"8000-a.boxes.example"}]"#));
    let edge = world.edge().await;
    let request = |host: &str| format!("GET /a HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let behind = request("8000-b.boxes.example");
    let sent = request("8000-a.boxes.example") + &behind;
    let mut guest = world.send(GATEWAY, 80, sent.as_bytes()).await;
    let mut server = edge.accept().await;
    let arrived = "GET /a HTTP/1.1\r\nHost: 8000-a.boxes.example\r\nConnection: close\r\n\r\n";
    assert_eq!(server.next(arrived.len()).await, arrived.as_bytes());
    server.send(ANSWER).await;
    drop(server);
    assert_eq!(guest.rest().await, ANSWER);
    drop(guest);
    let receipt = world.receipt_after(0).await;
    assert_eq!(receipt.name.unwrap().to_string(), "8000-a.boxes.example");
    assert_eq!((receipt.outcome, receipt.sent), (Outcome::Allowed, arrived.len() as u64));
    for (count, host) in
        ["8000-b.boxes.example", "boxes.example", "localhost", GATEWAY].into_iter().enumerate()
    {
        let mut guest = world.send(GATEWAY, 80, request(host).as_bytes()).await;
        refusal(&mut guest, "403").await;
        assert_eq!(world.receipt_after(1 + count).await.outcome, Outcome::Denied);
    }
    assert!(edge.is_untouched().await && world.dialled().is_empty());
    // What was allowed is cut when it is not any more.
    let mut guest = world.send(GATEWAY, 80, request("8000-a.boxes.example").as_bytes()).await;
    let mut server = edge.accept().await;
    server.next(arrived.len()).await;
    world.enforcer.set_policy(own_domain("[]"));
    guest.is_reset().await;
    server.is_reset().await;
}

#[tokio::test]
async fn who_has_no_place_at_the_edge_is_reset_and_no_receipt_says_that_it_was_allowed() {
    let world = World::new("[]").await;
    world.enforcer.set_policy(own_domain(r#"[{"id":"peer","allow":"8000-a.boxes.example"}]"#));
    let request = b"GET /a HTTP/1.1\r\nHost: 8000-a.boxes.example\r\n\r\n";
    world.send(GATEWAY, 80, request).await.is_reset().await;
    let receipt = world.receipt_after(0).await;
    assert_eq!((receipt.rule.to_string().as_str(), receipt.outcome), ("limit/edge", Outcome::Denied));
    assert_eq!(receipt.shown.unwrap().to_string(), "8000-a.boxes.example");
    // The control: with a place it goes, and by then the one before has left no other receipt.
    let edge = world.edge().await;
    let guest = world.send(GATEWAY, 80, request).await;
    drop((edge.accept().await, guest));
    assert_eq!(world.receipt_after(1).await.outcome, Outcome::Allowed);
    let entered = (Own::Edge, world.enforcer.sandbox().clone());
    assert_eq!(world.entered(), [entered.clone(), entered]);
}

#[tokio::test]
async fn what_was_granted_is_reached_until_it_is_taken_away() {
    let world = World::new("[]").await;
    let server = world.edge().await;
    let request = b"POST /v1/messages HTTP/1.1\r\nHost: models.internal\r\nContent-Length: 2\r\n\r\n{}";
    world.enforcer.set_policy(own_domain("[]"));
    let mut guest = world.send(GATEWAY, 80, request).await;
    refusal(&mut guest, "403").await;
    assert_eq!(world.receipt_after(0).await.rule.to_string(), "always/not-granted");
    world.enforcer.set_policy(with_models());
    let mut guest = world.send(GATEWAY, 80, request).await;
    let mut called = server.accept().await;
    called.next(request.len() + "Connection: close\r\n".len()).await;
    called.send(ANSWER).await;
    drop(called);
    assert_eq!(guest.rest().await, ANSWER);
    drop(guest);
    let receipt = world.receipt_after(1).await;
    assert_eq!((receipt.rule.to_string().as_str(), receipt.outcome), ("grant/models", Outcome::Allowed));
    assert_eq!(receipt.name.unwrap().to_string(), "models.internal");
    assert_eq!(world.entered(), [(Own::Service(Service::Models), world.enforcer.sandbox().clone())]);
    let mut guest = world.send(GATEWAY, 80, request).await;
    let mut called = server.accept().await;
    called.next(10).await;
    world.enforcer.set_policy(own_domain("[]"));
    guest.is_reset().await;
    called.is_reset().await;
}

#[tokio::test]
async fn a_request_byte_by_byte_is_one() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    let mut guest = world.connect(SITE, 80).await;
    for byte in post("Content-Length: 3\r\n", "abc").as_bytes() {
        guest.send(&[*byte]).await;
    }
    let arrived = posted("Content-Length: 3\r\n", "abc");
    assert_eq!(site.accept().await.next(arrived.len()).await, arrived);
}

#[tokio::test]
async fn what_is_not_allowed_is_told_why() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    for (count, (request, rule, reason)) in [
        (
            "GET / HTTP/1.1\r\nHost: b.example\r\n\r\n".to_owned(),
            "request/default",
            "no rule of the sandbox's policy",
        ),
        (
            "GET / HTTP/1.1\r\nHost: c.example\r\n\r\n".to_owned(),
            "request/default",
            "did not resolve to that address",
        ),
        (
            "GET / HTTP/1.1\r\nHost: www.example.com:81\r\n\r\n".to_owned(),
            "request/default",
            "an address or a port",
        ),
        (format!("GET / HTTP/1.1\r\nHost: {SITE}\r\n\r\n"), "request/default", "an address or a port"),
        (
            "GET http://b.example/ HTTP/1.1\r\nHost: www.example.com\r\n\r\n".to_owned(),
            "request/default",
            "must agree",
        ),
        (
            "GET http://www.example.com/ HTTP/1.1\r\nHost: b.example\r\n\r\n".to_owned(),
            "request/default",
            "must agree",
        ),
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "request/default", "one Host"),
        (get("/", "Host: b.example\r\n"), "request/default", "one Host"),
        (
            get("/", "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: A\r\n"),
            "request/default",
            "WebSocket alone",
        ),
        (get("/", " Host: b.example\r\n"), "request/default", "malformed or folded"),
        (get("/", "X: y\nHost: b.example\r\n"), "request/default", "control character"),
        (
            post(
                "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
                "0\r\n\r\nGET /evil HTTP/1.1\r\n\r\n",
            ),
            "request/default",
            "the body must have",
        ),
        (
            post("Content-Length: 4\r\nContent-Length: 5\r\n", "12345"),
            "request/default",
            "the body must have",
        ),
        (post("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"), "request/default", "the body must have"),
        (
            post("Connection: content-length\r\nContent-Length: 3\r\n", "abc"),
            "request/default",
            "the body must have",
        ),
        (
            "CONNECT www.example.com:80 HTTP/1.1\r\nHost: www.example.com:80\r\n\r\n".to_owned(),
            "always/connect",
            "tunnel",
        ),
        (
            "CONNECT b.example:443 HTTP/1.1\r\nHost: b.example:443\r\n\r\n".to_owned(),
            "always/connect",
            "tunnel",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let body = refusal(&mut world.send(SITE, 80, request.as_bytes()).await, "403").await;
        assert_eq!((&body["error"], &body["rule"]), (&"egress_denied".into(), &rule.into()), "{request}");
        assert!(body["reason"].as_str().unwrap().contains(reason), "{request} {body}");
        assert!(!body["remedy"].as_str().unwrap().is_empty());
        let receipt = world.receipt_after(count).await;
        assert_eq!((receipt.outcome, receipt.rule.to_string().as_str()), (Outcome::Denied, rule));
    }
    for request in [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], b"\x16\x03\x01", b"get / HTTP/1.1\r\n"] {
        world.send(SITE, 80, request).await.is_reset().await;
    }
    assert_eq!(world.dialled(), [], "nothing of it reached anybody");
    // The control.
    let _guest = world.send(SITE, 80, get("/", "").as_bytes()).await;
    let arrived = get("/", "Connection: close\r\n");
    assert_eq!(site.accept().await.next(arrived.len()).await, arrived.as_bytes());
}

#[tokio::test]
async fn without_any_rule_a_request_is_told_so_too() {
    let world = World::new("[]").await;
    let body =
        refusal(&mut world.send(OTHER, 80, b"GET / HTTP/1.1\r\nHost: c.example\r\n\r\n").await, "403").await;
    assert_eq!(body["remedy"], format!("allow the address {OTHER} on port 80 in the sandbox's policy"));
}

#[tokio::test]
async fn methods_and_paths_count() {
    let world = World::new(r#"[{"allow":"www.example.com","methods":["GET"],"paths":["/a"]}]"#).await;
    let site = world.server(SITE, 80).await;
    for request in [post("", ""), get("/b", ""), get("/a/../b", ""), get("/a/%2e%2e/b", ""), get("/A", "")] {
        let body = refusal(&mut world.send(SITE, 80, request.as_bytes()).await, "403").await;
        assert_eq!(body["rule"], "request/default", "{request}");
    }
    let _guest = world.send(SITE, 80, get("/a/c", "").as_bytes()).await;
    let arrived = get("/a/c", "Connection: close\r\n");
    assert_eq!(site.accept().await.next(arrived.len()).await, arrived.as_bytes());
    assert_eq!(world.dialled().len(), 1);
}

#[tokio::test]
async fn nothing_behind_a_request_leaves() {
    let world = World::new(r#"[{"allow":"www.example.com","paths":["/a"]}]"#).await;
    let site = world.server(SITE, 80).await;
    let evil = "GET /evil HTTP/1.1\r\nHost: www.example.com\r\n\r\n";
    for (lines, body) in [
        ("", ""),
        ("Content-Length: 0\r\n", ""),
        ("Content-Length: 5\r\n", "12345"),
        ("Transfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0A\r\n0123456789\r\n0\r\n\r\n"),
    ] {
        for size in [1, 7, 10_000] {
            let mut guest = world.connect(SITE, 80).await;
            for piece in [post(lines, body).as_bytes(), evil.as_bytes()].concat().chunks(size) {
                guest.send(piece).await;
            }
            let mut server = site.accept().await;
            let arrived = posted(lines, body);
            assert_eq!(server.next(arrived.len()).await, arrived);
            // The guest's end comes behind all that it sent.
            guest.send(evil.as_bytes()).await;
            guest.end().await;
            assert_eq!(server.rest().await, b"", "{lines:?} by {size}");
            server.send(ANSWER).await;
            drop(server);
            assert_eq!(guest.rest().await, ANSWER);
        }
    }
}

#[tokio::test]
async fn a_second_request_on_a_connection_is_never_sent() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    let mut guest = world.send(SITE, 80, get("/", "").as_bytes()).await;
    let mut server = site.accept().await;
    let arrived = get("/", "Connection: close\r\n");
    server.next(arrived.len()).await;
    // A server that does not care.
    server.send(ANSWER).await;
    assert_eq!(guest.next(ANSWER.len()).await, ANSWER);
    guest.send(get("/again", "").as_bytes()).await;
    guest.end().await;
    assert_eq!(server.rest().await, b"");
}

#[tokio::test]
async fn a_body_that_has_no_one_end_breaks_the_connection() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    for (count, bad) in ["zz\r\n", "5;a=b\r\n", "0\r\nTrailer: x\r\n\r\n", "3\nabc"].into_iter().enumerate() {
        let start = "3\r\nabc\r\n";
        let mut guest = world.send(SITE, 80, post("Transfer-Encoding: chunked\r\n", start).as_bytes()).await;
        let mut server = site.accept().await;
        let arrived = posted("Transfer-Encoding: chunked\r\n", start);
        assert_eq!(server.next(arrived.len()).await, arrived);
        guest.send(bad.as_bytes()).await;
        guest.is_reset().await;
        server.is_reset().await;
        let receipts = world.receipts(2 * count + 2).await;
        assert_eq!(receipts[2 * count].rule.to_string(), "always/framing");
        assert_eq!(receipts[2 * count + 1].sent, arrived.len() as u64);
    }
    // A body that is cut short is not taken for whole.
    let mut guest = world.send(SITE, 80, post("Content-Length: 5\r\n", "123").as_bytes()).await;
    let mut server = site.accept().await;
    guest.end().await;
    server.is_reset().await;
    guest.is_reset().await;
}

#[tokio::test]
async fn a_guest_that_has_nothing_more_to_say_still_gets_its_answer() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    let mut guest = world.send(SITE, 80, post("Content-Length: 3\r\n", "abc").as_bytes()).await;
    guest.end().await;
    let mut server = site.accept().await;
    assert_eq!(server.rest().await, posted("Content-Length: 3\r\n", "abc"));
    server.send(ANSWER).await;
    drop(server);
    assert_eq!(guest.rest().await, ANSWER);
}

#[tokio::test]
async fn an_answer_that_comes_early_is_not_lost() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    let mut guest = world.send(SITE, 80, post("Content-Length: 900000\r\n", "abc").as_bytes()).await;
    let mut server = site.accept().await;
    server.next(20).await;
    server.send(ANSWER).await;
    server.end().await;
    assert_eq!(guest.next(ANSWER.len()).await, ANSWER);
    guest.send(&[b'x'; 100_000]).await;
    assert_eq!(guest.rest().await, b"");
}

#[tokio::test]
async fn a_refusal_reaches_a_guest_that_is_still_sending() {
    let world = World::new("[]").await;
    let mut guest = world.send(SITE, 80, post("Content-Length: 900000\r\n", "abc").as_bytes()).await;
    guest.send(&[b'x'; 300_000]).await;
    assert_eq!(refusal(&mut guest, "403").await["rule"], "request/default");
}

const WEBSOCKET: &str = "Upgrade: websocket\r\n";

#[tokio::test]
async fn an_upgrade_that_the_server_agrees_to_becomes_a_tunnel() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    let request = get("/chat", &format!("Connection: keep-alive, Upgrade\r\n{WEBSOCKET}"));
    let mut guest = world.send(SITE, 80, request.as_bytes()).await;
    let mut server = site.accept().await;
    let arrived = get("/chat", &format!("{WEBSOCKET}Connection: Upgrade\r\n"));
    assert_eq!(server.next(arrived.len()).await, arrived.as_bytes());
    let agreed = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n";
    for byte in agreed {
        server.send(&[*byte]).await;
    }
    assert_eq!(guest.next(agreed.len()).await, agreed);
    converse(&mut guest, &mut server).await;
    world.enforcer.set_policy(policy("[]"));
    guest.is_reset().await;
    server.is_reset().await;
}

#[tokio::test]
async fn an_upgrade_that_the_server_refuses_is_no_tunnel() {
    let world = World::new(HOST).await;
    let site = world.server(SITE, 80).await;
    for refused in [
        "HTTP/1.1 426 Upgrade Required\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.1 1010\r\n",
        "HTTP/1.1 10",
    ] {
        let request = get("/chat", WEBSOCKET);
        let mut guest = world.send(SITE, 80, request.as_bytes()).await;
        let mut server = site.accept().await;
        server.next(get("/chat", &format!("{WEBSOCKET}Connection: Upgrade\r\n")).len()).await;
        guest.send(get("/evil", "").as_bytes()).await;
        server.send(refused.as_bytes()).await;
        if refused.len() < 13 {
            server.end().await;
        }
        assert_eq!(guest.next(refused.len()).await, refused.as_bytes());
        guest.send(get("/evil", "").as_bytes()).await;
        guest.end().await;
        assert_eq!(server.rest().await, b"", "after {refused}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_told() {
    let world = World::new(HOST).await;
    let body = refusal(&mut world.send(SITE, 80, get("/", "").as_bytes()).await, "502").await;
    assert_eq!(
        (&body["error"], &body["rule"]),
        (&"egress_failed".into(), &"request/site within ceiling/rule-1".into())
    );
    assert!(body["reason"].as_str().unwrap().contains("connection refused"), "{body}");
    assert_eq!(world.dialled().len(), 1);
}
