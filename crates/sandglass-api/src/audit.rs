//! What surrounds every call of the REST faces: its id, its span, and its row in the audit.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use sandglass_store::{AuditEntry, Identity};
use sandglass_types::{Clock as _, SandboxId, SystemClock};
use tracing::Instrument as _;
use tracing::field::Empty;
use uuid::Uuid;

use crate::error::{ApiError, Refusal};
use crate::router::ApiState;

/// Names a request: in its answer, in the log, in the audit.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest id of a client's, in bytes.
const MAX_ID: usize = 64;

/// Most rows in a minute for calls without a valid key: anybody can make those. More are in the log alone.
const MAX_ANONYMOUS: u32 = 60;

/// Who calls, once that is known.
#[derive(Debug, Clone, Default)]
pub(crate) struct Who(pub(crate) Arc<OnceLock<Identity>>);

/// What a call made, for its row in the audit.
#[derive(Debug, Clone)]
pub(crate) struct Made(pub(crate) SandboxId);

/// The id of a request: the client's own if it is plain, else a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let plain = |id: &&str| {
        (1..=MAX_ID).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    };
    let mut sent = headers.get_all(REQUEST_ID).iter();
    let own = match (sent.next(), sent.next()) {
        (Some(id), None) => id.to_str().ok().filter(plain),
        _ => None,
    };
    own.map_or_else(|| Uuid::now_v7().to_string(), str::to_owned)
}

/// Counts rows for calls without a valid key.
#[derive(Debug, Default)]
pub(crate) struct Anonymous(Mutex<Option<(Instant, u32)>>);

impl Anonymous {
    fn has_room(&self, now: Instant) -> bool {
        let mut minute = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, count) = match *minute {
            Some((since, count)) if now.duration_since(since) < Duration::from_secs(60) => (since, count),
            _ => (now, 0),
        };
        *minute = Some((since, count.saturating_add(1)));
        count < MAX_ANONYMOUS
    }
}

/// Gives every request an id and a span, and every call that is to change something a row in the audit. Such a call goes
/// on when its client hangs up, so that it has an end to be written down. Neither query nor headers are logged: they
/// carry secrets.
pub(crate) async fn traced(State(state): State<ApiState>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let span = tracing::info_span!(
        "request",
        request = id,
        method = %request.method(),
        route = route.as_deref().unwrap_or("-"),
        team = Empty,
        sandbox = Empty,
    );
    let who = Who::default();
    request.extensions_mut().insert(who.clone());
    let read_only = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let call = route.as_deref().filter(|_| !read_only).map(|route| Call {
        action: format!("{} {route}", request.method()),
        target: target(route, request.uri().path()),
        request: id.clone(),
    });
    let started = Instant::now();
    let (tasks, metrics, method) = (state.tasks.clone(), state.metrics.clone(), request.method().clone());
    let mut response = match call {
        None => next.run(request).instrument(span.clone()).await,
        Some(call) => {
            let going_on = async move {
                let response = next.run(request).await;
                if let Some(entry) = call.entry(&state.anonymous, &who, &response) {
                    state.backend.audit(entry).await;
                }
                response
            };
            let panicked =
                || ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error").into_response();
            tasks.spawn(going_on.instrument(span.clone())).await.unwrap_or_else(|_| panicked())
        }
    };
    let took = started.elapsed();
    metrics.answered(&method, route.as_deref(), response.status(), took);
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    span.in_scope(|| tracing::info!(status = response.status().as_u16(), micros, "answered"));
    if let Ok(id) = HeaderValue::try_from(id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// A call that is to change something.
struct Call {
    action: String,
    target: Option<String>,
    request: String,
}

impl Call {
    fn entry(self, anonymous: &Anonymous, who: &Who, response: &Response) -> Option<AuditEntry> {
        let identity = who.0.get();
        if identity.is_none() && !anonymous.has_room(Instant::now()) {
            return None;
        }
        let made = response.extensions().get::<Made>().map(|Made(id)| id.to_string());
        let refusal = response.extensions().get::<Refusal>();
        Some(AuditEntry {
            at: SystemClock.now(),
            team: identity.map(|identity| identity.team),
            key: identity.map(|identity| identity.key),
            request: self.request,
            action: self.action,
            target: made.or(self.target),
            status: response.status().as_u16(),
            detail: refusal.map(|Refusal(message)| message.clone()),
        })
    }
}

/// What a path names in the place of `{id}`, if it can be an id.
fn target(route: &str, path: &str) -> Option<String> {
    let place = route.split('/').position(|part| part == "{id}")?;
    let id = path.split('/').nth(place)?;
    let plain = (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    plain.then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_clients_are_taken_if_they_are_plain() {
        let id = |sent: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in sent {
                headers.append(REQUEST_ID, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            }
            request_id(&headers)
        };
        assert_eq!(id(&["a-B_9.z"]), "a-B_9.z");
        for sent in [&[][..], &[""], &["a b"], &["a\"b"], &["\u{fc}"], &["a", "a"], &[&"a".repeat(65)]] {
            let id = id(sent);
            assert!(id.parse::<Uuid>().is_ok(), "{sent:?}: {id}");
        }
    }

    #[test]
    fn anybody_fills_only_so_much_of_the_audit() {
        let (anonymous, now) = (Anonymous::default(), Instant::now());
        let rows = (0..1000).filter(|_| anonymous.has_room(now)).count();
        assert_eq!(rows, 60);
        assert!(!anonymous.has_room(now + Duration::from_secs(59)));
        assert!(anonymous.has_room(now + Duration::from_secs(60)));
    }

    #[test]
    fn the_target_is_what_stands_where_the_id_does() {
        assert_eq!(target("/sandboxes/{id}/network", "/sandboxes/abc/network").as_deref(), Some("abc"));
        assert_eq!(target("/v2/sandboxes", "/v2/sandboxes"), None);
        assert_eq!(target("/sandboxes/{id}", "/sandboxes/%20"), None);
        assert_eq!(target("/sandboxes/{id}", &format!("/sandboxes/{}", "a".repeat(200))), None);
    }
}
