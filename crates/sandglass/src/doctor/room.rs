//! Memory, disk, open files and processes: how much of each there is.

use std::path::Path;

use rustix::fs::{StatVfs, statvfs};
use rustix::process::{Resource, getrlimit};

use super::check::Check;
use crate::startup::Reason;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// With less, not even one sandbox has room: bytes of memory and of disk, and inodes.
const LEAST_MEMORY: u64 = 256 * MIB;
const LEAST_DISK: u64 = 64 * MIB;
const LEAST_INODES: u64 = 1000;

/// With less, there is room for few: bytes of memory and of disk, inodes, open files of a process, and processes.
const LITTLE_MEMORY: u64 = 2 * GIB;
const LITTLE_DISK: u64 = 2 * GIB;
const LITTLE_INODES: u64 = 100_000;
const LITTLE_FILES: u64 = 1 << 20;
const LITTLE_PROCESSES: u64 = 16 << 10;

/// What was found.
#[derive(Debug)]
pub(super) struct Facts {
    /// Bytes that programs can have.
    memory: Option<u64>,
    data: Option<Space>,
    cache: Option<Space>,
    /// Most descriptors that root may allow a process.
    files: Option<u64>,
    /// Most processes and threads, by what limits them.
    processes: Vec<(&'static str, u64)>,
}

/// What is free of a file system.
#[derive(Debug, Clone, Copy)]
struct Space {
    bytes: u64,
    /// `None` if it makes as many as it needs.
    inodes: Option<u64>,
}

impl From<StatVfs> for Space {
    fn from(system: StatVfs) -> Self {
        Self {
            bytes: system.f_bavail.saturating_mul(system.f_frsize),
            inodes: (system.f_files > 0).then_some(system.f_favail),
        }
    }
}

pub(super) fn look(data: &Path, cache: &Path) -> Facts {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let number = |path: &str| read(path)?.trim().parse().ok();
    let space = |path: &Path| statvfs(path).ok().map(Space::from);
    let own = read("/proc/self/cgroup").unwrap_or_default();
    let limits = [
        ("kernel.pid_max", number("/proc/sys/kernel/pid_max")),
        ("kernel.threads-max", number("/proc/sys/kernel/threads-max")),
        ("RLIMIT_NPROC", getrlimit(Resource::Nproc).current),
        ("pids.max of this control group", pids_max(&own).and_then(|path| number(&path))),
    ];
    Facts {
        memory: read("/proc/meminfo").as_deref().and_then(available),
        data: space(data),
        cache: space(cache),
        files: number("/proc/sys/fs/nr_open"),
        processes: limits.into_iter().filter_map(|(name, limit)| Some((name, limit?))).collect(),
    }
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    rest.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Where the process limit of the own group is, from `/proc/self/cgroup`: `pids` on version 1, line 0 on version 2.
fn pids_max(own: &str) -> Option<String> {
    let mut lines = own.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
    let pids = lines
        .clone()
        .find(|line| line.get(1).is_some_and(|names| names.split(',').any(|name| name == "pids")));
    let (folder, line) = match pids {
        Some(line) => ("/pids", line),
        None => ("", lines.find(|line| line.first() == Some(&"0"))?),
    };
    Some(format!("{}{folder}{}/pids.max", sandglass_linux::cgroup::ROOT, line.get(2)?))
}

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![memory(facts.memory)];
    checks.extend(facts.data.map(|space| disk("data folder", Reason::DataFull, space)));
    checks.extend(facts.cache.map(|space| disk("cache folder", Reason::CacheFull, space)));
    checks.extend(facts.files.map(open_files));
    checks.extend(facts.processes.iter().min_by_key(|(_, limit)| *limit).map(processes));
    checks
}

fn memory(bytes: Option<u64>) -> Check {
    const NAME: &str = "memory";
    let Some(bytes) = bytes else { return Check::note(NAME, "the kernel does not say how much is free") };
    let found = format!("{} MiB are free", bytes / MIB);
    if bytes < LEAST_MEMORY {
        Check::bad(NAME, Reason::NoRoom, found)
    } else if bytes < LITTLE_MEMORY {
        Check::note(NAME, found).with_remedy("a sandbox takes 40 MiB when idle, and may take 1 GiB and more")
    } else {
        Check::good(NAME, found)
    }
}

fn disk(name: &'static str, full: Reason, space: Space) -> Check {
    let inodes = space.inodes.unwrap_or(u64::MAX);
    let found = match space.inodes {
        Some(inodes) => format!("{} MiB and {inodes} inodes are free", space.bytes / MIB),
        None => format!("{} MiB are free", space.bytes / MIB),
    };
    if space.bytes < LEAST_DISK || inodes < LEAST_INODES {
        Check::bad(name, full, found)
    } else if space.bytes < LITTLE_DISK || inodes < LITTLE_INODES {
        Check::note(name, found).with_remedy("give its file system more, before sandboxes use it up")
    } else {
        Check::good(name, found)
    }
}

fn open_files(limit: u64) -> Check {
    const NAME: &str = "open files";
    let found = format!("a process may have {limit}");
    if limit < LITTLE_FILES {
        let remedy = format!("`sysctl fs.nr_open={LITTLE_FILES}`: a sandbox needs two for each file in it");
        Check::note(NAME, found).with_remedy(remedy)
    } else {
        Check::good(NAME, found)
    }
}

fn processes(&(name, limit): &(&'static str, u64)) -> Check {
    let found = format!("{limit}, by {name}");
    if limit < LITTLE_PROCESSES {
        Check::note("processes", found)
            .with_remedy("raise it: a sandbox has about 30 threads when idle, and up to 1,226 when busy")
    } else {
        Check::good("processes", found)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::{Bad, Good, Note};
    use super::*;

    fn good() -> Facts {
        let space = Some(Space { bytes: 100 * GIB, inodes: Some(1_000_000) });
        let processes = vec![("kernel.pid_max", 4_194_304), ("kernel.threads-max", 192_730)];
        Facts { memory: Some(16 * GIB), data: space, cache: space, files: Some(1 << 20), processes }
    }

    #[test]
    fn too_little_is_bad_and_little_is_noted() {
        let all_good = judge(&good());
        assert!(all_good.iter().all(|check| check.verdict() == Good), "{all_good:?}");
        let space = |bytes, inodes| Some(Space { bytes, inodes });
        let cases = [
            ("memory", Bad, Facts { memory: Some(100 * MIB), ..good() }),
            ("memory", Note, Facts { memory: Some(GIB), ..good() }),
            ("memory", Note, Facts { memory: None, ..good() }),
            ("data folder", Bad, Facts { data: space(0, None), ..good() }),
            ("data folder", Bad, Facts { data: space(GIB, Some(0)), ..good() }),
            ("cache folder", Note, Facts { cache: space(GIB, None), ..good() }),
            ("cache folder", Note, Facts { cache: space(100 * GIB, Some(5000)), ..good() }),
            ("open files", Note, Facts { files: Some(1024), ..good() }),
            ("processes", Note, Facts { processes: vec![("a", 1 << 20), ("b", 500)], ..good() }),
        ];
        for (name, verdict, facts) in cases {
            let checks = judge(&facts);
            let odd: Vec<_> = checks.iter().filter(|check| check.verdict() != Good).collect();
            assert_eq!(odd.len(), 1, "{facts:?}");
            assert_eq!((odd[0].name(), odd[0].verdict()), (name, verdict), "{facts:?}");
        }
    }

    #[test]
    fn files_of_the_kernel_are_read_as_documented() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        assert_eq!(available("MemAvailable: many\n"), None);
        let path = |own| pids_max(own).unwrap();
        assert_eq!(path("0::/system.slice/x.service\n"), "/sys/fs/cgroup/system.slice/x.service/pids.max");
        assert_eq!(path("9:cpu:/\n8:pids:/a:b\n0::/\n"), "/sys/fs/cgroup/pids/a:b/pids.max");
        assert_eq!(pids_max(""), None);
    }
}
