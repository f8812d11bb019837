//! What the fake engine asks of the processes in its sandboxes.

use std::collections::BTreeSet;
use std::path::Path;

use sandglass_linux::process::ProcessIdentity;
use sandglass_types::SandboxId;

use super::NAME;
use super::folder::Folder;
use crate::engine::{EngineError, SandboxSpec, Stats};

/// Which process the agent is.
pub(super) type Agent = ProcessIdentity;

/// What an agent does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    Running,
    Stopped,
    Gone,
}

/// The processes of one instance's sandboxes.
pub(super) trait Model: std::fmt::Debug + Send + Sync {
    /// Starts the agent of a sandbox.
    fn start(&self, id: &SandboxId, folder: &Folder) -> Result<Agent, EngineError>;

    /// What the agent of a sandbox does.
    fn life(&self, id: &SandboxId, agent: Option<Agent>) -> Result<Life, EngineError>;

    /// The sandboxes of the instance that something runs in, as far as that can be seen without their folders.
    fn alive(&self) -> Result<BTreeSet<SandboxId>, EngineError>;

    /// Stops all processes of a sandbox, the agent first.
    fn stop(&self, id: &SandboxId, agent: Option<Agent>) -> Result<(), EngineError>;

    /// Lets all processes of a stopped sandbox run on, the agent last.
    fn go_on(&self, id: &SandboxId, agent: Option<Agent>) -> Result<(), EngineError>;

    /// Ends all processes of a sandbox, and returns when none is left.
    fn kill(&self, id: &SandboxId, agent: Option<Agent>) -> Result<(), EngineError>;

    /// Blocks until the agent has ended, and ends what it left. Without an agent that is known, until no process is
    /// left.
    fn wait(&self, id: &SandboxId, agent: Option<Agent>) -> Result<(), EngineError>;

    /// What the processes of a sandbox use; not its disk.
    fn usage(&self, id: &SandboxId, agent: Option<Agent>) -> Result<Stats, EngineError>;

    /// Whether the verbs below work.
    fn checkpoints(&self) -> bool {
        false
    }

    /// Writes a stopped sandbox to a new image.
    fn checkpoint(&self, _: &SandboxSpec, _: &Folder, _image: &Path) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { engine: NAME, verb: "checkpoint" })
    }

    /// Writes the files of a stopped sandbox to a new image.
    fn keep_disk(&self, _: &SandboxSpec, _: &Folder, _image: &Path) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { engine: NAME, verb: "keep its disk" })
    }

    /// Refuses an image that this sandbox can't be restored from.
    fn check(&self, _: &SandboxSpec, _image: &Path) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { engine: NAME, verb: "prepare a restore" })
    }

    /// Fills the folder of a new sandbox from the files in an image.
    fn lay_out(&self, _: &SandboxSpec, _: &Folder, _image: &Path) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { engine: NAME, verb: "boot" })
    }

    /// Fills the folder of a new sandbox from an image, and starts its agent where it was.
    fn restore(&self, _: &SandboxSpec, _: &Folder, _image: &Path) -> Result<Agent, EngineError> {
        Err(EngineError::Unsupported { engine: NAME, verb: "restore" })
    }
}
