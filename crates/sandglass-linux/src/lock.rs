//! Locks on a folder.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, major, minor, open};

/// A folder that is locked for as long as this value, or a duplicate of its descriptor, lives. The kernel lets go
/// when the last process that holds one dies, so a crash leaves no stale lock.
#[derive(Debug)]
pub struct FolderLock(OwnedFd);

/// The lock was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another process holds it.
    #[error("the folder is in use by another process")]
    InUse,
    /// The folder could not be opened or locked.
    #[error("the folder could not be locked")]
    Io(#[source] io::Error),
}

impl FolderLock {
    /// Locks a folder, or fails at once. The lock is `flock` on the folder itself: nothing is written in it.
    ///
    /// # Errors
    /// [`LockError::InUse`] if it is taken, also by this process; otherwise the folder can't be opened.
    pub fn acquire(folder: &Path) -> Result<Self, LockError> {
        let fd = open_folder(folder).map_err(LockError::Io)?;
        match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self(fd)),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(LockError::InUse),
            Err(error) => Err(LockError::Io(error.into())),
        }
    }
}

/// A folder that nobody locks with [`FolderLock::acquire`] for as long as this lives; others may share it.
#[derive(Debug)]
pub struct SharedLock(#[expect(dead_code, reason = "the kernel lets go when it is closed")] OwnedFd);

impl SharedLock {
    /// Locks a folder together with others, as soon as nobody has it alone.
    ///
    /// # Errors
    /// The folder can't be opened or locked.
    pub fn acquire(folder: &Path) -> io::Result<Self> {
        let fd = open_folder(folder)?;
        rustix::io::retry_on_intr(|| flock(&fd, FlockOperation::LockShared))?;
        Ok(Self(fd))
    }
}

fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(open(folder, flags, Mode::empty())?)
}

/// The process that locked a folder, as far as the kernel says: it may have ended, and a duplicate live on.
///
/// # Errors
/// The folder can't be opened, or `/proc/locks` (proc_locks(5)) can't be read.
pub fn holder(folder: &Path) -> io::Result<Option<i32>> {
    let about = fstat(open(folder, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)?;
    let file = format!("{:02x}:{:02x}:{}", major(about.st_dev), minor(about.st_dev), about.st_ino);
    Ok(holder_in(&fs_err::read_to_string("/proc/locks")?, &file))
}

/// Of a lock that is waited for there is a second line, with an arrow, for each who waits.
fn holder_in(locks: &str, file: &str) -> Option<i32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (kind, pid, of) = (words.next()?, words.nth(2)?, words.next()?);
        (kind == "FLOCK" && of == file).then(|| pid.parse().ok()).flatten()
    })
}

impl AsFd for FolderLock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_holds_it_and_letting_go_frees_it() {
        let folder = tempfile::tempdir().unwrap();
        let lock = FolderLock::acquire(folder.path()).unwrap();
        assert!(matches!(FolderLock::acquire(folder.path()), Err(LockError::InUse)));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

        let copy = lock.as_fd().try_clone_to_owned().unwrap();
        drop(lock);
        assert!(matches!(FolderLock::acquire(folder.path()), Err(LockError::InUse)), "a copy holds it too");
        drop(copy);
        FolderLock::acquire(folder.path()).unwrap();
    }

    #[test]
    fn many_share_it_and_then_nobody_has_it_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) =
            (SharedLock::acquire(folder.path()).unwrap(), SharedLock::acquire(folder.path()).unwrap());
        for shared in [one, two] {
            assert!(matches!(FolderLock::acquire(folder.path()), Err(LockError::InUse)));
            drop(shared);
        }
        let alone = FolderLock::acquire(folder.path()).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| SharedLock::acquire(folder.path()).unwrap());
            drop(alone);
            waiting.join().unwrap();
        });
    }

    #[test]
    fn the_kernel_tells_who_has_it() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 fd:01:42 0 EOF\n2: FLOCK  ADVISORY  WRITE 8 fd:01:4 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 9 fd:01:42 0 EOF\n4: FLOCK  ADVISORY  WRITE 10 fd:01:42 0 EOF\n";
        assert_eq!(holder_in(locks, "fd:01:42"), Some(10));
        assert_eq!(holder_in(locks, "fd:01:43"), None);
        assert_eq!(holder_in("x\n\n", ""), None);
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(holder(folder.path()).unwrap(), None);
        let _lock = FolderLock::acquire(folder.path()).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(holder(folder.path()).unwrap(), Some(own));
        assert!(holder(&folder.path().join("absent")).is_err());
    }

    #[test]
    fn a_missing_folder_and_a_file_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        for path in [folder.path().join("absent"), file] {
            assert!(matches!(FolderLock::acquire(&path), Err(LockError::Io(_))), "{path:?}");
        }
    }
}
