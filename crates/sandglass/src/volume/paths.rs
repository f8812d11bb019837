//! Paths of a client on a volume of a guest.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use sandglass_engine::volume::Why;

/// Longest path, in bytes (`PATH_MAX`).
const MAX_PATH: usize = 4096;

/// Most parts of a path.
const MAX_PARTS: usize = 256;

/// Longest part, in bytes (`NAME_MAX`).
const MAX_PART: usize = 255;

/// Why something was not done.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) why: Why,
    pub(super) message: String,
}

impl Refusal {
    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self { why: Why::Invalid, message: message.into() }
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        let (why, message) = match errno {
            Errno::NOENT | Errno::NOTDIR => (Why::NotFound, "there is no such path on the volume"),
            Errno::LOOP => (Why::Invalid, "the path leads over a symbolic link, and none is followed"),
            Errno::XDEV => (Why::Invalid, "the path leads out of the volume"),
            Errno::EXIST => (Why::Conflict, "there is something already"),
            Errno::NOTEMPTY => (Why::Conflict, "something is put there all the time: try again"),
            Errno::ISDIR => (Why::Invalid, "it is a folder"),
            Errno::NXIO | Errno::NODEV => (Why::Invalid, "it is no file and no folder"),
            Errno::NAMETOOLONG => (Why::Invalid, "the path is too long"),
            Errno::NOSPC | Errno::DQUOT => (Why::NoRoom, "the volume is full"),
            Errno::ACCESS | Errno::PERM => (Why::Invalid, "it can't be changed like that"),
            _ => return Self { why: Why::Failed, message: format!("the volume failed: {errno}") },
        };
        Self { why, message: message.into() }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(errno) => errno.into(),
            None => Self { why: Why::Failed, message: format!("the volume failed: {error}") },
        }
    }
}

/// A path from the top: no `.`, no `..`, no empty part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parts(Vec<String>);

impl Parts {
    pub(super) fn parse(path: &str) -> Result<Self, Refusal> {
        if path.len() > MAX_PATH {
            return Err(Refusal::invalid("the path is too long"));
        }
        let parts: Vec<_> =
            path.split('/').filter(|part| !matches!(*part, "" | ".")).map(str::to_owned).collect();
        if parts.iter().any(|part| part == ".." || part.len() > MAX_PART || part.contains('\0')) {
            return Err(Refusal::invalid(
                "the path has a part '..', one that is too long, or a NUL character",
            ));
        }
        if parts.len() > MAX_PARTS {
            return Err(Refusal::invalid("the path has too many parts"));
        }
        Ok(Self(parts))
    }

    /// The folder that it is in, and its name there; `None` for the top itself.
    pub(super) fn split(&self) -> Option<(Self, &str)> {
        let (name, above) = self.0.split_last()?;
        Some((Self(above.to_vec()), name))
    }

    pub(super) fn name(&self) -> &str {
        self.0.last().map_or("/", String::as_str)
    }

    /// What leads there, from the top on.
    pub(super) fn prefixes(&self) -> impl Iterator<Item = Self> + '_ {
        (1..=self.0.len()).map(|len| Self(self.0[..len].to_vec()))
    }

    fn relative(&self) -> String {
        if self.0.is_empty() { ".".into() } else { self.0.join("/") }
    }
}

impl std::fmt::Display for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "/{}", self.0.join("/"))
    }
}

/// How what a file or folder holds is put on the disk.
type Keep = dyn Fn(BorrowedFd<'_>) -> Result<(), Errno>;

/// The folder that a volume is.
pub(super) struct Top {
    folder: OwnedFd,
    keep: Box<Keep>,
}

impl Top {
    /// The root of this process's file system.
    pub(super) fn open() -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, "/", flags, Mode::empty())?;
        Ok(Self { folder, keep: Box::new(|fd| rustix::fs::fsync(fd)) })
    }

    #[cfg(test)]
    pub(super) fn at(path: &std::path::Path) -> Self {
        Self::with(path, |fd| rustix::fs::fsync(fd))
    }

    #[cfg(test)]
    pub(super) fn with(
        path: &std::path::Path,
        keep: impl Fn(BorrowedFd<'_>) -> Result<(), Errno> + 'static,
    ) -> Self {
        Self { folder: std::fs::File::open(path).unwrap().into(), keep: Box::new(keep) }
    }

    /// Waits until what this file or folder holds outlasts a loss of power.
    pub(super) fn keep(&self, fd: impl AsFd) -> Result<(), Errno> {
        (self.keep)(fd.as_fd())
    }

    /// Opens what is there, over no link, and waits for nobody.
    pub(super) fn reach(&self, path: &Parts, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let how = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let mut flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // What is not opened waits for nobody, and takes no other flags.
        if !flags.contains(OFlags::PATH) {
            flags |= OFlags::NONBLOCK | OFlags::NOCTTY;
        }
        // It is tried again where somebody renames what is on the way.
        for _ in 0..8 {
            match openat2(&self.folder, path.relative(), flags, mode, how) {
                Err(Errno::AGAIN) => {}
                outcome => return outcome,
            }
        }
        Err(Errno::NOTEMPTY)
    }

    /// Opens a folder.
    pub(super) fn folder(&self, path: &Parts) -> Result<OwnedFd, Errno> {
        self.reach(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_below_the_top() {
        let shown = |path: &str| Parts::parse(path).map(|parts| parts.to_string()).ok();
        assert_eq!(shown("/a//./b/").as_deref(), Some("/a/b"));
        assert_eq!((shown("").as_deref(), shown("/").as_deref()), (Some("/"), Some("/")));
        for bad in ["..", "/a/../b", "a\0b", &"x".repeat(256), &"/x".repeat(257), &"x/".repeat(3000)] {
            assert_eq!(shown(bad), None, "{bad}");
        }
    }

    #[test]
    fn no_link_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::write(dir.path().join("d/f"), "x").unwrap();
        std::os::unix::fs::symlink("d", dir.path().join("l")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("d/out")).unwrap();
        let top = Top::at(dir.path());
        let reach = |path| top.reach(&Parts::parse(path).unwrap(), OFlags::RDONLY, Mode::empty());
        assert!(reach("d/f").is_ok(), "the control");
        for path in ["l/f", "l", "d/out"] {
            assert_eq!(reach(path).err(), Some(Errno::LOOP), "{path}");
        }
    }
}
