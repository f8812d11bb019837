//! The unprivileged half's end of the line to the host.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandglass_linux::fdpass;
use sandglass_types::{Digest, Error, ErrorKind, SandboxId, VolumeId};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

use super::protocol::{Answer, Call, RefusalKind, Reply, Verb};
use super::server::MAX_UNDER_WAY;
use crate::collect::Tree;
use crate::deadline::Deadline;
use crate::engine::{
    AirlockSocket, Compression, EngineInfo, Exit, Keep, Pace, Presence, SandboxSpec, SessionEnds, Stats,
};
use crate::footprint::Footprints;

/// A verb that the host did not do.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The host said no.
    #[error("the host refused: {message}")]
    Refused {
        /// For programs.
        kind: RefusalKind,
        /// For the operator.
        message: String,
    },
    /// The host is gone, and this half can do nothing without it.
    #[error("the privileged half is gone")]
    Gone,
    /// The answer does not fit the question.
    #[error("the host gave an answer to another question")]
    Confused,
}

impl HostError {
    /// The refusal, if it is one.
    #[must_use]
    pub const fn refusal(&self) -> Option<RefusalKind> {
        if let Self::Refused { kind, .. } = self { Some(*kind) } else { None }
    }
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        if let HostError::Refused { kind: RefusalKind::Mismatch, message } = &error {
            let message = format!(
                "{message}: run the server with that one again, or go without the memory: a paused sandbox is started anew \
                 from its files where it is resumed with \"memory\": false; a snapshot has to be made again"
            );
            return Self::new(ErrorKind::Conflict, message).because(error);
        }
        let (kind, message) = match error.refusal() {
            Some(RefusalKind::NoRoom(lack)) => {
                let message = format!("this machine is out of {lack}: try again when there is room");
                return Self::new(ErrorKind::Capacity, message).because(error);
            }
            Some(RefusalKind::Damaged) => {
                let message = "its image is damaged, so nothing is made from it: delete it, and make another";
                (ErrorKind::Internal, message)
            }
            Some(RefusalKind::Unsupported) => (ErrorKind::Unsupported, "the engine cannot do this"),
            Some(RefusalKind::NotFound) => (ErrorKind::NotFound, "no such sandbox on this machine"),
            Some(RefusalKind::Exists | RefusalKind::WrongState) => {
                (ErrorKind::Conflict, "the sandbox is not in a state for this")
            }
            Some(RefusalKind::Busy) => (ErrorKind::Capacity, "this machine is busy: try again soon"),
            _ => (ErrorKind::Internal, "the machine could not do this; its log says why"),
        };
        Self::new(kind, message).because(error)
    }
}

type Answered = (Answer, Vec<OwnedFd>);

#[derive(Debug)]
struct Line {
    /// Not a stream but a `SOCK_SEQPACKET` socket: only its readiness and its descriptor are used.
    socket: UnixStream,
    next: AtomicU64,
    /// `None` once the host is gone: no question can wait for an answer any more.
    asked: Mutex<Option<HashMap<u64, Question>>>,
    /// The host refuses what is more than it does at one time, and a refusal may be the end of a sandbox; so verbs wait here.
    places: Arc<Semaphore>,
    /// Those that read or write all memory and disk of a sandbox keep everybody else from the disk. Who is written stands
    /// still meanwhile, so it does not wait for those that are made from images, of which there may be many.
    reading: Arc<Semaphore>,
    writing: Arc<Semaphore>,
    /// Nobody stands still for these.
    flushing: Arc<Semaphore>,
    /// Images that are to be made what they were before they were compressed. For each at most one asks.
    expanding: Arc<Semaphore>,
    /// Whoever looks at what is on the disk.
    measuring: Arc<Semaphore>,
}

/// A verb that the host is at. It has its places until the host has answered, whether somebody still waits for that or not.
#[derive(Debug)]
struct Question {
    answer: oneshot::Sender<Answered>,
    _places: [Option<OwnedSemaphorePermit>; 2],
}

/// Images that sandboxes are made from at one time.
const MAX_READ: usize = 8;

/// Images that are written at one time.
const MAX_WRITTEN: usize = 8;

/// Images that are flushed at one time.
const MAX_FLUSHED: usize = 2;

/// Images that are expanded at one time. Whoever asks for one that need not be has a place as well, for a moment.
const MAX_EXPANDED: usize = 8;

/// How long somebody waits who wants to know what is on the disk while others are told.
const MEASURING: Duration = Duration::from_secs(1);

