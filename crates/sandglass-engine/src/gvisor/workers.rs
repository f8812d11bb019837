//! Processes that read and change what guests wrote, each for one question, so that neither half of the server does.
//!
//! Each is in a mount namespace of its own, and all of one kind are in a control group. Nothing keeps one: it ends with the
//! socket on which it was asked, be it because the other half is gone, and the mounts and the group go with it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sandglass_linux::cgroup::{Ceiling, Cgroups, Leaf};
use sandglass_linux::mount::MountNamespace;
use sandglass_linux::process::{Child, Launch, LaunchError, Step, spawn};

use super::make;
use crate::engine::{EngineError, Lack, step};
use crate::locks::lock;

/// What those of one kind may use together. Most of their memory is that of the files that they read.
const CEILING: Ceiling =
    Ceiling { cpu_quota_micros: 100_000, cpu_period_micros: 100_000, memory_bytes: 256 << 20, processes: 64 };

/// Descriptors that each may have.
const OPEN_FILES: u64 = 256;

/// How long their empty group may take to go away.
const PATIENCE: Duration = Duration::from_secs(5);

/// Those of one kind that are at work.
#[derive(Debug)]
pub(super) struct Workers {
    /// Their control group.
    group: &'static str,
    /// How many there may be at one time.
    most: usize,
    /// What they do.
    what: &'static str,
    count: Arc<Mutex<usize>>,
}

/// One of them. The last one takes the group away.
struct Worker {
    count: Arc<Mutex<usize>>,
    group: Leaf,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let mut count = lock(&self.count);
        *count -= 1;
        if *count == 0
            && let Err(error) = self.group.remove(PATIENCE)
        {
            tracing::warn!(%error, "the control group of processes that work for others stays");
        }
    }
}

impl Workers {
    pub(super) fn new(group: &'static str, most: usize, what: &'static str) -> Self {
        Self { group, most, what, count: Arc::default() }
    }

    /// Starts one in this namespace, with its question on standard input. Returns the socket to ask it on.
    pub(super) fn start(
        &self,
        cgroups: &Cgroups,
        mounts: MountNamespace,
        launch: impl FnOnce(&UnixStream) -> Result<Launch, LaunchError>,
    ) -> Result<(OwnedFd, Arc<Child>), EngineError> {
        let failed = self.what;
        let (ours, theirs) = UnixStream::pair().map_err(|error| step(failed, error))?;
        let group = cgroups.leaf(self.group).map_err(|error| step(failed, error))?;
        let mut count = lock(&self.count);
        if *count >= self.most {
            let source = format!("{} are at it", self.most).into();
            return Err(EngineError::NoRoom { lack: Lack::Processes, step: failed, source });
        }
        *count += 1;
        let worker = Worker { count: Arc::clone(&self.count), group: group.clone() };
        let started = group
            .make()
            .and_then(|()| group.limit(&CEILING))
            .map_err(|error| step(failed, error))
            .and_then(|()| make::before(&group, mounts, None))
            .and_then(|steps| {
                sandglass_failpoint::hit("engine.worker.start")?;
                let launch = launch(&theirs).map_err(|error| step(failed, error))?;
                let launch = launch.step(Step::OpenFiles(OPEN_FILES)).steps(steps);
                spawn(&launch).map_err(|error| step(failed, error))
            });
        drop(count);
        let child = Arc::new(started?);
        let waited = Arc::clone(&child);
        let wait = move || {
            if let Err(error) = waited.wait(None) {
                tracing::warn!(%error, "a process that worked for others can't be waited for");
            }
            drop(worker);
        };
        std::thread::Builder::new().stack_size(64 << 10).spawn(wait).map_err(|error| step(failed, error))?;
        Ok((ours.into(), child))
    }
}
