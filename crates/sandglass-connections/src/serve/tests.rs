use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use sandglass_broker::ConnectionName;
use sandglass_egress::policy::{Effective, Own, Service};
use sandglass_egress::proxy::{Dial as _, Direct};
use sandglass_egress::resolver::{FixedNames, Resolved};
use sandglass_types::Error;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::grants::Reach;
use crate::request::tests::connection;

const CREDENTIAL: &str = "the-re+l=one";

#[derive(Debug, Default)]
struct Known {
    granted: Mutex<HashMap<String, Granted>>,
    used: Mutex<Vec<Use>>,
}

#[async_trait]
impl Grants for Known {
    async fn granted(&self, _: &SandboxId, name: &ConnectionName) -> Result<Option<Granted>, Error> {
        Ok(self.granted.lock().unwrap_or_else(PoisonError::into_inner).get(name.as_str()).cloned())
    }

    fn used(&self, _: &SandboxId, of: &Use) {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).push(of.clone());
    }
}

/// A server, a sandbox of it, and a service that answers every request with the same pieces.
struct World {
    known: Arc<Known>,
    dial: Direct,
    sandbox: SandboxId,
    heard: Arc<Mutex<Vec<String>>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Reads a request with all of its body.
async fn request_of(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    loop {
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece).await.unwrap_or_default();
        text.push_str(&String::from_utf8_lossy(&piece[..read]));
        let whole = text.split_once("\r\n\r\n").is_some_and(|(head, body)| {
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
            if head.contains("chunked") {
                body.ends_with("0\r\n\r\n")
            } else {
                body.len() >= length.unwrap_or(0usize)
            }
        });
        if read == 0 || whole {
            return text;
        }
    }
}