/// Ids that are measured at one time, which is what a packet has room for.
const MAX_MEASURED: usize = 1000;

/// A handle on the host; clones share the line.
#[derive(Debug, Clone)]
pub struct Host(Arc<Line>);

/// Takes a question back that was not sent.
struct Unsent<'a>(&'a Line, u64);

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        self.0.forget(self.1);
    }
}

impl Line {
    fn expect(
        &self,
        seq: u64,
        places: [Option<OwnedSemaphorePermit>; 2],
    ) -> Option<oneshot::Receiver<Answered>> {
        let (answer, receiver) = oneshot::channel();
        let question = Question { answer, _places: places };
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).as_mut()?.insert(seq, question);
        Some(receiver)
    }

    /// Waits until the host may be asked this.
    async fn places_for(&self, verb: &Verb) -> Result<[Option<OwnedSemaphorePermit>; 2], HostError> {
        // None is ever closed.
        let place = async |of: &Arc<Semaphore>| Arc::clone(of).acquire_owned().await.ok();
        let image = match verb {
            Verb::Checkpoint { .. } | Verb::KeepDisk { .. } => place(&self.writing).await,
            Verb::FlushImage(_) => place(&self.flushing).await,
            Verb::ExpandImage(_) => place(&self.expanding).await,
            Verb::Restore { .. } | Verb::PrepareRestore { .. } | Verb::Boot { .. } => {
                place(&self.reading).await
            }
            Verb::Footprints(_) => timeout(MEASURING, place(&self.measuring)).await.map_err(|_| {
                let message = "others are told already what is on the disk".into();
                HostError::Refused { kind: RefusalKind::Busy, message }
            })?,
            _ => None,
        };
        let any = match verb {
            Verb::Wait(_) => None,
            _ => place(&self.places).await,
        };
        Ok([image, any])
    }

    fn forget(&self, seq: u64) -> Option<Question> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).as_mut()?.remove(&seq)
    }
}

impl Host {
    /// Wraps this half's end of the line. The future reads answers; it ends when the
    /// host is gone, and every question fails from then on.
    ///
    /// # Errors
    /// The socket can't be watched.
    pub fn connect(socket: OwnedFd) -> std::io::Result<(Self, impl Future<Output = ()> + Send + 'static)> {
        let socket = std::os::unix::net::UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        let line = Arc::new(Line {
            socket: UnixStream::from_std(socket)?,
            next: AtomicU64::new(1),
            asked: Mutex::new(Some(HashMap::new())),
            places: Arc::new(Semaphore::new(MAX_UNDER_WAY)),
            reading: Arc::new(Semaphore::new(MAX_READ)),
            writing: Arc::new(Semaphore::new(MAX_WRITTEN)),
            flushing: Arc::new(Semaphore::new(MAX_FLUSHED)),
            expanding: Arc::new(Semaphore::new(MAX_EXPANDED)),
            measuring: Arc::new(Semaphore::new(1)),
        });
        let reader = Arc::clone(&line);
        let reading = async move {
            if let Err(error) = read_answers(&reader).await {
                tracing::error!(%error, "the line to the host failed");
            }
            *reader.asked.lock().unwrap_or_else(PoisonError::into_inner) = None;
        };
        Ok((Self(line), reading))
    }

    async fn ask(&self, verb: Verb) -> Result<Answered, HostError> {
        let places = self.0.places_for(&verb).await?;
        let seq = self.0.next.fetch_add(1, Ordering::Relaxed);
        let packet = serde_json::to_vec(&Call { seq, verb }).map_err(|_| HostError::Confused)?;
        let answered = self.0.expect(seq, places).ok_or(HostError::Gone)?;
        let unsent = Unsent(&self.0, seq);
        loop {
            let socket = &self.0.socket;
            socket.writable().await.map_err(|_| HostError::Gone)?;
            match socket.try_io(Interest::WRITABLE, || fdpass::try_send(socket, &packet, &[])) {
                Ok(()) => break,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(HostError::Gone),
            }
        }
        // From here on it is answered, or the host is gone.
        std::mem::forget(unsent);
        match answered.await.map_err(|_| HostError::Gone)? {
            (Answer::Refused { kind, message }, _) => Err(HostError::Refused { kind, message }),
            answered => Ok(answered),
        }
    }

