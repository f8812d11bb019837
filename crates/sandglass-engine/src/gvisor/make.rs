//! Making a sandbox, new or from an image.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use sandglass_linux::cgroup::Leaf;
use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::process::{Cpus, ProcessIdentity, Step};

use super::disk;
use super::paths::SandboxPaths;
use super::runsc::no_network_settings;
use super::volumes::{self, Attached};
use crate::engine::{EngineError, Lack, step};
use crate::session::Session;

pub(super) const MS_RDONLY: u64 = 1;
const MS_NOSUID: u64 = 2;
const MS_NODEV: u64 = 4;
const MS_NOEXEC: u64 = 8;
pub(super) const MS_REMOUNT: u64 = 32;
const MS_NOSYMFOLLOW: u64 = 256;
const MS_NOATIME: u64 = 1024;
pub(super) const MS_BIND: u64 = 4096;

/// How what guests wrote is mounted for who works on it from outside: as data, and nothing else.
pub(super) const MS_GUARDED: u64 = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOSYMFOLLOW | MS_NOATIME;

/// The processors to start `runsc` on: it tells the guest that there are as many as it was started on itself. Nothing if
/// there are no more than that.
///
/// At least two, as `runsc` does when it counts by a quota: on one, programs leave out locks that they need
/// (`--cpu-num-from-quota` in its `sandbox.go`).
pub(super) fn cpus_for(limit: u32, all: &Cpus, turn: u64) -> Option<Cpus> {
    let wanted = limit.max(2);
    (all.count() > wanted).then(|| all.some(wanted, turn))
}

/// Makes the FIFOs of its session, and the bundle.
pub(super) fn write_bundle(paths: &SandboxPaths, spec: &serde_json::Value) -> Result<(), EngineError> {
    let failed = |error: io::Error| step("write the files of the sandbox", error);
    Session { folder: paths.dir() }.make().map_err(failed)?;
    fs_err::create_dir(paths.bundle()).map_err(failed)?;
    let text = serde_json::to_vec(spec).map_err(|error| failed(error.into()))?;
    fs_err::write(paths.bundle().join("config.json"), text).map_err(failed)
}

/// Attaches the disk. The device must be held until something is mounted from it.
fn attach_disk(paths: &SandboxPaths) -> Result<LoopDevice, EngineError> {
    let failed = "attach the disk";
    let file = fs_err::OpenOptions::new().read(true).write(true).open(paths.disk());
    let file = file.map_err(|error| step(failed, error))?;
    LoopDevice::attach(file.file()).map_err(|error| no_device(failed, error))
}

/// Whatever else the kernel says of a sound file, the machine has no device for it.
pub(super) fn no_device(step: &'static str, error: io::Error) -> EngineError {
    let lack = Lack::behind(&error).filter(|lack| matches!(lack, Lack::Memory | Lack::Descriptors));
    EngineError::NoRoom { lack: lack.unwrap_or(Lack::LoopDevices), step, source: error.into() }
}

/// The mounts that only the sandbox's own processes see: its disk, on it its root file system over the layer with the
/// agent and the template, and its volumes.
///
/// `runsc` tells the guest the smaller of the machine's memory and the control group's limit; the latter has room for
/// the engine itself, which is none of the guest's. So the former is made what the guest was promised.
pub(super) fn mount(
    paths: &SandboxPaths,
    layer: &Path,
    rootfs: &Path,
    memory_mib: u32,
    attached: &[Attached],
) -> Result<MountNamespace, EngineError> {
    let failed = |error: io::Error| step("prepare the mounts", error);
    for folder in [paths.disk_mount(), paths.root_mount()] {
        fs_err::create_dir(folder).map_err(failed)?;
    }
    let meminfo = format!("MemTotal: {} kB\n", u64::from(memory_mib) << 10);
    fs_err::write(paths.meminfo(), meminfo).map_err(failed)?;
    let device = attach_disk(paths)?;
    let disk = paths.disk_mount();
    let overlay = overlay_options(layer, rootfs, &disk);
    let string = |bytes: &OsStr| CString::new(bytes.as_bytes()).map_err(|error| failed(error.into()));
    let mut mounts = vec![
        no_network_settings(),
        Mount {
            source: string(paths.meminfo().as_os_str())?,
            target: c"/proc/meminfo".into(),
            fstype: c"".into(),
            flags: MS_BIND,
            data: c"".into(),
        },
        Mount {
            source: string(device.path().as_os_str())?,
            target: string(disk.as_os_str())?,
            fstype: c"ext4".into(),
            flags: MS_NOSUID | MS_NODEV | MS_NOATIME,
            data: string(OsStr::new(disk::MOUNT_OPTIONS))?,
        },
        Mount {
            source: c"overlay".into(),
            target: string(paths.root_mount().as_os_str())?,
            fstype: c"overlay".into(),
            flags: MS_NOSUID | MS_NODEV | MS_NOATIME,
            data: string(&overlay)?,
        },
    ];
    for Attached { device, index } in attached {
        let target = paths.volume_mount(*index);
        fs_err::create_dir(&target).map_err(failed)?;
        mounts.push(Mount {
            source: string(device.path().as_os_str())?,
            target: string(target.as_os_str())?,
            fstype: c"ext4".into(),
            flags: MS_NOSUID | MS_NODEV | MS_NOATIME,
            data: string(OsStr::new(volumes::MOUNT_OPTIONS))?,
        });
    }
    MountNamespace::furnish(Propagation::Slave, &mounts)
        .map_err(|error| step("mount the sandbox's files", error))
}

