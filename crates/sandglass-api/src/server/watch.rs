//! How long a client may take: hyper's own head timeout also runs between requests, where patience must be longer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Settings, Slot};
use crate::backend::Stream;

/// What to do with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Leave it alone.
    Fine,
    /// Nothing was asked for long: close it properly.
    Idle,
    /// It takes too long: drop it.
    Slow,
}

/// What a connection has been doing.
#[derive(Debug, Clone, Copy)]
struct Conduct {
    /// Requests being answered.
    open: usize,
    /// Since the first byte of a head that is not complete.
    head: Option<Duration>,
    /// Since the last request was done.
    idle: Duration,
    /// Since the last byte.
    still: Duration,
}

fn judge(conduct: Conduct, settings: &Settings) -> Verdict {
    let Conduct { open, head, idle, still } = conduct;
    if open > 0 {
        if still > settings.stall { Verdict::Slow } else { Verdict::Fine }
    } else if head.is_some_and(|head| head > settings.head_timeout) {
        Verdict::Slow
    } else if idle > settings.keep_alive {
        Verdict::Idle
    } else {
        Verdict::Fine
    }
}

/// Follows one connection.
#[derive(Debug)]
pub(super) struct Watch {
    start: Instant,
    open: AtomicUsize,
    /// Times are milliseconds since `start`; 0 means that no head is being read.
    head_at: AtomicU64,
    idle_at: AtomicU64,
    moved_at: AtomicU64,
    /// HTTP/2 exchanges bytes between requests, so they don't announce a head.
    heads: bool,
}

impl Watch {
    /// A new connection whose first bytes have come.
    pub(super) fn new(http2: bool) -> Self {
        Self {
            start: Instant::now(),
            open: AtomicUsize::new(0),
            head_at: AtomicU64::new(u64::from(!http2)),
            idle_at: AtomicU64::new(0),
            moved_at: AtomicU64::new(0),
            heads: !http2,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }

    fn moved(&self, read: bool) {
        let now = self.now();
        self.moved_at.store(now, Ordering::Relaxed);
        if read && self.heads && self.open.load(Ordering::Relaxed) == 0 {
            let _ = self.head_at.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// A head was read.
    pub(super) fn begin(self: &Arc<Self>) -> Open {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.head_at.store(0, Ordering::Relaxed);
        Open(self.clone())
    }

    fn conduct(&self) -> Conduct {
        let now = self.now();
        let since = |at: u64| Duration::from_millis(now.saturating_sub(at));
        let head = self.head_at.load(Ordering::Relaxed);
        Conduct {
            open: self.open.load(Ordering::Relaxed),
            head: (head > 0).then(|| since(head)),
            idle: since(self.idle_at.load(Ordering::Relaxed)),
            still: since(self.moved_at.load(Ordering::Relaxed)),
        }
    }

    /// Returns once the connection should not go on as it does.
    pub(super) async fn verdict(&self, settings: &Settings) -> Verdict {
        loop {
            tokio::time::sleep(settings.head_timeout / 3).await;
            match judge(self.conduct(), settings) {
                Verdict::Fine => {}
                verdict => return verdict,
            }
        }
    }
}

/// One request being answered, until it is dropped.
#[derive(Debug)]
pub(super) struct Open(Arc<Watch>);

impl Drop for Open {
    fn drop(&mut self) {
        let now = self.0.now();
        self.0.idle_at.store(now, Ordering::Relaxed);
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of an answer; the request is open as long as it lives.
pub(super) struct Answering {
    inner: Body,
    _open: Arc<Open>,
}

impl Answering {
    pub(super) const fn new(inner: Body, open: Arc<Open>) -> Self {
        Self { inner, _open: open }
    }
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A client's connection: tells the watch what moves, and holds its slot, also after an upgrade has taken it from the
/// server.
pub(super) struct Socket {
    stream: Box<dyn Stream>,
    watch: Arc<Watch>,
    _slot: Slot,
}

impl Socket {
    pub(super) const fn new(stream: Box<dyn Stream>, watch: Arc<Watch>, slot: Slot) -> Self {
        Self { stream, watch, _slot: slot }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.watch.moved(true);
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        if written.is_ready() {
            self.watch.moved(false);
        }
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        if written.is_ready() {
            self.watch.moved(false);
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_too_slow() {
        let settings = Settings {
            head_timeout: Duration::from_secs(15),
            keep_alive: Duration::from_secs(600),
            stall: Duration::from_secs(1800),
            ..Settings::default()
        };
        let judged = |open, head: Option<u64>, idle, still| {
            let head = head.map(Duration::from_secs);
            let (idle, still) = (Duration::from_secs(idle), Duration::from_secs(still));
            judge(Conduct { open, head, idle, still }, &settings)
        };
        assert_eq!(judged(0, None, 599, 599), Verdict::Fine);
        assert_eq!(judged(0, None, 601, 601), Verdict::Idle);
        assert_eq!(judged(0, Some(14), 100, 0), Verdict::Fine);
        assert_eq!(judged(0, Some(16), 100, 0), Verdict::Slow);
        assert_eq!(judged(1, None, 9999, 1799), Verdict::Fine);
        assert_eq!(judged(1, Some(16), 0, 0), Verdict::Fine);
        assert_eq!(judged(1, None, 0, 1801), Verdict::Slow);
    }

    #[test]
    fn heads_begin_with_a_byte_between_requests() {
        let watch = Arc::new(Watch::new(false));
        assert!(watch.conduct().head.is_some());
        let open = watch.begin();
        assert_eq!((watch.conduct().open, watch.conduct().head), (1, None));
        watch.moved(true);
        assert_eq!(watch.conduct().head, None);
        drop(open);
        assert_eq!((watch.conduct().open, watch.conduct().head), (0, None));
        watch.moved(false);
        assert_eq!(watch.conduct().head, None);
        watch.moved(true);
        assert!(watch.conduct().head.is_some());
        let http2 = Arc::new(Watch::new(true));
        http2.moved(true);
        assert_eq!(http2.conduct().head, None);
    }
}
