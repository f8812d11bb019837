//! An engine that **isolates nothing**: a sandbox is a folder and ordinary processes of this machine, which may read,
//! change and reach whatever this process's user may. It is for work on everything above the engine, without root.
//!
//! # Where things are
//! A sandbox is the folder `sandboxes/ID`: a record, the two FIFOs of its session, and `home`, the agent's working
//! directory and `$HOME`. Its root file system and its limits are ignored; [`EngineInfo::refuses`] says so. Where files
//! are [collected](Engine::collect), `home` is taken for its `/`.
//!
//! The agent is told its folder by its last argument, the absolute path of `home`. Its environment holds `PATH`,
//! `HOME` and [`MARKER`], and nothing of this process's own.
//!
//! # How processes are found
//! By descent from the agent, which the kernel makes the parent of its orphans, and by [`MARKER`] in the environment
//! that a process was started with. So an agent does well to pass the marker on to what it starts: a process without
//! it is lost when the agent dies and it does not. Nothing is kept in memory: the next host finds the same.
mod folder;
mod model;
mod processes;
#[cfg(feature = "scripted")]
mod scripted;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use sandglass_linux::process::{adopt_orphans, boot_id};
use sandglass_types::{InstanceId, SandboxId, VolumeId};

use self::folder::{Folder, Record};
use self::model::{Agent, Life, Model};
use self::processes::Processes;
use crate::collect::{self, Tree};
use crate::deadline::{self, Deadline, Moment};
use crate::engine::{
    AirlockSocket, Compression, Engine, EngineError, EngineInfo, Exit, Feature, Isolation, Keep, Presence,
    SandboxSpec, SessionEnds, Stats, step,
};
use crate::files::{ids_in, mark_unused, mark_used, private_folder, remove_folder};
use crate::footprint::{self, Footprints};
use crate::locks::{Locks, lock};
use crate::record::{self, Status};

pub use self::processes::MARKER;
#[cfg(feature = "scripted")]
pub use self::scripted::{Memory, Next, Script, Turn};

const NAME: &str = "fake";

/// A file that says of an image that it is compressed. Nothing else is different then: this engine saves no room.
const COMPRESSED: &str = "compressed";

/// What the engine is made from.
#[derive(Debug, Clone)]
pub struct FakeConfig {
    /// Its folder, which belongs to the user of this process.
    pub data: PathBuf,
    /// Whose sandboxes these are.
    pub instance: InstanceId,
    /// The program that is the agent of every sandbox.
    pub agent: PathBuf,
    /// Its arguments, without its name; the sandbox's folder is added as the last one.
    pub agent_args: Vec<String>,
}

/// The engine that isolates nothing.
#[derive(Debug)]
pub struct FakeEngine {
    sandboxes: PathBuf,
    images: PathBuf,
    /// A folder per volume. No sandbox ever sees one: scripts have no files.
    volumes: PathBuf,
    boot_id: String,
    processes: Box<dyn Model>,
    locks: Locks,
}

impl FakeEngine {
    /// Prepares the folder, and makes this process the reaper of all its descendants (see
    /// [`sandglass_linux::process`]). Sandboxes that exist are not touched.
    ///
    /// # Errors
    /// The step that failed.
    pub fn open(config: FakeConfig) -> Result<Self, EngineError> {
        let FakeConfig { data, instance, agent, agent_args } = config;
        // Agents start in folders of their own.
        let program = std::path::absolute(agent).map_err(|error| step("find the agent", error))?;
        adopt_orphans().map_err(|error| step("become a reaper", error))?;
        Self::with(&data, Box::new(Processes { instance, program, args: agent_args }))
    }

    /// An engine whose sandboxes are threads of this process that run `script`, so that they can be checkpointed: for
    /// tests of what is above the engine. They live as long as this process and are found again by the next engine in
    /// it; `config`'s agent is not used.
    ///
    /// # Errors
    /// The step that failed.
    #[cfg(feature = "scripted")]
    pub fn scripted(config: FakeConfig, script: std::sync::Arc<dyn Script>) -> Result<Self, EngineError> {
        Self::with(&config.data, Box::new(scripted::Threads::new(config.instance, script)))
    }

    fn with(data: &Path, processes: Box<dyn Model>) -> Result<Self, EngineError> {
        let failed = |error: io::Error| step("prepare the folders", error);
        let folder = |name| {
            let path = data.join(name);
            private_folder(data).and_then(|()| private_folder(&path))?;
            fs_err::canonicalize(path)
        };
        Ok(Self {
            sandboxes: folder("sandboxes").map_err(failed)?,
            images: folder("images").map_err(failed)?,
            volumes: folder("volumes").map_err(failed)?,
            boot_id: boot_id().map_err(|error| step("read the boot id", error))?,
            processes,
            locks: Locks::default(),
        })
    }

