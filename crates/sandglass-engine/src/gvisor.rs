//! The engine that runs everywhere: gVisor's `runsc`, a kernel in user space.
//!
//! # Where things are
//! A sandbox is: a folder (disk image, OCI bundle, two FIFOs, a record), a control group, a pair of network
//! namespaces, and the processes of `runsc`. All of them carry its id and the instance's.
//!
//! Its *mounts* (the ext4 disk and the overlay of agent, template and disk) exist only in the mount namespace of its
//! own processes: the launcher makes them after `unshare` and before it becomes `runsc`, the gofer and the sandbox
//! process inherit copies, and the namespace that they were made in ends with `runsc create`. So the kernel takes
//! them down when the last process ends, also if the host is dead by then; there is nothing to unmount and nothing to
//! leak. The loop device is set to detach with its last user. What has not been written to the disk is thrown away
//! just before the kill (see `teardown`), or a full disk would take its time to be flushed for nobody.
//!
//! # What survives what
//! The agent's standard input and output are FIFOs that it holds open for reading and writing, so a session can be
//! opened again by path when a host has died. Its standard error is `/dev/null`: a pipe would block it as soon as
//! nobody drains it, a file would grow without end. Diagnostics of the agent belong into its session.
//!
//! Processes are found by control group, and a pid is used only with its start time and within one boot. How far a
//! sandbox has come is in its record or, if it is driven by the command line, in `runsc`'s own state file.
//!
//! # Two ways to drive it
//! `runsc` makes every sandbox. What follows goes over its control socket where the version is known (see `control`):
//! then the sandbox is made in an empty network namespace, and what starts it, or brings an image back in it, passes it a
//! packet socket of the slot. So one can be made ahead for an image, and stand still until the image is wanted. A sandbox
//! is driven to its end in the way in which it was made.

mod ahead;
mod airlocks;
pub mod bare;
pub mod cache;
mod ceiling;
mod collect;
mod content;
mod control;
mod disk;
mod exit;
mod holdings;
mod image;
mod images;
mod layer;
mod make;
mod needs;
mod oci;
mod parts;
mod paths;
mod record;
mod runsc;
mod teardown;
mod turns;
mod users;
mod volumes;
mod workers;

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sandglass_linux::cgroup::CgroupError;
use sandglass_linux::process::{self, Cpus, PidFd, Watch, adopt_orphans};
use sandglass_types::{Digest, InstanceId, SandboxId, VolumeId};

use self::cache::Pins;
use self::collect::Collectors;
use self::control::Control;
use self::exit::{Evidence, classify};
use self::image::{CHECKPOINT_TIMEOUT, Image, Memory, Source};
use self::layer::Layer;
use self::record::Record;
use self::runsc::Runsc;
use self::turns::Turns;
use self::users::Users;
use self::workers::Workers;
use crate::collect::Tree;
use crate::deadline::{self, Deadline, Moment};
use crate::engine::{
    AirlockSocket, Compression, Engine, EngineError, EngineInfo, Exit, Feature, Isolation, Keep, Pace,
    Presence, SandboxSpec, SessionEnds, Stats, step,
};
use crate::files::{ids_in, private_folder};
use crate::footprint::{self, Footprints};
use crate::locks::{Locks, lock};
use crate::record::{self as records, Status};
use crate::session::Session;

pub use self::airlocks::{AirlockError, Airlocks, Release};
pub use self::ceiling::of as ceiling;
pub use self::control::knows as over_control_socket;
pub use self::holdings::Holdings;
pub use self::make::OVERLAY_OPTIONS;
pub use self::paths::{HostPaths, SandboxPaths};
pub use self::runsc::{no_network_settings, version as runsc_version};

const NAME: &str = "gvisor";

/// Time limit of the quick verbs of `runsc`, which take tens of milliseconds on an idle machine.
const VERB_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the rest of a sandbox may outlive its sandbox process before it counts as ended all the same.
const STRAGGLERS: Duration = Duration::from_secs(2);

/// How late timers in an idle sandbox may be. Measured with 60 of them: 0.13 % of a core each, 0.42 % with 20 ms, 2 to 4 %
/// with the kernel's default.
const IDLE_TIMER_SLACK: Duration = Duration::from_millis(100);

/// How long the reaper may take to say how a process ended that has ended.
const REAPER: Duration = Duration::from_secs(2);