/// What the launcher does for a new sandbox: it joins the sandbox's group, so that even a half-made one is found and
/// killed by it, and goes where its mounts are.
pub(super) fn before(
    leaf: &Leaf,
    mounts: MountNamespace,
    cpus: Option<Cpus>,
) -> Result<Vec<Step>, EngineError> {
    let join = |folder: PathBuf| {
        let path = CString::new(folder.join("cgroup.procs").into_os_string().into_vec());
        path.map(Step::JoinCgroup).map_err(|error| step("name the control group", error))
    };
    // First and one after the other: the kernel waits for a grace period once, and nothing runs without limits.
    let mut steps = leaf.folders().map(join).collect::<Result<Vec<_>, _>>()?;
    steps.push(Step::EnterMounts(mounts.into()));
    steps.extend(cpus.map(Step::RunOn));
    Ok(steps)
}

/// How a sandbox's root file system is put together, its layers apart. Whole folders of the template can be renamed
/// (`redirect_dir`), as programs expect. What that relies on, extended attributes in `trusted.`, a guest can't write.
pub const OVERLAY_OPTIONS: &str = "redirect_dir=on,metacopy=off,index=off";

fn overlay_options(layer: &Path, rootfs: &Path, disk: &Path) -> std::ffi::OsString {
    let mut options = std::ffi::OsString::from(OVERLAY_OPTIONS);
    options.push(",lowerdir=");
    options.push(layer);
    options.push(":");
    options.push(rootfs);
    options.push(",upperdir=");
    options.push(disk.join(disk::UPPER));
    options.push(",workdir=");
    options.push(disk.join(disk::WORK));
    options
}

/// Whether a path can be part of overlayfs's options, where `:` and `,` separate and `\` escapes.
pub(super) fn fits_in_mount_options(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| b":,\\\"\n".contains(byte))
}

/// How readily the kernel picks the sandbox process when a group or the machine is out of memory (proc_pid_oom_score_adj(5)):
/// before any other. Left to choose, it would end one process of the guest, whose parent would see no more than a failure,
/// or, when it is the machine that lacks memory, a process of the server's.
const FIRST_TO_GO: &str = "1000";

/// Makes sure that where memory ends, the sandbox ends, whole and with a reason.
pub(super) fn end_first(sandbox: ProcessIdentity) -> Result<(), EngineError> {
    let file = format!("/proc/{}/oom_score_adj", sandbox.pid);
    fs_err::write(file, FIRST_TO_GO).map_err(|error| step("choose who ends when memory does", error))
}

/// The process that `runsc` made, as written to its pid file and checked against the sandbox's group.
pub(super) fn sandbox_process(paths: &SandboxPaths, leaf: &Leaf) -> Result<ProcessIdentity, EngineError> {
    let failed = "find the sandbox process";
    let text = fs_err::read_to_string(paths.pid_file()).map_err(|error| step(failed, error))?;
    let pid: i32 = text.trim().parse().map_err(|error: std::num::ParseIntError| step(failed, error))?;
    let identity = ProcessIdentity::of(pid).map_err(|error| step(failed, error))?;
    if leaf.processes().map_err(|error| step(failed, error))?.contains(&pid) {
        Ok(identity)
    } else {
        Err(step(failed, format!("process {pid} is not in the sandbox's control group")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_would_change_the_options_are_refused() {
        assert!(fits_in_mount_options(Path::new("/var/cache/sand glass")));
        for path in ["/a:b", "/a,upperdir=/", "/a\\b", "/a\"b", "/a\nb"] {
            assert!(!fits_in_mount_options(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn a_guest_is_told_of_as_many_processors_as_it_may_use() {
        let one = Cpus::own().unwrap().some(1, 0);
        assert_eq!(cpus_for(1, &one, 0), None);
        let all = Cpus::own().unwrap();
        assert_eq!(cpus_for(all.count().max(2), &all, 0), None);
        if all.count() > 2 {
            assert_eq!(cpus_for(1, &all, 7).unwrap().count(), 2);
        }
    }

    #[test]
    fn the_agent_s_layer_is_above_the_root_file_system() {
        let options = overlay_options(Path::new("/l"), Path::new("/r"), Path::new("/d"));
        let options = options.to_str().unwrap();
        assert!(options.ends_with("lowerdir=/l:/r,upperdir=/d/upper,workdir=/d/work"), "{options}");
    }
}
