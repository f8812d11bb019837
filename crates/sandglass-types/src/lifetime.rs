//! How long a sandbox lives, and what becomes of it then.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a paused sandbox keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// Memory, processes and files.
    #[default]
    Full,
    /// Its files alone: it starts anew from them.
    Filesystem,
}

/// How a paused sandbox is made to run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResumeMode {
    /// From where it was, if its memory was kept.
    #[default]
    Restore,
    /// From its files alone, as after a power cut: its memory is given up.
    Reboot,
}

/// What happens to a sandbox when its time is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// It ends.
    #[default]
    Kill,
    /// It is paused with its memory.
    Pause {
        /// Whether a request to one of its ports makes it run again.
        auto_resume: bool,
    },
    /// It is paused, and only its files are kept.
    PauseFilesystem,
}

impl OnTimeout {
    /// What is kept of it, if it is paused.
    #[must_use]
    pub const fn pause(self) -> Option<PauseMode> {
        match self {
            Self::Kill => None,
            Self::Pause { .. } => Some(PauseMode::Full),
            Self::PauseFilesystem => Some(PauseMode::Filesystem),
        }
    }

    /// Whether a request to one of its ports makes it run again when it is paused.
    #[must_use]
    pub const fn auto_resumes(self) -> bool {
        matches!(self, Self::Pause { auto_resume: true })
    }
}

/// How long a sandbox lives, and what becomes of it then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Lifetime {
    /// From its creation, and from each time that a request makes it run again.
    pub timeout: Duration,
    /// What happens then.
    pub on_timeout: OnTimeout,
    /// The same happens when nobody has used it for so long, if this is set.
    pub idle: Option<Duration>,
}

impl Lifetime {
    /// One that is over after so long, and the sandbox with it.
    #[must_use]
    pub const fn of(timeout: Duration) -> Self {
        Self { timeout, on_timeout: OnTimeout::Kill, idle: None }
    }
}
