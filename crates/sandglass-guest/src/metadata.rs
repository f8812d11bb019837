//! What clients attach to files: `X-Metadata-*` headers of an upload, told with every description of the file.
//!
//! They are extended attributes, `user.e2b.*`, where the file system has those. gVisor's has none for what is on the
//! sandbox's disk (`setxattr` says `EOPNOTSUPP`; its tmpfs has them), and neither does it say when a file was born. There
//! the agent keeps them itself, in a table that the kernel keeps true: see [`table`].

mod table;

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};

use http::HeaderMap;
use rustix::fs::{Stat, XattrFlags};
use rustix::io::Errno;

use table::{Table, number};

/// What the headers begin with.
const HEADER: &str = "x-metadata-";

/// What the attributes begin with.
const NAMESPACE: &str = "user.e2b.";

/// Upper bound for a key, in bytes: with the namespace, what the kernel allows.
const MAX_KEY: usize = 246;

/// Upper bound for all of a file, keys with the namespace and values, in bytes.
const MAX_TOTAL: usize = 4096;

/// Names of attributes that are read of one file, in bytes, as the kernel has it.
const MAX_NAMES: usize = 64 * 1024;

/// What is attached to one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Metadata(BTreeMap<String, String>);

/// Headers that can't be metadata.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MetadataError {
    /// A key has no name, or one that is too long.
    #[error("invalid metadata key {0:?}: it must have 1 to {MAX_KEY} bytes")]
    Key(String),
    /// A value is no text.
    #[error("invalid metadata value for key {0:?}: it must be printable US-ASCII")]
    Value(String),
    /// It is too much.
    #[error("the metadata of a file must not have more than {MAX_TOTAL} bytes")]
    TooMuch,
}

impl Metadata {
    /// Reads it from the headers of an upload. Of a header that comes twice, the first counts.
    ///
    /// # Errors
    /// As [`MetadataError`] says.
    pub(crate) fn parse(headers: &HeaderMap) -> Result<Self, MetadataError> {
        let mut found = BTreeMap::new();
        // Names are in lower case here, and nothing but ASCII.
        for name in headers.keys() {
            let Some(key) = name.as_str().strip_prefix(HEADER) else { continue };
            if key.is_empty() || key.len() > MAX_KEY {
                return Err(MetadataError::Key(key.into()));
            }
            let value = headers.get(name).map_or(&b""[..], |value| value.as_bytes());
            let text = std::str::from_utf8(value).ok().filter(|text| is_plain(text));
            let text = text.ok_or_else(|| MetadataError::Value(key.into()))?;
            found.insert(key.to_owned(), text.to_owned());
        }
        let metadata = Self(found);
        if metadata.size() > MAX_TOTAL { Err(MetadataError::TooMuch) } else { Ok(metadata) }
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keys with the namespace, and values, in bytes.
    fn size(&self) -> usize {
        self.0.iter().map(|(key, value)| NAMESPACE.len() + key.len() + value.len()).sum()
    }

    /// The keys and values.
    pub(crate) fn into_map(self) -> BTreeMap<String, String> {
        self.0
    }
}

fn is_plain(text: &str) -> bool {
    text.bytes().all(|byte| (0x20..=0x7e).contains(&byte))
}

/// A name in an open directory, as the kernel finds it again. The name has no slash.
fn path_of(dir: &OwnedFd, name: &CStr) -> Vec<u8> {
    [format!("/proc/self/fd/{}/", dir.as_raw_fd()).as_bytes(), name.to_bytes()].concat()
}

/// The names of attributes of ours, as the kernel lists them.
fn ours(list: &[u8]) -> impl Iterator<Item = &str> {
    list.split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix(NAMESPACE))
}

/// Reads the attributes that are ours. What others put there and is no text, or too much, is left out.
fn read_attributes(path: &[u8]) -> Result<Metadata, Errno> {
    let mut names = Vec::with_capacity(1024);
    let listed = match rustix::fs::llistxattr(path, rustix::buffer::spare_capacity(&mut names)) {
        Err(Errno::RANGE) => {
            names.reserve(MAX_NAMES);
            rustix::fs::llistxattr(path, rustix::buffer::spare_capacity(&mut names))
        }
        other => other,
    };
    listed?;
    let mut found = Metadata::default();
    for key in ours(&names) {
        let mut value = Vec::with_capacity(MAX_TOTAL);
        let name = format!("{NAMESPACE}{key}");
        if rustix::fs::lgetxattr(path, name, rustix::buffer::spare_capacity(&mut value)).is_err() {
            continue;
        }
        if let Ok(value) = String::from_utf8(value)
            && is_plain(&value)
            && is_plain(key)
            && found.size() + NAMESPACE.len() + key.len() + value.len() <= MAX_TOTAL
        {
            found.0.insert(key.to_owned(), value);
        }
    }
    Ok(found)
}

/// Replaces the attributes that are ours.
fn write_attributes(file: &OwnedFd, metadata: &Metadata) -> Result<(), Errno> {
    let mut names = Vec::with_capacity(MAX_NAMES);
    rustix::fs::flistxattr(file, rustix::buffer::spare_capacity(&mut names))?;
    for key in ours(&names).filter(|key| !metadata.0.contains_key(*key)) {
        match rustix::fs::fremovexattr(file, format!("{NAMESPACE}{key}")) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(errno) => return Err(errno),
        }
    }
    for (key, value) in &metadata.0 {
        rustix::fs::fsetxattr(file, format!("{NAMESPACE}{key}"), value.as_bytes(), XattrFlags::empty())?;
    }
    Ok(())
}

/// The metadata of all files.
#[derive(Debug, Default)]
pub(crate) struct Labels(Mutex<Table>);

impl Labels {
    /// Replaces the metadata of an open file. Blocks.
    ///
    /// # Errors
    /// `ENOSPC` where there is no room for it, or the kernel refused.
    pub(crate) fn replace(&self, file: &OwnedFd, metadata: &Metadata) -> Result<(), Errno> {
        let kept = match write_attributes(file, metadata) {
            // Nothing of the agent's own may win over what the file has.
            Ok(()) => &Metadata::default(),
            Err(Errno::OPNOTSUPP) => metadata,
            Err(errno) => return Err(errno),
        };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(file, kept)
    }

    /// The metadata of the regular file of this name. Blocks.
    pub(crate) fn of(&self, dir: &OwnedFd, name: &CStr, stat: &Stat) -> Metadata {
        let path = path_of(dir, name);
        match read_attributes(&path) {
            Ok(found) if !found.is_empty() => found,
            _ => self.0.lock().unwrap_or_else(PoisonError::into_inner).of(&path, number(stat)),
        }
    }
}

#[cfg(test)]
mod tests;
