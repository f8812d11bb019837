//! One client's inotify, and the folders that it watches.
//!
//! A folder that appears below is watched from when its event is read, which may be later than files are made in it.
//! So it is read once it is watched: what is in it is told, and if an event tells the same again, that is left out.
//!
//! Paths are used for nothing but to find a folder again, and then the kernel says by its number whether it is the one
//! that was meant. So whoever exchanges folders and links below can make a watch end, and not lead it elsewhere. No folder
//! is kept open: the kernel would not tell its removal.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use sandglass_proto::services::filesystem::EventType;

use super::MAX_FOLDERS;
use super::names::{Names, Placed, Wd};
use super::queue::{End, Quota};
use crate::path::{self, PathError, Walk, borrow, file_type, resolve};

/// Bytes of events that are read at once.
const BUFFER: usize = 32 * 1024;

/// So many times events are read before others get their turn. Linux keeps fewer for one client, by default.
const ROUNDS: usize = 256;

/// Names that were told because they were found, and whose events may still come.
const MAX_TOLD: usize = 65_536;

/// Folders that were told and not found, and whose new names may still come.
const MAX_MISSED: usize = 1024;

/// What is asked of the kernel, of every folder: asking again replaces what was asked.
const MASK: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// File systems of other machines or programs: NFS, SMB in three ways, and FUSE. Changes that others make there are not
/// told. The numbers are those of `statfs(2)`.
const NETWORK: [i64; 5] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x6573_5546];

/// What a client wants to be watched.
#[derive(Debug, Clone)]
pub(super) struct Wish {
    /// The root of what the client sees.
    pub root: PathBuf,
    /// The folder, as the client calls it, clean.
    pub path: String,
    /// Whether folders below it are watched as well.
    pub recursive: bool,
    /// Whether file systems of others are.
    pub networks: bool,
}

/// Who is told.
pub(super) trait Sink {
    /// Something happened to this name, which is relative to the watched folder, or `.` for itself. Whether that is kept.
    fn tell(&mut self, name: &[u8], kind: EventType) -> bool;
    /// Events were lost.
    fn lose(&mut self);
    /// There will be no more.
    fn end(&mut self, end: End);
    /// Whether [`Self::end`] was called.
    fn has_ended(&self) -> bool;
}

/// Nobody.
struct Nobody;

impl Sink for Nobody {
    fn tell(&mut self, _: &[u8], _: EventType) -> bool {
        false
    }
    fn lose(&mut self) {}
    fn end(&mut self, _: End) {}
    fn has_ended(&self) -> bool {
        false
    }
}

/// How far events were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drained {
    /// All that there were.
    All,
    /// All that there were, but some may still come that belong to what was found: read again in a moment.
    Unsettled,
    /// There are more.
    More,
}

/// Why a folder can't be watched.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// Its path leads nowhere, or not to a folder.
    #[error(transparent)]
    Path(#[from] PathError),
    /// It is no folder.
    #[error("path is not a directory: {0}")]
    NotADirectory(String),
    /// It is not on this machine.
    #[error("cannot watch path on network filesystem: {0}")]
    Network(String),
    /// There are too many folders, or they are nested too deeply.
    #[error("'{0}' holds too many folders to watch, or they are nested too deeply")]
    TooMuch(String),
    /// The kernel refused.
    #[error("watching '{0}' failed: {1}")]
    Kernel(String, Errno),
}

struct Happened {
    wd: Wd,
    what: ReadFlags,
    cookie: u32,
    name: Option<Vec<u8>>,
}

/// Counts the times at which all that had happened was read, and a moment had passed since the last one.
type Moment = u32;

/// A name in a folder.
type Spot = (Wd, Vec<u8>);

/// Why not all could be watched.
enum Trouble {
    /// There are too many folders, or they are nested too deeply, or the kernel refuses.
    Blind,
    /// A folder is below itself: names are out of date, or it is mounted there.
    Stale,
}

/// Why a folder was not found.
enum Lost {
    /// It is elsewhere now, or nowhere.
    Moved,
    /// The watched folder itself is.
    Root,
    /// The kernel refuses to say.
    Refused,
}

