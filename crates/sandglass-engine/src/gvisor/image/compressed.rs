//! The other form of an image: what of it nobody shares is compressed, and takes less room until somebody wants it.
//!
//! Either form is put together aside, flushed, and swapped with the one that is there in one step. So under the name of an
//! image there is one of both at any moment, whole; what a dead host left aside is swept by the next one.
//!
//! Blocks that other files share cost nothing, and their copy would: what has many of those stays as it is, beside what is
//! compressed, by a second link. `packed.json` says what was what, and what must come out of it.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use serde::{Deserialize, Serialize};

use super::stream::{self, Content, GoOn, Trouble};
use super::{COMPRESSED, Image, Meta, Unfinished, VERSION};
use crate::engine::{Compression, EngineError, Lack, step};
use crate::files::read_small;
use crate::footprint::{self, Footprint};

/// What is smaller stays as it is, in bytes.
const LEAST: u64 = 64 << 10;

/// Files of a checkpoint: `runsc` writes three.
const MOST_FILES: usize = 16;

/// Upper bound of the list of what is compressed, in bytes.
const MAX_LIST_LEN: u64 = 64 * 1024;

/// Whether it may save something to compress a file: if most of its blocks are its own, for those are what becomes free, and
/// all that is in it is what has to be written.
fn worth_trying(file: &Footprint) -> bool {
    file.unique_bytes >= LEAST && file.unique_bytes / 2 >= file.bytes / 4
}

/// How large it may be afterwards, in bytes, so that what is saved is worth the wait of who wants it: an eighth is.
const fn most(file: &Footprint) -> u64 {
    file.unique_bytes - file.unique_bytes / 8
}

/// A file of an image that can be compressed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
enum Part {
    Disk,
    /// A file of this name, which `runsc` wrote.
    Checkpoint(String),
}

impl Part {
    fn path(&self, image: &Image) -> PathBuf {
        match self {
            Self::Disk => image.disk(),
            Self::Checkpoint(name) => image.checkpoint().join(name),
        }
    }
}

/// How the disk is called in the list; it has no letter that the name of a file of a checkpoint has.
const DISK: &str = "/disk";

impl TryFrom<String> for Part {
    type Error = &'static str;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name == DISK {
            Ok(Self::Disk)
        } else if (1..=64).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain) {
            Ok(Self::Checkpoint(name))
        } else {
            Err("it is no name of a file of an image")
        }
    }
}

impl From<Part> for String {
    fn from(part: Part) -> Self {
        match part {
            Part::Disk => DISK.into(),
            Part::Checkpoint(name) => name,
        }
    }
}

/// A file that is compressed, and what is in it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Packed {
    part: Part,
    content: Content,
}

impl Image {
    fn list_path(&self) -> PathBuf {
        self.0.join("packed.json")
    }

    fn stream_path(&self, number: usize) -> PathBuf {
        self.0.join(format!("{number}.zst"))
    }

    /// Whether it is in this form, as far as can be told at a glance.
    pub(in super::super) fn looks_compressed(&self) -> bool {
        self.list_path().exists()
    }

    /// The files that memory and disk are in, those that are compressed apart.
    fn parts(&self) -> io::Result<BTreeSet<Part>> {
        let mut parts = BTreeSet::new();
        if self.disk().exists() {
            parts.insert(Part::Disk);
        }
        let checkpoint = self.checkpoint();
        if checkpoint.exists() {
            for entry in fs_err::read_dir(checkpoint)? {
                let entry = entry?;
                let name = entry.file_name().into_string().unwrap_or_default();
                let part = Part::try_from(name).map_err(io::Error::other)?;
                if !entry.file_type()?.is_file() || parts.len() > MOST_FILES {
                    return Err(io::Error::other("the checkpoint has other files than it should"));
                }
                parts.insert(part);
            }
        }
        Ok(parts)
    }

    /// What is compressed in it.
    fn list(&self) -> Result<Vec<Packed>, EngineError> {
        let text =
            read_small(&self.list_path(), MAX_LIST_LEN).map_err(|error| step("read the image", error))?;
        let list: Option<Vec<Packed>> = text.and_then(|text| serde_json::from_slice(&text).ok());
        let distinct = |list: &Vec<Packed>| list.iter().map(|one| &one.part).collect::<BTreeSet<_>>().len();
        list.filter(|list| list.len() <= MOST_FILES && distinct(list) == list.len())
            .ok_or_else(|| damaged("packed.json", "it can't be read"))
    }

    /// Makes the folder of the checkpoint if `of` has one.
    fn begin_like(&self, of: &Self) -> io::Result<()> {
        if of.checkpoint().exists() { fs_err::create_dir(self.checkpoint()) } else { Ok(()) }
    }

    /// Has a file of another image as well, without a copy.
    fn link(&self, part: &Part, of: &Self) -> io::Result<()> {
        fs_err::hard_link(part.path(of), part.path(self))
    }
}

