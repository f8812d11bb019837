//! Checkpoint images: memory and processes as `runsc` wrote them, and the disk that belongs to them.
//!
//! `runsc` notices no mismatch between the two, nor another root file system, agent or version of itself, so all of
//! them are written down and compared here.

mod compressed;
mod stream;

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use sandglass_types::error::Chain;
use sandglass_types::{Digest, Limits, SandboxId};
use serde::{Deserialize, Serialize};

use super::record::{Pinned, Restore};
use crate::engine::{EngineError, Keep, Lack, step};

pub(super) use self::compressed::{compress, expand};

/// Upper bound of an image's description, in bytes.
const MAX_META_LEN: u64 = 64 * 1024;

/// That memory and disk are there as they were written.
const VERSION: u32 = 1;

/// That some of it is compressed. Servers that do not know of that know only the other version, and refuse it.
const COMPRESSED: u32 = 2;

/// A gigabyte of memory takes some seconds; a busy disk takes longer.
pub(super) const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(300);

/// Whether an image has the memory and the processes of its sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Memory {
    /// It has. So do those that do not say.
    #[default]
    With,
    /// It has a disk, and nothing else.
    Without,
}

/// What a sandbox is made from.
#[derive(Debug)]
pub(super) enum Source {
    /// A blank disk.
    Blank,
    /// A copy of the disk of this image; its memory, if it has one, is left out.
    Disk(Image),
    /// This image.
    Image(Image),
    /// This image, of this name, which is brought back later.
    Ahead(Image, SandboxId),
}

/// Most of a disk that is copied byte by byte for a sandbox that is made ahead: it may never be needed, and takes the room
/// once more.
const MOST_COPIED_AHEAD: u64 = 256 << 20;

impl Source {
    /// The memory and the processes to bring back, as `runsc` wrote them.
    pub(super) fn checkpoint(&self) -> Option<PathBuf> {
        match self {
            Self::Blank | Self::Disk(_) => None,
            Self::Image(image) | Self::Ahead(image, _) => Some(image.checkpoint()),
        }
    }

    /// The disk to copy.
    pub(super) fn disk(&self) -> Option<PathBuf> {
        match self {
            Self::Blank => None,
            Self::Disk(image) | Self::Image(image) | Self::Ahead(image, _) => Some(image.disk()),
        }
    }

    /// What the sandbox's record says of an image that is brought back in it over its control socket. That it has begun is
    /// said before it does: nobody may ask in between.
    pub(super) fn restore(&self) -> Option<Restore> {
        match self {
            Self::Blank | Self::Disk(_) => None,
            Self::Image(_) => Some(Restore::Begun),
            Self::Ahead(_, image) => Some(Restore::Waits(image.clone())),
        }
    }

    /// Most bytes of the disk that may be copied where blocks can't be shared.
    pub(super) const fn most_copied(&self) -> Option<u64> {
        if let Self::Ahead(..) = self { Some(MOST_COPIED_AHEAD) } else { None }
    }

    /// The agent in its memory, if that is brought back.
    pub(super) fn agent(&self) -> Result<Option<Digest>, EngineError> {
        match self {
            Self::Blank | Self::Disk(_) => Ok(None),
            Self::Image(image) | Self::Ahead(image, _) => Ok(Some(image.meta()?.pinned.agent)),
        }
    }

    /// Refuses an image that this sandbox can't be made from.
    pub(super) fn check(&self, wanted: &Pinned, limits: Limits) -> Result<(), EngineError> {
        let (image, memory) = match self {
            Self::Blank => return Ok(()),
            Self::Disk(image) => (image, Memory::Without),
            Self::Image(image) | Self::Ahead(image, _) => (image, Memory::With),
        };
        match mismatch(&image.meta()?, wanted, limits, memory) {
            None => Ok(()),
            Some(Mismatch::Other(what)) => {
                Err(step("match the image", format!("it was made with another {what}")))
            }
            Some(Mismatch::Pinned(what, had, has)) => Err(EngineError::Mismatch { what, had, has }),
            Some(Mismatch::NoMemory) => Err(step("match the image", "it was made without memory")),
        }
    }
}

/// What an image was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Meta {
    version: u32,
    pub(super) pinned: Pinned,
    pub(super) limits: Limits,
    #[serde(default)]
    memory: Memory,
}

impl Meta {
    /// Whether it must be expanded before anything can be made of it.
    pub(super) const fn is_compressed(&self) -> bool {
        self.version == COMPRESSED
    }
}

/// The folder of an image.
#[derive(Debug)]
pub(super) struct Image(PathBuf);

impl Image {
    pub(super) const fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// What `runsc` reads and writes.
    pub(super) fn checkpoint(&self) -> PathBuf {
        self.0.join("checkpoint")
    }

    pub(super) fn disk(&self) -> PathBuf {
        self.0.join("disk.img")
    }

    fn meta_path(&self) -> PathBuf {
        self.0.join("meta.json")
    }

