//! What surrounds every call of the REST faces: its id, its span, and its row in the audit.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::header::CACHE_CONTROL;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use percent_encoding::percent_decode_str;
use sandglass_store::{AuditEntry, Identity};
use sandglass_types::{Clock as _, KeyId, SandboxId, SecretId, SystemClock, UserName};
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

/// What a call made, for the audit: a row for each.
#[derive(Debug, Clone)]
pub(crate) struct Made(Vec<String>);

impl Made {
    pub(crate) fn sandboxes<'a>(ids: impl IntoIterator<Item = &'a SandboxId>) -> Self {
        Self(ids.into_iter().map(ToString::to_string).collect())
    }

    pub(crate) fn key(id: KeyId) -> Self {
        Self(vec![id.to_string()])
    }

    pub(crate) fn secret(id: SecretId) -> Self {
        Self(vec![id.to_string()])
    }
}

/// What else there is to say of a call that succeeded, for the audit.
#[derive(Debug, Clone)]
pub(crate) struct Note(pub(crate) String);

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
                for entry in call.entries(&state.anonymous, &who, &response) {
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
    // Answers hold keys and tokens, and a cache on the way does not know that a key was asked for.
    response.headers_mut().entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
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
    /// One, or one for each that it made.
    fn entries(self, anonymous: &Anonymous, who: &Who, response: &Response) -> Vec<AuditEntry> {
        let identity = who.0.get();
        if identity.is_none() && !anonymous.has_room(Instant::now()) {
            return Vec::new();
        }
        let refusal = response.extensions().get::<Refusal>().map(|Refusal(message)| message);
        let note = response.extensions().get::<Note>().map(|Note(text)| text);
        let entry = AuditEntry {
            at: SystemClock.now(),
            team: identity.map(|identity| identity.team),
            key: identity.map(|identity| identity.key),
            request: self.request,
            action: self.action,
            target: self.target,
            status: response.status().as_u16(),
            detail: refusal.or(note).cloned(),
        };
        let made = response.extensions().get::<Made>().map_or(&[][..], |Made(ids)| ids);
        if made.is_empty() {
            return vec![entry];
        }
        made.iter().map(|id| AuditEntry { target: Some(id.clone()), ..entry.clone() }).collect()
    }
}

/// What a path names in the place of `{id}`, if it can be an id, or of `{user}`, if it can be a user.
fn target(route: &str, path: &str) -> Option<String> {
    let of = |name| path.split('/').nth(route.split('/').position(|part| part == name)?);
    if let Some(user) = of("{user}") {
        let user: UserName = percent_decode_str(user).decode_utf8().ok()?.parse().ok()?;
        return Some(user.into());
    }
    let id = of("{id}")?;
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
        let user = |path| target("/v1/assignments/{user}", path);
        assert_eq!(user("/v1/assignments/z%C3%B6e%20b%2Fc").as_deref(), Some("z\u{f6}e b/c"));
        assert_eq!((user("/v1/assignments/%FF"), user("/v1/assignments/%0a")), (None, None));
        assert_eq!(target("/sandboxes/{id}", "/sandboxes/%20"), None);
        assert_eq!(target("/sandboxes/{id}", &format!("/sandboxes/{}", "a".repeat(200))), None);
    }
}
