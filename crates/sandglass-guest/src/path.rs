//! Finds what a path names, one component at a time by descriptor, so that nobody who changes directories or
//! links meanwhile can lead the agent, which is root, to another place than the one that was checked.
//!
//! Links are read and followed here, never by the kernel. Those of `/proc` are not followed at all: they lead
//! into other processes, the agent included, and not to a path. Behind a link that someone else than root made, a
//! client changes only what the user that it names could change: whoever put the link there must not get more done
//! than that.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;

use crate::exec::Identity;

/// Upper bound for a path, in bytes, as the kernel has it.
pub(crate) const MAX_PATH: usize = 4096;

/// Upper bound for one component, in bytes, as the kernel has it.
pub(crate) const MAX_NAME: usize = 255;

/// Links that one path may lead through, as the kernel has it.
const MAX_LINKS: usize = 40;

/// What `statfs` calls the file system of processes.
const PROC_SUPER_MAGIC: i64 = 0x9fa0;

/// File systems that are interfaces of the kernel: processes, devices and control groups.
const KERNEL_INTERFACES: [i64; 4] = [PROC_SUPER_MAGIC, 0x6265_6572, 0x27_e0eb, 0x6367_7270];

/// Whether what `statfs` calls a file system is such an interface.
pub(crate) fn is_kernel_interface(system: i64) -> bool {
    KERNEL_INTERFACES.contains(&system)
}

/// A path that can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PathError {
    /// It, or a directory on the way, does not exist.
    #[error("path '{0}' does not exist")]
    NotFound(String),
    /// Something on the way is not a directory.
    #[error("'{0}' is not a directory")]
    NotADirectory(String),
    /// Its links lead in a circle.
    #[error("path '{0}' leads through too many symbolic links")]
    Loop(String),
    /// It could not be understood.
    #[error("invalid path: {0}")]
    Invalid(&'static str),
    /// It leads through a link of `/proc`.
    #[error("'{0}' is a link into another process, which is not followed")]
    Magic(String),
    /// It was a link when it was looked at, and then it was not.
    #[error("'{0}' was changed meanwhile; try again")]
    Changed(String),
    /// A link leads to what the user may not change or reach.
    #[error("a link leads to '{0}', for which the user has no permission")]
    Denied(String),
    /// The kernel refused.
    #[error("accessing '{path}' failed")]
    Io {
        /// Where.
        path: String,
        /// Why.
        #[source]
        errno: Errno,
    },
}

/// Where a path leads: a name in an open directory. The name is `.` if the path is a directory's own.
#[derive(Debug)]
pub(crate) struct Place {
    /// The directory, opened for nothing but finding names in it.
    pub dir: OwnedFd,
    /// The name, which may be missing.
    pub name: CString,
    /// The whole path without links.
    pub path: String,
    /// What it is, not following a link; `None` if there is nothing.
    pub stat: Option<Stat>,
    /// Whether a link that someone else than root made led here.
    pub led: bool,
}

/// What is done where a path leads, and for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose<'a> {
    /// It is looked at.
    Look,
    /// It is changed.
    Change(&'a Identity),
    /// It is changed; missing directories on the way are made for the user.
    MakeParents(&'a Identity),
    /// As [`Self::MakeParents`], and so is the last one.
    MakeAll(&'a Identity),
}

impl<'a> Purpose<'a> {
    const fn changer(self) -> Option<&'a Identity> {
        match self {
            Self::Look => None,
            Self::Change(user) | Self::MakeParents(user) | Self::MakeAll(user) => Some(user),
        }
    }

    /// For whom a missing component is made.
    const fn maker(self, last: bool) -> Option<&'a Identity> {
        match self {
            Self::MakeAll(user) => Some(user),
            Self::MakeParents(user) if !last => Some(user),
            _ => None,
        }
    }
}

/// How to walk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Walk<'a> {
    /// Whether a link at the very end is followed.
    pub follow_last: bool,
    /// What for.
    pub purpose: Purpose<'a>,
}

impl Walk<'_> {
    /// To look at what a path names in the end.
    pub(crate) const FOLLOW: Self = Self { follow_last: true, purpose: Purpose::Look };
    /// To look at the name itself, which may be a link.
    pub(crate) const NO_FOLLOW: Self = Self { follow_last: false, purpose: Purpose::Look };
}

