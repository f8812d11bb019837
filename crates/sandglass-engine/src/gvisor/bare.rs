//! The yardstick that the engine is measured with: `runsc run`, `restore` and `checkpoint` as a person would call them, on
//! the same root file system, disk, limits and flags as a sandbox has.
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
use sandglass_linux::process::{Child, Launch, LaunchError, Step, spawn};
use sandglass_types::{Digest, InstanceId, Limits, SandboxId};
use serde_json::json;

use super::image::Image;
use super::layer::{self, Layer};
use super::make;
use super::paths::{HostPaths, SandboxPaths};
use super::runsc::{self, EXCLUSIVE_MOUNTS, FLAGS, Runsc};
use super::{ceiling, disk, oci, teardown};
use crate::engine::{EngineError, step};
use crate::files::{private_folder, remove_folder};
use crate::session::Session;

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

/// Runs of `runsc`, one at a time.
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
        let spec = spec(id, paths, leaf, limits, command);
        let before = self.furnish(paths, leaf, limits, &spec, |target| {
            disk::blank(&self.paths, limits.disk_mib(), target)
        })?;
        let (output, input) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| step("make a pipe", errno))?;
        let launch = self
            .launch(before)
            .and_then(|launch| {
                launch.args(["run", "--bundle"])?.arg(paths.bundle())?.arg(id.as_str())?.stdout(input)
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

    /// All that `runsc` needs, the mounts and the control group included.
    fn furnish(
        &self,
        paths: &SandboxPaths,
        leaf: &Leaf,
        limits: Limits,
        spec: &serde_json::Value,
        lay_disk: impl FnOnce(&Path) -> Result<(), EngineError>,
    ) -> Result<Vec<Step>, EngineError> {
        private_folder(paths.dir()).map_err(|error| step("make the folder", error))?;
        lay_disk(&paths.disk())?;
        make::write_bundle(paths, spec)?;
        leaf.make()
            .and_then(|()| leaf.limit(&ceiling::of(limits)))
            .map_err(|error| step("make the control group", error))?;
        let mounts = make::mount(paths, &self.layer.path, &self.rootfs, limits.memory_mib(), &[])?;
        make::before(leaf, mounts, None)
    }

    fn launch(&self, before: Vec<Step>) -> Result<Launch, LaunchError> {
        Launch::new(&self.program)?
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")?
            .steps(before)
            .arg("--root")?
            .arg(self.paths.runsc_root())?
            .args(FLAGS)?
            .arg(EXCLUSIVE_MOUNTS)?
            .args(["--network=none"])
    }

    /// Brings an image of the engine's back with `runsc restore`, under the limits that it was made with, and says how long
    /// that took: from the moment at which `runsc` was executed to its end, when the sandbox runs.
    ///
    /// # Errors
    /// The step that failed. What could not be removed is left, and carries the instance.
    pub fn restore(&self, image: &Path) -> Result<(Restored<'_>, Duration), EngineError> {
        let id = SandboxId::random();
        let leaf = self.cgroups.leaf(id.as_str()).map_err(|error| step("name the control group", error))?;
        let restored = Restored { bare: self, paths: self.paths.sandbox(&id), leaf, id };
        let took = restored.bring_back(&Image::at(image.to_owned()))?;
        Ok((restored, took))
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
            for (group, shared) in [(parent.join(id.as_str()), false), (parent, true)] {
                match fs_err::remove_dir(group).map_err(|error| (error.kind(), error)) {
                    Err((io::ErrorKind::NotFound, _)) => {}
                    // It goes with the last that is in it.
                    Err((io::ErrorKind::ResourceBusy, _)) if shared => {}
                    Err((_, error)) => return Err(error),
                    Ok(()) => {}
                }
            }
        }
        Ok(())
    }
}

/// A sandbox that `runsc restore` made. It is removed when it is dropped.
#[derive(Debug)]
pub struct Restored<'a> {
    bare: &'a Bare,
    paths: SandboxPaths,
    leaf: Leaf,
    id: SandboxId,
}

impl Restored<'_> {
    fn bring_back(&self, image: &Image) -> Result<Duration, EngineError> {
        let limits = image.meta()?.limits;
        // What is in the image runs on; this is not started.
        let command =
            Command { argv: vec![oci::GUEST_PATH.into()], user: (0, 0), cwd: "/".into(), env: Vec::new() };
        let spec = spec(&self.id, &self.paths, &self.leaf, limits, &command);
        let before = self.bare.furnish(&self.paths, &self.leaf, limits, &spec, |target| {
            disk::copy(&image.disk(), target, None).map_err(|error| step("copy the image's disk", error))
        })?;
        let stdio = Session { folder: self.paths.dir() }.agent_stdio()?;
        let launch = self.bare.launch(before).and_then(|launch| {
            launch
                .args(["restore", "--detach", "--bundle"])?
                .arg(self.paths.bundle())?
                .arg("--image-path")?
                .arg(image.checkpoint())?
                .arg(self.id.as_str())?
                .stdin(stdio.stdin)?
                .stdout(stdio.stdout)
        });
        timed(launch, "restore")
    }

    /// Stops it with `runsc pause`, and says how long that took.
    ///
    /// # Errors
    /// The step that failed.
    pub fn pause(&self) -> Result<Duration, EngineError> {
        self.verb("pause")
    }

    /// Lets it go on with `runsc resume`, and says how long that took.
    ///
    /// # Errors
    /// The step that failed.
    pub fn resume(&self) -> Result<Duration, EngineError> {
        self.verb("resume")
    }

    fn verb(&self, verb: &'static str) -> Result<Duration, EngineError> {
        timed(
            self.bare.launch(Vec::new()).and_then(|launch| launch.args([verb])?.arg(self.id.as_str())),
            verb,
        )
    }

    /// Writes it to a folder with `runsc checkpoint`, and lets it run on; says how long that took.
    ///
    /// # Errors
    /// The step that failed.
    pub fn checkpoint(&self, folder: &Path) -> Result<Duration, EngineError> {
        let launch = self.bare.launch(Vec::new()).and_then(|launch| {
            launch.args(["checkpoint", "--leave-running", "--image-path"])?.arg(folder)?.arg(self.id.as_str())
        });
        timed(launch, "checkpoint")
    }
}

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.bare.remove(&self.id, &self.paths, &self.leaf) {
            tracing::warn!(id = %self.id, error = %sandglass_types::error::Chain(&error), "it could not be removed");
        }
    }
}

/// Runs `runsc` to its end.
fn timed(launch: Result<Launch, LaunchError>, verb: &'static str) -> Result<Duration, EngineError> {
    let launch = launch.map_err(|error| step(verb, error))?;
    let child = spawn(&launch).map_err(|error| step(verb, error))?;
    let started = Instant::now();
    let success = finish(&child, started + PATIENCE).map_err(|error| step("wait for runsc", error))?;
    let took = started.elapsed();
    if success { Ok(took) } else { Err(step(verb, "runsc failed")) }
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
        volumes: &[],
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
