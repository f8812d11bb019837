//! Removing a tree that may be deep, wide, and changing.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::paths::{Parts, Refusal, Top};
use super::work::{gone, unused};

/// Folders that are open at one time. What is deeper is moved up.
const MAX_OPEN: usize = 64;

/// Names that are read at one time.
const BATCH: usize = 1024;

/// How often a folder is emptied into which somebody else puts something.
const TRIES: usize = 64;

/// How a folder is called that was moved up. A removal that ended early leaves some, of any process.
const MOVED: &str = ".sandglass-removing-";

/// Removes a file, a link, or a folder with all that is in it, for who is at the other end of the line.
pub(super) fn remove(top: &Top, path: &str, line: &UnixStream) -> Result<(), Refusal> {
    remove_while(top, path, &|| is_there(line))
}

/// Whether who asked has not gone.
fn is_there(line: &UnixStream) -> bool {
    let mut line = [PollFd::new(line, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    !matches!(poll(&mut line, Some(&now)), Ok(1..))
}

fn remove_while(top: &Top, path: &str, wanted: &dyn Fn() -> bool) -> Result<(), Refusal> {
    let parts = Parts::parse(path)?;
    let Some((above, name)) = parts.split() else {
        return Err(Refusal::invalid("the top of a volume can't be removed"));
    };
    let folder = top.folder(&above)?;
    Removal { wanted }.one(&folder, name.as_bytes(), None, 0)?;
    Ok(top.keep(&folder)?)
}

struct Removal<'a> {
    wanted: &'a dyn Fn() -> bool,
}

impl Removal<'_> {
    /// Removes what has this name. `upper` is the folder that what is too deep is moved to.
    fn one(
        &self,
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
                match rustix::fs::renameat(folder, name, upper, unused(MOVED)) {
                    // Somebody has that name, or moved one of the two meanwhile.
                    Err(Errno::EXIST | Errno::NOTEMPTY | Errno::INVAL | Errno::NOENT | Errno::NOTDIR) => {
                        continue;
                    }
                    outcome => return Ok(outcome?),
                }
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
                Err(Errno::NOTEMPTY | Errno::NOTDIR | Errno::NOENT) => {}
                outcome => return Ok(outcome?),
            }
        }
        Err(Errno::NOTEMPTY.into())
    }

    /// Removes all that is in a folder.
    fn empty(&self, folder: &OwnedFd, upper: &OwnedFd, depth: usize) -> Result<(), Refusal> {
        loop {
            if !(self.wanted)() {
                return Err(gone());
            }
            let names = names(folder)?;
            if names.is_empty() {
                return Ok(());
            }
            for name in names {
                self.one(folder, &name, Some(upper), depth)?;
            }
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
    fn a_removal_that_ended_at_any_step_is_done_again() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::with(dir.path(), |_| Ok(()));
        // Some of its steps: a tree that deep takes long to make.
        for step in (0_usize..).step_by(29) {
            std::fs::create_dir_all(dir.path().join("tree").join("d/".repeat(3 * MAX_OPEN))).unwrap();
            let left = std::cell::Cell::new(step);
            let wanted = || left.replace(left.get().saturating_sub(1)) > 0;
            let whole = remove_while(&top, "/tree", &wanted).is_ok();
            if whole {
                assert!(step > 3 * MAX_OPEN, "the control: it has that many steps");
                break;
            }
            remove_while(&top, "/tree", &|| true).unwrap();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "after {step}");
        }
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
