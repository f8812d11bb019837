//! The yardstick that the engine is measured with: `runsc run` as a person would call it, on the same root file
//! system, disk, limits and flags as a sandbox has.
//!
//! What this engine does to be quick is left out: no steps of a launcher before `runsc`, no call in advance, no control
//! socket. What it adds is left out too: no agent, no network, and everything that `runsc` needs is there before the
//! clock starts, the mounts and the control group included. So the yardstick is the cheaper one wherever the two differ.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use sandglass_linux::cgroup::{self, Cgroups, Leaf};
use sandglass_linux::process::{Child, Launch, spawn};
use sandglass_types::{Digest, InstanceId, Limits, SandboxId};
use serde_json::json;

use super::layer::{self, Layer};
use super::make;
use super::paths::{HostPaths, SandboxPaths};
use super::runsc::{self, FLAGS, Runsc};
use super::{ceiling, disk, oci, teardown};
use crate::engine::{EngineError, step};
use crate::files::{private_folder, remove_folder};

/// How long one run may take, its end included.
const PATIENCE: Duration = Duration::from_secs(60);

/// Most bytes of output that are kept.
const MAX_OUTPUT: usize = 4096;

/// What is run, and as whom.
#[derive(Debug, Clone)]
pub struct Command {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// The user id and group id inside.
    pub user: (u32, u32),
    /// Where.
    pub cwd: String,
    /// The whole environment, as `NAME=value`.
    pub env: Vec<String>,
}

/// What one run gave.
#[derive(Debug)]
pub struct Run {
    /// From the moment at which `runsc` was executed to the first byte that the command wrote.
    pub first_output: Duration,
    /// What it wrote, as far as it is kept.
    pub stdout: Vec<u8>,
}

/// Runs of `runsc run`, one at a time.
#[derive(Debug)]
pub struct Bare {
    paths: HostPaths,
    program: PathBuf,
    layer: Layer,
    rootfs: PathBuf,
    cgroups: Cgroups,
}

impl Bare {
    /// Prepares what all runs share. `paths.data` must belong to no engine: that one would take the runs for its own.
    ///
    /// # Errors
    /// The step that failed.
    pub fn open(
        paths: &HostPaths,
        instance: &InstanceId,
        runsc: &Path,
        guest: &Path,
        rootfs: &Digest,
    ) -> Result<Self, EngineError> {
        let failed = |error: io::Error| step("prepare the folders", error);
        for folder in [&paths.data, &paths.sandboxes()] {
            private_folder(folder).map_err(failed)?;
        }
        let paths = HostPaths {
            data: fs_err::canonicalize(&paths.data).map_err(failed)?,
            cache: fs_err::canonicalize(&paths.cache).map_err(failed)?,
        };
        // Prepares its root folder.
        Runsc::open(runsc, &paths.runsc_root())?;
        let cgroups = Cgroups::detect(Path::new(cgroup::ROOT), instance.as_str())
            .and_then(|cgroups| cgroups.make_parent().map(|()| cgroups))
            .map_err(|error| step("prepare the control groups", error))?;
        Ok(Self {
            program: runsc.to_owned(),
            layer: layer::ensure(&paths, guest)?,
            rootfs: paths.rootfs(rootfs),
            cgroups,
            paths,
        })
    }

    /// Runs the command once in a sandbox of its own, with the default limits, and removes that sandbox.
    ///
    /// # Errors
    /// The step that failed. What could not be removed is left, and carries the instance.
    pub fn run(&self, command: &Command) -> Result<Run, EngineError> {
        let id = SandboxId::random();
        let paths = self.paths.sandbox(&id);
        let leaf = self.cgroups.leaf(id.as_str()).map_err(|error| step("name the control group", error))?;
        let ran = self.run_in(&id, &paths, &leaf, command);
        let removed = self.remove(&id, &paths, &leaf);
        let ran = ran?;
        removed.map(|()| ran)
    }

