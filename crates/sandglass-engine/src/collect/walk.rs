//! Reading the files below a folder that a guest made, and may be changing at this moment.
//!
//! Folders are entered by what is open and by the names that the file system gave, and nothing is followed. What is no regular
//! file is not opened, and if it becomes one between the two looks at it, opening it waits for nobody.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, statat};
use rustix::io::Errno;

use super::{
    Ask, Bounds, Globs, LeftOut, MAX_ASK, MAX_DEPTH, MAX_PIECE, Said, Why, is_inside, receive, send,
};

/// Most names that are looked at, wanted or not.
const MAX_LOOKED_AT: u64 = 1_000_000;

/// After so many names, and pieces of files, it is asked whether somebody still wants them.
const LOOK_UP: u64 = 64;

/// How long who asked may take for what was sent.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes that are sent together.
const BUFFER: usize = 128 << 10;

/// Answers what is asked on this line about what is below `top`.
///
/// # Errors
/// Nobody waits for the answer any more, the question is none, or the file system failed in the middle of the answer.
pub fn answer(line: &mut UnixStream, top: &OwnedFd) -> io::Result<()> {
    line.set_read_timeout(Some(PATIENCE))?;
    line.set_write_timeout(Some(PATIENCE))?;
    let ask: Ask = serde_json::from_slice(&receive(line, MAX_ASK)?)?;
    let folder = match open_folder(top, &ask.folder) {
        Ok(folder) => folder,
        Err(errno) => {
            let (why, message) = refusal(errno);
            return say(line, &Said::Refused { why, message });
        }
    };
    let bounds = ask.bounds.narrowed();
    let mut walk = Walk {
        out: BufWriter::with_capacity(BUFFER, line),
        globs: &ask.globs,
        until: Instant::now() + Duration::from_secs(bounds.seconds.into()),
        room: bounds,
        looked_at: 0,
        left_out: LeftOut::default(),
    };
    match walk.folder(folder, "") {
        Ok(()) => {}
        Err(Stop::Enough) => walk.left_out.cut_short = true,
        Err(Stop::Failed(error)) => return Err(error),
    }
    let done = Said::Done(walk.left_out);
    say(&mut walk.out, &done)?;
    walk.out.flush()
}

fn refusal(errno: Errno) -> (Why, String) {
    let (why, message) = match errno {
        Errno::NOENT => (Why::NotFound, "there is no such folder"),
        Errno::NOTDIR => (Why::Invalid, "it is no folder"),
        Errno::LOOP => (Why::Invalid, "the path leads over a symbolic link, and none is followed"),
        Errno::XDEV => (Why::Invalid, "something else is mounted there"),
        _ => return (Why::Failed, format!("the folder can't be opened: {errno}")),
    };
    (why, message.into())
}

fn say(out: &mut impl io::Write, said: &Said) -> io::Result<()> {
    send(out, &serde_json::to_vec(said)?)
}

/// Opens what is below an open folder, over no link and no mount.
fn open(folder: impl AsFd, path: &CStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    let how = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let flags =
        flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    // It is tried again where somebody renames what is on the way.
    for _ in 0..8 {
        match openat2(&folder, path, flags, Mode::empty(), how) {
            Err(Errno::AGAIN) => {}
            opened => return opened,
        }
    }
    Err(Errno::STALE)
}

fn open_folder(top: &OwnedFd, path: &str) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { "." } else { path };
    let path = std::ffi::CString::new(path).map_err(|_| Errno::NOENT)?;
    open(top, &path, OFlags::DIRECTORY)
}

/// Why a walk ends before its end.
enum Stop {
    /// There is no time, or there was enough to look at.
    Enough,
    /// The file system failed, or nobody waits for the answer.
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Failed(errno.into())
    }
}

struct Walk<'a> {
    out: BufWriter<&'a mut UnixStream>,
    globs: &'a Globs,
    until: Instant,
    /// What there may still be. Of `seconds` nothing is said.
    room: Bounds,
    looked_at: u64,
    left_out: LeftOut,
}

/// What an error in between means: `None` that what was there is gone, or is another thing by now.
fn unless_changed<T>(outcome: Result<T, Errno>) -> Result<Option<T>, Errno> {
    match outcome {
        Ok(found) => Ok(Some(found)),
        // The last three are what an open says of a link, and of a pipe or device that was put there.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::STALE | Errno::LOOP | Errno::NXIO | Errno::ACCESS) => {
            Ok(None)
        }
        Err(errno) => Err(errno),
    }
}