    fn refuses(&self) -> BTreeSet<Feature> {
        let mut refuses = BTreeSet::from([
            Feature::Airlock,
            Feature::CpuLimit,
            Feature::MemoryLimit,
            Feature::DiskLimit,
            Feature::ProcessLimit,
            Feature::OwnFiles,
        ]);
        if !self.processes.checkpoints() {
            refuses.extend([Feature::Checkpoint, Feature::PrepareRestore, Feature::Volumes]);
        }
        refuses
    }

    /// Only with scripts: programs would have to find a volume at a path of this machine's.
    fn has_volumes(&self, verb: &'static str) -> Result<(), EngineError> {
        if self.processes.checkpoints() {
            Ok(())
        } else {
            Err(EngineError::Unsupported { engine: NAME, verb })
        }
    }

    fn volume(&self, id: &VolumeId) -> PathBuf {
        self.volumes.join(id.as_str())
    }

    fn image(&self, image: &SandboxId) -> PathBuf {
        self.images.join(image.as_str())
    }

    fn folder(&self, id: &SandboxId) -> Folder {
        Folder(self.sandboxes.join(id.as_str()))
    }

    fn known(&self, id: &SandboxId) -> Result<Folder, EngineError> {
        let folder = self.folder(id);
        if folder.0.exists() { Ok(folder) } else { Err(EngineError::NotFound(id.clone())) }
    }

    /// Its record, if that is whole and of this boot.
    fn record(&self, id: &SandboxId) -> Option<Record> {
        record::read(&self.folder(id).record(), id).filter(|record: &Record| record.boot_id == self.boot_id)
    }

    fn save(&self, record: &Record) -> Result<(), EngineError> {
        let path = self.folder(&record.spec.id).record();
        record::write(record, &path).map_err(|error| step("write the record", error))
    }

    fn advance(&self, record: &mut Record, progress: Status) -> Result<(), EngineError> {
        record.progress = progress;
        self.save(record)
    }

    fn presence(
        &self,
        record: Option<&Record>,
        alive: &BTreeSet<SandboxId>,
    ) -> Result<Presence, EngineError> {
        let Some(record) = record else { return Ok(Presence::Remains) };
        if record.progress == Status::Created {
            // A host may have died before it could write down whom it started: they are found and ended as remains.
            let half_started = alive.contains(&record.spec.id);
            return Ok(if half_started { Presence::Remains } else { Presence::Created });
        }
        Ok(match (record.progress, self.processes.life(&record.spec.id, record.agent())?) {
            (_, Life::Gone) => Presence::Remains,
            // A pause stops the agent first and a resume lets it go last, so that either may be broken off: a resume
            // then makes it whole.
            (Status::Paused, Life::Stopped) => Presence::Paused,
            _ => Presence::Running,
        })
    }

    /// The record, if the sandbox is in the state that the verb needs.
    fn expect(&self, id: &SandboxId, wanted: Presence, verb: &'static str) -> Result<Record, EngineError> {
        let record = self.record(id).ok_or_else(|| EngineError::NotFound(id.clone()))?;
        let presence = self.presence(Some(&record), &self.processes.alive()?)?;
        if presence == wanted { Ok(record) } else { Err(EngineError::wrong_state(id, presence, verb)) }
    }

    fn agent(&self, id: &SandboxId) -> Option<Agent> {
        self.record(id)?.agent()
    }

    /// Writes an image of a paused sandbox.
    fn write_image(
        &self,
        id: &SandboxId,
        image: &SandboxId,
        verb: &'static str,
        write: impl FnOnce(&SandboxSpec, &Folder, &Path) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        self.can_write_images(verb)?;
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let record = self.expect(id, Presence::Paused, verb)?;
        let target = self.image(image);
        if target.exists() {
            return Err(EngineError::Exists(image.clone()));
        }
        write(&record.spec, &self.folder(id), &target)
    }

    fn can_write_images(&self, verb: &'static str) -> Result<(), EngineError> {
        if self.processes.checkpoints() {
            Ok(())
        } else {
            Err(EngineError::Unsupported { engine: NAME, verb })
        }
    }

    fn found_image(&self, image: &SandboxId, verb: &'static str) -> Result<PathBuf, EngineError> {
        self.can_write_images(verb)?;
        let path = self.image(image);
        if path.exists() { Ok(path) } else { Err(EngineError::NotFound(image.clone())) }
    }

