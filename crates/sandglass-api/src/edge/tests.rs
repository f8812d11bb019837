use crate::backend::Backend as _;
use crate::fake::{Guest, PATIENCE, Served, Wire};
use bytes::Bytes;
use http::{Request, Version};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandglass_control::TrafficToken;
use sandglass_egress::policy::RequestHost;
use sandglass_types::{ErrorKind, SandboxId};

/// A server, a sandbox, and what listens on its port 8000.
async fn with_guest() -> (Served, SandboxId, Guest) {
    let served = Served::start().await;
    let (guest, address) = Guest::listen().await;
    let (id, _) = served.fake.run(&[(8000, address), (49983, address)]);
    (served, id, guest)
}

/// The head of a request to a port; `rest` are further header lines.
fn head(line: &str, id: &SandboxId, port: u16, rest: &str) -> String {
    format!(
        "{line} HTTP/1.1\r\nHost: localhost:3000\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n{rest}\r\n"
    )
}

async fn status_and_body(wire: &mut Wire) -> (String, String) {
    let lines = wire.head().await;
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.unwrap_or_else(|| panic!("no length: {lines:?}"));
    let mut body = String::new();
    if length != "0" {
        body = wire.until("}").await;
        assert_eq!(body.len().to_string(), length);
    }
    (lines[0].clone(), body)
}

#[tokio::test]
async fn a_request_and_its_answer_pass() {
    let (served, id, guest) = with_guest().await;
    let mut client = served.connect().await;
    let more = "X-Access-Token: t\r\nConnection: keep-alive, x-hop\r\nX-Hop: 1\r\nContent-Length: 5\r\n";
    client.send(head("POST /a%2Fb?c=d", &id, 8000, more) + "hello").await;
    let mut inside = guest.accept().await;
    let lines = inside.head().await;
    assert_eq!(lines[0], "POST /a%2Fb?c=d HTTP/1.1");
    for line in [
        "host: localhost:3000",
        "x-access-token: t",
        "content-length: 5",
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-host: localhost:3000",
        "x-forwarded-proto: http",
    ] {
        assert!(lines.iter().any(|got| got == line), "{line} is not in {lines:?}");
    }
    assert!(!lines.iter().any(|line| line.contains("hop")), "{lines:?}");
    inside.until("hello").await;
    inside.send("HTTP/1.1 418 Teapot\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nContent-Length: 2\r\n\r\nhi").await;
    let lines = client.head().await;
    assert!(lines[0].starts_with("HTTP/1.1 418"), "{lines:?}");
    assert!(lines.contains(&"x-mine: 1".to_owned()));
    assert!(!lines.iter().any(|line| line.starts_with("keep-alive")), "{lines:?}");
    client.until("hi").await;
    // The same connection carries the next request, which has a connection of its own inside.
    client.send(head("GET /next", &id, 8000, "")).await;
    let mut inside = guest.accept().await;
    assert_eq!(inside.head().await[0], "GET /next HTTP/1.1");
}

#[tokio::test]
async fn host_names_route_too() {
    let (served, id, guest) = with_guest().await;
    let mut client = served.connect().await;
    client.send(format!("GET / HTTP/1.1\r\nHost: 8000-{id}.sbx.test:80\r\n\r\n")).await;
    let lines = guest.accept().await.head().await;
    assert!(lines.contains(&format!("host: 8000-{id}.sbx.test:80")), "{lines:?}");
}

