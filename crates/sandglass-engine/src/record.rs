//! What an engine remembers of a sandbox across a restart of the host, in one small file.
//!
//! It is never believed more than the kernel: a lost or damaged record costs a destroyed sandbox and nothing else.

use std::io;
use std::path::Path;

use sandglass_linux::process::ProcessIdentity;
use sandglass_types::SandboxId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::engine::Presence;
use crate::files;

/// Upper bound of a record on disk, in bytes. A real one has about 600.
const MAX_LEN: u64 = 64 * 1024;

/// What a record of any engine says about itself.
pub(crate) trait Record: Serialize + DeserializeOwned {
    /// The form that this code writes, and the only one it reads.
    const VERSION: u32;
    /// The form in which this one was written.
    fn version(&self) -> u32;
    /// Whose record it is.
    fn id(&self) -> &SandboxId;
}

/// Reads a record; `None` if there is none that can be trusted to be of `id`.
pub(crate) fn read<R: Record>(path: &Path, id: &SandboxId) -> Option<R> {
    let text = match files::read_small(path, MAX_LEN) {
        Ok(text) => text?,
        Err(error) => {
            tracing::warn!(%id, %error, "the record of a sandbox cannot be read");
            return None;
        }
    };
    let record =
        serde_json::from_slice::<R>(&text).ok().filter(|r| r.version() == R::VERSION && r.id() == id);
    if record.is_none() {
        tracing::warn!(%id, "the record of a sandbox is damaged");
    }
    record
}

/// Writes it so that a reader sees the old one or the new one, whole.
pub(crate) fn write(record: &impl Record, path: &Path) -> io::Result<()> {
    files::replace(path, &serde_json::to_vec(record)?)
}

/// A [`ProcessIdentity`] on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Identity {
    pid: i32,
    start_ticks: u64,
}

impl From<ProcessIdentity> for Identity {
    fn from(identity: ProcessIdentity) -> Self {
        Self { pid: identity.pid, start_ticks: identity.start_ticks }
    }
}

impl From<Identity> for ProcessIdentity {
    fn from(identity: Identity) -> Self {
        Self { pid: identity.pid, start_ticks: identity.start_ticks }
    }
}

/// How far a sandbox has come whose processes live, as `runsc` also calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    Created,
    Running,
    Paused,
}

impl From<Status> for Presence {
    fn from(status: Status) -> Self {
        match status {
            Status::Created => Self::Created,
            Status::Running => Self::Running,
            Status::Paused => Self::Paused,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Small {
        version: u32,
        id: SandboxId,
        process: Identity,
    }

    impl Record for Small {
        const VERSION: u32 = 1;

        fn version(&self) -> u32 {
            self.version
        }

        fn id(&self) -> &SandboxId {
            &self.id
        }
    }

    fn small(id: &SandboxId) -> Small {
        Small { version: 1, id: id.clone(), process: ProcessIdentity { pid: 7, start_ticks: 9 }.into() }
    }

    #[test]
    fn what_is_written_is_read_and_only_for_its_own_id() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let id = SandboxId::random();
        write(&small(&id), &path).unwrap();
        assert_eq!(read(&path, &id), Some(small(&id)));
        assert_eq!(read::<Small>(&path, &SandboxId::random()), None);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn garbage_is_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let id = SandboxId::random();
        assert_eq!(read::<Small>(&path, &id), None);
        let whole = serde_json::to_string(&small(&id)).unwrap();
        let newer = whole.replace("\"version\":1", "\"version\":2");
        let long = format!("{whole}{}", " ".repeat(70_000));
        for text in ["", "{", "[]", &whole[..whole.len() / 2], &newer, &long] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(read::<Small>(&path, &id), None, "{text:.40}");
        }
        std::fs::write(dir.path().join("whole"), whole).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("whole", &path).unwrap();
        assert_eq!(read::<Small>(&path, &id), None);
    }
}
