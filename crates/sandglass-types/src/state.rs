//! States of a sandbox as they are stored and shown. The rules for moving between them live in
//! `sandglass-control`.

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// The row exists; the computer is being made.
    Creating,
    /// The guest answered and commands can run.
    Running,
    /// Its memory and disk are being written to an image. It runs on if that fails.
    Pausing,
    /// It is an image and nothing else: no process, no memory, no network.
    Paused,
    /// It is being made from its image. It is paused again if that fails.
    Resuming,
    /// The decision to end it is stored; what it owns is being removed.
    Ending,
    /// Nothing of it is left on the machine.
    Ended,
}

impl SandboxState {
    /// Those in which there may be something of it on the machine.
    pub const NOT_ENDED: [Self; 6] =
        [Self::Creating, Self::Running, Self::Pausing, Self::Paused, Self::Resuming, Self::Ending];
}

/// Why a sandbox ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// A client asked for it.
    Killed,
    /// Its time was up.
    Timeout,
    /// Creation failed.
    CreateFailed,
    /// The memory limit was hit and the kernel ended the sandbox.
    OutOfMemory,
    /// The limit on processes was hit and the engine ended.
    #[serde(rename = "pids")]
    Processes,
    /// The engine or the guest agent ended by itself.
    Crashed,
    /// A restarted server found that it was gone.
    Lost,
}
