//! `sandglass watchdog`: ends sandboxes whose time is up when both halves of the server are dead.
//!
//! The host starts it and holds the other end of its standard input, so it wakes when the host has ended, in whatever way.
//! Then it waits for the deadlines that the host kept beside the sandboxes (see [`deadline`]). At one it becomes for a
//! moment what a server is, in a process of its own: that takes the lock of the data folder, and removes what is due by
//! the same code, without what sandboxes are made with: `runsc` and the cache folder may be gone by then. It knows no store: the next server finds a sandbox gone whose time is up, and writes that down.
//!
//! It has no socket, reads nothing but what the host wrote, and leaves the control groups of the service, with which it
//! would be killed. It ends when no sandbox with a deadline is left, or when a later host has one of its own.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err as fs;
use rustix::fs::FileType;
use rustix::process::{Signal, getpid, kill_process};
use rustix::{stdio, termios};
use sandglass_engine::deadline::{self, Moment};
use sandglass_engine::fake::{FakeConfig, FakeEngine};
use sandglass_engine::gvisor::{Holdings, HostPaths};
use sandglass_engine::network::Assigned;
use sandglass_engine::{Engine as _, EngineError};
use sandglass_linux::cgroup::{self, Cgroups};
use sandglass_linux::lock::{FolderLock, LockError};
use sandglass_linux::process::{Child, Launch, spawn};
use sandglass_types::SandboxId;
use sandglass_types::error::Chain;

use crate::cli;
use crate::data_dir::DataDir;
use crate::startup::{Reason, StartupError};

/// The longest sleep before the clocks, the deadlines and the later hosts are looked at again.
const LONGEST: Duration = Duration::from_secs(5);

/// The shortest: a server that was just killed, or is restarted, ends its sandboxes itself, and knows more of them.
const SHORTEST: Duration = Duration::from_secs(1);

/// How long a round, which has the lock, takes at most. A server that starts waits longer than that.
const HOLD: Duration = Duration::from_secs(15);

/// How many sandboxes are ended at the same time.
const AT_ONCE: usize = 8;

/// The longest pause before a watchdog that does not stay is started again.
const BACKOFF: Duration = Duration::from_secs(60);

/// How long the host waits for a watchdog that has nothing to do.
const FAREWELL: Duration = Duration::from_secs(5);

/// This program, also after another one was put in its place.
const PROGRAM: &str = "/proc/self/exe";

/// The variables of the environment that it shares with the host.
const ENVIRONMENT: [&str; 2] = ["SANDGLASS_LOG", sandglass_failpoint::VARIABLE];

/// A watchdog of this host, and another one when it ends before the host.
pub(crate) struct Watched {
    sandboxes: PathBuf,
    /// Dropped when the watchdog is no longer to be replaced.
    keeping: mpsc::Sender<()>,
    /// Only this process has it; it closes with it.
    line: OwnedFd,
    /// Hears when no watchdog is left, and none will be started.
    ended: mpsc::Receiver<()>,
}

impl Watched {
    /// Starts it with the arguments of this process.
    pub(crate) fn start(data: &DataDir) -> Result<Self, StartupError> {
        let failed = |error: anyhow::Error| {
            StartupError::new(Reason::Host, format!("the watchdog could not be started: {error:#}"))
        };
        let (theirs, line) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .context("no line to it")
            .map_err(failed)?;
        let first = launch(&theirs).map_err(failed)?;
        let (keeping, kept) = mpsc::channel();
        let (said, ended) = mpsc::channel();
        let keep = move || {
            let (mut watchdog, mut pause) = (Some(first), SHORTEST);
            loop {
                let started = Instant::now();
                let status = watchdog.map(|watchdog| watchdog.wait(None));
                if started.elapsed() > BACKOFF {
                    pause = SHORTEST;
                }
                if kept.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    // Nobody waits for that where there are deadlines.
                    let _gone = said.send(());
                    return;
                }
                pause = (pause * 2).min(BACKOFF);
                tracing::warn!(?status, "the watchdog ended, and is started again");
                watchdog = launch(&theirs)
                    .inspect_err(|error| tracing::error!("the watchdog could not be started: {error:#}"))
                    .ok();
            }
        };
        thread::Builder::new()
            .name("watchdog".into())
            .spawn(keep)
            .context("no thread for it")
            .map_err(failed)?;
        let sandboxes = data.sandboxes();
        Ok(Self { sandboxes, keeping, line, ended })
    }

    /// Leaves the sandboxes to it. Without any it ends at once, and that is waited for, so that it is not seen any more.
    pub(crate) fn end(self) {
        drop(self.keeping);
        drop(self.line);
        if deadline::all(&self.sandboxes).is_ok_and(|all| all.is_empty())
            && self.ended.recv_timeout(FAREWELL).is_err()
        {
            tracing::warn!("the watchdog takes its time to end");
        }
    }
}

