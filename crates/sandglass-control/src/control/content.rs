//! The content of volumes, for whoever has a volume's token.
//!
//! Each question goes to a process of its own, which the host starts: see [`sandglass_engine::volume`]. What comes back was
//! written by a process that reads what guests wrote, so it is bounded and parsed like anything of a guest's.

use std::collections::HashMap;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandglass_engine::host::Host;
use sandglass_engine::volume::{Ask, MAX_ASK, MAX_PIECE, MAX_SAID, Mark, Said};
use sandglass_types::{Error, ErrorKind, VolumeId};
use subtle::ConstantTimeEq as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::{Control, stored};
use crate::shared::Shared;

/// Questions at one time. The host does twice as many.
const MAX_QUESTIONS: usize = 16;

/// How long a question waits for others.
const QUEUE_PATIENCE: Duration = Duration::from_secs(10);

/// How long an answer may take, or the next piece of a file: what is removed may be large.
const PATIENCE: Duration = Duration::from_secs(120);

/// Whose content is worked on.
#[derive(Debug)]
pub(crate) struct Contents {
    places: Arc<Semaphore>,
    of: Arc<Mutex<HashMap<VolumeId, usize>>>,
}

/// A question about a volume, which can't be deleted meanwhile.
#[derive(Debug)]
struct Place {
    id: VolumeId,
    of: Arc<Mutex<HashMap<VolumeId, usize>>>,
    _place: OwnedSemaphorePermit,
}

impl Default for Contents {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(MAX_QUESTIONS)), of: Arc::default() }
    }
}

impl Contents {
    /// Whether somebody asks about this volume.
    pub(super) fn are_wanted(&self, id: &VolumeId) -> bool {
        self.of.lock().unwrap_or_else(PoisonError::into_inner).contains_key(id)
    }

    async fn place(&self, id: &VolumeId) -> Result<Place, Error> {
        let busy =
            || Error::new(ErrorKind::Capacity, "too many ask for the content of volumes: try again soon");
        let place = timeout(QUEUE_PATIENCE, Arc::clone(&self.places).acquire_owned()).await;
        let place = place.ok().and_then(Result::ok).ok_or_else(busy)?;
        *self.of.lock().unwrap_or_else(PoisonError::into_inner).entry(id.clone()).or_default() += 1;
        Ok(Place { id: id.clone(), of: Arc::clone(&self.of), _place: place })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = of.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                of.remove(&self.id);
            }
        }
    }
}

/// One question about the content of a volume, and its answer.
#[derive(Debug)]
pub struct Content {
    line: UnixStream,
    _place: Place,
}

fn failed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::internal("the volume's content can't be worked on; the server's log says why", source)
}

impl Content {
    /// Asks, and says the answer.
    ///
    /// # Errors
    /// It takes too long, or nobody answers.
    pub async fn ask(&mut self, ask: &Ask) -> Result<Said, Error> {
        let text = serde_json::to_vec(ask).map_err(failed)?;
        if u32::try_from(text.len()).map_or(true, |len| len > MAX_ASK) {
            return Err(Error::new(ErrorKind::Invalid, "the request is too long"));
        }
        self.send(&text).await?;
        self.answer().await
    }

    /// Sends a piece of a file after [`Said::GoOn`], of any length; one of no length is its end.
    ///
    /// # Errors
    /// Nobody takes it. There may be an answer that says why.
    pub async fn send_file(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return self.send(bytes).await;
        }
        for piece in bytes.chunks(usize::try_from(MAX_PIECE).unwrap_or(usize::MAX)) {
            self.send(piece).await?;
        }
        Ok(())
    }

    /// The next answer.
    ///
    /// # Errors
    /// As [`Content::ask`].
    pub async fn answer(&mut self) -> Result<Said, Error> {
        let answered = async {
            let len = self.line.read_u32_le().await?;
            if len > MAX_SAID {
                return Err(std::io::ErrorKind::InvalidData.into());
            }
            let mut text = Vec::new();
            let mut limited = (&mut self.line).take(len.into());
            limited.read_to_end(&mut text).await?;
            Ok::<_, std::io::Error>(text)
        };
        let text = timeout(PATIENCE, answered).await.map_err(failed)?.map_err(failed)?;
        serde_json::from_slice(&text).map_err(failed)
    }

    /// The bytes of a file after [`Said::File`]; nothing at its end.
    ///
    /// # Errors
    /// It takes too long, or ends before its time.
    pub async fn read_file(&mut self, left: u64) -> std::io::Result<Vec<u8>> {
        let most = left.min(MAX_PIECE.into());
        let mut piece = vec![0; usize::try_from(most).unwrap_or_default()];
        if piece.is_empty() {
            return Ok(piece);
        }
        let read = timeout(PATIENCE, self.line.read(&mut piece)).await??;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        piece.truncate(read);
        Ok(piece)
    }

    async fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        let len = u32::try_from(message.len()).map_err(failed)?;
        let sent = async {
            self.line.write_all(&len.to_le_bytes()).await?;
            self.line.write_all(message).await
        };
        timeout(PATIENCE, sent).await.map_err(failed)?.map_err(failed)
    }
}

async fn open(host: &Host, id: &VolumeId, place: Place) -> Result<Content, Error> {
    let line = StdStream::from(host.open_volume(id).await?);
    line.set_nonblocking(true).map_err(failed)?;
    Ok(Content { line: UnixStream::from_std(line).map_err(failed)?, _place: place })
}

impl Control {
    /// The content of a volume, for who has its token.
    ///
    /// # Errors
    /// [`ErrorKind::Unauthenticated`], also where there is no such volume; [`ErrorKind::Capacity`].
    pub async fn content(&self, id: &VolumeId, token: &str) -> Result<Content, Error> {
        let shared = self.shared();
        let refused = || Error::new(ErrorKind::Unauthenticated, "invalid volume token");
        let place = shared.contents.place(id).await?;
        // From here on it can't be deleted.
        let row = shared.store.volume(id).await.map_err(stored)?.ok_or_else(refused)?;
        let theirs: bool = row.token.as_bytes().ct_eq(token.as_bytes()).into();
        if !theirs {
            return Err(refused());
        }
        open(&shared.host, id, place).await
    }
}

/// What tells whether files of a volume were changed.
///
/// # Errors
/// They can't be looked at.
pub(crate) async fn marks_of(
    shared: &Shared,
    id: &VolumeId,
    paths: Vec<String>,
) -> Result<Vec<Option<Mark>>, Error> {
    let wanted = paths.len();
    let place = shared.contents.place(id).await?;
    match open(&shared.host, id, place).await?.ask(&Ask::Marks { paths }).await? {
        Said::Marks(marks) if marks.len() == wanted => Ok(marks),
        other => Err(failed(format!("it answered {other:?}"))),
    }
}
