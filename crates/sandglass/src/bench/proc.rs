//! What the kernel says of processes: `proc_pid_*(5)` and `Documentation/scheduler/sched-stats.rst`.
//!
//! With [`std::fs`], because what names paths in errors hides the number by which a process is known to have ended.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use anyhow::Context as _;

/// CPU time by process and thread, in nanoseconds.
pub(crate) type CpuTimes = BTreeMap<(i32, i32), u64>;

/// The two processes of a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Halves {
    pub(crate) serve: i32,
    pub(crate) host: i32,
}

impl Halves {
    /// The one that was started, and the privileged one, which is its child.
    pub(crate) fn of(serve: u32) -> anyhow::Result<Self> {
        let serve = i32::try_from(serve)?;
        let is_host = |pid: &i32| {
            let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            arguments.split(|byte| *byte == 0).nth(1) == Some(b"host")
        };
        let host = children(serve)?.into_iter().find(is_host).context("the server has no privileged half")?;
        Ok(Self { serve, host })
    }
}

/// Direct children, of every thread.
fn children(pid: i32) -> io::Result<Vec<i32>> {
    let mut children = Vec::new();
    for thread in numbers(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/children"))?;
        children.extend(text.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    Ok(children)
}

/// What all threads of these processes have run so far. A thread that has ended is not in it any more.
pub(crate) fn cpu_times(pids: &[i32]) -> io::Result<CpuTimes> {
    let mut times = CpuTimes::new();
    for &pid in pids {
        for thread in if_there(numbers(format!("/proc/{pid}/task")))?.unwrap_or_default() {
            let path = format!("/proc/{pid}/task/{thread}/schedstat");
            if let Some(text) = if_there(fs::read_to_string(path))? {
                times.insert((pid, thread), first_number(&text).ok_or(ErrorKind::InvalidData)?);
            }
        }
    }
    Ok(times)
}

/// What was run between two looks, in nanoseconds. What a thread ran that ended in between is not known.
pub(crate) fn ran(before: &CpuTimes, after: &CpuTimes) -> u64 {
    let since = |(thread, time): (&(i32, i32), &u64)| {
        time.saturating_sub(before.get(thread).copied().unwrap_or_default())
    };
    after.iter().map(since).sum()
}

/// The memory of a process, shared pages counted in proportion, in bytes; 0 if it has ended.
pub(crate) fn pss(pid: i32) -> anyhow::Result<u64> {
    match if_there(fs::read_to_string(format!("/proc/{pid}/smaps_rollup")))? {
        // A process that is ending has no memory any more.
        None => Ok(0),
        Some(text) => kib(&text, "Pss:").context("smaps_rollup reads not as documented"),
    }
}

/// The memory of a process that runs, shared pages counted fully, in bytes.
pub(crate) fn rss(pid: i32) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    kib(&text, "VmRSS:").context("status reads not as documented")
}

/// How much memory the machine has left, in bytes.
pub(crate) fn available() -> anyhow::Result<u64> {
    kib(&fs::read_to_string("/proc/meminfo")?, "MemAvailable:").context("meminfo reads not as documented")
}

/// What a process has open: how many of each, by the name that the kernel has for it, such as `socket` or a path.
pub(crate) fn descriptors(pid: i32) -> io::Result<BTreeMap<String, u64>> {
    let mut open = BTreeMap::<String, u64>::new();
    for number in numbers(format!("/proc/{pid}/fd"))? {
        if let Some(target) = if_there(fs::read_link(format!("/proc/{pid}/fd/{number}")))? {
            let target = target.to_string_lossy();
            // `socket:[1234]`: the number says nothing.
            let kind = target
                .split_once(":[")
                .filter(|_| !target.starts_with('/'))
                .map_or(&*target, |(kind, _)| kind);
            *open.entry(kind.to_owned()).or_default() += 1;
        }
    }
    Ok(open)
}

fn numbers(folder: impl AsRef<Path>) -> io::Result<Vec<i32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(folder.as_ref())? {
        numbers.extend(entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(numbers)
}

/// `None` for what has ended.
fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

fn first_number(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// `Field:   123 kB`, in bytes.
fn kib(text: &str, field: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(field))?;
    Some(first_number(rest)? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "Rss:                 900 kB\nPss:                 123 kB\nPss_Dirty:            77 kB\n";
        assert_eq!(kib(text, "Pss:"), Some(123 << 10));
        assert_eq!(kib(text, "Swap:"), None);
        assert_eq!(first_number("123456789 17 4\n"), Some(123_456_789));
        assert_eq!(first_number(""), None);
    }

    #[test]
    fn threads_that_start_and_end_in_between() {
        let before = CpuTimes::from([((1, 1), 100), ((1, 2), 50), ((2, 2), 7)]);
        let after = CpuTimes::from([((1, 1), 130), ((1, 3), 11), ((2, 2), 7)]);
        assert_eq!(ran(&before, &after), 41);
    }

    #[test]
    fn this_process_can_be_read() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(rss(own).unwrap() > 1 << 20);
        assert!(pss(own).unwrap() > 1 << 18);
        let before = descriptors(own).unwrap();
        let _one_more = std::os::unix::net::UnixDatagram::unbound().unwrap();
        let sockets = |open: &BTreeMap<String, u64>| open.get("socket").copied().unwrap_or_default();
        assert_eq!(sockets(&descriptors(own).unwrap()), sockets(&before) + 1);
        assert!(available().unwrap() > 1 << 20);
        assert!(cpu_times(&[own]).unwrap().contains_key(&(own, own)));
        // No process has the largest number.
        assert_eq!((pss(i32::MAX).unwrap(), cpu_times(&[i32::MAX]).unwrap().len()), (0, 0));
    }
}
