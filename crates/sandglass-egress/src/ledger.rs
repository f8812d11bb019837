//! Where the receipts of a sandbox are kept: in files of its folder.
//!
//! Lines are written in the background, in their order. While they can't be written, for a full disk, they wait in a queue
//! of bounded length; what finds no room there is counted, and the next line says how many were lost. Of long chains the
//! newest part is kept: a full file becomes the older one, in whose place it is put. The number of the first line that is
//! left says how many came before. Lines of the last moments before the machine or the server fails may be missing.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use sandglass_types::SandboxId;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;

use crate::enforcer::{Ledger, NoRoom};
use crate::receipt::Head;

/// The file with the newest receipts, one a line.
pub const FILE: &str = "egress.jsonl";

/// The file with those before them.
pub const OLDER_FILE: &str = "egress.older.jsonl";

/// Longest file, in bytes; there are two.
pub const MAX_FILE: u64 = 8 << 20;

/// Most lines that wait.
const MAX_QUEUE: usize = 256;

/// How long to wait after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// A [`Ledger`] in the folder of a sandbox.
#[derive(Debug)]
pub struct FileLedger {
    queue: mpsc::Sender<Entry>,
}

#[derive(Debug)]
enum Entry {
    Line(String),
    /// Wants to know when all before it is written.
    Flush(oneshot::Sender<()>),
}

impl FileLedger {
    /// Takes up the ledger in `folder`, and says where it ended: what [`crate::enforcer::Settings::head`] is to be. Its
    /// lines are written by a task among `tasks`, which ends when the ledger is dropped.
    ///
    /// # Errors
    /// A file is there and can't be read.
    pub async fn open(
        folder: PathBuf,
        sandbox: SandboxId,
        tasks: &TaskTracker,
    ) -> io::Result<(Self, Option<Head>)> {
        let (file, head) = spawn_blocking(move || LogFile::take_up(folder, &sandbox)).await??;
        let (queue, entries) = mpsc::channel(MAX_QUEUE);
        tasks.spawn(write(entries, file));
        Ok((Self { queue }, head))
    }

    /// Waits until all that was taken so far is in the file; that may take as long as the disk is full.
    pub async fn flush(&self) {
        let (written, waits) = oneshot::channel();
        if self.queue.send(Entry::Flush(written)).await.is_ok() {
            // It ends without an answer only with the task.
            let _ended = waits.await;
        }
    }
}

impl Ledger for FileLedger {
    fn append(&self, line: String) -> Result<(), NoRoom> {
        self.queue.try_send(Entry::Line(line)).map_err(|_full| NoRoom)
    }
}

async fn write(mut queue: mpsc::Receiver<Entry>, mut file: LogFile) {
    let mut entries = Vec::new();
    while queue.recv_many(&mut entries, MAX_QUEUE).await > 0 {
        let (mut text, mut waiting) = (String::new(), Vec::new());
        for entry in entries.drain(..) {
            match entry {
                Entry::Line(line) => text.extend([line.as_str(), "\n"]),
                Entry::Flush(written) => waiting.push(written),
            }
        }
        let mut failed = false;
        loop {
            let attempt = move || {
                let outcome = file.append(&text);
                (file, text, outcome)
            };
            let Ok((back, same, outcome)) = spawn_blocking(attempt).await else { return };
            (file, text) = (back, same);
            let Err(error) = outcome else { break };
            if queue.is_closed() {
                let lines = text.lines().count();
                tracing::error!(%error, folder = %file.folder.display(), lines, "receipts are lost");
                return;
            }
            if !failed {
                tracing::error!(%error, folder = %file.folder.display(), "receipts can't be written, and wait");
            }
            failed = true;
            sleep(RETRY).await;
        }
        if failed {
            tracing::info!(folder = %file.folder.display(), "receipts are written again");
        }
        for written in waiting {
            // Who waited may have gone.
            let _gone = written.send(());
        }
    }
}

/// The file that is written to.
#[derive(Debug)]
struct LogFile {
    folder: PathBuf,
    /// `None` before it is needed, and after a failure.
    file: Option<fs::File>,
    /// How much of it is whole lines.
    len: u64,
}

impl LogFile {
    fn take_up(folder: PathBuf, sandbox: &SandboxId) -> io::Result<(Self, Option<Head>)> {
        let newest = whole_lines(&folder.join(FILE))?;
        let last = match last_line(&newest) {
            Some(line) => Some(line.to_owned()),
            None => last_line(&whole_lines(&folder.join(OLDER_FILE))?).map(ToOwned::to_owned),
        };
        let head = last.and_then(|line| match Head::after(sandbox, &line) {
            Ok(head) => Some(head),
            Err(error) => {
                tracing::error!(%error, folder = %folder.display(), "the chain of receipts begins anew");
                None
            }
        });
        let len = newest.len() as u64;
        Ok((Self { folder, file: None, len }, head))
    }

    /// Writes lines so that they are all there, or none.
    fn append(&mut self, lines: &str) -> io::Result<()> {
        if self.len > 0 && self.len.saturating_add(lines.len() as u64) > MAX_FILE {
            fs::rename(self.folder.join(FILE), self.folder.join(OLDER_FILE))?;
            (self.file, self.len) = (None, 0);
        }
        let mut file = match self.file.take() {
            Some(file) => file,
            None => self.open()?,
        };
        file.write_all(lines.as_bytes())?;
        self.file = Some(file);
        self.len += lines.len() as u64;
        Ok(())
    }

    /// Opens the file, and cuts off what a failure left behind its last whole line.
    fn open(&mut self) -> io::Result<fs::File> {
        let path = self.folder.join(FILE);
        let file = fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        let found = file.metadata()?.len();
        if found > self.len {
            file.set_len(self.len)?;
        }
        self.len = self.len.min(found);
        Ok(file)
    }
}

/// The whole lines of a file; none if there is no file.
fn whole_lines(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        file => _ = file?.take(MAX_FILE + 1).read_to_end(&mut bytes)?,
    }
    if bytes.len() as u64 > MAX_FILE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "longer than any file of receipts"));
    }
    let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    bytes.truncate(end);
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn last_line(text: &str) -> Option<&str> {
    text.lines().next_back()
}

/// The newest receipts in a folder, at most `count`, the oldest of them first. It blocks while it reads up to two files.
///
/// # Errors
/// A file is there and can't be read.
pub fn newest(folder: &Path, count: usize) -> io::Result<Vec<String>> {
    let older = folder.join(OLDER_FILE);
    let which = || fs::metadata(&older).map(|file| file.ino()).ok();
    loop {
        let before = which();
        let text = whole_lines(&older)? + &whole_lines(&folder.join(FILE))?;
        // Else a file took the other's place meanwhile, which it does not do often.
        if which() == before {
            let lines: Vec<_> = text.lines().rev().take(count).map(ToOwned::to_owned).collect();
            return Ok(lines.into_iter().rev().collect());
        }
    }
}

#[cfg(test)]
mod tests;
