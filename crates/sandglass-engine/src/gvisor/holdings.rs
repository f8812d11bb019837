//! What an instance holds on this machine, and how a sandbox's part of it is removed.
//!
//! That needs nothing of what sandboxes are made with. So it still works where `runsc` or the cache folder are gone.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use sandglass_linux::cgroup::{self, Cgroups, Leaf};
use sandglass_linux::process::{PidFd, boot_id};
use sandglass_types::{InstanceId, SandboxId};

use super::airlocks::Release;
use super::paths::HostPaths;
use super::record::Record;
use super::{runsc, teardown};
use crate::engine::{EngineError, step};
use crate::files::remove_folder;
use crate::record as records;
use crate::side_by_side::{both, side_by_side};

/// All that an instance holds.
#[derive(Debug)]
pub struct Holdings {
    pub(super) paths: HostPaths,
    airlocks: Option<Arc<dyn Release>>,
    pub(super) cgroups: Cgroups,
    pub(super) boot_id: String,
}

impl Holdings {
    /// Finds them and makes nothing. `paths` are as the kernel names them, because that is what mounts and loop devices are
    /// compared with.
    ///
    /// # Errors
    /// The machine has no control groups, or can't be read.
    pub fn open(
        paths: HostPaths,
        instance: &InstanceId,
        airlocks: Option<Arc<dyn Release>>,
    ) -> Result<Self, EngineError> {
        let cgroups = Cgroups::detect(Path::new(cgroup::ROOT), instance.as_str())
            .map_err(|error| step("find the control groups", error))?;
        let boot_id = boot_id().map_err(|error| step("read the boot id", error))?;
        Ok(Self { paths, airlocks, cgroups, boot_id })
    }

    pub(super) fn leaf(&self, id: &SandboxId) -> Result<Leaf, EngineError> {
        self.cgroups.leaf(id.as_str()).map_err(|error| step("name the control group", error))
    }

    /// The record of a sandbox that was made to the end.
    pub(super) fn record(&self, id: &SandboxId) -> Result<Record, EngineError> {
        records::read(&self.paths.sandbox(id).record(), id)
            .filter(|record: &Record| record.sandbox.is_some())
            .ok_or_else(|| EngineError::NotFound(id.clone()))
    }

    /// Its sandbox process, if that runs.
    pub(super) fn process(&self, record: &Record) -> Result<Option<PidFd>, EngineError> {
        let failed = |error: io::Error| step("look at the sandbox process", error);
        let Some(identity) = record.process(&self.boot_id) else { return Ok(None) };
        let Some(fd) = identity.open().map_err(failed)? else { return Ok(None) };
        // One that has ended and is not reaped yet still has its pid.
        Ok((!fd.wait_end(Some(Instant::now())).map_err(failed)?).then_some(fd))
    }

    /// Removes all that a sandbox owns, in whatever state it is; `Ok` if there is nothing of it. No other verb may be under
    /// way for it.
    ///
    /// # Errors
    /// The step that failed; call again.
    pub fn remove(&self, id: &SandboxId) -> Result<(), EngineError> {
        let paths = self.paths.sandbox(id);
        let leaf = self.leaf(id)?;
        sandglass_failpoint::hit("engine.remove.begin")?;
        // The network ends beside the processes: neither needs the other, and both wait for the kernel.
        let (released, killed) = side_by_side(
            || self.airlocks.as_ref().map_or(Ok(()), |airlocks| airlocks.release(id)),
            || {
                teardown::abandon_disk(&leaf, &paths.disk());
                sandglass_failpoint::hit("engine.remove.kill")?;
                self.kill_recorded(id)?;
                teardown::kill(&leaf)
            },
        );
        both(killed, released.map_err(|error| step("end the network", error)))?;
        sandglass_failpoint::hit("engine.remove.forget")?;
        runsc::forget(&self.paths.runsc_root(), id)
            .map_err(|error| step("remove the state of runsc", error))?;
        sandglass_failpoint::hit("engine.remove.group")?;
        teardown::remove_group(&leaf)?;
        sandglass_failpoint::hit("engine.remove.detach")?;
        teardown::wait_detached(&paths.disk())?;
        sandglass_failpoint::hit("engine.remove.folder")?;
        // Last, because it is what a list finds when all else is gone.
        remove_folder(paths.dir())?;
        sandglass_failpoint::hit("engine.remove.done").map_err(Into::into)
    }

    /// Kills the sandbox process by its record: somebody may have taken it out of the group by which all are found. The
    /// others end with it.
    fn kill_recorded(&self, id: &SandboxId) -> Result<(), EngineError> {
        let Ok(record) = self.record(id) else { return Ok(()) };
        let Some(process) = self.process(&record)? else { return Ok(()) };
        process.kill().map_err(|error| step("end the sandbox process", error))
    }
}

impl Drop for Holdings {
    /// Takes the instance's control group away with the last user, unless sandboxes are left in it.
    fn drop(&mut self) {
        if let Err(error) = self.cgroups.remove_parent() {
            tracing::debug!(%error, "the control group of the instance stays");
        }
    }
}