#[tokio::test]
async fn what_does_not_reach_a_sandbox() {
    let (served, id, guest) = with_guest().await;
    let mut client = served.connect().await;
    let other = SandboxId::random();
    for (request, status, message) in [
        (head("GET /health", &other, 49983, ""), 502, "The sandbox was not found"),
        (head("GET /", &id, 9, ""), 502, "The sandbox is running but port is not open"),
        (head("POST /init", &id, 49983, "Content-Length: 0\r\n"), 404, "Not found"),
        (head("POST /%69nit/", &id, 49983, "Content-Length: 0\r\n"), 404, "Not found"),
    ] {
        client.send(&request).await;
        let (line, body) = status_and_body(&mut client).await;
        assert!(line.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {line}");
        assert!(body.contains(message) && body.contains(&format!("\"code\":{status}")), "{body}");
    }
    client.send(head("CONNECT x:1", &id, 8000, "")).await;
    assert!(client.head().await[0].contains("40"), "refused");
    let mut client = served.connect().await;
    client.send(format!("GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {id}\r\n\r\n")).await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 400"));
    client.until("Missing header: E2b-Sandbox-Port").await;
    assert!(!guest.is_wanted().await);
}

#[tokio::test]
async fn ports_want_the_traffic_token_and_the_guest_never_sees_it() {
    let served = Served::start().await;
    let (guest, address) = Guest::listen().await;
    let token = TrafficToken::new("secret".into());
    let ports = [(8000, address), (8001, address), (49983, address)];
    let (id, _) = served.fake.run_behind(&ports, Some(token.clone()), None);
    let mut client = served.connect().await;
    let of_8000 = token.for_port(8000.try_into().unwrap());
    let send = |value: &str| format!("e2b-traffic-access-token: {value}\r\n");
    for (port, headers, message) in [
        (8000, String::new(), "Token header 'e2b-traffic-access-token' is missing"),
        (8000, send(""), "Provided token in header 'e2b-traffic-access-token' is invalid"),
        (8000, send("Secret"), "is invalid"),
        (8000, send("secret") + &send("secret"), "is invalid"),
        (8001, send(&of_8000), "is invalid"),
    ] {
        client.send(head("GET /", &id, port, &headers)).await;
        let (line, body) = status_and_body(&mut client).await;
        assert!(line.starts_with("HTTP/1.1 403"), "{headers}: {line}");
        assert!(body.contains(message) && body.contains("\"code\":403"), "{body}");
    }
    assert!(!guest.is_wanted().await);
    // The guest API has its own, whatever comes along.
    for (port, headers) in [(8000, send("secret")), (8000, send(&of_8000)), (49983, send("secret"))] {
        client.send(head("GET /", &id, port, &headers)).await;
        let mut inside = guest.accept().await;
        let lines = inside.head().await;
        assert!(!lines.iter().any(|line| line.contains("traffic")), "{lines:?}");
        inside.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").await;
        assert!(status_and_body(&mut client).await.0.starts_with("HTTP/1.1 200"));
    }
}

#[tokio::test]
async fn programs_see_the_host_that_was_asked_for() {
    let served = Served::start().await;
    let (guest, address) = Guest::listen().await;
    let mask = RequestHost::try_from("localhost:${PORT}".to_owned()).unwrap();
    let (id, _) = served.fake.run_behind(&[(8000, address), (49983, address)], None, Some(mask));
    for (port, host) in [(8000, "host: localhost:8000"), (49983, "host: localhost:3000")] {
        let mut client = served.connect().await;
        client.send(head("GET /", &id, port, "")).await;
        let lines = guest.accept().await.head().await;
        assert!(lines.iter().any(|line| line == host), "{lines:?}");
        assert!(lines.iter().any(|line| line == "x-forwarded-host: localhost:3000"), "{lines:?}");
    }
}

#[tokio::test]
async fn hostile_answers_become_502() {
    let (served, id, guest) = with_guest().await;
    let long = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "y".repeat(100 * 1024));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "A: b\r\n".repeat(200));
    for answer in [
        "",
        "garbage\r\n\r\n",
        "HTTP/1.1 200 OK\r\nBad Header: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        "HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        "SSH-2.0-OpenSSH_9.9\r\n",
        &long,
        &many,
    ] {
        let mut client = served.connect().await;
        client.send(head("GET /", &id, 8000, "")).await;
        let mut inside = guest.accept().await;
        inside.head().await;
        inside.send(answer).await;
        drop(inside);
        let (line, body) = status_and_body(&mut client).await;
        let shown = &answer[..answer.len().min(60)];
        assert!(line.starts_with("HTTP/1.1 502"), "{shown}: {line}");
        assert!(!body.contains("was not found") && !body.contains("not open"), "{shown}: {body}");
    }
}