/// What the engine is made from.
#[derive(Debug)]
pub struct GvisorConfig {
    /// Its folders. Only root may be able to write to them.
    pub paths: HostPaths,
    /// Whose sandboxes these are.
    pub instance: InstanceId,
    /// Path of the `runsc` program.
    pub runsc: PathBuf,
    /// Path of the static guest binary, PID 1 of every sandbox.
    pub guest: PathBuf,
    /// Its arguments, without its name.
    pub guest_args: Vec<String>,
    /// The network; without it, a sandbox has a loopback interface and nothing else.
    pub airlocks: Option<Arc<dyn Airlocks>>,
    /// How new sandboxes are driven.
    pub driver: Driver,
    /// How long what no instance needs stays in the cache folder after it was last touched.
    pub keep_unneeded: Duration,
    /// The program that reads and changes what guests wrote. With the arguments `volume-content` and a folder, it answers one
    /// question on its standard input about the content of a volume (see [`crate::volume`]); with `collect-files` and a folder,
    /// one about the files of a sandbox (see [`crate::collect`]).
    pub worker_program: PathBuf,
}

/// How a sandbox is driven once it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Driver {
    /// Over its control socket if the version of `runsc` is one that was tested so, else by the command line.
    #[default]
    Fastest,
    /// By the command line of `runsc`.
    CommandLine,
}

/// The gVisor engine.
#[derive(Debug)]
pub struct GvisorEngine {
    holdings: Holdings,
    airlocks: Option<Arc<dyn Airlocks>>,
    runsc: Runsc,
    layer: Layer,
    /// What it needs of the cache folder.
    pins: Pins,
    keep_unneeded: Duration,
    /// Held by who tidies the cache folder.
    tidying: Mutex<()>,
    args: Vec<String>,
    /// Whether new sandboxes are driven over their control sockets.
    over_socket: bool,
    /// The processors of this machine.
    cpus: Cpus,
    /// Counts sandboxes, so that they are not all made on the same processors.
    turn: AtomicU64,
    /// Who goes first.
    turns: Turns,
    locks: Locks,
    /// Who uses which image.
    users: Users,
    /// Held by who makes or removes a volume, or looks for its device.
    volumes: Mutex<()>,
    /// Who works on the content of volumes.
    workers: Workers,
    /// Who reads the files of sandboxes.
    collectors: Collectors,
    /// The program that both are.
    worker_program: PathBuf,
    /// Whether what nobody waits for is to be given up.
    leaving: AtomicBool,
    /// Sandbox processes that this host became the parent of.
    watches: Mutex<HashMap<SandboxId, Arc<Watch>>>,
}

impl GvisorEngine {
    /// Prepares the folders, the control group of the instance and the agent's layer, and makes this process the
    /// reaper of all its descendants (see [`sandglass_linux::process`]). Sandboxes that exist are not touched.
    ///
    /// # Errors
    /// The step that failed: something is missing on this machine.
    pub fn open(config: GvisorConfig) -> Result<Self, EngineError> {
        let GvisorConfig {
            paths,
            instance,
            runsc,
            guest,
            guest_args,
            airlocks,
            driver,
            keep_unneeded,
            worker_program,
        } = config;
        let failed = |error: io::Error| step("prepare the folders", error);
        for folder in [
            &paths.data,
            &paths.sandboxes(),
            &paths.images(),
            &paths.volumes(),
            &paths.content_mount(),
            &paths.collected_mount(),
            &paths.collected_disk_mount(),
        ] {
            private_folder(folder).map_err(failed)?;
        }
        fs_err::create_dir_all(&paths.cache).map_err(failed)?;
        // As the kernel names them, because that is what mounts and loop devices are compared with.
        let paths = HostPaths {
            data: fs_err::canonicalize(&paths.data).map_err(failed)?,
            cache: fs_err::canonicalize(&paths.cache).map_err(failed)?,
        };
        for path in [&paths.data, &paths.cache] {
            if !make::fits_in_mount_options(path) {
                let said = format!("{} holds a character that mount options cannot", path.display());
                return Err(step("prepare the folders", said));
            }
        }
        adopt_orphans().map_err(|error| step("become a reaper", error))?;
        let released = airlocks.as_ref().map(|airlocks| Arc::clone(airlocks) as _);
        let holdings = Holdings::open(paths, &instance, released)?;
        let paths = &holdings.paths;
        image::sweep(&paths.images()).map_err(|error| step("remove unfinished images", error))?;
        volumes::sweep(paths).map_err(|error| step("remove unfinished volumes", error))?;
        let args = std::iter::once(oci::GUEST_PATH.to_owned()).chain(guest_args).collect();
        let runsc = Runsc::open(&runsc, &paths.runsc_root())?;
        let over_socket = driver == Driver::Fastest && control::knows(&runsc.version);
        if driver == Driver::Fastest && !over_socket {
            let version = &runsc.version;
            tracing::info!(version, "the control socket of this runsc is not known; sandboxes start slower");
        }
        let engine = Self {
            runsc,
            over_socket,
            layer: layer::ensure(paths, &guest)?,
            pins: Pins::open(&paths.cache, &paths.data, &instance)
                .map_err(|error| step("say what is needed of the cache folder", error))?,
            keep_unneeded,
            tidying: Mutex::default(),
            turns: Turns::open(&holdings.cgroups).map_err(|error| step("order the sandboxes", error))?,
            holdings,
            airlocks,
            args,
            cpus: Cpus::own().map_err(|error| step("count the processors", error))?,
            turn: AtomicU64::new(0),
            locks: Locks::default(),
            users: Users::default(),
            volumes: Mutex::default(),
            workers: content::workers(),
            collectors: Collectors::default(),
            worker_program,
            leaving: AtomicBool::new(false),
            watches: Mutex::default(),
        };
        engine.hold(engine.needed().0)?;
        // Last: the drop of an engine takes it away again, and nothing else would.
        engine.holdings.cgroups.make_parent().map_err(|error| step("make the control group", error))?;
        Ok(engine)
    }