/// One client's watch.
#[derive(Debug)]
pub(super) struct Tree {
    inotify: Arc<OwnedFd>,
    wish: Wish,
    names: Names,
    /// What was told because it was found, before the event that may come: its inode, and when that was.
    told: HashMap<Spot, (u64, Moment)>,
    /// Folders that were told and not found.
    missed: HashMap<Spot, Moment>,
    /// Folders that were moved away from their names, by the number that the second half of the move has as well.
    moving: Vec<(u32, Wd, Moment)>,
    now: Moment,
    /// What all watches have of the kernel's.
    folders: Arc<Quota>,
    buffer: Box<[MaybeUninit<u8>]>,
}

/// Watches an open folder.
fn watch(inotify: &OwnedFd, folder: &OwnedFd) -> Result<Wd, Errno> {
    add_watch(inotify, format!("/proc/self/fd/{}", folder.as_raw_fd()), MASK)
}

fn open_root(wish: &Wish) -> Result<OwnedFd, PathError> {
    let failed = |errno| PathError::Io { path: wish.path.clone(), errno };
    let root = path::open_root(&wish.root)
        .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    let place = resolve(borrow(&root), &wish.path, Walk::FOLLOW)?;
    place.existing()?;
    match place.open(FOLDER, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => Err(PathError::NotADirectory(wish.path.clone())),
        Err(Errno::NOENT) => Err(PathError::NotFound(wish.path.clone())),
        other => other.map_err(failed),
    }
}

impl Tree {
    /// Begins to watch. What is there already is not told. Blocks.
    ///
    /// # Errors
    /// As [`Refusal`].
    pub(super) fn open(wish: Wish, folders: &Arc<Quota>) -> Result<Self, Refusal> {
        let kernel = |errno| Refusal::Kernel(wish.path.clone(), errno);
        let folder = open_root(&wish).map_err(|error| match error {
            PathError::NotADirectory(_) => Refusal::NotADirectory(wish.path.clone()),
            other => other.into(),
        })?;
        if !wish.networks && NETWORK.contains(&rustix::fs::fstatfs(&folder).map_err(kernel)?.f_type) {
            return Err(Refusal::Network(wish.path));
        }
        let inotify = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(kernel)?;
        let root = watch(&inotify, &folder).map_err(kernel)?;
        if !folders.take(1) {
            return Err(Refusal::TooMuch(wish.path));
        }
        let mut tree = Self {
            inotify: Arc::new(inotify),
            wish,
            names: Names::new(root),
            told: HashMap::new(),
            missed: HashMap::new(),
            moving: Vec::new(),
            now: 0,
            folders: Arc::clone(folders),
            buffer: Box::new_uninit_slice(BUFFER),
        };
        match tree.look_below(&Rc::new(folder), &mut Nobody) {
            Ok(()) => Ok(tree),
            Err(_) => Err(Refusal::TooMuch(tree.wish.path.clone())),
        }
    }