    /// Writes the description.
    pub(super) fn describe(&self, pinned: Pinned, limits: Limits, memory: Memory) -> io::Result<()> {
        self.write_meta(&Meta { version: VERSION, pinned, limits, memory })
    }

    fn write_meta(&self, meta: &Meta) -> io::Result<()> {
        fs_err::write(self.meta_path(), serde_json::to_vec(meta)?)
    }

    /// Reads the description.
    pub(super) fn meta(&self) -> Result<Meta, EngineError> {
        let failed = |error| step("read the image", error);
        let mut text = Vec::new();
        fs_err::File::open(self.meta_path())
            .and_then(|file| file.take(MAX_META_LEN).read_to_end(&mut text))
            .map_err(|error| failed(error.into()))?;
        serde_json::from_slice(&text)
            .map_err(|error| failed(Box::<dyn std::error::Error + Send + Sync>::from(error)))
    }
}

/// Why a sandbox can't be made from an image.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Mismatch {
    /// It is another one of these.
    Other(&'static str),
    /// Its memory was made with another one of these: that, where there is this.
    Pinned(&'static str, String, String),
    /// It has no memory, which is wanted.
    NoMemory,
}

/// Compares. What starts anew from the disk needs neither the agent nor the `runsc` of before.
fn mismatch(meta: &Meta, wanted: &Pinned, limits: Limits, memory: Memory) -> Option<Mismatch> {
    let Meta { version, pinned, limits: had, memory: has } = meta;
    let other = if *version != VERSION {
        Some("format")
    } else if pinned.rootfs != wanted.rootfs {
        Some("root file system")
    } else if *had != limits {
        // The disk has one size, and the guest's kernel remembers how many cores and how much memory it has.
        Some("set of limits")
    } else if memory == Memory::Without {
        None
    } else if *has == Memory::Without {
        return Some(Mismatch::NoMemory);
    } else if pinned.agent != wanted.agent {
        let [had, has] = [pinned, wanted].map(|one| one.agent.to_string());
        return Some(Mismatch::Pinned("the agent", had, has));
    } else if pinned.runsc != wanted.runsc {
        let [had, has] = [pinned, wanted].map(|one| one.runsc.clone());
        return Some(Mismatch::Pinned("runsc", had, has));
    } else {
        None
    };
    other.map(Mismatch::Other)
}

/// What the system calls a full disk, in the words of `runsc`.
const FULL: &str = "no space left on device";

/// A failed checkpoint. `runsc` tells in words alone that there was no room for it.
pub(super) fn unwritten(error: EngineError) -> EngineError {
    if Chain(&error).to_string().contains(FULL) {
        return EngineError::NoRoom { lack: Lack::Disk, step: "write the image", source: error.into() };
    }
    error
}

/// How the names of unfinished images begin; those of images never do.
const UNFINISHED: &str = ".making-";

/// Removes what a host left that died while it wrote an image.
pub(super) fn sweep(images: &Path) -> io::Result<()> {
    for entry in fs_err::read_dir(images)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            fs_err::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Removes an image. It has no name any more before any of it is gone, so that no part of it is taken for the whole.
pub(super) fn remove(images: &Path, image: &Path) -> io::Result<()> {
    let Some(name) = image.file_name() else { return Err(io::ErrorKind::InvalidInput.into()) };
    let going = images.join(format!("{UNFINISHED}{}", name.to_string_lossy()));
    let gone = |removed: io::Result<()>| match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    // Left by a host that died right here.
    gone(fs_err::remove_dir_all(&going))?;
    gone(fs_err::rename(image, &going).and_then(|()| fs_err::File::open(images)?.sync_all()))?;
    gone(fs_err::remove_dir_all(&going))
}

/// A folder in which an image is put together, removed unless it was finished.
#[derive(Debug)]
pub(super) struct Unfinished {
    folder: tempfile::TempDir,
    image: Image,
}

/// A folder beside the images, removed when it is dropped, or by the next host.
pub(super) fn aside(images: &Path) -> io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(images)
}

impl Unfinished {
    pub(super) fn begin(images: &Path) -> io::Result<Self> {
        let folder = aside(images)?;
        let image = Image(folder.path().join("image"));
        fs_err::create_dir(&image.0)?;
        Ok(Self { folder, image })
    }

    pub(super) const fn image(&self) -> &Image {
        &self.image
    }

    /// Makes the folder that `runsc` writes to.
    pub(super) fn begin_checkpoint(&self) -> io::Result<PathBuf> {
        let checkpoint = self.image.checkpoint();
        fs_err::create_dir(&checkpoint)?;
        Ok(checkpoint)
    }

    /// Gives it its name, which must be free. Who finds it by its name finds it whole; also after a loss of power, if it is
    /// flushed.
    pub(super) fn finish(self, target: &Path, keep: Keep) -> io::Result<()> {
        if keep == Keep::Flushed {
            sync(&self.image.0)?;
        }
        // A rename would replace an empty folder; images are never empty, so this fails when one is there.
        fs_err::rename(&self.image.0, target)?;
        if keep == Keep::Flushed {
            sync_name(target)?;
        }
        self.folder.close()
    }

    /// Writes it to the disk itself.
    fn flush(&self) -> io::Result<()> {
        sync(&self.image.0)
    }

    /// Takes the place of an image that is there, in one step, and outlives a loss of power from then on, if it was flushed
    /// before. What had that name is in this folder now. `Unsupported` on file systems that can't swap two names.
    fn swap(&mut self, target: &Path) -> io::Result<()> {
        match renameat_with(CWD, &self.image.0, CWD, target, RenameFlags::EXCHANGE) {
            // Whether the disk itself knows of it is not known then, so neither is removed before the next start.
            Ok(()) => sync_name(target).inspect_err(|_| self.folder.disable_cleanup(true)),
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Err(io::ErrorKind::Unsupported.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Removes what is in it.
    fn close(self) -> io::Result<()> {
        self.folder.close()
    }
}

/// Writes an image that has its name to the disk itself.
pub(super) fn flush(image: &Path) -> io::Result<()> {
    sync(image)?;
    sync_name(image)
}

/// Writes that it has its name.
fn sync_name(image: &Path) -> io::Result<()> {
    image.parent().map_or(Ok(()), |images| fs_err::File::open(images)?.sync_all())
}

/// Writes a folder and what is in it to the disk itself.
fn sync(folder: &Path) -> io::Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync(&entry.path())?;
        } else {
            fs_err::File::open(entry.path())?.sync_all()?;
        }
    }
    fs_err::File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pinned() -> Pinned {
        let digest = Digest::from_bytes([1; 32]);
        Pinned { rootfs: digest, agent: digest, runsc: "1".into() }
    }

    #[test]
    fn every_difference_is_named() {
        let other = Digest::from_bytes([2; 32]);
        let meta = |pinned, memory| Meta { version: VERSION, pinned, limits: Limits::default(), memory };
        let limits = Limits::default();
        use Memory::{With, Without};
        let compared = |pinned, has, wanted| mismatch(&meta(pinned, has), &self::pinned(), limits, wanted);
        assert_eq!(compared(pinned(), With, With), None);
        assert_eq!(compared(pinned(), With, Without), None, "a restart needs its disk alone");
        assert_eq!(compared(pinned(), Without, Without), None);
        assert_eq!(compared(pinned(), Without, With), Some(Mismatch::NoMemory));
        let [had, has] = [other, pinned().agent].map(|agent| agent.to_string());
        let cases = [
            (Pinned { rootfs: other, ..pinned() }, Mismatch::Other("root file system"), true),
            (Pinned { agent: other, ..pinned() }, Mismatch::Pinned("the agent", had, has), false),
            (
                Pinned { runsc: "2".into(), ..pinned() },
                Mismatch::Pinned("runsc", "2".into(), "1".into()),
                false,
            ),
        ];
        for (had, expected, also_for_its_disk) in cases {
            let expected = Some(expected);
            assert_eq!(compared(had.clone(), With, With), expected);
            assert_eq!(compared(had, Without, Without), expected.filter(|_| also_for_its_disk));
        }
        let text = r#"{"cpus":1,"memory_mib":512,"disk_mib":1024,"processes":100}"#;
        let smaller = serde_json::from_str(text).unwrap();
        for memory in [With, Without] {
            let expected = Some(Mismatch::Other("set of limits"));
            assert_eq!(mismatch(&meta(pinned(), memory), &pinned(), smaller, memory), expected);
        }
        // As those were written that knew of no other.
        let mut text = serde_json::to_value(meta(pinned(), With)).unwrap();
        text.as_object_mut().unwrap().remove("memory");
        assert_eq!(serde_json::from_value::<Meta>(text).unwrap().memory, With);
    }

    #[test]
    fn a_full_disk_is_known_by_what_is_said_of_it() {
        let said = |said: &str| matches!(unwritten(step("checkpoint", said)), EngineError::NoRoom { .. });
        assert!(said("save failed: write /x/checkpoint.img: no space left on device"));
        assert!(!said("deleted and invalidated dentries can't be restored"));
    }

    #[test]
    fn an_unfinished_image_leaves_nothing_and_a_finished_one_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        drop(Unfinished::begin(dir.path()).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let target = dir.path().join("a");
        for expected in [true, false] {
            let unfinished = Unfinished::begin(dir.path()).unwrap();
            unfinished.image().describe(pinned(), Limits::default(), Memory::With).unwrap();
            assert_eq!(unfinished.finish(&target, Keep::Flushed).is_ok(), expected);
        }
        Source::Image(Image::at(target)).check(&pinned(), Limits::default()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        remove(dir.path(), &dir.path().join("a")).unwrap();
        remove(dir.path(), &dir.path().join("a")).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        std::fs::create_dir(dir.path().join("b")).unwrap();
        // A host that died did not get to tidy up.
        std::mem::forget(Unfinished::begin(dir.path()).unwrap());
        sweep(dir.path()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
