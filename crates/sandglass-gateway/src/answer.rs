//! What clients hear.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use http_body::Frame;
use http_body_util::Full;
use sandglass_models::Dialect;
use sandglass_models::refusal::{Refusal, Why, refusal};
use serde_json::Value;
use tokio::sync::mpsc;

/// Tells clients of both families whether to ask again.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// The end of an answer that is not its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut;

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the provider's answer broke off")
    }
}

impl std::error::Error for Cut {}

/// The body of an answer.
#[derive(Debug)]
pub(crate) enum Body {
    /// One that is there.
    Whole(Full<Bytes>),
    /// One that comes piece by piece. It is cut if nobody says that it is at its end.
    Pieces(mpsc::Receiver<Piece>),
}

/// A piece of an answer.
#[derive(Debug)]
pub(crate) enum Piece {
    Data(Bytes),
    /// Nothing follows, and nothing is missing.
    End,
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match self.get_mut() {
            Self::Whole(full) => Pin::new(full)
                .poll_frame(context)
                .map(|frame| frame.map(|frame| frame.map_err(|never: Infallible| match never {}))),
            Self::Pieces(pieces) => pieces.poll_recv(context).map(|piece| match piece {
                Some(Piece::Data(bytes)) => Some(Ok(Frame::data(bytes))),
                Some(Piece::End) => None,
                None => Some(Err(Cut)),
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(full) => full.is_end_stream(),
            Self::Pieces(_) => false,
        }
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match self {
            Self::Whole(full) => full.size_hint(),
            Self::Pieces(_) => http_body::SizeHint::default(),
        }
    }
}

/// An answer of the provider, or instead of one.
pub(crate) type Answer = Response<Body>;

/// An answer in JSON.
pub(crate) fn json(status: StatusCode, value: &Value) -> Answer {
    let mut answer = Response::new(Body::Whole(Full::new(value.to_string().into())));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, JSON);
    answer
}

/// No, in the words of a protocol. Where it was paid for, nobody is told to ask again.
pub(crate) fn no(dialect: Dialect, why: Why, message: &str, paid: bool) -> Answer {
    let Refusal { status, body, retry } = refusal(dialect, why, message);
    let mut answer = json(status, &body);
    let headers = answer.headers_mut();
    headers.insert(SHOULD_RETRY, HeaderValue::from_static(if retry && !paid { "true" } else { "false" }));
    if why == Why::Busy {
        headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    answer
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn an_answer_ends_only_where_that_is_said() {
        for (says, whole) in [(true, true), (false, false)] {
            let (sender, pieces) = mpsc::channel(2);
            sender.try_send(Piece::Data("a".into())).unwrap();
            if says {
                sender.try_send(Piece::End).unwrap();
            }
            drop(sender);
            let read = Body::Pieces(pieces).collect().await;
            assert_eq!(read.is_ok(), whole);
        }
    }

    #[test]
    fn what_was_paid_for_is_not_asked_again() {
        for (paid, retry) in [(false, "true"), (true, "false")] {
            let answer = no(Dialect::Chat, Why::Upstream, "gone", paid);
            assert_eq!(answer.headers()[SHOULD_RETRY], retry);
        }
    }
}
