//! Work on the content of volumes, each piece of it by a process of its own.
//!
//! What is on a volume is a guest's, so the host does not touch it. It starts `sandglass volume-content`, which answers one question
//! and ends, in a mount namespace where the volume is.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;

use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::process::Launch;
use sandglass_types::VolumeId;

use super::volumes::{FILES, MOUNT_OPTIONS};
use super::workers::Workers;
use super::{GvisorEngine, make};
use crate::engine::{EngineError, step};

/// Processes at one time. The other half asks for fewer.
const MAX_PROCESSES: usize = 32;

const FAILED: &str = "work on the volume";

pub(super) fn workers() -> Workers {
    Workers::new("content", MAX_PROCESSES, FAILED)
}

impl GvisorEngine {
    /// Starts one that answers one question about this volume. Returns the socket to ask it on.
    pub(super) fn start_worker(&self, id: &VolumeId) -> Result<OwnedFd, EngineError> {
        let device = self.attach_volume(id)?;
        let target = self.holdings.paths.content_mount();
        let string =
            |bytes: &std::ffi::OsStr| CString::new(bytes.as_bytes()).map_err(|error| step(FAILED, error));
        let mounts = MountNamespace::furnish(
            Propagation::Slave,
            &[Mount {
                source: string(device.path().as_os_str())?,
                target: string(target.as_os_str())?,
                fstype: c"ext4".into(),
                flags: make::MS_GUARDED,
                data: string(std::ffi::OsStr::new(MOUNT_OPTIONS))?,
            }],
        );
        let mounts = mounts.map_err(|error| step(FAILED, error))?;
        drop(device);
        let started = self.workers.start(&self.holdings.cgroups, mounts, |theirs| {
            Launch::new(&self.worker_program)?.arg("volume-content")?.arg(target.join(FILES))?.stdin(theirs)
        });
        started.map(|(socket, _)| socket)
    }
}