    /// Makes a sandbox; takes it apart again if that fails.
    fn make(&self, spec: &SandboxSpec, source: Source<'_>) -> Result<(), EngineError> {
        let id = &spec.id;
        for volume in &spec.volumes {
            self.has_volumes("mount a volume")?;
            if !self.volume(&volume.id).exists() {
                return Err(step("find the volume", format!("there is no volume {}", volume.id)));
            }
        }
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let folder = self.folder(id);
        if folder.0.exists() || self.processes.alive()?.contains(id) {
            return Err(EngineError::Exists(id.clone()));
        }
        let make = || {
            folder
                .make()
                .and_then(|()| deadline::keep(&folder.0, spec.deadline, Moment::now()))
                .and_then(|()| mark_unused(spec, &folder.0))
                .map_err(|error| step("make the sandbox's folder", error))?;
            let mut record = Record::new(spec.clone(), self.boot_id.clone());
            match source {
                Source::Nothing => {}
                Source::Disk(image) => self.processes.lay_out(spec, &folder, image)?,
                Source::Image(image) => record.started(self.processes.restore(spec, &folder, image)?),
                Source::Ahead(image) => record.prepared = Some(image.clone()),
            }
            self.save(&record)
        };
        make().inspect_err(|_| {
            if let Err(error) = self.processes.kill(id, None).and_then(|()| folder.remove()) {
                tracing::warn!(%id, error = %sandglass_types::error::Chain(&error), "a half-made sandbox is left");
            }
        })
    }
}

