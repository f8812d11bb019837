//! Groups of processes that nothing escapes: one per command, and killing it ends all of it.
//!
//! A process can leave its session and its parent (a daemon does both), but not its control group. Any hierarchy
//! will do, for neither limits nor accounting are wanted: gVisor has one without controllers named `job`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

/// Upper bound for the list of processes in one group, in bytes: 64 Ki processes.
const MAX_PROCS: usize = 512 * 1024;

/// Rounds of kills after which a group that is still this large is one that forks faster than it dies.
const STORM: (u32, usize) = (1, 16);

/// How often everything is stopped again, because something was forked meanwhile.
const STOPS: u32 = 10;

/// How long ending a group may take. Processes that a kernel does not end in this time hang in it.
const KILL_TIME: Duration = Duration::from_secs(5);

/// Where groups are made.
#[derive(Debug)]
pub(crate) struct Jobs {
    base: Option<Arc<OwnedFd>>,
    next: AtomicU64,
    /// Groups whose command has ended while something in them lives on.
    lingering: Mutex<Vec<Arc<Job>>>,
    /// All groups.
    all: Mutex<Vec<Weak<Job>>>,
    created: Condvar,
    /// Whether all processes that the agent can see are its sandbox's.
    alone: bool,
}

/// One group.
#[derive(Debug)]
pub(crate) struct Job {
    base: Arc<OwnedFd>,
    name: String,
    alone: bool,
}