impl Walk<'_> {
    /// Tells all that is wanted in a folder of this path.
    fn folder(&mut self, folder: OwnedFd, above: &str) -> Result<(), Stop> {
        let mut folder = Dir::new(folder)?;
        while let Some(read) = folder.read() {
            let read = match read {
                // It was removed.
                Err(Errno::NOENT | Errno::STALE) => break,
                read => read?,
            };
            let name = read.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            self.looked_at += 1;
            if self.looked_at > MAX_LOOKED_AT {
                return Err(Stop::Enough);
            }
            if self.looked_at.is_multiple_of(LOOK_UP) {
                self.look_up()?;
            }
            self.entry(folder.fd()?, name, above)?;
        }
        Ok(())
    }

    /// Whether to go on.
    fn look_up(&self) -> Result<(), Stop> {
        if Instant::now() >= self.until {
            return Err(Stop::Enough);
        }
        let mut line = [PollFd::new(self.out.get_ref(), PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut line, Some(&now)) {
            Ok(1..) => Err(Stop::Failed(io::ErrorKind::BrokenPipe.into())),
            _ => Ok(()),
        }
    }

    fn entry(&mut self, folder: impl AsFd, name: &CStr, above: &str) -> Result<(), Stop> {
        let Ok(text) = name.to_str() else {
            self.left_out.names += 1;
            return Ok(());
        };
        let path = if above.is_empty() { text.to_owned() } else { format!("{above}/{text}") };
        let Some(stat) = unless_changed(statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW))? else {
            // What is gone was nothing to be told.
            return Ok(());
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        // A folder may hold what is wanted, whether it is itself or not.
        if kind != FileType::Directory && !self.globs.want(&path) {
            return Ok(());
        }
        if !is_inside(&path) {
            self.left_out.too_deep += 1;
            return Ok(());
        }
        match kind {
            FileType::Directory => self.below(folder, name, &path),
            FileType::RegularFile => self.file(folder, name, path, u64::try_from(stat.st_size).unwrap_or(0)),
            FileType::Symlink => {
                self.left_out.symlinks += 1;
                Ok(())
            }
            _ => {
                self.left_out.special += 1;
                Ok(())
            }
        }
    }

    fn below(&mut self, folder: impl AsFd, name: &CStr, path: &str) -> Result<(), Stop> {
        // For each a descriptor is open.
        if path.split('/').count() >= MAX_DEPTH {
            self.left_out.too_deep += 1;
            return Ok(());
        }
        match open(folder, name, OFlags::DIRECTORY) {
            Err(Errno::XDEV) => self.left_out.mounts += 1,
            opened => match unless_changed(opened)? {
                Some(below) => self.folder(below, path)?,
                None => self.left_out.changed += 1,
            },
        }
        Ok(())
    }

    /// Tells a file, unless there is no room for it.
    fn file(&mut self, folder: impl AsFd, name: &CStr, path: String, size: u64) -> Result<(), Stop> {
        if self.has_no_room(size) {
            return Ok(());
        }
        let file = match open(folder, name, OFlags::empty()) {
            // A file can be mounted on, too.
            Err(Errno::XDEV) => {
                self.left_out.mounts += 1;
                return Ok(());
            }
            opened => unless_changed(opened)?,
        };
        let Some(mut file) = file.map(File::from) else {
            self.left_out.changed += 1;
            return Ok(());
        };
        let before = file.metadata()?;
        if !before.is_file() {
            self.left_out.changed += 1;
            return Ok(());
        }
        // It may have grown since the first look.
        if self.has_no_room(before.len()) {
            return Ok(());
        }
        self.room.files -= 1;
        let said = Said::File {
            path,
            mode: before.permissions().mode() & 0o777,
            size: before.len(),
            mtime: u64::try_from(before.mtime()).unwrap_or(0),
        };
        say(&mut self.out, &said)?;
        let sent = self.content(&mut file, before.len())?;
        let after = file.metadata()?;
        let looks = |of: &std::fs::Metadata| (of.len(), of.mtime(), of.mtime_nsec());
        let whole = sent == before.len() && looks(&before) == looks(&after);
        Ok(say(&mut self.out, &Said::Read { whole })?)
    }

    /// Whether there is no room for one more file of this size, which is counted then.
    fn has_no_room(&mut self, size: u64) -> bool {
        if size > self.room.file_bytes || size > self.room.bytes {
            self.left_out.too_large += 1;
        } else if self.room.files == 0 {
            self.left_out.too_many += 1;
        } else {
            return false;
        }
        true
    }

    /// Sends at most so many bytes of a file, and how much there was.
    fn content(&mut self, file: &mut File, size: u64) -> Result<u64, Stop> {
        let mut piece = [0; MAX_PIECE as usize];
        let (mut sent, mut pieces) = (0, 0_u64);
        while sent < size {
            let left = usize::try_from(size - sent).unwrap_or(usize::MAX).min(piece.len());
            let read = file.read(piece.get_mut(..left).unwrap_or_default())?;
            let Some(read) = piece.get(..read).filter(|read| !read.is_empty()) else { break };
            send(&mut self.out, read)?;
            sent += u64::try_from(read.len()).map_err(io::Error::other)?;
            pieces += 1;
            if pieces.is_multiple_of(LOOK_UP) && Instant::now() >= self.until {
                break;
            }
        }
        self.room.bytes -= sent;
        send(&mut self.out, &[])?;
        Ok(sent)
    }
}

#[cfg(test)]
mod tests;
