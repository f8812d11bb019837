//! What images and disks take on the file system of the data folder, where files may share blocks.
//!
//! The file system says of each extent whether anybody shares it, and where it is, but not who the others are. So it is known
//! what a file has for itself, and what several files take together.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use sandglass_linux::extents::{Extent, Extents};
use sandglass_types::SandboxId;
use serde::{Deserialize, Serialize};

/// Extents that are looked at for one file, and for all of one question. A guest that writes here and there makes as many in
/// its disk as that has blocks.
const MOST_OF_FILE: usize = 1 << 16;
const MOST: usize = 1 << 18;

/// How long one question may take: some file systems search for who shares an extent.
const PATIENCE: Duration = Duration::from_secs(2);

/// What is kept under one id takes so much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// All blocks of its files, in bytes, also those that others share.
    pub bytes: u64,
    /// The blocks that nobody shares, in bytes: at least so much is free once it is removed.
    pub unique_bytes: u64,
    /// Whether all of it was looked at. What was not counts as shared.
    pub exact: bool,
    /// Whether it is an image that is compressed: then these are the bytes of that.
    pub compressed: bool,
}

/// What is kept under some ids.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Footprints {
    /// Each by itself; what is not there is missing.
    pub each: BTreeMap<SandboxId, Footprint>,
    /// All of them together, in bytes: blocks that they share with each other are counted once.
    pub together: u64,
}

impl Footprints {
    /// Adds others. What both share is counted for both.
    pub(crate) fn append(&mut self, mut others: Self) {
        self.each.append(&mut others.each);
        self.together += others.together;
    }
}

/// A run of blocks that somebody shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Run {
    /// Of the file system.
    device: u64,
    start: u64,
    len: u64,
}

/// How much may still be looked at.
struct Budget {
    extents: usize,
    until: Instant,
}

/// Measures the files and folders of each id. What vanishes meanwhile is not there.
pub(crate) fn measure(all: impl Iterator<Item = (SandboxId, Vec<PathBuf>)>) -> io::Result<Footprints> {
    let mut budget = Budget { extents: MOST, until: Instant::now() + PATIENCE };
    let mut shared = Vec::new();
    let mut footprints = Footprints::default();
    for (id, paths) in all {
        let mut footprint = None;
        for path in paths {
            add(&path, &mut budget, &mut shared, &mut footprint)?;
        }
        footprints.each.extend(footprint.map(|footprint| (id, footprint)));
    }
    let sum: u64 = footprints.each.values().map(|footprint| footprint.bytes).sum();
    footprints.together = sum.saturating_sub(counted_again(&mut shared));
    Ok(footprints)
}

/// Measures one file.
pub(crate) fn of_file(path: &Path) -> io::Result<Footprint> {
    file(path, &mut Budget { extents: MOST, until: Instant::now() + PATIENCE }, &mut Vec::new())
}

/// Adds a file, or all that is in a folder.
fn add(
    path: &Path,
    budget: &mut Budget,
    shared: &mut Vec<Run>,
    sum: &mut Option<Footprint>,
) -> io::Result<()> {
    let found = fs_err::symlink_metadata(path);
    let Some(meta) = there(found)? else { return Ok(()) };
    let sum_so_far =
        sum.get_or_insert(Footprint { bytes: 0, unique_bytes: 0, exact: true, compressed: false });
    if meta.is_dir() {
        let Some(entries) = there(fs_err::read_dir(path))? else { return Ok(()) };
        for entry in entries {
            add(&entry?.path(), budget, shared, sum)?;
        }
    } else if meta.is_file() {
        let Some(of_file) = there(file(path, budget, shared))? else { return Ok(()) };
        sum_so_far.bytes += of_file.bytes;
        sum_so_far.unique_bytes += of_file.unique_bytes;
        sum_so_far.exact &= of_file.exact;
    }
    Ok(())
}

fn there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

fn file(path: &Path, budget: &mut Budget, shared: &mut Vec<Run>) -> io::Result<Footprint> {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default();
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    // The kernel counts units of 512 bytes whatever the block size is.
    let bytes = meta.blocks() * 512;
    let mut extents = Extents::of(file);
    let mut sum = Sum::default();
    while sum.looked_at < MOST_OF_FILE && budget.extents > 0 && Instant::now() < budget.until {
        let batch = match extents.next_batch() {
            Ok(batch) => batch,
            // Then it shares none either, as far as anybody can tell.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Vec::new(),
            Err(error) => return Err(error),
        };
        if batch.is_empty() {
            return Ok(sum.whole(bytes));
        }
        budget.extents = budget.extents.saturating_sub(batch.len());
        for extent in batch {
            shared.extend(sum.add(extent, meta.dev()));
        }
    }
    Ok(sum.cut_off(bytes))
}

/// The extents of a file so far.
#[derive(Debug, Default)]
struct Sum {
    looked_at: usize,
    unique: u64,
    shared: u64,
}

impl Sum {
    /// Adds one. Returns where it is if it is shared.
    fn add(&mut self, extent: Extent, device: u64) -> Option<Run> {
        self.looked_at += 1;
        let Extent { physical, len, shared } = extent;
        if !shared {
            self.unique += len;
            return None;
        }
        self.shared += len;
        physical.map(|start| Run { device, start, len })
    }

    /// There are no more. What the file takes besides, to know where its extents are, is its own.
    fn whole(&self, bytes: u64) -> Footprint {
        Footprint { bytes, unique_bytes: bytes.saturating_sub(self.shared), exact: true, compressed: false }
    }

    /// There may be more.
    fn cut_off(&self, bytes: u64) -> Footprint {
        Footprint { bytes, unique_bytes: self.unique.min(bytes), exact: false, compressed: false }
    }
}

/// The bytes that are in more than one run, as often as they are so after the first time.
fn counted_again(runs: &mut [Run]) -> u64 {
    runs.sort_unstable();
    let (mut again, mut before): (u64, Option<(u64, u64)>) = (0, None);
    for run in runs.iter() {
        let end = run.start.saturating_add(run.len);
        let seen = before.filter(|(device, _)| *device == run.device).map_or(0, |(_, end)| end);
        again += seen.min(end).saturating_sub(run.start);
        before = Some((run.device, seen.max(end)));
    }
    again
}

#[cfg(test)]
mod tests;
