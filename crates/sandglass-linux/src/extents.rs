//! Where the data of a file is on its disk, as far as the file system tells (`Documentation/filesystems/fiemap.rst`).

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// `_IOWR('f', 11, struct fiemap)` of `linux/fs.h`.
const FS_IOC_FIEMAP: libc::Ioctl = 0xC020_660B_u32 as libc::Ioctl;

const LAST: u32 = 0x1;
/// Where it is is not known yet: `FIEMAP_EXTENT_UNKNOWN`, with or without `FIEMAP_EXTENT_DELALLOC`.
const UNKNOWN: u32 = 0x2;
const SHARED: u32 = 0x2000;

/// Extents that are asked for at one time.
const BATCH: usize = 512;

/// `struct fiemap_extent` of `linux/fiemap.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap`, with room for what it finds.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [RawExtent; BATCH],
}

/// A run of bytes of a file that lie beside each other on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins on the disk, in bytes; `None` while the kernel has not decided.
    pub physical: Option<u64>,
    /// How long it is, in bytes.
    pub len: u64,
    /// Whether another file, or another place of this one, has the same blocks.
    pub shared: bool,
}

/// The extents of a file, some hundreds at a time. Nothing is written to the disk for it.
#[derive(Debug)]
pub struct Extents<F> {
    file: F,
    /// Where the next ones begin in the file; `None` after the last.
    next: Option<u64>,
}

impl<F: AsFd> Extents<F> {
    /// Those of this file, from its beginning.
    pub const fn of(file: F) -> Self {
        Self { file, next: Some(0) }
    }

    /// The next ones; empty after the last.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if the file system does not tell.
    pub fn next_batch(&mut self) -> io::Result<Vec<Extent>> {
        let Some(start) = self.next else { return Ok(Vec::new()) };
        let none =
            RawExtent { logical: 0, physical: 0, length: 0, reserved64: [0; 2], flags: 0, reserved: [0; 3] };
        let mut request = Box::new(Request {
            start,
            length: u64::MAX - start,
            flags: 0,
            mapped_extents: 0,
            extent_count: u32::try_from(BATCH).map_err(io::Error::other)?,
            reserved: 0,
            extents: [none; BATCH],
        });
        // SAFETY: the kernel reads and writes one `fiemap` with `extent_count` extents behind it; that is what `Request` is.
        if unsafe { libc::ioctl(self.file.as_fd().as_raw_fd(), FS_IOC_FIEMAP, &raw mut *request) } != 0 {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EBADR | libc::EINVAL) => {
                    io::ErrorKind::Unsupported.into()
                }
                _ => error,
            });
        }
        let found = usize::try_from(request.mapped_extents).unwrap_or(BATCH).min(BATCH);
        let found = &request.extents[..found];
        let end = |extent: &RawExtent| extent.logical.saturating_add(extent.length);
        // One that does not lead on would be found for ever.
        let next = found.last().filter(|last| last.flags & LAST == 0).map(end);
        self.next = next.filter(|next| *next > start);
        Ok(found
            .iter()
            .map(|raw| Extent {
                physical: (raw.flags & UNKNOWN == 0).then_some(raw.physical),
                len: raw.length,
                shared: raw.flags & SHARED != 0,
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use super::*;

    fn all(file: &File) -> Vec<Extent> {
        let mut extents = Extents::of(file);
        std::iter::from_fn(|| Some(extents.next_batch().unwrap()).filter(|batch| !batch.is_empty()))
            .flatten()
            .collect()
    }

    #[test]
    fn all_extents_of_a_file_are_found_also_those_of_the_second_batch() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(all(&file), []);
        let pieces = BATCH + BATCH / 2;
        for piece in 0..pieces {
            // A hole behind each, so that none can be joined to the one before.
            file.write_all_at(&[1; 4096], u64::try_from(piece).unwrap() * 16384).unwrap();
        }
        file.sync_all().unwrap();
        let found = all(&file);
        assert_eq!(found.len(), pieces);
        assert!(found.iter().all(|extent| extent.len == 4096 && extent.physical.is_some()), "{found:?}");
    }

    #[test]
    fn what_has_no_extents_says_so() {
        let error = Extents::of(File::open("/proc/version").unwrap()).next_batch().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    }
}