/// What a sandbox is made from.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    Nothing,
    /// The files of this image alone.
    Disk(&'a Path),
    Image(&'a Path),
    /// The image of this name, which is brought back later.
    Ahead(&'a SandboxId),
}

impl Engine for FakeEngine {
    fn info(&self) -> EngineInfo {
        EngineInfo {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            agent: None,
            isolation: Isolation::None,
            refuses: self.refuses(),
        }
    }

    fn create(&self, spec: &SandboxSpec) -> Result<(), EngineError> {
        self.make(spec, Source::Nothing)
    }

    fn start(&self, id: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let mut record = self.expect(id, Presence::Created, "start")?;
        if record.prepared.is_some() {
            return Err(EngineError::WrongState {
                id: id.clone(),
                state: "made for an image",
                verb: "start",
            });
        }
        let agent = self.processes.start(id, &self.folder(id))?;
        record.started(agent);
        self.save(&record).inspect_err(|_| {
            // Nobody would know that it runs.
            if let Err(error) = self.processes.kill(id, Some(agent)) {
                tracing::warn!(%id, error = %sandglass_types::error::Chain(&error), "an agent is left");
            }
        })
    }

    fn pause(&self, id: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let mut record = self.expect(id, Presence::Running, "pause")?;
        self.advance(&mut record, Status::Paused)?;
        self.processes.stop(id, record.agent()).inspect_err(|_| {
            let undone = self.processes.go_on(id, record.agent());
            if let Err(error) = undone.and_then(|()| self.advance(&mut record, Status::Running)) {
                tracing::warn!(%id, error = %sandglass_types::error::Chain(&error), "a sandbox stays paused");
            }
        })
    }

    fn resume(&self, id: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let mut record = self.expect(id, Presence::Paused, "resume")?;
        self.processes.go_on(id, record.agent())?;
        self.advance(&mut record, Status::Running)
    }

    fn checkpoint(&self, id: &SandboxId, image: &SandboxId, _: Keep) -> Result<(), EngineError> {
        self.write_image(id, image, "checkpoint", |spec, folder, target| {
            self.processes.checkpoint(spec, folder, target)
        })
    }

    fn flush_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        // Nothing of it is meant to outlast anything.
        self.found_image(image, "flush the image").map(drop)
    }

    fn compress_image(&self, image: &SandboxId) -> Result<Compression, EngineError> {
        let path = self.found_image(image, "compress an image")?;
        let written = fs_err::OpenOptions::new().write(true).create_new(true).open(path.join(COMPRESSED));
        match written {
            Ok(_) => Ok(Compression::Compressed),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Compression::Already),
            Err(error) => Err(step("compress the image", error)),
        }
    }

    fn expand_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        let path = self.found_image(image, "expand an image")?;
        match fs_err::remove_file(path.join(COMPRESSED)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(step("expand the image", error)),
            _ => Ok(()),
        }
    }

    fn restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        let found = self.found_image(image, "restore")?;
        self.expand_image(image)?;
        let prepared = self.record(&spec.id).and_then(|record| record.prepared);
        if prepared.as_ref() == Some(image) {
            // A folder is all that it is.
            self.destroy(&spec.id)?;
        }
        self.make(spec, Source::Image(&found))
    }

    fn prepare_restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        let verb = "prepare a restore";
        let found = self.found_image(image, verb)?;
        self.expand_image(image)?;
        self.processes.check(spec, &found)?;
        self.make(spec, Source::Ahead(image))
    }

    fn keep_disk(&self, id: &SandboxId, image: &SandboxId) -> Result<(), EngineError> {
        self.write_image(id, image, "keep its disk", |spec, folder, target| {
            self.processes.keep_disk(spec, folder, target)
        })
    }

    fn boot(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        let found = self.found_image(image, "boot")?;
        self.expand_image(image)?;
        self.make(spec, Source::Disk(&found))
    }

    fn images(&self) -> Result<Vec<SandboxId>, EngineError> {
        ids_in(&self.images).map_err(|error| step("list the images", error))
    }

    fn remove_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        remove_folder(&self.image(image))
    }

    fn create_volume(&self, id: &VolumeId, _: u32) -> Result<(), EngineError> {
        self.has_volumes("make a volume")?;
        private_folder(&self.volume(id)).map_err(|error| step("make the volume", error))
    }

    fn remove_volume(&self, id: &VolumeId) -> Result<(), EngineError> {
        self.has_volumes("remove a volume")?;
        let has_it = |sandbox: &SandboxId| {
            self.record(sandbox)
                .is_some_and(|record| record.spec.volumes.iter().any(|volume| volume.id == *id))
        };
        let sandboxes = ids_in(&self.sandboxes).map_err(|error| step("remove the volume", error))?;
        if let Some(sandbox) = sandboxes.iter().find(|sandbox| has_it(sandbox)) {
            return Err(step("remove the volume", format!("sandbox {sandbox} has it")));
        }
        remove_folder(&self.volume(id))
    }

    fn open_volume(&self, _: &VolumeId) -> Result<OwnedFd, EngineError> {
        Err(EngineError::Unsupported { engine: NAME, verb: "work on a volume" })
    }

    fn collect(&self, id: &SandboxId, tree: Tree) -> Result<OwnedFd, EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let failed = |error: io::Error| step("read the files of the sandbox", error);
        let home = self.known(id)?.home();
        let home = match tree {
            Tree::Root => home,
            Tree::Tmp => home.join("tmp"),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let top = rustix::fs::open(&home, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
        let (ours, mut theirs) = UnixStream::pair().map_err(failed)?;
        // What this engine isolates nothing from need not be kept from it.
        let answer = move || {
            if let Err(error) = collect::answer(&mut theirs, &top) {
                tracing::debug!(%error, "the files of a sandbox were not told to the end");
            }
        };
        std::thread::Builder::new().spawn(answer).map_err(failed)?;
        Ok(ours.into())
    }

    fn volumes(&self) -> Result<Vec<VolumeId>, EngineError> {
        ids_in(&self.volumes).map_err(|error| step("list the volumes", error))
    }

    fn footprints(&self, ids: &[SandboxId]) -> Result<Footprints, EngineError> {
        // Its sandboxes have no disks.
        let of = |id: &SandboxId| (id.clone(), vec![self.image(id)]);
        let measured = footprint::measure(ids.iter().map(of));
        let mut measured = measured.map_err(|error| step("measure what is on the disk", error))?;
        for (id, footprint) in &mut measured.each {
            footprint.compressed = self.image(id).join(COMPRESSED).exists();
        }
        Ok(measured)
    }

    fn set_deadline(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let folder = self.known(id)?;
        deadline::keep(&folder.0, deadline, Moment::now()).map_err(|error| step("keep the deadline", error))
    }

    fn destroy(&self, id: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        self.processes.kill(id, self.agent(id))?;
        self.folder(id).remove()
    }

    fn stats(&self, id: &SandboxId) -> Result<Stats, EngineError> {
        let folder = self.known(id)?;
        Ok(Stats { disk_bytes: folder.disk_bytes(), ..self.processes.usage(id, self.agent(id))? })
    }

    fn list(&self) -> Result<Vec<(SandboxId, Presence)>, EngineError> {
        let alive = self.processes.alive()?;
        let mut ids = alive.clone();
        let failed = |error: io::Error| step("list the sandboxes", error);
        for entry in fs_err::read_dir(&self.sandboxes).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            // What is not named like a sandbox is none of ours.
            ids.extend(name.to_str().and_then(|name| name.parse().ok()));
        }
        let presence = |id: SandboxId| Ok((id.clone(), self.presence(self.record(&id).as_ref(), &alive)?));
        ids.into_iter().map(presence).collect()
    }

    fn hand_out(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<SessionEnds, EngineError> {
        self.set_deadline(id, deadline)?;
        mark_used(&self.folder(id).0).map_err(|error| step("say that it is used", error))?;
        self.attach(id)
    }

    fn attach(&self, id: &SandboxId) -> Result<SessionEnds, EngineError> {
        self.known(id)?.session().attach(id)
    }

    fn airlock_sockets(&self, _: &SandboxId, _: &[AirlockSocket]) -> Result<Vec<OwnedFd>, EngineError> {
        Err(EngineError::Unsupported { engine: NAME, verb: "make sockets in an airlock" })
    }

    fn wait(&self, id: &SandboxId) -> Result<Exit, EngineError> {
        self.known(id)?;
        self.processes.wait(id, self.agent(id))?;
        Ok(Exit::Ended)
    }
}
