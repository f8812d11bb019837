//! Messages between the two halves. Each is one packet of JSON.
//!
//! Both halves are always of the same build, so this may change freely; it is still typed and small, because it is
//! the only way to the privileged half. The bounds of [`sandglass_linux::fdpass`] hold for each packet.

use sandglass_types::{Digest, SandboxId, VolumeId};
use serde::{Deserialize, Serialize};

use crate::collect::Tree;
use crate::deadline::Deadline;
use crate::engine::{
    AirlockSocket, Compression, EngineError, EngineInfo, Exit, Keep, Lack, Pace, Presence, SandboxSpec, Stats,
};
use crate::footprint::Footprints;

/// A question to the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Chosen by the asker; the answer carries it. Answers come in any order.
    pub seq: u64,
    /// What to do.
    pub verb: Verb,
}

/// Everything that the host can be asked to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Verb {
    /// What the engine is.
    Describe,
    /// [`crate::Engine::create`].
    Create(SandboxSpec),
    /// [`crate::Engine::start`].
    Start(SandboxId),
    /// [`crate::Engine::pause`].
    Pause(SandboxId),
    /// [`crate::Engine::resume`].
    Resume(SandboxId),
    /// [`crate::Engine::checkpoint`].
    Checkpoint {
        /// The paused sandbox.
        id: SandboxId,
        /// Names the image.
        image: SandboxId,
        /// Whether it is flushed.
        keep: Keep,
    },
    /// [`crate::Engine::flush_image`].
    FlushImage(SandboxId),
    /// [`crate::Engine::compress_image`].
    CompressImage(SandboxId),
    /// [`crate::Engine::expand_image`].
    ExpandImage(SandboxId),
    /// [`crate::Engine::restore`].
    Restore {
        /// The new sandbox.
        spec: SandboxSpec,
        /// The image to bring back.
        image: SandboxId,
    },
    /// [`crate::Engine::prepare_restore`].
    PrepareRestore {
        /// The sandbox to be.
        spec: SandboxSpec,
        /// The image that will be brought back in it.
        image: SandboxId,
    },
    /// [`crate::Engine::keep_disk`].
    KeepDisk {
        /// The paused sandbox.
        id: SandboxId,
        /// Names the image.
        image: SandboxId,
    },
    /// [`crate::Engine::boot`].
    Boot {
        /// The new sandbox.
        spec: SandboxSpec,
        /// The image whose disk it gets.
        image: SandboxId,
    },
    /// [`crate::Engine::images`].
    Images,
    /// [`crate::Engine::remove_image`].
    RemoveImage(SandboxId),
    /// [`crate::Engine::create_volume`].
    CreateVolume {
        /// Which one.
        id: VolumeId,
        /// Its size, in MiB.
        mib: u32,
    },
    /// [`crate::Engine::remove_volume`].
    RemoveVolume(VolumeId),
    /// [`crate::Engine::open_volume`]; a descriptor comes back.
    OpenVolume(VolumeId),
    /// [`crate::Engine::collect`]; a descriptor comes back.
    Collect {
        /// Of which sandbox.
        id: SandboxId,
        /// Which of its file systems.
        tree: Tree,
    },
    /// [`crate::Engine::volumes`].
    Volumes,
    /// [`crate::Engine::footprints`].
    Footprints(Vec<SandboxId>),
    /// [`crate::Engine::tidy_cache`].
    TidyCache(Vec<Digest>),
    /// [`crate::Engine::set_deadline`].
    SetDeadline {
        /// Whose.
        id: SandboxId,
        /// The new one.
        deadline: Option<Deadline>,
    },
    /// [`crate::Engine::destroy`].
    Destroy(SandboxId),
    /// [`crate::Engine::stats`].
    Stats(SandboxId),
    /// [`crate::Engine::list`].
    List,
    /// [`crate::Engine::hand_out`]; two descriptors come back as from [`Verb::Attach`].
    HandOut {
        /// Which one.
        id: SandboxId,
        /// When its time is up.
        deadline: Option<Deadline>,
    },
    /// [`crate::Engine::attach`]; two descriptors come back: to the agent, from the agent.
    Attach(SandboxId),
    /// [`crate::Engine::airlock_sockets`]; a descriptor for each comes back, in their order.
    AirlockSockets {
        /// Whose airlock.
        id: SandboxId,
        /// Which kinds of sockets: at most [`fdpass::MAX_FDS`](sandglass_linux::fdpass::MAX_FDS).
        sockets: Vec<AirlockSocket>,
    },
    /// [`crate::Engine::pace`].
    Pace {
        /// Whose.
        id: SandboxId,
        /// Which one.
        pace: Pace,
    },
    /// [`crate::Engine::favour`].
    Favour(SandboxId),
    /// [`crate::Engine::wait`]; answered when the sandbox's processes are gone.
    Wait(SandboxId),
}

