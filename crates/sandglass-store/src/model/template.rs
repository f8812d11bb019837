//! Templates that have an image of a running state.

use std::collections::BTreeMap;

use sandglass_types::Digest;
use serde::{Deserialize, Serialize};

/// What commands in a sandbox have that say nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandDefaults {
    /// Who runs them.
    pub user: String,
    /// Where; empty for their user's home.
    pub workdir: String,
    /// Their environment, before the sandbox's and the command's own variables.
    pub env: BTreeMap<String, String>,
}

/// What a template is beside its image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateSpec {
    /// The template that it was built on; its own name for one that the server prepares by itself.
    pub base: String,
    /// The command that runs on, as a line of the shell.
    pub start: Option<String>,
    /// The command that ends with 0 once the other is ready.
    pub ready: Option<String>,
    /// How long that may take, in seconds.
    pub ready_timeout: u32,
    /// How many unused copies are kept ready.
    pub pool: u32,
    /// What its image has running already of the templates that it is built on, in the order in which that was started.
    #[serde(default)]
    pub inherited: Vec<Started>,
    /// The agent that its image has, as the engine names it.
    #[serde(default)]
    pub agent: Option<Digest>,
}

/// What a template starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The command that runs on, as a line of the shell.
    pub start: Option<String>,
    /// The command that ends with 0 once the other is ready.
    pub ready: Option<String>,
    /// How long that may take, in seconds.
    pub ready_timeout: u32,
}

impl TemplateSpec {
    /// What it starts itself.
    #[must_use]
    pub fn own(&self) -> Started {
        let Self { start, ready, ready_timeout, .. } = self;
        Started { start: start.clone(), ready: ready.clone(), ready_timeout: *ready_timeout }
    }

    /// All that runs in its image, in order.
    #[must_use]
    pub fn all_started(&self) -> Vec<Started> {
        self.inherited.iter().cloned().chain([self.own()]).collect()
    }
}

/// Which way a sandbox came to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StartPath {
    /// All at once: its agent was started, and with it everything else.
    #[default]
    Cold,
    /// From an image of a running state.
    Restore,
    /// As a copy of a running state that was ready before anybody asked.
    Pool,
}

impl StartPath {
    /// In one word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Restore => "restore",
            Self::Pool => "pool",
        }
    }
}