impl World {
    async fn new(answer: Vec<Vec<u8>>, change: Value) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (known, heard) = (Arc::new(Known::default()), Arc::new(Mutex::new(Vec::new())));
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let hearing = Arc::clone(&heard);
        let serving = async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let request = request_of(&mut stream).await;
                hearing.lock().unwrap().push(request);
                for piece in &answer {
                    let _gone = stream.write_all(piece).await;
                    let _gone = stream.flush().await;
                    tokio::task::yield_now().await;
                }
            }
        };
        tasks.spawn(stop.clone().run_until_cancelled_owned(serving));
        let resolved = Resolved { addresses: vec![Ipv4Addr::LOCALHOST], ttl: Duration::from_secs(60) };
        let names = BTreeMap::from([("api.test".parse().unwrap(), resolved)]);
        let roots = rustls::RootCertStore::empty();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let tls = tls.unwrap().with_root_certificates(roots).with_no_client_auth();
        let (dial, callers) = Direct::new(800, 1);
        let connections = Connections::new(
            Arc::clone(&known) as Arc<dyn Grants>,
            Arc::new(FixedNames(names)),
            tls,
            tasks.clone(),
            stop.clone(),
        );
        tasks.spawn(connections.serve(callers.connections));
        let mut written = json!({"target": format!("http://api.test:{port}"), "paths": ["/"]});
        for (key, value) in change.as_object().unwrap() {
            written[key] = value.clone();
        }
        let granted = Granted {
            connection: connection(&written),
            credential: CREDENTIAL.parse().unwrap(),
            reach: Reach::Trusted,
        };
        known.granted.lock().unwrap().insert("github".into(), granted);
        Self { known, dial, sandbox: SandboxId::random(), heard, tasks, stop }
    }

    /// Sends a request piece by piece, and reads all of the answer.
    async fn send(&self, pieces: &[&[u8]]) -> String {
        let mut stream = self.dial.enter(Own::Service(Service::Connections), &self.sandbox).unwrap();
        for piece in pieces {
            if stream.write_all(piece).await.is_err() {
                break;
            }
            tokio::task::yield_now().await;
        }
        let mut answer = Vec::new();
        let reading = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut answer));
        let _cut = reading.await.expect("an answer in time");
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn get(&self, path: &str) -> String {
        self.send(&[format!("GET {path} HTTP/1.1\r\nHost: github.broker.internal\r\n\r\n").as_bytes()]).await
    }

    fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }

    /// The receipts, once all streams are over.
    async fn used(&self, count: usize) -> Vec<Use> {
        for _ in 0..500 {
            let used = self.known.used.lock().unwrap().clone();
            if used.len() >= count {
                return used;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("too few receipts, of {} tasks", self.tasks.len());
    }
}

fn plain(body: &str) -> Vec<Vec<u8>> {
    vec![format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()]
}

#[tokio::test]
async fn the_service_sees_the_credential_and_the_sandbox_never_does() {
    let echo = format!(
        "{CREDENTIAL} {} {} {}",
        CREDENTIAL.replace('+', "%2B").replace('=', "%3D"),
        CREDENTIAL.replace('+', "\\u002b"),
        data_of(CREDENTIAL)
    );
    let world = World::new(plain(&echo), json!({})).await;
    let answer = world.get("/echo?a=b").await;
    let [heard] = &world.heard()[..] else { panic!("{:?}", world.heard()) };
    assert!(heard.starts_with("GET /echo?a=b HTTP/1.1\r\n"), "{heard}");
    assert!(heard.contains(&format!("authorization: Bearer {CREDENTIAL}\r\n")), "{heard}");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    assert_eq!(body.len(), echo.len());
    assert!(body.chars().filter(|c| *c != ' ').all(|c| c == '*'), "{body}");
    let used = world.used(1).await;
    assert_eq!((used[0].status, used[0].allowed, used[0].host.as_deref()), (200, true, Some("api.test")));
    assert_eq!(used[0].received, u64::try_from(echo.len()).unwrap());
}

/// The credential in base64, as it begins there.
fn data_of(text: &str) -> String {
    use std::fmt::Write as _;
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bits = String::new();
    for byte in text.bytes() {
        write!(bits, "{byte:08b}").unwrap();
    }
    let whole = bits.len() / 24 * 24;
    let digit = |at: usize| char::from(DIGITS[usize::from_str_radix(&bits[at..at + 6], 2).unwrap()]);
    (0..whole).step_by(6).map(digit).collect()
}

#[tokio::test]
async fn an_echo_is_taken_out_wherever_it_is_split() {
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len()).into_bytes();
    for at in 1..CREDENTIAL.len() {
        let (a, b) = CREDENTIAL.split_at(at);
        let head = b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\nTrailer: x-t\r\n\r\n".to_vec();
        let end = format!("0\r\nx-t: {CREDENTIAL}\r\n\r\n").into_bytes();
        let world =
            World::new(vec![head, chunk(&format!("<{a}")), chunk(&format!("{b}>")), end], json!({})).await;
        let answer = world.get("/").await;
        assert!(answer.starts_with("HTTP/1.1 500"), "{answer}");
        let body: String =
            answer.split_once("\r\n\r\n").unwrap().1.chars().filter(|c| "<*>".contains(*c)).collect();
        assert_eq!(body, format!("<{}>", "*".repeat(CREDENTIAL.len())), "at {at}: {answer}");
        assert!(!answer.contains("x-t:"), "{answer}");
    }
}

#[tokio::test]
async fn a_redirect_is_told_and_not_followed() {
    let head = format!(
        "HTTP/1.1 302 Found\r\nLocation: http://api.test/?key={CREDENTIAL}\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n"
    );
    let world = World::new(vec![head.into_bytes()], json!({})).await;
    let answer = world.get("/").await;
    let stars = "*".repeat(CREDENTIAL.len());
    assert!(answer.contains(&format!("location: http://api.test/?key={stars}\r\n")), "{answer}");
    assert!(!answer.to_ascii_lowercase().contains("set-cookie"), "{answer}");
    assert_eq!(world.heard().len(), 1);
}

#[tokio::test]
async fn what_can_not_be_searched_does_not_come_in() {
    for head in [
        "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nab",
        "nonsense\r\n\r\n",
    ] {
        let world = World::new(vec![head.as_bytes().to_vec()], json!({})).await;
        let answer = world.get("/").await;
        assert!(answer.starts_with("HTTP/1.1 502"), "{head}: {answer}");
        assert_eq!(world.used(1).await[0].status, 502);
    }
}

