//! Refusals wait for the rest of their request: a connection that is closed while the client still sends is broken for
//! it, and the refusal is lost.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};

/// What of a refused request is read, in bytes.
const MAX_HEARD: usize = 256 << 20;

/// How long a refused client may be silent: it may wait for the refusal before it says more.
const SILENCE: Duration = Duration::from_millis(200);

/// A body that can be read on when its handler has lost interest.
#[derive(Debug, Clone)]
struct Shared(Arc<Mutex<BodyDataStream>>);

impl Stream for Shared {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).poll_next_unpin(cx)
    }
}

/// The layer.
pub(super) async fn hear_out(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let mut rest = Shared(Arc::new(Mutex::new(body.into_data_stream())));
    let response = next.run(Request::from_parts(parts, Body::from_stream(rest.clone()))).await;
    if response.status().is_client_error() || response.status().is_server_error() {
        let mut heard = 0;
        while heard < MAX_HEARD
            && let Ok(Some(Ok(piece))) = tokio::time::timeout(SILENCE, rest.next()).await
        {
            heard += piece.len();
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::middleware::from_fn;
    use futures_util::stream;
    use http::StatusCode;
    use tower::ServiceExt as _;

    use super::*;

    /// How many of these pieces are read if the handler reads none.
    async fn read(status: StatusCode, pieces: impl Stream<Item = Bytes> + Send + 'static) -> usize {
        let count = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&count);
        let body = Body::from_stream(pieces.map(move |piece| {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok::<_, std::io::Error>(piece)
        }));
        let router = Router::new().fallback(async move || status).layer(from_fn(hear_out));
        let response = router.oneshot(Request::new(body)).await.unwrap();
        assert_eq!(response.status(), status);
        count.load(Ordering::Relaxed)
    }

    fn piece() -> Bytes {
        Bytes::from_static(&[0; 1 << 20])
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_client_is_heard_out_within_bounds() {
        assert_eq!(read(StatusCode::BAD_REQUEST, stream::iter(vec![piece(); 9])).await, 9);
        assert_eq!(read(StatusCode::OK, stream::iter(vec![piece(); 9])).await, 0);
        assert_eq!(read(StatusCode::INSUFFICIENT_STORAGE, stream::repeat(piece())).await, MAX_HEARD >> 20);
        let silent = stream::iter(vec![piece(); 2]).chain(stream::pending());
        assert_eq!(read(StatusCode::NOT_FOUND, silent).await, 2);
    }
}
