//! Looking at the stage from outside of its sandboxes.

mod counts;

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

pub(super) use counts::{Counts, Kind};

/// Something that a process has open.
#[derive(Debug, Clone, Copy)]
pub(super) enum Held<'a> {
    /// An object of the kernel without a file, as `/proc/PID/fd` names it: `anon_inode:…`.
    Object(&'a str),
    /// A device: whether it is a block device, and its number.
    Device { block: bool, major: u32, minor: u32 },
    /// This file, or one below it, open for writing.
    Writable(&'a Path),
}

/// A process of the machine that holds something, if there is one.
pub(super) fn holder_of(what: Held<'_>) -> std::io::Result<Option<i32>> {
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // It may have ended meanwhile.
        let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        if descriptors.filter_map(Result::ok).any(|descriptor| is(what, pid, &descriptor.path())) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

fn is(what: Held<'_>, pid: i32, descriptor: &Path) -> bool {
    let target = || std::fs::read_link(descriptor).unwrap_or_default();
    match what {
        Held::Object(name) => target() == Path::new(name),
        Held::Device { block, major, minor } => std::fs::metadata(descriptor).is_ok_and(|about| {
            let kind = if block { 0o060_000 } else { 0o020_000 };
            let device = (rustix::fs::major(about.rdev()), rustix::fs::minor(about.rdev()));
            about.mode() & 0o170_000 == kind && device == (major, minor)
        }),
        Held::Writable(path) => target().starts_with(path) && is_writable(pid, descriptor),
    }
}

/// By the flags in `fdinfo`, which are octal (proc_pid_fdinfo(5)).
fn is_writable(pid: i32, descriptor: &Path) -> bool {
    let number = descriptor.file_name().unwrap_or_default();
    let path = PathBuf::from(format!("/proc/{pid}/fdinfo")).join(number);
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok()).is_some_and(|flags| flags & 0o3 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_process_holds_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_eq!(holder_of(Held::Writable(&path)).unwrap(), None);
        let writing = std::fs::File::create(&path).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        assert_eq!(holder_of(Held::Writable(&path)).unwrap(), Some(me));
        assert_eq!(holder_of(Held::Writable(folder.path())).unwrap(), Some(me));
        drop(writing);
        let _reading = std::fs::File::open(&path).unwrap();
        assert_eq!(holder_of(Held::Writable(&path)).unwrap(), None);
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        assert!(is(Held::Object("anon_inode:[eventfd]"), me, &own(&event)));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(is(Held::Device { block: false, major: 1, minor: 3 }, me, &own(&null)));
        assert!(!is(Held::Device { block: true, major: 1, minor: 3 }, me, &own(&null)));
    }

    fn own(fd: &impl std::os::fd::AsRawFd) -> PathBuf {
        format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
    }
}
