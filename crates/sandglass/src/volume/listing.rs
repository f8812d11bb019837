//! What is in a folder, and in those below it.
//!
//! Names have any bytes and paths any length: a guest made them. So folders are entered by what is open and by the names that
//! the file system gave, and what is shown of both is never asked for again.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use sandglass_engine::volume::{Entry, Kind, MAX_SAID};

use super::json_len;
use super::paths::{Parts, Refusal, Top};
use super::work::{entry, kind, stat, target_of};

/// Most entries that are listed at one time.
const MAX_ENTRIES: usize = 10_000;

/// Most that they may be together, in bytes of JSON. All such processes share 256 MiB, and each holds a listing until it is whole.
const MAX_LISTED: u32 = MAX_SAID / 2;

/// Most layers that are listed at one time. For each a folder is open.
const MAX_DEPTH: u32 = 64;

/// All that is in a folder, so many layers deep, by path. What vanishes meanwhile is left out, and nothing else.
pub(super) fn list(top: &Top, path: &str, depth: u32) -> Result<Vec<Entry>, Refusal> {
    let first = Parts::parse(path)?;
    let folder = match top.folder(&first) {
        // A file has nothing in it, which is another thing than not to be there.
        Err(Errno::NOTDIR) if stat(top, path).is_ok() => return Err(Refusal::invalid("it is no folder")),
        opened => opened?,
    };
    let above = if first.split().is_some() { first.to_string() } else { String::new() };
    let mut listing = Listing { found: Vec::new(), room: MAX_LISTED };
    listing.folder(folder, &above, depth.min(MAX_DEPTH))?;
    listing.found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(listing.found)
}

struct Listing {
    found: Vec<Entry>,
    /// Bytes of JSON that there may still be.
    room: u32,
}

impl Listing {
    /// Adds what is in a folder that is shown as `above`.
    fn folder(&mut self, folder: OwnedFd, above: &str, layers: u32) -> Result<(), Refusal> {
        let mut folder = Dir::new(folder)?;
        while let Some(read) = folder.read() {
            let read = read?;
            let name = read.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let stat = match rustix::fs::statat(folder.fd()?, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                stat => stat?,
            };
            // A name that is no text is shown, and can't be asked for.
            let shown = name.to_string_lossy().into_owned();
            let path = format!("{above}/{shown}");
            let below =
                if layers > 1 && kind(&stat) == Kind::Directory { enter(&folder, name)? } else { None };
            let target = target_of(folder.fd()?, name, &stat);
            match below {
                None => self.add(entry(shown, path, &stat, target))?,
                Some(below) => {
                    self.add(entry(shown, path.clone(), &stat, target))?;
                    self.folder(below, &path, layers - 1)?;
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, entry: Entry) -> Result<(), Refusal> {
        if self.found.len() == MAX_ENTRIES {
            let message = format!("there are more than {MAX_ENTRIES} entries: list its folders one by one");
            return Err(Refusal::invalid(message));
        }
        // With the comma.
        let takes = json_len(&entry)?.saturating_add(1);
        let Some(room) = self.room.checked_sub(takes) else {
            let message = "the names in it are too long to be told at one time: list its folders one by one";
            return Err(Refusal::invalid(message));
        };
        self.room = room;
        self.found.push(entry);
        Ok(())
    }
}

/// Opens a folder in an open one; `None` if it is another thing by now.
fn enter(folder: &Dir, name: &CStr) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(folder.fd()?, name, flags, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        opened => opened.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::symlink;

    use sandglass_engine::volume::{Said, Why};

    use super::*;

    fn paths(top: &Top, path: &str, depth: u32) -> Vec<String> {
        list(top, path, depth).unwrap().into_iter().map(|entry| entry.path).collect()
    }

    #[test]
    fn every_name_is_listed_once_and_entered_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        // Three times as long where it is shown.
        let odd = vec![0xff; 255];
        std::fs::create_dir(dir.path().join(OsStr::from_bytes(&odd))).unwrap();
        std::fs::write(dir.path().join(OsStr::from_bytes(&odd)).join("f"), "").unwrap();
        let shown = format!("/{}", "\u{fffd}".repeat(255));
        let file = format!("{shown}/f");
        assert_eq!(paths(&top, "/", 1), [&*shown]);
        assert_eq!(paths(&top, "/", 2), [&*shown, &*file]);
        // Two that are shown alike.
        for (name, file) in [(&b"\xfe"[..], "a"), ("\u{fffd}".as_bytes(), "b")] {
            let folder = dir.path().join("d").join(OsStr::from_bytes(name));
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(file), "").unwrap();
        }
        let alike = ["/d/\u{fffd}", "/d/\u{fffd}", "/d/\u{fffd}/a", "/d/\u{fffd}/b"];
        assert_eq!(paths(&top, "/d", 2), alike);
        assert_eq!(paths(&top, "/d", 0), alike[..2]);
    }

    #[test]
    fn what_is_too_deep_to_be_asked_for_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        let deep = "/d".repeat(250);
        std::fs::create_dir_all(format!("{}{deep}{}", dir.path().display(), "/d".repeat(100))).unwrap();
        let listed = paths(&top, &deep, u32::MAX);
        assert_eq!(listed.len(), usize::try_from(MAX_DEPTH).unwrap());
        assert_eq!(listed.last(), Some(&format!("{deep}{}", "/d".repeat(64))));
    }

    #[test]
    fn what_is_listed_is_bounded_by_what_is_told_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        // Six bytes for each, where they are told.
        let target = "\u{1}".repeat(4000);
        let each = target.len() * 6;
        let folders = 4;
        let links = usize::try_from(MAX_LISTED).unwrap() / each / folders + 1;
        for folder in 0..folders {
            let folder = dir.path().join(folder.to_string());
            std::fs::create_dir(&folder).unwrap();
            for link in 0..links {
                symlink(&target, folder.join(link.to_string())).unwrap();
            }
        }
        for folder in 0..folders {
            let listed = list(&top, &folder.to_string(), 1).unwrap();
            assert_eq!(listed.len(), links, "the control");
            let told = json_len(&Said::Entries(listed)).unwrap();
            assert!(usize::try_from(told).unwrap() > links * each && told < MAX_LISTED);
        }
        let refusal = list(&top, "/", 2).map(|listed| listed.len()).unwrap_err();
        assert_eq!(refusal.why, Why::Invalid);
        assert!(refusal.message.contains("one by one"), "{}", refusal.message);
        assert_eq!(list(&top, "/", 1).unwrap().len(), folders);
    }

    #[test]
    fn pipes_and_links_are_listed_and_not_entered() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::write(dir.path().join("d/f"), "").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join("p"), Mode::RWXU).unwrap();
        symlink("d", dir.path().join("l")).unwrap();
        assert_eq!(paths(&top, "/", 9), ["/d", "/d/f", "/l", "/p"]);
        for path in ["/p", "/l", "/d/f"] {
            assert!(list(&top, path, 1).is_err_and(|refusal| refusal.why == Why::Invalid), "{path}");
        }
    }
}