impl Verb {
    /// What to call it in a log.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Describe => "describe",
            Self::Create(_) => "create",
            Self::Start(_) => "start",
            Self::Pause(_) => "pause",
            Self::Resume(_) => "resume",
            Self::Checkpoint { .. } => "checkpoint",
            Self::FlushImage(_) => "flush_image",
            Self::CompressImage(_) => "compress_image",
            Self::ExpandImage(_) => "expand_image",
            Self::Restore { .. } => "restore",
            Self::PrepareRestore { .. } => "prepare_restore",
            Self::KeepDisk { .. } => "keep_disk",
            Self::Boot { .. } => "boot",
            Self::Images => "images",
            Self::RemoveImage(_) => "remove_image",
            Self::CreateVolume { .. } => "create_volume",
            Self::RemoveVolume(_) => "remove_volume",
            Self::OpenVolume(_) => "open_volume",
            Self::Collect { .. } => "collect",
            Self::Volumes => "volumes",
            Self::Footprints(_) => "footprints",
            Self::TidyCache(_) => "tidy_cache",
            Self::SetDeadline { .. } => "set_deadline",
            Self::Destroy(_) => "destroy",
            Self::Stats(_) => "stats",
            Self::List => "list",
            Self::HandOut { .. } => "hand_out",
            Self::Attach(_) => "attach",
            Self::AirlockSockets { .. } => "airlock_sockets",
            Self::Pace { .. } => "pace",
            Self::Favour(_) => "favour",
            Self::Wait(_) => "wait",
        }
    }
}

/// An answer of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// As in [`Call::seq`]; 0 for a packet that could not be read.
    pub seq: u64,
    /// What became of it.
    pub answer: Answer,
}

/// What became of a verb.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done; descriptors, if any were asked for, are in the same packet.
    Done,
    /// To [`Verb::Describe`].
    Info(EngineInfo),
    /// To [`Verb::Stats`].
    Stats(Stats),
    /// To [`Verb::List`].
    List(Vec<(SandboxId, Presence)>),
    /// To [`Verb::Images`].
    Images(Vec<SandboxId>),
    /// To [`Verb::Volumes`].
    Volumes(Vec<VolumeId>),
    /// To [`Verb::Footprints`].
    Footprints(Footprints),
    /// To [`Verb::CompressImage`].
    Compression(Compression),
    /// To [`Verb::Wait`].
    Exit(Exit),
    /// It is not done.
    Refused {
        /// For programs.
        kind: RefusalKind,
        /// For the operator: the whole chain of causes, cut at [`MAX_MESSAGE`] bytes.
        message: String,
    },
}

/// Upper bound of the message of a refusal, in bytes.
pub const MAX_MESSAGE: usize = 2048;

/// Why the host did not do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// Not one of the verbs, or not well-formed.
    NotAVerb,
    /// The host has as many verbs under way as it takes.
    Busy,
    /// [`EngineError::Unsupported`].
    Unsupported,
    /// [`EngineError::NotFound`].
    NotFound,
    /// [`EngineError::Exists`].
    Exists,
    /// [`EngineError::WrongState`].
    WrongState,
    /// [`EngineError::Mismatch`].
    Mismatch,
    /// [`EngineError::Damaged`].
    Damaged,
    /// [`EngineError::NoRoom`].
    NoRoom(Lack),
    /// [`EngineError::Step`].
    Failed,
}

impl Answer {
    /// The refusal that tells `error`.
    #[must_use]
    pub fn refused(error: &EngineError) -> Self {
        let kind = match error {
            EngineError::Unsupported { .. } => RefusalKind::Unsupported,
            EngineError::NotFound(_) => RefusalKind::NotFound,
            EngineError::Exists(_) => RefusalKind::Exists,
            EngineError::WrongState { .. } => RefusalKind::WrongState,
            EngineError::Mismatch { .. } => RefusalKind::Mismatch,
            EngineError::Damaged { .. } => RefusalKind::Damaged,
            EngineError::NoRoom { lack, .. } => RefusalKind::NoRoom(*lack),
            EngineError::Step { .. } => RefusalKind::Failed,
        };
        Self::refusal(kind, sandglass_types::error::Chain(error).to_string())
    }

    /// A refusal, its message cut to [`MAX_MESSAGE`].
    #[must_use]
    pub fn refusal(kind: RefusalKind, mut message: String) -> Self {
        if message.len() > MAX_MESSAGE {
            message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        }
        Self::Refused { kind, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_verbs_parse() {
        for packet in [
            r#"{"seq":1,"verb":{"exec":"/bin/sh"}}"#,
            r#"{"seq":1,"verb":{"destroy":"../../etc"}}"#,
            r#"{"seq":1,"verb":{"start":"short"}}"#,
            r#"{"seq":1,"verb":"list","more":{}}{"#,
            r#"{"seq":-1,"verb":"list"}"#,
            r#"{"seq":1,"verb":{"create":{"id":"aaaaaaaaaaaaaaaaaaaa","rootfs":"/etc","limits":{}}}}"#,
            "",
            "[]",
        ] {
            assert!(serde_json::from_str::<Call>(packet).is_err(), "{packet}");
        }
        let call = Call { seq: 7, verb: Verb::Destroy("aaaaaaaaaaaaaaaaaaaa".parse().unwrap()) };
        assert_eq!(
            serde_json::to_string(&call).unwrap(),
            r#"{"seq":7,"verb":{"destroy":"aaaaaaaaaaaaaaaaaaaa"}}"#
        );
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let Answer::Refused { message, .. } = Answer::refusal(RefusalKind::Failed, "ü".repeat(MAX_MESSAGE))
        else {
            panic!("not a refusal")
        };
        assert!(message.len() <= MAX_MESSAGE);
    }
}
