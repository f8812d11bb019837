//! Names for namespaces: files over which they are mounted.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open, openat};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};

use super::Netns;

/// Longest name of a pin, in bytes.
const MAX_NAME_LEN: usize = 64;

/// A folder in which namespaces are pinned. It is a mount of its own whose changes reach copies of the mount
/// namespace (`MS_SHARED`): else a program that was started in a private copy would keep every pin of that moment,
/// and with it the namespaces, for as long as it runs.
#[derive(Debug)]
pub struct PinFolder {
    path: PathBuf,
}

impl PinFolder {
    /// Makes the folder, and makes it a shared mount, where that is not so yet.
    ///
    /// # Errors
    /// It can't be made or mounted.
    pub fn open(path: &Path) -> io::Result<Self> {
        fs_err::create_dir_all(path)?;
        let path = fs_err::canonicalize(path)?;
        if !is_mount_point(&path)? {
            mount_bind(&path, &path)?;
        }
        mount_change(&path, MountPropagationFlags::PRIVATE)?;
        mount_change(&path, MountPropagationFlags::SHARED)?;
        Ok(Self { path })
    }

    /// Where a pin of that name is or would be.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) unless the name is 1 to 64 characters of `a-z`, `0-9` and `-`.
    pub fn path(&self, name: &str) -> io::Result<PathBuf> {
        let valid = (1..=MAX_NAME_LEN).contains(&name.len())
            && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'));
        if valid {
            Ok(self.path.join(name))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "not a name for a pin"))
        }
    }

    /// Keeps a namespace alive under a new name.
    ///
    /// # Errors
    /// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the name is taken; nothing is left after any error.
    pub fn pin(&self, netns: &Netns, name: &str) -> io::Result<()> {
        let path = self.path(name)?;
        let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        drop(openat(self.folder()?, name, flags, Mode::empty())?);
        let source = format!("/proc/self/fd/{}", netns.0.as_raw_fd());
        mount_bind(source.as_str(), &path).map_err(|error| {
            let _ = fs_err::remove_file(&path);
            error.into()
        })
    }

    /// Opens the namespace of that name.
    ///
    /// # Errors
    /// As [`Netns::open`], or the name is none.
    pub fn netns(&self, name: &str) -> io::Result<Netns> {
        Netns::open(&self.path(name)?)
    }

    /// Takes the name away. `Ok` if there is none. The namespace ends once nothing else keeps it.
    ///
    /// # Errors
    /// The mount or its file can't be removed.
    pub fn unpin(&self, name: &str) -> io::Result<()> {
        let path = self.path(name)?;
        loop {
            match unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                // Not a mount point, or nothing there.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => break,
                Err(error) => return Err(error.into()),
            }
        }
        match fs_err::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// All names, sorted, whether a namespace is mounted there or only the file is left.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs_err::read_dir(&self.path)? {
            names.extend(entry?.file_name().into_string());
        }
        names.retain(|name| self.path(name).is_ok());
        names.sort();
        Ok(names)
    }

    /// Undoes what [`PinFolder::open`] mounted; the folder stays. Nothing may be pinned through this value afterwards.
    ///
    /// # Errors
    /// A pin is left: [`ResourceBusy`](io::ErrorKind::ResourceBusy).
    pub fn close(&self) -> io::Result<()> {
        Ok(unmount(&self.path, UnmountFlags::NOFOLLOW)?)
    }

    fn folder(&self) -> io::Result<OwnedFd> {
        Ok(open(&self.path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

fn is_mount_point(path: &Path) -> io::Result<bool> {
    let mounts = fs_err::read_to_string("/proc/self/mountinfo")?;
    let path = path.to_str().ok_or(io::ErrorKind::InvalidInput)?;
    // The fifth field; blanks in it are escaped, and such a folder is refused rather than unescaped.
    if path.contains([' ', '\t', '\n', '\\']) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the folder's path holds a blank"));
    }
    Ok(mounts.lines().any(|line| line.split(' ').nth(4) == Some(path)))
}
