//! What the store says, told by a process without privilege.
//!
//! The file belongs to the half of the server that reads hostile bytes, and opening a database makes and changes files
//! beside it. Root must do neither there: so a child that has given up all privilege reads the store and prints a few
//! plain lines, which root reads.

use std::io::{Read as _, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use sandglass_store::{SqliteStore, Store as _};
use sandglass_types::{SandboxId, SandboxState};
use serde::{Deserialize, Serialize};

/// Upper bound for what the child may print, in bytes: some 100,000 sandboxes.
const MAX_ANSWER: u64 = 8 * 1024 * 1024;

/// A sandbox that may own something on this machine, or what has an image alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Owner {
    /// Which one; of a snapshot, and of the image of a fork, the name of the image.
    pub(crate) id: SandboxId,
    /// Where it is in its life; what has an image alone is as good as paused.
    pub(crate) state: SandboxState,
}

/// Runs `child`, whose standard output is what [`print`] writes.
///
/// # Errors
/// It can't be run, failed, or printed something else.
pub(crate) fn ask(mut child: Command) -> anyhow::Result<Vec<Owner>> {
    let mut child = child
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .context("the process that reads the store could not be started")?;
    let mut answer = Vec::new();
    let read = child.stdout.take().map(|out| out.take(MAX_ANSWER + 1).read_to_end(&mut answer)).transpose();
    let too_long = u64::try_from(answer.len()).is_ok_and(|len| len > MAX_ANSWER);
    if too_long || read.is_err() {
        // It may be blocked on the pipe that nobody reads any more.
        let _ = child.kill();
    }
    let status = child.wait()?;
    read.context("the answer of the process that reads the store could not be read")?;
    if too_long {
        bail!("the process that reads the store says too much");
    }
    if !status.success() {
        bail!("the process that reads the store failed ({status})");
    }
    serde_json::from_slice(&answer).context("the process that reads the store says something else")
}

/// Writes what the store at `path` says, for [`ask`]. Without a store there are no owners.
///
/// # Errors
/// The store can't be read, or `out` is broken.
pub(crate) fn print(path: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let owners = read(path)?;
    serde_json::to_writer(&mut *out, &owners)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Reads what the store at `path` says.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Owner>> {
    if !path.try_exists()? {
        return Ok(Vec::new());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = SqliteStore::open_read_only(path).await?;
        let node = store.node().await?;
        let states = SandboxState::NOT_ENDED;
        let rows = store.on_node(node, &states).await?;
        let images = store.snapshots_on_node(node).await?;
        store.close().await;
        let sandboxes = rows.into_iter().map(|row| Owner { id: row.id, state: row.state });
        let images = images.iter().map(|row| Owner { id: row.id.image(), state: SandboxState::Paused });
        Ok(sandboxes.chain(images).collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(text: &str) -> anyhow::Result<Vec<Owner>> {
        let mut child = Command::new("printf");
        child.args(["%s", text]);
        ask(child)
    }

    #[test]
    fn only_a_complete_answer_counts() {
        let id = SandboxId::random();
        let told = say(&format!(r#"[{{"id":"{id}","state":"running"}}]"#)).unwrap();
        assert_eq!(told, [Owner { id, state: SandboxState::Running }]);
        for text in ["", "[", r#"[{"id":"../..","state":"running"}]"#, r#"[{"id":1}]"#] {
            assert!(say(text).is_err(), "{text}");
        }
        let mut child = Command::new("sh");
        child.args(["-c", "echo '[]'; exit 3"]);
        assert!(ask(child).is_err());
        assert!(ask(Command::new("/nonexistent")).is_err());
        let mut child = Command::new("yes");
        child.arg("[]");
        assert!(ask(child).is_err(), "an endless answer");
    }

    #[test]
    fn no_store_means_no_owners() {
        let folder = tempfile::tempdir().unwrap();
        let mut out = Vec::new();
        print(&folder.path().join("store.db"), &mut out).unwrap();
        assert_eq!(out, b"[]\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "reading makes no file");
    }
}
