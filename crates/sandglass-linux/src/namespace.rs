//! Network namespaces: making them, working inside them, and keeping them under a name.
//!
//! A namespace belongs to a thread, so all work inside one is done on a thread of its own that ends with the work:
//! no other thread of this process ever changes where it is.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, fstat, fstatfs, open};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use crate::thread::on_fresh_thread;

mod pin;

pub use pin::PinFolder;

/// `NSFS_MAGIC` of `linux/magic.h`: the file system that namespace files live on.
const NSFS_MAGIC: u64 = 0x6e73_6673;

/// `SIOCGSKNS` of `linux/sockios.h`: the network namespace of a socket.
const SIOCGSKNS: libc::Ioctl = 0x894c;

/// A network namespace. It lives while a value like this, a pin, a process or a socket in it lives.
#[derive(Debug)]
pub struct Netns(OwnedFd);

impl Netns {
    /// Makes a namespace that holds nothing but a loopback interface, which is down.
    ///
    /// # Errors
    /// No privilege, or the kernel is at its limit of namespaces or out of memory.
    pub fn create() -> io::Result<Self> {
        on_fresh_thread("netns", || {
            // SAFETY: only this thread's network namespace changes; its descriptor table stays shared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET)? };
            Self::current()
        })?
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// There is no `/proc`, or no descriptor is free.
    pub fn current() -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(Self(open("/proc/thread-self/ns/net", flags, Mode::empty())?))
    }

    /// Opens a pin.
    ///
    /// # Errors
    /// There is none; [`InvalidData`](io::ErrorKind::InvalidData) if the file is no namespace, as after the pin
    /// was taken off it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let fd = open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())?;
        if u64::try_from(fstatfs(&fd)?.f_type) == Ok(NSFS_MAGIC) {
            Ok(Self(fd))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the file is not a namespace"))
        }
    }

    /// The namespace in which a socket was made, whichever process holds it.
    ///
    /// # Errors
    /// It is no socket, or there is no privilege.
    pub fn of_socket(socket: impl AsFd) -> io::Result<Self> {
        let socket = socket.as_fd();
        // SAFETY: this ioctl takes no argument and answers a new close-on-exec descriptor.
        let fd = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGSKNS) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor and nothing else owns it.
        Ok(Self(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }))
    }

    /// The number by which `/proc` shows it (`net:[…]`). The kernel uses numbers again.
    ///
    /// # Errors
    /// None that a healthy kernel gives.
    pub fn inode(&self) -> io::Result<u64> {
        Ok(fstat(&self.0)?.st_ino)
    }

    /// Runs `work` on a fresh thread inside the namespace and waits for it. Sockets that it makes stay there, files
    /// below `/proc/sys/net` are those of the namespace, and programs that it starts run in it.
    ///
    /// # Errors
    /// The namespace can't be entered, or there is no thread; `work` has not run then.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_fresh_thread("netns", || {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(work())
        })?
    }
}

/// Takes the calling process out of this machine: into new namespaces of mounts, network, System V IPC and host name; its
/// next child is process 1 of a new namespace of processes. So whatever is mounted, made or started there is unseen
/// outside, and ends with that child. Call it before the second thread starts: other threads stay where they are.
///
/// # Errors
/// No privilege, or the kernel is at its limit of namespaces.
pub fn leave_machine() -> io::Result<()> {
    let all = UnshareFlags::NEWNS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWPID;
    // SAFETY: the flags leave the descriptor table shared, so no descriptor changes its meaning for another thread.
    unsafe { rustix::thread::unshare_unsafe(all)? };
    Ok(mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?)
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests;
