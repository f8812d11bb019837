//! The metadata of files whose file system keeps none.
//!
//! Each file that has some is watched, and its watch is its key: the kernel's number follows the file wherever it is moved,
//! is never given out again, and ends with the file. So an inode number that is used again tells nothing, and what a
//! program removes unseen is forgotten here as well. A pause keeps all that, and a fork has it too, as memory does.

use std::collections::{HashMap, HashSet};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::Stat;
use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch};
use rustix::io::Errno;

use super::Metadata;

/// Files that may have metadata here.
const MAX_FILES: usize = 4096;

/// What all of them may have, in bytes.
const MAX_BYTES: usize = 4 << 20;

/// The only event is the end of the file, which is told anyway.
const MASK: WatchFlags = WatchFlags::DELETE_SELF;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// None until it is needed.
    inotify: Option<OwnedFd>,
    files: HashMap<i32, Kept>,
    /// Which files may be among them, for asking the kernel takes long where there are many.
    numbers: HashSet<Number>,
    bytes: usize,
}

/// A file's device and inode. Those of a file that is watched stay as they are.
pub(super) type Number = (u64, u64);

#[derive(Debug)]
struct Kept {
    metadata: Metadata,
    number: Number,
}

/// What a file is known by for a while.
pub(super) fn number(stat: &Stat) -> Number {
    (stat.st_dev, stat.st_ino)
}

impl Table {
    /// Forgets what is gone.
    fn refresh(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        let mut buffer = [const { MaybeUninit::uninit() }; 4096];
        let mut reader = Reader::new(inotify, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) if event.events().contains(ReadFlags::IGNORED) => {
                    if let Some(gone) = self.files.remove(&event.wd()) {
                        self.numbers.remove(&gone.number);
                        self.bytes -= gone.metadata.size();
                    }
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    /// Replaces what an open file has; none of it removes it.
    ///
    /// # Errors
    /// `ENOSPC` where there is no room, or the kernel refused.
    pub(super) fn replace(&mut self, file: &OwnedFd, metadata: &Metadata) -> Result<(), Errno> {
        self.refresh();
        if self.files.is_empty() && metadata.is_empty() {
            return Ok(());
        }
        let number = number(&rustix::fs::fstat(file)?);
        let inotify = match &self.inotify {
            Some(inotify) => inotify,
            None => self.inotify.insert(init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?),
        };
        let wd = add_watch(inotify, format!("/proc/self/fd/{}", file.as_raw_fd()), MASK)?;
        if let Some(before) = self.files.remove(&wd) {
            self.numbers.remove(&before.number);
            self.bytes -= before.metadata.size();
        }
        let has_room = self.files.len() < MAX_FILES && self.bytes + metadata.size() <= MAX_BYTES;
        if metadata.is_empty() || !has_room {
            remove_watch(inotify, wd)?;
            return if metadata.is_empty() { Ok(()) } else { Err(Errno::NOSPC) };
        }
        self.bytes += metadata.size();
        self.numbers.insert(number);
        self.files.insert(wd, Kept { metadata: metadata.clone(), number });
        Ok(())
    }

    /// What the file at a path has, if it is this one.
    pub(super) fn of(&mut self, path: &[u8], number: Number) -> Metadata {
        if !self.numbers.contains(&number) {
            return Metadata::default();
        }
        self.refresh();
        let Some(inotify) = &self.inotify else { return Metadata::default() };
        let Ok(wd) = add_watch(inotify, path, MASK | WatchFlags::DONT_FOLLOW) else {
            return Metadata::default();
        };
        match self.files.get(&wd) {
            Some(kept) => kept.metadata.clone(),
            None => {
                let _ = remove_watch(inotify, wd);
                Metadata::default()
            }
        }
    }

    /// Whether nothing is kept.
    #[cfg(test)]
    pub(super) fn is_unused(&self) -> bool {
        self.files.is_empty() && self.numbers.is_empty() && self.bytes == 0
    }
}
