//! Volumes: a file with an ext4 file system each, mounted by every sandbox that uses it.
//!
//! All of them mount the *same* loop device, so they share one file system of the kernel's: what one writes, the others
//! see. A second device of the same file would be a second file system on it, and the end of both. So devices are looked for
//! and attached under one lock, which is enough because one host has the data folder for itself. A device detaches with its last
//! mount; a host that starts anew finds those that running sandboxes still use.
//!
//! Unlike a sandbox's disk, what is on a volume is to outlast a crash of the machine. So it is mounted with the journal and
//! the barriers that ext4 has by default.

use std::io;
use std::path::Path;
use std::time::Duration;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use sandglass_linux::loopdev::{self, LoopDevice};
use sandglass_types::{MountPath, VolumeId, VolumeMount};

use super::disk;
use super::paths::{HostPaths, SandboxPaths};
use super::{GvisorEngine, make};
use crate::engine::{EngineError, step};
use crate::locks::lock;

/// How a volume is mounted. What is deleted gives its room back at once.
pub(super) const MOUNT_OPTIONS: &str = "discard,errors=remount-ro";

/// The folder on it that clients see: `mkfs.ext4` puts one of its own beside it.
pub(super) const FILES: &str = "files";

/// How it begins: whoever may use the volume may use all of it.
const CONTENT: [(&str, u32); 1] = [(FILES, 0o777)];

/// How the folder is called in which a volume is made.
const UNFINISHED: &str = ".new";

/// How long a device may take to detach once its last mount is gone.
const DETACH: Duration = Duration::from_secs(5);

/// A volume on its way into a sandbox.
#[derive(Debug)]
pub(super) struct Attached {
    /// Held until it is mounted.
    pub(super) device: LoopDevice,
    /// Which of the sandbox's it is.
    pub(super) index: usize,
}

/// Removes what hosts left that died while they made one.
pub(super) fn sweep(paths: &HostPaths) -> io::Result<()> {
    for entry in fs_err::read_dir(paths.volumes())? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().ends_with(UNFINISHED.as_bytes()) {
            fs_err::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Where the guest's kernel finds the volumes of a sandbox, and where it is to have them.
pub(super) fn binds<'a>(
    paths: &SandboxPaths,
    volumes: &'a [VolumeMount],
) -> Vec<(std::path::PathBuf, &'a MountPath)> {
    let bind =
        |(index, volume): (usize, &'a VolumeMount)| (paths.volume_mount(index).join(FILES), &volume.path);
    volumes.iter().enumerate().map(bind).collect()
}

impl GvisorEngine {
    /// Makes a volume of this size.
    pub(super) fn make_volume(&self, id: &VolumeId, mib: u32) -> Result<(), EngineError> {
        let _one_at_a_time = lock(&self.volumes);
        let target = self.holdings.paths.volume(id);
        if target.exists() {
            // A host died before it could say so.
            return Ok(());
        }
        sandglass_failpoint::hit("engine.volume.format")?;
        let failed = |error: io::Error| step("make the volume", error);
        let folder = self.holdings.paths.volumes();
        let aside = tempfile::Builder::new().suffix(UNFINISHED).tempdir_in(&folder).map_err(failed)?;
        let image = aside.path().join("image");
        let file = fs_err::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&image);
        let file = file.map_err(failed)?;
        file.set_len(u64::from(mib) << 20).map_err(failed)?;
        disk::format(&image, aside.path(), &CONTENT)?;
        file.sync_all().map_err(failed)?;
        sandglass_failpoint::hit("engine.volume.rename")?;
        fs_err::rename(&image, &target).map_err(failed)?;
        sync_folder(&folder).map_err(failed)
    }

    /// Removes a volume that nobody has mounted; `Ok` if there is none.
    pub(super) fn unmake_volume(&self, id: &VolumeId) -> Result<(), EngineError> {
        let failed = "remove the volume";
        let path = self.holdings.paths.volume(id);
        // Who had it last may just be gone.
        let until = std::time::Instant::now() + DETACH;
        loop {
            let held = lock(&self.volumes);
            let attached = loopdev::attached().map_err(|error| step(failed, error))?;
            let Some((index, _)) = attached.into_iter().find(|(_, found)| *found == path) else {
                sandglass_failpoint::hit("engine.volume.remove")?;
                return match fs_err::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(step(failed, error)),
                    _ => sync_folder(&self.holdings.paths.volumes()).map_err(|error| step(failed, error)),
                };
            };
            drop(held);
            if std::time::Instant::now() > until {
                return Err(step(failed, format!("it is mounted: /dev/loop{index} has it")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// All volumes that there are.
    pub(super) fn all_volumes(&self) -> Result<Vec<VolumeId>, EngineError> {
        let failed = |error: io::Error| step("list the volumes", error);
        let mut found = Vec::new();
        for entry in fs_err::read_dir(self.holdings.paths.volumes()).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".img")).and_then(|id| id.parse().ok());
            found.extend(id);
        }
        Ok(found)
    }

    /// Attaches the volumes of a sandbox. The devices must be held until they are mounted.
    pub(super) fn attach_volumes(&self, volumes: &[VolumeMount]) -> Result<Vec<Attached>, EngineError> {
        let attach = |(index, volume): (usize, &VolumeMount)| {
            Ok(Attached { device: self.attach_volume(&volume.id)?, index })
        };
        volumes.iter().enumerate().map(attach).collect()
    }

    /// The one device of a volume.
    pub(super) fn attach_volume(&self, id: &VolumeId) -> Result<LoopDevice, EngineError> {
        let _one_at_a_time = lock(&self.volumes);
        sandglass_failpoint::hit("engine.volume.attach")?;
        let path = self.holdings.paths.volume(id);
        let file = open(&path).map_err(|error| step("find the volume", error))?;
        LoopDevice::attach_once(file.file(), path.file_name().unwrap_or_default())
            .map_err(|error| make::no_device("attach the volume", error))
    }
}

fn open(path: &Path) -> io::Result<fs_err::File> {
    fs_err::OpenOptions::new().read(true).write(true).open(path)
}

fn sync_folder(path: &Path) -> io::Result<()> {
    fs_err::File::open(path)?.sync_all()
}
