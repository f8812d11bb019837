//! The parts of a sandbox: made side by side, whole or not at all.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sandglass_linux::cgroup::Leaf;
use sandglass_linux::mount::MountNamespace;
use sandglass_linux::process;
use sandglass_types::{Digest, SandboxId};

use super::image::{CHECKPOINT_TIMEOUT, Source};
use super::paths::SandboxPaths;
use super::record::{Pinned, Record};
use super::runsc::{MAKE_TIMEOUT, Make, MountAccess, Network};
use super::{GvisorEngine, ceiling, disk, layer, make, oci, volumes};
use crate::deadline::{self, Moment};
use crate::engine::{EngineError, SandboxSpec, step};
use crate::files::{mark_unused, private_folder};
use crate::locks::lock;
use crate::record::Status;
use crate::session::Session;
use crate::side_by_side::{both, side_by_side};

impl GvisorEngine {
    /// Makes a sandbox that is not there yet.
    pub(super) fn make(&self, spec: &SandboxSpec, source: &Source) -> Result<(), EngineError> {
        let lock_of = self.locks.of(&spec.id);
        let _held = lock(&lock_of);
        self.expect_nothing(&spec.id)?;
        let (pinned, _stays) = self.pinned(spec, source)?;
        self.whole_or_not_at_all(&spec.id, || self.make_parts(spec, source, pinned).map(drop))
    }

    /// Makes what is left to be made of a sandbox; takes all of it apart again if that fails. The caller holds its lock.
    pub(super) fn whole_or_not_at_all(
        &self,
        id: &SandboxId,
        make: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        make().inspect_err(|_| {
            if let Err(error) = self.remove(id) {
                tracing::warn!(%id, error = %sandglass_types::error::Chain(&error), "a half-made sandbox is left");
            }
        })
    }

    /// That there is nothing of it on the machine.
    pub(super) fn expect_nothing(&self, id: &SandboxId) -> Result<(), EngineError> {
        if self.holdings.paths.sandbox(id).dir().exists() || self.holdings.leaf(id)?.exists() {
            return Err(EngineError::Exists(id.clone()));
        }
        Ok(())
    }

