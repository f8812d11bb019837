//! The folder of one sandbox, and what is written in it.

use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use sandglass_linux::mount;
use sandglass_types::SandboxId;
use serde::{Deserialize, Serialize};

use super::model::Agent;
use crate::engine::{EngineError, SandboxSpec, step};
use crate::files::{private_folder, remove_folder};
use crate::record::{self, Identity, Status};
use crate::session::Session;

/// How many files of a sandbox are measured at most; what is beyond counts as nothing.
const MAX_MEASURED: usize = 100_000;

/// One sandbox, as written to its `state.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    version: u32,
    pub(super) spec: SandboxSpec,
    /// The boot in which all else means something.
    pub(super) boot_id: String,
    /// Absent until it is started.
    agent: Option<Identity>,
    pub(super) progress: Status,
    /// The image that it is made for, until that is brought back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) prepared: Option<SandboxId>,
}

impl record::Record for Record {
    const VERSION: u32 = 1;

    fn version(&self) -> u32 {
        self.version
    }

    fn id(&self) -> &SandboxId {
        &self.spec.id
    }
}

impl Record {
    pub(super) fn new(spec: SandboxSpec, boot_id: String) -> Self {
        let version = <Self as record::Record>::VERSION;
        // It moves, and is kept in a file of its own.
        let spec = SandboxSpec { deadline: None, ..spec };
        Self { version, spec, boot_id, agent: None, progress: Status::Created, prepared: None }
    }

    pub(super) fn started(&mut self, agent: Agent) {
        self.agent = Some(agent.into());
        self.progress = Status::Running;
    }

    pub(super) fn agent(&self) -> Option<Agent> {
        self.agent.map(Into::into)
    }
}

/// The folder of one sandbox.
#[derive(Debug)]
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn record(&self) -> PathBuf {
        self.0.join("state.json")
    }

    pub(super) fn home(&self) -> PathBuf {
        self.0.join("home")
    }

    pub(super) fn session(&self) -> Session<'_> {
        Session { folder: &self.0 }
    }

    /// Makes it and all that is in it but the record.
    pub(super) fn make(&self) -> io::Result<()> {
        private_folder(&self.0)?;
        private_folder(&self.home())?;
        self.session().make()
    }

    /// Removes it with all that is in it; `Ok` if it is not there. No process of the sandbox may be left.
    pub(super) fn remove(&self) -> Result<(), EngineError> {
        let failed = |error: io::Error| step("remove the sandbox's folder", error);
        // With root, what runs in a sandbox can mount a folder of the machine here, and that is not to be emptied.
        if let Some(mounted) = mount::below(&self.0).map_err(failed)?.first() {
            let said = format!("something is mounted at {}", mounted.target.display());
            return Err(failed(io::Error::other(said)));
        }
        match remove_folder(&self.0) {
            Err(_) if self.0.exists() => {
                // Only root enters folders against their mode.
                open_up(&self.0).map_err(failed)?;
                remove_folder(&self.0)
            }
            removed => removed,
        }
    }

    /// What the files in `home` take, without what links lead to.
    pub(super) fn disk_bytes(&self) -> u64 {
        let (mut bytes, mut measured) = (0, 0);
        let mut folders = vec![self.home()];
        while let Some(folder) = folders.pop() {
            // The sandbox changes while it is measured.
            let Ok(entries) = fs_err::read_dir(folder) else { continue };
            for entry in entries {
                let Ok(entry) = entry else { break };
                let Ok(meta) = entry.metadata() else { continue };
                measured += 1;
                if measured > MAX_MEASURED {
                    return bytes;
                }
                // `st_blocks` counts units of 512 bytes whatever the block size is.
                bytes += meta.blocks() * 512;
                if meta.is_dir() {
                    folders.push(entry.path());
                }
            }
        }
        bytes
    }
}

/// Lets this user into a folder and all folders in it.
fn open_up(folder: &Path) -> io::Result<()> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        fs_err::set_permissions(&folder, std::fs::Permissions::from_mode(0o700))?;
        for entry in fs_err::read_dir(folder)? {
            let entry = entry?;
            // Of the entry itself, not of what it may link to.
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_measured_and_removed_whatever_its_modes_are() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder(dir.path().join("sandbox"));
        folder.make().unwrap();
        let before = folder.disk_bytes();
        let deep = folder.home().join("a/b/c");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("file"), vec![1; 100_000]).unwrap();
        let elsewhere = dir.path().join("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        std::fs::write(elsewhere.join("file"), vec![1; 9_000_000]).unwrap();
        std::os::unix::fs::symlink(&elsewhere, deep.join("link")).unwrap();
        let used = folder.disk_bytes() - before;
        assert!((100_000..1_000_000).contains(&used), "{used}");
        for locked in ["a/b", "a"] {
            let none = std::fs::Permissions::from_mode(0o000);
            std::fs::set_permissions(folder.home().join(locked), none).unwrap();
        }
        open_up(&folder.0).unwrap();
        assert_eq!(std::fs::metadata(&deep).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(std::fs::metadata(&elsewhere).unwrap().permissions().mode() & 0o777, 0o755);
        folder.remove().unwrap();
        folder.remove().unwrap();
        assert!(!folder.0.exists() && elsewhere.join("file").exists());
    }
}
