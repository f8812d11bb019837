//! The verbs that every engine has.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use sandglass_types::{Digest, Limits, SandboxId, VolumeId, VolumeMount};
use serde::{Deserialize, Serialize};

use crate::collect::Tree;
use crate::deadline::Deadline;
use crate::footprint::Footprints;

/// What stands between a sandbox's code and this machine's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// A kernel in user space answers every system call.
    UserspaceKernel,
    /// A virtual machine with a kernel of its own.
    VirtualMachine,
    /// None at all: for development without root.
    None,
}

impl Isolation {
    /// As answers and their headers have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UserspaceKernel => "userspace_kernel",
            Self::VirtualMachine => "virtual_machine",
            Self::None => "none",
        }
    }
}

/// Something that an engine may refuse: it does not promise it, and says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feature {
    /// [`Engine::checkpoint`] and [`Engine::restore`], [`Engine::keep_disk`] and [`Engine::boot`].
    Checkpoint,
    /// [`Engine::prepare_restore`].
    PrepareRestore,
    /// A network that ends in an airlock: [`Engine::airlock_socket`]. Without it, programs in a sandbox have the
    /// network of the machine.
    Airlock,
    /// A limit on CPU time.
    CpuLimit,
    /// A limit on memory.
    MemoryLimit,
    /// A limit on the disk.
    DiskLimit,
    /// A limit on processes.
    ProcessLimit,
    /// [`Engine::create_volume`], and sandboxes with [volumes](SandboxSpec::volumes).
    Volumes,
    /// A file system of its own: without it, programs in a sandbox see the machine's.
    OwnFiles,
}

/// What an engine is and can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// `gvisor`, `microvm`, `fake`.
    pub name: String,
    /// The version of the program behind it, for people and for snapshots to pin.
    pub version: String,
    /// The agent of new sandboxes, by its content; `None` where it is part of something else.
    #[serde(default)]
    pub agent: Option<Digest>,
    /// The boundary that it builds.
    pub isolation: Isolation,
    /// All that it does not do.
    pub refuses: BTreeSet<Feature>,
}

impl EngineInfo {
    /// Whether it does not do this.
    #[must_use]
    pub fn refuses(&self, feature: Feature) -> bool {
        self.refuses.contains(&feature)
    }
}

/// What a new sandbox shall be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Its id; no two sandboxes of an instance ever share one.
    pub id: SandboxId,
    /// The read-only root file system, by content, in the cache folder.
    pub rootfs: Digest,
    /// Hard limits.
    pub limits: Limits,
    /// When its time is up, if ever.
    pub deadline: Option<Deadline>,
    /// Whether it is made for nobody yet: a file named [`UNUSED`] in its folder says so to whoever counts what is there.
    pub unused: bool,
    /// The volumes that it has, each at most once, at paths of which none is below another. They are there when it is made.
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
}

/// The file in the folder of a sandbox that was made for nobody.
pub const UNUSED: &str = "unused";

/// What a machine can run out of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lack {
    /// Bytes or files on the file system of the data folder.
    Disk,
    /// Memory.
    Memory,
    /// Processes and threads.
    Processes,
    /// Loop devices.
    LoopDevices,
    /// Open files.
    Descriptors,
}

impl std::fmt::Display for Lack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Disk => "disk space",
            Self::Memory => "memory",
            Self::Processes => "processes",
            Self::LoopDevices => "loop devices",
            Self::Descriptors => "file descriptors",
        })
    }
}

impl Lack {
    /// What is missing, if that is what the system's error behind this one says.
    #[must_use]
    pub fn behind(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        let chain = std::iter::successors(Some(error), |error| error.source());
        let mut said = chain.filter_map(|error| error.downcast_ref::<std::io::Error>());
        match said.find_map(errno)? {
            Errno::NOSPC | Errno::DQUOT => Some(Self::Disk),
            Errno::NOMEM => Some(Self::Memory),
            Errno::AGAIN => Some(Self::Processes),
            Errno::MFILE | Errno::NFILE => Some(Self::Descriptors),
            _ => None,
        }
    }
}