    async fn do_it(&self, verb: Verb) -> Result<(), HostError> {
        match self.ask(verb).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(HostError::Confused),
        }
    }

    /// What the engine is.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn describe(&self) -> Result<EngineInfo, HostError> {
        match self.ask(Verb::Describe).await? {
            (Answer::Info(info), _) => Ok(info),
            _ => Err(HostError::Confused),
        }
    }

    /// Makes the computer without running anything in it.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn create(&self, spec: SandboxSpec) -> Result<(), HostError> {
        self.do_it(Verb::Create(spec)).await
    }

    /// Starts the agent.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn start(&self, id: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::Start(id.clone())).await
    }

    /// Stops all processes of a sandbox where they are.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn pause(&self, id: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::Pause(id.clone())).await
    }

    /// Lets a paused sandbox run on.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn resume(&self, id: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::Resume(id.clone())).await
    }

    /// Writes a paused sandbox to an image.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn checkpoint(&self, id: &SandboxId, image: &SandboxId, keep: Keep) -> Result<(), HostError> {
        self.do_it(Verb::Checkpoint { id: id.clone(), image: image.clone(), keep }).await
    }

    /// Makes an image outlast a loss of power.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn flush_image(&self, image: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::FlushImage(image.clone())).await
    }

    /// Compresses an image that nobody uses.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn compress_image(&self, image: &SandboxId) -> Result<Compression, HostError> {
        match self.ask(Verb::CompressImage(image.clone())).await? {
            (Answer::Compression(outcome), _) => Ok(outcome),
            _ => Err(HostError::Confused),
        }
    }

    /// Makes an image what it was before it was compressed; `Ok` if it is not.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn expand_image(&self, image: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::ExpandImage(image.clone())).await
    }

    /// Makes a new sandbox from an image.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn restore(&self, spec: SandboxSpec, image: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::Restore { spec, image: image.clone() }).await
    }

    /// Makes what [`Host::restore`] of the same id and image will take.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn prepare_restore(&self, spec: SandboxSpec, image: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::PrepareRestore { spec, image: image.clone() }).await
    }

    /// Writes the disk of a paused sandbox to an image.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn keep_disk(&self, id: &SandboxId, image: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::KeepDisk { id: id.clone(), image: image.clone() }).await
    }

    /// Makes the computer with the disk of an image, without running anything in it.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn boot(&self, spec: SandboxSpec, image: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::Boot { spec, image: image.clone() }).await
    }

    /// All images.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn images(&self) -> Result<Vec<SandboxId>, HostError> {
        match self.ask(Verb::Images).await? {
            (Answer::Images(all), _) => Ok(all),
            _ => Err(HostError::Confused),
        }
    }

    /// Removes an image; `Ok` if there is none.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn remove_image(&self, image: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::RemoveImage(image.clone())).await
    }

    /// Makes a volume of this size; `Ok` if there is one of this name.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn create_volume(&self, id: &VolumeId, mib: u32) -> Result<(), HostError> {
        self.do_it(Verb::CreateVolume { id: id.clone(), mib }).await
    }

    /// Removes a volume that nobody has mounted; `Ok` if there is none.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn remove_volume(&self, id: &VolumeId) -> Result<(), HostError> {
        self.do_it(Verb::RemoveVolume(id.clone())).await
    }

    /// Has a process answer one question about the content of a volume (see [`crate::volume`]): on this socket.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn open_volume(&self, id: &VolumeId) -> Result<OwnedFd, HostError> {
        let (_, descriptors) = self.ask(Verb::OpenVolume(id.clone())).await?;
        let [socket] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| HostError::Confused)?;
        Ok(socket)
    }

    /// Has a process answer one question about the files of a sandbox (see [`crate::collect`]): on this socket.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn collect(&self, id: &SandboxId, tree: Tree) -> Result<OwnedFd, HostError> {
        let (_, descriptors) = self.ask(Verb::Collect { id: id.clone(), tree }).await?;
        let [socket] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| HostError::Confused)?;
        Ok(socket)
    }

    /// All volumes.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn volumes(&self) -> Result<Vec<VolumeId>, HostError> {
        match self.ask(Verb::Volumes).await? {
            (Answer::Volumes(all), _) => Ok(all),
            _ => Err(HostError::Confused),
        }
    }

    /// What images and disks of sandboxes take. Of more than a thousand, blocks may be counted together more than once.
    ///
    /// # Errors
    /// As all verbs: [`HostError`]; [`RefusalKind::Busy`] if others are told for long.
    pub async fn footprints(&self, ids: &[SandboxId]) -> Result<Footprints, HostError> {
        let mut all = Footprints::default();
        for ids in ids.chunks(MAX_MEASURED) {
            match self.ask(Verb::Footprints(ids.to_vec())).await? {
                (Answer::Footprints(some), _) => all.append(some),
                _ => return Err(HostError::Confused),
            }
        }
        Ok(all)
    }

    /// Removes what nobody needs any more of the cache folder; this server needs these root file systems.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn tidy_cache(&self, rootfs: Vec<Digest>) -> Result<(), HostError> {
        self.do_it(Verb::TidyCache(rootfs)).await
    }

    /// Keeps another deadline for a sandbox, or none.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn set_deadline(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<(), HostError> {
        self.do_it(Verb::SetDeadline { id: id.clone(), deadline }).await
    }

    /// Ends a sandbox and removes all that it owned; `Ok` if there is nothing of it.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn destroy(&self, id: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::Destroy(id.clone())).await
    }

    /// Sets how punctual the processes of a sandbox are.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn pace(&self, id: &SandboxId, pace: Pace) -> Result<(), HostError> {
        self.do_it(Verb::Pace { id: id.clone(), pace }).await
    }

    /// Lets a sandbox go before others for a moment.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn favour(&self, id: &SandboxId) -> Result<(), HostError> {
        self.do_it(Verb::Favour(id.clone())).await
    }

    /// What a sandbox uses now.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn stats(&self, id: &SandboxId) -> Result<Stats, HostError> {
        match self.ask(Verb::Stats(id.clone())).await? {
            (Answer::Stats(stats), _) => Ok(stats),
            _ => Err(HostError::Confused),
        }
    }

    /// All that exists of this instance on the machine.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn list(&self) -> Result<Vec<(SandboxId, Presence)>, HostError> {
        match self.ask(Verb::List).await? {
            (Answer::List(all), _) => Ok(all),
            _ => Err(HostError::Confused),
        }
    }

    /// Gives a sandbox to somebody that was made for nobody, until this deadline, and opens the byte stream of its agent.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn hand_out(
        &self,
        id: &SandboxId,
        deadline: Option<Deadline>,
    ) -> Result<SessionEnds, HostError> {
        self.ends(Verb::HandOut { id: id.clone(), deadline }).await
    }

    /// Opens the byte stream of a sandbox's agent.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn attach(&self, id: &SandboxId) -> Result<SessionEnds, HostError> {
        self.ends(Verb::Attach(id.clone())).await
    }

    async fn ends(&self, verb: Verb) -> Result<SessionEnds, HostError> {
        let (_, descriptors) = self.ask(verb).await?;
        let [to_agent, from_agent] =
            <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| HostError::Confused)?;
        Ok(SessionEnds { to_agent, from_agent })
    }

    /// Makes sockets in a sandbox's airlock, in this order.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn airlock_sockets<const N: usize>(
        &self,
        id: &SandboxId,
        sockets: [AirlockSocket; N],
    ) -> Result<[OwnedFd; N], HostError> {
        const { assert!(N <= fdpass::MAX_FDS) };
        let verb = Verb::AirlockSockets { id: id.clone(), sockets: sockets.to_vec() };
        let (_, descriptors) = self.ask(verb).await?;
        descriptors.try_into().map_err(|_| HostError::Confused)
    }

    /// Waits until the processes of a sandbox are gone.
    ///
    /// # Errors
    /// As all verbs: [`HostError`].
    pub async fn wait(&self, id: &SandboxId) -> Result<Exit, HostError> {
        match self.ask(Verb::Wait(id.clone())).await? {
            (Answer::Exit(exit), _) => Ok(exit),
            _ => Err(HostError::Confused),
        }
    }
}

async fn read_answers(line: &Line) -> std::io::Result<()> {
    loop {
        line.socket.readable().await?;
        let received = match line.socket.try_io(Interest::READABLE, || fdpass::try_recv(&line.socket)) {
            Ok(received) => received,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            // The host ended before it had read all that was asked.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error),
        };
        let Some(received) = received else { return Ok(()) };
        let reply: Reply = serde_json::from_slice(&received.message)?;
        // Nobody waits for it any more: its descriptors are closed here.
        if let Some(question) = line.forget(reply.seq) {
            let _gone = question.answer.send((reply.answer, received.fds));
        }
    }
}

#[cfg(test)]
mod tests;
