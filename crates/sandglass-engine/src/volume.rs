//! What `serve` says to the process that works on the content of a volume ([`crate::Engine::open_volume`]), and what it hears.
//!
//! One process is there for one question. A message is a length, 4 bytes with the lowest first, and so many bytes of JSON. After
//! [`Said::File`] the bytes of the file follow, as many as it said. After [`Said::GoOn`] the other side sends the file in
//! pieces, each a length and its bytes; one without any is its end, and an end of the stream before that is a reason to
//! leave the file as it was.

use serde::{Deserialize, Serialize};

/// Longest question, in bytes.
pub const MAX_ASK: u32 = 4 << 20;

/// Longest answer, in bytes.
pub const MAX_SAID: u32 = 8 << 20;

/// Longest piece of a file that is sent, in bytes.
pub const MAX_PIECE: u32 = 64 << 10;

/// Most files that are looked at by one [`Ask::Marks`].
pub const MAX_MARKS: usize = 1024;

/// Who has what is made or changed; what is `None` is not said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// User id.
    pub uid: Option<u32>,
    /// Group id.
    pub gid: Option<u32>,
    /// Permissions, at most `0o7777`.
    pub mode: Option<u32>,
}

/// A question. Paths are from the top of the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// What is there?
    Stat {
        /// Where.
        path: String,
    },
    /// What is in a folder?
    List {
        /// Which one.
        path: String,
        /// How many layers; at least 1.
        depth: u32,
    },
    /// Make a folder.
    MakeDir {
        /// Which one.
        path: String,
        /// Whose it is.
        access: Access,
        /// Whether those above it are made as well, and one that is there will do.
        force: bool,
    },
    /// Give it to somebody else.
    Change {
        /// What.
        path: String,
        /// To whom.
        access: Access,
    },
    /// Remove it, with all that is in it.
    Remove {
        /// What.
        path: String,
    },
    /// Send a file.
    Read {
        /// Which one.
        path: String,
    },
    /// Put a file there as a whole, or leave what is there.
    Write {
        /// Where.
        path: String,
        /// Whose it is; as before, if it was there.
        access: Access,
        /// Whether folders above it are made.
        force: bool,
    },
    /// What tells whether these were changed: at most [`MAX_MARKS`].
    Marks {
        /// Which ones.
        paths: Vec<String>,
    },
}

/// What something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Directory,
    /// A symbolic link.
    Symlink,
    /// Anything else.
    Unknown,
}

/// One file, folder or link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// From the top of the volume, with a `/` at its beginning.
    pub path: String,
    /// Its size, in bytes.
    pub size: u64,
    /// Its permissions.
    pub mode: u32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// When it was read, in milliseconds since 1970.
    pub atime: i64,
    /// When its content was changed.
    pub mtime: i64,
    /// When anything of it was changed.
    pub ctime: i64,
    /// Where a link leads.
    pub target: Option<String>,
}

/// What tells whether a file is as it was: no program can set all of it. Of a folder only that it is the same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Its number in the file system.
    pub inode: u64,
    /// Of what is no folder: its size in bytes, and when its content, and when anything of it was changed, in nanoseconds
    /// since 1970.
    pub file: Option<(u64, i64, i64)>,
}

/// Why something was not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// It is not there.
    NotFound,
    /// The question makes no sense, or not of what is there.
    Invalid,
    /// Something is there already, or changed meanwhile.
    Conflict,
    /// The volume is full.
    NoRoom,
    /// The file system failed.
    Failed,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// To [`Ask::Stat`], [`Ask::MakeDir`], [`Ask::Change`], and at the end of [`Ask::Write`].
    Entry(Entry),
    /// To [`Ask::List`].
    Entries(Vec<Entry>),
    /// To [`Ask::Remove`].
    Removed,
    /// To [`Ask::Read`]: so many bytes follow.
    File {
        /// How many.
        size: u64,
    },
    /// To [`Ask::Write`]: send the file.
    GoOn,
    /// To [`Ask::Marks`], in their order; `None` for what is not there.
    Marks(Vec<Option<Mark>>),
    /// It was not done.
    Refused {
        /// For programs.
        why: Why,
        /// For people.
        message: String,
    },
}
