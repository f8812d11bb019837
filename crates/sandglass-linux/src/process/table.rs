//! All processes of this machine, as far as this one may see them.
//!
//! A walk of `/proc` is no snapshot: processes come and go while it goes on. What is gone by the time it is looked at
//! is left out; whoever needs to miss none walks again until nothing new is found.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::ProcessIdentity;
use super::identity::{MAX_STAT_LEN, fields, is_gone, read_bounded};

/// Upper bound for what is read of one environment, in bytes. The kernel allows more, but nobody has that.
const MAX_ENVIRONMENT: u64 = 1 << 20;

/// How long `execve` may take to set up the environment, which is microseconds but on a very busy machine.
const EXECVE: Duration = Duration::from_secs(1);

/// Clock ticks a second, as `/proc` counts them on every architecture that Rust runs on.
const USER_HZ: u64 = 100;

/// One process at the moment at which it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Which one.
    pub identity: ProcessIdentity,
    /// The pid of its parent.
    pub parent: i32,
    /// CPU time that it and the children that it has waited for used, in microseconds.
    pub cpu_micros: u64,
    /// Its threads.
    pub threads: u64,
    /// Its resident memory as the kernel knows it without looking, in bytes: some hundred KiB for each CPU may be
    /// missing, which is all of a small process. [`resident_bytes`] is exact.
    pub roughly_resident_bytes: u64,
}

/// Walks `/proc`. Processes that have ended and are not reaped yet are in it too.
///
/// # Errors
/// `/proc` can't be read.
pub fn table() -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for entry in fs_err::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = match read_bounded(format!("/proc/{pid}/stat").as_ref(), MAX_STAT_LEN) {
            Ok(stat) => stat,
            Err(error) if is_gone(&error) => continue,
            Err(error) => return Err(error),
        };
        entries.push(parse(pid, &stat).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "unexpected form of /proc/PID/stat")
        })?);
    }
    Ok(entries)
}

/// From `/proc/PID/stat`, whose fields `proc_pid_stat(5)` counts from 1.
fn parse(pid: i32, stat: &[u8]) -> Option<Entry> {
    let fields: Vec<&str> = fields(stat)?.collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Entry {
        identity: ProcessIdentity { pid, start_ticks: number(22)? },
        parent: fields.get(4 - 3)?.parse().ok()?,
        cpu_micros: (14..=17).map(number).sum::<Option<u64>>()?.saturating_mul(1_000_000 / USER_HZ),
        threads: number(20)?,
        roughly_resident_bytes: number(24)?.saturating_mul(page_size()),
    })
}

