//! What is remembered of a sandbox across a restart of the host.
//!
//! It only speeds things up and pins versions: whether the sandbox runs is asked of the kernel, and everything it
//! owns is found by its id. So a lost or damaged record costs nothing but a destroyed sandbox.

use sandglass_linux::process::ProcessIdentity;
use sandglass_types::{Digest, Limits, SandboxId};
use serde::{Deserialize, Serialize};

use crate::record::{self, Identity, Status};

/// One sandbox, as written to its `state.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    version: u32,
    pub(super) id: SandboxId,
    pub(super) pinned: Pinned,
    pub(super) limits: Limits,
    /// The boot in which `sandbox` means something.
    pub(super) boot_id: String,
    /// The sandbox process; absent until `runsc` has made it, and for ever if the host died before.
    pub(super) sandbox: Option<Identity>,
    /// How far it has come, if it is driven over its control socket; of another, `runsc` keeps that itself.
    ///
    /// It is written so that a host may die at any moment: a guest that is said to be paused is, and only what is said
    /// to be created need be asked whether it runs by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) progress: Option<Status>,
    /// How far an image has come that is brought back in it over its control socket, until that is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) restore: Option<Restore>,
}

/// An image on its way into a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Restore {
    /// The sandbox was made for this one, which waits.
    Waits(SandboxId),
    /// It is at it, or was when a host died. The guest's kernel has no clock meanwhile, and ends of any question in which
    /// there is a time: so it is asked none.
    Begun,
}

/// What a checkpoint needs to be restored with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pinned {
    pub(super) rootfs: Digest,
    /// The layer with the agent.
    pub(super) agent: Digest,
    pub(super) runsc: String,
}

impl record::Record for Record {
    const VERSION: u32 = 1;

    fn version(&self) -> u32 {
        self.version
    }

    fn id(&self) -> &SandboxId {
        &self.id
    }
}

impl Record {
    pub(super) fn new(id: SandboxId, pinned: Pinned, limits: Limits, boot_id: String) -> Self {
        Self {
            version: <Self as record::Record>::VERSION,
            id,
            pinned,
            limits,
            boot_id,
            sandbox: None,
            progress: None,
            restore: None,
        }
    }

    /// The sandbox process, if the record is of this boot.
    pub(super) fn process(&self, boot_id: &str) -> Option<ProcessIdentity> {
        self.sandbox.filter(|_| self.boot_id == boot_id).map(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_was_written_and_its_process_is_of_one_boot() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let id = SandboxId::random();
        let digest = Digest::from_bytes([7; 32]);
        let pinned = Pinned { rootfs: digest, agent: digest, runsc: "1".into() };
        let mut written = Record::new(id.clone(), pinned, Limits::default(), "boot".into());
        let process = ProcessIdentity { pid: 7, start_ticks: 9 };
        written.sandbox = Some(process.into());
        let waits = Restore::Waits(SandboxId::random());
        for (progress, restore) in [
            (None, None),
            (Some(Status::Created), Some(waits)),
            (Some(Status::Created), Some(Restore::Begun)),
        ] {
            (written.progress, written.restore) = (progress, restore);
            record::write(&written, &path).unwrap();
            assert_eq!(record::read::<Record>(&path, &id).as_ref(), Some(&written));
        }
        assert_eq!(written.process("boot"), Some(process));
        assert_eq!(written.process("another boot"), None);
    }
}
