//! What a sandbox hears: the answer of a service without the credential, or why there is none.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use sandglass_broker::redact::{Redactor, Search};
use serde_json::json;
use tokio::time::{Instant, Sleep, sleep};

use crate::request::without_hop;
use crate::upstream::SILENCE;

/// What is about the account that the credential is of, or would be kept for the next request: nothing of it comes in.
const ACCOUNT: [HeaderName; 9] = [
    http::header::SET_COOKIE,
    HeaderName::from_static("set-cookie2"),
    HeaderName::from_static("openai-organization"),
    HeaderName::from_static("openai-project"),
    HeaderName::from_static("anthropic-organization-id"),
    HeaderName::from_static("x-oauth-scopes"),
    HeaderName::from_static("x-oauth-client-id"),
    HeaderName::from_static("x-accepted-oauth-scopes"),
    HeaderName::from_static("github-authentication-token-expiration"),
];

/// The body of a request on its way out: so long, and no longer.
#[derive(Debug)]
pub(crate) struct Sent {
    body: Incoming,
    left: u64,
    pub(crate) meter: Arc<Meter>,
}

/// What went which way of one request.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    /// Whether the request was longer than it may be.
    pub(crate) too_long: AtomicBool,
}

/// The end of a body that is not its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut;

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body broke off, or is too long")
    }
}

impl std::error::Error for Cut {}

impl Sent {
    pub(crate) const fn new(body: Incoming, most: u64, meter: Arc<Meter>) -> Self {
        Self { body, left: most, meter }
    }
}

impl http_body::Body for Sent {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        loop {
            let Some(frame) = std::task::ready!(Pin::new(&mut self.body).poll_frame(context)) else {
                return Poll::Ready(None);
            };
            // Trailers are for the next hop, which is this one.
            let Ok(data) = frame.map_err(|_| Cut)?.into_data() else { continue };
            let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
            let Some(left) = self.left.checked_sub(length) else {
                self.meter.too_long.store(true, Ordering::Relaxed);
                return Poll::Ready(Some(Err(Cut)));
            };
            self.left = left;
            self.meter.sent.fetch_add(length, Ordering::Relaxed);
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What a sandbox hears.
#[derive(Debug)]
pub(crate) enum Body {
    /// What this server says.
    Own(Option<Bytes>),
    /// What a service says. `G` is held until it is over.
    Redacted(Box<Redacted>),
}

/// The body of an answer, with the credential taken out.
pub(crate) struct Redacted {
    body: Incoming,
    redactor: Redactor<Arc<Search>>,
    ended: bool,
    silence: Pin<Box<Sleep>>,
    meter: Arc<Meter>,
    /// Held until it is over.
    _held: Box<dyn Send + Sync>,
}

impl fmt::Debug for Redacted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redacted").finish_non_exhaustive()
    }
}

impl Redacted {
    pub(crate) fn new(
        body: Incoming,
        search: Arc<Search>,
        meter: Arc<Meter>,
        held: Box<dyn Send + Sync>,
    ) -> Self {
        Self {
            body,
            redactor: Redactor::new(search),
            ended: false,
            silence: Box::pin(sleep(SILENCE)),
            meter,
            _held: held,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        while !self.ended {
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Pending if self.silence.as_mut().poll(context).is_ready() => {
                    return Poll::Ready(Some(Err(Cut)));
                }
                Poll::Pending => return Poll::Pending,
                Poll::Ready(frame) => frame,
            };
            self.silence.as_mut().reset(Instant::now() + SILENCE);
            let out = match frame {
                None => {
                    self.ended = true;
                    self.redactor.finish()
                }
                Some(frame) => match frame.map_err(|_| Cut)?.into_data() {
                    Ok(data) => {
                        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
                        self.meter.received.fetch_add(length, Ordering::Relaxed);
                        self.redactor.feed(&data)
                    }
                    // No trailer comes in: it is nothing that a program relies on, and a place to hide something in.
                    Err(_) => continue,
                },
            };
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(out.into())));
            }
        }
        Poll::Ready(None)
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match self.get_mut() {
            Self::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Redacted(body) => body.poll(context).map(|piece| piece.map(|piece| piece.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(bytes) => bytes.is_none(),
            Self::Redacted(body) => body.ended,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            // What is taken out leaves as many bytes, and the length is in the headers where there is one.
            Self::Redacted(_) => SizeHint::default(),
        }
    }
}

/// An answer, or something instead of one.
pub(crate) type Answer = Response<Body>;

/// What this server says itself.
pub(crate) fn own(status: StatusCode, error: &str, reason: &str, retry: Option<u64>) -> Answer {
    let body = json!({"error": error, "reason": reason}).to_string();
    let mut answer = Response::new(Body::Own(Some(body.into())));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(seconds) = retry {
        answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    answer
}

/// Whether an answer can be searched for the credential.
pub(crate) fn is_plain(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_ENCODING).iter().all(|value| value.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// The headers that come in of an answer.
pub(crate) fn into(headers: &HeaderMap, search: &Search) -> HeaderMap {
    let mut kept = HeaderMap::new();
    for (name, value) in &without_hop(headers) {
        // A name that has the credential in it is none that anybody needs.
        if ACCOUNT.contains(name) || search.text(name.as_str().as_bytes()).1 {
            continue;
        }
        if let Ok(value) = HeaderValue::from_bytes(&search.text(value.as_bytes()).0) {
            kept.append(name.clone(), value);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_in_without_the_credential_and_without_the_account() {
        let search = Search::of([&"the-real-one".parse().unwrap()]);
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("content-type", "text/plain"),
            ("content-length", "12"),
            ("location", "https://evil.test/?token=the-real-one"),
            ("x-echo", "dGhlLXJlYWwtb25l"),
            ("x-the-real-one", "1"),
            ("set-cookie", "a=b"),
            ("openai-organization", "acme"),
            ("transfer-encoding", "chunked"),
            ("connection", "x-drop"),
            ("x-drop", "1"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let kept = into(&headers, &search);
        let mut kept: Vec<_> =
            kept.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        kept.sort();
        assert_eq!(
            kept,
            [
                "content-length: 12",
                "content-type: text/plain",
                "location: https://evil.test/?token=************",
                "x-echo: ****************",
            ]
        );
    }

    #[test]
    fn what_is_packed_can_not_be_searched() {
        let plain = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CONTENT_ENCODING, HeaderValue::from_static(value));
            }
            is_plain(&headers)
        };
        assert!(plain(&[]) && plain(&["identity"]) && plain(&["Identity", "identity"]));
        assert!(!plain(&["gzip"]) && !plain(&["identity", "br"]) && !plain(&["identity, gzip"]));
    }
}
