//! What is to be done.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::dialect::Dialect;

/// Longest job, in bytes.
pub(super) const MAX_LEN: u64 = 4 << 20;

/// Calls of the model that a turn has, unless the job says otherwise.
const STEPS: u32 = 100;

/// What the model can hold, in tokens, unless the job says otherwise.
const WINDOW: u64 = 128_000;

/// What one answer may have, in tokens, unless the job says otherwise. The gateway makes it less where the budget is small.
const MAX_OUTPUT: u64 = 16_384;

/// How it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mode {
    /// By a model that uses tools until it says that it is done.
    #[default]
    Agent,
    /// By one command that a small model writes, which knows no tools.
    Command,
}

/// What the model may use besides files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub(super) struct Allowed {
    /// Commands.
    pub shell: bool,
    /// What is elsewhere, as far as the sandbox's own policy lets it.
    pub web: bool,
}

/// Which turn of the run this is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub(super) struct Turn {
    /// `build`, `repair-1`, …
    pub name: String,
    /// From 1.
    pub number: u32,
}

/// A job. What is not known of it is left alone: a sandbox that came back may have an older worker than its server.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Job {
    /// What the user wants.
    pub prompt: String,
    /// What the gateway calls the model.
    pub model: String,
    /// How the model is spoken to.
    pub dialect: Dialect,
    /// Where the work is done; absolute. It is made if it lacks.
    pub folder: PathBuf,
    /// What the model may use.
    #[serde(default)]
    pub tools: Allowed,
    /// Which turn this is.
    #[serde(default)]
    pub turn: Turn,
    /// Where what was said is kept from turn to turn; absolute.
    #[serde(default)]
    pub history: Option<PathBuf>,
    /// How long it may take.
    seconds: u64,
    /// How it is done.
    #[serde(default)]
    pub mode: Mode,
    /// Calls of the model at most.
    #[serde(default = "steps")]
    pub steps: u32,
    /// What the model can hold, in tokens.
    #[serde(default = "window")]
    pub window: u64,
    /// What one answer may have, in tokens.
    #[serde(default = "max_output")]
    pub max_output: u64,
}

const fn steps() -> u32 {
    STEPS
}

const fn window() -> u64 {
    WINDOW
}

const fn max_output() -> u64 {
    MAX_OUTPUT
}

impl Job {
    /// Understands one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        if u64::try_from(text.len()).is_ok_and(|len| len > MAX_LEN) {
            return Err(format!("the job is longer than {MAX_LEN} bytes"));
        }
        let job: Self = serde_json::from_slice(text).map_err(|error| format!("the job is none: {error}"))?;
        let wrong = if job.prompt.trim().is_empty() {
            Some("its prompt is empty")
        } else if job.model.is_empty() {
            Some("it names no model")
        } else if !job.folder.is_absolute() || job.history.as_deref().is_some_and(Path::is_relative) {
            Some("its folder or its history is no absolute path")
        } else if job.seconds == 0 || job.steps == 0 || job.max_output == 0 || job.window / 2 < job.max_output
        {
            Some("it leaves no time, no steps or no tokens")
        } else {
            None
        };
        wrong.map_or(Ok(job), |wrong| Err(format!("the job can't be done: {wrong}")))
    }

    /// How long it may take.
    pub(super) const fn time(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_is_off() {
        let job =
            br#"{"prompt":"p","model":"m","dialect":"chat","folder":"/w","seconds":5,"of_tomorrow":[1]}"#;
        let job = Job::parse(job).unwrap();
        assert_eq!((job.tools, job.history, job.mode), (Allowed::default(), None, Mode::Agent));
        assert_eq!((job.steps, job.window, job.max_output), (STEPS, WINDOW, MAX_OUTPUT));
    }

    #[test]
    fn what_can_t_be_done_is_refused() {
        let good = serde_json::json!({"prompt": "p", "model": "m", "dialect": "messages", "folder": "/w", "seconds": 5});
        Job::parse(good.to_string().as_bytes()).unwrap();
        for (name, value) in [
            ("prompt", " \n"),
            ("model", ""),
            ("dialect", "images"),
            ("folder", "w"),
            ("history", "h"),
            ("seconds", "5"),
        ] {
            let mut wrong = good.clone();
            wrong[name] = value.into();
            assert!(Job::parse(wrong.to_string().as_bytes()).is_err(), "{name}");
        }
        for name in ["seconds", "steps", "window", "max_output"] {
            let mut wrong = good.clone();
            wrong[name] = 0.into();
            assert!(Job::parse(wrong.to_string().as_bytes()).is_err(), "{name}");
        }
        assert!(Job::parse(&vec![b' '; usize::try_from(MAX_LEN).unwrap() + 1]).is_err());
        assert!(Job::parse(b"").is_err());
    }
}
