//! Runs a recipe's build script.

use std::collections::VecDeque;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Context as _, TemplateError};

/// Lines of the output that an error shows.
const TAIL_LINES: usize = 25;

/// Longest line that is kept, in bytes; the rest is shown as a line of its own.
const MAX_LINE: u64 = 4096;

/// Runs `build.sh TAR` of the recipe in `recipe_dir`, with `tmp` for its scratch files. The script dies with
/// the thread that calls this, and must see to it that all its processes and mounts go with it.
pub(super) fn run(
    name: &str,
    recipe_dir: &Path,
    tar: &Path,
    tmp: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<(), TemplateError> {
    let step = "starting the build";
    let (output, script_end) = io::pipe().step(step)?;
    let stderr = script_end.try_clone().step(step)?;
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "/bin/sh"])
        .arg(recipe_dir.join("build.sh"))
        .arg(tar)
        .env("TMPDIR", tmp)
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .stdout(script_end)
        .stderr(stderr);
    let mut child = command.spawn().step(step)?;
    // The command holds our copies of the writing end: without this the read below would never end.
    drop(command);
    let tail = follow(output, progress);
    let status = child.wait().step("waiting for the build")?;
    if status.success() && tar.is_file() {
        return Ok(());
    }
    let tail = Vec::from(tail?).join("\n");
    Err(TemplateError::Build { name: name.to_owned(), failure: BuildFailure::in_output(&tail), tail })
}

/// Reads the output to its end, reports the steps in it, and returns its last lines.
fn follow(output: impl io::Read, progress: &mut dyn FnMut(&str)) -> Result<VecDeque<String>, TemplateError> {
    let mut output = BufReader::new(output);
    let mut tail = VecDeque::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut output).take(MAX_LINE).read_until(b'\n', &mut line);
        if read.step("reading the output of the build")? == 0 {
            return Ok(tail);
        }
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if let Some(step) = step_of(&text) {
            progress(step);
        }
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(text);
    }
}

/// The step that a line of mmdebstrap's announces: `I: extracting archives...`.
pub(super) fn step_of(line: &str) -> Option<&str> {
    let step = line.strip_prefix("I: ")?.strip_suffix("...")?;
    (!step.contains('/')).then_some(step)
}

/// Why a build failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildFailure {
    /// The cache folder's file system is full.
    Full,
    /// The package mirror did not give what was asked for.
    Mirror,
    /// A program that builds is not installed.
    NoTools,
    /// The machine has no Debian package sources to build from.
    NotDebian,
    /// Something else; the output says what.
    Other,
}

impl BuildFailure {
    /// Reads it from the end of the build's output.
    fn in_output(tail: &str) -> Self {
        let has = |words: &[&str]| words.iter().any(|word| tail.contains(word));
        if has(&["No space left on device"]) {
            Self::Full
        } else if has(&["mmdebstrap: not found", "setpriv: failed to execute"]) {
            Self::NoTools
        } else if has(&["is not a Debian release", "knows no package index"]) {
            Self::NotDebian
        } else if has(&["Could not resolve", "Failed to fetch", "Unable to connect", "Could not connect"]) {
            Self::Mirror
        } else {
            Self::Other
        }
    }

    /// What a person can do about it.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Full => "free some space in the cache folder",
            Self::NoTools => "run scripts/setup.sh, which installs mmdebstrap",
            Self::NotDebian => "building needs a Debian machine with a package mirror in apt's configuration",
            Self::Mirror => "the package mirror could not be reached; check that `apt-get update` works",
            Self::Other => "fix what the last lines of the build say and start again",
        }
    }
}
