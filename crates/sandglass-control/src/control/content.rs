//! The content of volumes, for whoever has a volume's token.
//!
//! Each question goes to a process of its own, which the host starts: see [`sandglass_engine::volume`]. What comes back was
//! written by a process that reads what guests wrote, so it is bounded and parsed like anything of a guest's.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::Shutdown;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandglass_engine::host::Host;
use sandglass_engine::volume::{Ask, MAX_ASK, MAX_PIECE, MAX_SAID, Mark, Said};
use sandglass_types::{Error, ErrorKind, TeamId, VolumeId};
use subtle::ConstantTimeEq as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::{Control, stored};
use crate::shared::Shared;

/// Questions of clients at one time, those of one team among them, and those about one volume: whoever is slow is in the way of
/// their own team first. The host does some more.
const MAX_QUESTIONS: usize = 20;
const MAX_OF_TEAM: usize = 6;
const MAX_OF_VOLUME: usize = 4;

/// Questions that the server has itself.
const MAX_OWN: usize = 8;

/// How long a question waits for others.
const QUEUE_PATIENCE: Duration = Duration::from_secs(10);

/// How long an answer may take, or the next piece of a file: what is removed may be large.
const PATIENCE: Duration = Duration::from_secs(120);

/// Whose content is worked on.
#[derive(Debug)]
pub(crate) struct Contents {
    places: Arc<Semaphore>,
    own: Arc<Semaphore>,
    asked: Arc<Mutex<Asked>>,
}

/// Questions that are under way.
#[derive(Debug, Default)]
struct Asked {
    /// The number of the next one.
    next: u64,
    volumes: HashMap<VolumeId, OfVolume>,
    teams: HashMap<TeamId, usize>,
}

/// Those about one volume.
#[derive(Debug, Default)]
struct OfVolume {
    /// Under its number, what each is asked on, once it is.
    lines: BTreeMap<u64, Option<StdStream>>,
    /// Whether they are to end.
    cut: bool,
}

/// A question about a volume.
#[derive(Debug)]
struct Place {
    id: VolumeId,
    team: TeamId,
    number: u64,
    asked: Arc<Mutex<Asked>>,
    /// `None` while it waits for others.
    permit: Option<OwnedSemaphorePermit>,
}

impl Default for Contents {
    fn default() -> Self {
        let places = |most| Arc::new(Semaphore::new(most));
        Self { places: places(MAX_QUESTIONS), own: places(MAX_OWN), asked: Arc::default() }
    }
}

fn busy() -> Error {
    Error::new(ErrorKind::Capacity, "too many ask for the content of volumes: try again soon")
}

impl Contents {
    /// Ends all questions about a volume that nobody finds any more, whether or not a client still reads an answer: who works on it
    /// ends with its socket.
    pub(super) fn cut(&self, id: &VolumeId) {
        if let Some(of) = lock(&self.asked).volumes.get_mut(id) {
            of.cut = true;
            of.lines.values().flatten().for_each(shut);
        }
    }

    /// A place for a client's question. Those who wait for one count as well.
    async fn place(&self, id: &VolumeId, team: TeamId) -> Result<Place, Error> {
        self.count(id, team, MAX_OF_VOLUME, MAX_OF_TEAM)?.wait(&self.places).await
    }

    /// A place for a question of the server's own, which waits for no client.
    async fn own_place(&self, id: &VolumeId, team: TeamId) -> Result<Place, Error> {
        self.count(id, team, usize::MAX, usize::MAX)?.wait(&self.own).await
    }

    /// Counts a question, unless there are so many of its volume or its team.
    fn count(&self, id: &VolumeId, team: TeamId, of_volume: usize, of_team: usize) -> Result<Place, Error> {
        let mut asked = lock(&self.asked);
        let now = asked.volumes.get(id).map_or(0, |of| of.lines.len());
        if now >= of_volume || asked.teams.get(&team).copied().unwrap_or(0) >= of_team {
            return Err(busy());
        }
        let number = asked.next;
        asked.next += 1;
        asked.volumes.entry(id.clone()).or_default().lines.insert(number, None);
        *asked.teams.entry(team).or_default() += 1;
        drop(asked);
        Ok(Place { id: id.clone(), team, number, asked: Arc::clone(&self.asked), permit: None })
    }
}

