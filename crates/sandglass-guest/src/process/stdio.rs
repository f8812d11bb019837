//! The ends of pipes and terminals that the agent holds.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::pipe::PipeFlags;
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use super::output::MAX_PTY_CHUNK;

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// Width.
    pub cols: u16,
    /// Height.
    pub rows: u16,
}

/// The agent's end of a terminal.
#[derive(Debug, Clone)]
pub(crate) struct Terminal(Arc<AsyncFd<OwnedFd>>);

/// A new pipe: who reads and who writes.
///
/// # Errors
/// No descriptors are left.
pub(crate) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?)
}

/// The agent's reading end.
///
/// # Errors
/// It can't be watched.
pub(crate) fn receiver(fd: OwnedFd) -> io::Result<pipe::Receiver> {
    pipe::Receiver::from_owned_fd(fd)
}

/// The agent's writing end.
///
/// # Errors
/// It can't be watched.
pub(crate) fn sender(fd: OwnedFd) -> io::Result<pipe::Sender> {
    pipe::Sender::from_owned_fd(fd)
}

/// The null device.
///
/// # Errors
/// There is none.
pub(crate) fn null() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
    Ok(rustix::fs::openat(rustix::fs::CWD, "/dev/null", flags, Mode::empty())?)
}

impl Terminal {
    /// A new terminal that belongs to `owner`: the agent's end and the program's.
    ///
    /// # Errors
    /// None are left.
    pub(crate) fn open(size: Size, owner: u32) -> io::Result<(Self, OwnedFd)> {
        let (master, slave) = raw_terminal(size, owner)?;
        rustix::io::ioctl_fionbio(&master, true)?;
        // SAFETY: an `OwnedFd` is an open descriptor, always the same one, until it is dropped, and nobody takes
        // it out of the `AsyncFd`.
        let master = unsafe { AsyncFd::register(master) }.map_err(io::Error::from)?;
        Ok((Self(Arc::new(master)), slave))
    }

    /// Changes its size. The kernel may or may not tell the program in its foreground.
    ///
    /// # Errors
    /// The kernel refused.
    pub(crate) fn resize(&self, size: Size) -> io::Result<()> {
        Ok(rustix::termios::tcsetwinsize(self.0.get_ref(), winsize(size))?)
    }

    /// Waits for output; `None` once nobody has the terminal open any more.
    ///
    /// # Errors
    /// It can't be read.
    pub(crate) async fn read(&self) -> io::Result<Option<Bytes>> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| read(fd.as_fd())) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    /// Output that is there already.
    ///
    /// # Errors
    /// It can't be read.
    pub(crate) fn read_now(&self) -> io::Result<Option<Bytes>> {
        match read(self.0.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            other => other,
        }
    }

    /// Types `bytes`.
    ///
    /// # Errors
    /// Nobody has the terminal open any more.
    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|fd| Ok(rustix::io::write(fd, bytes)?)) {
                Ok(written) => bytes = &bytes[written?..],
                Err(_would_block) => {}
            }
        }
        Ok(())
    }
}

/// A new terminal that belongs to `owner`: both ends.
///
/// # Errors
/// None are left.
pub(crate) fn raw_terminal(size: Size, owner: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    rustix::pty::grantpt(&master)?;
    rustix::pty::unlockpt(&master)?;
    let name = rustix::pty::ptsname(&master, Vec::new())?;
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let slave = rustix::fs::openat(rustix::fs::CWD, name.as_c_str(), flags, Mode::empty())?;
    // Without a group `tty` everybody would share the owner's primary one; nobody but the owner needs it.
    rustix::fs::fchown(&slave, Some(Uid::from_raw(owner)), None::<Gid>)?;
    rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o600))?;
    rustix::termios::tcsetwinsize(&master, winsize(size))?;
    Ok((master, slave))
}

pub(crate) const fn winsize(size: Size) -> Winsize {
    Winsize { ws_col: size.cols, ws_row: size.rows, ws_xpixel: 0, ws_ypixel: 0 }
}

fn read(fd: BorrowedFd<'_>) -> io::Result<Option<Bytes>> {
    let mut buffer = vec![0; MAX_PTY_CHUNK];
    match rustix::io::read(fd, &mut buffer) {
        // EIO is how a terminal says that its other side is closed.
        Ok(0) | Err(rustix::io::Errno::IO) => Ok(None),
        // A copy, for it may be kept: it must not keep a whole buffer for each key.
        Ok(n) => Ok(Some(Bytes::copy_from_slice(&buffer[..n]))),
        Err(error) => Err(error.into()),
    }
}
