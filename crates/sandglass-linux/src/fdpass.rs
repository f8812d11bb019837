//! Messages with file descriptors over a pair of connected sockets.
//!
//! The sockets are `SOCK_SEQPACKET`: one send is one receive, so a message can't be split or glued, and the end of
//! the stream is seen. Everything is bounded on both sides, and a message that does not fit is refused whole:
//! descriptors that came with it are closed.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// Longest message, in bytes. Well below the default `net.core.wmem_default` of 212,992, above which a send fails.
pub const MAX_MESSAGE_LEN: usize = 128 * 1024;

/// Most descriptors in one message. The kernel's own bound, `SCM_MAX_FD`, is 253.
pub const MAX_FDS: usize = 8;

/// What arrived in one receive.
#[derive(Debug)]
pub struct Received {
    /// The bytes: at least one, at most [`MAX_MESSAGE_LEN`].
    pub message: Vec<u8>,
    /// The descriptors, close-on-exec, in the order in which they were sent; at most [`MAX_FDS`].
    pub fds: Vec<OwnedFd>,
}

/// A message that breaks a bound. It travels inside an [`io::Error`] of kind
/// [`InvalidInput`](io::ErrorKind::InvalidInput) when sending, [`InvalidData`](io::ErrorKind::InvalidData) when
/// receiving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// No bytes: it could not be told from the end of the stream.
    #[error("message is empty")]
    Empty,
    /// More than [`MAX_MESSAGE_LEN`] bytes.
    #[error("message is longer than {MAX_MESSAGE_LEN} bytes")]
    TooLong,
    /// More than [`MAX_FDS`] descriptors, or some that this process had no room for.
    #[error("message carries more than {MAX_FDS} descriptors, or more than could be received")]
    TooManyFds,
    /// Something that is not descriptors came beside the bytes.
    #[error("message carries something other than descriptors")]
    UnexpectedControl,
}

/// Makes two connected sockets, blocking and close-on-exec.
///
/// # Errors
/// The descriptor table is full, or the kernel is out of memory.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends one message and blocks until the socket has room for it.
///
/// # Errors
/// A [`Violation`] before anything is sent; [`BrokenPipe`](io::ErrorKind::BrokenPipe) if the peer is gone.
pub fn send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket.as_fd(), message, fds, SendFlags::empty())
}

/// Sends one message or fails at once, whatever the mode of the socket is: the form for `AsyncFd::try_io`.
///
/// # Errors
/// As [`send`], and [`WouldBlock`](io::ErrorKind::WouldBlock) when the socket has no room.
pub fn try_send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket.as_fd(), message, fds, SendFlags::DONTWAIT)
}

/// Receives one message and blocks until there is one; `None` once the peer has closed.
///
/// # Errors
/// A [`Violation`]: the message is lost and its descriptors are closed, so give the peer up.
pub fn recv(socket: impl AsFd) -> io::Result<Option<Received>> {
    recv_with(socket.as_fd(), RecvFlags::empty())
}

/// Receives one message or fails at once, whatever the mode of the socket is: the form for `AsyncFd::try_io`.
///
/// # Errors
/// As [`recv`], and [`WouldBlock`](io::ErrorKind::WouldBlock) when there is none.
pub fn try_recv(socket: impl AsFd) -> io::Result<Option<Received>> {
    recv_with(socket.as_fd(), RecvFlags::DONTWAIT)
}

fn send_with(
    socket: BorrowedFd<'_>,
    message: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let refused = |violation| Err(io::Error::new(io::ErrorKind::InvalidInput, violation));
    if message.is_empty() {
        return refused(Violation::Empty);
    }
    if message.len() > MAX_MESSAGE_LEN {
        return refused(Violation::TooLong);
    }
    if fds.len() > MAX_FDS {
        return refused(Violation::TooManyFds);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return refused(Violation::TooManyFds);
    }
    let flags = flags | SendFlags::NOSIGNAL;
    let sent = rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(message)], &mut control, flags))?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

fn recv_with(socket: BorrowedFd<'_>, flags: RecvFlags) -> io::Result<Option<Received>> {
    let refused = |violation| Err(io::Error::new(io::ErrorKind::InvalidData, violation));
    let mut message = vec![0; MAX_MESSAGE_LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    // Dropping the buffer closes every descriptor that was not taken out of it.
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, flags)
    })?;

    let mut fds = Vec::new();
    let mut unexpected = false;
    for item in control.drain() {
        match item {
            RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
            _ => unexpected = true,
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return refused(Violation::TooLong);
    }
    // The alignment of the control buffer may leave room for one more than was asked for.
    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        return refused(Violation::TooManyFds);
    }
    if unexpected {
        return refused(Violation::UnexpectedControl);
    }
    if received.bytes == 0 {
        // The end of the stream; or an empty message, which no honest peer sends, and which ends it as well.
        return if fds.is_empty() { Ok(None) } else { refused(Violation::Empty) };
    }
    message.truncate(received.bytes);
    Ok(Some(Received { message, fds }))
}

#[cfg(test)]
mod tests;