    fn presence(&self, id: &SandboxId) -> Result<Presence, EngineError> {
        let record = match self.holdings.record(id) {
            Ok(record) => record,
            Err(EngineError::NotFound(_)) => return Ok(Presence::Remains),
            Err(error) => return Err(error),
        };
        if self.holdings.process(&record)?.is_none() {
            return Ok(Presence::Remains);
        }
        let status = match record.progress {
            None => self.runsc.status(id),
            // One that is stopped answers nothing, and does nothing.
            Some(Status::Created) if record.restore.is_some() || self.is_frozen(&record) => {
                Some(Status::Created)
            }
            // A host may have died before it could write that the guest runs.
            Some(Status::Created) if self.control(id).started() => Some(Status::Running),
            progress => progress,
        };
        Ok(status.map_or(Presence::Remains, Into::into))
    }

    fn keep_deadline(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<(), EngineError> {
        deadline::keep(self.holdings.paths.sandbox(id).dir(), deadline, Moment::now())
            .map_err(|error| step("keep the deadline", error))
    }

    fn control(&self, id: &SandboxId) -> Control {
        Control::new(self.runsc.control_socket(id), id.clone())
    }

    /// Writes how far a sandbox has come that is driven over its control socket.
    fn advance(&self, record: &mut Record, progress: Status) -> Result<(), EngineError> {
        record.progress = Some(progress);
        self.save(record)
    }

    fn save(&self, record: &Record) -> Result<(), EngineError> {
        let path = self.holdings.paths.sandbox(&record.id).record();
        records::write(record, &path).map_err(|error| step("write the record", error))
    }

    /// The record, if the sandbox is in the state that the verb needs.
    fn expect(&self, id: &SandboxId, wanted: Presence, verb: &'static str) -> Result<Record, EngineError> {
        let record = self.holdings.record(id)?;
        let presence = self.presence(id)?;
        if presence == wanted {
            return Ok(record);
        }
        Err(EngineError::wrong_state(id, presence, verb))
    }

    fn guest_link(&self, id: &SandboxId) -> Result<Option<OwnedFd>, EngineError> {
        let link = self.airlocks.as_ref().map(|airlocks| airlocks.guest_link(id)).transpose();
        link.map_err(|error| step("open the guest's interface", error))
    }

    /// Removes all that a sandbox owns, in whatever state it is. The caller holds its lock.
    fn remove(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.collectors.end(id)?;
        self.holdings.remove(id)?;
        lock(&self.watches).remove(id);
        Ok(())
    }

    fn known(&self, id: &SandboxId) -> Result<(), EngineError> {
        if self.holdings.paths.sandbox(id).dir().exists() {
            Ok(())
        } else {
            Err(EngineError::NotFound(id.clone()))
        }
    }

    fn evidence(&self, id: &SandboxId, watch: Option<&Watch>) -> Result<Evidence, EngineError> {
        let leaf = self.holdings.leaf(id)?;
        let count = |counted: Result<u64, CgroupError>| match counted {
            // It is being removed at this moment.
            Err(CgroupError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            counted => counted.map_err(|error| step("read the counters", error)),
        };
        Ok(Evidence {
            status: watch.and_then(|watch| watch.status(REAPER)),
            oom_kills: count(leaf.oom_kills())?,
            process_limit_hits: count(leaf.process_limit_hits())?,
        })
    }
}

impl Engine for GvisorEngine {
    fn info(&self) -> EngineInfo {
        EngineInfo {
            name: NAME.into(),
            version: self.runsc.version.clone(),
            agent: Some(self.layer.digest),
            isolation: Isolation::UserspaceKernel,
            refuses: if self.over_socket { BTreeSet::new() } else { [Feature::PrepareRestore].into() },
        }
    }

    fn create(&self, spec: &SandboxSpec) -> Result<(), EngineError> {
        self.make(spec, &Source::Blank)
    }

    fn start(&self, id: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        sandglass_failpoint::hit("engine.start.expect")?;
        let mut record = self.expect(id, Presence::Created, "start")?;
        if record.restore.is_some() {
            return Err(EngineError::WrongState {
                id: id.clone(),
                state: "made for an image",
                verb: "start",
            });
        }
        if record.progress.is_some() {
            sandglass_failpoint::hit("engine.start.link")?;
            self.control(id).start(self.guest_link(id)?.as_ref())?;
            sandglass_failpoint::hit("engine.start.save")?;
            self.advance(&mut record, Status::Running)?;
        } else {
            self.runsc.verb(id, "start", &[], VERB_TIMEOUT)?;
        }
        Ok(())
    }

    fn pause(&self, id: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let mut record = self.expect(id, Presence::Running, "pause")?;
        self.turns.stands_still(id, &self.holdings.leaf(id)?);
        if record.progress.is_none() {
            return self.runsc.verb(id, "pause", &[], VERB_TIMEOUT);
        }
        let control = self.control(id);
        control.pause()?;
        self.advance(&mut record, Status::Paused).inspect_err(|_| {
            // Nobody would know to resume it.
            if let Err(error) = control.resume() {
                tracing::warn!(%id, error = %sandglass_types::error::Chain(&error), "a sandbox stays paused");
            }
        })
    }

    fn resume(&self, id: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let mut record = self.expect(id, Presence::Paused, "resume")?;
        if record.progress.is_none() {
            return self.runsc.verb(id, "resume", &[], VERB_TIMEOUT);
        }
        // First, because a guest must never be resumed twice. If this host dies in between, or the answer is lost, the
        // sandbox is said to run, and one that does not is noticed by its silence.
        self.advance(&mut record, Status::Running)?;
        self.control(id).resume()
    }

    fn checkpoint(&self, id: &SandboxId, image: &SandboxId, keep: Keep) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let record = self.expect(id, Presence::Paused, "checkpoint")?;
        self.turns.stands_still(id, &self.holdings.leaf(id)?);
        let (unfinished, target) = self.begin_image(image)?;
        let checkpoint = unfinished.begin_checkpoint().map_err(|error| step("write the image", error))?;
        sandglass_failpoint::hit("engine.image.checkpoint")?;
        // Without `--leave-running`, a checkpoint that fails kills the sandbox. It stays paused all the same,
        // because pauses nest.
        let by_command_line = [
            OsStr::new("--leave-running"),
            OsStr::new("--compression=none"),
            OsStr::new("--image-path"),
            checkpoint.as_os_str(),
        ];
        let written = if record.progress.is_some() {
            self.control(id).checkpoint(&checkpoint)
        } else {
            self.runsc.verb(id, "checkpoint", &by_command_line, CHECKPOINT_TIMEOUT)
        };
        written.map_err(image::unwritten)?;
        self.finish_image(record, unfinished, &target, Memory::With, keep)
    }

    fn flush_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.found_image(image)?;
        sandglass_failpoint::hit("engine.flush.image")?;
        image::flush(&self.holdings.paths.image(image)).map_err(|error| step("flush the image", error))
    }

