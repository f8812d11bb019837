//! One place that waits for all children of this process, its own and those it adopted.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::launch::{Launch, LaunchError};
use super::{PidFd, ProcessIdentity};

/// How long the reaper may take from "a child has ended" to "its status is known". Only a bug makes it late.
const REAP_PATIENCE: Duration = Duration::from_secs(10);

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
}

impl ExitStatus {
    /// Whether it exited with code 0.
    #[must_use]
    pub const fn success(self) -> bool {
        matches!(self, Self::Exited(0))
    }
}

impl std::fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Signaled(signal) => write!(f, "signal {signal}"),
        }
    }
}

#[derive(Default)]
struct State {
    /// Whether the reaper thread runs; from then on nothing else may wait for a child.
    adopting: bool,
    /// Counts clones, so that the reaper sees one that happened between its `waitid` and its lock.
    clones: u64,
    /// Children somebody wants the status of, and the status once it is known.
    wanted: HashMap<i32, Option<ExitStatus>>,
}

struct Registry {
    state: Mutex<State>,
    changed: Condvar,
}

static REGISTRY: std::sync::LazyLock<Registry> =
    std::sync::LazyLock::new(|| Registry { state: Mutex::default(), changed: Condvar::new() });

impl Registry {
    /// The state is a plain map that no panic can leave half changed, so poison means nothing.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes this process the parent of every descendant whose own parent ends, and starts the thread that reaps
/// them. Idempotent.
///
/// # Errors
/// The kernel gave no thread.
pub fn adopt_orphans() -> io::Result<()> {
    let registry = &*REGISTRY;
    let mut state = registry.lock();
    if state.adopting {
        return Ok(());
    }
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    std::thread::Builder::new().name("reaper".into()).spawn(reap_for_ever)?;
    state.adopting = true;
    Ok(())
}

fn reap_for_ever() {
    let registry = &*REGISTRY;
    loop {
        let clones = registry.lock().clones;
        match peek() {
            Ok(pid) => {
                // Under the lock, so that a pid can't be reused between its end and its entry in the map.
                let mut state = registry.lock();
                if let Some(status) = reap(pid)
                    && let Some(entry) = state.wanted.get_mut(&pid)
                {
                    *entry = Some(status);
                    registry.changed.notify_all();
                }
            }
            Err(libc::ECHILD) => {
                // No child means no descendant that could become one, until the next clone.
                let mut state = registry.lock();
                while state.clones == clones {
                    state = registry.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
            // EINTR; anything else can't happen for these arguments, and trying again is the best answer to it.
            Err(_) => std::thread::yield_now(),
        }
    }
}

/// Blocks until any child has ended and leaves it there.
fn peek() -> Result<i32, i32> {
    // SAFETY: `info` is plain data for which zero is valid, and lives across the call.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        if libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOWAIT) == 0 {
            Ok(info.si_pid())
        } else {
            Err(*libc::__errno_location())
        }
    }
}

/// Takes the status of a child that has ended.
fn reap(pid: i32) -> Option<ExitStatus> {
    let mut raw = 0;
    // SAFETY: `raw` lives across the call.
    let reaped = unsafe { libc::waitpid(pid, &raw mut raw, libc::WNOHANG) };
    (reaped == pid).then(|| {
        if libc::WIFEXITED(raw) {
            ExitStatus::Exited(libc::WEXITSTATUS(raw))
        } else {
            ExitStatus::Signaled(libc::WTERMSIG(raw))
        }
    })
}

/// A child of this process that it started itself.
///
/// Dropping it does not end the process.
#[derive(Debug)]
pub struct Child {
    pid: i32,
    pidfd: PidFd,
}

/// Starts a program; returns once it is executed.
///
/// # Errors
/// Any [`LaunchError`]; then no process is left.
pub fn spawn(launch: &Launch) -> Result<Child, LaunchError> {
    let registry = &*REGISTRY;
    let started = {
        let mut state = registry.lock();
        let started = launch.clone_child()?;
        state.clones += 1;
        state.wanted.insert(started.pid, None);
        registry.changed.notify_all();
        started
    };
    let child = Child { pid: started.pid, pidfd: started.pidfd };
    match read_report(&started.report) {
        Ok(None) => Ok(child),
        Ok(Some(report)) => {
            let _ = child.wait(None);
            Err(launch.explain(report))
        }
        Err(error) => {
            let _ = child.pidfd.kill();
            let _ = child.wait(None);
            Err(LaunchError::Start(error))
        }
    }
}

fn read_report(pipe: &OwnedFd) -> io::Result<Option<[u8; 8]>> {
    let mut report = [0; 8];
    let mut filled = 0;
    while let Some(space) = report.get_mut(filled..).filter(|space| !space.is_empty()) {
        match rustix::io::read(pipe, space) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(Some(report))
}

impl Child {
    /// Its pid.
    #[must_use]
    pub const fn pid(&self) -> i32 {
        self.pid
    }

    /// A descriptor of it.
    #[must_use]
    pub const fn pidfd(&self) -> &PidFd {
        &self.pidfd
    }

    /// Blocks until it has ended, or until `deadline` and then answers `None`.
    ///
    /// # Errors
    /// The kernel refused to poll, or the status was asked for before and is gone.
    pub fn wait(&self, deadline: Option<Instant>) -> io::Result<Option<ExitStatus>> {
        if !self.pidfd.wait_end(deadline)? {
            return Ok(None);
        }
        take_status(self.pid).map(Some)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        REGISTRY.lock().wanted.remove(&self.pid);
    }
}

/// Takes the status of a wanted child that has ended.
fn take_status(pid: i32) -> io::Result<ExitStatus> {
    let registry = &*REGISTRY;
    let lost = || io::Error::other("the exit status was taken already");
    let deadline = Instant::now() + REAP_PATIENCE;
    let mut state = registry.lock();
    loop {
        if let Some(status) = state.wanted.get(&pid).copied().ok_or_else(lost)? {
            state.wanted.remove(&pid);
            return Ok(status);
        }
        if !state.adopting {
            let status = reap(pid).ok_or_else(lost);
            state.wanted.remove(&pid);
            return status;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the reaper did not answer"));
        }
        state = registry.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Somebody's interest in how an adopted process ends.
#[derive(Debug)]
pub struct Watch {
    identity: ProcessIdentity,
}

/// Asks the reaper to keep the exit status of a descendant that is, or will be, adopted; `None` if it is gone
/// already. Two watches of one process share the status: who drops first ends both.
///
/// # Errors
/// The kernel refused to look.
pub fn watch(identity: ProcessIdentity) -> io::Result<Option<Watch>> {
    let mut state = REGISTRY.lock();
    // Under the lock the reaper can't take it, so what is there now will still be waited for.
    if !state.adopting || identity.open()?.is_none() {
        return Ok(None);
    }
    state.wanted.entry(identity.pid).or_insert(None);
    Ok(Some(Watch { identity }))
}

impl Watch {
    /// The process in question.
    #[must_use]
    pub const fn identity(&self) -> ProcessIdentity {
        self.identity
    }

    /// How it ended, waiting up to `patience` for the reaper to say so; `None` if it runs on, or if it never became
    /// this process's child.
    #[must_use]
    pub fn status(&self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        let mut state = REGISTRY.lock();
        loop {
            let known = state.wanted.get(&self.identity.pid).copied()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if known.is_some() || left.is_zero() {
                return known;
            }
            let waited = REGISTRY.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        REGISTRY.lock().wanted.remove(&self.identity.pid);
    }
}
