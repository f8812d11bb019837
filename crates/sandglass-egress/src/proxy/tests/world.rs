//! A sandbox's connections on loopback: guests that connect to any address, and servers that keep what reaches them.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use sandglass_types::net::Hostname;
use sandglass_types::{Generation, SandboxId, SystemClock};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::enforcer::{Enforcer, Ledger, NoRoom, Settings};
use crate::policy::{Edge, Effective, Operator, Own, Policy, Service, Services, Surroundings};
use crate::proxy::{Caps, Dial, serve};
use crate::receipt::Receipt;
use crate::remembered::Remembered;
use crate::resolver::{Resolve, ResolveError, Resolved};

/// Where `www.example.com` and `b.example` are, and where nothing was resolved to.
pub(super) const SITE: &str = "93.184.216.34";
pub(super) const OTHER: &str = "93.184.216.35";

/// Nothing here takes so long, unless it never ends.
const LONG: Duration = Duration::from_secs(20);

/// The result of what must come to an end.
pub(super) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, future).await.unwrap_or_else(|_| panic!("{what}: it does not end"))
}

#[derive(Debug)]
struct Lines(watch::Sender<Vec<Receipt>>);

impl Ledger for Lines {
    fn append(&self, line: String) -> Result<(), NoRoom> {
        let mut line: serde_json::Value = serde_json::from_str(&line).unwrap();
        let receipt = serde_json::from_value(line["receipt"].take()).unwrap();
        self.0.send_modify(|lines| lines.push(receipt));
        Ok(())
    }
}

#[derive(Debug)]
struct Nobody;

#[async_trait]
impl Resolve for Nobody {
    async fn resolve(&self, name: &Hostname) -> Result<Resolved, ResolveError> {
        panic!("{name} is resolved a second time");
    }
}

/// Goes to a server of the test instead, for addresses that have one, and keeps where to it was to go.
#[derive(Debug, Default)]
struct Routes {
    servers: Mutex<BTreeMap<SocketAddr, SocketAddr>>,
    dialled: Mutex<Vec<SocketAddr>>,
    /// What is the edge here.
    edge: Mutex<Option<SocketAddr>>,
    /// Who went there.
    entered: Mutex<Vec<(Own, SandboxId)>>,
}

#[async_trait]
impl Dial for Routes {
    async fn dial(&self, to: SocketAddr) -> io::Result<TcpStream> {
        self.dialled.lock().unwrap().push(to);
        let server = self.servers.lock().unwrap().get(&to).copied();
        TcpStream::connect(server.ok_or(io::ErrorKind::ConnectionRefused)?).await
    }

    fn enter(&self, own: Own, from: &SandboxId) -> io::Result<TcpStream> {
        self.entered.lock().unwrap().push((own, from.clone()));
        let server = *self.edge.lock().unwrap();
        let stream = std::net::TcpStream::connect(server.ok_or(io::ErrorKind::QuotaExceeded)?)?;
        stream.set_nonblocking(true)?;
        TcpStream::from_std(stream)
    }
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) enforcer: Arc<Enforcer>,
    receipts: watch::Receiver<Vec<Receipt>>,
    routes: Arc<Routes>,
    originals: Arc<Mutex<BTreeMap<SocketAddr, SocketAddr>>>,
    proxy: SocketAddr,
    pub(super) tasks: JoinSet<std::convert::Infallible>,
}

