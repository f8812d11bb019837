//! Reading the files of a sandbox from outside, each time by a process of its own.
//!
//! It starts `sandglass collect-files`, which answers one question and ends, in a mount namespace where the files are, and
//! where nothing can be written. They are there once more as the sandbox has them, whether it runs or is dead: by an overlay
//! whose layers are the folder that the sandbox writes to, the agent's and the template's, none of which is its upper one.
//! So files that were deleted are gone, and those of the template are there, without anybody who knows how overlayfs
//! writes that down.
//!
//! What a guest could make of that: overlayfs obeys marks in `trusted.` attributes and character devices with the number 0.
//! It lets nobody make either through a mount of its own, which is all that the sandbox has. Even so, such a mark can but say
//! what of the layers below is shown in which place, and of those the sandbox sees all. Marks in `user.` attributes are not
//! obeyed, since the mount does not ask for it (`userxattr`), and content is never taken from another place (`metacopy`).
//!
//! A sandbox that is paused has no processes, and its disk is in an image that must stay as it is, while the file system on it
//! can be mounted only by who writes to it: its journal is not empty. So a copy of it is mounted, which has no name.

use std::collections::HashMap;
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::process::{Child, Launch};
use sandglass_types::SandboxId;

use super::image::Image;
use super::record::{Pinned, Restore};
use super::workers::Workers;
use super::{GvisorEngine, disk, image, layer, make};
use crate::collect::Tree;
use crate::engine::{EngineError, step};
use crate::locks::lock;

/// Processes at one time. The other half asks for fewer.
const MAX_PROCESSES: usize = 16;

const FAILED: &str = "read the files of the sandbox";

/// How long one that is killed may take to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// As the layers of a sandbox are put together, by who writes to none of them.
const OVERLAY_OPTIONS: &str = "redirect_dir=follow,metacopy=off,index=off";

/// Those who read files of sandboxes.
#[derive(Debug)]
pub(super) struct Collectors {
    workers: Workers,
    of: Mutex<HashMap<SandboxId, Vec<Arc<Child>>>>,
}

impl Default for Collectors {
    fn default() -> Self {
        Self { workers: Workers::new("collect", MAX_PROCESSES, FAILED), of: Mutex::default() }
    }
}

impl Collectors {
    /// Remembers one, and forgets all that have ended.
    fn add(&self, id: &SandboxId, child: Arc<Child>) {
        let mut of = lock(&self.of);
        for children in of.values_mut() {
            children.retain(|child| !matches!(child.pidfd().wait_end(Some(Instant::now())), Ok(true)));
        }
        of.retain(|_, children| !children.is_empty());
        of.entry(id.clone()).or_default().push(child);
    }

    /// Ends those of one sandbox, which is to be removed.
    pub(super) fn end(&self, id: &SandboxId) -> Result<(), EngineError> {
        let children = lock(&self.of).remove(id).unwrap_or_default();
        let deadline = Instant::now() + PATIENCE;
        for child in children {
            let ended = child.pidfd().kill().and_then(|()| child.pidfd().wait_end(Some(deadline)));
            if !ended.map_err(|error| step(FAILED, error))? {
                return Err(step(FAILED, format!("process {} does not end", child.pid())));
            }
        }
        Ok(())
    }
}

/// A disk that is attached, and what is on it.
struct Attached {
    device: LoopDevice,
    pinned: Pinned,
}

