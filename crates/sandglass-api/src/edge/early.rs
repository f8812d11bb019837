//! Answers that come before the request was taken to its end.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection into a sandbox, whose server may answer and close before it has read everything: what it does not
/// take any more is thrown away. If writing failed instead, the answer that waits to be read would be lost.
pub(crate) struct Unheard<S> {
    inner: S,
    closed: bool,
}

impl<S> Unheard<S> {
    pub(crate) const fn new(inner: S) -> Self {
        Self { inner, closed: false }
    }

    fn took<T>(&mut self, result: io::Result<T>, all: T) -> io::Result<T> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        match result {
            Err(error) if matches!(error.kind(), BrokenPipe | ConnectionReset) => {
                self.closed = true;
                Ok(all)
            }
            result => result,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Unheard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Unheard<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.closed {
            return Poll::Ready(Ok(buf.len()));
        }
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, buf));
        Poll::Ready(self.took(written, buf.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let all = bufs.iter().map(|buf| buf.len()).sum();
        if self.closed {
            return Poll::Ready(Ok(all));
        }
        let written = ready!(Pin::new(&mut self.inner).poll_write_vectored(cx, bufs));
        Poll::Ready(self.took(written, all))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.closed {
            return Poll::Ready(Ok(()));
        }
        let flushed = ready!(Pin::new(&mut self.inner).poll_flush(cx));
        Poll::Ready(self.took(flushed, ()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.closed {
            return Poll::Ready(Ok(()));
        }
        let shut = ready!(Pin::new(&mut self.inner).poll_shutdown(cx));
        Poll::Ready(self.took(shut, ()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn an_answer_is_read_from_a_server_that_has_stopped_listening() {
        let (near, mut far) = tokio::io::duplex(64);
        far.write_all(b"answer").await.unwrap();
        drop(far);
        let mut near = Unheard::new(near);
        near.write_all(&[0; 1000]).await.unwrap();
        near.flush().await.unwrap();
        let mut read = String::new();
        near.read_to_string(&mut read).await.unwrap();
        assert_eq!(read, "answer");
    }
}
