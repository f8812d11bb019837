//! One call over the control socket of a sandbox: JSON there and back over a stream, files beside the first byte.
//!
//! The far end is the sandbox process, which a guest may have taken over: what it answers is bounded in length and in
//! time, and descriptors that it sends are not taken.

use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// Longest answer that is read, in bytes. Those that are waited for have a few dozen.
const MAX_ANSWER: u64 = 256 * 1024;

/// Most bytes of a refusal that are repeated.
const MAX_REASON: usize = 400;

/// Most files that go with a call.
const MAX_FILES: usize = 4;

/// A call that got no answer, or one that says no.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// Whether it was carried out is not known.
    #[error("the control socket of the sandbox failed")]
    Io(#[from] io::Error),
    /// The answer is none.
    #[error("the sandbox answered in an unknown form")]
    Form(#[source] serde_json::Error),
    /// It was understood and not carried out.
    #[error("the sandbox refused: {0}")]
    Refused(String),
}

#[derive(Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    err: String,
    #[serde(default)]
    result: Value,
}

/// Calls `method` and waits for its result. The connection is closed afterwards, because one that stays open keeps
/// the sandbox process alive for seconds after its guest.
pub(super) fn call(
    socket: &Path,
    method: &str,
    argument: &Value,
    files: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<Value, CallError> {
    let deadline = Instant::now() + timeout;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let open = || -> rustix::io::Result<OwnedFd> {
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&stream, &SocketAddrUnix::new(socket)?)?;
        Ok(stream)
    };
    let stream = Stream { socket: open().map_err(io::Error::from)?, deadline };
    let request = json!({"method": method, "arg": argument}).to_string();
    stream.send(request.as_bytes(), files)?;
    let mut answer = serde_json::Deserializer::from_reader(io::BufReader::new(stream.take(MAX_ANSWER)));
    let answer = Answer::deserialize(&mut answer).map_err(|error| match error.io_error_kind() {
        Some(_) => CallError::Io(error.into()),
        None => CallError::Form(error),
    })?;
    if answer.success {
        return Ok(answer.result);
    }
    Err(CallError::Refused(answer.err.chars().filter(|c| !c.is_control()).take(MAX_REASON).collect()))
}

/// A connection on which nothing waits beyond the deadline.
struct Stream {
    socket: OwnedFd,
    deadline: Instant,
}

impl Stream {
    fn send(&self, mut bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many files for one call"));
        }
        while !bytes.is_empty() {
            match sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    bytes = bytes.get(sent..).unwrap_or_default();
                    // The files went with the first part.
                    control.clear();
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn wait(&self, event: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::from_borrowed_fd(self.socket.as_fd(), event)], Some(&left)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            // Also when bytes keep dripping in.
            if Instant::now() >= self.deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match recv(&self.socket, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((n, _)) => return Ok(n),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