const READ: u32 = 0o4;
const WRITE: u32 = 0o2;
const SEARCH: u32 = 0o1;

/// Whether the mode of a file gives a user all of the `wanted` rights.
fn permits(stat: &Stat, user: &Identity, wanted: u32) -> bool {
    let class = if stat.st_uid == user.uid {
        6
    } else if stat.st_gid == user.gid || user.groups.contains(&stat.st_gid) {
        3
    } else {
        0
    };
    user.uid == 0 || (stat.st_mode >> class) & wanted == wanted
}

/// Whether a user may find out what is in a folder, and make and remove names in it.
pub(crate) fn may_empty(folder: &Stat, user: &Identity) -> bool {
    permits(folder, user, READ | WRITE | SEARCH)
}

/// Whether a user may take a folder, which has another one above it then.
pub(crate) fn may_move(folder: &Stat, user: &Identity) -> bool {
    permits(folder, user, WRITE)
}

/// Whether a name in a folder is kept from a user who may write there: in a sticky folder, as `/tmp`, everyone may make names
/// and only their owners may take them away.
pub(crate) fn is_kept(folder: &Stat, entry: &Stat, user: &Identity) -> bool {
    folder.st_mode & libc::S_ISVTX != 0 && ![folder.st_uid, entry.st_uid, 0].contains(&user.uid)
}

/// Takes `.`, `..` and doubled slashes out of an absolute path, without looking at the file system. That is what
/// E2B's daemon does, so `..` after a link means the link's own directory.
pub(crate) fn clean(path: &str) -> Result<String, PathError> {
    if path.len() > MAX_PATH {
        return Err(PathError::Invalid("longer than 4096 bytes"));
    }
    if path.contains('\0') {
        return Err(PathError::Invalid("it contains a NUL byte"));
    }
    if !path.starts_with('/') {
        return Err(PathError::Invalid("not absolute"));
    }
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            _ if part.len() > MAX_NAME => {
                return Err(PathError::Invalid("a component is longer than 255 bytes"));
            }
            _ => parts.push(part),
        }
    }
    Ok(format!("/{}", parts.join("/")))
}

/// The type of a file from its mode.
pub(crate) fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

const DIR_FLAGS: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens a link itself, or whatever has taken its name.
const LINK_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens a folder that was just made, to look into it.
const NEW_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn lossy(parts: &[Vec<u8>], last: Option<&[u8]>) -> String {
    let mut path = Vec::new();
    for part in parts.iter().map(Vec::as_slice).chain(last) {
        path.push(b'/');
        path.extend_from_slice(part);
    }
    if path.is_empty() { "/".into() } else { String::from_utf8_lossy(&path).into_owned() }
}

fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = Vec<u8>> + '_ {
    path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").map(<[u8]>::to_vec)
}

struct Walker<'a> {
    root: BorrowedFd<'a>,
    purpose: Purpose<'a>,
    dir: OwnedFd,
    /// Where `dir` is.
    at: Vec<Vec<u8>>,
    pending: VecDeque<Vec<u8>>,
    links: usize,
    /// As in [`Place`].
    led: bool,
}

