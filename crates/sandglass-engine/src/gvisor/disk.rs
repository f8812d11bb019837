//! Disks of sandboxes: sparse files, copied from blank ones that were formatted once.

use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use rustix::fs::{SeekFrom, ioctl_ficlone, seek};
use rustix::io::Errno;
use sandglass_linux::process::{Launch, run};

use super::cache;
use super::paths::HostPaths;
use crate::engine::{EngineError, step};

/// Changes whenever what is in a blank disk does, so that older ones are not used any more.
const FORMAT: &str = "v2";

/// The folder on the disk that is the upper layer of the root file system.
pub(super) const UPPER: &str = "upper";
/// The folder that overlayfs works in.
pub(super) const WORK: &str = "work";
/// The folder that is the guest's `/tmp`.
pub(super) const TMP: &str = "tmp";

/// How a disk begins.
const CONTENT: [(&str, u32); 3] = [(UPPER, 0o755), (WORK, 0o755), (TMP, 0o1777)];

/// How a disk is mounted. Nothing on it outlives a crash of the machine, so nothing is ordered or flushed for
/// one; the inode tables are zero already, because a new file is.
pub(super) const MOUNT_OPTIONS: &str =
    "data=writeback,nobarrier,noinit_itable,noauto_da_alloc,errors=remount-ro";

/// Bytes that are copied at one time where the kernel can't copy by itself.
const COPY_BUFFER: usize = 1 << 20;

/// `mkfs.ext4` of the largest disk takes some seconds.
const MKFS_TIMEOUT: Duration = Duration::from_secs(60);

/// Puts a blank disk of this size at `target`, which must not exist. `NoRoom` when the file system is full.
pub(super) fn blank(paths: &HostPaths, mib: u32, target: &Path) -> Result<(), EngineError> {
    let source = formatted(paths, mib)?;
    copy(&source, target, None).map_err(|error| step("copy a blank disk", error))
}

/// The blank disk of this size, made now if there is none.
fn formatted(paths: &HostPaths, mib: u32) -> Result<PathBuf, EngineError> {
    let failed = |error: io::Error| step("format a blank disk", error);
    let dir = paths.disks();
    let target = dir.join(format!("{mib}-{FORMAT}.img"));
    if target.exists() {
        return Ok(target);
    }
    let _nobody_sweeps = cache::share(&paths.cache).map_err(failed)?;
    fs_err::create_dir_all(&dir).map_err(failed)?;
    // Made aside and renamed: several instances may be at it, and each renames a whole one.
    let aside = tempfile::Builder::new().prefix(cache::MAKING).tempdir_in(&dir).map_err(failed)?;
    let image = aside.path().join("disk.img");
    let file =
        fs_err::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&image).map_err(failed)?;
    file.set_len(u64::from(mib) << 20).map_err(failed)?;
    format(&image, aside.path(), &CONTENT)?;
    // Before the rename, so that a crash of the machine can't leave an empty file under the final name.
    file.sync_all().map_err(failed)?;
    fs_err::rename(&image, &target).map_err(failed)?;
    Ok(target)
}

/// Puts an ext4 file system on a file that has its size already, and these folders on it, which are made in `dir` first.
pub(super) fn format(image: &Path, dir: &Path, folders: &[(&str, u32)]) -> Result<(), EngineError> {
    let failed = |error: io::Error| step("format a blank disk", error);
    let content = dir.join("content");
    for (name, mode) in folders {
        let path = content.join(name);
        fs_err::create_dir_all(&path).map_err(failed)?;
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(*mode)).map_err(failed)?;
    }
    // A journal, also where nothing is ever recovered: without one, ext4 searches for recently deleted inodes on
    // every create, which is many times slower.
    let launch = Launch::new("/usr/sbin/mkfs.ext4")
        .and_then(|launch| {
            // Without room to grow, most of what a blank disk holds is gone, and every sandbox copies that.
            let launch = launch.args(["-q", "-F", "-b", "4096", "-m", "0", "-J", "size=4"])?;
            launch.args(["-O", "^resize_inode"])?.args([
                "-E",
                "nodiscard,lazy_itable_init=1,root_owner=0:0",
                "-d",
            ])
        })
        .and_then(|launch| launch.arg(&content)?.arg(image)?.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))
        .map_err(|error| step("format a blank disk", error))?;
    let output = run(launch, b"", MKFS_TIMEOUT, 4096).map_err(|error| step("format a blank disk", error))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(step("format a blank disk", format!("mkfs.ext4 ended with {}: {said}", output.status)));
    }
    Ok(())
}

