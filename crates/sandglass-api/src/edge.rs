//! The edge: carries HTTP and upgrades between clients and ports of sandboxes.
//!
//! Whatever is behind a port is hostile to the server and to other tenants. Its answers are parsed with bounds,
//! framed anew, and streamed without being kept. One request to a sandbox is one connection into it: nothing that
//! a sandbox left in a connection can be taken for the answer to another request.

pub(crate) mod answer;
mod carry;
mod driven;
mod early;
pub(crate) mod headers;
mod load;
pub(crate) mod target;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, UPGRADE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use sandglass_control::{DialError, Sleeper, TrafficToken};
use sandglass_egress::policy::GUEST_API_PORT;
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, SandboxId, TeamId};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;
use tracing::field::Empty;

use crate::audit::request_id;
use crate::backend::{Backend, Stream, Upstream};
use crate::metrics::Metrics;
use crate::server::{Lingering, Peer};
use answer::{Failure, failed};
use carry::{Pulse, Watched, tunnel};
use driven::{Driven, Driver};
use early::Unheard;
use headers::{ACCESS_TOKEN, Framing, TRAFFIC_TOKEN};
use load::Load;

/// A request or upgraded connection on which nothing moved for this long is dropped.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Largest head of an answer from a sandbox, in bytes.
const MAX_HEAD_LEN: usize = 64 * 1024;

/// What of a body is read at one time, and may wait to be written, in bytes.
const MAX_BUF: usize = 256 * 1024;

/// Most headers of an answer from a sandbox.
const MAX_HEADERS: usize = 128;

/// Where a proxied request came from.
pub(crate) struct Origin {
    /// The client.
    pub(crate) peer: Peer,
    /// Whether it spoke TLS.
    pub(crate) secure: bool,
    /// What the client addressed, with its port.
    pub(crate) host: Option<HeaderValue>,
}

/// The proxy.
pub(crate) struct Edge {
    backend: Arc<dyn Backend>,
    tasks: TaskTracker,
    load: Load,
    idle: Duration,
    /// Upgraded connections end when it fires.
    force: CancellationToken,
    metrics: Arc<Metrics>,
}

