//! Streams out of sandboxes, and what is asked on them.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use http::{Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use sandglass_broker::redact::Search;
use sandglass_egress::proxy::Caller;
use sandglass_egress::resolver::Resolve;
use sandglass_types::SandboxId;
use sandglass_types::error::Chain;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::answer::{self, Answer, Body, Meter, Redacted, Sent};
use crate::grants::{Granted, Grants, Use};
use crate::limit::Limiter;
use crate::request::{self, Not};
use crate::upstream::{NoAnswer, Upstream};

/// How long a client may take for the head of a request.
const HEAD: Duration = Duration::from_secs(10);

/// Most headers of a request, and the buffer for them, in bytes.
const MAX_HEADERS: usize = 100;
const MAX_BUF: usize = 64 << 10;

/// Makes the requests of sandboxes.
#[derive(Debug)]
pub struct Connections {
    grants: Arc<dyn Grants>,
    limiter: Limiter,
    upstream: Upstream,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Writes down a use when it is over, however that comes.
struct Noted {
    grants: Arc<dyn Grants>,
    sandbox: Arc<SandboxId>,
    of: Use,
    meter: Arc<Meter>,
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.of.sent = self.meter.sent.load(Ordering::Relaxed);
        self.of.received = self.meter.received.load(Ordering::Relaxed);
        self.grants.used(&self.sandbox, &self.of);
    }
}

impl Connections {
    /// One that believes whom `tls` does. Its work is done by `tasks`, and cut short when `stop` fires.
    #[must_use]
    pub fn new(
        grants: Arc<dyn Grants>,
        resolver: Arc<dyn Resolve>,
        tls: rustls::ClientConfig,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let upstream = Upstream::new(resolver, tls, tasks.clone());
        Arc::new(Self { grants, limiter: Limiter::default(), upstream, tasks, stop })
    }

    /// Serves whoever comes, until nobody can come any more or the server ends.
    pub async fn serve(self: Arc<Self>, mut callers: mpsc::Receiver<Caller>) {
        while let Some(Some(caller)) = self.stop.run_until_cancelled(callers.recv()).await {
            let serving = Arc::clone(&self).stream(caller);
            self.tasks.spawn(self.stop.clone().run_until_cancelled_owned(serving));
        }
    }