/// Starts a watchdog that waits for the end of `line`. It must not hold what the host's standard output is: the lock.
fn launch(line: &OwnedFd) -> anyhow::Result<Child> {
    let mut launch = Launch::new(PROGRAM)?.arg("watchdog")?.args(std::env::args_os().skip(2))?;
    for name in ENVIRONMENT {
        if let Some(value) = std::env::var_os(name) {
            launch = launch.env(name, value)?;
        }
    }
    Ok(spawn(&launch.stdin(line)?.stderr(std::io::stderr().as_fd())?)?)
}

/// Is the watchdog, or one round of it.
pub(crate) fn run(args: cli::Watchdog) -> anyhow::Result<ExitCode> {
    let data = DataDir::open(&args.host.data_dir)?;
    if args.round {
        round(&data, args.host)?;
    } else {
        watch(&data)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn watch(data: &DataDir) -> anyhow::Result<()> {
    detach(data);
    let named = data.host().join("watchdog");
    if let Err(error) = fs::write(&named, std::process::id().to_string()) {
        tracing::warn!(%error, "an earlier watchdog will not hear of this one");
    }
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())
        .context("the line to the host failed")?;
    if let Err(error) = leave_log() {
        tracing::warn!(%error, "who does not read the log may hold up the watchdog");
    }
    let sandboxes = data.sandboxes();
    let mut failed = false;
    loop {
        let left = soonest(&sandboxes).inspect_err(
            |error| tracing::error!(%error, "the deadlines can't be read, and are looked at again"),
        );
        let Some(pause) = pause(&left, failed) else { return Ok(()) };
        thread::sleep(pause);
        if superseded(&named) {
            return Ok(());
        }
        if soonest(&sandboxes).is_ok_and(|left| left == Some(Duration::ZERO)) && is_free(data.path()) {
            failed = !start_round().unwrap_or_else(|error| {
                tracing::error!("sandboxes whose time is up can't be ended: {error:#}");
                false
            });
        }
    }
}

/// Leaves the terminal and the service of the host. Best effort: a watchdog that can be ended with them is better than none.
fn detach(data: &DataDir) {
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "no session of its own");
    }
    if rustix::process::geteuid().is_root() {
        let left = Cgroups::detect(Path::new(cgroup::ROOT), data.instance().as_str())
            .map_err(anyhow::Error::from)
            .and_then(|groups| Ok(groups.leave()?));
        if let Err(error) = left {
            tracing::warn!("the watchdog stays in the control groups of the server: {error:#}");
        }
    }
}

/// Writes to no pipe, socket or terminal any more: who reads it may have stopped, and who waits for its end is not to wait
/// for the last deadline.
fn leave_log() -> io::Result<()> {
    let log = stdio::stderr();
    let kind = FileType::from_raw_mode(rustix::fs::fstat(log)?.st_mode);
    if matches!(kind, FileType::Fifo | FileType::Socket) || termios::isatty(log) {
        let null = fs::OpenOptions::new().write(true).open("/dev/null")?;
        stdio::dup2_stderr(null)?;
    }
    Ok(())
}

/// The time until a sandbox is due; `None` if none will be.
fn soonest(sandboxes: &Path) -> io::Result<Option<Duration>> {
    let now = Moment::now();
    Ok(deadline::all(sandboxes)?.into_iter().map(|(_, kept)| kept.left(now)).min())
}

/// How long to sleep with so much time left, perhaps after a round that failed; `None` if there is nothing to wait for.
fn pause(left: &io::Result<Option<Duration>>, failed: bool) -> Option<Duration> {
    match left {
        Ok(None) => None,
        Ok(Some(left)) if !failed => Some((*left).clamp(SHORTEST, LONGEST)),
        _ => Some(LONGEST),
    }
}

/// Whether a later host has a watchdog of its own.
fn superseded(named: &Path) -> bool {
    let named = fs::read_to_string(named).ok().and_then(|text| text.parse::<u32>().ok());
    named.is_some_and(|pid| pid != std::process::id())
}

/// Whether no half of a server is there, dying or starting.
fn is_free(data_dir: &Path) -> bool {
    FolderLock::acquire(data_dir).is_ok()
}

