//! Mount namespaces that are furnished before any process is in them.
//!
//! Made by the parent, on a thread, and not by each child between `clone` and `execve`: so it happens beside other work,
//! and a mount that fails can say which one it was.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::UnshareFlags;

use crate::thread::on_fresh_thread;

/// How mounts and unmounts travel between a new namespace and the one that it is a copy of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// Into the new one, never out.
    Slave,
    /// Neither in nor out.
    Private,
}

/// The arguments of `mount(2)`.
#[derive(Debug, Clone)]
pub struct Mount {
    /// What is mounted: a device, a path, or a name that the kernel ignores.
    pub source: CString,
    /// Where.
    pub target: CString,
    /// The file system's type; empty for a bind mount.
    pub fstype: CString,
    /// `MS_*`.
    pub flags: u64,
    /// The file system's own options.
    pub data: CString,
}

impl Mount {
    fn perform(&self) -> io::Result<()> {
        let Self { source, target, fstype, flags, data } = self;
        // SAFETY: every pointer is a NUL-terminated string that outlives the call.
        let done = unsafe {
            libc::mount(source.as_ptr(), target.as_ptr(), fstype.as_ptr(), *flags, data.as_ptr().cast())
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// A namespace that could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// There is no privilege, no thread, or no memory.
    #[error("could not make a mount namespace")]
    Namespace(#[source] io::Error),
    /// One of its mounts failed.
    #[error("could not mount {} on {}", fstype.to_string_lossy(), target.to_string_lossy())]
    Mount {
        /// The file system's type; empty for a bind mount.
        fstype: CString,
        /// Where.
        target: CString,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A mount namespace. It lives while a value like this or a process in it lives.
#[derive(Debug)]
pub struct MountNamespace {
    namespace: OwnedFd,
    /// The root folder of this process in it, which is not the namespace's if this process was given another one by
    /// chroot(2). Whoever enters the namespace must not see more than this process does.
    root: OwnedFd,
}

impl MountNamespace {
    /// A copy of this process's namespace, and in it these mounts, one after the other.
    ///
    /// # Errors
    /// [`MountError`]; then nothing of it is left.
    pub fn furnish(propagation: Propagation, mounts: &[Mount]) -> Result<Self, MountError> {
        let furnish = || {
            // SAFETY: this thread's root, working directory and mounts become its own; its descriptor table stays
            // shared, and it ends with this work.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.map_err(namespace)?;
            let kind = match propagation {
                Propagation::Slave => MountPropagationFlags::DOWNSTREAM,
                Propagation::Private => MountPropagationFlags::PRIVATE,
            };
            mount_change("/", MountPropagationFlags::REC | kind).map_err(namespace)?;
            for mount in mounts {
                mount.perform().map_err(|source| MountError::Mount {
                    fstype: mount.fstype.clone(),
                    target: mount.target.clone(),
                    source,
                })?;
            }
            let open = |path: &str, how| open(path, how | OFlags::CLOEXEC, Mode::empty()).map_err(namespace);
            Ok(Self {
                namespace: open("/proc/thread-self/ns/mnt", OFlags::RDONLY)?,
                root: open("/", OFlags::PATH | OFlags::DIRECTORY)?,
            })
        };
        on_fresh_thread("mounts", furnish).map_err(MountError::Namespace)?
    }

    /// Runs `work` on a fresh thread inside the namespace and waits for it. Programs that it starts see the mounts.
    ///
    /// # Errors
    /// The namespace can't be entered, or there is no thread; `work` has not run then.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_fresh_thread("mounts", || {
            // SAFETY: this thread's root and working directory become its own; its descriptor table stays shared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS)? };
            if self.enter() < 0 { Err(io::Error::last_os_error()) } else { Ok(work()) }
        })?
    }

    /// Moves the calling thread into it, which must share nothing of its file system with others: so it is after
    /// `clone`. Negative on failure, with errno set. It makes system calls and nothing else.
    pub(crate) fn enter(&self) -> libc::c_int {
        // SAFETY: takes no pointer but a literal.
        unsafe {
            if libc::setns(self.namespace.as_raw_fd(), libc::CLONE_NEWNS) < 0
                || libc::fchdir(self.root.as_raw_fd()) < 0
                || libc::chroot(c".".as_ptr()) < 0
            {
                return -1;
            }
        }
        0
    }
}

fn namespace(errno: rustix::io::Errno) -> MountError {
    MountError::Namespace(errno.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::process::{Launch, Step, run};

    fn tmpfs(target: &std::path::Path) -> Mount {
        Mount {
            source: c"none".into(),
            target: CString::new(target.as_os_str().as_bytes()).unwrap(),
            fstype: c"tmpfs".into(),
            flags: 0,
            data: c"size=4k".into(),
        }
    }

    #[test]
    fn only_who_enters_sees_the_mounts() {
        let dir = tempfile::tempdir().unwrap();
        let namespace =
            MountNamespace::furnish(Propagation::Slave, &[tmpfs(dir.path())]).map(Arc::new).unwrap();
        assert_eq!(crate::mount::below(dir.path()).unwrap(), []);
        let seen = |steps: Vec<Step>| {
            let launch = Launch::new("/usr/bin/stat").unwrap().args(["-f", "-c", "%T"]).unwrap();
            let launch = launch.arg(dir.path()).unwrap().steps(steps);
            String::from_utf8(run(launch, b"", Duration::from_secs(30), 100).unwrap().stdout).unwrap()
        };
        assert_eq!(seen(vec![Step::EnterMounts(namespace)]), "tmpfs\n");
        assert_ne!(seen(vec![]), "tmpfs\n");
    }

    #[test]
    fn a_mount_that_fails_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        let error =
            MountNamespace::furnish(Propagation::Private, &[tmpfs(dir.path()), tmpfs(&missing)]).unwrap_err();
        assert_eq!(error.to_string(), format!("could not mount tmpfs on {}", missing.display()));
        assert_eq!(crate::mount::below(dir.path()).unwrap(), []);
    }
}