#[tokio::test]
async fn only_what_was_granted_goes_out_and_only_for_as_long() {
    let world = World::new(plain("ok"), json!({"paths": ["/a"]})).await;
    for request in [
        "GET /b HTTP/1.1\r\nHost: github.broker.internal\r\n\r\n",
        "DELETE /a HTTP/1.1\r\nHost: github.broker.internal\r\n\r\n",
        "GET /a/../b HTTP/1.1\r\nHost: github.broker.internal\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: gitlab.broker.internal\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: github.broker.internal\r\nX-HTTP-Method-Override: DELETE\r\n\r\n",
        "POST /a HTTP/1.1\r\nHost: github.broker.internal\r\nX-Amz-Copy-Source: /b\r\nContent-Length: 0\r\n\r\n",
    ] {
        let answer = world.send(&[request.as_bytes()]).await;
        assert!(answer.starts_with("HTTP/1.1 403"), "{request}: {answer}");
    }
    let other = world.send(&[b"GET /a HTTP/1.1\r\nHost: models.internal\r\n\r\n"]).await;
    assert!(other.starts_with("HTTP/1.1 421"), "{other}");
    assert_eq!(world.heard(), [""; 0], "nothing went out");
    assert!(world.get("/a").await.ends_with("ok"), "the control");
    world.known.granted.lock().unwrap().clear();
    assert!(world.get("/a").await.starts_with("HTTP/1.1 403"));
    assert_eq!(world.heard().len(), 1);
    let used = world.used(8).await;
    assert_eq!(used.iter().filter(|of| of.allowed).count(), 1);
    assert_eq!(used[0].method, "GET");
}

#[tokio::test]
async fn headers_are_the_same_wherever_they_are_split() {
    let request = format!(
        "POST /a HTTP/1.1\r\nHost: github.broker.internal\r\nAuthorization: Bearer {CREDENTIAL}x\r\n\
         Cookie: a=b\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    );
    let world = World::new(plain("ok"), json!({"limits": {"requests_per_minute": 1000}})).await;
    for at in 1..request.len() {
        let (a, b) = request.as_bytes().split_at(at);
        let answer = world.send(&[a, b]).await;
        assert!(answer.ends_with("ok"), "at {at}: {answer}");
    }
    for heard in world.heard() {
        let (head, body) = heard.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("authorization: Bearer {CREDENTIAL}\r\n")), "{heard}");
        assert_eq!(head.matches("uthorization").count(), 1, "{heard}");
        assert!(!head.contains("ookie"), "{heard}");
        assert!(body.contains("abc"), "{heard}");
    }
}

#[tokio::test]
async fn a_body_is_as_long_as_it_may_be_and_no_longer() {
    let world = World::new(plain("ok"), json!({"limits": {"body_bytes": 4}})).await;
    let host = "Host: github.broker.internal";
    let sized =
        |body: &str| format!("POST / HTTP/1.1\r\n{host}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    assert!(world.send(&[sized("1234").as_bytes()]).await.ends_with("ok"));
    assert!(world.send(&[sized("12345").as_bytes()]).await.starts_with("HTTP/1.1 413"));
    let chunked =
        format!("POST / HTTP/1.1\r\n{host}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n");
    assert!(world.send(&[chunked.as_bytes()]).await.starts_with("HTTP/1.1 413"));
    let used = world.used(3).await;
    assert_eq!(used[0].sent, 4);
    assert_eq!((used[1].status, used[2].status), (413, 413));
}

#[tokio::test]
async fn one_too_many_waits_for_the_next_minute() {
    let world = World::new(plain("ok"), json!({"limits": {"requests_per_minute": 2}})).await;
    for _ in 0..2 {
        assert!(world.get("/").await.ends_with("ok"));
    }
    let answer = world.get("/").await;
    assert!(answer.starts_with("HTTP/1.1 429") && answer.contains("retry-after: "), "{answer}");
    assert_eq!(world.heard().len(), 2);
}

#[tokio::test]
async fn a_team_s_connection_reaches_no_more_than_the_operator_allows() {
    let world = World::new(plain("ok"), json!({})).await;
    assert!(world.get("/").await.ends_with("ok"), "the control");
    world.known.granted.lock().unwrap().get_mut("github").unwrap().reach =
        Reach::Ceiling(Box::new(Effective::sealed()));
    let answer = world.get("/").await;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("does not allow"), "{answer}");
    assert_eq!(world.heard().len(), 1);
    assert!(!world.used(2).await[1].allowed);
}