impl Walker<'_> {
    fn here(&self, name: &[u8]) -> String {
        lossy(&self.at, Some(name))
    }

    fn io(&self, name: &[u8]) -> impl FnOnce(Errno) -> PathError + use<> {
        let path = self.here(name);
        move |errno| match errno {
            Errno::NOENT => PathError::NotFound(path),
            Errno::NOTDIR => PathError::NotADirectory(path),
            Errno::LOOP => PathError::Loop(path),
            errno => PathError::Io { path, errno },
        }
    }

    /// Refuses to go on in a directory to which a link led, if the user does not have the `wanted` rights there.
    fn check(&self, wanted: u32) -> Result<(), PathError> {
        let Some(user) = self.purpose.changer().filter(|_| self.led) else { return Ok(()) };
        let stat = rustix::fs::fstat(&self.dir).map_err(self.io(b"."))?;
        if permits(&stat, user, wanted) { Ok(()) } else { Err(PathError::Denied(lossy(&self.at, None))) }
    }

    fn enter(&mut self, name: Vec<u8>) -> Result<(), PathError> {
        let next = rustix::fs::openat(&self.dir, OsStr::from_bytes(&name), DIR_FLAGS, Mode::empty());
        self.dir = match next {
            // What was a directory or nothing a moment ago is now a link: someone plays tricks.
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(PathError::NotADirectory(self.here(&name))),
            other => other.map_err(self.io(&name))?,
        };
        self.at.push(name);
        Ok(())
    }

    fn follow(&mut self, name: &[u8]) -> Result<(), PathError> {
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(PathError::Loop(self.here(name)));
        }
        let system = rustix::fs::fstatfs(&self.dir).map_err(self.io(name))?;
        if system.f_type == PROC_SUPER_MAGIC {
            return Err(PathError::Magic(self.here(name)));
        }
        // Whose it is and where it leads must be told of the same link, whatever takes its name meanwhile.
        let link = rustix::fs::openat(&self.dir, OsStr::from_bytes(name), LINK_FLAGS, Mode::empty())
            .map_err(self.io(name))?;
        let stat = rustix::fs::fstat(&link).map_err(self.io(name))?;
        if file_type(&stat) != FileType::Symlink {
            return Err(PathError::Changed(self.here(name)));
        }
        self.led |= stat.st_uid != 0;
        let target = rustix::fs::readlinkat(&link, c"", Vec::new()).map_err(self.io(name))?;
        let target = target.as_bytes();
        if target.is_empty() || target.len() > MAX_PATH {
            return Err(PathError::Invalid("the target of a link is too long"));
        }
        if target.starts_with(b"/") {
            self.dir =
                self.root.try_clone_to_owned().map_err(|_| PathError::Invalid("no descriptors are left"))?;
            self.at.clear();
        }
        for part in components(target).rev() {
            self.pending.push_front(part);
        }
        Ok(())
    }

    fn make(&self, name: &[u8], owner: &Identity) -> Result<(), PathError> {
        self.check(WRITE)?;
        let os_name = OsStr::from_bytes(name);
        match rustix::fs::mkdirat(&self.dir, os_name, Mode::from_raw_mode(0o755)) {
            // Someone else was faster.
            Err(Errno::EXIST) => return Ok(()),
            other => other.map_err(self.io(name))?,
        }
        let made = match rustix::fs::openat(&self.dir, os_name, NEW_FLAGS, Mode::empty()) {
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(PathError::NotADirectory(self.here(name))),
            other => other.map_err(self.io(name))?,
        };
        // Who may exchange it for another folder must not be given that: what is in it may be anybody's. One that is empty
        // could be removed and made anew by whoever put it here.
        if !is_empty(&made).map_err(self.io(name))? {
            return Err(PathError::Changed(self.here(name)));
        }
        rustix::fs::fchown(&made, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))
            .map_err(self.io(name))
    }
}

/// Whether there is nothing in an open folder.
fn is_empty(folder: &OwnedFd) -> Result<bool, Errno> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            return Ok(false);
        }
    }
    Ok(true)
}