/// The system's number of an error. `fs_err`, which adds the path, has it in its text alone.
fn errno(error: &std::io::Error) -> Option<Errno> {
    Errno::from_io_error(error).or_else(|| {
        let text = error.to_string();
        let number = text.rsplit_once("(os error ")?.1.strip_suffix(')')?;
        Some(Errno::from_raw_os_error(number.parse().ok()?))
    })
}

/// A failed verb.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The engine can't do this at all.
    #[error("the {engine} engine cannot {verb}")]
    Unsupported {
        /// Which engine.
        engine: &'static str,
        /// What was asked.
        verb: &'static str,
    },
    /// There is no such sandbox of this instance.
    #[error("no sandbox {0} on this machine")]
    NotFound(SandboxId),
    /// There is one already.
    #[error("sandbox {0} exists already")]
    Exists(SandboxId),
    /// The verb is not legal in the state that the sandbox is in.
    #[error("sandbox {id} is {state}, so it cannot {verb}")]
    WrongState {
        /// Which sandbox.
        id: SandboxId,
        /// Its state.
        state: &'static str,
        /// What was asked.
        verb: &'static str,
    },
    /// The memory in an image can be brought back only with what it was made with, and that is not here.
    #[error("the memory in the image was made with {what} {had}, and this server has {has}")]
    Mismatch {
        /// What is another one.
        what: &'static str,
        /// Which one it was made with.
        had: String,
        /// Which one there is.
        has: String,
    },
    /// An image is not as it was written, so nothing is made from it.
    #[error("the image is damaged: {what}")]
    Damaged {
        /// Which file of it, and in what way.
        what: String,
    },
    /// A step failed because the machine ran out of something.
    #[error("{step} failed, because this machine is out of {lack}")]
    NoRoom {
        /// What it ran out of.
        lack: Lack,
        /// Which step, as a verb phrase.
        step: &'static str,
        /// What was said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A step failed.
    #[error("{step} failed")]
    Step {
        /// Which one, as a verb phrase.
        step: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl EngineError {
    /// That a verb is not legal in this state.
    pub(crate) fn wrong_state(id: &SandboxId, presence: Presence, verb: &'static str) -> Self {
        let state = match presence {
            Presence::Created => "created",
            Presence::Running => "running",
            Presence::Paused => "paused",
            Presence::Remains => "ended",
        };
        Self::WrongState { id: id.clone(), state, verb }
    }
}

/// A failed step with its cause, which may be that something is lacking.
pub(crate) fn step(
    step: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> EngineError {
    let source = source.into();
    match Lack::behind(&*source) {
        Some(lack) => EngineError::NoRoom { lack, step, source },
        None => EngineError::Step { step, source },
    }
}

impl From<sandglass_failpoint::Injected> for EngineError {
    fn from(injected: sandglass_failpoint::Injected) -> Self {
        Self::Step { step: "a step under test", source: injected.into() }
    }
}

/// Whether an image outlasts a loss of power from when it has its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// It does: whoever finds it by its name finds it whole.
    Flushed,
    /// Not yet, so that its source need not wait for the disk. Nobody may count on it before [`Engine::flush_image`].
    Unflushed,
}

/// What became of the wish to compress an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// It is compressed.
    Compressed,
    /// It was before.
    Already,
    /// It stays as it is: it would take as much room, or hardly less.
    NotWorth,
    /// It stays as it is: somebody uses it, or wants to.
    GivenUp,
}

/// How far a sandbox on this machine has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// Made but not started.
    Created,
    /// Its processes run.
    Running,
    /// Its processes are stopped.
    Paused,
    /// Its processes are gone but something that it owned is not.
    Remains,
}

/// How the processes of a sandbox ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// The guest's first process ended, or the engine did.
    Ended,
    /// The kernel killed it at its memory limit.
    OutOfMemory,
    /// The limit on processes was hit.
    Processes,
}

/// What a sandbox uses now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stats {
    /// CPU time used since the start, in microseconds.
    pub cpu_micros: u64,
    /// Memory in use, in bytes, the engine's own included.
    pub memory_bytes: u64,
    /// Highest memory in use so far, in bytes.
    pub memory_peak_bytes: u64,
    /// Host processes and threads in use.
    pub processes: u64,
    /// Bytes of its disk that hold data.
    pub disk_bytes: u64,
}

