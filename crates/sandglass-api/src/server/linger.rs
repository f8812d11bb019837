//! Requests that are answered before all of them was read.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::watch::Open;

/// How long the rest of a request is read that nobody wants.
const LINGER: Duration = Duration::from_secs(10);

/// The body of a request. What nobody read of it is read and thrown away: closing a connection on which a client
/// still sends resets it, and the client loses the answer (RFC 9112, 9.6).
pub(crate) struct Lingering {
    /// Until its end.
    inner: Option<Incoming>,
    /// The request is open until then.
    open: Arc<Open>,
    tasks: TaskTracker,
    runtime: Handle,
}

impl Lingering {
    /// Must be called by a task of the runtime.
    pub(super) fn new(inner: Incoming, open: Arc<Open>, tasks: TaskTracker) -> Self {
        Self { inner: Some(inner), open, tasks, runtime: Handle::current() }
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let Some(mut rest) = self.inner.take().filter(|rest| !rest.is_end_stream()) else { return };
        let open = self.open.clone();
        let read = async move {
            let to_end = async { while let Some(Ok(_)) = rest.frame().await {} };
            let _ = tokio::time::timeout(LINGER, to_end).await;
            drop((rest, open));
        };
        self.tasks.spawn_on(read, &self.runtime);
    }
}

impl Body for Lingering {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
        let frame = Pin::new(inner).poll_frame(cx);
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) {
            self.inner = None;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}
