//! The edge's own answers, where a sandbox has none: bodies that the SDKs recognise, and a page for people.

use axum::body::Body;
use http::header::{ACCEPT, ACCESS_CONTROL_ALLOW_ORIGIN, CONTENT_SECURITY_POLICY, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use serde::Serialize;

use super::target::Unroutable;
use crate::error::NO_CAPACITY;

/// Why a request did not reach a sandbox, or nothing came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// No such sandbox runs. The SDKs look for this text to tell a killed sandbox from a broken line.
    NotFound,
    /// It runs and nothing listens on the port.
    PortClosed(u16),
    /// It runs and something in it does not speak HTTP as it should, or not at all.
    Broken,
    /// A route of the guest API that no client may use.
    Internal,
    /// Its ports want a token, and none came.
    NoToken,
    /// Its ports want another token.
    WrongToken,
    /// It is paused, and its guest API wants another token.
    NoAccess,
    /// It is paused, and its team has as many that run as it may have.
    Quota,
    /// It is paused, and the machine has no room for it.
    NoRoom,
    /// It is paused, and could not be made to run.
    NotResumed,
    /// It has too many requests at once.
    Busy,
    /// All sandboxes together have too many.
    Full,
    /// The method or upgrade can't be carried.
    Method,
}

impl Failure {
    const fn status(self) -> StatusCode {
        match self {
            Self::NotFound | Self::PortClosed(_) | Self::Broken => StatusCode::BAD_GATEWAY,
            Self::Internal => StatusCode::NOT_FOUND,
            Self::NoToken | Self::WrongToken | Self::NoAccess => StatusCode::FORBIDDEN,
            Self::Busy | Self::Quota => StatusCode::TOO_MANY_REQUESTS,
            Self::Full | Self::NoRoom | Self::NotResumed => StatusCode::SERVICE_UNAVAILABLE,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
        }
    }

    const fn message(self) -> &'static str {
        match self {
            Self::NotFound => "The sandbox was not found",
            Self::PortClosed(_) => "The sandbox is running but port is not open",
            Self::Broken => "The sandbox is running but did not answer",
            Self::Internal => "Not found",
            Self::NoToken => {
                "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
            }
            Self::WrongToken => {
                "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is \
                 invalid"
            }
            Self::NoAccess => {
                "The sandbox is paused, and only a request with its access token in header 'X-Access-Token' resumes it"
            }
            Self::Quota => "The sandbox is paused, and its team's quota has no room for it",
            Self::NoRoom => "The sandbox is paused, and this machine has no room for it now",
            Self::NotResumed => {
                "The sandbox is paused and could not be resumed, and is as it was: connect to it to hear why"
            }
            Self::Busy => "The sandbox has too many open requests",
            Self::Full => {
                "This server has no more connections into sandboxes; try again when others have ended"
            }
            Self::Method => "The method is not supported",
        }
    }
}

#[derive(Serialize)]
struct FailureBody<'a> {
    #[serde(rename = "sandboxId")]
    sandbox_id: &'a str,
    message: &'a str,
    code: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_code: Option<&'static str>,
}

#[derive(Serialize)]
struct UnroutableBody {
    code: u16,
    message: String,
}

/// Whether a person looks at the answer, and not a program or a script.
pub(crate) fn is_navigation(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let mode = headers.get("sec-fetch-mode").and_then(|value| value.to_str().ok());
    text(USER_AGENT).contains("Mozilla/")
        && mode.is_none_or(|mode| mode == "navigate")
        && text(ACCEPT).contains("text/html")
}

