//! What no image of a sandbox's memory can hold: files on its disk that a program still has, though they were deleted.
//!
//! The engine refuses such an image as a whole, and does not say whose fault it was. So whoever is about to make one asks
//! here first. A look can't be complete, because programs run on meanwhile; what it overlooks, the engine refuses.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sandglass_proto::control::Holder;

/// Holders that are named.
pub(crate) const MAX_HOLDERS: usize = 8;

/// Bytes of a name that are told.
const MAX_NAME: usize = 256;

/// How long a look may take: a program with a million files must not make it last.
pub(crate) const LOOK_TIME: Duration = Duration::from_secs(2);

/// Bytes that are read of what a process has mapped.
pub(crate) const MAX_MAPS: u64 = 4 << 20;

/// How the kernel ends the name of what was deleted (proc_pid_fd(5)).
const DELETED: &[u8] = b" (deleted)";

/// The disks of a sandbox: file systems that its engine serves from outside. What is deleted on one in memory stays in
/// that memory, and so in an image of it.
pub(crate) const OUTSIDE: &str = "9p";

/// Device numbers of file systems.
pub(crate) type Devices = BTreeSet<(u32, u32)>;

/// Device numbers of the file systems of this kind, of the text of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
pub(crate) fn devices_of(mountinfo: &str, kind: &str) -> Devices {
    let device = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
        (file_system.split(' ').next() == Some(kind)).then_some((major.parse().ok()?, minor.parse().ok()?))
    };
    mountinfo.lines().filter_map(device).collect()
}

/// The file of a line of `/proc/PID/maps` (proc_pid_maps(5)), if it was deleted, and its device.
fn deleted_in_map(line: &str) -> Option<((u32, u32), &str)> {
    let Mapped { device, name, .. } = mapped_file(line)?;
    let name = name.as_bytes().strip_suffix(DELETED)?;
    Some((device, std::str::from_utf8(name).ok()?))
}

/// A file that a process has mapped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapped<'a> {
    pub(crate) device: (u32, u32),
    pub(crate) inode: u64,
    pub(crate) name: &'a str,
}

/// The file of such a line.
pub(crate) fn mapped_file(line: &str) -> Option<Mapped<'_>> {
    let mut rest = line;
    let mut fields = std::iter::from_fn(|| {
        let (field, after) = rest.trim_start().split_once(' ')?;
        rest = after;
        Some(field)
    });
    let (major, minor) = fields.nth(3)?.split_once(':')?;
    let inode = fields.next()?.parse().ok()?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let name = rest.trim_start();
    (!name.is_empty()).then_some(Mapped { device: (number(major)?, number(minor)?), inode, name })
}

/// Everything that a program has of the disks though it was deleted, as far as can be seen, of all processes but this one.
/// Blocks.
pub(crate) fn holders() -> Vec<Holder> {
    let until = Instant::now() + LOOK_TIME;
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let disks = devices_of(&mountinfo, OUTSIDE);
    let own = std::process::id().to_string();
    let mut holders = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        if holders.len() >= MAX_HOLDERS || Instant::now() > until {
            break;
        }
        let Some(pid) = process.file_name().to_str().filter(|name| *name != own).and_then(|n| n.parse().ok())
        else {
            continue;
        };
        let of_this = held(&process.path(), &disks, until);
        if of_this.is_empty() {
            continue;
        }
        let program = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        let room = MAX_HOLDERS - holders.len();
        holders.extend(of_this.into_iter().take(room).map(|file| Holder {
            pid,
            program: shortened(program.trim_end()),
            file: shortened(&file),
        }));
    }
    holders
}

/// The names of what a process has.
fn held(process: &Path, disks: &Devices, until: Instant) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let links = ["cwd", "root", "exe"].map(|link| process.join(link)).into_iter();
    for link in links.chain(files.map(|file| file.path())) {
        if found.len() >= MAX_HOLDERS || Instant::now() > until {
            break;
        }
        found.extend(deleted_at(&link, disks));
    }
    let mut maps = Vec::new();
    let _ = File::open(process.join("maps")).and_then(|file| file.take(MAX_MAPS).read_to_end(&mut maps));
    let mapped = String::from_utf8_lossy(&maps);
    let mapped = mapped.lines().filter_map(deleted_in_map).filter(|(device, _)| disks.contains(device));
    found.extend(mapped.map(|(_, name)| name.to_owned()).take(MAX_HOLDERS));
    found
}

/// What a link of `/proc` leads to, if that was deleted from a disk.
fn deleted_at(link: &Path, disks: &Devices) -> Option<String> {
    let target: OsString = std::fs::read_link(link).map(PathBuf::into_os_string).ok()?;
    let name = target.as_bytes().strip_suffix(DELETED)?;
    // A file may as well be called so.
    let device = std::fs::metadata(link).ok()?.dev();
    let device = (rustix::fs::major(device), rustix::fs::minor(device));
    let is_there = std::fs::symlink_metadata(&target).is_ok();
    (disks.contains(&device) && !is_there).then(|| String::from_utf8_lossy(name).into_owned())
}

pub(crate) fn shortened(text: &str) -> String {
    let end = (0..=MAX_NAME.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_disks_are_told_from_what_is_in_memory() {
        let text = "1 0 0:17 / / rw - 9p none rw\n2 1 0:20 / /tmp rw shared:1 - 9p none rw\n\
                    3 1 0:24 / /dev/shm rw - tmpfs none rw\nodd\n4 1 x:y / / rw - 9p none rw\n";
        assert_eq!(devices_of(text, OUTSIDE), Devices::from([(0, 17), (0, 20)]));
    }

    #[test]
    fn what_is_mapped_and_deleted_is_found() {
        let line = "7ea247e1d000-7ea247e1e000 rw-s 00000000 00:11 484           /home/user/my file (deleted)";
        assert_eq!(deleted_in_map(line), Some(((0, 17), "/home/user/my file")));
        assert_eq!(deleted_in_map(line.trim_end_matches(" (deleted)")), None);
        assert_eq!(deleted_in_map("7ea247b0b000-7ea247b0d000 rw-p 00000000 00:00 0 "), None);
    }

    #[test]
    fn long_names_are_cut_between_characters() {
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened(&"\u{fc}".repeat(200)).len(), MAX_NAME);
        assert_eq!(shortened(&format!("a{}", "\u{fc}".repeat(200))).len(), MAX_NAME - 1);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in ".{0,200}") {
            let _ = deleted_in_map(&text);
            let _ = devices_of(&text, OUTSIDE);
        }
    }
}
