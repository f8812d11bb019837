//! Talking to a sandbox itself, over the control socket that `runsc` gives it: a millisecond, where the same by a
//! process of `runsc` takes dozens.
//!
//! The protocol is internal to `runsc`, so it is spoken only to versions that it was tested with; others are driven by
//! the command line. A sandbox that was started here never changes its state file, so the command line refuses most
//! verbs on it, and how far it has come is kept in its [record](super::record).

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use sandglass_types::SandboxId;
use serde_json::{Value, json};

use self::call::{CallError, call};
use super::VERB_TIMEOUT;
use super::image::CHECKPOINT_TIMEOUT;
use crate::engine::{EngineError, step};

mod call;
mod links;

/// The versions of `runsc` whose control socket was tested.
const TESTED: [&str; 1] = ["0.0~20240729.0"];

/// Questions are answered at once or not at all.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(5);

/// What a checkpoint consists of, in the order in which the files are passed. `runsc restore` looks for these names.
const CHECKPOINT_FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", "pages.img"];

/// Whether this version's control socket is known.
#[must_use]
pub fn knows(version: &str) -> bool {
    TESTED.contains(&version)
}

/// The control socket of one sandbox.
#[derive(Debug)]
pub(super) struct Control {
    socket: PathBuf,
    id: SandboxId,
}

impl Control {
    pub(super) const fn new(socket: PathBuf, id: SandboxId) -> Self {
        Self { socket, id }
    }

    /// Gives the guest its interfaces, `eth0` on `link` if there is a network, and starts its first process.
    ///
    /// A sandbox where this failed half way can't be started any more.
    pub(super) fn start(&self, link: Option<&OwnedFd>) -> Result<(), EngineError> {
        sandglass_failpoint::hit("engine.start.network")?;
        self.join_network(link)?;
        sandglass_failpoint::hit("engine.start.root")?;
        self.verb("containerManager.StartRoot", &json!(self.id), "start")
    }

    /// Gives the guest its interfaces, and brings back memory and processes from a folder that [`Control::checkpoint`]
    /// wrote. They run when this returns; until then, nothing else may be asked of the sandbox.
    ///
    /// A sandbox where this failed half way is good for nothing any more.
    pub(super) fn restore(&self, link: Option<&OwnedFd>, folder: &Path) -> Result<(), EngineError> {
        let open = |name: &str| -> io::Result<OwnedFd> {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Ok(rustix::fs::open(folder.join(name), flags, Mode::empty())?)
        };
        let files = CHECKPOINT_FILES.map(open).into_iter().collect::<io::Result<Vec<_>>>();
        let files = files.map_err(|error| step("read the image", error))?;
        let files: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
        sandglass_failpoint::hit("engine.restore.network")?;
        self.join_network(link)?;
        let argument = json!({"HavePagesFile": true, "HaveDeviceFile": false});
        sandglass_failpoint::hit("engine.restore.memory")?;
        call(&self.socket, "containerManager.Restore", &argument, &files, CHECKPOINT_TIMEOUT)
            .map(drop)
            .map_err(|error| step("restore", error))
    }

    fn join_network(&self, link: Option<&OwnedFd>) -> Result<(), EngineError> {
        let files: Vec<_> = link.into_iter().map(OwnedFd::as_fd).collect();
        let links = links::arguments(link.is_some());
        call(&self.socket, "Network.CreateLinksAndRoutes", &links, &files, VERB_TIMEOUT)
            .map(drop)
            .map_err(|error| step("start the guest's network", error))
    }

    /// Whether the first process was started. A sandbox that does not say has not.
    pub(super) fn started(&self) -> bool {
        let id = json!(self.id);
        match call(&self.socket, "containerManager.Processes", &id, &[], QUESTION_TIMEOUT) {
            Ok(Value::Array(processes)) => !processes.is_empty(),
            Ok(_) => false,
            Err(error) => {
                tracing::debug!(id = %self.id, error = %sandglass_types::error::Chain(&error), "no answer");
                false
            }
        }
    }

    pub(super) fn pause(&self) -> Result<(), EngineError> {
        self.verb("containerManager.Pause", &Value::Null, "pause")
    }

    /// The guest's kernel ends when it is told to run on more often than to pause: only for one that *is* paused.
    pub(super) fn resume(&self) -> Result<(), EngineError> {
        self.verb("containerManager.Resume", &Value::Null, "resume")
    }

    /// Writes memory and processes into a folder. With `Resume`, a checkpoint that fails does not end the sandbox; and
    /// since pauses nest, one that is paused stays paused.
    pub(super) fn checkpoint(&self, folder: &Path) -> Result<(), EngineError> {
        let create = |name: &str| -> io::Result<OwnedFd> {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Ok(rustix::fs::open(folder.join(name), flags, Mode::RUSR | Mode::WUSR)?)
        };
        let files = CHECKPOINT_FILES.map(create).into_iter().collect::<io::Result<Vec<_>>>();
        let files = files.map_err(|error| step("write the image", error))?;
        let files: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
        let argument = json!({
            "key": null,
            "metadata": {"compression": "none"},
            "MemoryFileSaveOpts": {"ExcludeCommittedZeroPages": false},
            "have_pages_file": true,
            "Resume": true,
        });
        call(&self.socket, "containerManager.Checkpoint", &argument, &files, CHECKPOINT_TIMEOUT)
            .map(drop)
            .map_err(|error| step("checkpoint", error))
    }

    fn verb(&self, method: &str, argument: &Value, verb: &'static str) -> Result<(), EngineError> {
        let called: Result<Value, CallError> = call(&self.socket, method, argument, &[], VERB_TIMEOUT);
        called.map(drop).map_err(|error| step(verb, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_that_were_tested_are_spoken_to() {
        assert!(knows("0.0~20240729.0"));
        for version in ["", "0.0~20240729", "0.0~20240729.1", "release-20260601.0"] {
            assert!(!knows(version), "{version}");
        }
    }
}
