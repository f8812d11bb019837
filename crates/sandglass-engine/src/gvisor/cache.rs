//! The cache folder, which instances share that do not know each other, and what in it nobody needs any more.
//!
//! Each instance has a folder of *pins* there, an empty file for each agent and each root file system that it needs: for what it
//! makes next, for each sandbox, for each image. A pin is written before what it names is used, and removed some time after
//! the last need is gone. What has no pin of any instance and was not touched for a time may go.
//!
//! ```text
//! <cache>/pins/                       locked by all who make or pin something, and by who sweeps, alone
//! <cache>/pins/<instance>/home        where that instance's data folder is
//! <cache>/pins/<instance>/agents-HEX  it needs <cache>/agents/HEX
//! ```

mod home;
mod pins;
mod sweep;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sandglass_linux::lock::SharedLock;
use sandglass_types::{Digest, InstanceId};

pub(super) use self::pins::{Held, Pins};
pub(super) use self::sweep::sweep;
use crate::files::private_folder;

/// How the names of things begin that are being made, by who shares the lock.
pub(super) const MAKING: &str = ".making-";

/// Something in the cache folder that is named by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Entry {
    /// A layer with an agent. What a server carries as its guest is beside them, and needed by nobody once it is in a layer.
    Agent(Digest),
    /// A root file system.
    Rootfs(Digest),
}

impl Entry {
    const fn folder(self) -> &'static str {
        match self {
            Self::Agent(_) => "agents",
            Self::Rootfs(_) => "rootfs",
        }
    }

    const fn digest(self) -> Digest {
        let (Self::Agent(digest) | Self::Rootfs(digest)) = self;
        digest
    }

    /// Where it is.
    fn path(self, cache: &Path) -> PathBuf {
        cache.join(self.folder()).join(self.digest().to_string())
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.folder(), self.digest())
    }
}

/// A name that is none of a pin's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotAnEntry;

impl FromStr for Entry {
    type Err = NotAnEntry;

    fn from_str(name: &str) -> Result<Self, NotAnEntry> {
        let (folder, digest) = name.split_once('-').ok_or(NotAnEntry)?;
        let digest = digest.parse().map_err(|_| NotAnEntry)?;
        match folder {
            "agents" => Ok(Self::Agent(digest)),
            "rootfs" => Ok(Self::Rootfs(digest)),
            _ => Err(NotAnEntry),
        }
    }
}

fn pins_of(cache: &Path) -> PathBuf {
    cache.join("pins")
}

/// Keeps whoever sweeps away. To be held while something is made in the cache folder, and not for longer.
///
/// # Errors
/// The folder can't be made or locked.
pub(super) fn share(cache: &Path) -> io::Result<SharedLock> {
    let pins = pins_of(cache);
    private_folder(&pins)?;
    SharedLock::acquire(&pins)
}

/// Whether something is in the cache folder, which is to be used: if so, it stays for a day at least. That is enough for an
/// instance to begin, which then says itself for how long it needs it.
///
/// # Errors
/// It can't be looked at.
pub fn touch(cache: &Path, path: &Path) -> io::Result<bool> {
    let touch = || {
        let _nobody_sweeps = match SharedLock::acquire(&pins_of(cache)) {
            // Nobody has ever swept.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            lock => Some(lock?),
        };
        // Sets when its inode changed last, which is what counts, and not its content, which is what sandboxes see.
        fs_err::metadata(path).and_then(|meta| fs_err::set_permissions(path, meta.permissions()))
    };
    match touch() {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        // Who may not write there starts no server with it, and only looks.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => path.try_exists(),
        Err(error) => Err(error),
    }
}

/// Forgets what an instance needed that is gone for good.
///
/// # Errors
/// Its pins can't be removed.
pub fn forget(cache: &Path, instance: &InstanceId) -> io::Result<()> {
    // Under another name first, by which a half of it is known as one.
    let going = pins_of(cache).join(format!("{MAKING}{instance}"));
    gone(fs_err::remove_dir_all(&going))?;
    gone(fs_err::rename(pins_of(cache).join(instance.as_str()), &going))?;
    gone(fs_err::remove_dir_all(going))
}

/// What is not there is as good as removed.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
