//! Sandboxes that are threads of this process. Each runs a [`Script`] over its session, with a memory that can be
//! copied; so it can be stopped between two turns, written to an image, and brought back.

mod image;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use sandglass_types::{InstanceId, SandboxId};
use serde::{Deserialize, Serialize};

use super::folder::Folder;
use super::model::{Agent, Life, Model};
use crate::engine::{EngineError, SandboxSpec, Stats, step};
use crate::locks::lock;
use crate::session::AgentStdio;

/// How long a script may take for one turn when it is to stop or end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Most bytes that a script is given in one turn.
const MAX_INPUT: usize = 64 * 1024;

/// What a script knows, by names that it chooses.
pub type Memory = BTreeMap<String, Vec<u8>>;

/// A program for sandboxes that are threads.
pub trait Script: std::fmt::Debug + Send + Sync {
    /// Takes what arrived on its standard input, in pieces of any length, and answers.
    fn turn(&self, turn: Turn<'_>) -> Next;
}

/// What a script has in one turn.
#[derive(Debug)]
pub struct Turn<'a> {
    /// All that it keeps from one turn to the next.
    pub memory: &'a mut Memory,
    /// Its files.
    pub home: &'a Path,
    /// What arrived.
    pub input: &'a [u8],
    /// What it adds here goes to its standard output.
    pub output: &'a mut Vec<u8>,
}

/// What a script does after a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// It waits for more.
    GoOn,
    /// It ends, and the sandbox with it.
    End,
}

/// The threads of one instance's sandboxes.
#[derive(Debug)]
pub(super) struct Threads {
    instance: InstanceId,
    script: Arc<dyn Script>,
}

/// All that run in this process: they outlive their engine, as processes do.
static ALL: LazyLock<Mutex<BTreeMap<Key, Arc<Running>>>> = LazyLock::new(Mutex::default);

type Key = (InstanceId, SandboxId);

/// A thread that has not ended.
#[derive(Debug)]
struct Running {
    wish: Mutex<Wish>,
    changed: Condvar,
    /// Readable while the wish is not to run.
    alarm: OwnedFd,
    inside: Mutex<Inside>,
}

/// What is wanted of a thread, and what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    Run,
    /// To stop; true once it has.
    Stop(bool),
    End,
    /// It has.
    Ended,
}

/// What comes back from an image.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Inside {
    memory: Memory,
    /// Answers that nobody has read yet.
    unsent: Vec<u8>,
}

impl Threads {
    pub(super) fn new(instance: InstanceId, script: Arc<dyn Script>) -> Self {
        Self { instance, script }
    }

    fn key(&self, id: &SandboxId) -> Key {
        (self.instance.clone(), id.clone())
    }

    fn of(&self, id: &SandboxId) -> Option<Arc<Running>> {
        lock(&ALL).get(&self.key(id)).cloned()
    }

    fn run(&self, id: &SandboxId, folder: &Folder, inside: Inside) -> Result<Agent, EngineError> {
        let failed = |error: io::Error| step("start a thread", error);
        let stdio = folder.session().agent_stdio()?;
        for fd in [&stdio.stdin, &stdio.stdout] {
            rustix::io::ioctl_fionbio(fd, true).map_err(|errno| failed(errno.into()))?;
        }
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed(errno.into()))?;
        let running = Arc::new(Running {
            wish: Mutex::new(Wish::Run),
            changed: Condvar::new(),
            alarm,
            inside: Mutex::new(inside),
        });
        let (script, home, key) = (Arc::clone(&self.script), folder.home(), self.key(id));
        let thread = Arc::clone(&running);
        lock(&ALL).insert(key.clone(), running);
        let started = std::thread::Builder::new().name("scripted".into()).spawn(move || {
            // Also if the script panics.
            let _end = End { running: &thread, key };
            if let Err(error) = thread.live(&*script, &home, &stdio) {
                tracing::warn!(%error, "a scripted sandbox ended");
            }
        });
        if let Err(error) = started {
            lock(&ALL).remove(&self.key(id));
            return Err(failed(error));
        }
        let me = i32::try_from(std::process::id()).map_err(|error| step("name this process", error))?;
        Agent::of(me).map_err(|error| step("name this process", error))
    }
}

/// Says that a thread has ended, however it did.
struct End<'a> {
    running: &'a Running,
    key: Key,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        lock(&ALL).remove(&self.key);
        self.running.set(Wish::Ended);
    }
}

impl Running {
    fn set(&self, wish: Wish) {
        let mut now = lock(&self.wish);
        if *now != Wish::Ended {
            *now = wish;
        }
        // It may be as it shall be already.
        let _ = match *now {
            Wish::Run => rustix::io::read(&self.alarm, &mut [0; 8]),
            _ => rustix::io::write(&self.alarm, &1_u64.to_ne_bytes()),
        };
        self.changed.notify_all();
    }

