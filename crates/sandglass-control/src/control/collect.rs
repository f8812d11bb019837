//! The files of a sandbox, read from outside: also of one whose agent does not answer, or whose processes are gone.
//!
//! Each question goes to a process of its own, which the host starts: see [`sandglass_engine::collect`]. What comes back was
//! written by a process that reads what a guest wrote, so it is bounded and looked at here once more: whatever became of that
//! process, nothing leaves that was not asked for.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandglass_engine::collect::{
    Ask, Bounds, Globs, LeftOut, MAX_ASK, MAX_PIECE, MAX_SAID, Place, Said, Why, is_inside,
};
use sandglass_types::{Digest, Error, ErrorKind, SandboxId, TeamId};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::Control;
use crate::shared::Shared;

/// Collections at one time, and those for one team among them. The host does some more.
const MAX_FOR_CLIENTS: usize = 10;
const MAX_FOR_TEAM: usize = 4;

/// How long a client's collection waits for others.
const QUEUE_PATIENCE: Duration = Duration::from_secs(10);

/// How long the next part of an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is to be collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectFiles {
    /// The folder.
    pub place: Place,
    /// Which files in it, and below it.
    pub globs: Globs,
    /// How much.
    pub bounds: Bounds,
}

/// Whose files are collected now.
#[derive(Debug)]
pub(crate) struct Collecting {
    clients: Arc<Semaphore>,
    teams: Arc<Mutex<HashMap<TeamId, usize>>>,
}

impl Default for Collecting {
    fn default() -> Self {
        Self { clients: Arc::new(Semaphore::new(MAX_FOR_CLIENTS)), teams: Arc::default() }
    }
}

/// One of a team's, until it is dropped. Those who wait count as well.
#[derive(Debug)]
struct OfTeam {
    team: TeamId,
    teams: Arc<Mutex<HashMap<TeamId, usize>>>,
}

fn lock(teams: &Mutex<HashMap<TeamId, usize>>) -> MutexGuard<'_, HashMap<TeamId, usize>> {
    teams.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for OfTeam {
    fn drop(&mut self) {
        if let Entry::Occupied(mut of) = lock(&self.teams).entry(self.team) {
            *of.get_mut() -= 1;
            if *of.get() == 0 {
                of.remove();
            }
        }
    }
}

/// A right to collect.
#[derive(Debug)]
struct Turn {
    _permit: OwnedSemaphorePermit,
    _of_team: OfTeam,
}

fn busy() -> Error {
    Error::new(ErrorKind::Capacity, "the files of too many sandboxes are being read: try again soon")
}

impl Collecting {
    async fn for_client(&self, team: TeamId) -> Result<Turn, Error> {
        let of_team = {
            let mut teams = lock(&self.teams);
            let count = teams.entry(team).or_default();
            if *count >= MAX_FOR_TEAM {
                return Err(busy());
            }
            *count += 1;
            OfTeam { team, teams: Arc::clone(&self.teams) }
        };
        let permit = timeout(QUEUE_PATIENCE, Arc::clone(&self.clients).acquire_owned()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or_else(busy)?;
        Ok(Turn { _permit: permit, _of_team: of_team })
    }
}

/// A part of what is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A file. Its pieces follow, and then its end.
    File(FoundFile),
    /// Some of its bytes, at least one.
    Piece(Vec<u8>),
    /// These were all.
    End {
        /// Of the bytes that were told.
        sha256: Digest,
        /// Whether they are the file: it stayed as it was from its first byte to its last.
        whole: bool,
    },
    /// These were all files, and this was left out. Of what has no such end, a part was told.
    Done(LeftOut),
}

/// A file. No two of one collection have one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFile {
    /// From the folder on: plain parts, joined by `/`.
    pub path: String,
    /// Its permissions, at most `0o777`.
    pub mode: u32,
    /// Its size, in bytes. If it is not whole, there may be fewer.
    pub size: u64,
    /// When it was last changed, in seconds since 1970.
    pub mtime: u64,
}