fn look(dir: &OwnedFd, name: &[u8]) -> Result<Option<Stat>, Errno> {
    match rustix::fs::statat(dir, OsStr::from_bytes(name), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Walks an absolute path from `root`. Blocks.
///
/// # Errors
/// As [`PathError`] says. That nothing has the last name is none of them.
pub(crate) fn resolve(root: BorrowedFd<'_>, path: &str, walk: Walk<'_>) -> Result<Place, PathError> {
    let path = clean(path)?;
    let dir = root.try_clone_to_owned().map_err(|_| PathError::Invalid("no descriptors are left"))?;
    let mut walker = Walker {
        root,
        purpose: walk.purpose,
        dir,
        at: Vec::new(),
        pending: components(path.as_bytes()).collect(),
        links: 0,
        led: false,
    };
    while let Some(name) = walker.pending.pop_front() {
        walker.check(SEARCH)?;
        if name == b".." {
            // Only links hold these. Above the root is the root.
            if walker.at.is_empty() {
                continue;
            }
            walker.dir =
                rustix::fs::openat(&walker.dir, c"..", DIR_FLAGS, Mode::empty()).map_err(walker.io(b".."))?;
            walker.at.pop();
            continue;
        }
        if name.len() > MAX_NAME {
            return Err(PathError::Invalid("a component is longer than 255 bytes"));
        }
        let last = walker.pending.is_empty();
        let mut stat = look(&walker.dir, &name).map_err(walker.io(&name))?;
        if let (None, Some(owner)) = (&stat, walk.purpose.maker(last)) {
            walker.make(&name, owner)?;
            stat = look(&walker.dir, &name).map_err(walker.io(&name))?;
        }
        let is_link = stat.as_ref().is_some_and(|stat| file_type(stat) == FileType::Symlink);
        if is_link && (!last || walk.follow_last) {
            walker.follow(&name)?;
            continue;
        }
        if last {
            let path = walker.here(&name);
            let name = CString::new(name).map_err(|_| PathError::Invalid("it contains a NUL byte"))?;
            return Ok(Place { dir: walker.dir, name, path, stat, led: walker.led });
        }
        if stat.is_none() {
            return Err(PathError::NotFound(walker.here(&name)));
        }
        walker.enter(name)?;
    }
    let stat = look(&walker.dir, b".").map_err(walker.io(b"."))?;
    Ok(Place { path: lossy(&walker.at, None), dir: walker.dir, name: c".".into(), stat, led: walker.led })
}

impl Place {
    /// What is there.
    ///
    /// # Errors
    /// [`PathError::NotFound`].
    pub(crate) fn existing(&self) -> Result<&Stat, PathError> {
        self.stat.as_ref().ok_or_else(|| PathError::NotFound(self.path.clone()))
    }

    /// Opens it, without following a link that has taken its place, and without waiting for the other side of a
    /// FIFO. Check afterwards what was opened.
    ///
    /// # Errors
    /// The kernel refused.
    pub(crate) fn open(&self, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let guard = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::openat(&self.dir, &self.name, flags | guard, mode)
    }

    /// Refuses what the user could not do: to make, rename or remove the name in its directory.
    ///
    /// # Errors
    /// [`PathError::Denied`], and that only where a link led.
    pub(crate) fn check_entry(&self, user: &Identity) -> Result<(), PathError> {
        if !self.led {
            return Ok(());
        }
        let dir =
            rustix::fs::fstat(&self.dir).map_err(|errno| PathError::Io { path: self.path.clone(), errno })?;
        let kept = self.stat.as_ref().is_some_and(|stat| is_kept(&dir, stat, user));
        let allowed = permits(&dir, user, WRITE | SEARCH) && !kept;
        if allowed { Ok(()) } else { Err(PathError::Denied(self.path.clone())) }
    }

    /// Whose permissions count for what is below: nobody's where no link led.
    pub(crate) fn guard<'a>(&self, user: &'a Identity) -> Option<&'a Identity> {
        Some(user).filter(|_| self.led)
    }

    /// Refuses to write to an opened file that the user could not write to.
    ///
    /// # Errors
    /// [`PathError::Denied`], and that only where a link led.
    pub(crate) fn check_file(&self, stat: &Stat, user: &Identity) -> Result<(), PathError> {
        let allowed = !self.led || permits(stat, user, WRITE);
        if allowed { Ok(()) } else { Err(PathError::Denied(self.path.clone())) }
    }

    /// Whether writing there talks to the kernel and not to a disk.
    ///
    /// # Errors
    /// The file system does not say what it is.
    pub(crate) fn is_kernel_interface(&self) -> Result<bool, Errno> {
        Ok(is_kernel_interface(rustix::fs::fstatfs(&self.dir)?.f_type))
    }

    /// Whether both are names in the same directory.
    ///
    /// # Errors
    /// The kernel refused.
    pub(crate) fn is_beside(&self, other: &Self) -> Result<bool, Errno> {
        let (dir, others) = (rustix::fs::fstat(&self.dir)?, rustix::fs::fstat(&other.dir)?);
        Ok((dir.st_dev, dir.st_ino) == (others.st_dev, others.st_ino))
    }

    /// Whether it is a directory's own name, which can't be removed or renamed in it.
    pub(crate) fn is_self(&self) -> bool {
        self.name.as_c_str() == c"."
    }

    /// The name as it is on disk.
    pub(crate) fn name(&self) -> &CStr {
        &self.name
    }
}

/// Opens the root of the file system that is served.
///
/// # Errors
/// The kernel refused.
pub(crate) fn open_root(root: &std::path::Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(rustix::fs::CWD, root, DIR_FLAGS, Mode::empty())?)
}

/// A descriptor of the root, for [`resolve`].
pub(crate) fn borrow(root: &OwnedFd) -> BorrowedFd<'_> {
    root.as_fd()
}

#[cfg(test)]
pub(crate) mod races;
#[cfg(test)]
mod tests;
