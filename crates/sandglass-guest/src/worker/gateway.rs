//! The way to the model: plain HTTP to the gateway, and when to ask again.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::dialect::{Answer, Dialect};
use super::event::clip;
use super::{names, sse};
use crate::log;

/// How often one question is asked.
const TRIES: u32 = 5;

/// How often it is asked again although an answer had begun: that one may have been paid for.
const BROKEN: u32 = 1;

/// Before the second try; twice as long before each that follows.
const BACK_OFF: Duration = Duration::from_millis(500);

/// Longest wait that the other side may ask for.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);

/// How long nothing may come. A model may think for minutes before it says a word.
const SILENCE: Duration = Duration::from_secs(300);

/// Longest answer, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// Longest body of an error, in bytes.
const MAX_ERROR: usize = 64 << 10;

/// A version of Anthropic's protocol, which every request has to name.
const ANTHROPIC_VERSION: &str = "2023-06-01";

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    /// There is no money left.
    #[error("there is no money left: {0}")]
    Money(String),
    /// The other side says no.
    #[error("the model can't be used: {0}")]
    Refused(String),
    /// There is no way to the other side, or what it says is none.
    #[error("no answer of the model: {0}")]
    Broken(String),
}

/// A failure, and whether it may go away.
#[derive(Debug)]
struct Trouble {
    failure: Failure,
    again: Again,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    Never,
    /// After so long, or as long as seems right.
    After(Option<Duration>),
    /// As before, but it had begun.
    Broken,
}

/// Where the models are.
#[derive(Debug)]
pub(super) struct Gateway {
    host: String,
    port: u16,
    prefix: String,
    authority: HeaderValue,
    token: String,
}

impl Gateway {
    /// The gateway at a URL, which is plain HTTP: it never leaves the sandbox's airlock.
    ///
    /// # Errors
    /// It is no such URL, or the token can't be sent.
    pub(super) fn new(url: &str, token: String) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|error| format!("{url:?} is no URL: {error}"))?;
        let (Some("http"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(format!("{url:?} is no URL that begins with http://"));
        };
        let header = |text: &str| HeaderValue::try_from(text).map_err(|_| "it can't be sent".to_owned());
        header(&token).map_err(|error| format!("the token is none: {error}"))?;
        Ok(Self {
            host: authority.host().trim_matches(['[', ']']).into(),
            port: authority.port_u16().unwrap_or(80),
            prefix: uri.path().trim_end_matches('/').into(),
            authority: header(authority.as_str())?,
            token,
        })
    }

    /// Asks until there is an answer, or no hope for one.
    ///
    /// # Errors
    /// There is none.
    pub(super) async fn ask(&self, dialect: Dialect, question: &Value) -> Result<Answer, Failure> {
        let body = Bytes::from(question.to_string());
        let (mut tries, mut broken, mut wait) = (1, 0, BACK_OFF);
        loop {
            let trouble = match self.try_once(dialect, body.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            let pause = match trouble.again {
                Again::After(after) if tries < TRIES => after.unwrap_or(wait).min(MAX_WAIT),
                Again::Broken if tries < TRIES && broken < BROKEN => {
                    broken += 1;
                    wait
                }
                _ => return Err(trouble.failure),
            };
            log::line(&format!("{}; once more in {} ms", trouble.failure, pause.as_millis()));
            tokio::time::sleep(pause).await;
            tries += 1;
            wait *= 2;
        }
    }

    async fn try_once(&self, dialect: Dialect, body: Bytes) -> Result<Answer, Trouble> {
        let not_there = |error: String| Trouble {
            failure: Failure::Broken(format!("{}:{} is not there: {error}", self.host, self.port)),
            again: Again::After(None),
        };
        let connect = async {
            let address = names::address(&self.host).await?;
            TcpStream::connect((address, self.port)).await
        };
        let stream = timeout(CONNECT, connect).await.map_err(|_| not_there("it does not answer".into()))?;
        let stream = stream.map_err(|error| not_there(error.to_string()))?;
        let _ = stream.set_nodelay(true);
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| not_there(error.to_string()))?;
        // It ends with this call.
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let sent = sender.send_request(self.request(dialect, body).map_err(|error| broken(&error, false))?);
        let response = timeout(SILENCE, sent).await.map_err(|_| broken("it says nothing", false))?;
        let response = response.map_err(|error| broken(&error.to_string(), false))?;
        if response.status() == StatusCode::OK {
            hear(dialect, response).await
        } else {
            Err(refused(response).await)
        }
    }

    fn request(&self, dialect: Dialect, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}{}", self.prefix, dialect.path()))
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "text/event-stream")
            .header(header::USER_AGENT, concat!("sandglass-worker/", env!("CARGO_PKG_VERSION")));
        let request = if dialect == Dialect::Messages {
            request.header("x-api-key", &self.token).header("anthropic-version", ANTHROPIC_VERSION)
        } else {
            request.header(header::AUTHORIZATION, format!("Bearer {}", self.token))
        };
        request.body(Full::new(body)).map_err(|error| error.to_string())
    }
}