impl GvisorEngine {
    /// Starts one that answers one question about this sandbox. Returns the socket to ask it on.
    pub(super) fn start_collector(&self, id: &SandboxId, tree: Tree) -> Result<OwnedFd, EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        sandglass_failpoint::hit("engine.collect.attach")?;
        let Attached { device, pinned } = self.attach_for_reading(id)?;
        let (mounts, root) = self.mount_for_reading(&device, &pinned, tree)?;
        drop(device);
        let (socket, child) = self.collectors.workers.start(&self.holdings.cgroups, mounts, |theirs| {
            Launch::new(&self.worker_program)?.arg("collect-files")?.arg(root)?.stdin(theirs)
        })?;
        self.collectors.add(id, child);
        Ok(socket)
    }

    /// The disk of a sandbox that is there, else a copy of the one in its image.
    fn attach_for_reading(&self, id: &SandboxId) -> Result<Attached, EngineError> {
        let there = match self.holdings.record(id) {
            // One that was made ahead for an image has nothing that is not in that.
            Ok(record) if !matches!(record.restore, Some(Restore::Waits(_))) => Some(record.pinned),
            Ok(_) | Err(EngineError::NotFound(_)) => None,
            Err(error) => return Err(error),
        };
        if let Some(pinned) = there {
            let path = self.holdings.paths.sandbox(id).disk();
            let name = path.file_name().unwrap_or_default();
            // The device that its own processes have, if there are any: the kernel has one file system for both then.
            let device = open(&path)
                .and_then(|file| LoopDevice::attach_once(file.file(), name))
                .map_err(|error| make::no_device(FAILED, error))?;
            return Ok(Attached { device, pinned });
        }
        let users = self.users.of(id);
        let _wanting = users.want();
        let (_as_it_is, found) = self.plain(&users, id)?;
        let pinned = found.meta()?.pinned;
        let device = self.attach_copy(&found)?;
        Ok(Attached { device, pinned })
    }

    fn attach_copy(&self, found: &Image) -> Result<LoopDevice, EngineError> {
        let failed = |error: io::Error| step(FAILED, error);
        let aside = image::aside(&self.holdings.paths.images()).map_err(failed)?;
        let copy = aside.path().join("disk.img");
        disk::copy(&found.disk(), &copy, None).map_err(failed)?;
        let file = open(&copy).map_err(failed)?;
        let device = LoopDevice::attach(file.file()).map_err(|error| make::no_device(FAILED, error))?;
        // It is there for as long as the device is.
        aside.close().map_err(failed)?;
        Ok(device)
    }

    /// A namespace where the files are, and the folder that is to be the whole file system of who reads them.
    fn mount_for_reading(
        &self,
        device: &LoopDevice,
        pinned: &Pinned,
        tree: Tree,
    ) -> Result<(MountNamespace, PathBuf), EngineError> {
        let paths = &self.holdings.paths;
        let string = |bytes: &OsStr| CString::new(bytes.as_bytes()).map_err(|error| step(FAILED, error));
        let disk = paths.collected_disk_mount();
        let mut mounts = vec![
            Mount {
                source: string(device.path().as_os_str())?,
                target: string(disk.as_os_str())?,
                fstype: c"ext4".into(),
                flags: make::MS_GUARDED,
                data: string(OsStr::new(disk::MOUNT_OPTIONS))?,
            },
            // This mount of it alone: the file system has its journal to write, and may have a sandbox that writes.
            Mount {
                source: c"".into(),
                target: string(disk.as_os_str())?,
                fstype: c"".into(),
                flags: make::MS_GUARDED | make::MS_REMOUNT | make::MS_BIND | make::MS_RDONLY,
                data: c"".into(),
            },
        ];
        let root = match tree {
            Tree::Tmp => disk.join(disk::TMP),
            Tree::Root => {
                let root = paths.collected_mount();
                let layers =
                    [disk.join(disk::UPPER), layer::path(paths, &pinned.agent), paths.rootfs(&pinned.rootfs)];
                mounts.push(Mount {
                    source: c"overlay".into(),
                    target: string(root.as_os_str())?,
                    fstype: c"overlay".into(),
                    flags: make::MS_GUARDED | make::MS_RDONLY,
                    data: string(&overlay_options(&layers))?,
                });
                root
            }
        };
        let furnished = MountNamespace::furnish(Propagation::Slave, &mounts);
        Ok((furnished.map_err(|error| step(FAILED, error))?, root))
    }
}

fn overlay_options(layers: &[PathBuf]) -> OsString {
    let mut options = OsString::from(OVERLAY_OPTIONS);
    options.push(",lowerdir=");
    for (index, layer) in layers.iter().enumerate() {
        if index > 0 {
            options.push(":");
        }
        options.push(layer);
    }
    options
}

fn open(path: &Path) -> io::Result<fs_err::File> {
    fs_err::OpenOptions::new().read(true).write(true).open(path)
}