fn new_file(path: &Path) -> io::Result<fs_err::File> {
    fs_err::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn damaged(file: &str, what: &str) -> EngineError {
    EngineError::Damaged { what: format!("{file}: {what}") }
}

/// Refuses to begin what could fill the file system: others want to write there as well, and the store does.
fn room_for(images: &Path, bytes: u64, doing: &'static str) -> Result<(), EngineError> {
    let system = rustix::fs::statvfs(images).map_err(|errno| step(doing, io::Error::from(errno)))?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    if free > bytes {
        return Ok(());
    }
    let source = format!("it takes {bytes} bytes, and {free} are free").into();
    Err(EngineError::NoRoom { lack: Lack::Disk, step: doing, source })
}

const COMPRESSING: &str = "compress the image";
const EXPANDING: &str = "expand the image";

/// Compresses an image that nobody uses, unless that saves nothing or somebody wants it meanwhile. What was written is read
/// again before what it was made of is given up.
pub(in super::super) fn compress(
    images: &Path,
    target: &Path,
    go_on: GoOn<'_>,
) -> Result<Compression, EngineError> {
    let failed = |error: io::Error| step(COMPRESSING, error);
    let image = Image::at(target.to_owned());
    let meta = image.meta()?;
    match meta.version {
        VERSION => {}
        COMPRESSED => return Ok(Compression::Already),
        _ => return Err(step(COMPRESSING, "it was made with another format")),
    }
    sandglass_failpoint::hit("engine.compress.begin")?;
    let parts = image.parts().map_err(failed)?;
    let mut measured = Vec::new();
    for part in parts {
        let file = footprint::of_file(&part.path(&image)).map_err(failed)?;
        measured.push((part, file));
    }
    let wanted = measured.iter().filter(|(_, file)| worth_trying(file));
    room_for(images, wanted.map(|(_, file)| most(file)).sum(), COMPRESSING)?;
    let mut unfinished = Unfinished::begin(images).map_err(failed)?;
    let packed = unfinished.image();
    packed.begin_like(&image).map_err(failed)?;
    let mut list: Vec<Packed> = Vec::new();
    for (part, file) in measured {
        let stream = packed.stream_path(list.len());
        let written = if worth_trying(&file) {
            let from = fs_err::File::open(part.path(&image)).map_err(failed)?;
            stream::write(&from, new_file(&stream).map_err(failed)?, most(&file), go_on).map(Some)
        } else {
            Ok(None)
        };
        match written {
            Ok(Some(content)) => list.push(Packed { part, content }),
            Ok(None) => packed.link(&part, &image).map_err(failed)?,
            Err(Trouble::TooLarge) => {
                fs_err::remove_file(stream).and_then(|()| packed.link(&part, &image)).map_err(failed)?;
            }
            Err(trouble) => return given_up(trouble, COMPRESSING, "what is compressed"),
        }
    }
    if list.is_empty() {
        return Ok(Compression::NotWorth);
    }
    sandglass_failpoint::hit("engine.compress.verify")?;
    for (number, Packed { content, .. }) in list.iter().enumerate() {
        let stream = fs_err::File::open(packed.stream_path(number)).map_err(failed)?;
        if let Err(trouble) = stream::read(stream, None, content, go_on) {
            return given_up(trouble, COMPRESSING, "what was compressed");
        }
    }
    serde_json::to_vec(&list)
        .map_err(io::Error::from)
        .and_then(|text| fs_err::write(packed.list_path(), text))
        .and_then(|()| packed.write_meta(&Meta { version: COMPRESSED, ..meta }))
        .and_then(|()| unfinished.flush())
        .map_err(failed)?;
    sandglass_failpoint::hit("engine.compress.swap")?;
    if !go_on() {
        return Ok(Compression::GivenUp);
    }
    match unfinished.swap(target) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            return Err(EngineError::Unsupported {
                engine: "gvisor",
                verb: "compress images on this file system",
            });
        }
        // It was removed meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Compression::GivenUp),
        swapped => swapped.map_err(failed)?,
    }
    sandglass_failpoint::hit("engine.compress.swapped")?;
    unfinished.close().map_err(failed)?;
    Ok(Compression::Compressed)
}

fn given_up(trouble: Trouble, doing: &'static str, file: &str) -> Result<Compression, EngineError> {
    match trouble {
        Trouble::Stopped => Ok(Compression::GivenUp),
        trouble => Err(said(trouble, doing, file)),
    }
}

fn said(trouble: Trouble, doing: &'static str, file: &str) -> EngineError {
    match trouble {
        Trouble::Io(error) => step(doing, error),
        Trouble::Damaged(what) => damaged(file, what),
        Trouble::TooLarge | Trouble::Stopped => step(doing, "it was given up"),
    }
}

/// Makes an image that is compressed what it was before. All of it comes out as it went in, or nothing is changed.
pub(in super::super) fn expand(images: &Path, target: &Path) -> Result<(), EngineError> {
    let failed = |error: io::Error| step(EXPANDING, error);
    let image = Image::at(target.to_owned());
    let meta = image.meta()?;
    let list = image.list()?;
    sandglass_failpoint::hit("engine.expand.begin")?;
    room_for(images, list.iter().fold(0, |sum: u64, one| sum.saturating_add(one.content.data)), EXPANDING)?;
    let mut unfinished = Unfinished::begin(images).map_err(failed)?;
    let plain = unfinished.image();
    plain.begin_like(&image).map_err(failed)?;
    for part in image.parts().map_err(failed)? {
        plain.link(&part, &image).map_err(failed)?;
    }
    for (number, Packed { part, content }) in list.iter().enumerate() {
        let name = format!("{number}.zst");
        let stream = match fs_err::File::open(image.stream_path(number)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(damaged(&name, "it is not there"));
            }
            opened => opened.map_err(failed)?,
        };
        let to = new_file(&part.path(plain)).map_err(failed)?;
        stream::read(stream, Some(&to), content, &|| true)
            .map_err(|trouble| said(trouble, EXPANDING, &name))?;
    }
    plain.write_meta(&Meta { version: VERSION, ..meta }).and_then(|()| unfinished.flush()).map_err(failed)?;
    sandglass_failpoint::hit("engine.expand.swap")?;
    unfinished.swap(target).map_err(failed)?;
    sandglass_failpoint::hit("engine.expand.swapped")?;
    unfinished.close().map_err(failed)
}

#[cfg(test)]
mod tests;
