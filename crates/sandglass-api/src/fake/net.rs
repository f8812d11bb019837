//! The ends of connections, byte by byte.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use sandglass_egress::proxy::Direct;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::Fake;
use crate::backend::Stream;
use crate::server::Tls;

/// A server of the test's product on a port of its own; dropping it ends it.
pub(crate) struct Served {
    pub(crate) fake: Arc<Fake>,
    pub(crate) address: SocketAddr,
    pub(crate) dial: Direct,
    pub(crate) shutdown: CancellationToken,
    pub(crate) done: tokio::task::JoinHandle<()>,
}

impl Served {
    pub(crate) async fn start() -> Self {
        Self::with(crate::server::Settings { drain: Duration::from_millis(200), ..Default::default() }).await
    }

    pub(crate) async fn with(settings: crate::server::Settings) -> Self {
        Self::behind(None, settings).await
    }

    /// With TLS, if there is any.
    pub(crate) async fn behind(tls: Option<Tls>, settings: crate::server::Settings) -> Self {
        let fake = Fake::new();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let (dial, callers) = Direct::new(800, 1);
        let running =
            crate::server::run(listener, callers.edge, tls, fake.clone(), shutdown.clone(), settings);
        #[allow(clippy::disallowed_methods, reason = "the handle is kept")]
        let done = tokio::spawn(running);
        Self { fake, address, dial, shutdown, done }
    }

    pub(crate) async fn connect(&self) -> Wire {
        Wire::new(TcpStream::connect(self.address).await.unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.done.abort();
    }
}

/// The longest that a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Either end of a connection, byte by byte.
pub(crate) struct Wire {
    stream: Box<dyn Stream>,
    read: Vec<u8>,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        // What a sandbox sends never was on a network, and knows no such thing.
        let _is_local = stream.set_nodelay(true);
        Self::over(Box::new(stream))
    }

    pub(crate) const fn over(stream: Box<dyn Stream>) -> Self {
        Self { stream, read: Vec::new() }
    }

    /// What it goes over, which had nothing to read yet.
    pub(crate) fn into_stream(self) -> Box<dyn Stream> {
        assert!(self.read.is_empty(), "{:?}", self.read);
        self.stream
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        use tokio::io::AsyncWriteExt as _;
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Reads more; `false` at the end, however it came.
    async fn more(&mut self) -> bool {
        use tokio::io::AsyncReadExt as _;
        let read = tokio::time::timeout(PATIENCE, self.stream.read_buf(&mut self.read)).await;
        matches!(read.expect("nothing came"), Ok(1..))
    }

    /// Reads until `mark` was seen, and returns all up to its end.
    pub(crate) async fn until(&mut self, mark: &str) -> String {
        loop {
            if let Some(at) = self.read.windows(mark.len()).position(|window| window == mark.as_bytes()) {
                let rest = self.read.split_off(at + mark.len());
                return String::from_utf8_lossy(&std::mem::replace(&mut self.read, rest)).into_owned();
            }
            let text = String::from_utf8_lossy(&self.read).into_owned();
            assert!(self.more().await, "ended before {mark:?}: {text}");
        }
    }

    /// Reads a head: first line and lower-case headers, without the blank line.
    pub(crate) async fn head(&mut self) -> Vec<String> {
        let head = self.until("\r\n\r\n").await;
        head.trim_end().split("\r\n").map(str::to_owned).collect()
    }

    /// Reads to the end.
    pub(crate) async fn rest(&mut self) -> String {
        while self.more().await {}
        String::from_utf8_lossy(&std::mem::take(&mut self.read)).into_owned()
    }
}

/// A server in a sandbox, written by the test: takes one connection at a time.
pub(crate) struct Guest(tokio::net::TcpListener);

impl Guest {
    pub(crate) async fn listen() -> (Self, SocketAddr) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (Self(listener), address)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    pub(crate) async fn accept(&self) -> Wire {
        let accepted = tokio::time::timeout(PATIENCE, self.0.accept()).await.expect("nobody came");
        Wire::new(accepted.unwrap().0)
    }

    /// Whether somebody has connected by now and was not accepted.
    pub(crate) async fn is_wanted(&self) -> bool {
        tokio::time::timeout(Duration::ZERO, self.0.accept()).await.is_ok()
    }
}
