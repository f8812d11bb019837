use super::*;
use sandglass_egress::policy::Own;
use sandglass_egress::proxy::Dial as _;

use crate::fake::{Guest, KEY, PATIENCE, Served, Wire};

fn quick() -> Settings {
    Settings {
        head_timeout: Duration::from_millis(150),
        drain: Duration::from_millis(200),
        ..Settings::default()
    }
}

async fn ended(served: &mut Served) {
    tokio::time::timeout(PATIENCE, &mut served.done).await.expect("it ends").unwrap();
}

#[tokio::test]
async fn the_rest_face_over_the_wire() {
    let served = Served::start().await;
    let mut client = served.connect().await;
    client.send(format!("GET /v1/info HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n\r\n")).await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 200"));
    client.until(r#""isolation":"none""#).await;
}

#[tokio::test]
async fn every_answer_says_what_isolates_and_a_sandbox_cannot_say_otherwise() {
    let served = Served::start().await;
    let (guest, address) = Guest::listen().await;
    let (id, _) = served.fake.run(&[(8000, address)]);
    let said = |head: &[String]| -> Vec<String> {
        head.iter().filter(|line| line.starts_with("sandglass-isolation:")).cloned().collect()
    };
    let to = |port: u16| format!("E2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n");
    for (path, headers, status) in [
        ("/v1/info", format!("X-API-Key: {KEY}\r\n"), "200"),
        ("/v1/info", String::new(), "401"),
        ("/nowhere", format!("X-API-Key: {KEY}\r\n"), "404"),
        ("/", format!("E2b-Sandbox-Id: {id}\r\n"), "400"),
        ("/", to(9), "502"),
    ] {
        let mut client = served.connect().await;
        client.send(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n")).await;
        let head = client.head().await;
        assert!(head[0].contains(status), "{head:?}");
        assert_eq!(said(&head), ["sandglass-isolation: none"], "{head:?}");
    }
    let mut client = served.connect().await;
    client.send(format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", to(8000))).await;
    let mut inside = guest.accept().await;
    inside.head().await;
    let lie = "HTTP/1.1 200 OK\r\nSandglass-Isolation: virtual_machine\r\nsandglass-isolation: x\r\nContent-Length: 0\r\n\r\n";
    inside.send(lie).await;
    assert_eq!(said(&client.head().await), ["sandglass-isolation: none"]);
}

#[tokio::test]
async fn of_a_sandbox_s_request_the_host_alone_says_where_it_goes() {
    let served = Served::start().await;
    let (guest, address) = Guest::listen().await;
    let (id, _) = served.fake.run(&[(8000, address)]);
    let (other, other_address) = Guest::listen().await;
    let (other_id, _) = served.fake.run(&[(8000, other_address)]);
    let caller = SandboxId::random();
    let from_sandbox = || Wire::new(served.dial.enter(Own::Edge, &caller).unwrap());
    let routing = format!("E2b-Sandbox-Id: {other_id}\r\nE2b-Sandbox-Port: 8000\r\nX-API-Key: {KEY}\r\n");
    let hosts =
        ["localhost", "sbx.test", "sandbox.sbx.test", "api.sbx.test", "127.0.0.1", "8000-x.other.test", ""];
    let aliases = [".other.test", "-node.sbx.test", ".x.sbx.test"].map(|end| format!("8000-{other_id}{end}"));
    let zero = format!("08000-{other_id}.sbx.test");
    for host in hosts.into_iter().map(str::to_owned).chain(aliases).chain([zero]) {
        for headers in ["", &routing] {
            let mut client = from_sandbox();
            client.send(format!("GET /v1/info HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n")).await;
            let head = client.head().await;
            assert!(head[0].starts_with("HTTP/1.1 400"), "{host}: {head:?}");
        }
    }
    // Also of a second request, should there be one.
    let mut client = from_sandbox();
    client.send(format!("GET /v1/info HTTP/1.1\r\nHost: 8000-{id}.sbx.test\r\n{routing}\r\n")).await;
    let mut inside = guest.accept().await;
    let head = inside.head().await;
    assert!(head[0].starts_with("get /v1/info") || head[0].starts_with("GET /v1/info"), "{head:?}");
    assert!(!head.iter().any(|line| line.starts_with("e2b-sandbox-")), "{head:?}");
    inside.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 200"));
    client.send(format!("GET /v1/info HTTP/1.1\r\nHost: localhost\r\n{routing}\r\n")).await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 400"));
    // From outside, the same headers lead where they say.
    let mut outside = served.connect().await;
    outside.send(format!("GET / HTTP/1.1\r\nHost: localhost\r\n{routing}\r\n")).await;
    other.accept().await.head().await;
}

#[tokio::test]
async fn no_sandbox_reaches_a_guest_api_whatever_it_wants() {
    let served = Served::start().await;
    let (agent, address) = Guest::listen().await;
    let (id, _) = served.fake.run(&[(49983, address)]);
    let missing = SandboxId::random();
    let request = |id: &SandboxId| format!("GET /files HTTP/1.1\r\nHost: 49983-{id}.sbx.test\r\n\r\n");
    for of in [&id, &missing] {
        let mut client = Wire::new(served.dial.enter(Own::Edge, &id).unwrap());
        client.send(request(of)).await;
        let head = client.head().await;
        assert!(head[0].starts_with("HTTP/1.1 502"), "{head:?}");
    }
    // The control: a client does.
    let mut client = served.connect().await;
    client.send(request(&id)).await;
    let head = agent.accept().await.head().await;
    assert!(head[0].to_ascii_lowercase().starts_with("get /files"), "{head:?}");
}

#[tokio::test]
async fn a_place_of_a_sandbox_is_held_as_long_as_its_connection_and_takes_none_of_a_client() {
    let served =
        Served::with(Settings { max_connections: 1, drain: quick().drain, ..Settings::default() }).await;
    let (guest, address) = Guest::listen().await;
    let (id, _) = served.fake.run(&[(8000, address)]);
    let caller = SandboxId::random();
    let enter = || served.dial.enter(Own::Edge, &caller).map(Wire::new);
    let mut clients: Vec<_> = (0..32).map(|_| enter().unwrap()).collect();
    assert!(enter().is_err());
    let request = format!("GET / HTTP/1.1\r\nHost: 8000-{id}.sbx.test\r\n\r\n");
    clients[0].send(&request).await;
    let inside = guest.accept().await;
    let mut client = served.connect().await;
    client.send(&request).await;
    guest.accept().await.head().await;
    assert!(enter().is_err());
    drop((clients, inside));
    tokio::time::timeout(PATIENCE, async {
        while enter().is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn slow_clients_are_dropped() {
    let served = Served::with(quick()).await;
    for start in ["", "P", "PRI * HTTP/2.0\r\n", "GET / HTTP/1.1\r\nHost: x\r\nX: "] {
        let mut client = served.connect().await;
        client.send(start).await;
        assert_eq!(client.rest().await, "", "{start:?}");
    }
    // Also in the second request of a connection.
    let mut client = served.connect().await;
    client.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    client.head().await;
    client.send("GET /health HTTP/1.1\r\n").await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let served = Served::with(Settings { keep_alive: Duration::from_millis(50), ..quick() }).await;
    let mut client = served.connect().await;
    client.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 204"));
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn oversized_and_hostless_heads_are_refused() {
    let served = Served::start().await;
    let mut client = served.connect().await;
    client.send(format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "y".repeat(80 * 1024))).await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 431"));
    let mut client = served.connect().await;
    client.send(format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "A: b\r\n".repeat(200))).await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 431"));
    for head in ["GET /health HTTP/1.1\r\n\r\n", "GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"] {
        let mut client = served.connect().await;
        client.send(head).await;
        assert!(client.head().await[0].starts_with("HTTP/1.1 400"), "{head}");
    }
}

#[tokio::test]
async fn connections_beyond_the_cap_wait() {
    let served = Served::with(Settings { max_connections: 1, ..quick() }).await;
    let ask = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut first = served.connect().await;
    first.send(ask).await;
    first.head().await;
    let mut second = served.connect().await;
    second.send(ask).await;
    first.send(ask).await;
    first.head().await;
    drop(first);
    assert!(second.head().await[0].starts_with("HTTP/1.1 204"));
}

#[tokio::test]
async fn shutdown_lets_open_requests_finish_but_not_for_ever() {
    let (guest, address) = Guest::listen().await;
    for finishes in [true, false] {
        let mut served =
            Served::with(Settings { drain: if finishes { PATIENCE } else { Duration::ZERO }, ..quick() })
                .await;
        let (id, _) = served.fake.run(&[(80, address)]);
        let mut idle = served.connect().await;
        idle.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        idle.head().await;
        let mut client = served.connect().await;
        client.send(format!("GET / HTTP/1.1\r\nHost: 80-{id}.sbx.test\r\n\r\n")).await;
        let mut inside = guest.accept().await;
        inside.head().await;
        served.shutdown.cancel();
        assert_eq!(idle.rest().await, "");
        if finishes {
            inside.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi").await;
            client.until("hi").await;
        }
        assert_eq!(client.rest().await, "");
        ended(&mut served).await;
        assert!(tokio::net::TcpStream::connect(served.address).await.is_err());
    }
}

#[tokio::test]
async fn shutdown_ends_upgraded_connections() {
    let (guest, address) = Guest::listen().await;
    let mut served = Served::with(quick()).await;
    let (id, _) = served.fake.run(&[(80, address)]);
    let mut client = served.connect().await;
    let ask =
        format!("GET / HTTP/1.1\r\nHost: 80-{id}.sbx.test\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n");
    client.send(ask).await;
    let mut inside = guest.accept().await;
    inside.head().await;
    inside.send("HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n").await;
    client.head().await;
    served.shutdown.cancel();
    assert_eq!(client.rest().await, "");
    ended(&mut served).await;
}

#[tokio::test]
async fn an_answer_is_not_lost_by_a_client_that_still_sends() {
    let served = Served::start().await;
    let mut client = served.connect().await;
    let head = "POST /v2/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                Transfer-Encoding: chunked\r\n\r\n";
    client.send(head).await;
    assert!(client.head().await[0].starts_with("HTTP/1.1 401"));
    client.until("message").await;
    // More than any buffer between the two holds: it is read, and then the connection serves the next request.
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(1 << 16));
    for _ in 0..200 {
        client.send(&chunk).await;
    }
    client.send("0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    client.until("HTTP/1.1 204").await;
}
