//! A file system of the bench's own, on which a copy of a file takes no time and no room: XFS, as a careful operator has it.
//!
//! It is a file below `/var/tmp` that is deleted at once, and it is mounted for this process and its children only: however
//! the bench ends, the kernel takes it away with the last of them.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use tempfile::TempDir;

use super::server::PARENT;

/// More than any bench writes. What is not written takes no room.
const SIZE: u64 = 64 << 30;

/// The program that makes it.
const MKFS: &str = "mkfs.xfs";

const MS_NOATIME: u64 = 1024;

pub(super) struct Volume {
    namespace: MountNamespace,
    folder: TempDir,
}

impl Volume {
    /// Makes and mounts it.
    pub(super) fn make() -> anyhow::Result<Self> {
        let image = tempfile::Builder::new().prefix("sandglass-bench-").tempfile_in(PARENT)?;
        image.as_file().set_len(SIZE)?;
        let made = Command::new(MKFS)
            .args(["-q", "-m", "reflink=1"])
            .arg(image.path())
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("there is no {MKFS}; install xfsprogs, or say `--file-system host`"))?;
        if !made.status.success() {
            bail!("{MKFS} failed: {}", String::from_utf8_lossy(&made.stderr).trim_end());
        }
        let folder = tempfile::Builder::new().prefix("sandglass-bench-").tempdir_in(PARENT)?;
        let device = LoopDevice::attach(image.as_file()).context("no loop device for the bench's own XFS")?;
        let mount = Mount {
            source: CString::new(device.path().as_os_str().as_bytes())?,
            target: CString::new(folder.path().as_os_str().as_bytes())?,
            fstype: c"xfs".into(),
            flags: MS_NOATIME,
            data: c"".into(),
        };
        let namespace = MountNamespace::furnish(Propagation::Slave, &[mount])
            .context("the bench's own XFS could not be mounted; say `--file-system host` to do without")?;
        Ok(Self { namespace, folder })
    }

    /// Where it is, for what runs in it.
    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Runs what sees it.
    pub(super) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        Ok(self.namespace.run(work)?)
    }
}
