//! The one place that collects ended children.
//!
//! As PID 1 the agent also inherits every orphan of the sandbox, so exactly one thread waits, for any child, and
//! hands each status to whoever started that process. A process is known here *before* it exists: the kernel
//! itself writes its id into the [`Child`] during `clone`, so a status can't arrive too early for its owner.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};
use tokio::sync::watch;

use crate::exec::{self, Spawn, SpawnError};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// By itself, with this code.
    Exited(i32),
    /// By this signal.
    Signaled(i32),
}

/// A started process.
#[derive(Debug)]
pub(crate) struct Child {
    pid: AtomicI32,
    status: watch::Sender<Option<Status>>,
}

impl Child {
    /// Its process id.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.load(Ordering::Acquire)
    }

    /// A process that is about to be started.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { pid: AtomicI32::new(0), status: watch::Sender::new(None) })
    }

    #[cfg(test)]
    pub(crate) fn for_test(status: Option<Status>) -> Self {
        Self { pid: AtomicI32::new(0), status: watch::Sender::new(status) }
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.status.borrow().is_some()
    }

    /// Waits until it has ended.
    pub(crate) async fn wait(&self) -> Status {
        let mut status = self.status.subscribe();
        // The sender lives in `self`, so the channel can't close while this waits.
        match status.wait_for(Option::is_some).await {
            Ok(status) => status.unwrap_or(Status::Exited(-1)),
            Err(_) => Status::Exited(-1),
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    children: Mutex<Vec<Arc<Child>>>,
    /// Signalled when a process was started, so that the thread waits again after it had none.
    started: Condvar,
}

impl Shared {
    fn children(&self) -> MutexGuard<'_, Vec<Arc<Child>>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts processes and collects all children of this process.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reaper {
    shared: Arc<Shared>,
}

impl Reaper {
    /// A reaper whose thread runs until the process ends.
    ///
    /// # Errors
    /// The thread could not be started.
    pub(crate) fn start() -> std::io::Result<Self> {
        let reaper = Self::default();
        let shared = Arc::clone(&reaper.shared);
        std::thread::Builder::new().name("reaper".into()).stack_size(64 * 1024).spawn(move || {
            loop {
                collect(&shared);
            }
        })?;
        Ok(reaper)
    }

    /// Starts a program as `child`; blocks until it runs.
    ///
    /// # Errors
    /// As [`exec::spawn`].
    pub(crate) fn spawn(&self, request: &Spawn<'_>, child: &Arc<Child>) -> Result<(), SpawnError> {
        self.shared.children().push(Arc::clone(child));
        let result = exec::spawn(request, &child.pid);
        if child.pid() == 0 {
            // There never was a process that could be collected.
            self.shared.children().retain(|other| !Arc::ptr_eq(other, child));
        }
        // Under the lock: the thread must not fall asleep between looking at the list and waiting.
        let children = self.shared.children();
        self.shared.started.notify_all();
        drop(children);
        result
    }

    /// Signals a child, or its whole process group; nothing happens if it has ended.
    pub(crate) fn signal(&self, child: &Child, signal: Signal, group: bool) {
        // The lock keeps the process id from being collected and used again for another.
        let _children = self.shared.children();
        if let (false, Some(pid)) = (child.has_ended(), Pid::from_raw(child.pid())) {
            let _ = if group {
                rustix::process::kill_process_group(pid, signal)
            } else {
                rustix::process::kill_process(pid, signal)
            };
        }
    }
}

/// Collects what has ended, or waits until something does.
fn collect(shared: &Shared) {
    // Looks without collecting, so that a process id stays taken until its status is stored under the lock: who
    // holds the lock may signal any child without one.
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    match rustix::process::waitid(WaitId::All, look) {
        Ok(_) => {
            let mut children = shared.children();
            while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
                let status = match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => Status::Exited(code),
                    (None, Some(signal)) => Status::Signaled(signal),
                    (None, None) => continue,
                };
                // Orphans that nobody here started have no entry: they are only collected.
                let pid = pid.as_raw_nonzero().get();
                if let Some(index) = children.iter().position(|child| child.pid() == pid) {
                    children.swap_remove(index).status.send_replace(Some(status));
                }
            }
        }
        Err(Errno::INTR) => {}
        Err(_) => {
            // No child at all: then there is no descendant either, so nothing can be inherited meanwhile.
            let children = shared.children();
            if children.iter().all(|child| child.pid() == 0) {
                drop(shared.started.wait(children).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }
}