/// The two ends of a sandbox's session that the server holds.
#[derive(Debug)]
pub struct SessionEnds {
    /// Write here: it arrives on the agent's standard input.
    pub to_agent: OwnedFd,
    /// Read here: the agent's standard output.
    pub from_agent: OwnedFd,
}

/// A socket to make inside a sandbox's airlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AirlockSocket {
    /// Bound to the airlock's port for redirected DNS over UDP.
    DnsUdp,
    /// Listening on the airlock's port for redirected DNS over TCP.
    DnsTcp,
    /// Listening on the airlock's port for all other TCP that is redirected.
    TcpEgress,
    /// Receives what the airlock's packet filter logs, [`Unsupported`](EngineError::Unsupported) where the kernel has no
    /// log for it.
    FilterLog,
    /// An unconnected TCP socket, from which only the guest can be reached.
    TcpToGuest,
}

/// How punctual the processes of a sandbox are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// As the kernel makes them.
    Full,
    /// Timers inside may be late by some dozens of milliseconds, and an idle sandbox costs next to nothing.
    Idle,
    /// They do not run at all, whatever they are asked, and cost nothing. [`Engine::hand_out`] alone ends this.
    Still,
}

/// One way to isolate sandboxes. All verbs block; the host calls each on a thread of its own.
///
/// Every verb may be repeated after a crash. `destroy` is legal in every state, also for a sandbox that was
/// only half made, and returns once nothing is left.
pub trait Engine: Send + Sync {
    /// What this engine is.
    fn info(&self) -> EngineInfo;

    /// Makes the computer without running anything in it.
    ///
    /// # Errors
    /// [`EngineError::Exists`], [`EngineError::NoRoom`], or the step that failed; what was half made has been
    /// removed again.
    fn create(&self, spec: &SandboxSpec) -> Result<(), EngineError>;

    /// Starts the agent.
    ///
    /// # Errors
    /// [`EngineError::NotFound`], [`EngineError::WrongState`], or the step that failed.
    fn start(&self, id: &SandboxId) -> Result<(), EngineError>;

    /// Stops all its processes where they are.
    ///
    /// # Errors
    /// As [`Engine::start`].
    fn pause(&self, id: &SandboxId) -> Result<(), EngineError>;

    /// Lets a paused sandbox run on.
    ///
    /// # Errors
    /// As [`Engine::start`].
    fn resume(&self, id: &SandboxId) -> Result<(), EngineError>;

    /// Writes memory and processes of a *paused* sandbox to an image named `image`, and leaves it paused.
    ///
    /// # Errors
    /// As [`Engine::start`], or [`EngineError::Unsupported`].
    fn checkpoint(&self, id: &SandboxId, image: &SandboxId, keep: Keep) -> Result<(), EngineError>;

    /// Makes an image outlast a loss of power that was written with [`Keep::Unflushed`]. No sandbox stands still for it.
    ///
    /// # Errors
    /// [`EngineError::NotFound`]: there is no such image. Otherwise the step that failed.
    fn flush_image(&self, image: &SandboxId) -> Result<(), EngineError>;

    /// Compresses an image that nobody uses, in its own time: it takes what nobody else wants of the processors and the disks.
    /// It gives up at once when anybody uses the image, and so it does when it is removed. At any moment there is one form of
    /// it, whole.
    ///
    /// # Errors
    /// [`EngineError::NotFound`]; [`EngineError::NoRoom`]: both forms must have room; [`EngineError::Unsupported`]: the file
    /// system of the images can't swap two names. Otherwise the step that failed; then the image is as it was.
    fn compress_image(&self, image: &SandboxId) -> Result<Compression, EngineError>;

    /// Makes an image what it was before it was compressed; `Ok` if it is not. Who makes something from an image need not ask
    /// for it before, but who waits here is in the way of nobody. Of many who ask one does it, and the others wait for that.
    ///
    /// # Errors
    /// [`EngineError::NotFound`]; [`EngineError::NoRoom`]: both forms must have room; [`EngineError::Damaged`]. Otherwise the
    /// step that failed. Then the image is as it was.
    fn expand_image(&self, image: &SandboxId) -> Result<(), EngineError>;

