//! Sockets that end abruptly unless they are told otherwise.

use std::ops::{Deref, DerefMut};

use tokio::net::TcpStream;

/// A connection that is reset when it is dropped, so that nothing of what it had taken goes on its way after the flow was
/// cut, its task was aborted, or the other side was lost.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    finished: bool,
}

impl Socket {
    /// What is small is not held back to be sent with more.
    pub(super) fn new(stream: TcpStream) -> Self {
        // It fails only on a connection that is gone, and that shows at the next step.
        let _gone = stream.set_nodelay(true);
        Self { stream, finished: false }
    }

    /// Closes what has come to its end: what was written still arrives.
    pub(super) fn close(mut self) {
        self.finished = true;
    }
}

impl Deref for Socket {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.stream
    }
}

impl DerefMut for Socket {
    fn deref_mut(&mut self) -> &mut TcpStream {
        &mut self.stream
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if !self.finished {
            let _gone = self.stream.set_zero_linger();
        }
    }
}
