//! Groups of processes that nothing escapes: one per command, and killing it ends all of it.
//!
//! A process can leave its session and its parent (a daemon does both), but not its control group. Any hierarchy
//! will do, for neither limits nor accounting are wanted: gVisor has one without controllers named `job`. Where there is
//! none, a [`mark`] is what takes its place; that can be left by those who mean to.

mod mark;

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use mark::Mark;

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
    place: Place,
    next: AtomicU64,
    /// Groups whose command has ended while something in them lives on.
    lingering: Mutex<Vec<Arc<Job>>>,
    /// All groups.
    all: Mutex<Vec<Weak<Job>>>,
    created: Condvar,
    /// Whether all processes that the agent can see are its sandbox's.
    alone: bool,
}

/// What holds processes together.
#[derive(Debug)]
enum Place {
    /// Control groups below this directory.
    Groups(Arc<OwnedFd>),
    /// Marks.
    Marks(mark::Series),
}

/// What the processes of one command have in common.
#[derive(Debug)]
pub(crate) enum Job {
    /// A control group.
    Group(Group),
    /// A mark.
    Mark(Mark),
}

/// One control group.
#[derive(Debug)]
pub(crate) struct Group {
    base: Arc<OwnedFd>,
    name: String,
    alone: bool,
    /// Whether it was ended because memory was short.
    out_of_memory: AtomicBool,
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
        Ok(Self::at(Place::Groups(Arc::new(base)), alone))
    }

    /// Marks processes instead of grouping them: for development without control groups.
    pub(crate) fn marked() -> Self {
        Self::at(Place::Marks(mark::Series::new()), false)
    }

    fn at(place: Place, alone: bool) -> Self {
        Self {
            place,
            next: AtomicU64::new(1),
            lingering: Mutex::default(),
            all: Mutex::default(),
            created: Condvar::new(),
            alone,
        }
    }

    /// Makes a group.
    ///
    /// # Errors
    /// The kernel refused.
    pub(crate) fn create(&self) -> io::Result<Arc<Job>> {
        self.sweep();
        let job = loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let base = match &self.place {
                Place::Groups(base) => base,
                Place::Marks(series) => break Job::Mark(series.mark(number)),
            };
            let name = format!("c{number}");
            match rustix::fs::mkdirat(base, &name, Mode::from_raw_mode(0o755)) {
                // A leftover of someone who made the name before.
                Err(Errno::EXIST) => continue,
                other => other?,
            }
            let out_of_memory = AtomicBool::new(false);
            break Job::Group(Group { base: Arc::clone(base), name, alone: self.alone, out_of_memory });
        };
        let job = Arc::new(job);
        self.all().push(Arc::downgrade(&job));
        self.created.notify_all();
        Ok(job)
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

    /// Ends the process that `choose` chooses while everything stands still, with all of its group, and notes that this
    /// was for want of memory. Returns which it was. Blocks.
    ///
    /// # Errors
    /// As [`Job::kill`].
    pub(crate) fn end_for_memory(&self, choose: impl FnOnce() -> Option<i32>) -> io::Result<Option<i32>> {
        if !self.alone {
            return Ok(None);
        }
        let stopped = stop_everything(|| 0);
        let Some(pid) = choose() else { return Ok(None) };
        let groups = self.existing();
        let group = groups.iter().find_map(|job| match &**job {
            Job::Group(group) => group
                .pids()
                .is_ok_and(|pids| pids.iter().any(|member| member.as_raw_nonzero().get() == pid))
                .then_some(group),
            Job::Mark(_) => None,
        });
        let result = match group {
            Some(group) => {
                group.out_of_memory.store(true, Ordering::Release);
                group.kill_while(Some(stopped))
            }
            // Of no command: started by something that left its group, which only root can.
            None => {
                let _gone = Pid::from_raw(pid).map(|pid| rustix::process::kill_process(pid, Signal::KILL));
                Ok(())
            }
        };
        self.sweep();
        result.map(|()| Some(pid))
    }

    /// Ends all groups. Blocks.
    ///
    /// # Errors
    /// As [`Job::kill`].
    pub(crate) fn end_all(&self) -> io::Result<()> {
        self.existing().iter().try_for_each(|job| job.kill())
    }

    /// A descriptor through which a process joins the group of another; `None` if that is in none.
    pub(crate) fn join_of(&self, pid: i32) -> Option<OwnedFd> {
        let Place::Groups(base) = &self.place else { return None };
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
    /// A descriptor through which a process joins, if it is a control group.
    ///
    /// # Errors
    /// It can't be opened.
    pub(crate) fn open(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::Group(group) => Ok(Some(open_procs(&group.base, &group.name)?)),
            Self::Mark(_) => Ok(None),
        }
    }

    /// Puts into the environment of its first process what makes it belong.
    pub(crate) fn mark(&self, env: &mut Vec<CString>) {
        if let Self::Mark(mark) = self {
            mark.put(env);
        }
    }

    /// Whether it was ended because memory was short.
    pub(crate) fn ran_out_of_memory(&self) -> bool {
        match self {
            Self::Group(group) => group.out_of_memory.load(Ordering::Acquire),
            Self::Mark(_) => false,
        }
    }

    /// Kills everything in the group, and whatever that forks meanwhile, until nothing is left. Blocks.
    ///
    /// # Errors
    /// The group can't be read, or something survived for several seconds.
    pub(crate) fn kill(&self) -> io::Result<()> {
        self.kill_while(None)
    }

    fn kill_while(&self, stopped: Option<Stopped>) -> io::Result<()> {
        match self {
            Self::Group(group) => group.kill_while(stopped),
            Self::Mark(mark) => mark.kill(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Group(group) => group.pids().map_or(0, |pids| pids.len()),
            Self::Mark(mark) => mark.members().len(),
        }
    }

    /// Removes the group if it is empty, and says whether it is gone.
    fn remove(&self) -> bool {
        match self {
            Self::Group(group) => group.remove(),
            Self::Mark(mark) => mark.members().is_empty(),
        }
    }
}

impl Group {
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

    fn kill_while(&self, mut stopped: Option<Stopped>) -> io::Result<()> {
        let deadline = Instant::now() + KILL_TIME;
        let mut pause = Duration::from_micros(200);
        for round in 0_u32.. {
            let mut pids = self.pids()?;
            if pids.is_empty() {
                return Ok(());
            }
            if self.alone && stopped.is_none() && round >= STORM.0 && pids.len() > STORM.1 {
                stopped = Some(stop_everything(|| self.pids().map_or(0, |pids| pids.len())));
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
