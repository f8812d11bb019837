//! The handle of one flow.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::error::ResetCode;
use super::state::{Key, Shared};

/// One connection inside a session: a byte stream in each direction.
///
/// Shutting it down for writing ends one direction. Dropping it resets the flow, unless both directions have
/// ended; after a shutdown the data written before still arrives. A write returns once the data is accepted for
/// sending, which is at most the window that the peer granted. Errors are
/// [`FlowError`](super::FlowError)s inside of [`io::Error`]s.
pub struct Flow {
    shared: Arc<Shared>,
    key: Key,
}

impl Flow {
    pub(super) fn new(shared: Arc<Shared>, key: Key) -> Self {
        Self { shared, key }
    }

    /// Gives the flow up in both directions, and tells the peer why.
    pub fn reset(self, code: ResetCode) {
        self.shared.with(|state| state.reset(self.key, code));
    }

    pub(super) fn accept(&self) {
        self.shared.with(|state| state.accept(self.key));
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(super) fn key(&self) -> Key {
        self.key
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Flow").field(&self.key).finish()
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.shared.with(|state| state.drop_handle(self.key));
    }
}

impl AsyncRead for Flow {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.shared.with(|state| state.poll_read(self.key, cx, buf)).map_err(io::Error::from)
    }
}

impl AsyncWrite for Flow {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.shared.with(|state| state.poll_write(self.key, cx, bytes)).map_err(io::Error::from)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.shared.with(|state| {
            let mut written = 0;
            for slice in slices.iter().filter(|slice| !slice.is_empty()) {
                match state.poll_write(self.key, cx, slice) {
                    Poll::Ready(Ok(count)) => written += count,
                    // The next call meets the same obstacle.
                    Poll::Ready(Err(_)) | Poll::Pending if written > 0 => break,
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => return Poll::Pending,
                }
            }
            Poll::Ready(Ok(written))
        });
        written.map_err(io::Error::from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// What was accepted is sent in any case, so there is nothing to wait for.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.shared.with(|state| state.shutdown(self.key)).map_err(io::Error::from))
    }
}