/// Where a [`Collection`] is.
#[derive(Debug)]
enum At {
    /// Before a file, or the end.
    Between,
    /// In a file of which so many bytes may follow.
    File { left: u64, hash: Sha256, told: bool },
    /// After the end, or a failure.
    Over,
}

/// The files of a sandbox, one after the other.
#[derive(Debug)]
pub struct Collection {
    line: BufReader<UnixStream>,
    globs: Globs,
    /// What may still come.
    room: Bounds,
    until: Instant,
    /// Paths that were told.
    told: BTreeSet<String>,
    at: At,
    /// What was said and is not looked at yet.
    said: Option<Said>,
    /// Files that were told twice, and of those the second.
    twice: u64,
    _turn: Option<Turn>,
}

fn failed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::internal("the files of the sandbox can't be read; the server's log says why", source)
}

impl Collection {
    /// Asks a process that answers on this line.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Invalid`]: there is no such folder, or it lies behind a link.
    pub async fn ask(line: OwnedFd, wanted: &CollectFiles) -> Result<Self, Error> {
        let line = StdStream::from(line);
        line.set_nonblocking(true).map_err(failed)?;
        let mut line = UnixStream::from_std(line).map_err(failed)?;
        let bounds = wanted.bounds.narrowed();
        let folder = wanted.place.below().to_owned();
        let ask = Ask { folder, globs: wanted.globs.clone(), bounds };
        let text = serde_json::to_vec(&ask).map_err(failed)?;
        let len = u32::try_from(text.len()).ok().filter(|len| *len <= MAX_ASK);
        let len = len.ok_or_else(|| Error::new(ErrorKind::Invalid, "the patterns are too long"))?;
        let sent = async {
            line.write_all(&len.to_le_bytes()).await?;
            line.write_all(&text).await
        };
        timeout(PATIENCE, sent).await.map_err(failed)?.map_err(failed)?;
        let mut collection = Self {
            line: BufReader::with_capacity(usize::try_from(MAX_PIECE).unwrap_or(usize::MAX), line),
            globs: ask.globs,
            room: bounds,
            until: Instant::now() + Duration::from_secs(bounds.seconds.into()) + PATIENCE,
            told: BTreeSet::new(),
            at: At::Between,
            said: None,
            twice: 0,
            _turn: None,
        };
        match collection.hear().await? {
            Said::Refused { why: Why::NotFound, message } => Err(Error::new(ErrorKind::NotFound, message)),
            Said::Refused { why: Why::Invalid, message } => Err(Error::new(ErrorKind::Invalid, message)),
            Said::Refused { why: Why::Failed, message } => Err(failed(message)),
            said => {
                collection.said = Some(said);
                Ok(collection)
            }
        }
    }

    /// What comes next. After a failure, and after [`Found::Done`], nothing does.
    ///
    /// # Errors
    /// The answer broke off, came too late, or is not one to this question.
    pub async fn next(&mut self) -> Result<Found, Error> {
        // Whatever fails in between, nothing comes after it.
        let mut at = std::mem::replace(&mut self.at, At::Over);
        loop {
            at = match at {
                At::Between => match self.hear().await? {
                    Said::File { path, mode, size, mtime } => {
                        let file = FoundFile { path, mode, size, mtime };
                        self.check(&file)?;
                        let told = self.told.insert(file.path.clone());
                        let at = At::File { left: size, hash: Sha256::new(), told };
                        if told {
                            self.at = at;
                            return Ok(Found::File(file));
                        }
                        self.twice += 1;
                        at
                    }
                    Said::Done(mut left_out) => {
                        left_out.changed = left_out.changed.saturating_add(self.twice);
                        return Ok(Found::Done(left_out));
                    }
                    said => return Err(failed(format!("it said {said:?}"))),
                },
                At::File { left, mut hash, told } => {
                    let piece = self.piece(left).await?;
                    if piece.is_empty() {
                        let Said::Read { whole } = self.hear().await? else {
                            return Err(failed("a file has no end"));
                        };
                        if told {
                            self.at = At::Between;
                            let sha256 = Digest::from_bytes(hash.finalize().into());
                            return Ok(Found::End { sha256, whole: whole && left == 0 });
                        }
                        At::Between
                    } else {
                        let read = u64::try_from(piece.len()).map_err(failed)?;
                        self.room.bytes =
                            self.room.bytes.checked_sub(read).ok_or_else(|| failed("too much"))?;
                        let left = left - read;
                        if told {
                            hash.update(&piece);
                            self.at = At::File { left, hash, told };
                            return Ok(Found::Piece(piece));
                        }
                        At::File { left, hash, told }
                    }
                }
                At::Over => return Err(failed("nothing comes after the end")),
            };
        }
    }

