//! What a sandbox's disk is made of: a file as a loop device, ext4 on it, and an overlay of it over the template.
//!
//! The file has no name, and the mounts are made in the private namespace of a shell, so nothing can be left.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate, ioctl_ficlone};
use rustix::io::Errno;
use sandglass_engine::gvisor::OVERLAY_OPTIONS;
use sandglass_linux::loopdev::{LoopDevice, attached};
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::process::{Launch, Step};
use sandglass_types::error::Chain;

use super::check::Check;
use super::outcome;
use crate::startup::Reason;

const LOOP: &str = "loop devices";
const EXT4: &str = "ext4";
const OVERLAY: &str = "overlay file system";
const REFLINK: &str = "sharing of blocks";

/// The checks that this makes.
pub(super) const NAMES: [&str; 4] = [LOOP, EXT4, OVERLAY, REFLINK];

/// Large enough for ext4 with a journal.
const SIZE: u64 = 32 << 20;

/// Each program needs milliseconds; this is for a machine that stands still.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Where the trial disk is mounted: a folder that every machine has and neither of a server's folders lies in.
const MOUNTED: &std::ffi::CStr = c"/sys";

/// Writes through the overlay, and reads it from the disk. `$1` is the lower layer.
const TRIAL: &str = "mkdir /sys/upper /sys/work /sys/merged \
    && mount -t overlay overlay -o \"$2,lowerdir=$1,upperdir=/sys/upper,workdir=/sys/work\" /sys/merged \
    && echo written > /sys/merged/.trial && grep -q written /sys/upper/.trial";

/// What was found; what was not reached is `None`.
#[derive(Debug)]
pub(super) struct Facts {
    control: bool,
    in_use: usize,
    attach: Result<(), NoDevice>,
    ext4: Option<Result<(), String>>,
    overlay: Option<Result<(), String>>,
    reflink: io::Result<bool>,
}

/// Why there is no device.
#[derive(Debug)]
enum NoDevice {
    /// No file could be made in the data folder.
    File(io::Error),
    /// There is a file, and it could not be attached.
    Attach(io::Error),
}

pub(super) fn look(data: &Path, cache: &Path) -> Facts {
    let mut facts = Facts {
        control: Path::new("/dev/loop-control").exists(),
        in_use: attached().map_or(0, |devices| devices.len()),
        attach: Ok(()),
        ext4: None,
        overlay: None,
        reflink: reflink(data),
    };
    match attach(data) {
        Ok(device) => match mkfs(&device) {
            Ok(()) => match mounted(&device) {
                Ok(mounts) => {
                    facts.ext4 = Some(Ok(()));
                    facts.overlay = Some(overlay(mounts, cache));
                }
                Err(why) => facts.ext4 = Some(Err(format!("it can't be mounted: {why}"))),
            },
            Err(complaint) => facts.ext4 = Some(Err(complaint)),
        },
        Err(error) => facts.attach = Err(error),
    }
    facts
}

fn attach(data: &Path) -> Result<LoopDevice, NoDevice> {
    LoopDevice::attach(&file(data).map_err(NoDevice::File)?).map_err(NoDevice::Attach)
}

/// A file with all its room, so that a full disk shows here and not as a broken file system.
fn file(data: &Path) -> io::Result<File> {
    let file = tempfile::tempfile_in(data)?;
    match fallocate(&file, FallocateFlags::empty(), 0, SIZE) {
        Err(Errno::OPNOTSUPP) => file.set_len(SIZE)?,
        allocated => allocated?,
    }
    Ok(file)
}

fn mkfs(device: &LoopDevice) -> Result<(), String> {
    let launch = Launch::new("/usr/sbin/mkfs.ext4")
        .and_then(|launch| launch.args(["-q", "-F", "-b", "4096", "-J", "size=4"])?.arg(device.path()));
    outcome(launch, TIMEOUT).map(drop)
}

