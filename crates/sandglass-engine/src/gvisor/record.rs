//! What is remembered of a sandbox across a restart of the host.
//!
//! It only speeds things up and pins versions: whether the sandbox runs is asked of the kernel, and everything it
//! owns is found by its id. So a lost or damaged record costs nothing but a destroyed sandbox.

use std::io::{self, Read as _, Write as _};
use std::path::Path;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use sandglass_linux::process::ProcessIdentity;
use sandglass_types::{Digest, Limits, SandboxId};
use serde::{Deserialize, Serialize};

use super::runsc::Status;

/// Upper bound of a record on disk, in bytes. A real one has about 600.
const MAX_LEN: u64 = 64 * 1024;

/// The form that this code writes, and the only one it reads.
const VERSION: u32 = 1;

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

/// A [`ProcessIdentity`] on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Identity {
    pid: i32,
    start_ticks: u64,
}

impl From<ProcessIdentity> for Identity {
    fn from(identity: ProcessIdentity) -> Self {
        Self { pid: identity.pid, start_ticks: identity.start_ticks }
    }
}

impl Record {
    pub(super) fn new(id: SandboxId, pinned: Pinned, limits: Limits, boot_id: String) -> Self {
        Self { version: VERSION, id, pinned, limits, boot_id, sandbox: None, progress: None }
    }

    /// The sandbox process, if the record is of this boot.
    pub(super) fn process(&self, boot_id: &str) -> Option<ProcessIdentity> {
        let Identity { pid, start_ticks } = self.sandbox.filter(|_| self.boot_id == boot_id)?;
        Some(ProcessIdentity { pid, start_ticks })
    }

    /// Reads a record; `None` if there is none that can be trusted to be of `id`.
    pub(super) fn read(path: &Path, id: &SandboxId) -> Option<Self> {
        let mut text = Vec::new();
        let opened = fs_err::OpenOptions::new().read(true).custom_flags(nofollow()).open(path);
        let read = opened.and_then(|file| file.take(MAX_LEN + 1).read_to_end(&mut text));
        match read {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(%id, %error, "the record of a sandbox cannot be read");
                return None;
            }
        }
        let record = serde_json::from_slice::<Self>(&text)
            .ok()
            .filter(|record| record.version == VERSION && record.id == *id);
        if record.is_none() {
            tracing::warn!(%id, "the record of a sandbox is damaged");
        }
        record
    }

    /// Writes it so that a reader sees the old one or the new one, whole.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        let next = path.with_extension("json.next");
        let mut file = fs_err::File::create(&next)?;
        file.write_all(&text)?;
        drop(file);
        fs_err::rename(next, path)
    }
}

fn nofollow() -> i32 {
    i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &SandboxId) -> Record {
        let digest = Digest::from_bytes([7; 32]);
        let pinned = Pinned { rootfs: digest, agent: digest, runsc: "1".into() };
        Record::new(id.clone(), pinned, Limits::default(), "boot".into())
    }

    #[test]
    fn what_is_written_is_read_and_only_for_its_own_id_and_boot() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let id = SandboxId::random();
        let mut written = record(&id);
        let process = ProcessIdentity { pid: 7, start_ticks: 9 };
        written.sandbox = Some(process.into());
        written.write(&path).unwrap();
        let read = Record::read(&path, &id).unwrap();
        assert_eq!(read, written);
        written.progress = Some(Status::Paused);
        written.write(&path).unwrap();
        assert_eq!(Record::read(&path, &id), Some(written));
        assert_eq!(read.process("boot"), Some(process));
        assert_eq!(read.process("another boot"), None);
        assert_eq!(Record::read(&path, &SandboxId::random()), None);
    }

    #[test]
    fn garbage_is_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let id = SandboxId::random();
        assert_eq!(Record::read(&path, &id), None);
        let whole = serde_json::to_string(&record(&id)).unwrap();
        let newer = whole.replace("\"version\":1", "\"version\":2");
        for text in ["", "{", "[]", &whole[..whole.len() / 2], &newer, &" ".repeat(70_000)] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(Record::read(&path, &id), None, "{text:.40}");
        }
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        assert_eq!(Record::read(&path, &id), None);
    }
}