    /// Makes it, and all that is in an image unless that is brought back over the control socket.
    pub(super) fn make_parts(
        &self,
        spec: &SandboxSpec,
        source: &Source,
        pinned: Pinned,
    ) -> Result<Record, EngineError> {
        let id = &spec.id;
        let rootfs = self.holdings.paths.rootfs(&spec.rootfs);
        if !rootfs.is_dir() {
            return Err(step("find the root file system", format!("there is no {}", rootfs.display())));
        }
        let paths = self.holdings.paths.sandbox(id);
        let leaf = self.holdings.leaf(id)?;
        sandglass_failpoint::hit("engine.create.folder")?;
        private_folder(paths.dir())
            // Before anything runs.
            .and_then(|()| deadline::keep(paths.dir(), spec.deadline, Moment::now()))
            .and_then(|()| mark_unused(spec, paths.dir()))
            .map_err(|error| step("make the sandbox's folder", error))?;
        sandglass_failpoint::hit("engine.create.record")?;
        let mut record = Record::new(id.clone(), pinned, spec.limits, self.holdings.boot_id.clone());
        self.save(&record)?;
        let network = if self.over_socket { Network::OverControlSocket } else { Network::Namespace };
        let checkpoint = source.checkpoint().filter(|_| !self.over_socket);
        // All three wait for the kernel, so they do it at the same time.
        let (expected, (mounts, surroundings)) = side_by_side(
            || self.holdings.cgroups.expect_move(),
            || {
                side_by_side(
                    || self.make_disk(spec, source, &record.pinned.agent, &paths, &rootfs),
                    || self.make_surroundings(spec, network, &paths, &leaf),
                )
            },
        );
        if let Err(error) = expected {
            tracing::debug!(%error, "joining the control group may take its time");
        }
        let ((), namespace) = both(surroundings, mounts)?;
        if spec.unused || matches!(source, Source::Ahead(..)) {
            self.turns.nobody_waits(&leaf);
        } else {
            self.turns.made(id, &leaf);
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let cpus = make::cpus_for(spec.limits.cpus(), &self.cpus, turn);
        let before = make::before(&leaf, namespace, cpus)?;
        let (bundle, pid_file) = (paths.bundle(), paths.pid_file());
        let mut options =
            vec![OsStr::new("--bundle"), bundle.as_os_str(), OsStr::new("--pid-file"), pid_file.as_os_str()];
        let verb = match &checkpoint {
            None => "create",
            Some(checkpoint) => {
                options.extend([OsStr::new("--detach"), OsStr::new("--image-path"), checkpoint.as_os_str()]);
                "restore"
            }
        };
        sandglass_failpoint::hit("engine.create.stdio")?;
        let stdio = Session { folder: paths.dir() }.agent_stdio()?;
        // What could be written must be readable: both take as long as there is memory.
        let within = if checkpoint.is_some() { CHECKPOINT_TIMEOUT } else { MAKE_TIMEOUT };
        let (log, panics) = (paths.log(), paths.panics());
        let mounts = if spec.volumes.is_empty() { MountAccess::Exclusive } else { MountAccess::Shared };
        let call = Make { verb, options: &options, network, mounts, log: &log, panics: &panics, within };
        self.runsc.make(id, &call, before, stdio)?;
        sandglass_failpoint::hit("engine.create.made")?;
        if cpus.is_some() {
            // It has counted them; from here on its quota bounds it, wherever it runs.
            for pid in leaf.processes().map_err(|error| step("free its processors", error))? {
                self.cpus.allow(pid).map_err(|error| step("free its processors", error))?;
            }
        }
        let identity = make::sandbox_process(&paths, &leaf)?;
        make::end_first(identity)?;
        sandglass_failpoint::hit("engine.create.watch")?;
        let watch = process::watch(identity).map_err(|error| step("watch the sandbox process", error))?;
        if let Some(watch) = watch {
            lock(&self.watches).insert(id.clone(), Arc::new(watch));
        }
        record.sandbox = Some(identity.into());
        record.progress = self.over_socket.then_some(Status::Created);
        record.restore = source.restore().filter(|_| self.over_socket);
        sandglass_failpoint::hit("engine.create.save")?;
        self.save(&record)?;
        Ok(record)
    }

    /// A blank disk or the image's, and the mounts on it and of its volumes.
    fn make_disk(
        &self,
        spec: &SandboxSpec,
        source: &Source,
        agent: &Digest,
        paths: &SandboxPaths,
        rootfs: &Path,
    ) -> Result<MountNamespace, EngineError> {
        sandglass_failpoint::hit("engine.create.disk")?;
        match source.disk() {
            None => disk::blank(&self.holdings.paths, spec.limits.disk_mib(), &paths.disk())?,
            Some(disk) => disk::copy(&disk, &paths.disk(), source.most_copied())
                .map_err(|error| step("copy the image's disk", error))?,
        }
        sandglass_failpoint::hit("engine.create.attach")?;
        let layer = layer::path(&self.holdings.paths, agent);
        let volumes = self.attach_volumes(&spec.volumes)?;
        make::mount(paths, &layer, rootfs, spec.limits.memory_mib(), &volumes)
    }

    /// Network, files, and the control group with its limits.
    fn make_surroundings(
        &self,
        spec: &SandboxSpec,
        network: Network,
        paths: &SandboxPaths,
        leaf: &Leaf,
    ) -> Result<(), EngineError> {
        sandglass_failpoint::hit("engine.create.network")?;
        let netns = match &self.airlocks {
            Some(airlocks) => {
                Some(airlocks.assign(&spec.id).map_err(|error| step("make the network", error))?)
            }
            None => None,
        };
        let oci = oci::spec(&oci::Input {
            hostname: spec.id.as_str(),
            args: &self.args,
            root: &paths.root_mount(),
            tmp: &paths.disk_mount().join(disk::TMP),
            volumes: &volumes::binds(paths, &spec.volumes),
            netns: netns.as_deref().filter(|_| network == Network::Namespace),
            limits: spec.limits,
        });
        sandglass_failpoint::hit("engine.create.files")?;
        make::write_bundle(paths, &oci)?;
        sandglass_failpoint::hit("engine.create.group")?;
        // Before `runsc`, so that nothing of it ever runs without limits.
        leaf.make()
            .and_then(|()| leaf.limit(&ceiling::of(spec.limits)))
            .map_err(|error| step("make the control group", error))
    }
}