impl Edge {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        tasks: TaskTracker,
        force: CancellationToken,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { backend, tasks, load: Load::default(), idle: IDLE_TIMEOUT, force, metrics }
    }

    /// Carries one request to `port` of sandbox `id` and its answer back.
    pub(crate) async fn handle(
        &self,
        id: &SandboxId,
        port: NonZeroU16,
        request: Request<Lingering>,
        origin: Origin,
    ) -> Response<Body> {
        let navigation = answer::is_navigation(request.headers());
        // The id is for the log alone: in the answer, the header is the sandbox's own.
        let request_id = request_id(request.headers());
        let span = tracing::info_span!("edge", request = request_id, sandbox = %id, %port, team = Empty, from = Empty);
        if let Peer::Sandbox(from) = &origin.peer {
            span.record("from", tracing::field::display(from));
        }
        let forwarded = self.forward(id, port, request, origin).instrument(span.clone()).await;
        let answer = forwarded.unwrap_or_else(|failure| {
            span.in_scope(|| tracing::debug!(?failure, "not forwarded"));
            failed(failure, id.as_str(), navigation)
        });
        self.metrics.forwarded(answer.status());
        answer
    }

    async fn forward(
        &self,
        id: &SandboxId,
        port: NonZeroU16,
        mut request: Request<Lingering>,
        origin: Origin,
    ) -> Result<Response<Body>, Failure> {
        let guest_api = port.get() == GUEST_API_PORT;
        let from_sandbox = matches!(origin.peer, Peer::Sandbox(_));
        let (live, permit) = match self.backend.live(id).filter(|live| !live.gone().is_cancelled()) {
            Some(live) => {
                told(live.team());
                check(&request, port, live.traffic_token())?;
                let permit = self.load.enter(id, from_sandbox).ok_or(Failure::Busy)?;
                (live, permit)
            }
            None => {
                let sleeper = self
                    .backend
                    .sleeper(id)
                    .await
                    .map_err(|error| unresumed(&error))?
                    .ok_or(Failure::NotFound)?;
                told(sleeper.team());
                check(&request, port, sleeper.traffic_token())?;
                if guest_api {
                    check_access(&sleeper, request.headers())?;
                }
                // Those who wait count as well.
                let permit = self.load.enter(id, from_sandbox).ok_or(Failure::Busy)?;
                (self.backend.wake(&sleeper).await.map_err(|error| unresumed(&error))?, permit)
            }
        };
        let wanted = if guest_api || request.version() != Version::HTTP_11 {
            None
        } else {
            headers::upgrade(request.headers())
        };
        let mut stream = dial(&*live, port).await?;
        if wanted.is_none() {
            stream = Box::new(Unheard::new(stream));
        }
        let on_client = wanted.is_some().then(|| hyper::upgrade::on(&mut request));
        let pulse = Arc::new(Pulse::new(self.idle));
        let gone = live.gone().clone();
        let mask = live.request_host().filter(|_| !guest_api);
        let mask = mask.map(|host| HeaderValue::try_from(host.for_port(port.into()))).transpose();
        let mask = mask.map_err(|_| Failure::Broken)?;
        let outgoing = prepare(request, origin, mask, wanted)?
            .map(|body| Watched::new(body, gone.clone(), pulse.clone(), ()));

        let (mut sender, connection) = http1::Builder::new()
            .max_buf_size(MAX_BUF)
            .max_header_size(MAX_HEAD_LEN)
            .max_headers(MAX_HEADERS)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|_| Failure::Broken)?;
        // Whoever reads the answer looks as well, but may not read any more.
        let work = {
            let (gone, pulse) = (gone.clone(), Arc::clone(&pulse));
            async move {
                tokio::select! {
                    biased;
                    () = gone.cancelled() => {}
                    () = pulse.stalled() => {}
                    ended = connection.with_upgrades() => if let Err(error) = ended {
                        tracing::debug!(%error, "the connection into the sandbox failed");
                    }
                }
            }
        };
        let mut driver = Driver::new(work, self.tasks.clone());
        let answer = tokio::select! {
            biased;
            () = gone.cancelled() => return Err(Failure::NotFound),
            answer = driver.until(sender.send_request(outgoing)) => answer,
            () = pulse.stalled() => return Err(Failure::Broken),
        };
        let mut answer = answer.map_err(|error| {
            tracing::debug!(%id, %port, %error, "no answer from the sandbox");
            if gone.is_cancelled() { Failure::NotFound } else { Failure::Broken }
        })?;
        // The parser's own bound is the size of its buffer, which may be exceeded by one read.
        if headers::length(answer.headers()) > MAX_HEAD_LEN {
            return Err(Failure::Broken);
        }
        pulse.beat();
        // A sandbox may speak HTTP/1.0; what the client gets is up to the server here.
        *answer.version_mut() = Version::HTTP_11;

        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let on_client = on_client.ok_or(Failure::Broken)?;
            let on_sandbox = hyper::upgrade::on(&mut answer);
            let switched = switching(answer.headers())?;
            driver.leave();
            let force = self.force.clone();
            self.tasks.spawn(async move {
                tokio::select! {
                    () = force.cancelled() => {}
                    () = tunnel(on_client, on_sandbox, &gone, &pulse) => {}
                }
                drop((driver, permit));
            });
            return Ok(switched);
        }
        headers::to_client(answer.headers_mut());
        Ok(answer.map(|body| {
            let body = Driven::new(body, driver, (sender, permit));
            Body::new(Watched::new(body, gone, pulse, ()))
        }))
    }
}

/// Whose sandbox it is, for the log.
fn told(team: TeamId) {
    tracing::Span::current().record("team", tracing::field::display(team));
}