fn html(status: StatusCode, message: &str, id: &str) -> String {
    // Both are ours: a fixed text, and an id of [a-z0-9].
    let code = status.as_u16();
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{code}</title><style>\
         body{{font:16px/1.5 system-ui,sans-serif;max-width:36em;margin:20vh auto;padding:0 1em}}\
         code{{background:#8882;padding:.1em .3em}}</style></head>\
         <body><h1>{message}</h1><p>Sandbox <code>{id}</code>, status {code}.</p></body></html>\n"
    )
}

fn respond(status: StatusCode, kind: &'static str, body: String) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    // Scripts in browsers must be able to read why it failed.
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    response
}

/// The answer to a request for `id` (`[a-z0-9]+`) that failed: a page if `navigation` says so.
pub(crate) fn failed(failure: Failure, id: &str, navigation: bool) -> Response<Body> {
    let (status, message) = (failure.status(), failure.message());
    let mut response = if navigation {
        let mut page = respond(status, "text/html; charset=utf-8", html(status, message, id));
        let policy = HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'");
        page.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
        page
    } else {
        let port = if let Failure::PortClosed(port) = failure { Some(port) } else { None };
        let error_code = matches!(failure, Failure::Full | Failure::NoRoom).then_some(NO_CAPACITY);
        let body = FailureBody { sandbox_id: id, message, code: status.as_u16(), port, error_code };
        respond(status, "application/json", serde_json::to_string(&body).unwrap_or_default())
    };
    if matches!(failure, Failure::Busy | Failure::Full | Failure::Quota | Failure::NoRoom) {
        response.headers_mut().insert("should-retry", HeaderValue::from_static("false"));
    }
    response
}

/// The answer to a request that can't be routed: it may have been meant for the REST faces as well as for a sandbox,
/// so it has the fields that both have.
pub(crate) fn unroutable(reason: Unroutable) -> Response<Body> {
    let status = StatusCode::BAD_REQUEST;
    let body = UnroutableBody { code: status.as_u16(), message: reason.to_string() };
    respond(status, "application/json", serde_json::to_string(&body).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn text(response: Response<Body>) -> (u16, String) {
        let status = response.status().as_u16();
        let body = axum::body::to_bytes(response.into_body(), 8192).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[tokio::test]
    async fn the_bodies_are_the_ones_that_the_sdks_know() {
        assert_eq!(
            text(failed(Failure::NotFound, "abc", false)).await,
            (502, r#"{"sandboxId":"abc","message":"The sandbox was not found","code":502}"#.into())
        );
        let closed = r#"{"sandboxId":"abc","message":"The sandbox is running but port is not open","code":502,"port":80}"#;
        assert_eq!(text(failed(Failure::PortClosed(80), "abc", false)).await, (502, closed.into()));
        let (status, broken) = text(failed(Failure::Broken, "abc", false)).await;
        assert_eq!(status, 502);
        assert!(!broken.contains("was not found") && !broken.contains("port is not open"), "{broken}");
        assert_eq!(text(failed(Failure::Internal, "abc", false)).await.0, 404);
        assert_eq!(text(failed(Failure::Busy, "abc", false)).await.0, 429);
        let full = failed(Failure::Full, "abc", false);
        assert_eq!(full.headers()["should-retry"], "false");
        let (status, body) = text(full).await;
        assert!(status == 503 && body.contains(r#""error_code":"sandbox_capacity_unavailable""#), "{body}");
        assert_eq!(
            text(unroutable(Unroutable::MissingPort)).await,
            (400, r#"{"code":400,"message":"Missing header: E2b-Sandbox-Port"}"#.into())
        );
    }

    #[tokio::test]
    async fn people_get_a_page_and_programs_do_not() {
        let browser = ("user-agent", "Mozilla/5.0 (X11) Firefox/140.0");
        let html = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8");
        let is_page = |pairs: &[(&'static str, &'static str)]| is_navigation(&map(pairs));
        assert!(is_page(&[browser, html]));
        assert!(is_page(&[browser, html, ("sec-fetch-mode", "navigate")]));
        assert!(!is_page(&[browser, html, ("sec-fetch-mode", "cors")]));
        assert!(!is_page(&[browser, ("accept", "*/*")]));
        assert!(!is_page(&[("user-agent", "connectrpc/0.12.1"), html]));
        assert!(!is_page(&[]));
        let page = failed(Failure::NotFound, "abc", true);
        assert_eq!(page.headers()[CONTENT_TYPE], "text/html; charset=utf-8");
        assert!(text(page).await.1.contains("The sandbox was not found"));
    }
}
