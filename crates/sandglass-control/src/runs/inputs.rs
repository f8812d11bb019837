//! Files are put into the folder of a run, as whom its template says.

use sandglass_store::SandboxRow;
use sandglass_types::run::{FileMode, InputFile, PROJECT};
use sandglass_types::{Error, ErrorKind};

use super::agent::WORKER_FOLDER;
use super::task::STEP;
use crate::command::{Program, put_file, run};
use crate::live::Live;

/// Makes folders, which belong to who works in them.
const PREPARE: &str =
    r#"mkdir -p /workspace && user=$1 && shift && install -d -o "$user" -g "$(id -gn "$user")" "$@""#;

/// Gives files their modes: pairs of both.
const MODES: &str = r#"while [ $# -gt 0 ]; do chmod "$1" "$2" || exit 1; shift 2; done"#;

async fn as_root(live: &Live, row: &SandboxRow, script: &str, arguments: &[&str]) -> Result<(), Error> {
    let words: Vec<&str> =
        ["/bin/sh", "-c", script, "sh"].into_iter().chain(arguments.iter().copied()).collect();
    let ended =
        run(live, row, &Program { user: "root", words: &words, limit: STEP, ..Program::default() }).await?;
    if ended.code == Some(0) {
        return Ok(());
    }
    let message =
        format!("the files of the run could not be put into its sandbox: {}: {}", ended.status, ended.tail);
    Err(Error::new(ErrorKind::Conflict, message))
}

/// Makes the folder of the project, and the one beside it in which a worker keeps what the next turn needs.
pub(super) async fn prepare(live: &Live, row: &SandboxRow, user: &str) -> Result<(), Error> {
    as_root(live, row, PREPARE, &[user, PROJECT, WORKER_FOLDER]).await
}

/// Writes the files of a turn. One that is read-only is root's; a file that was there is replaced.
pub(super) async fn put(
    live: &Live,
    row: &SandboxRow,
    user: &str,
    files: Vec<InputFile>,
) -> Result<(), Error> {
    let mut modes = Vec::new();
    for InputFile { path, content, mode, read_only } in files {
        let path = format!("{PROJECT}/{path}");
        put_file(live, row, if read_only { "root" } else { user }, &path, content).await?;
        let bits = if read_only { mode.bits() & 0o555 } else { mode.bits() };
        if bits != FileMode::DEFAULT.bits() {
            modes.extend([format!("{bits:o}"), path]);
        }
    }
    if modes.is_empty() {
        return Ok(());
    }
    as_root(live, row, MODES, &modes.iter().map(String::as_str).collect::<Vec<_>>()).await
}