fn page_size() -> u64 {
    // SAFETY: takes no pointers.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// The resident memory of a process, counted page by page, in bytes. What it shares is counted in each process that
/// shares it. `None` if it is gone, another user's, or the kernel was built without this.
///
/// # Errors
/// The kernel refused for another reason.
pub fn resident_bytes(pid: i32) -> io::Result<Option<u64>> {
    match read_bounded(format!("/proc/{pid}/smaps_rollup").as_ref(), MAX_STAT_LEN) {
        Ok(text) => Ok(rss(&String::from_utf8_lossy(&text))),
        Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(error) => Err(error),
    }
}

/// From `/proc/PID/smaps_rollup`, `proc_pid_smaps(5)`.
fn rss(rollup: &str) -> Option<u64> {
    let kib = rollup.lines().find_map(|line| line.strip_prefix("Rss:")?.strip_suffix("kB"))?;
    kib.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The environment that a process was started with, its variables each ended by a NUL byte; `None` if it is gone or
/// another user's. Waits a moment for one that is in the middle of `execve`, which seems to have none.
///
/// # Errors
/// The kernel refused for another reason.
pub fn environment(pid: i32) -> io::Result<Option<Vec<u8>>> {
    let read = || {
        let deadline = Instant::now() + EXECVE;
        loop {
            let text = read_bounded(format!("/proc/{pid}/environ").as_ref(), MAX_ENVIRONMENT)?;
            if !text.is_empty()
                || !may_have_environment(&read_bounded(format!("/proc/{pid}/stat").as_ref(), MAX_STAT_LEN)?)
                || Instant::now() >= deadline
            {
                return Ok(text);
            }
            std::thread::yield_now();
        }
    };
    match read() {
        Ok(text) => Ok(Some(text)),
        Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether `/proc/PID/stat` is of a process with memory whose environment is not empty, or not set up yet: then the
/// kernel knows no end of it.
fn may_have_environment(stat: &[u8]) -> bool {
    let Some(fields) = fields(stat) else { return false };
    let fields: Vec<&str> = fields.collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let (memory, start, end) = (number(23), number(50), number(51));
    memory != Some(0) && (end == Some(0) || start != end)
}

/// Whether no thread of a process runs code of its own until it is let: each is stopped or has ended, or is in the
/// middle of a system call that a signal can't interrupt while SIGSTOP waits for it (`vfork` above all, whose caller
/// sleeps so for as long as its child is stopped). `true` for one that is gone.
///
/// # Errors
/// The kernel refused to look.
pub fn is_stopped(pid: i32) -> io::Result<bool> {
    let threads = match fs_err::read_dir(format!("/proc/{pid}/task")) {
        Ok(threads) => threads,
        Err(error) if is_gone(&error) => return Ok(true),
        Err(error) => return Err(error),
    };
    for thread in threads {
        let stopped = thread.and_then(|thread| is_stopped_thread(pid, &thread.path()));
        match stopped {
            Ok(false) => return Ok(false),
            Ok(true) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn is_stopped_thread(pid: i32, folder: &Path) -> io::Result<bool> {
    let stat = read_bounded(&folder.join("stat"), MAX_STAT_LEN)?;
    Ok(match fields(&stat).and_then(|mut fields| fields.next()) {
        Some("T" | "t" | "Z" | "X") => true,
        Some("D") => {
            let status = read_bounded(format!("/proc/{pid}/status").as_ref(), MAX_STAT_LEN)?;
            stop_is_pending(&String::from_utf8_lossy(&status))
        }
        _ => false,
    })
}

/// Whether `/proc/PID/status` has SIGSTOP, 19, among the signals that wait for the process.
fn stop_is_pending(status: &str) -> bool {
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    pending.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).is_some_and(|set| set & (1 << 18) != 0)
}

#[cfg(test)]
mod tests {
    use rustix::process::Signal;

    use super::*;
    use crate::process::{Launch, Step, spawn};

    fn until(what: &str, mut reached: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !reached() {
            assert!(Instant::now() < deadline, "not in time: {what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_fields_are_those_of_the_manual() {
        let fields = (4..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        let entry = parse(7, format!("7 (a) b) S {fields}\n").as_bytes()).unwrap();
        let expected = Entry {
            identity: ProcessIdentity { pid: 7, start_ticks: 22 },
            parent: 4,
            cpu_micros: (14 + 15 + 16 + 17) * 10_000,
            threads: 20,
            roughly_resident_bytes: 24 * page_size(),
        };
        assert_eq!(entry, expected);
        assert_eq!(parse(7, b"7 (a) S 1 2"), None);
    }

    #[test]
    fn the_resident_pages_are_not_those_of_another_line() {
        let rollup = "1000-2000 ---p 0 00:00 0 [rollup]\nRss:    1712 kB\nPss:     351 kB\n";
        assert_eq!(rss(rollup), Some(1712 << 10));
        assert_eq!(rss("Pss:     351 kB\n"), None);
    }

    #[test]
    fn an_empty_environment_is_told_from_one_that_is_not_there_yet() {
        let stat = |memory: u64, start: u64, end: u64| {
            let mut fields = [1; 52];
            (fields[23 - 1], fields[50 - 1], fields[51 - 1]) = (memory, start, end);
            format!("7 (a) S {}\n", fields[3..].iter().map(u64::to_string).collect::<Vec<_>>().join(" "))
        };
        let may_have = |memory, start, end| may_have_environment(stat(memory, start, end).as_bytes());
        assert!(may_have(8192, 0, 0), "in the middle of execve");
        assert!(may_have(8192, 4096, 5000), "set up in the meantime");
        assert!(!may_have(8192, 4096, 4096), "started without any");
        assert!(!may_have(0, 0, 0), "a thread of the kernel, or one that has ended");
    }

    #[test]
    fn a_pending_stop_is_told_from_other_signals() {
        let status =
            |set: &str| format!("Name:\tsh\nSigPnd:\t0000000000040000\nShdPnd:\t{set}\nSigBlk:\t0\n");
        assert!(stop_is_pending(&status("0000000000050000")));
        assert!(!stop_is_pending(&status("0000000000010000")));
        assert!(!stop_is_pending("Name:\tsh\n"));
    }

    #[test]
    fn a_child_is_seen_with_its_environment_and_its_stops() {
        let launch = Launch::new("/usr/bin/sleep").unwrap().arg("1000").unwrap().env("MARK", "here").unwrap();
        let child = spawn(&launch).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let found = table().unwrap();
        let found = found.iter().find(|entry| entry.identity.pid == child.pid()).unwrap();
        assert_eq!((found.parent, found.threads), (me, 1));
        assert_eq!(environment(child.pid()).unwrap().unwrap(), b"MARK=here\0");
        assert!(resident_bytes(child.pid()).unwrap().unwrap() >= page_size());
        assert!(!is_stopped(child.pid()).unwrap());
        child.pidfd().signal(Signal::STOP).unwrap();
        until("the stop", || is_stopped(child.pid()).unwrap());
        child.pidfd().signal(Signal::CONT).unwrap();
        until("the end of the stop", || !is_stopped(child.pid()).unwrap());
        child.pidfd().kill().unwrap();
        child.wait(None).unwrap();
        assert_eq!(environment(child.pid()).unwrap(), None);
        assert_eq!(resident_bytes(child.pid()).unwrap(), None);
        assert!(is_stopped(child.pid()).unwrap());
    }

    #[test]
    fn an_environment_is_seen_at_every_moment_of_a_start() {
        // Starts itself again and again, each time with the mark.
        let script = "exec /bin/sh -c \"$0\" \"$0\"";
        let launch = Launch::new("/bin/sh").unwrap().args(["-c", script, script]).unwrap();
        let child = spawn(&launch.env("MARK", "here").unwrap()).unwrap();
        let looks: Vec<_> = (0..20_000).map(|_| environment(child.pid())).collect();
        child.pidfd().kill().unwrap();
        child.wait(None).unwrap();
        for seen in looks {
            let seen = seen.unwrap().unwrap();
            assert!(seen.split(|byte| *byte == 0).any(|variable| variable == b"MARK=here"));
        }
    }

    #[test]
    fn a_program_starts_where_it_is_told_and_adopts_its_orphans() {
        let folder = tempfile::tempdir().unwrap();
        let path = std::ffi::CString::new(folder.path().to_str().unwrap()).unwrap();
        // The subshell ends at once and leaves a process behind.
        let script = "echo $$ > outer; (sleep 1000 & echo $! > orphan); read -r line";
        let (stdin, hold) = rustix::pipe::pipe().unwrap();
        let launch = Launch::new("/bin/sh").unwrap().args(["-c", script]).unwrap();
        let launch = launch.env("PATH", "/usr/bin:/bin").unwrap().stdin(stdin).unwrap();
        let child = spawn(&launch.steps([Step::WorkingDirectory(path), Step::AdoptOrphans])).unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap_or_default();
        until("the orphan", || read("orphan").ends_with('\n'));
        let orphan: i32 = read("orphan").trim().parse().unwrap();
        let parent = || {
            let all = table().unwrap();
            all.iter().find(|entry| entry.identity.pid == orphan).map(|entry| entry.parent)
        };
        until("the adoption", || parent() == Some(child.pid()));
        assert_eq!(read("outer").trim(), child.pid().to_string());
        crate::process::PidFd::open(orphan).unwrap().unwrap().kill().unwrap();
        drop(hold);
        child.pidfd().kill().unwrap();
        child.wait(None).unwrap();
    }
}