/// What an operator who allows everything adds to these rules.
pub(super) fn policy(rules: &str) -> Effective {
    let request: Policy = serde_json::from_str(&format!(r#"{{"rules":{rules}}}"#)).unwrap();
    let operator: Operator =
        serde_json::from_str(r#"{"ceiling":[{"allow":"0.0.0.0/0","ports":["1-65535"]}]}"#).unwrap();
    Effective::new(&request, &operator, Surroundings::default()).unwrap().0
}

/// Where names below `boxes.example` are answered, by [`own_domain`].
pub(super) const GATEWAY: &str = "10.11.12.1";

/// The same for a sandbox that may call models.
pub(super) fn with_models() -> Effective {
    let services = Services { address: GATEWAY.parse().unwrap(), granted: Service::ALL.into() };
    policy("[]").granting(services)
}

/// The same for a server with a domain of its own, where an operator allows its names alone.
pub(super) fn own_domain(rules: &str) -> Effective {
    let request: Policy = serde_json::from_str(&format!(r#"{{"rules":{rules}}}"#)).unwrap();
    let operator: Operator = serde_json::from_str(r#"{"ceiling":[{"allow":"*.boxes.example"}]}"#).unwrap();
    let edge = Edge { domain: "boxes.example".parse().unwrap(), address: GATEWAY.parse().unwrap() };
    let around = Surroundings { edge: Some(edge), ..Surroundings::default() };
    Effective::new(&request, &operator, around).unwrap().0
}

impl World {
    pub(super) async fn new(rules: &str) -> Self {
        Self::with(rules, Caps::default()).await
    }

    pub(super) async fn with(rules: &str, caps: Caps) -> Self {
        let (lines, receipts) = watch::channel(Vec::new());
        let bound = [("www.example.com", SITE), ("b.example", SITE), ("c.example", OTHER)];
        let bindings: Vec<_> = bound
            .into_iter()
            .map(|(name, address)| serde_json::json!({"name": name, "address": address, "remaining_ms": 3_600_000}))
            .collect();
        let enforcer = Enforcer::new(Settings {
            sandbox: SandboxId::random(),
            generation: Generation::FIRST,
            policy: policy(rules),
            remembered: Remembered {
                bindings: serde_json::from_value(bindings.into()).unwrap(),
                ..Remembered::default()
            },
            head: None,
            ledger: Arc::new(Lines(lines)),
            resolver: Arc::new(Nobody),
            clock: Arc::new(SystemClock),
            totals: Arc::default(),
        });
        let (routes, originals) = (Arc::new(Routes::default()), Arc::new(Mutex::new(BTreeMap::new())));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let proxy = listener.local_addr().unwrap();
        let known: Arc<Mutex<BTreeMap<SocketAddr, SocketAddr>>> = Arc::clone(&originals);
        let original = move |stream: &TcpStream| {
            let guest = stream.peer_addr()?;
            Ok(*known.lock().unwrap().get(&guest).unwrap())
        };
        let mut tasks = JoinSet::new();
        let dial: Arc<dyn Dial> = Arc::clone(&routes) as _;
        tasks.spawn(serve(Arc::clone(&enforcer), listener, original, dial, caps));
        Self { enforcer, receipts, routes, originals, proxy, tasks }
    }

    /// A server for an address.
    pub(super) async fn server(&self, address: &str, port: u16) -> Server {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        self.routes.servers.lock().unwrap().insert(to(address, port), at);
        Server(listener)
    }

    /// The edge.
    pub(super) async fn edge(&self) -> Server {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        *self.routes.edge.lock().unwrap() = Some(listener.local_addr().unwrap());
        Server(listener)
    }

    /// A connection of the guest.
    pub(super) async fn connect(&self, address: &str, port: u16) -> Peer {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        self.originals.lock().unwrap().insert(socket.local_addr().unwrap(), to(address, port));
        let stream = soon("connecting", socket.connect(self.proxy)).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Peer(stream)
    }

    /// A connection of the guest that begins with these bytes.
    pub(super) async fn send(&self, address: &str, port: u16, bytes: &[u8]) -> Peer {
        let mut guest = self.connect(address, port).await;
        guest.send(bytes).await;
        guest
    }

    /// The addresses that were connected to.
    pub(super) fn dialled(&self) -> Vec<SocketAddr> {
        self.routes.dialled.lock().unwrap().clone()
    }

    /// The sandboxes that went to the server itself.
    pub(super) fn entered(&self) -> Vec<(Own, SandboxId)> {
        self.routes.entered.lock().unwrap().clone()
    }

    /// All receipts, once there are so many.
    pub(super) async fn receipts(&self, count: usize) -> Vec<Receipt> {
        let mut receipts = self.receipts.clone();
        soon("receipts", receipts.wait_for(|lines| lines.len() >= count)).await.unwrap().clone()
    }

    /// The next receipt, which is the only one since `count` were there.
    pub(super) async fn receipt_after(&self, count: usize) -> Receipt {
        let receipts = self.receipts(count + 1).await;
        assert_eq!(receipts.len(), count + 1, "{receipts:?}");
        receipts[count].clone()
    }
}

pub(super) fn to(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

pub(super) struct Server(TcpListener);

impl Server {
    pub(super) async fn accept(&self) -> Peer {
        Peer(soon("accepting", self.0.accept()).await.unwrap().0)
    }

    /// Nobody connected, so far.
    pub(super) async fn is_untouched(&self) -> bool {
        tokio::select! {
            biased;
            _ = self.0.accept() => false,
            () = tokio::task::yield_now() => true,
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Peer(pub(super) TcpStream);

impl Peer {
    pub(super) async fn send(&mut self, bytes: &[u8]) {
        soon("sending", self.0.write_all(bytes)).await.unwrap();
    }

    pub(super) async fn end(&mut self) {
        self.0.shutdown().await.unwrap();
    }

    /// The next bytes.
    pub(super) async fn next(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        soon("receiving", self.0.read_exact(&mut bytes)).await.unwrap();
        bytes
    }

    /// All until the end of the stream.
    pub(super) async fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        soon("the end", self.0.read_to_end(&mut bytes)).await.unwrap();
        bytes
    }

    /// Asserts that the connection is reset, after whatever bytes.
    pub(super) async fn is_reset(&mut self) {
        let mut bytes = Vec::new();
        let error = soon("a reset", self.0.read_to_end(&mut bytes)).await.expect_err("a reset");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "after {bytes:?}");
    }
}

/// Asserts that both can send to each other.
pub(super) async fn converse(guest: &mut Peer, server: &mut Peer) {
    for text in [&b"there"[..], b"and back"] {
        guest.send(text).await;
        assert_eq!(server.next(text.len()).await, text);
        server.send(text).await;
        assert_eq!(guest.next(text.len()).await, text);
    }
}

/// The first record that a TLS client sends, with these extensions of a ClientHello.
pub(super) fn hello(sni: Option<&str>, encrypted: bool) -> Vec<u8> {
    let vector = |width: usize, content: &[u8]| {
        let length = u32::try_from(content.len()).unwrap().to_be_bytes();
        [&length[4 - width..], content].concat()
    };
    let mut extensions = Vec::new();
    if let Some(name) = sni {
        let list = vector(2, &[&[0][..], &vector(2, name.as_bytes())].concat());
        extensions.extend([&[0, 0][..], &vector(2, &list)].concat());
    }
    if encrypted {
        extensions.extend([&[0xfe, 0x0d][..], &vector(2, &[0; 20])].concat());
    }
    let body = [
        &[3, 3][..],
        &[7; 32],
        &vector(1, &[]),
        &vector(2, &[0x13, 0x01]),
        &vector(1, &[0]),
        &vector(2, &extensions),
    ]
    .concat();
    [&[22, 3, 1][..], &vector(2, &[&[1][..], &vector(3, &body)].concat())].concat()
}
