//! Bytes on their way: bodies and upgraded connections that end abruptly with their sandbox or when nothing moves.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::CancellationToken;

/// Counts what moves in one exchange, in either direction.
#[derive(Debug)]
pub(crate) struct Pulse {
    beats: AtomicU64,
    limit: Duration,
}

impl Pulse {
    pub(crate) const fn new(limit: Duration) -> Self {
        Self { beats: AtomicU64::new(0), limit }
    }

    /// Something moved.
    pub(crate) fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns once nothing has moved for the limit, and at most twice as long.
    pub(crate) async fn stalled(&self) {
        let mut seen = self.beats.load(Ordering::Relaxed);
        loop {
            tokio::time::sleep(self.limit).await;
            let now = self.beats.load(Ordering::Relaxed);
            if now == seen {
                return;
            }
            seen = now;
        }
    }
}

/// Why a body was cut off.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Cut {
    #[error("the sandbox is gone")]
    Gone,
    #[error("nothing moved for too long")]
    Idle,
    #[error("the other side failed")]
    Failed(#[source] hyper::Error),
}

/// A body that fails when its sandbox goes: the connection it is sent on then ends without the mark of a complete
/// message, and the other side can tell.
pub(crate) struct Watched<B, K> {
    inner: B,
    watch: Pin<Box<dyn Future<Output = Cut> + Send>>,
    pulse: Arc<Pulse>,
    /// What lives as long as the body.
    _keep: K,
}

impl<B, K> Watched<B, K> {
    pub(crate) fn new(inner: B, gone: CancellationToken, pulse: Arc<Pulse>, keep: K) -> Self {
        let watched = pulse.clone();
        let watch = Box::pin(async move {
            tokio::select! {
                biased;
                () = gone.cancelled() => Cut::Gone,
                () = watched.stalled() => Cut::Idle,
            }
        });
        Self { inner, watch, pulse, _keep: keep }
    }
}

impl<B, K> Body for Watched<B, K>
where
    B: Body<Data = Bytes, Error = hyper::Error> + Unpin,
    K: Unpin,
{
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        // First, so that the end of a stream whose sandbox was killed is never taken for a proper one.
        if let Poll::Ready(cut) = self.watch.as_mut().poll(cx) {
            return Poll::Ready(Some(Err(cut)));
        }
        let frame = Pin::new(&mut self.inner).poll_frame(cx);
        if frame.is_ready() {
            self.pulse.beat();
        }
        frame.map(|frame| frame.map(|frame| frame.map_err(Cut::Failed)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Carries bytes both ways between the two sides of an upgrade until one ends, the sandbox goes, or nothing moves.
pub(crate) async fn tunnel(client: OnUpgrade, sandbox: OnUpgrade, gone: &CancellationToken, pulse: &Pulse) {
    let copy = async {
        let (client, sandbox) = tokio::try_join!(client, sandbox).map_err(io::Error::other)?;
        let mut client = Beating { inner: TokioIo::new(client), pulse };
        let mut sandbox = Beating { inner: TokioIo::new(sandbox), pulse };
        tokio::io::copy_bidirectional(&mut client, &mut sandbox).await
    };
    tokio::select! {
        biased;
        () = gone.cancelled() => {}
        () = pulse.stalled() => {}
        copied = copy => match copied {
            Ok((up, down)) => tracing::debug!(up, down, "upgraded connection ended"),
            Err(error) => tracing::debug!(%error, "upgraded connection failed"),
        },
    }
}

/// An upgraded connection that counts what moves.
struct Beating<'a> {
    inner: TokioIo<Upgraded>,
    pulse: &'a Pulse,
}

impl AsyncRead for Beating<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        if read.is_ready() {
            self.pulse.beat();
        }
        read
    }
}

impl AsyncWrite for Beating<'_> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, buf);
        if written.is_ready() {
            self.pulse.beat();
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
