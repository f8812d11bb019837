//! What is asked of a run. Each part is checked where it is parsed; [`RunSpec::check`] checks what they are together.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::path::{Pattern, ProjectPath};
use crate::Micros;

/// Longest prompt, in bytes.
pub const MAX_PROMPT: usize = 256 << 10;

/// Longest command, all words together, in bytes.
pub const MAX_COMMAND: usize = 8 << 10;

/// Most words of a command.
const MAX_WORDS: usize = 256;

/// Longest name of a model, in bytes.
const MAX_MODEL: usize = 128;

/// Most files that one request brings.
pub const MAX_FILES: usize = 256;

/// Most patterns of outputs.
pub const MAX_OUTPUTS: usize = 64;

/// Most checks.
pub const MAX_CHECKS: usize = 16;

/// Most turns of repair that may be asked for after one turn.
pub const MAX_REPAIRS: u32 = 10;

/// The shortest and the longest time of a run, or of a check.
pub const TIMES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(24 * 3600));

/// Most days that content is kept.
pub const MAX_RETENTION_DAYS: u32 = 365;

/// Most labels, and most bytes of all of them.
const MAX_METADATA: (usize, usize) = (64, 16 << 10);

/// What a run can't be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {what}")]
pub struct InvalidRun {
    /// Which field.
    pub field: &'static str,
    /// What is wrong with it.
    pub what: String,
}

fn invalid<T>(field: &'static str, what: impl Into<String>) -> Result<T, InvalidRun> {
    Err(InvalidRun { field, what: what.into() })
}

/// What the agent shall do: 1 to [`MAX_PROMPT`] bytes without NUL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Prompt(String);

impl Prompt {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Prompt {
    type Error = InvalidRun;

    fn try_from(text: String) -> Result<Self, InvalidRun> {
        if text.trim().is_empty() || text.len() > MAX_PROMPT || text.contains('\0') {
            return invalid("prompt", format!("must have 1 to {MAX_PROMPT} bytes, without NUL"));
        }
        Ok(Self(text))
    }
}

/// What providers or the operator call a model: 1 to 128 bytes of `a-z`, `A-Z`, `0-9`, `.`, `_`, `:`, `/`, `@` and `-`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelName(String);

impl ModelName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ModelName {
    type Err = InvalidRun;

    fn from_str(text: &str) -> Result<Self, InvalidRun> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'/' | b'@' | b'-');
        if (1..=MAX_MODEL).contains(&text.len()) && text.bytes().all(plain) {
            Ok(Self(text.to_owned()))
        } else {
            invalid(
                "model",
                format!("must have 1 to {MAX_MODEL} letters, digits and '.', '_', ':', '/', '@', '-'"),
            )
        }
    }
}

/// A program and its arguments. A shell text is `/bin/bash -l -c TEXT`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Command(Vec<String>);

impl Command {
    /// A text for a login shell.
    ///
    /// # Errors
    /// It is empty, too long, or has a NUL.
    pub fn shell(text: String) -> Result<Self, InvalidRun> {
        Self::words(["/bin/bash", "-l", "-c"].map(str::to_owned).into_iter().chain([text]).collect())
    }

    /// The program and its arguments themselves.
    ///
    /// # Errors
    /// There is no program, or all are too long, too many, or have a NUL.
    pub fn words(words: Vec<String>) -> Result<Self, InvalidRun> {
        let bytes: usize = words.iter().map(|word| word.len() + 1).sum();
        let there = words.first().is_some_and(|word| !word.is_empty())
            && words.last().is_some_and(|word| !word.is_empty());
        if !there
            || words.len() > MAX_WORDS
            || bytes > MAX_COMMAND
            || words.iter().any(|word| word.contains('\0'))
        {
            let what = format!(
                "must have 1 to {MAX_WORDS} words of at most {MAX_COMMAND} bytes together, without NUL"
            );
            return invalid("command", what);
        }
        Ok(Self(words))
    }

    /// The words; there is at least one.
    #[must_use]
    pub fn as_words(&self) -> &[String] {
        &self.0
    }

    /// How it is shown: the text of a shell, or the words.
    #[must_use]
    pub fn shown(&self) -> String {
        match self.0.as_slice() {
            [shell, login, flag, text] if shell == "/bin/bash" && login == "-l" && flag == "-c" => {
                text.clone()
            }
            words => words.join(" "),
        }
    }
}

/// Who does the work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Agent {
    /// The worker that is part of every sandbox.
    Builtin,
    /// Codex, of the template.
    Codex,
    /// Claude Code, of the template.
    ClaudeCode,
    /// A program of the template or of the files. The prompt is its standard input.
    Command(Command),
}

/// What may leave the sandbox: nothing, or what the operator's ceiling allows of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Web {
    /// Nothing.
    Off,
    /// All that the ceiling allows.
    On,
    /// Of that, these domains, addresses and ranges.
    Only(Vec<String>),
}

/// What is kept of a run after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retention {
    /// Everything.
    Full,
    /// What happened and when, with sizes and money: no content.
    Metadata,
    /// Money and sizes.
    None,
}

impl Retention {
    /// As it is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Metadata => "metadata",
            Self::None => "none",
        }
    }
}