impl Jobs {
    /// Makes groups below a directory of a control group file system. `alone` says that every process that the
    /// agent can see is one of the sandbox, which it is for process 1 of a sandbox.
    ///
    /// # Errors
    /// It can't be opened.
    pub(crate) fn below(base: &Path, alone: bool) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let base = rustix::fs::openat(CWD, base, flags, Mode::empty())?;
        Ok(Self {
            base: Some(Arc::new(base)),
            next: AtomicU64::new(1),
            lingering: Mutex::default(),
            all: Mutex::default(),
            created: Condvar::new(),
            alone,
        })
    }

    /// Makes no groups: ending a command ends only its process group. For development without control groups.
    pub(crate) fn none() -> Self {
        Self {
            base: None,
            next: AtomicU64::new(1),
            lingering: Mutex::default(),
            all: Mutex::default(),
            created: Condvar::new(),
            alone: false,
        }
    }

    /// Makes a group.
    ///
    /// # Errors
    /// The kernel refused.
    pub(crate) fn create(&self) -> io::Result<Option<Arc<Job>>> {
        self.sweep();
        let Some(base) = &self.base else { return Ok(None) };
        loop {
            let name = format!("c{}", self.next.fetch_add(1, Ordering::Relaxed));
            match rustix::fs::mkdirat(base, &name, Mode::from_raw_mode(0o755)) {
                // A leftover of someone who made the name before.
                Err(Errno::EXIST) => continue,
                other => other?,
            }
            let job = Arc::new(Job { base: Arc::clone(base), name, alone: self.alone });
            self.all().push(Arc::downgrade(&job));
            self.created.notify_all();
            return Ok(Some(job));
        }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Weak<Job>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The groups that are left.
    fn existing(&self) -> Vec<Arc<Job>> {
        let mut all = self.all();
        all.retain(|job| job.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Blocks until there is a group.
    pub(crate) fn wait_for_any(&self) {
        let mut all = self.all();
        loop {
            all.retain(|job| job.strong_count() > 0);
            if !all.is_empty() {
                return;
            }
            all = self.created.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the group with the most processes, while everything stands still. Blocks.
    ///
    /// # Errors
    /// As [`Job::kill`].
    pub(crate) fn end_largest(&self) -> io::Result<()> {
        if !self.alone {
            return Ok(());
        }
        let stopped = stop_everything(|| 0);
        let jobs = self.existing();
        let result =
            jobs.iter().max_by_key(|job| job.len()).map_or(Ok(()), |job| job.kill_while(Some(stopped)));
        self.sweep();
        result
    }

    /// A descriptor through which a process joins the group of another; `None` if that is in none.
    pub(crate) fn join_of(&self, pid: i32) -> Option<OwnedFd> {
        let base = self.base.as_ref()?;
        let memberships = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        open_procs(base, job_name(&memberships)?).ok()
    }

    /// Takes over a group whose command has ended: it is removed once nothing is left in it.
    pub(crate) fn retire(&self, job: Arc<Job>) {
        self.lingering.lock().unwrap_or_else(PoisonError::into_inner).push(job);
        self.sweep();
    }

    /// Removes the groups that have become empty.
    pub(crate) fn sweep(&self) {
        self.lingering.lock().unwrap_or_else(PoisonError::into_inner).retain(|job| !job.remove());
    }
}

impl Job {
    /// A descriptor through which a process joins.
    ///
    /// # Errors
    /// It can't be opened.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        Ok(open_procs(&self.base, &self.name)?)
    }

    fn len(&self) -> usize {
        self.pids().map_or(0, |pids| pids.len())
    }

    fn pids(&self) -> io::Result<Vec<Pid>> {
        let procs = match open_procs(&self.base, &self.name) {
            // It was removed, so it was empty.
            Err(Errno::NOENT) => return Ok(Vec::new()),
            other => other?,
        };
        let mut text = vec![0; 4096];
        let mut filled = 0;
        loop {
            let offset = u64::try_from(filled).unwrap_or(u64::MAX);
            match rustix::io::pread(&procs, &mut text[filled..], offset) {
                // It was removed meanwhile, so it was empty.
                Ok(0) | Err(Errno::NODEV) => break,
                Ok(n) => filled += n,
                Err(errno) => return Err(errno.into()),
            }
            if filled == text.len() {
                if filled >= MAX_PROCS {
                    break;
                }
                text.resize(filled * 2, 0);
            }
        }
        Ok(parse_procs(&text[..filled]))
    }

    /// Kills everything in the group, and whatever that forks meanwhile, until nothing is left. Blocks.
    ///
    /// # Errors
    /// The group can't be read, or something survived for several seconds.
    pub(crate) fn kill(&self) -> io::Result<()> {
        self.kill_while(None)
    }

    fn kill_while(&self, mut stopped: Option<Stopped>) -> io::Result<()> {
        let deadline = Instant::now() + KILL_TIME;
        let mut pause = Duration::from_micros(200);
        for round in 0_u32.. {
            let mut pids = self.pids()?;
            if pids.is_empty() {
                return Ok(());
            }
            if self.alone && stopped.is_none() && round >= STORM.0 && pids.len() > STORM.1 {
                stopped = Some(stop_everything(|| self.len()));
                pids = self.pids()?;
            }
            for pid in pids {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Removes the group if it is empty, and says whether it is gone.
    fn remove(&self) -> bool {
        matches!(rustix::fs::unlinkat(&self.base, &self.name, AtFlags::REMOVEDIR), Ok(()) | Err(Errno::NOENT))
    }
}

/// Stops every process of the sandbox but the agent, until the returned value is dropped: what stands still can be
/// killed one by one. Other commands lose some milliseconds, and what their users had stopped runs on. What is
/// forked meanwhile is stopped as well, until `count` does not change any more.
fn stop_everything(count: impl Fn() -> usize) -> Stopped {
    let mut before = None;
    for _ in 0..STOPS {
        signal_everything(Signal::STOP);
        let now = Some(count());
        if now == before {
            break;
        }
        before = now;
    }
    Stopped
}

/// Everything stands still.
#[derive(Debug)]
struct Stopped;

impl Drop for Stopped {
    fn drop(&mut self) {
        signal_everything(Signal::CONT);
    }
}

/// Signals every process but the agent. Does nothing unless that is process 1, where every other is its sandbox's.
fn signal_everything(signal: Signal) {
    if rustix::process::getpid().is_init() {
        // SAFETY: a system call on two numbers; rustix has no name for "all".
        unsafe { libc::kill(-1, signal.as_raw()) };
    }
}

fn open_procs(base: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat(base, format!("{name}/cgroup.procs"), flags, Mode::empty())
}

/// The group's name in a `/proc/PID/cgroup` file. The agent's are the only ones of that form below a root.
fn job_name(memberships: &str) -> Option<&str> {
    memberships.lines().find_map(|line| {
        let (controllers, name) = line
            .splitn(3, ':')
            .skip(1)
            .collect::<Vec<_>>()
            .try_into()
            .map(|[c, p]: [&str; 2]| (c, p))
            .ok()?;
        let is_ours = matches!(controllers, "job" | "" | "name=sandglass");
        let name = name.strip_prefix('/')?;
        let is_name =
            name.strip_prefix('c').is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
        (is_ours && is_name).then_some(name)
    })
}

/// Process ids of a `cgroup.procs` file. Never the agent itself or "every process".
fn parse_procs(text: &[u8]) -> Vec<Pid> {
    let own = rustix::process::getpid();
    let lines = text.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    lines
        .filter_map(|line| line.parse::<i32>().ok())
        .filter(|pid| *pid > 1)
        .filter_map(Pid::from_raw)
        .filter(|pid| *pid != own)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn never_signals_itself_everyone_or_init() {
        let own = rustix::process::getpid().as_raw_nonzero();
        let text = format!("1\n0\n-1\n-77\n{own}\n99999999999\nx\n\n7\n");
        let pids: Vec<_> =
            parse_procs(text.as_bytes()).iter().map(|pid| pid.as_raw_nonzero().get()).collect();
        assert_eq!(pids, [7]);
    }

    #[test]
    fn only_own_names_are_groups() {
        assert_eq!(job_name("7:pids:/\n5:job:/c27\n"), Some("c27"));
        assert_eq!(job_name("0::/c3\n"), Some("c3"));
        for other in ["5:job:/\n", "5:job:/c\n", "5:job:/../c1\n", "5:job:/c1/x\n", "5:pids:/c1\n", "x", ""] {
            assert_eq!(job_name(other), None, "{other:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_to_real_ids(text: Vec<u8>) {
            prop_assert!(parse_procs(&text).iter().all(|pid| pid.as_raw_nonzero().get() > 1));
        }
    }
}
