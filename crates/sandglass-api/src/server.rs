//! The listener: accepts, tells TLS, HTTP/1.1 and HTTP/2 apart, bounds what a client can hold, and dispatches.

mod connection;
mod linger;
mod rewound;
mod tls;
mod watch;

use std::convert::Infallible;
use std::fmt::Debug;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse as _;
use http::header::HOST;
use http::{HeaderValue, Request, Response, StatusCode, Uri, Version};
use sandglass_control::Control;
use sandglass_egress::proxy::Caller;
use sandglass_engine::network::GUEST_ADDRESS;
use sandglass_types::{Clock as _, SandboxId, SystemClock};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::backend::Backend;
use crate::edge::answer::{Failure, failed, is_navigation, unroutable};
use crate::edge::target::{Target, host, is_own, is_shared, route, route_from_sandbox, strip_routing};
use crate::edge::{Edge, Origin};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::router::{ApiState, ISOLATION, router};
pub(crate) use linger::Lingering;
pub use tls::{Certificate, CertificateError, Plain, Tls};

/// How patient the server is.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Connections at one time; more wait in the kernel's queue.
    pub(crate) max_connections: usize,
    /// From the first byte of a request to the end of its head.
    pub(crate) head_timeout: Duration,
    /// Between two requests.
    pub(crate) keep_alive: Duration,
    /// In a request, without a byte moving.
    pub(crate) stall: Duration,
    /// For open requests, once the server shuts down.
    pub(crate) drain: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            head_timeout: Duration::from_secs(15),
            // Longer than the 300 s for which clients keep a connection, so that they close it and not the server
            // under their next request.
            keep_alive: Duration::from_secs(10 * 60),
            stall: Duration::from_secs(30 * 60),
            drain: Duration::from_secs(10),
        }
    }
}

/// Pause after a failed accept: the process is out of descriptors, and asking again at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long work that no connection waits for may go on after shutdown.
const LAST_WORK: Duration = Duration::from_secs(5);

/// What all connections share.
struct Shared {
    backend: Arc<dyn Backend>,
    router: Router,
    edge: Edge,
    tls: Option<Tls>,
    settings: Settings,
    tasks: TaskTracker,
    /// No new requests.
    shutdown: CancellationToken,
    /// No requests at all.
    force: CancellationToken,
}

/// Who is at the other end of a connection.
#[derive(Debug, Clone)]
pub(crate) enum Peer {
    /// A client at this address.
    Client(IpAddr),
    /// A program in this sandbox.
    Sandbox(SandboxId),
}

impl Peer {
    /// Its address, as what it reaches is told.
    pub(crate) const fn address(&self) -> IpAddr {
        match self {
            Self::Client(address) => *address,
            Self::Sandbox(_) => IpAddr::V4(GUEST_ADDRESS),
        }
    }
}

/// How requests come.
#[derive(Debug, Clone)]
struct Line {
    peer: Peer,
    /// Through TLS.
    secure: bool,
    /// Through a connection that a client asked for, within one of its own.
    inner: bool,
}

impl Line {
    /// One that was just accepted.
    const fn of(peer: Peer) -> Self {
        Self { peer, secure: false, inner: false }
    }
}

/// What lets a connection be, and is given back when that ends.
type Slot = Box<dyn Debug + Send + Sync>;

/// Serves the REST faces and the edge until `shutdown` fires, and then for at most ten seconds what is open. Callers that
/// come out of `to_edge`, which are sandboxes, get ports of sandboxes alone. With `tls`, clients may speak that on the same
/// port, and those may have to that it says.
///
/// # Errors
/// None at present: a connection that fails ends alone, and an accept that fails is tried again.
pub async fn serve(
    listener: TcpListener,
    to_edge: mpsc::Receiver<Caller>,
    tls: Option<Tls>,
    control: Control,
    shutdown: CancellationToken,
) -> io::Result<()> {
    run(listener, to_edge, tls, Arc::new(control), shutdown, Settings::default()).await;
    Ok(())
}

