//! The answer of a provider on its way to the client, and what it says of itself.

use std::fmt;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use sandglass_broker::redact::{Redactor, Search};
use sandglass_models::Dialect;
use sandglass_models::answer::{Stream, Told};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::answer::Piece;
use crate::config::Waits;
use crate::inlet::Inlet;
use crate::pool::Part;
use crate::shape;

/// Pieces of an answer that wait for the client to take them.
pub(crate) const WAITING: usize = 4;

/// The longest answer of images, in bytes, and the longest that came as a whole of which is read what was used.
const LONGEST: u64 = 64 << 20;

/// Bytes that an answer may have beside its tokens, and for each of them: one comes in an event of a few hundred bytes, with the twenty that
/// it could have been instead if the client asks for them, and once more where the last event holds all of the answer.
const AROUND: u64 = 256 << 10;
const TOKEN: u64 = 8 << 10;

/// How often an answer may hold its request: Responses send it with the first event, the second and the last.
const ECHOES: u64 = 4;

/// How long an answer may be, in bytes: of a request of so many, that may write so many tokens. What is longer is none.
pub(crate) fn most(dialect: Dialect, request: usize, output: u64) -> u64 {
    if dialect == Dialect::Images {
        return LONGEST;
    }
    let request = u64::try_from(request).unwrap_or(u64::MAX);
    AROUND.saturating_add(output.saturating_mul(TOKEN)).saturating_add(request.saturating_mul(ECHOES))
}

/// Reads what an answer says of itself.
#[derive(Debug)]
enum Ear {
    /// Piece by piece.
    Stream(Box<Stream>, Pending),
    /// At its end. `None` once there is no room for it.
    Whole(Dialect, Option<Vec<u8>>, u64),
}

/// How much of an event has come that is not whole: so much may be kept for it.
#[derive(Debug, Default)]
struct Pending {
    bytes: u64,
    /// The last bytes, in which an event may end.
    last: [u8; 4],
}

impl Pending {
    fn feed(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.last.rotate_left(1);
            self.last[3] = *byte;
            self.bytes += 1;
            if self.last.ends_with(b"\n\n") || self.last.ends_with(b"\r\r") || self.last == *b"\r\n\r\n" {
                self.bytes = 0;
            }
        }
    }
}

/// What became of an answer.
#[derive(Debug)]
pub(crate) struct Heard {
    /// What it said.
    pub(crate) told: Told,
    /// What of it has not gone on and is its end, where all else has gone on.
    pub(crate) rest: Option<(mpsc::Sender<Piece>, Bytes)>,
}

impl Ear {
    fn new(dialect: Dialect, streamed: bool, wants_usage: bool) -> Self {
        if streamed {
            Self::Stream(Box::new(Stream::new(dialect, wants_usage)), Pending::default())
        } else {
            Self::Whole(dialect, Some(Vec::new()), 0)
        }
    }

    /// Hears some of it. `None` if there is no room to hear it, and then it must not go on either.
    fn hear(&mut self, bytes: &[u8], room: &mut Part) -> Option<Bytes> {
        match self {
            Self::Stream(stream, pending) => {
                pending.feed(bytes);
                if !room.grow_to(pending.bytes.saturating_mul(2)) {
                    return None;
                }
                let wanted = stream.feed(bytes).into();
                room.shrink_to(pending.bytes.saturating_mul(2));
                Some(wanted)
            }
            Self::Whole(_, kept, length) => {
                *length = length.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                if let Some(so_far) = kept {
                    // A buffer that grows is twice as long as what is in it.
                    if *length <= LONGEST && room.grow_to(length.saturating_mul(2)) {
                        so_far.extend_from_slice(bytes);
                    } else {
                        *kept = None;
                        room.shrink_to(0);
                    }
                }
                Some(Bytes::copy_from_slice(bytes))
            }
        }
    }