/// Copies a sparse file by sharing its blocks where the file system can, else by its data without its holes; that only if
/// it is no more than `most` bytes.
pub(super) fn copy(source: &Path, target: &Path, most: Option<u64>) -> io::Result<()> {
    let from = fs_err::File::open(source)?;
    let to = fs_err::OpenOptions::new().write(true).create_new(true).mode(0o600).open(target)?;
    match ioctl_ficlone(&to, &from) {
        Ok(()) => return Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::XDEV | Errno::INVAL | Errno::NOSYS) => {}
        Err(errno) => return Err(errno.into()),
    }
    let metadata = from.metadata()?;
    let len = metadata.len();
    // `st_blocks` counts units of 512 bytes whatever the block size is.
    let data = metadata.blocks() * 512;
    if let Some(most) = most.filter(|most| data > *most) {
        let said = format!("{data} bytes are more than {most}, and this file system can't share them");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, said));
    }
    to.set_len(len)?;
    each_run(&from, len, |start, end| copy_range(&from, &to, start, end))
}

/// Does something with each run of data of a file of this length, from its beginning to its end, and leaves out the holes.
pub(super) fn each_run<E: From<io::Error>>(
    file: &fs_err::File,
    len: u64,
    mut each: impl FnMut(u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    let mut at = 0;
    while at < len {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data from here on.
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        let end = seek(file, SeekFrom::Hole(start)).map_err(io::Error::from)?;
        each(start, end)?;
        at = end;
    }
    Ok(())
}

/// Copies one stretch of data, in the kernel where it can: between two kinds of file systems it can't.
fn copy_range(from: &fs_err::File, to: &fs_err::File, mut at: u64, end: u64) -> io::Result<()> {
    while at < end {
        let (mut read_at, mut write_at) = (at, at);
        let room = usize::try_from(end - at).unwrap_or(usize::MAX);
        let n = match rustix::fs::copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), room) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => n,
            Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                return copy_bytes(from, to, at, end);
            }
            Err(errno) => return Err(errno.into()),
        };
        at += u64::try_from(n).map_err(io::Error::other)?;
    }
    Ok(())
}

fn copy_bytes(from: &fs_err::File, to: &fs_err::File, mut at: u64, end: u64) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BUFFER];
    while at < end {
        let room = usize::try_from(end - at).unwrap_or(COPY_BUFFER).min(COPY_BUFFER);
        let n = from.file().read_at(&mut buffer[..room], at)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        to.file().write_all_at(&buffer[..n], at)?;
        at += u64::try_from(n).map_err(io::Error::other)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_keeps_the_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let file = std::fs::File::create(&a).unwrap();
        file.set_len(1 << 30).unwrap();
        file.write_all_at(b"first", 0).unwrap();
        file.write_all_at(b"second", 512 << 20).unwrap();
        copy(&a, &b, None).unwrap();
        let copied = std::fs::File::open(&b).unwrap();
        let mut found = [0; 6];
        copied.read_exact_at(&mut found, 512 << 20).unwrap();
        assert_eq!(&found, b"second");
        let meta = copied.metadata().unwrap();
        assert_eq!(meta.len(), 1 << 30);
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
        assert_eq!(meta.permissions().mode() & 0o777, 0o600);
        assert_eq!(copy(&a, &b, None).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn a_copy_may_go_to_another_file_system() {
        let (here, there) =
            (tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        let (a, b) = (here.path().join("a"), there.path().join("b"));
        let device = |path: &Path| std::fs::metadata(path).unwrap().dev();
        assert_ne!(device(here.path()), device(there.path()), "both folders are on one file system");
        let file = std::fs::File::create(&a).unwrap();
        file.set_len(64 << 20).unwrap();
        // Longer than the buffer, and with an end inside of it.
        let data: Vec<u8> = (0..COPY_BUFFER + 5000).map(|n| n.to_le_bytes()[1]).collect();
        file.write_all_at(&data, 32 << 20).unwrap();
        copy(&a, &b, None).unwrap();
        assert!(std::fs::read(&a).unwrap() == std::fs::read(&b).unwrap());
        let blocks = std::fs::metadata(&b).unwrap().blocks();
        assert!(blocks * 512 < 4 << 20, "{blocks} blocks");
    }

    #[test]
    fn an_empty_file_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::File::create(&a).unwrap();
        copy(&a, &b, None).unwrap();
        assert_eq!(std::fs::metadata(&b).unwrap().len(), 0);
    }
}