#[tokio::test]
async fn lying_lengths_in_answers_are_framed_anew() {
    let (served, id, guest) = with_guest().await;
    let mut client = served.connect().await;
    client.send(head("GET /", &id, 8000, "")).await;
    let mut inside = guest.accept().await;
    inside.head().await;
    inside
        .send("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
        .await;
    let lines = client.head().await;
    assert!(lines.contains(&"transfer-encoding: chunked".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.starts_with("content-length")), "{lines:?}");
    client.until("5\r\nhello\r\n0\r\n\r\n").await;
    // What follows a complete answer goes nowhere.
    client.send(head("GET /", &id, 8000, "")).await;
    let mut inside = guest.accept().await;
    inside.head().await;
    inside
        .send("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\nX-Smuggled: 1\r\n\r\n")
        .await;
    client.head().await;
    client.until("a").await;
    client.send("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    let answer = client.rest().await;
    assert!(answer.starts_with("HTTP/1.1 204") && !answer.contains("Smuggled"), "{answer}");
}

#[tokio::test]
async fn nothing_can_be_smuggled_into_a_sandbox_connection() {
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";
    let both = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n";
    let swapped = "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n";
    for (more, body) in [
        (both, format!("0\r\n\r\n{smuggled}")),
        (swapped, format!("0\r\n\r\n{smuggled}")),
        ("Content-Length: 0\r\nContent-Length: 40\r\n", smuggled.to_owned()),
        ("Content-Length: 0, 40\r\n", smuggled.to_owned()),
        ("Content-Length: +0\r\n", smuggled.to_owned()),
        ("Content-Length : 40\r\n", smuggled.to_owned()),
        ("Transfer-Encoding: xchunked\r\n", smuggled.to_owned()),
        ("Transfer-Encoding: chunked, identity\r\n", smuggled.to_owned()),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", smuggled.to_owned()),
        (" folded: x\r\n", smuggled.to_owned()),
        ("X: a\r\n Content-Length: 40\r\n", smuggled.to_owned()),
        ("Transfer-Encoding: chunked\r\n", format!("0;ext=\n\r\n\r\n{smuggled}")),
        ("Transfer-Encoding: chunked\r\n", format!("0x0\r\n\r\n{smuggled}")),
        ("Transfer-Encoding: chunked\r\n", format!("-1\r\n\r\n{smuggled}")),
        ("Transfer-Encoding: chunked\r\n", format!("10000000000000000\r\n\r\n{smuggled}")),
    ] {
        let (served, id, guest) = with_guest().await;
        let mut client = served.connect().await;
        client.send(head("POST /first", &id, 8000, more) + &body).await;
        // Whether it is refused or passes in one reading: inside there is at most one request, and it ends where
        // its connection does.
        let inside = async {
            let mut inside = guest.accept().await;
            inside.send("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n").await;
            inside.rest().await
        };
        let mut inside = std::pin::pin!(inside);
        let seen = tokio::select! {
            seen = inside.as_mut() => seen,
            answer = client.rest() => {
                if answer.starts_with("HTTP/1.1 400") {
                    continue;
                }
                inside.await
            }
        };
        // Empty: the body was found malformed before anything was sent on.
        assert!(seen.is_empty() || seen.starts_with("POST /first HTTP/1.1\r\n"), "{more}: {seen}");
        assert!(!seen.contains("smuggled"), "{more}: {seen}");
        let framings = seen.matches("content-length").count() + seen.matches("transfer-encoding").count();
        assert!(framings <= 1, "{more}: {seen}");
    }
}

#[tokio::test]
async fn answers_stream_as_they_come() {
    let (served, id, guest) = with_guest().await;
    let mut client = served.connect().await;
    client.send(head("GET /events", &id, 8000, "")).await;
    let mut inside = guest.accept().await;
    inside.head().await;
    inside.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    client.head().await;
    for text in ["one", "two", "six"] {
        inside.send(format!("3\r\n{text}\r\n")).await;
        client.until(&format!("3\r\n{text}\r\n")).await;
    }
    inside.send("0\r\n\r\n").await;
    client.until("0\r\n\r\n").await;
}

#[tokio::test]
async fn requests_stream_as_they_come() {
    let (served, id, guest) = with_guest().await;
    // Also with GET, for which a body is unusual.
    for method in ["POST", "GET"] {
        let mut client = served.connect().await;
        client.send(head(&format!("{method} /up"), &id, 8000, "Transfer-Encoding: chunked\r\n")).await;
        client.send("3\r\none\r\n").await;
        let mut inside = guest.accept().await;
        inside.head().await;
        inside.until("3\r\none\r\n").await;
        client.send("3\r\ntwo\r\n0\r\n\r\n").await;
        inside.until("3\r\ntwo\r\n0\r\n\r\n").await;
        inside.send("HTTP/1.1 204 No Content\r\n\r\n").await;
        assert!(client.head().await[0].starts_with("HTTP/1.1 204"));
    }
}

#[tokio::test]
async fn a_client_that_waits_to_send_is_told_to() {
    let (served, id, guest) = with_guest().await;
    let mut client = served.connect().await;
    client.send(head("POST /up", &id, 8000, "Expect: 100-continue\r\nContent-Length: 2\r\n")).await;
    let mut inside = guest.accept().await;
    let lines = inside.head().await;
    assert!(!lines.iter().any(|line| line.starts_with("expect")), "{lines:?}");
    assert!(client.head().await[0].starts_with("HTTP/1.1 100"));
    client.send("hi").await;
    inside.until("hi").await;
}

#[tokio::test]
async fn old_servers_that_end_with_the_connection() {
    let (served, id, guest) = with_guest().await;
    let mut client = served.connect().await;
    client.send(head("GET /", &id, 8000, "")).await;
    let mut inside = guest.accept().await;
    inside.head().await;
    inside.send("HTTP/1.0 200 OK\r\n\r\nhello").await;
    drop(inside);
    let lines = client.head().await;
    assert!(lines.contains(&"transfer-encoding: chunked".to_owned()), "{lines:?}");
    client.until("5\r\nhello\r\n0\r\n\r\n").await;
    client.send(head("HEAD /", &id, 8000, "Connection: close\r\n")).await;
    let mut inside = guest.accept().await;
    inside.head().await;
    inside.send("HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n").await;
    assert!(client.rest().await.contains("content-length: 5"));
}

#[tokio::test]
async fn a_killed_sandbox_cuts_its_streams() {
    let (served, id, guest) = with_guest().await;
    for framing in ["Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n", "Content-Length: 9\r\n\r\none"] {
        let (id, live) = served.fake.run(&[(8000, guest.address())]);
        let mut client = served.connect().await;
        client.send(head("GET /", &id, 8000, "")).await;
        let mut inside = guest.accept().await;
        inside.head().await;
        inside.send(format!("HTTP/1.1 200 OK\r\n{framing}")).await;
        client.until("\r\none").await;
        served.fake.end(&id);
        assert!(live.gone.is_cancelled());
        let rest = client.rest().await;
        assert!(!rest.contains('0'), "a proper end: {rest:?}");
        assert_eq!(inside.rest().await, "", "the connection into the sandbox ends too");
        let mut client = served.connect().await;
        client.send(head("GET /health", &id, 49983, "")).await;
        assert!(status_and_body(&mut client).await.1.contains("The sandbox was not found"));
    }
    // One that has not answered yet.
    let mut client = served.connect().await;
    client.send(head("GET /", &id, 8000, "")).await;
    guest.accept().await.head().await;
    served.fake.end(&id);
    let (line, body) = status_and_body(&mut client).await;
    assert!(line.starts_with("HTTP/1.1 502") && body.contains("was not found"), "{line} {body}");
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_connection_inside() {
    let (served, id, guest) = with_guest().await;
    for answered in [false, true] {
        let mut client = served.connect().await;
        client.send(head("GET /", &id, 8000, "")).await;
        let mut inside = guest.accept().await;
        inside.head().await;
        if answered {
            inside.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\none").await;
            client.until("one").await;
        }
        drop(client);
        assert_eq!(inside.rest().await, "");
    }
}

#[tokio::test]
async fn upgrades_pass_both_ways() {
    let (served, id, guest) = with_guest().await;
    let ask =
        head("GET /ws", &id, 8000, "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n");
    let mut client = served.connect().await;
    client.send(&ask).await;
    let mut inside = guest.accept().await;
    let lines = inside.head().await;
    for line in ["connection: upgrade", "upgrade: websocket", "sec-websocket-key: k"] {
        assert!(lines.contains(&line.to_owned()), "{lines:?}");
    }
    let accept = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                  Sec-WebSocket-Accept: a\r\n\r\nearly";
    inside.send(accept).await;
    let lines = client.head().await;
    assert!(lines[0].starts_with("HTTP/1.1 101"), "{lines:?}");
    for line in ["connection: upgrade", "upgrade: websocket", "sec-websocket-accept: a"] {
        assert!(lines.contains(&line.to_owned()), "{lines:?}");
    }
    client.until("early").await;
    client.send("ping").await;
    inside.until("ping").await;
    inside.send("pong").await;
    client.until("pong").await;
    served.fake.end(&id);
    assert_eq!(client.rest().await, "");
    assert_eq!(inside.rest().await, "");
}

#[tokio::test]
async fn upgrades_that_are_not_carried() {
    let (served, id, guest) = with_guest().await;
    // Refused by the sandbox: an ordinary answer.
    let mut client = served.connect().await;
    client.send(head("GET /ws", &id, 8000, "Connection: Upgrade\r\nUpgrade: websocket\r\n")).await;
    let mut inside = guest.accept().await;
    inside.head().await;
    inside.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n").await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 403"));
    // HTTP/2 over an upgrade, and any on the guest API, would go past the checks on paths.
    for (port, protocol) in [(8000, "h2c"), (49983, "websocket")] {
        let mut client = served.connect().await;
        client
            .send(head("GET /", &id, port, &format!("Connection: Upgrade\r\nUpgrade: {protocol}\r\n")))
            .await;
        let lines = guest.accept().await.head().await;
        assert!(!lines.iter().any(|line| line.contains("upgrade")), "{lines:?}");
    }
}

#[tokio::test]
async fn http_2_outside_is_http_1_inside() {
    let (served, id, guest) = with_guest().await;
    let stream = tokio::net::TcpStream::connect(served.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let tasks = tokio_util::task::TaskTracker::new();
    tasks.spawn(connection);
    let request = Request::post(format!("http://8000-{id}.sbx.test/x?y"))
        .version(Version::HTTP_2)
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .body(Full::new(Bytes::from_static(b"hello")).boxed())
        .unwrap();
    let (answer, mut inside) = tokio::join!(sender.send_request(request), async {
        let mut inside = guest.accept().await;
        let lines = inside.head().await;
        assert_eq!(lines[0], "POST /x?y HTTP/1.1");
        assert!(lines.contains(&format!("host: 8000-{id}.sbx.test")), "{lines:?}");
        assert!(lines.contains(&"cookie: a=1; b=2".to_owned()), "{lines:?}");
        inside.until("hello").await;
        inside
            .send("HTTP/1.1 200 OK\r\nConnection: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            .await;
        inside
    });
    let answer = answer.unwrap();
    assert_eq!(answer.status(), 200);
    let mut body = answer.into_body();
    let frame = tokio::time::timeout(PATIENCE, body.frame()).await.unwrap().unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "one");
    // Killed: the stream is reset, which is not an end.
    served.fake.end(&id);
    let cut = tokio::time::timeout(PATIENCE, body.frame()).await.unwrap().expect("no clean end");
    assert!(cut.is_err());
    assert_eq!(inside.rest().await, "");
    // The connection itself lives on.
    let request = Request::get("http://localhost/health").body(Empty::new().boxed()).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().status(), 204);
}

#[tokio::test]
async fn who_may_use_a_port_wakes_a_paused_sandbox_and_nobody_else() {
    let (served, id, guest) = with_guest().await;
    served.fake.put_to_sleep(&id, [Some("secret"), Some("mine")], None);
    let mut client = served.connect().await;
    let traffic = |value: &str| format!("e2b-traffic-access-token: {value}\r\n");
    let access = |value: &str| format!("X-Access-Token: {value}\r\n");
    for (line, port, headers, status) in [
        ("GET /", 8000, String::new(), 403),
        ("GET /", 8000, traffic("wrong"), 403),
        ("GET /", 8000, access("mine"), 403),
        ("GET /health", 49983, String::new(), 403),
        ("GET /health", 49983, access("secret"), 403),
        ("GET /health", 49983, traffic("secret"), 403),
        ("GET /health", 49983, access("mine") + &access("mine"), 403),
        ("GET /files?signature=v1_x", 49983, String::new(), 403),
        ("GET /init", 49983, access("mine"), 404),
    ] {
        client.send(head(line, &id, port, &headers)).await;
        let (answer, _) = status_and_body(&mut client).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{line} {port} {headers}: {answer}");
        assert!(served.fake.sleeper(&id).await.unwrap().is_some(), "{line} {port} {headers} woke it");
    }
    client.send(head("GET /once", &id, 8000, &traffic("secret"))).await;
    assert_eq!(guest.accept().await.head().await[0], "GET /once HTTP/1.1");
    assert!(served.fake.sleeper(&id).await.unwrap().is_none());

    let (id, _) = served.fake.run(&[(49983, guest.address())]);
    served.fake.put_to_sleep(&id, [Some("secret"), Some("mine")], None);
    let mut client = served.connect().await;
    client.send(head("GET /health", &id, 49983, &access("mine"))).await;
    assert_eq!(guest.accept().await.head().await[0], "GET /health HTTP/1.1");
}

#[tokio::test]
async fn what_can_not_be_woken_says_why() {
    let (served, _, guest) = with_guest().await;
    for (kind, status, message) in [
        (ErrorKind::Quota, 429, "quota"),
        (ErrorKind::Capacity, 503, "sandbox_capacity_unavailable"),
        (ErrorKind::NotFound, 502, "The sandbox was not found"),
        (ErrorKind::Internal, 503, "could not be resumed"),
        (ErrorKind::Conflict, 503, "could not be resumed"),
    ] {
        let (id, _) = served.fake.run(&[(8000, guest.address())]);
        served.fake.put_to_sleep(&id, [None, None], Some(kind));
        let mut client = served.connect().await;
        client.send(head("GET /", &id, 8000, "")).await;
        let (line, body) = status_and_body(&mut client).await;
        assert!(line.starts_with(&format!("HTTP/1.1 {status}")), "{kind:?}: {line}");
        assert!(body.contains(message), "{kind:?}: {body}");
    }
    assert!(!guest.is_wanted().await);
}