/// Ends what is due, in a process of its own: this one stays as small as it is. `false` if it goes on.
fn start_round() -> anyhow::Result<bool> {
    let mut round = Command::new(PROGRAM);
    round.args(std::env::args_os().skip(1)).arg("--round").stdin(Stdio::null());
    let status = round.status().context("it could not be started")?;
    if !status.success() {
        tracing::warn!(%status, "not all sandboxes whose time is up were ended; that is tried again");
    }
    Ok(status.success())
}

fn round(data: &DataDir, args: cli::Host) -> anyhow::Result<()> {
    end_in_time().context("nothing would end it in time")?;
    let _lock = match FolderLock::acquire(data.path()) {
        // A server was quicker, and ends them.
        Err(LockError::InUse) => return Ok(()),
        lock => lock.context("the data folder could not be locked")?,
    };
    end_due(data, args)
}

/// Kills this process after [`HOLD`], whatever it waits for, be it a reader of the log. The kernel lets go of the lock when
/// no thread is left, so that none still removes what the next host makes. The next round does the rest.
fn end_in_time() -> io::Result<()> {
    let end = || {
        thread::sleep(HOLD);
        kill_process(getpid(), Signal::KILL)
    };
    thread::Builder::new().name("time-limit".into()).spawn(end).map(drop)
}

fn end_due(data: &DataDir, args: cli::Host) -> anyhow::Result<()> {
    sandglass_failpoint::hit("watchdog.end")?;
    let remover = Remover::open(data, args)?;
    let now = Moment::now();
    let all = deadline::all(&data.sandboxes())?;
    let due: Vec<SandboxId> =
        all.into_iter().filter(|(_, kept)| kept.left(now).is_zero()).map(|(id, _)| id).collect();
    let (next, failed) = (Mutex::new(due.into_iter()), AtomicBool::new(false));
    let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(id) = take() {
                    match remover.remove(&id) {
                        Ok(()) => tracing::info!(sandbox = %id, "ended: its time was up while no server ran"),
                        Err(error) => {
                            tracing::error!(sandbox = %id, error = %Chain(&error), "could not be ended yet");
                            failed.store(true, Ordering::SeqCst);
                        }
                    }
                }
            });
        }
    });
    if failed.into_inner() {
        bail!("some sandboxes could not be ended yet");
    }
    Ok(())
}

/// What removes sandboxes of a data folder.
enum Remover {
    Gvisor(Holdings),
    Fake(FakeEngine),
}

impl Remover {
    fn open(data: &DataDir, args: cli::Host) -> Result<Self, StartupError> {
        let instance = data.instance();
        if data.engine() == cli::Engine::Fake {
            let config = FakeConfig {
                data: data.host(),
                instance: instance.clone(),
                agent: args.guest,
                agent_args: Vec::new(),
            };
            return Ok(Self::Fake(FakeEngine::open(config)?));
        }
        let airlocks = Assigned::open(&data.host())?;
        let paths = HostPaths { data: data.host(), cache: args.cache_dir };
        Ok(Self::Gvisor(Holdings::open(paths, instance, Some(Arc::new(airlocks)))?))
    }

    fn remove(&self, id: &SandboxId) -> Result<(), EngineError> {
        match self {
            Self::Gvisor(holdings) => holdings.remove(id),
            Self::Fake(engine) => engine.destroy(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_one_is_heard_of_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let named = folder.path().join("watchdog");
        assert!(!superseded(&named));
        for (text, later) in
            [(std::process::id().to_string(), false), (String::new(), false), ("1".into(), true)]
        {
            fs::write(&named, text).unwrap();
            assert_eq!(superseded(&named), later);
        }
    }

    #[test]
    fn only_who_knows_that_there_is_no_deadline_waits_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let sandboxes = folder.path().join("sandboxes");
        assert_eq!(pause(&soonest(&sandboxes), false), None);
        fs::write(&sandboxes, "no folder").unwrap();
        assert_eq!(pause(&soonest(&sandboxes), false), Some(LONGEST));
        let soon = LONGEST.mul_f32(0.5);
        for (left, after_failure, slept) in [
            (Duration::ZERO, false, SHORTEST),
            (soon, false, soon),
            (Duration::MAX, false, LONGEST),
            (Duration::ZERO, true, LONGEST),
        ] {
            assert_eq!(pause(&Ok(Some(left)), after_failure), Some(slept));
        }
        assert_eq!(pause(&Ok(None), true), None);
    }

    #[test]
    fn who_has_the_lock_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        assert!(is_free(folder.path()) && is_free(folder.path()));
        let _server = FolderLock::acquire(folder.path()).unwrap();
        assert!(!is_free(folder.path()));
    }
}