/// Lets a request pass that a client may send to this port.
fn check<B>(request: &Request<B>, port: NonZeroU16, token: Option<&TrafficToken>) -> Result<(), Failure> {
    if request.method() == Method::CONNECT {
        return Err(Failure::Method);
    }
    if port.get() != GUEST_API_PORT {
        return token.map_or(Ok(()), |token| admit(token, port, request.headers()));
    }
    // The guest API has a token of its own.
    if headers::is_internal(request.uri().path()) { Err(Failure::Internal) } else { Ok(()) }
}

/// Lets a request pass that opens the guest API of a paused sandbox. What only the guest can judge, such as a signature,
/// resumes nothing.
fn check_access(sleeper: &Sleeper, headers: &HeaderMap) -> Result<(), Failure> {
    let mut sent = headers.get_all(ACCESS_TOKEN).iter();
    let token = match (sent.next(), sent.next()) {
        (Some(token), None) => Some(token.as_bytes()),
        _ => None,
    };
    if sleeper.opens_guest_api(token) { Ok(()) } else { Err(Failure::NoAccess) }
}

/// Why a sandbox does not run again.
fn unresumed(error: &Error) -> Failure {
    tracing::debug!(error = %Chain(error), "the sandbox could not be resumed");
    match error.kind() {
        ErrorKind::NotFound => Failure::NotFound,
        ErrorKind::Quota => Failure::Quota,
        ErrorKind::Capacity => Failure::NoRoom,
        _ => Failure::NotResumed,
    }
}

/// Lets a request pass that has the token for the port.
fn admit(token: &TrafficToken, port: NonZeroU16, headers: &HeaderMap) -> Result<(), Failure> {
    let mut sent = headers.get_all(TRAFFIC_TOKEN).iter();
    match (sent.next(), sent.next()) {
        (None, _) => Err(Failure::NoToken),
        (Some(sent), None) if token.opens(port, sent.as_bytes()) => Ok(()),
        (Some(_), _) => Err(Failure::WrongToken),
    }
}

async fn dial(live: &dyn Upstream, port: NonZeroU16) -> Result<Box<dyn Stream>, Failure> {
    let dialled =
        async { if port.get() == GUEST_API_PORT { live.guest_api().await } else { live.dial(port).await } };
    tokio::select! {
        biased;
        () = live.gone().cancelled() => Err(Failure::NotFound),
        dialled = dialled => dialled.map_err(|error| match error {
            DialError::Gone => Failure::NotFound,
            DialError::Refused => Failure::PortClosed(port.get()),
            DialError::Full => Failure::Full,
            DialError::Unreachable(cause) => {
                tracing::debug!(%cause, "the sandbox could not be reached");
                Failure::Broken
            }
        }),
    }
}

/// The request as the sandbox gets it.
fn prepare(
    request: Request<Lingering>,
    origin: Origin,
    mask: Option<HeaderValue>,
    upgrade: Option<HeaderValue>,
) -> Result<Request<Lingering>, Failure> {
    let (mut parts, body) = request.into_parts();
    let framing = match body.size_hint().exact() {
        None => Framing::Chunked,
        Some(0) if !parts.headers.contains_key(CONTENT_LENGTH) => Framing::Empty,
        Some(length) => Framing::Length(length),
    };
    headers::to_sandbox(&mut parts.headers, origin, framing, upgrade);
    if let Some(host) = mask {
        parts.headers.insert(HOST, host);
    }
    parts.uri = headers::origin_form(&parts.uri).ok_or(Failure::Method)?;
    parts.version = Version::HTTP_11;
    parts.extensions.clear();
    Ok(Request::from_parts(parts, body))
}

/// The client's 101 for a sandbox's 101.
fn switching(from_sandbox: &HeaderMap) -> Result<Response<Body>, Failure> {
    let protocol = from_sandbox.get(UPGRADE).cloned().ok_or(Failure::Broken)?;
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let mut headers = from_sandbox.clone();
    headers::to_client(&mut headers);
    headers.remove(CONTENT_LENGTH);
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
    *response.headers_mut() = headers;
    Ok(response)
}

#[cfg(test)]
mod tests;