fn broken(message: &str, begun: bool) -> Trouble {
    let again = if begun { Again::Broken } else { Again::After(None) };
    Trouble { failure: Failure::Broken(message.into()), again }
}

/// Hears a streamed answer to its end.
async fn hear(dialect: Dialect, response: Response<Incoming>) -> Result<Answer, Trouble> {
    let (mut body, mut events, mut heard) = (response.into_body(), sse::Events::default(), dialect.hearing());
    let mut length = 0;
    loop {
        let frame =
            timeout(SILENCE, body.frame()).await.map_err(|_| broken("it stopped in the middle", true))?;
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|error| broken(&format!("it broke off: {error}"), true))?;
        let Some(bytes) = frame.data_ref() else { continue };
        length += bytes.len();
        if length > MAX_ANSWER {
            return Err(broken("it is too long", true));
        }
        for data in events.feed(bytes).map_err(|sse::TooLong| broken("a line of it is too long", true))? {
            if data == b"[DONE]" {
                continue;
            }
            let event = serde_json::from_slice(&data).map_err(|_| broken("it is not JSON", true))?;
            if let Some(error) = error_in(&event) {
                return Err(failed(None, &error));
            }
            heard.hear(&event);
        }
    }
    heard.end().ok_or_else(|| broken("it has no end", true))
}

/// What an error says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    kinds: [String; 2],
    message: String,
}

/// The error that an event or a body is, in any dialect.
fn error_in(value: &Value) -> Option<Said> {
    let failed = value.get("type").and_then(Value::as_str) == Some("response.failed");
    let error = if failed { value.pointer("/response/error") } else { value.get("error") };
    // Responses tells some in the event itself.
    let bare = value.get("type").and_then(Value::as_str) == Some("error");
    let error = error.filter(|error| !error.is_null()).or(bare.then_some(value))?;
    let text = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let message = error.as_str().map_or_else(|| text("message"), Into::into);
    Some(Said { kinds: [text("type"), text("code")], message: clip(&message).into() })
}

/// What an error in place of an answer, or in the middle of one, comes to.
fn failed(head: Option<(StatusCode, &HeaderMap)>, said: &Said) -> Trouble {
    let kind = said.kinds.iter().map(String::as_str).find(|kind| !kind.is_empty()).unwrap_or("error");
    let is = |kinds: &[&str]| said.kinds.iter().any(|kind| kinds.contains(&kind.as_str()));
    let status = head.map(|(status, _)| status);
    let message = status.map_or_else(
        || format!("{kind}: {}", said.message),
        |status| format!("{} {kind}: {}", status.as_u16(), said.message),
    );
    if status == Some(StatusCode::PAYMENT_REQUIRED) || is(&["billing_error", "insufficient_quota"]) {
        return Trouble { failure: Failure::Money(said.message.clone()), again: Again::Never };
    }
    let again = match head {
        None if is(&["overloaded_error", "api_error", "server_error", "rate_limit_error"]) => Again::Broken,
        None => Again::Never,
        Some((status, headers)) => {
            let told = headers.get("x-should-retry").and_then(|value| value.to_str().ok());
            let again = told.map_or_else(|| status.is_server_error(), |told| told == "true");
            let after = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            if again { Again::After(after.map(Duration::from_secs)) } else { Again::Never }
        }
    };
    Trouble { failure: Failure::Refused(message), again }
}