    fn run_in(
        &self,
        id: &SandboxId,
        paths: &SandboxPaths,
        leaf: &Leaf,
        command: &Command,
    ) -> Result<Run, EngineError> {
        let limits = Limits::default();
        private_folder(paths.dir()).map_err(|error| step("make the folder", error))?;
        disk::blank(&self.paths, limits.disk_mib(), &paths.disk())?;
        make::write_bundle(paths, &spec(id, paths, leaf, limits, command))?;
        leaf.make()
            .and_then(|()| leaf.limit(&ceiling::of(limits)))
            .map_err(|error| step("make the control group", error))?;
        let mounts = make::mount(paths, &self.layer.path, &self.rootfs, limits.memory_mib())?;
        let before = make::before(leaf, mounts, None)?;
        let (output, input) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| step("make a pipe", errno))?;
        let launch = Launch::new(&self.program)
            .and_then(|launch| {
                launch
                    .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")?
                    .steps(before)
                    .arg("--root")?
                    .arg(self.paths.runsc_root())?
                    .args(FLAGS)?
                    .args(["--network=none", "run", "--bundle"])?
                    .arg(paths.bundle())?
                    .arg(id.as_str())?
                    .stdout(input)
            })
            .map_err(|error| step("run", error))?;
        let child = spawn(&launch).map_err(|error| step("run", error))?;
        // It returns once the program was executed.
        let started = Instant::now();
        // The pipe ends with its last writer, which must not be this process.
        drop(launch);
        let deadline = started + PATIENCE;
        let ran =
            read(&output, started, deadline).map_err(|error| step("read what the command wrote", error));
        let status = finish(&child, deadline).map_err(|error| step("wait for runsc", error))?;
        let ran = ran?;
        if status { Ok(ran) } else { Err(step("run", "runsc failed")) }
    }

    fn remove(&self, id: &SandboxId, paths: &SandboxPaths, leaf: &Leaf) -> Result<(), EngineError> {
        teardown::abandon_disk(leaf, &paths.disk());
        teardown::kill(leaf)?;
        runsc::forget(&self.paths.runsc_root(), id)
            .map_err(|error| step("remove the state of runsc", error))?;
        teardown::remove_group(leaf)?;
        self.remove_groups_of_runsc(id).map_err(|error| step("remove the groups of runsc", error))?;
        teardown::wait_detached(&paths.disk())?;
        remove_folder(paths.dir())
    }

    /// `runsc` makes groups also in the hierarchies of version 1 that the engine does not need.
    fn remove_groups_of_runsc(&self, id: &SandboxId) -> io::Result<()> {
        let own: Vec<PathBuf> = self.cgroups.parent_folders().collect();
        let Some(name) = own.first().and_then(|parent| parent.file_name()) else { return Ok(()) };
        for hierarchy in fs_err::read_dir(cgroup::ROOT)? {
            let parent = fs_err::canonicalize(hierarchy?.path())?.join(name);
            if own.contains(&parent) || !parent.is_dir() {
                continue;
            }
            for group in [parent.join(id.as_str()), parent] {
                match fs_err::remove_dir(group) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        if let Err(error) = self.cgroups.remove_parent() {
            tracing::debug!(%error, "the control group of the instance stays");
        }
    }
}

/// The spec of a sandbox, but for the first process.
fn spec(
    id: &SandboxId,
    paths: &SandboxPaths,
    leaf: &Leaf,
    limits: Limits,
    command: &Command,
) -> serde_json::Value {
    let mut spec = oci::spec(&oci::Input {
        hostname: id.as_str(),
        args: &command.argv,
        root: &paths.root_mount(),
        tmp: &paths.disk_mount().join(disk::TMP),
        netns: None,
        limits,
    });
    let (uid, gid) = command.user;
    spec["linux"]["cgroupsPath"] = json!(leaf.oci_path());
    spec["process"]["user"] = json!({"uid": uid, "gid": gid});
    spec["process"]["cwd"] = json!(command.cwd);
    spec["process"]["env"] = json!(command.env);
    spec
}

/// Reads to the end.
fn read(output: &OwnedFd, started: Instant, deadline: Instant) -> io::Result<Run> {
    let mut first_output = None;
    let mut stdout = Vec::new();
    let mut buffer = [0; MAX_OUTPUT];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let wait = Timespec::try_from(left).map_err(io::Error::other)?;
        if poll(&mut [PollFd::from_borrowed_fd(output.as_fd(), PollFlags::IN)], Some(&wait))? == 0 {
            continue;
        }
        let read = match rustix::io::read(output, &mut buffer) {
            Err(rustix::io::Errno::INTR) => continue,
            read => read?,
        };
        if read == 0 {
            let first_output = first_output.ok_or(io::ErrorKind::UnexpectedEof)?;
            return Ok(Run { first_output, stdout });
        }
        first_output.get_or_insert_with(|| started.elapsed());
        let room = MAX_OUTPUT - stdout.len();
        stdout.extend_from_slice(&buffer[..read.min(room)]);
    }
}

/// Waits for `runsc`, or kills it; what it started is killed by its control group.
fn finish(child: &Child, deadline: Instant) -> io::Result<bool> {
    if let Some(status) = child.wait(Some(deadline))? {
        return Ok(status.success());
    }
    child.pidfd().kill()?;
    child.wait(None).map(|_| false)
}
