//! Clients that do not take their answers.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream to somebody who has to take something of what is written within a time, or it fails. What is read has times of its own.
#[derive(Debug)]
pub(crate) struct Patient<S> {
    inner: S,
    patience: Duration,
    /// While nothing is taken.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    pub(crate) const fn new(inner: S, patience: Duration) -> Self {
        Self { inner, patience, waiting: None }
    }

    fn within<T>(&mut self, taken: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if taken.is_ready() {
            self.waiting = None;
            return taken;
        }
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(self.patience)));
        waiting.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let taken = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.within(taken, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let taken = Pin::new(&mut self.inner).poll_write_vectored(context, bytes);
        self.within(taken, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let taken = Pin::new(&mut self.inner).poll_flush(context);
        self.within(taken, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let taken = Pin::new(&mut self.inner).poll_shutdown(context);
        self.within(taken, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn whoever_takes_nothing_is_not_waited_for() {
        let (ours, mut theirs) = duplex(4);
        let mut patient = Patient::new(ours, PATIENCE);
        let writing = patient.write_all(b"12345678");
        let taking = async {
            tokio::time::sleep(PATIENCE - Duration::from_secs(1)).await;
            let mut some = [0; 2];
            theirs.read_exact(&mut some).await.unwrap();
            tokio::time::Instant::now()
        };
        let (written, last) = tokio::join!(writing, taking);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(last.elapsed() >= PATIENCE, "each time it has as long");
    }
}