    /// Refuses a file that was not asked for.
    fn check(&mut self, file: &FoundFile) -> Result<(), Error> {
        let FoundFile { path, mode, size, mtime } = file;
        let fits = *size <= self.room.file_bytes && *size <= self.room.bytes;
        if !is_inside(path)
            || !self.globs.want(path)
            || *mode > 0o777
            || !fits
            || i64::try_from(*mtime).is_err()
        {
            return Err(failed(format!("nobody asked for {file:?}")));
        }
        self.room.files = self.room.files.checked_sub(1).ok_or_else(|| failed("too many files"))?;
        Ok(())
    }

    /// The next message of those that are said.
    async fn hear(&mut self) -> Result<Said, Error> {
        if let Some(said) = self.said.take() {
            return Ok(said);
        }
        let text = self.message(MAX_SAID).await?;
        serde_json::from_slice(&text).map_err(failed)
    }

    /// The next piece of a file of which so many bytes may follow.
    async fn piece(&mut self, left: u64) -> Result<Vec<u8>, Error> {
        let most = u32::try_from(left).unwrap_or(u32::MAX).min(MAX_PIECE);
        self.message(most).await
    }

    async fn message(&mut self, most: u32) -> Result<Vec<u8>, Error> {
        let read = async {
            let len = self.line.read_u32_le().await?;
            if len > most {
                return Err(std::io::ErrorKind::InvalidData.into());
            }
            let mut message = vec![0; usize::try_from(len).map_err(std::io::Error::other)?];
            self.line.read_exact(&mut message).await?;
            Ok::<_, std::io::Error>(message)
        };
        let until = self.until.min(Instant::now() + PATIENCE);
        timeout_at(until, read).await.map_err(failed)?.map_err(failed)
    }
}

async fn collect(
    shared: &Shared,
    id: &SandboxId,
    wanted: &CollectFiles,
    turn: Turn,
) -> Result<Collection, Error> {
    sandglass_failpoint::hit_async("control.collect.begin").await.map_err(super::injected)?;
    let line = shared.host.collect(id, wanted.place.tree()).await?;
    Ok(Collection { _turn: Some(turn), ..Collection::ask(line, wanted).await? })
}

/// Reads the files in a folder of a sandbox whose end has begun, for its owner, before anything of it goes.
///
/// # Errors
/// As [`Control::collect`].
pub(crate) async fn collect_at_end(
    shared: &Shared,
    id: &SandboxId,
    wanted: &CollectFiles,
) -> Result<Collection, Error> {
    let line = shared.host.collect(id, wanted.place.tree()).await?;
    Collection::ask(line, wanted).await
}

impl Control {
    /// Reads the files in a folder of a sandbox of this team that runs or is paused, as they are on its disk: what its programs
    /// have written, and not what they have in memory alone. They go on meanwhile, and a file that they change is said not to
    /// be whole. It ends with the sandbox.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is no such sandbox, or no such folder. [`ErrorKind::Invalid`]: it is no folder, or lies
    /// behind a symbolic link. [`ErrorKind::Capacity`]: too many are at it.
    pub async fn collect(
        &self,
        team: TeamId,
        id: &SandboxId,
        wanted: &CollectFiles,
    ) -> Result<Collection, Error> {
        self.standing(team, id).await?;
        let turn = self.shared().collecting.for_client(team).await?;
        collect(self.shared(), id, wanted, turn).await
    }
}

#[cfg(test)]
mod tests;