    /// All that it said.
    async fn end(self, whole: bool, inlet: &Inlet) -> (Told, Vec<u8>) {
        match self {
            Self::Stream(stream, _) => stream.end(),
            Self::Whole(_, _, length) if !whole => (Told::unheard(false, length), Vec::new()),
            Self::Whole(dialect, Some(bytes), length) => {
                let told = move || {
                    // What is made of too much is not read, or it would take more than there is room for.
                    shape::tree(&bytes).map(|_| Told::of(dialect, &bytes))
                };
                let told = inlet.work_on(usize::try_from(length).unwrap_or(usize::MAX), told).await.flatten();
                (told.unwrap_or_else(|| Told::unheard(true, length)), Vec::new())
            }
            Self::Whole(_, None, length) => (Told::unheard(true, length), Vec::new()),
        }
    }
}

/// An answer, and who hears it.
pub(crate) struct Relay<'a> {
    pub(crate) waits: &'a Waits,
    /// Fires when this server ends.
    pub(crate) stop: &'a CancellationToken,
    /// Takes the provider's key out of what it sends.
    pub(crate) redactor: Redactor<&'a Search>,
    /// Understands what is long.
    pub(crate) inlet: &'a Inlet,
    /// The memory that it may take.
    pub(crate) room: Part,
    /// The most that may come, in bytes.
    pub(crate) most: u64,
}

impl Relay<'_> {
    /// Carries an answer, and hears it to its end, whether or not its client does: that is what is paid for. A client that misses some of it
    /// hears no end.
    pub(crate) async fn carry<B>(
        mut self,
        answer: B,
        client: mpsc::Sender<Piece>,
        dialect: Dialect,
        streamed: bool,
        wants_usage: bool,
    ) -> Heard
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: fmt::Display,
    {
        let mut answer = pin!(answer);
        let mut ear = Ear::new(dialect, streamed, wants_usage);
        let mut client = Some(client);
        let mut length = 0_u64;
        let mut end = Instant::now() + self.waits.call;
        let whole = loop {
            let until = end.min(Instant::now() + self.waits.provider);
            let frame = tokio::select! {
                frame = tokio::time::timeout_at(until, answer.frame()) => frame,
                () = gone(client.as_ref()) => {
                    client = None;
                    end = end.min(Instant::now() + self.waits.drain);
                    continue;
                }
                () = self.stop.cancelled() => break false,
            };
            let (bytes, last) = match frame {
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => (self.redactor.feed(&bytes), false),
                    // Trailers say nothing that is asked for.
                    Err(_) => continue,
                },
                Ok(None) => (self.redactor.finish(), true),
                Ok(Some(Err(error))) => {
                    tracing::debug!(%error, "an answer broke off");
                    break false;
                }
                Err(_) => {
                    tracing::info!("an answer took too long");
                    break false;
                }
            };
            length = length.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
            if length > self.most {
                tracing::warn!(most = self.most, "an answer is longer than what was asked for can be");
                break false;
            }
            let Some(wanted) = ear.hear(&bytes, &mut self.room) else {
                tracing::warn!("there is no memory to hear an answer");
                break false;
            };
            if let Some(hearer) = &client
                && !wanted.is_empty()
                && !self.pass(hearer, wanted).await
            {
                // What it misses from now on is missing: it hears at once that this is no end.
                client = None;
                end = end.min(Instant::now() + self.waits.drain);
            }
            if last {
                break true;
            }
        };
        if self.redactor.taken() > 0 {
            tracing::warn!("a provider sent its own key back: it is taken out");
        }
        let (told, rest) = ear.end(whole, self.inlet).await;
        Heard { told, rest: client.filter(|_| whole).map(|client| (client, rest.into())) }
    }

    /// Hands a piece to the client. `false` if it is gone, or takes nothing any more.
    async fn pass(&self, client: &mpsc::Sender<Piece>, piece: Bytes) -> bool {
        let patience: Duration = self.waits.client;
        matches!(timeout(patience, client.send(Piece::Data(piece))).await, Ok(Ok(())))
    }
}

/// When a client goes away; never, if it is gone.
async fn gone(client: Option<&mpsc::Sender<Piece>>) {
    match client {
        Some(client) => client.closed().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