    /// Nobody will hear of what is done any more: what nobody waits for is given up. An engine that does nothing of that kind
    /// has nothing to do.
    fn leave_off(&self) {}

    /// Makes a new sandbox from an image and a copy of the disk that belongs to it. One that was prepared for that is
    /// taken; whatever fails then, nothing is left of it.
    ///
    /// # Errors
    /// As [`Engine::create`], [`Engine::expand_image`], [`EngineError::Mismatch`], or [`EngineError::Unsupported`]. An image
    /// without memory does not match.
    fn restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError>;

    /// Makes all of a sandbox that can be made before [`Engine::restore`] of the same id and image brings the image back,
    /// which takes less time then. Until then it is [`Presence::Created`], takes no CPU time, and can't be started; the
    /// image must stay as it is.
    ///
    /// # Errors
    /// As [`Engine::restore`].
    fn prepare_restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError>;

    /// Writes the disk of a *paused* sandbox to an image named `image` that has no memory, and leaves it paused. What its
    /// kernel has not written to the disk yet is not there.
    ///
    /// # Errors
    /// As [`Engine::checkpoint`].
    fn keep_disk(&self, id: &SandboxId, image: &SandboxId) -> Result<(), EngineError>;

    /// As [`Engine::create`], with a copy of the disk in an image, with or without memory, in place of a blank one.
    ///
    /// # Errors
    /// As [`Engine::restore`].
    fn boot(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError>;

    /// All images.
    ///
    /// # Errors
    /// They can't be listed.
    fn images(&self) -> Result<Vec<SandboxId>, EngineError>;

    /// Removes an image. `Ok` if there is none.
    ///
    /// # Errors
    /// The step that failed; call again.
    fn remove_image(&self, image: &SandboxId) -> Result<(), EngineError>;

    /// Makes a volume of this size, with an empty folder that everybody may write to; `Ok` if there is one of this name.
    ///
    /// # Errors
    /// [`EngineError::NoRoom`], [`EngineError::Unsupported`], or the step that failed; then nothing of it is left.
    fn create_volume(&self, id: &VolumeId, mib: u32) -> Result<(), EngineError>;

    /// Removes a volume that no sandbox has; `Ok` if there is none.
    ///
    /// # Errors
    /// The step that failed: somebody has it mounted.
    fn remove_volume(&self, id: &VolumeId) -> Result<(), EngineError>;

    /// Starts a process that answers one question about the content of a volume (see [`crate::volume`]), and ends when it has,
    /// or when nobody holds the socket any more. Returns that.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`], [`EngineError::NoRoom`] where there are too many, or the step that failed.
    fn open_volume(&self, id: &VolumeId) -> Result<OwnedFd, EngineError>;

    /// Starts a process that answers one question about the files of a sandbox (see [`crate::collect`]), and ends when it has,
    /// or when nobody holds the socket any more. Returns that. The sandbox may be in any state: running, paused, with its
    /// processes gone, or an image of its id alone. What its programs have written is told, as the others of them see it; of
    /// what they write meanwhile, a part. A destruction ends the process.
    ///
    /// # Errors
    /// [`EngineError::NotFound`]: there is neither a disk of it nor an image. [`EngineError::NoRoom`] where there are too many,
    /// or the step that failed.
    fn collect(&self, id: &SandboxId, tree: Tree) -> Result<OwnedFd, EngineError>;

    /// All volumes.
    ///
    /// # Errors
    /// The step that failed.
    fn volumes(&self) -> Result<Vec<VolumeId>, EngineError>;

    /// What images and disks of sandboxes take: under each id, the image of that name and the disk of that sandbox. What is
    /// there of neither is left out. It looks at so much and no more.
    ///
    /// # Errors
    /// They can't be read.
    fn footprints(&self, ids: &[SandboxId]) -> Result<Footprints, EngineError>;

    /// Removes what no instance on this machine needs any more of the cache folder that they share. This one needs these root
    /// file systems, though no sandbox and no image may have them now. An engine without a cache folder has nothing to do.
    ///
    /// # Errors
    /// The step that failed; call again.
    fn tidy_cache(&self, _rootfs: &[Digest]) -> Result<(), EngineError> {
        Ok(())
    }

    /// Keeps another deadline for it, or none, where [`crate::deadline::all`] finds it. The engine itself ends nothing.
    ///
    /// # Errors
    /// [`EngineError::NotFound`], or it can't be written; then the one before stays.
    fn set_deadline(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<(), EngineError>;

    /// Ends it and removes all that it owned. `Ok` if there is nothing of it.
    ///
    /// # Errors
    /// The step that failed; call again.
    fn destroy(&self, id: &SandboxId) -> Result<(), EngineError>;

    /// What it uses now.
    ///
    /// # Errors
    /// [`EngineError::NotFound`].
    fn stats(&self, id: &SandboxId) -> Result<Stats, EngineError>;

    /// All that exists of this instance, read from the machine and not from memory.
    ///
    /// # Errors
    /// The machine could not be read.
    fn list(&self) -> Result<Vec<(SandboxId, Presence)>, EngineError>;

    /// Lets one go on that was made for nobody ([`SandboxSpec::unused`]): it is somebody's from now on, until this deadline.
    /// Opens its agent's byte stream, as [`Engine::attach`] does. One that is somebody's already goes on as it does.
    ///
    /// # Errors
    /// As [`Engine::set_deadline`] and [`Engine::attach`], or the step that failed.
    fn hand_out(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<SessionEnds, EngineError>;

    /// Opens the agent's byte stream. The caller makes sure that only one process reads it.
    ///
    /// # Errors
    /// [`EngineError::NotFound`], or [`EngineError::WrongState`] if there is no agent: after its end and, with an
    /// engine whose sandboxes have no process before, until its start.
    fn attach(&self, id: &SandboxId) -> Result<SessionEnds, EngineError>;

    /// Makes sockets inside the sandbox's airlock: all of them, in this order, or none.
    ///
    /// # Errors
    /// [`EngineError::NotFound`], or the step that failed.
    fn airlock_sockets(&self, id: &SandboxId, sockets: &[AirlockSocket])
    -> Result<Vec<OwnedFd>, EngineError>;

    /// Sets how punctual its processes are, in whatever state they are. An engine whose idle sandboxes cost nothing has
    /// nothing to do.
    ///
    /// # Errors
    /// [`EngineError::NotFound`], or the step that failed.
    fn pace(&self, _id: &SandboxId, _pace: Pace) -> Result<(), EngineError> {
        Ok(())
    }

    /// Lets its processes go before those of other sandboxes for a moment, because somebody waits for them: less than a
    /// second, and as often as it is asked for. At all other times, sandboxes share what nobody waits for. An engine that
    /// knows no order has nothing to do.
    ///
    /// # Errors
    /// [`EngineError::NotFound`].
    fn favour(&self, _id: &SandboxId) -> Result<(), EngineError> {
        Ok(())
    }

    /// Blocks until the processes of the sandbox are gone, and says how they ended. It removes nothing. Processes that
    /// outlive their agent are ended first; until somebody waits, they may go on.
    ///
    /// # Errors
    /// [`EngineError::NotFound`].
    fn wait(&self, id: &SandboxId) -> Result<Exit, EngineError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_found_behind_any_error() {
        let of = |error: std::io::Error| match step("x", error) {
            EngineError::NoRoom { lack, .. } => Some(lack),
            _ => None,
        };
        let system = |errno: Errno| of(errno.into());
        assert_eq!(system(Errno::NOSPC), Some(Lack::Disk));
        assert_eq!(system(Errno::NOMEM), Some(Lack::Memory));
        assert_eq!(system(Errno::AGAIN), Some(Lack::Processes));
        assert_eq!(system(Errno::MFILE), Some(Lack::Descriptors));
        assert_eq!(system(Errno::PERM), None);
        assert_eq!(of(std::io::Error::other("no number")), None);
        // The crate that adds paths to errors hides the number from a plain look.
        let path = std::path::Path::new("/dev/full");
        let full = fs_err::write(path, "x").unwrap_err();
        assert_eq!(of(full), Some(Lack::Disk));
    }
}