/// Something that must end with 0 after a turn, in the folder of the project.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What is run.
    pub command: Command,
    /// How long it may take.
    pub timeout: Duration,
}

/// How others may use a file: the permission bits alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FileMode(u32);

impl FileMode {
    /// As a file is made that says nothing.
    pub const DEFAULT: Self = Self(0o644);

    /// The bits.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for FileMode {
    type Error = InvalidRun;

    fn try_from(bits: u32) -> Result<Self, InvalidRun> {
        if bits & !0o777 == 0 { Ok(Self(bits)) } else { invalid("files.mode", "must be 0 to 0o777") }
    }
}

/// A file that is put into the folder of the project.
#[derive(Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Where.
    pub path: ProjectPath,
    /// What is in it.
    pub content: Vec<u8>,
    /// How it may be used.
    pub mode: FileMode,
    /// Whether it is root's, and nobody's to write.
    pub read_only: bool,
}

impl std::fmt::Debug for InputFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} bytes", self.path, self.content.len())
    }
}

/// One turn of an agent: what it shall do, and what for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// What the agent shall do.
    pub prompt: Prompt,
    /// What is put there before it begins. No path twice.
    pub files: Vec<InputFile>,
    /// Whether the sandbox is kept after it.
    pub hold: bool,
}

impl Turn {
    /// Checks that the files are not too many, and none is in the way of another.
    ///
    /// # Errors
    /// They are.
    pub fn check(&self) -> Result<(), InvalidRun> {
        if self.files.len() > MAX_FILES {
            return invalid("files", format!("may be at most {MAX_FILES}"));
        }
        let paths: BTreeSet<&str> = self.files.iter().map(|file| file.path.as_str()).collect();
        if paths.len() < self.files.len() {
            return invalid("files", "has a path twice");
        }
        let above = |path: &str| path.match_indices('/').any(|(at, _)| paths.contains(&path[..at]));
        match paths.iter().find(|path| above(path)) {
            Some(path) => invalid("files", format!("has a file above another one: {path:?}")),
            None => Ok(()),
        }
    }
}

/// What is asked of a run, apart from its turns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSpec {
    /// The template of its sandbox.
    pub template: String,
    /// Which files are taken out of the project's folder at the end; none is all of them.
    pub outputs: Vec<Pattern>,
    /// What may leave the sandbox.
    pub web: Web,
    /// Whether the worker may run commands.
    pub shell: bool,
    /// Who does the work.
    pub agent: Agent,
    /// Which model the agent uses; without one it can use none.
    pub model: Option<ModelName>,
    /// How long it may take from when it runs, waiting included.
    pub timeout: Duration,
    /// The most that it may cost.
    pub most: Micros,
    /// What is kept of it.
    pub retention: Retention,
    /// For how many days.
    pub retention_days: u32,
    /// Labels, to find it by.
    pub metadata: BTreeMap<String, String>,
    /// What must be so after each turn, in this order.
    pub checks: Vec<Check>,
    /// How many turns of repair follow one whose checks fail.
    pub max_repairs: u32,
}

impl RunSpec {
    /// Checks all that the parts do not say of themselves.
    ///
    /// # Errors
    /// The first field that can't be.
    pub fn check(&self) -> Result<(), InvalidRun> {
        let (shortest, longest) = TIMES;
        let times = shortest..=longest;
        if !times.contains(&self.timeout) {
            return invalid("timeout_seconds", format!("must be 1 to {}", longest.as_secs()));
        }
        if self.outputs.len() > MAX_OUTPUTS {
            return invalid("outputs", format!("may be at most {MAX_OUTPUTS}"));
        }
        if self.checks.len() > MAX_CHECKS {
            return invalid("checks", format!("may be at most {MAX_CHECKS}"));
        }
        if self.checks.iter().any(|check| !times.contains(&check.timeout)) {
            return invalid("checks.timeout_seconds", format!("must be 1 to {}", longest.as_secs()));
        }
        if self.max_repairs > MAX_REPAIRS {
            return invalid("max_repairs", format!("may be at most {MAX_REPAIRS}"));
        }
        if !(1..=MAX_RETENTION_DAYS).contains(&self.retention_days) {
            return invalid("retention_days", format!("must be 1 to {MAX_RETENTION_DAYS}"));
        }
        let (most, bytes) = MAX_METADATA;
        let all: usize = self.metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
        if self.metadata.len() > most || all > bytes {
            return invalid("metadata", format!("may be at most {most} entries of {bytes} bytes together"));
        }
        if self.model.is_none() && !matches!(self.agent, Agent::Command(_)) {
            return invalid("model", "is needed by this agent");
        }
        if self.model.is_some() && self.most == Micros::ZERO {
            return invalid("max_cost_micros", "must be more than 0 for a run with a model");
        }
        Ok(())
    }

    /// What of it may be kept on the disk.
    #[must_use]
    pub fn kept(&self) -> Self {
        let mut kept = self.clone();
        if self.retention != Retention::Full {
            let hidden = Command(vec!["(not kept)".to_owned()]);
            if let Agent::Command(command) = &mut kept.agent {
                command.clone_from(&hidden);
            }
            for check in &mut kept.checks {
                check.command.clone_from(&hidden);
            }
            kept.metadata.clear();
        }
        kept
    }
}

#[cfg(test)]
mod tests;