/// A mount namespace with the file system.
fn mounted(device: &LoopDevice) -> Result<MountNamespace, String> {
    let source = CString::new(device.path().as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    let mount = Mount { source, target: MOUNTED.into(), fstype: c"ext4".into(), flags: 0, data: c"".into() };
    MountNamespace::furnish(Propagation::Private, &[mount]).map_err(|error| Chain(&error).to_string())
}

/// Tries the other file system on top of it.
fn overlay(mounts: MountNamespace, lower: &Path) -> Result<(), String> {
    let launch = || {
        Launch::new("/bin/sh")?
            .args(["-c", TRIAL, "sh"])?
            .arg(lower)?
            .arg(OVERLAY_OPTIONS)?
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .map(|launch| launch.step(Step::EnterMounts(mounts.into())))
    };
    outcome(launch(), TIMEOUT).map(drop)
}

fn reflink(data: &Path) -> io::Result<bool> {
    let (from, to) = (tempfile::tempfile_in(data)?, tempfile::tempfile_in(data)?);
    std::os::unix::fs::FileExt::write_all_at(&from, &[1; 4096], 0)?;
    Ok(ioctl_ficlone(&to, &from).is_ok())
}

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![match &facts.attach {
        Ok(()) => Check::good(LOOP, format!("one was attached; {} are in use", facts.in_use)),
        Err(error) => no_device(facts, error),
    }];
    let file_system = |name, outcome: &Result<(), String>| match outcome {
        Ok(()) => Check::good(name, "one was made, mounted and written to"),
        Err(complaint) => Check::bad(name, Reason::NoFileSystem, complaint.clone()),
    };
    checks.extend(facts.ext4.as_ref().map(|outcome| file_system(EXT4, outcome)));
    checks.extend(facts.overlay.as_ref().map(|outcome| file_system(OVERLAY, outcome)));
    checks.push(match &facts.reflink {
        Ok(true) => Check::good(REFLINK, "the data folder's file system can: a copy of a disk costs nothing"),
        Ok(false) => Check::note(
            REFLINK,
            "the data folder's file system can't: each new sandbox copies its blank disk, and a fork all of its disk",
        )
        .with_remedy("XFS with reflink and Btrfs can"),
        Err(error) => Check::note(REFLINK, format!("the data folder could not be written: {error}")),
    });
    checks
}

fn no_device(facts: &Facts, why: &NoDevice) -> Check {
    use io::ErrorKind::{NotFound, QuotaExceeded, ResourceBusy, StorageFull};
    match why {
        NoDevice::File(error) => {
            let full = matches!(error.kind(), StorageFull | QuotaExceeded);
            let reason = if full { Reason::DataFull } else { Reason::UnusableFolder };
            Check::bad(LOOP, reason, format!("no file for one could be made in the data folder: {error}"))
        }
        NoDevice::Attach(error) => {
            // A container may have the control file and no more device files.
            let used_up = matches!(error.kind(), NotFound | ResourceBusy | StorageFull) && facts.control;
            let reason = if used_up { Reason::LoopDevicesUsedUp } else { Reason::NoLoopDevices };
            Check::bad(LOOP, reason, format!("none could be attached: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::{Bad, Good, Note};
    use super::*;

    fn good() -> Facts {
        Facts {
            control: true,
            in_use: 3,
            attach: Ok(()),
            ext4: Some(Ok(())),
            overlay: Some(Ok(())),
            reflink: Ok(true),
        }
    }

    fn reason(facts: &Facts) -> Option<Reason> {
        judge(facts).into_iter().find_map(Check::into_failure).map(|failure| failure.reason())
    }

    #[test]
    fn only_reflinks_can_be_done_without() {
        let verdicts = |facts: &Facts| judge(facts).iter().map(Check::verdict).collect::<Vec<_>>();
        assert_eq!(verdicts(&good()), [Good; 4]);
        assert_eq!(verdicts(&Facts { reflink: Ok(false), ..good() }), [Good, Good, Good, Note]);
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(verdicts(&Facts { reflink: Err(full()), ..good() })[3], Note);
        assert_eq!(verdicts(&Facts { overlay: Some(Err("no".into())), ..good() })[2], Bad);
        assert_eq!(reason(&Facts { ext4: Some(Err("no".into())), ..good() }), Some(Reason::NoFileSystem));
    }

    #[test]
    fn no_device_has_several_causes() {
        use io::ErrorKind::{NotFound, PermissionDenied, StorageFull};
        let without = |kind: io::ErrorKind| Facts { attach: Err(NoDevice::Attach(kind.into())), ..good() };
        assert_eq!(reason(&without(NotFound)), Some(Reason::LoopDevicesUsedUp));
        assert_eq!(reason(&without(StorageFull)), Some(Reason::LoopDevicesUsedUp));
        assert_eq!(reason(&without(PermissionDenied)), Some(Reason::NoLoopDevices));
        let absent = Facts { control: false, ..without(NotFound) };
        assert_eq!(reason(&absent), Some(Reason::NoLoopDevices));
        let no_file = |kind: io::ErrorKind| Facts { attach: Err(NoDevice::File(kind.into())), ..good() };
        assert_eq!(reason(&no_file(StorageFull)), Some(Reason::DataFull));
        assert_eq!(reason(&no_file(PermissionDenied)), Some(Reason::UnusableFolder));
    }

    #[test]
    fn nothing_is_left_of_a_trial() {
        let folder = tempfile::tempdir().unwrap();
        let facts = look(folder.path(), folder.path());
        assert!(facts.attach.is_ok(), "{facts:?}");
        assert_eq!((facts.ext4, facts.overlay), (Some(Ok(())), Some(Ok(()))));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let mounts = sandglass_linux::mount::table(None).unwrap();
        assert!(!mounts.iter().any(|mount| mount.target == Path::new("/sys") && mount.fstype == "ext4"));
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        let ours = |path: &Path| path.starts_with(folder.path());
        while attached().unwrap().iter().any(|(_, path)| ours(path)) {
            assert!(std::time::Instant::now() < deadline, "a loop device is left");
            std::thread::yield_now();
        }
    }
}