/// Both ends hear of it at once.
fn shut(line: &StdStream) {
    // One that is closed already has nothing to be told.
    let _closed = line.shutdown(Shutdown::Both);
}

impl Place {
    async fn wait(mut self, places: &Arc<Semaphore>) -> Result<Self, Error> {
        let permit = timeout(QUEUE_PATIENCE, Arc::clone(places).acquire_owned()).await;
        self.permit = Some(permit.ok().and_then(Result::ok).ok_or_else(busy)?);
        Ok(self)
    }

    /// What this question is asked on.
    fn asked_on(&self, line: &StdStream) -> std::io::Result<()> {
        let line = line.try_clone()?;
        let mut asked = lock(&self.asked);
        if let Some(of) = asked.volumes.get_mut(&self.id) {
            if of.cut {
                shut(&line);
            }
            of.lines.insert(self.number, Some(line));
        }
        Ok(())
    }
}

fn lock(asked: &Mutex<Asked>) -> MutexGuard<'_, Asked> {
    asked.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut asked = lock(&self.asked);
        if let Entry::Occupied(mut of) = asked.volumes.entry(self.id.clone()) {
            of.get_mut().lines.remove(&self.number);
            if of.get().lines.is_empty() {
                of.remove();
            }
        }
        if let Entry::Occupied(mut of) = asked.teams.entry(self.team) {
            *of.get_mut() -= 1;
            if *of.get() == 0 {
                of.remove();
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
    place.asked_on(&line).map_err(failed)?;
    Ok(Content { line: UnixStream::from_std(line).map_err(failed)?, _place: place })
}

impl Control {
    /// The content of a volume, for who has its token.
    ///
    /// # Errors
    /// [`ErrorKind::Unauthenticated`], also where there is no such volume; [`ErrorKind::Capacity`].
    pub async fn content(&self, id: &VolumeId, token: &str) -> Result<Content, Error> {
        let shared = self.shared();
        // First: whoever has no token takes no place.
        let team = self.opens(id, token).await?;
        let place = shared.contents.place(id, team).await?;
        // It may have been deleted meanwhile. From here on who deletes it ends this.
        self.opens(id, token).await?;
        open(&shared.host, id, place).await
    }

    /// Whose volume the token is for. A team that was revoked has none.
    async fn opens(&self, id: &VolumeId, token: &str) -> Result<TeamId, Error> {
        let refused = || Error::new(ErrorKind::Unauthenticated, "invalid volume token");
        let row =
            self.shared().store.volume_of_a_team_that_works(id).await.map_err(stored)?.ok_or_else(refused)?;
        let theirs: bool = row.token.as_bytes().ct_eq(token.as_bytes()).into();
        if theirs { Ok(row.team) } else { Err(refused()) }
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
    let team = shared.store.volume(id).await.map_err(stored)?.map(|row| row.team);
    let team = team.ok_or_else(|| failed(format!("there is no volume {id}")))?;
    let place = shared.contents.own_place(id, team).await?;
    match open(&shared.host, id, place).await?.ask(&Ask::Marks { paths }).await? {
        Said::Marks(marks) if marks.len() == wanted => Ok(marks),
        other => Err(failed(format!("it answered {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn those_who_wait_for_a_place_count_as_well() {
        let contents = Arc::new(Contents::default());
        let all = u32::try_from(MAX_QUESTIONS).unwrap();
        let taken = Arc::clone(&contents.places).acquire_many_owned(all).await.unwrap();
        let (id, team) = (VolumeId::random(), TeamId::random());
        let mut asking = JoinSet::new();
        for _ in 0..3 * MAX_OF_VOLUME {
            let (contents, id) = (Arc::clone(&contents), id.clone());
            asking.spawn(async move { contents.place(&id, team).await });
        }
        // Each has asked by then.
        for _ in 0..3 * MAX_OF_VOLUME {
            tokio::task::yield_now().await;
        }
        drop(taken);
        let let_in: Vec<_> = asking.join_all().await.into_iter().flatten().collect();
        assert_eq!(let_in.len(), MAX_OF_VOLUME);
        // Whoever is done makes room, and the server's own questions need none of it.
        assert!(contents.place(&id, team).await.is_err());
        contents.own_place(&id, team).await.unwrap();
        drop(let_in);
        contents.place(&id, team).await.unwrap();
        assert!(lock(&contents.asked).volumes.is_empty() && lock(&contents.asked).teams.is_empty());
    }
}
