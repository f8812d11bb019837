//! Removing a tree that may be deep, wide, and changing.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::paths::{Parts, Refusal, Top};
use super::work::gone;

/// Folders that are open at one time. What is deeper is moved up.
const MAX_OPEN: usize = 64;

/// Names that are read at one time.
const BATCH: usize = 1024;

/// How often a folder is emptied into which somebody else puts something.
const TRIES: usize = 64;

/// Removes a file, a link, or a folder with all that is in it.
pub(super) fn remove(top: &Top, path: &str, line: &UnixStream) -> Result<(), Refusal> {
    let parts = Parts::parse(path)?;
    let Some((above, name)) = parts.split() else {
        return Err(Refusal::invalid("the top of a volume can't be removed"));
    };
    let folder = top.folder(&above)?;
    let mut removal = Removal { line, moved: 0 };
    removal.one(&folder, name.as_bytes(), None, 0)
}

struct Removal<'a> {
    line: &'a UnixStream,
    /// How many folders were moved up.
    moved: u64,
}

impl Removal<'_> {
    /// Removes what has this name. `upper` is the folder that what is too deep is moved to.
    fn one(
        &mut self,
        folder: &OwnedFd,
        name: &[u8],
        upper: Option<&OwnedFd>,
        depth: usize,
    ) -> Result<(), Refusal> {
        for _ in 0..TRIES {
            match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
                Err(Errno::ISDIR) => {}
                // Somebody else was faster.
                Err(Errno::NOENT) if depth > 0 => return Ok(()),
                outcome => return Ok(outcome?),
            }
            if let Some(upper) = upper.filter(|_| depth >= MAX_OPEN) {
                self.moved += 1;
                let there = format!(".sandglass-removing-{}", self.moved);
                return Ok(rustix::fs::renameat(folder, name, upper, there)?);
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let below = match rustix::fs::openat(folder, name, flags, Mode::empty()) {
                Ok(below) => below,
                // It is another thing by now.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(errno) => return Err(errno.into()),
            };
            self.empty(&below, upper.unwrap_or(&below), depth + 1)?;
            match rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY | Errno::NOTDIR) => {}
                outcome => return Ok(outcome?),
            }
        }
        Err(Errno::NOTEMPTY.into())
    }

    /// Removes all that is in a folder.
    fn empty(&mut self, folder: &OwnedFd, upper: &OwnedFd, depth: usize) -> Result<(), Refusal> {
        loop {
            self.is_wanted()?;
            let names = names(folder)?;
            if names.is_empty() {
                return Ok(());
            }
            for name in names {
                self.one(folder, &name, Some(upper), depth)?;
            }
        }
    }

    /// Whoever asked may have gone.
    fn is_wanted(&self) -> Result<(), Refusal> {
        let mut line = [PollFd::new(self.line, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut line, Some(&now)) {
            Ok(1..) => Err(gone()),
            _ => Ok(()),
        }
    }
}

/// Some of the names in a folder, from its beginning.
fn names(folder: impl AsFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for read in rustix::fs::Dir::read_from(folder)? {
        let read = read?;
        let name = read.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(name.to_vec());
        }
        if names.len() == BATCH {
            break;
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deep_and_wide_trees_go_and_what_links_lead_to_stays() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("kept"), "x").unwrap();
        let top = Top::at(dir.path());
        let (line, _other) = UnixStream::pair().unwrap();
        let tree = dir.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        for n in 0..3000 {
            std::fs::write(tree.join(n.to_string()), "").unwrap();
        }
        std::os::unix::fs::symlink("..", tree.join("up")).unwrap();
        // Deeper than there may be open files.
        let mut folder: OwnedFd = std::fs::File::open(&tree).unwrap().into();
        for _ in 0..2000 {
            rustix::fs::mkdirat(&folder, "d", Mode::RWXU).unwrap();
            folder = rustix::fs::openat(&folder, "d", OFlags::RDONLY, Mode::empty()).unwrap();
        }
        drop(folder);
        remove(&top, "/tree", &line).unwrap();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["kept"]);
        assert!(remove(&top, "/tree", &line).is_err());
        assert!(remove(&top, "/", &line).is_err());
    }

    #[test]
    fn nobody_removes_for_one_who_has_gone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        let (line, other) = UnixStream::pair().unwrap();
        drop(other);
        assert!(remove(&Top::at(dir.path()), "/a", &line).is_err());
        assert!(dir.path().join("a/b").exists());
    }
}