    /// Stops for as long as it shall, and tells whether it may go on: it ends otherwise. One hold of the lock from the
    /// look to the wait, or a wish that comes between them would be waited out without being granted.
    fn may_go_on(&self) -> bool {
        let mut now = lock(&self.wish);
        while let Wish::Stop(stopped) = &mut *now {
            *stopped = true;
            self.changed.notify_all();
            now = self.changed.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
        *now == Wish::Run
    }

    /// Waits for a wish that `reached` is true of.
    fn wait(&self, deadline: Option<Instant>, reached: impl Fn(Wish) -> bool) -> io::Result<Wish> {
        let mut now = lock(&self.wish);
        while !reached(*now) {
            let Some(deadline) = deadline else {
                now = self.changed.wait(now).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            now = self.changed.wait_timeout(now, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(*now)
    }

    /// What the thread does: a turn for each input, unless it is to stop or end.
    fn live(&self, script: &dyn Script, home: &Path, stdio: &AgentStdio) -> io::Result<()> {
        let mut input = vec![0; MAX_INPUT];
        loop {
            if !self.may_go_on() {
                return Ok(());
            }
            let sending = !lock(&self.inside).unsent.is_empty();
            let (fd, flags) =
                if sending { (&stdio.stdout, PollFlags::OUT) } else { (&stdio.stdin, PollFlags::IN) };
            let mut fds = [PollFd::new(&self.alarm, PollFlags::IN), PollFd::new(fd, flags)];
            match poll(&mut fds, None) {
                Ok(_) if !fds[0].revents().is_empty() => continue,
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let inside = &mut *lock(&self.inside);
            let moved = if sending {
                rustix::io::write(fd, &inside.unsent).map(|n| drop(inside.unsent.drain(..n)))
            } else {
                match rustix::io::read(fd, &mut input) {
                    Ok(len) => {
                        let Inside { memory, unsent: output } = inside;
                        let turn = Turn { memory, home, input: &input[..len], output };
                        if script.turn(turn) == Next::End {
                            return Ok(());
                        }
                        Ok(())
                    }
                    Err(errno) => Err(errno),
                }
            };
            match moved {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Model for Threads {
    fn start(&self, id: &SandboxId, folder: &Folder) -> Result<Agent, EngineError> {
        self.run(id, folder, Inside::default())
    }

    fn life(&self, id: &SandboxId, _: Option<Agent>) -> Result<Life, EngineError> {
        Ok(match self.of(id).map(|running| *lock(&running.wish)) {
            None | Some(Wish::End | Wish::Ended) => Life::Gone,
            Some(Wish::Stop(_)) => Life::Stopped,
            Some(Wish::Run) => Life::Running,
        })
    }

    fn alive(&self) -> Result<BTreeSet<SandboxId>, EngineError> {
        let all = lock(&ALL);
        Ok(all.keys().filter(|(of, _)| *of == self.instance).map(|(_, id)| id.clone()).collect())
    }

    fn stop(&self, id: &SandboxId, _: Option<Agent>) -> Result<(), EngineError> {
        let Some(running) = self.of(id) else { return Ok(()) };
        running.set(Wish::Stop(false));
        let stopped = running.wait(Some(Instant::now() + PATIENCE), |wish| wish != Wish::Stop(false));
        stopped.map(|_| ()).map_err(|error| step("stop the script", error))
    }

    fn go_on(&self, id: &SandboxId, _: Option<Agent>) -> Result<(), EngineError> {
        if let Some(running) = self.of(id) {
            running.set(Wish::Run);
        }
        Ok(())
    }

    fn kill(&self, id: &SandboxId, _: Option<Agent>) -> Result<(), EngineError> {
        let Some(running) = self.of(id) else { return Ok(()) };
        running.set(Wish::End);
        let ended = running.wait(Some(Instant::now() + PATIENCE), |wish| wish == Wish::Ended);
        ended.map(|_| ()).map_err(|error| step("end the script", error))
    }

    fn wait(&self, id: &SandboxId, _: Option<Agent>) -> Result<(), EngineError> {
        let Some(running) = self.of(id) else { return Ok(()) };
        let ended = running.wait(None, |wish| wish == Wish::Ended);
        ended.map(|_| ()).map_err(|error| step("wait for the script", error))
    }

    fn usage(&self, id: &SandboxId, _: Option<Agent>) -> Result<Stats, EngineError> {
        let Some(running) = self.of(id) else { return Ok(Stats::default()) };
        let inside = lock(&running.inside);
        let memory = inside.memory.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        let memory_bytes = memory as u64;
        Ok(Stats { memory_bytes, memory_peak_bytes: memory_bytes, processes: 1, ..Stats::default() })
    }

    fn checkpoints(&self) -> bool {
        true
    }

    fn checkpoint(&self, spec: &SandboxSpec, folder: &Folder, target: &Path) -> Result<(), EngineError> {
        let running = self.of(&spec.id).ok_or_else(|| EngineError::NotFound(spec.id.clone()))?;
        let inside = lock(&running.inside).clone();
        image::write(target, spec, Some(&inside), &folder.home())
    }

    fn keep_disk(&self, spec: &SandboxSpec, folder: &Folder, target: &Path) -> Result<(), EngineError> {
        image::write(target, spec, None, &folder.home())
    }

    fn lay_out(&self, spec: &SandboxSpec, folder: &Folder, source: &Path) -> Result<(), EngineError> {
        image::read(source, spec, &folder.home()).map(drop)
    }

    fn restore(&self, spec: &SandboxSpec, folder: &Folder, source: &Path) -> Result<Agent, EngineError> {
        let inside = image::read(source, spec, &folder.home())?.ok_or_else(no_memory)?;
        self.run(&spec.id, folder, inside)
    }

    fn check(&self, spec: &SandboxSpec, source: &Path) -> Result<(), EngineError> {
        image::check(source, spec)?.ok_or_else(no_memory).map(drop)
    }
}

fn no_memory() -> EngineError {
    step("match the image", "it was made without memory")
}
