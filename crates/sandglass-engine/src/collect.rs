//! What `serve` says to the process that reads the files of a sandbox ([`crate::Engine::collect`]), and what it hears.
//!
//! One process is there for one question. A message is a length, 4 bytes with the lowest first, and so many bytes of JSON. The
//! question is an [`Ask`]. The answer is any number of files and then [`Said::Done`], or [`Said::Refused`] alone. After each
//! [`Said::File`] its bytes follow in pieces, each a length and so many bytes, at most [`MAX_PIECE`] and together at most the
//! size that was said; one without any is their end, and [`Said::Read`] comes next. A stream that ends before `Done` tells of
//! a part of the files, and nobody may take it for the whole.
//!
//! Only regular files are told, with their permissions. Nothing is followed: no symbolic link, no mount.

mod globs;
mod place;
mod walk;

use std::io;

use serde::{Deserialize, Serialize};

pub use self::globs::{Globs, InvalidGlobs, MAX_GLOB, MAX_GLOBS};
pub use self::place::{InvalidPlace, MAX_DEPTH, MAX_PATH, Place, Tree, is_inside};
pub use self::walk::answer;

/// Longest question, in bytes.
pub const MAX_ASK: u32 = 64 << 10;

/// Longest message of an answer, in bytes: a path may be six times as long in JSON.
pub const MAX_SAID: u32 = 8 << 10;

/// Longest piece of a file, in bytes.
pub const MAX_PIECE: u32 = 64 << 10;

/// What is collected at most. What is beyond is left out, and counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// Files.
    pub files: u32,
    /// Bytes of all files together, as they are read: a hole counts like any other byte.
    pub bytes: u64,
    /// Bytes of one file.
    pub file_bytes: u64,
    /// Seconds from the question until the reader stops. The answer says then that it is cut short.
    pub seconds: u32,
}

impl Bounds {
    /// The widest that there are: 100,000 files, 4 GiB, 10 minutes.
    pub const WIDEST: Self = Self { files: 100_000, bytes: 4 << 30, file_bytes: 4 << 30, seconds: 600 };

    /// These, or what is narrower of the widest.
    #[must_use]
    pub fn narrowed(self) -> Self {
        let widest = Self::WIDEST;
        Self {
            files: self.files.min(widest.files),
            bytes: self.bytes.min(widest.bytes),
            file_bytes: self.file_bytes.min(widest.file_bytes),
            seconds: self.seconds.min(widest.seconds),
        }
    }
}

/// The question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ask {
    /// The folder, from the top of its [`Tree`] on, without a `/` at its beginning; empty for the top itself.
    pub folder: String,
    /// Which files.
    pub globs: Globs,
    /// How much.
    pub bounds: Bounds,
}

/// What was left out, by why. Folders count as one, with all that is in them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Symbolic links.
    pub symlinks: u64,
    /// Pipes, sockets and devices.
    pub special: u64,
    /// Files that are larger than one may be, or than the room that was left.
    pub too_large: u64,
    /// Files beyond as many as there may be.
    pub too_many: u64,
    /// Files and folders whose path is too long or has too many parts.
    pub too_deep: u64,
    /// Files and folders whose name is no UTF-8.
    pub names: u64,
    /// Files and folders that became something else while they were looked at.
    pub changed: u64,
    /// Folders on which something else is mounted.
    pub mounts: u64,
    /// Whether it ended before all was looked at: the time was up, or there was too much to look at.
    pub cut_short: bool,
}

impl LeftOut {
    /// Whether nothing was left out.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// A part of the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Said {
    /// A file; its bytes follow.
    File {
        /// From the folder on: plain parts, joined by `/`.
        path: String,
        /// Its permissions, at most `0o777`.
        mode: u32,
        /// Its size when it was opened, in bytes. No more than that follow.
        size: u64,
        /// When it was last changed, in seconds since 1970; 0 if before.
        mtime: u64,
    },
    /// These were all bytes of it.
    Read {
        /// Whether it stayed the same from its first byte to its last.
        whole: bool,
    },
    /// There are no more files.
    Done(LeftOut),
    /// There is no answer.
    Refused {
        /// For programs.
        why: Why,
        /// For people.
        message: String,
    },
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// There is no such folder.
    NotFound,
    /// It is no folder, or lies behind a symbolic link.
    Invalid,
    /// The file system failed.
    Failed,
}

/// Reads one message of at most so many bytes.
///
/// # Errors
/// The stream ended or failed, or the message is longer.
pub fn receive(line: &mut impl io::Read, max: u32) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    line.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if len > max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {len} bytes")));
    }
    let mut message = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    line.read_exact(&mut message)?;
    Ok(message)
}

/// Writes one message.
///
/// # Errors
/// The stream failed, or the message can't be told in 4 bytes.
pub fn send(line: &mut impl io::Write, message: &[u8]) -> io::Result<()> {
    let len = u32::try_from(message.len()).map_err(io::Error::other)?;
    line.write_all(&len.to_le_bytes())?;
    line.write_all(message)
}
