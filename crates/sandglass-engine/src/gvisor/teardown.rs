//! Ending a sandbox, from any half-made state.
//!
//! What belongs to it is found by its id alone: processes by cgroup, files by folder. Its mounts are in a namespace
//! that only its own processes hold, and its loop device detaches with the last mount, so both go with them.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use sandglass_linux::cgroup::Leaf;
use sandglass_linux::loopdev::{self, LoopMount};
use sandglass_linux::process::PidFd;

use crate::engine::{EngineError, step};

/// How long killed processes and what they held may take to go away. Milliseconds are usual; a machine that is
/// short of memory may need long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Kills every process of the group and waits until it is empty.
pub(super) fn kill(leaf: &Leaf) -> Result<(), EngineError> {
    let failed = "end the processes of the sandbox";
    let deadline = Instant::now() + PATIENCE;
    // More than one round, because a process may fork between the list and the signal.
    loop {
        let mut held = Vec::new();
        for pid in leaf.processes().map_err(|error| step(failed, error))? {
            if let Some(fd) = PidFd::open(pid).map_err(|error| step(failed, error))? {
                held.push((pid, fd));
            }
        }
        if held.is_empty() {
            break;
        }
        // A pid that is in the group after its descriptor was made is the process of that descriptor, or of a
        // dead one.
        let members = leaf.processes().map_err(|error| step(failed, error))?;
        held.retain(|(pid, _)| members.contains(pid));
        for (_, fd) in &held {
            fd.kill().map_err(|error| step(failed, error))?;
        }
        for (pid, fd) in &held {
            if !fd.wait_end(Some(deadline)).map_err(|error| step(failed, error))? {
                return Err(step(failed, format!("process {pid} does not end")));
            }
        }
    }
    Ok(())
}

/// Removes the group, which no process is in any more.
pub(super) fn remove_group(leaf: &Leaf) -> Result<(), EngineError> {
    leaf.remove(PATIENCE).map_err(|error| step("remove the control group", error))
}

/// Throws away what the disk's file system has not written yet, so that the kernel need not write it when the last
/// process ends. Best effort: without it the end only takes longer.
pub(super) fn abandon_disk(leaf: &Leaf, disk: &Path) {
    match find_disk(leaf, disk) {
        Ok(Some(mount)) => {
            if let Err(error) = mount.abandon() {
                tracing::debug!(%error, "the disk of a dying sandbox is written to the end");
            }
        }
        Ok(None) => {}
        Err(error) => tracing::debug!(%error, "the disk of a dying sandbox was not found"),
    }
}

/// The mounted disk of a sandbox, reached through `/tmp` of its gofer: a mount point in a root that the guest can
/// write to but not rename, and the device behind it is checked.
pub(super) fn find_disk(leaf: &Leaf, disk: &Path) -> io::Result<Option<LoopMount>> {
    for pid in leaf.processes().map_err(io::Error::other)? {
        let Ok(folder) = open_folder(&format!("/proc/{pid}/root/tmp")) else { continue };
        if let Some(mount) = LoopMount::of(folder, disk)? {
            return Ok(Some(mount));
        }
    }
    Ok(None)
}

fn open_folder(path: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

/// Waits until no loop device has this disk behind it: the kernel detaches it when the last mount is gone, some
/// moments after the last process is.
pub(super) fn wait_detached(disk: &Path) -> Result<(), EngineError> {
    let failed = "detach the disk of the sandbox";
    let deadline = Instant::now() + PATIENCE;
    let mut deleted = disk.as_os_str().to_owned();
    deleted.push(" (deleted)");
    loop {
        let attached = loopdev::attached().map_err(|error| step(failed, error))?;
        let Some((index, _)) =
            attached.iter().find(|(_, path)| path == disk || *path == *Path::new(&deleted))
        else {
            return Ok(());
        };
        if Instant::now() >= deadline {
            return Err(step(failed, format!("loop device {index} is still in use")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
