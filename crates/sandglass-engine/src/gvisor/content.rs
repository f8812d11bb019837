//! Work on the content of volumes, each piece of it by a process of its own.
//!
//! What is on a volume is a guest's, so the host does not touch it. It starts `sandglass volume-content`, which answers one question
//! and ends, in a mount namespace where the volume is, and in a control group for all such processes. Nothing keeps one: it
//! ends with the socket on which it was asked, be it because the other half is gone, and the mount and the group go with it.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sandglass_linux::cgroup::{Ceiling, Leaf};
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::process::{Launch, Step, spawn};
use sandglass_types::VolumeId;

use super::volumes::{FILES, MOUNT_OPTIONS};
use super::{GvisorEngine, make};
use crate::engine::{EngineError, Lack, step};
use crate::locks::lock;

/// Processes at one time. The other half asks for fewer.
const MAX_PROCESSES: usize = 32;

/// What they may use together. Most of their memory is that of the files that they read.
const CEILING: Ceiling =
    Ceiling { cpu_quota_micros: 100_000, cpu_period_micros: 100_000, memory_bytes: 256 << 20, processes: 64 };

/// Descriptors that each may have.
const OPEN_FILES: u64 = 256;

/// Their control group.
const GROUP: &str = "content";

/// How long their empty group may take to go away.
const PATIENCE: Duration = Duration::from_secs(5);

const MS_NOSUID: u64 = 2;
const MS_NODEV: u64 = 4;
const MS_NOEXEC: u64 = 8;
const MS_NOSYMFOLLOW: u64 = 256;
const MS_NOATIME: u64 = 1024;

/// Those that are at work.
#[derive(Debug, Clone, Default)]
pub(super) struct Workers(Arc<Mutex<usize>>);

/// One of them. The last one takes the group away.
struct Worker {
    of: Workers,
    group: Leaf,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let mut count = lock(&self.of.0);
        *count -= 1;
        if *count == 0
            && let Err(error) = self.group.remove(PATIENCE)
        {
            tracing::warn!(%error, "the control group of work on volumes stays");
        }
    }
}

impl GvisorEngine {
    /// Starts one that answers one question about this volume. Returns the socket to ask it on.
    pub(super) fn start_worker(&self, program: &PathBuf, id: &VolumeId) -> Result<OwnedFd, EngineError> {
        let failed = "work on the volume";
        let device = self.attach_volume(id)?;
        let target = self.holdings.paths.content_mount();
        let string =
            |bytes: &std::ffi::OsStr| CString::new(bytes.as_bytes()).map_err(|error| step(failed, error));
        let mounts = MountNamespace::furnish(
            Propagation::Slave,
            &[Mount {
                source: string(device.path().as_os_str())?,
                target: string(target.as_os_str())?,
                fstype: c"ext4".into(),
                flags: MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOSYMFOLLOW | MS_NOATIME,
                data: string(std::ffi::OsStr::new(MOUNT_OPTIONS))?,
            }],
        );
        let mounts = mounts.map_err(|error| step(failed, error))?;
        drop(device);
        let (ours, theirs) = UnixStream::pair().map_err(|error| step(failed, error))?;
        let group = self.holdings.cgroups.leaf(GROUP).map_err(|error| step(failed, error))?;
        let mut count = lock(&self.workers.0);
        if *count >= MAX_PROCESSES {
            let source = format!("{MAX_PROCESSES} are at work on volumes").into();
            return Err(EngineError::NoRoom { lack: Lack::Processes, step: failed, source });
        }
        *count += 1;
        let worker = Worker { of: self.workers.clone(), group: group.clone() };
        let started = group
            .make()
            .and_then(|()| group.limit(&CEILING))
            .map_err(|error| step(failed, error))
            .and_then(|()| make::before(&group, mounts, None))
            .and_then(|steps| {
                sandglass_failpoint::hit("engine.volume.work")?;
                let launch = Launch::new(program)
                    .and_then(|launch| launch.arg("volume-content")?.arg(target.join(FILES))?.stdin(&theirs))
                    .map_err(|error| step(failed, error))?;
                let launch = launch.step(Step::OpenFiles(OPEN_FILES)).steps(steps);
                spawn(&launch).map_err(|error| step(failed, error))
            });
        drop(count);
        let child = started?;
        let wait = move || {
            if let Err(error) = child.wait(None) {
                tracing::warn!(%error, "a process that worked on a volume can't be waited for");
            }
            drop(worker);
        };
        std::thread::Builder::new().stack_size(64 << 10).spawn(wait).map_err(|error| step(failed, error))?;
        Ok(ours.into())
    }
}