async fn refused(response: Response<Incoming>) -> Trouble {
    let (head, body) = response.into_parts();
    let limited = http_body_util::Limited::new(body, MAX_ERROR);
    let body = match timeout(CONNECT, limited.collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        // The status says enough.
        Ok(Err(_)) | Err(_) => Bytes::new(),
    };
    let said = serde_json::from_slice(&body).ok().and_then(|body: Value| error_in(&body));
    let said = said
        .unwrap_or_else(|| Said { message: clip(&String::from_utf8_lossy(&body)).into(), ..Said::default() });
    failed(Some((head.status, &head.headers)), &said)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_may_go_away_is_asked_again() {
        let told = |status: u16, retry: Option<&'static str>, kind: &str| {
            let mut headers = HeaderMap::new();
            if let Some(retry) = retry {
                headers.insert("x-should-retry", HeaderValue::from_static(retry));
            }
            headers.insert("retry-after", HeaderValue::from_static("7"));
            let said = error_in(&json!({"type": "error", "error": {"type": kind, "message": "no"}})).unwrap();
            let trouble = failed(Some((StatusCode::from_u16(status).unwrap(), &headers)), &said);
            (matches!(trouble.failure, Failure::Money(_)), trouble.again)
        };
        let after = Again::After(Some(Duration::from_secs(7)));
        assert_eq!(told(402, Some("true"), "billing_error"), (true, Again::Never));
        assert_eq!(told(429, Some("false"), "insufficient_quota"), (true, Again::Never));
        assert_eq!(told(429, None, "rate_limit_error"), (false, Again::Never));
        assert_eq!(told(429, Some("true"), "rate_limit_error"), (false, after));
        assert_eq!(told(529, None, "overloaded_error"), (false, after));
        assert_eq!(told(502, Some("false"), "api_error"), (false, Again::Never));
        assert_eq!(told(400, None, "invalid_request_error"), (false, Again::Never));
    }

    #[test]
    fn errors_are_understood_in_every_dialect() {
        let said = |value: Value| error_in(&value).map(|said| (said.kinds, said.message));
        let expected = |a: &str, b: &str, message: &str| Some(([a.into(), b.into()], message.into()));
        assert_eq!(
            said(json!({"error": {"type": "t", "code": "c", "message": "m"}})),
            expected("t", "c", "m")
        );
        assert_eq!(
            said(json!({"type": "error", "error": {"type": "overloaded_error", "message": "m"}})),
            expected("overloaded_error", "", "m")
        );
        assert_eq!(
            said(
                json!({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "m"}}})
            ),
            expected("", "server_error", "m")
        );
        assert_eq!(said(json!({"type": "error", "code": "c", "message": "m"})), expected("error", "c", "m"));
        assert_eq!(said(json!({"error": "plain"})), expected("", "", "plain"));
        for fine in [json!({"type": "ping"}), json!({"error": null, "choices": []}), json!(7), json!([])] {
            assert_eq!(said(fine), None);
        }
    }

    #[test]
    fn only_plain_http_leads_to_the_gateway() {
        let gateway = Gateway::new("http://models.internal:81/a/", "sgm_x".into()).unwrap();
        assert_eq!((&*gateway.host, gateway.port, &*gateway.prefix), ("models.internal", 81, "/a"));
        assert_eq!(Gateway::new("http://[::1]", "t".into()).unwrap().host, "::1");
        for wrong in ["https://models.internal", "models.internal", "", "http:///v1"] {
            assert!(Gateway::new(wrong, "t".into()).is_err(), "{wrong}");
        }
        assert!(Gateway::new("http://models.internal", "a\nb".into()).is_err());
    }
}
