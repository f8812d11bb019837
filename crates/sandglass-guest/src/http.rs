//! The guest API: HTTP/1.1 over whatever carries bytes.

pub(crate) mod auth;
pub(crate) mod context;
mod cors;
pub(crate) mod date;
mod hear_out;
mod info;
pub(crate) mod reply;

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use connectrpc::{ConnectRpcService, DeadlinePolicy, Limits};
use http::{HeaderMap, StatusCode, header};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use sandglass_proto::services::filesystem::FilesystemServer;
use sandglass_proto::services::process::ProcessServer;
use tokio::io::{AsyncRead, AsyncWrite};
use tower::ServiceExt as _;

use crate::agent::Agent;
use crate::filesystem::FilesystemService;
use crate::process::{Origin, ProcessService};
use context::StartLimit;
use reply::{error, rpc_error};

/// Upper bound for one message, in bytes: input for a process is the largest.
const MAX_MESSAGE: usize = 8 << 20;

const START: &str = "/process.Process/Start";
const TIMEOUT: &str = "connect-timeout-ms";

/// All endpoints with the layers around them.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    let limits = Limits::default().with_max_message_size(MAX_MESSAGE).with_max_request_body_size(MAX_MESSAGE);
    // A deadline bounds the whole of a stream; the one of a start never gets this far, see `admit_rpc`.
    let deadlines = DeadlinePolicy::new().with_enforce_on_streams(true);
    let process = ConnectRpcService::new(ProcessServer::new(ProcessService(Arc::clone(agent))))
        .with_limits(limits)
        .with_deadline_policy(deadlines.clone());
    let filesystem = ConnectRpcService::new(FilesystemServer::new(FilesystemService(Arc::clone(agent))))
        .with_limits(limits)
        .with_deadline_policy(deadlines);

    let rpc = Router::new()
        .route_service("/process.Process/{method}", process)
        .route_service("/filesystem.Filesystem/{method}", filesystem)
        .layer(from_fn_with_state(Arc::clone(agent), admit_rpc));
    // These check a signature as well as the token.
    let files = Router::new()
        .route("/files", get(crate::files::download).post(crate::files::upload))
        .layer(DefaultBodyLimit::disable());
    let open = Router::new().route("/health", get(async || StatusCode::NO_CONTENT));
    Router::new()
        .route("/envs", get(info::envs))
        .route("/metrics", get(info::metrics))
        .route("/logs", get(info::logs))
        .merge(rpc)
        .layer(from_fn(auth::require_token))
        .merge(files)
        .merge(open)
        .fallback(async || error(StatusCode::NOT_FOUND, "no such endpoint"))
        .with_state(Arc::clone(agent))
        .layer(from_fn_with_state(Arc::clone(agent), require_configuration))
        .layer(from_fn(hear_out::hear_out))
        .layer(from_fn(cors::allow_all))
}

/// Nothing is served before the server has said whose sandbox this is.
async fn require_configuration(
    State(agent): State<Arc<Agent>>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(settings) = agent.settings.get() else {
        return error(StatusCode::SERVICE_UNAVAILABLE, "the sandbox is not configured yet");
    };
    request.extensions_mut().insert(settings);
    next.run(request).await
}

/// A deadline in milliseconds, at most ten digits, as the Connect protocol has it.
fn take_timeout(headers: &mut HeaderMap) -> Option<Duration> {
    let value = headers.remove(TIMEOUT)?;
    let digits =
        value.to_str().ok().filter(|text| text.len() <= 10 && text.bytes().all(|b| b.is_ascii_digit()))?;
    digits.parse().ok().filter(|millis| *millis > 0).map(Duration::from_millis)
}

/// Finds the user, and turns the deadline of a start into a limit for the process: the stream outlives it, so
/// that it can say how the process ended.
async fn admit_rpc(State(agent): State<Arc<Agent>>, mut request: Request, next: Next) -> Response {
    match auth::rpc_user(&agent, &request) {
        Ok(Some(user)) => {
            request.extensions_mut().insert(user);
        }
        // Only handlers that need one complain.
        Ok(None) => {}
        Err(refusal) => return rpc_error(request.headers(), &refusal),
    }
    if request.uri().path() == START
        && let Some(limit) = take_timeout(request.headers_mut())
    {
        request.extensions_mut().insert(StartLimit(limit));
    }
    let mut response = next.run(request).await.into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}

/// Serves one connection until its end.
pub(crate) fn serve<I>(router: &Router, io: I, origin: Origin) -> impl Future<Output = ()> + Send + use<I>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let router = router.clone();
    let service = hyper::service::service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(origin);
        let response = router.clone().oneshot(request);
        async move { Ok::<_, Infallible>(response.await.unwrap_or_else(|never| match never {})) }
    });
    async move {
        let mut builder = hyper::server::conn::http1::Builder::new();
        // Less than what may wait for one subscriber of a process in all.
        builder.max_buf_size(128 * 1024).keep_alive(true);
        // Errors are those of the other side: it went away or does not speak HTTP.
        let _ = builder.serve_connection(TokioIo::new(io), service).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_whole_milliseconds_of_at_most_ten_digits() {
        for (text, wanted) in [
            ("1500", Some(Duration::from_millis(1500))),
            ("0", None),
            ("-1", None),
            ("+5", None),
            ("99999999999", None),
            ("1.5", None),
        ] {
            let mut headers = HeaderMap::from_iter([(TIMEOUT.parse().unwrap(), text.parse().unwrap())]);
            assert_eq!(take_timeout(&mut headers), wanted, "{text}");
            assert!(headers.is_empty());
        }
    }
}