pub(crate) async fn run(
    listener: TcpListener,
    mut to_edge: mpsc::Receiver<Caller>,
    tls: Option<Tls>,
    backend: Arc<dyn Backend>,
    shutdown: CancellationToken,
    settings: Settings,
) {
    let tasks = TaskTracker::new();
    let force = CancellationToken::new();
    let slots = Arc::new(Semaphore::new(settings.max_connections));
    let drain = settings.drain;
    let metrics = Arc::new(Metrics::new(tls.as_ref().map(|tls| tls.certificate.clone())));
    let shared = Arc::new(Shared {
        router: router(ApiState {
            backend: backend.clone(),
            tasks: tasks.clone(),
            anonymous: Arc::default(),
            metrics: metrics.clone(),
            started: SystemClock.now(),
        }),
        edge: Edge::new(backend.clone(), tasks.clone(), force.clone(), metrics),
        backend,
        tls,
        settings,
        tasks: tasks.clone(),
        shutdown: shutdown.clone(),
        force: force.clone(),
    });
    loop {
        let accepted = async {
            let slot = slots.clone().acquire_owned().await;
            (slot, listener.accept().await)
        };
        let (slot, accepted) = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            accepted = accepted => accepted,
            // Behind those, so that no flood of them keeps a client waiting.
            Some(Caller { sandbox, stream, place }) = to_edge.recv() => {
                let line = Line::of(Peer::Sandbox(sandbox));
                tasks.spawn(connection::serve(shared.clone(), Box::new(stream), line, Box::new(place)));
                continue;
            }
        };
        match (slot, accepted) {
            (Ok(slot), Ok((stream, peer))) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "the client went before it was served");
                    continue;
                }
                let line = Line::of(Peer::Client(peer.ip()));
                tasks.spawn(connection::serve(shared.clone(), Box::new(stream), line, Box::new(slot)));
            }
            (_, Err(error)) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            // Nobody closes the semaphore.
            (Err(_), _) => break,
        }
    }
    drop(listener);
    tasks.close();
    if tokio::time::timeout(drain, tasks.wait()).await.is_err() {
        force.cancel();
        if tokio::time::timeout(LAST_WORK, tasks.wait()).await.is_err() {
            tracing::warn!(tasks = tasks.len(), "shut down with work still going on");
        }
    }
}

impl Shared {
    /// Answers one request, and says what isolates, also over an answer from a sandbox: that must not say it itself.
    async fn dispatch(&self, request: Request<Lingering>, line: &Line) -> Result<Response<Body>, Infallible> {
        let answer = if self.may_be_plain(line) {
            self.answer(request, line).await
        } else {
            ApiError::invalid(
                "use https here: what you sent was not encrypted, so replace the keys and tokens in it",
            )
            .into_response()
        };
        Ok(self.signed(answer))
    }

    /// Says what isolates.
    fn signed(&self, mut answer: Response<Body>) -> Response<Body> {
        let isolation = HeaderValue::from_static(self.backend.engine().isolation.name());
        answer.headers_mut().insert(ISOLATION, isolation);
        answer
    }

    /// Whether requests may come as they do, if that is without TLS.
    fn may_be_plain(&self, line: &Line) -> bool {
        let Some(Tls { plain, .. }) = &self.tls else { return true };
        match (&line.peer, plain) {
            _ if line.secure => true,
            (Peer::Sandbox(_), _) | (_, Plain::Everybody) => true,
            (Peer::Client(address), Plain::Loopback) => address.to_canonical().is_loopback(),
            (_, Plain::Nobody) => false,
        }
    }

    /// Whether a client may connect to this place through the server. It may to the server's own names, which lead to the
    /// server itself: so they are reached where no DNS knows them.
    fn tunnel(&self, place: &Uri, line: &Line) -> Result<(), ApiError> {
        let own = place.host().is_some_and(|host| is_own(host, self.backend.domain()));
        if own && !line.inner && matches!(line.peer, Peer::Client(_)) { Ok(()) } else { Err(elsewhere()) }
    }

    /// Whether a request was sent to this server as to a proxy, for somebody else: with a whole address, as only proxies get
    /// one in HTTP/1 (RFC 9112, 3.2.2), and with a name that is none of its own.
    fn is_for_another(&self, request: &Request<Lingering>) -> bool {
        let named = request.uri().host().filter(|_| request.version() < Version::HTTP_2);
        let (Some(host), domain @ Some(_)) = (named, self.backend.domain()) else { return false };
        !is_own(host, domain) && !is_shared(&host.to_ascii_lowercase())
    }

    async fn answer(&self, mut request: Request<Lingering>, line: &Line) -> Response<Body> {
        if self.is_for_another(&request) {
            return elsewhere().into_response();
        }
        let named = host(request.version(), request.uri(), request.headers());
        let domain = self.backend.domain();
        let target = match line.peer {
            Peer::Client(_) => named.and_then(|host| route(&host, domain, request.headers())),
            Peer::Sandbox(_) => {
                strip_routing(request.headers_mut());
                named.and_then(|host| route_from_sandbox(&host, domain))
            }
        };
        match target {
            Err(reason) => unroutable(reason),
            Ok(Target::Api) => {
                let Ok(answer) = self.router.clone().oneshot(request.map(Body::new)).await;
                answer
            }
            Ok(Target::Nowhere { id }) => failed(Failure::NotFound, &id, is_navigation(request.headers())),
            Ok(Target::Sandbox { id, port }) => {
                let host = request.uri().authority().map_or_else(
                    || request.headers().get(HOST).cloned(),
                    |authority| HeaderValue::try_from(authority.as_str()).ok(),
                );
                let origin = Origin { peer: line.peer.clone(), secure: line.secure, host };
                self.edge.handle(&id, port, request, origin).await
            }
        }
    }
}

/// The answer to whoever takes the server for a way to others.
fn elsewhere() -> ApiError {
    let why = "this server carries connections to names under its own domain alone: see `domain` in its configuration";
    ApiError::new(StatusCode::FORBIDDEN, why)
}

#[cfg(test)]
mod tests;