    fn compress_image(&self, image: &SandboxId) -> Result<Compression, EngineError> {
        self.compress(image)
    }

    fn expand_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        let users = self.users.of(image);
        let _wanting = users.want();
        self.plain(&users, image).map(drop)
    }

    fn leave_off(&self) {
        self.leaving.store(true, Ordering::SeqCst);
    }

    fn restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        let users = self.users.of(image);
        let _wanting = users.want();
        let (_as_it_is, found) = self.plain(&users, image)?;
        let (id, source) = (&spec.id, Source::Image(found));
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let prepared = self.take_prepared(id, image)?;
        let (pinned, _stays) = self.pinned(spec, &source)?;
        self.whole_or_not_at_all(id, || {
            let record = match prepared {
                None => self.make_parts(spec, &source, pinned)?,
                Some(record) => {
                    deadline::keep(self.holdings.paths.sandbox(id).dir(), spec.deadline, Moment::now())
                        .map_err(|error| step("keep the deadline", error))?;
                    record
                }
            };
            let Some(checkpoint) = source.checkpoint().filter(|_| self.over_socket) else { return Ok(()) };
            self.bring_back(record, &checkpoint)
        })
    }

    fn prepare_restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        if !self.over_socket {
            return Err(EngineError::Unsupported { engine: NAME, verb: "prepare a restore" });
        }
        let users = self.users.of(image);
        let _wanting = users.want();
        let (_as_it_is, found) = self.plain(&users, image)?;
        let (id, source) = (&spec.id, Source::Ahead(found, image.clone()));
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        self.expect_nothing(id)?;
        let (pinned, _stays) = self.pinned(spec, &source)?;
        self.whole_or_not_at_all(id, || {
            let record = self.make_parts(spec, &source, pinned)?;
            sandglass_failpoint::hit("engine.prepare.freeze")?;
            self.signal(&record, process::Signal::STOP)
        })
    }

    fn keep_disk(&self, id: &SandboxId, image: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        let record = self.expect(id, Presence::Paused, "keep its disk")?;
        let (unfinished, target) = self.begin_image(image)?;
        self.finish_image(record, unfinished, &target, Memory::Without, Keep::Flushed)
    }

    fn boot(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        let users = self.users.of(image);
        let _wanting = users.want();
        let (_as_it_is, found) = self.plain(&users, image)?;
        self.make(spec, &Source::Disk(found))
    }

    fn images(&self) -> Result<Vec<SandboxId>, EngineError> {
        ids_in(&self.holdings.paths.images()).map_err(|error| step("list the images", error))
    }

    fn remove_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        let users = self.users.of(image);
        // Who compresses it gives up.
        let _wanting = users.want();
        let paths = &self.holdings.paths;
        image::remove(&paths.images(), &paths.image(image)).map_err(|error| step("remove the image", error))
    }

    fn create_volume(&self, id: &VolumeId, mib: u32) -> Result<(), EngineError> {
        self.make_volume(id, mib)
    }

    fn remove_volume(&self, id: &VolumeId) -> Result<(), EngineError> {
        self.unmake_volume(id)
    }

    fn open_volume(&self, id: &VolumeId) -> Result<OwnedFd, EngineError> {
        self.start_worker(id)
    }

    fn collect(&self, id: &SandboxId, tree: Tree) -> Result<OwnedFd, EngineError> {
        self.start_collector(id, tree)
    }

    fn volumes(&self) -> Result<Vec<VolumeId>, EngineError> {
        self.all_volumes()
    }

    fn footprints(&self, ids: &[SandboxId]) -> Result<Footprints, EngineError> {
        let paths = &self.holdings.paths;
        let of = |id: &SandboxId| (id.clone(), vec![paths.image(id), paths.sandbox(id).disk()]);
        let measured = footprint::measure(ids.iter().map(of));
        let mut measured = measured.map_err(|error| step("measure what is on the disk", error))?;
        for (id, footprint) in &mut measured.each {
            footprint.compressed = Image::at(paths.image(id)).looks_compressed();
        }
        Ok(measured)
    }

    fn tidy_cache(&self, rootfs: &[Digest]) -> Result<(), EngineError> {
        self.tidy(rootfs)
    }

    fn set_deadline(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        self.known(id)?;
        self.keep_deadline(id, deadline)
    }

    fn destroy(&self, id: &SandboxId) -> Result<(), EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        self.remove(id)
    }

    fn stats(&self, id: &SandboxId) -> Result<Stats, EngineError> {
        self.known(id)?;
        let usage = match self.holdings.leaf(id)?.usage() {
            Err(CgroupError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                return Err(EngineError::NotFound(id.clone()));
            }
            usage => usage.map_err(|error| step("read what the sandbox uses", error))?,
        };
        let disk = fs_err::metadata(self.holdings.paths.sandbox(id).disk())
            .map_err(|error| step("read the size of the disk", error))?;
        Ok(Stats {
            cpu_micros: usage.cpu_micros,
            memory_bytes: usage.memory_bytes,
            memory_peak_bytes: usage.memory_peak_bytes,
            processes: usage.processes,
            // `st_blocks` counts units of 512 bytes whatever the block size is.
            disk_bytes: disk.blocks() * 512,
        })
    }

    fn list(&self) -> Result<Vec<(SandboxId, Presence)>, EngineError> {
        let failed = |error: Box<dyn std::error::Error + Send + Sync>| step("list the sandboxes", error);
        let mut names = self.holdings.cgroups.children().map_err(|error| failed(error.into()))?;
        for entry in
            fs_err::read_dir(self.holdings.paths.sandboxes()).map_err(|error| failed(error.into()))?
        {
            names.extend(entry.map_err(|error| failed(error.into()))?.file_name().into_string());
        }
        // What is not named like a sandbox is none of ours.
        let mut ids: BTreeSet<SandboxId> = names.iter().filter_map(|name| name.parse().ok()).collect();
        if let Some(airlocks) = &self.airlocks {
            ids.extend(airlocks.assigned().map_err(failed)?);
        }
        ids.into_iter().map(|id| self.presence(&id).map(|presence| (id, presence))).collect()
    }

    fn hand_out(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<SessionEnds, EngineError> {
        let lock_of = self.locks.of(id);
        let _held = lock(&lock_of);
        self.known(id)?;
        self.keep_deadline(id, deadline)?;
        self.wake(id)?;
        self.attach(id)
    }

    fn attach(&self, id: &SandboxId) -> Result<SessionEnds, EngineError> {
        self.known(id)?;
        Session { folder: self.holdings.paths.sandbox(id).dir() }.attach(id)
    }

    fn airlock_sockets(
        &self,
        id: &SandboxId,
        sockets: &[AirlockSocket],
    ) -> Result<Vec<OwnedFd>, EngineError> {
        self.known(id)?;
        let Some(airlocks) = &self.airlocks else {
            return Err(EngineError::Unsupported { engine: NAME, verb: "make a socket without a network" });
        };
        if sockets.contains(&AirlockSocket::FilterLog) && !airlocks.logs() {
            return Err(EngineError::Unsupported { engine: NAME, verb: "log what a packet filter holds up" });
        }
        airlocks.sockets(id, sockets).map_err(|error| step("make sockets in the airlock", error))
    }

    fn pace(&self, id: &SandboxId, pace: Pace) -> Result<(), EngineError> {
        self.known(id)?;
        let slack = match pace {
            Pace::Full => process::DEFAULT_TIMER_SLACK,
            Pace::Idle => IDLE_TIMER_SLACK,
            Pace::Still => return self.hold_still(id),
        };
        let leaf = self.holdings.leaf(id)?;
        process::set_timer_slack(|| leaf.processes(), slack).map_err(|error| step("set the pace", error))
    }

    fn favour(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.known(id)?;
        self.turns.asked(id, &self.holdings.leaf(id)?);
        Ok(())
    }

    fn wait(&self, id: &SandboxId) -> Result<Exit, EngineError> {
        self.known(id)?;
        let failed = |error: io::Error| step("wait for the sandbox", error);
        let watch = lock(&self.watches).get(id).cloned();
        let leaf = self.holdings.leaf(id)?;
        let mut deadline = None;
        if let Ok(record) = self.holdings.record(id) {
            if let Some(fd) = self.holdings.process(&record)? {
                fd.wait_end(None).map_err(failed)?;
            }
            deadline = Some(Instant::now() + STRAGGLERS);
        }
        while let Some(pid) =
            leaf.processes().map_err(|error| step("wait for the sandbox", error))?.into_iter().next()
        {
            if let Some(fd) = PidFd::open(pid).map_err(failed)?
                && !fd.wait_end(deadline).map_err(failed)?
            {
                break;
            }
        }
        runsc::report_panic(id, &self.holdings.paths.sandbox(id).panics());
        Ok(classify(self.evidence(id, watch.as_deref())?))
    }
}