    /// What becomes readable when there are events.
    pub(super) fn inotify(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.inotify)
    }

    /// Reads the events that there are and tells them. `settle` says that a moment has passed since the last time, in which
    /// what belonged to the events before has come. Blocks.
    ///
    /// In gVisor a new name may be found before its event is there.
    pub(super) fn drain(&mut self, sink: &mut dyn Sink, settle: bool) -> Drained {
        for _ in 0..ROUNDS {
            let (events, are_all) = self.read();
            for event in events {
                self.take(&event, sink);
            }
            if sink.has_ended() {
                return Drained::All;
            }
            if !are_all || self.look_again(sink) {
                continue;
            }
            if settle {
                self.settle();
            }
            let is_settled = self.told.is_empty() && self.missed.is_empty() && self.moving.is_empty();
            return if is_settled { Drained::All } else { Drained::Unsettled };
        }
        Drained::More
    }

    /// Gives up waiting for what belongs to events from before this moment.
    fn settle(&mut self) {
        let now = self.now;
        self.now = now.wrapping_add(1);
        self.told.retain(|_, (_, told)| *told == now);
        self.missed.retain(|_, missed| *missed == now);
        let (moving, away): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.moving).into_iter().partition(|(_, _, moved)| *moved == now);
        self.moving = moving;
        for (_, wd, _) in away {
            for gone in self.names.tree(wd) {
                self.unwatch(gone);
            }
        }
    }

    /// Reads once; and whether there were no more.
    fn read(&mut self) -> (Vec<Happened>, bool) {
        let mut events = Vec::new();
        let mut reader = Reader::new(&*self.inotify, &mut self.buffer);
        loop {
            match reader.next() {
                Ok(event) => events.push(Happened {
                    wd: event.wd(),
                    what: event.events(),
                    cookie: event.cookie(),
                    name: event.file_name().map(|name| name.to_bytes().to_vec()),
                }),
                Err(Errno::INTR) => continue,
                // Nothing is left, or never will be.
                Err(_) => return (events, true),
            }
            if reader.is_buffer_empty() {
                return (events, false);
            }
        }
    }

    fn take(&mut self, event: &Happened, sink: &mut dyn Sink) {
        if sink.has_ended() {
            return;
        }
        if event.what.contains(ReadFlags::QUEUE_OVERFLOW) {
            return self.start_over(sink);
        }
        let root = self.names.root();
        if event.what.contains(ReadFlags::IGNORED) {
            if event.wd == root {
                sink.end(End::Gone);
            } else if self.names.remove(event.wd) {
                self.folders.give(1);
            }
            return;
        }
        if !self.names.contains(event.wd) {
            return;
        }
        match &event.name {
            Some(name) => self.take_named(event, name, sink),
            // The folder that another is in tells the same of it.
            None if event.wd != root => {}
            None if event.what.contains(ReadFlags::DELETE_SELF) => {
                sink.tell(b".", EventType::EVENT_TYPE_REMOVE);
            }
            None if event.what.contains(ReadFlags::MOVE_SELF) => renamed(sink),
            None if event.what.contains(ReadFlags::ATTRIB) => {
                sink.tell(b".", EventType::EVENT_TYPE_CHMOD);
            }
            None => {}
        }
    }

    fn take_named(&mut self, event: &Happened, name: &[u8], sink: &mut dyn Sink) {
        let appeared = event.what.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        let spot = (event.wd, name.to_vec());
        if let Some((inode, _)) = self.told.remove(&spot)
            && appeared
            && (event.what.contains(ReadFlags::CREATE) || self.inode(&spot) == Some(inode))
        {
            return;
        }
        let Some(path) = self.names.path(event.wd, name) else { return self.start_over(sink) };
        let is_folder = self.wish.recursive && event.what.contains(ReadFlags::ISDIR);
        if appeared {
            sink.tell(&path, EventType::EVENT_TYPE_CREATE);
            if is_folder {
                self.come_back(event, name, sink);
                self.enter(spot, self.now, sink);
            }
        } else if event.what.contains(ReadFlags::DELETE) {
            sink.tell(&path, EventType::EVENT_TYPE_REMOVE);
            self.missed.remove(&spot);
        } else if event.what.contains(ReadFlags::MOVED_FROM) {
            sink.tell(&path, EventType::EVENT_TYPE_RENAME);
            self.missed.remove(&spot);
            if let Some(wd) = self.names.child(event.wd, name).filter(|_| is_folder) {
                self.moving.push((event.cookie, wd, self.now));
            }
        } else if event.what.contains(ReadFlags::MODIFY) {
            sink.tell(&path, EventType::EVENT_TYPE_WRITE);
        } else if event.what.contains(ReadFlags::ATTRIB) {
            sink.tell(&path, EventType::EVENT_TYPE_CHMOD);
        }
    }

    /// Gives a folder that was moved its new name.
    fn come_back(&mut self, event: &Happened, name: &[u8], sink: &mut dyn Sink) {
        let Some(index) = self.moving.iter().position(|(cookie, ..)| *cookie == event.cookie) else { return };
        let (_, wd, _) = self.moving.swap_remove(index);
        if self.names.contains(wd) && self.names.place(event.wd, name, wd) == Placed::Impossible {
            self.start_over(sink);
        }
    }

    /// Finds a folder that is watched.
    fn find(&mut self, wd: Wd) -> Result<OwnedFd, Lost> {
        let lost = |errno| match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG => Lost::Moved,
            _ => Lost::Refused,
        };
        let mut folder = match open_root(&self.wish) {
            Ok(folder) => folder,
            Err(PathError::Io { errno, .. }) if matches!(lost(errno), Lost::Refused) => {
                return Err(Lost::Refused);
            }
            Err(_) => return Err(Lost::Root),
        };
        if !self.is(&folder, self.names.root()).map_err(|_| Lost::Refused)? {
            return Err(Lost::Root);
        }
        if wd == self.names.root() {
            return Ok(folder);
        }
        for name in self.names.way(wd).ok_or(Lost::Moved)? {
            folder =
                rustix::fs::openat(&folder, OsStr::from_bytes(name), FOLDER, Mode::empty()).map_err(lost)?;
        }
        if self.is(&folder, wd).map_err(|_| Lost::Refused)? { Ok(folder) } else { Err(Lost::Moved) }
    }

    /// Whether an open folder is the one that has this number.
    fn is(&self, folder: &OwnedFd, wd: Wd) -> Result<bool, Errno> {
        let found = watch(&self.inotify, folder)?;
        if !self.names.contains(found) {
            let _ = remove_watch(&*self.inotify, found);
        }
        Ok(found == wd)
    }

    /// What has a name now.
    fn inode(&mut self, (wd, name): &Spot) -> Option<u64> {
        let folder = self.find(*wd).ok()?;
        let stat = rustix::fs::statat(&folder, OsStr::from_bytes(name), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some(stat.st_ino)
    }

    /// Watches a folder that has appeared, then or now, and tells what is in it.
    fn enter(&mut self, spot: Spot, appeared: Moment, sink: &mut dyn Sink) {
        if !self.names.contains(spot.0) {
            return;
        }
        let found = match self.find(spot.0) {
            Ok(parent) => self.look(vec![(Rc::new(parent), spot.clone())], sink),
            Err(Lost::Moved) => Ok(false),
            Err(Lost::Root) => return renamed(sink),
            Err(Lost::Refused) => Err(Trouble::Blind),
        };
        match found {
            Ok(true) => {}
            Ok(false) if self.missed.len() < MAX_MISSED => {
                self.missed.insert(spot, appeared);
            }
            Ok(false) | Err(Trouble::Stale) => self.start_over(sink),
            Err(Trouble::Blind) => sink.end(End::Blind),
        }
    }

    /// Looks again for what was missed; whether some of it is watched now. Folders that they are in have their new names by
    /// now.
    fn look_again(&mut self, sink: &mut dyn Sink) -> bool {
        let missed = std::mem::take(&mut self.missed);
        let before = missed.len();
        for (spot, appeared) in missed {
            self.enter(spot, appeared, sink);
        }
        self.missed.len() < before && !sink.has_ended()
    }

    /// Watches folders and all below them; whether the first was there. Tells what is in those that were not watched before.
    fn look(&mut self, mut pending: Vec<(Rc<OwnedFd>, Spot)>, sink: &mut dyn Sink) -> Result<bool, Trouble> {
        let mut found = None;
        while let Some((parent, (at, name))) = pending.pop() {
            let folder = match rustix::fs::openat(&*parent, OsStr::from_bytes(&name), FOLDER, Mode::empty()) {
                Ok(folder) => folder,
                // It is not there any more, of which there will be an event.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                    found.get_or_insert(false);
                    continue;
                }
                Err(_) => return Err(Trouble::Blind),
            };
            found.get_or_insert(true);
            let system = rustix::fs::fstatfs(&folder).map_err(|_| Trouble::Blind)?.f_type;
            if path::is_kernel_interface(system) || (!self.wish.networks && NETWORK.contains(&system)) {
                continue;
            }
            let wd = match watch(&self.inotify, &folder) {
                Ok(wd) => wd,
                // Only an agent that is not root is refused; it could not read it either.
                Err(Errno::ACCESS | Errno::PERM) => continue,
                Err(_) => return Err(Trouble::Blind),
            };
            match self.names.place(at, &name, wd) {
                Placed::Known => self.moving.retain(|(_, moving, _)| *moving != wd),
                // Mounted below itself. It is watched already.
                Placed::Impossible if wd == self.names.root() => {}
                Placed::Impossible if self.names.contains(wd) => return Err(Trouble::Stale),
                Placed::New if self.folders.take(1) => {
                    self.list(&Rc::new(folder), wd, sink, &mut pending)?;
                }
                Placed::New | Placed::Impossible => {
                    self.names.remove(wd);
                    let _ = remove_watch(&*self.inotify, wd);
                    return Err(Trouble::Blind);
                }
            }
        }
        Ok(found == Some(true))
    }

    /// Watches what is below the root, if that is wanted.
    fn look_below(&mut self, folder: &Rc<OwnedFd>, sink: &mut dyn Sink) -> Result<(), Trouble> {
        if !self.wish.recursive {
            return Ok(());
        }
        let mut pending = Vec::new();
        self.list(folder, self.names.root(), sink, &mut pending)?;
        self.look(pending, sink).map(|_| ())
    }

    /// Tells what is in a folder, and adds the folders in it to those that are to be looked at.
    fn list(
        &mut self,
        folder: &Rc<OwnedFd>,
        wd: Wd,
        sink: &mut dyn Sink,
        pending: &mut Vec<(Rc<OwnedFd>, Spot)>,
    ) -> Result<(), Trouble> {
        let entries = rustix::fs::openat(
            &**folder,
            c".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .and_then(Dir::new);
        let entries = match entries {
            Ok(entries) => entries,
            Err(Errno::NOENT | Errno::ACCESS | Errno::PERM) => return Ok(()),
            Err(_) => return Err(Trouble::Blind),
        };
        for entry in entries {
            let entry = entry.map_err(|_| Trouble::Blind)?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let spot = (wd, name.to_bytes().to_vec());
            if let Some(path) = self.names.path(wd, &spot.1)
                && sink.tell(&path, EventType::EVENT_TYPE_CREATE)
            {
                if self.told.len() >= MAX_TOLD {
                    sink.lose();
                    self.told.clear();
                }
                self.told.insert(spot.clone(), (entry.ino(), self.now));
            }
            let kind = match entry.file_type() {
                FileType::Unknown => rustix::fs::statat(&**folder, name, AtFlags::SYMLINK_NOFOLLOW)
                    .map_or(FileType::Unknown, |stat| file_type(&stat)),
                kind => kind,
            };
            if kind == FileType::Directory {
                // Each of them would be watched.
                if pending.len() >= MAX_FOLDERS {
                    return Err(Trouble::Blind);
                }
                pending.push((Rc::clone(folder), spot));
            }
        }
        Ok(())
    }

    /// Watches all anew, as the kernel has forgotten what happened, or names are out of date.
    fn start_over(&mut self, sink: &mut dyn Sink) {
        sink.lose();
        let root = self.names.root();
        let folder = match self.find(root) {
            Ok(folder) => Rc::new(folder),
            Err(Lost::Refused) => return sink.end(End::Blind),
            Err(Lost::Moved | Lost::Root) => return renamed(sink),
        };
        let before = std::mem::replace(&mut self.names, Names::new(root));
        self.told.clear();
        self.missed.clear();
        self.moving.clear();
        self.folders.give(before.below().count());
        let found = self.look_below(&folder, &mut Nobody);
        for wd in before.below().filter(|wd| !self.names.contains(*wd)) {
            let _ = remove_watch(&*self.inotify, wd);
        }
        if found.is_err() {
            sink.end(End::Blind);
        }
    }

    fn unwatch(&mut self, wd: Wd) {
        if self.names.remove(wd) {
            self.folders.give(1);
            let _ = remove_watch(&*self.inotify, wd);
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.folders.give(1 + self.names.below().count());
    }
}

/// The path does not name the folder any more.
fn renamed(sink: &mut dyn Sink) {
    sink.tell(b".", EventType::EVENT_TYPE_RENAME);
    sink.end(End::Gone);
}

#[cfg(test)]
mod tests;
