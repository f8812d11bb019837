//! A machine of `verify`'s own, in which servers run and which attacks may break: process 1 of new namespaces, a disk in
//! a file without a name, and everything else of the machine read-only. It ends with this process, and this process with
//! `verify`.

use std::ffi::CStr;
use std::fs::File;
use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::mount::{MountFlags, mount, mount_bind, mount_remount};
use rustix::process::Signal;
use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::namespace::leave_machine;
use sandglass_linux::netlink::Rtnetlink;
use sandglass_linux::process::{Launch, adopt_orphans, run as run_program};
use sandglass_types::InstanceId;
use serde::{Deserialize, Serialize};

use super::{Group, ground, probes, report};

/// Where the stage's disk is mounted: a folder that every machine has, and in which nobody keeps programs.
pub(super) const DISK: &str = "/dev/shm";

/// Where the file behind it lies: a folder that every machine has on a disk.
const FILE: &str = "/var/tmp";

/// How large the disk can become, in bytes. Its file is sparse.
const DISK_LEN: u64 = 256 << 30;

/// How long its file system may take to be made.
const MKFS: Duration = Duration::from_secs(60);

/// What the stage is told by the process that starts it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) cache: PathBuf,
    pub(super) runsc: PathBuf,
    /// The guest binary, in the cache.
    pub(super) guest: PathBuf,
    pub(super) strict: InstanceId,
    pub(super) bare: InstanceId,
    pub(super) fence: InstanceId,
    /// None means all.
    pub(super) only: Vec<Group>,
    pub(super) cycles: u32,
    pub(super) json: bool,
}

/// Leaves the machine, and waits for the stage to end.
pub(super) fn enter(plan: &Plan) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("this program can't find itself")?;
    leave_machine().context("no machine of its own could be made")?;
    let mut stage = Command::new(program)
        .arg("verify-stage")
        .stdin(Stdio::piped())
        .spawn()
        .context("the stage could not be started")?;
    let mut line = stage.stdin.take().context("there is no line to the stage")?;
    writeln!(line, "{}", serde_json::to_string(plan)?)?;
    let status = stage.wait()?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(code) => Ok(ExitCode::from(code)),
        None => bail!("the stage ended with {status}"),
    }
}

/// Is the stage.
pub(crate) fn run() -> anyhow::Result<ExitCode> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let plan: Plan = serde_json::from_str(&line).context("only `verify` starts a stage")?;
    if std::process::id() != 1 {
        bail!("only `verify` starts a stage");
    }
    furnish(&plan.cache)?;
    adopt_orphans()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let results = runtime.block_on(async {
        let grounds = ground::Grounds::open(&plan).await?;
        anyhow::Ok(probes::run(&grounds, &plan.only).await)
    })?;
    report::print(&results, plan.json, true, &mut std::io::stdout().lock())?;
    // Nothing is ended in order: the machine goes.
    runtime.shutdown_background();
    Ok(report::code(&results))
}

/// Makes it a machine.
fn furnish(cache: &Path) -> anyhow::Result<()> {
    let none = None::<&CStr>;
    let hidden = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", hidden, none).context("no process table of its own")?;
    mount_disk().context("no disk of its own")?;
    // Servers keep their agents there. It is what all servers of the machine share, and no attack is pointed at it.
    mount_bind(cache, cache).context("the cache can't be kept writable")?;
    let read_only = MountFlags::BIND | MountFlags::RDONLY;
    mount_remount("/", read_only, "").context("no read-only view of the machine")?;
    rustix::system::sethostname(b"stage").context("no host name of its own")?;
    let mut netlink = Rtnetlink::open()?;
    let lo = netlink.index("lo")?;
    netlink.set_up(lo).context("no loopback of its own")?;
    Ok(())
}

fn mount_disk() -> anyhow::Result<()> {
    // Over a mount of its own, so that the machine's can become read-only while the file is written.
    mount_bind(FILE, FILE)?;
    let file: File = tempfile::tempfile_in(FILE)?;
    file.set_len(DISK_LEN)?;
    // It detaches with its last user, and the file goes with it.
    let device = LoopDevice::attach(&file)?;
    let path = device.path();
    let mkfs = Launch::new("/sbin/mkfs.ext4")?
        .args(["-q", "-F", "-m", "0", "-E", "nodiscard", "-J", "size=16"])?
        .arg(&path)?
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")?;
    let made = run_program(mkfs, b"", MKFS, 4096)?;
    if !made.status.success() {
        bail!("mkfs.ext4: {}: {}", made.status, String::from_utf8_lossy(&made.stderr));
    }
    mount(&path, DISK, "ext4", MountFlags::NOATIME, Some(c"nobarrier"))?;
    Ok(())
}