    async fn stream(self: Arc<Self>, Caller { sandbox, stream, place }: Caller) {
        let sandbox = Arc::new(sandbox);
        let service = service_fn(|request| {
            let (this, sandbox) = (Arc::clone(&self), Arc::clone(&sandbox));
            async move { Ok::<_, Infallible>(this.answer(sandbox, request).await) }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .keep_alive(false)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_BUF)
            .serve_connection(TokioIo::new(stream), service)
            .await;
        if let Err(error) = served {
            tracing::debug!(%sandbox, %error, "a stream for a connection failed");
        }
        drop(place);
    }

    async fn answer(&self, sandbox: Arc<SandboxId>, request: Request<Incoming>) -> Answer {
        let (parts, body) = request.into_parts();
        let name = match request::meant(&parts) {
            Ok(name) => name,
            Err(not) => return answer::own(StatusCode::MISDIRECTED_REQUEST, DENIED, &not.to_string(), None),
        };
        let of = Use {
            connection: name.clone(),
            host: None,
            method: parts.method.to_string(),
            status: 0,
            allowed: false,
            sent: 0,
            received: 0,
        };
        let meter = Arc::new(Meter::default());
        let mut noted = Noted {
            grants: Arc::clone(&self.grants),
            sandbox: Arc::clone(&sandbox),
            of,
            meter: Arc::clone(&meter),
        };
        let refuse = |mut noted: Noted, status: StatusCode, error: &str, reason: &str, retry: Option<u64>| {
            noted.of.status = status.as_u16();
            answer::own(status, error, reason, retry)
        };
        let granted = match self.grants.granted(&sandbox, &name).await {
            Ok(Some(granted)) => granted,
            Ok(None) => {
                let reason =
                    "this sandbox may use no connection of this name: it is made with those that it may use";
                return refuse(noted, StatusCode::FORBIDDEN, DENIED, reason, None);
            }
            Err(error) => {
                tracing::error!(%sandbox, connection = %name, error = %Chain(&error), "a connection can't be used");
                return refuse(
                    noted,
                    StatusCode::BAD_GATEWAY,
                    FAILED,
                    "the connection can't be used now",
                    None,
                );
            }
        };
        let Granted { connection, credential, reach } = granted;
        noted.of.host = Some(connection.target.host.to_string());
        let prepared = match request::prepared(&connection, &credential, &parts) {
            Ok(prepared) => prepared,
            Err(not) => {
                let status = match not {
                    Not::Host | Not::Method(_) | Not::Unsendable => StatusCode::BAD_REQUEST,
                    Not::Refused(_) | Not::Query(_) => StatusCode::FORBIDDEN,
                };
                return refuse(noted, status, DENIED, &not.to_string(), None);
            }
        };
        let limits = connection.limits;
        let said =
            parts.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let too_long = format!("the body of a request has at most {} bytes here", limits.body_bytes);
        if said.is_some_and(|said: u64| said > limits.body_bytes) {
            return refuse(noted, StatusCode::PAYLOAD_TOO_LARGE, DENIED, &too_long, None);
        }
        let turn = match self.limiter.take(&sandbox, &name, limits, Instant::now()) {
            Ok(turn) => turn,
            Err(seconds) => {
                let reason = "the connection may not be used so often, or not so often at the same time";
                return refuse(noted, StatusCode::TOO_MANY_REQUESTS, DENIED, reason, Some(seconds));
            }
        };
        noted.of.allowed = true;
        let sent = Sent::new(body, limits.body_bytes, Arc::clone(&meter));
        match self.upstream.send(&connection.target, &reach, prepared, sent).await {
            Ok(answered) => {
                let search = Arc::new(Search::of([&credential]));
                pass(answered, search, noted, Box::new(turn))
            }
            Err(_) if meter.too_long.load(Ordering::Relaxed) => {
                refuse(noted, StatusCode::PAYLOAD_TOO_LARGE, DENIED, &too_long, None)
            }
            Err(error @ NoAnswer::NotAllowed { .. }) => {
                noted.of.allowed = false;
                refuse(noted, StatusCode::FORBIDDEN, DENIED, &error.to_string(), None)
            }
            Err(error @ NoAnswer::Slow(_)) => {
                refuse(noted, StatusCode::GATEWAY_TIMEOUT, FAILED, &error.to_string(), None)
            }
            Err(error) => {
                tracing::info!(%sandbox, connection = %name, error = %Chain(&error), "a service gave no answer");
                refuse(noted, StatusCode::BAD_GATEWAY, FAILED, &error.to_string(), None)
            }
        }
    }
}

/// What programs know by that it was not to be.
const DENIED: &str = "connection_denied";

/// What programs know by that it went wrong.
const FAILED: &str = "connection_failed";

/// Lets an answer in, without the credential.
fn pass(
    answered: Response<Incoming>,
    search: Arc<Search>,
    mut noted: Noted,
    turn: Box<dyn Send + Sync>,
) -> Answer {
    let (parts, body) = answered.into_parts();
    let unreadable = if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        Some("the service changed to another protocol, which is not carried")
    } else if !answer::is_plain(&parts.headers) {
        Some("the service packed its answer though it was asked not to, so nothing can be taken out of it")
    } else {
        None
    };
    if let Some(reason) = unreadable {
        noted.of.status = StatusCode::BAD_GATEWAY.as_u16();
        return answer::own(StatusCode::BAD_GATEWAY, FAILED, reason, None);
    }
    noted.of.status = parts.status.as_u16();
    let headers = answer::into(&parts.headers, &search);
    let meter = Arc::clone(&noted.meter);
    let body = Redacted::new(body, search, meter, Box::new((noted, turn)));
    let mut answer = Response::new(Body::Redacted(Box::new(body)));
    (*answer.status_mut(), *answer.headers_mut()) = (parts.status, headers);
    answer
}

#[cfg(test)]
mod tests;
