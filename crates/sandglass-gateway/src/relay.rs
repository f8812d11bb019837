//! The answer of a provider on its way to the client, and what it says of itself.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use sandglass_models::Dialect;
use sandglass_models::answer::{Stream, Told};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::answer::Cut;
use crate::config::Waits;

/// Pieces of an answer that wait for the client to take them.
pub(crate) const WAITING: usize = 4;

/// Longest answer that came as a whole of which is read what was used, in bytes. Images are long.
const LONGEST: usize = 64 << 20;

/// Reads what an answer says of itself.
#[derive(Debug)]
enum Ear {
    /// Piece by piece.
    Stream(Box<Stream>),
    /// At its end. `None` once it is longer than is understood.
    Whole(Dialect, Option<Vec<u8>>, u64),
}

/// What became of an answer.
#[derive(Debug)]
pub(crate) struct Heard {
    /// What it said.
    pub(crate) told: Told,
    /// What of it has not gone on, and how it ends.
    pub(crate) rest: Result<Vec<u8>, Cut>,
}

impl Ear {
    fn hear(&mut self, bytes: &Bytes) -> Bytes {
        match self {
            Self::Stream(stream) => stream.feed(bytes).into(),
            Self::Whole(_, kept, length) => {
                *length = length.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                if let Some(so_far) = kept {
                    if so_far.len() + bytes.len() > LONGEST {
                        *kept = None;
                    } else {
                        so_far.extend_from_slice(bytes);
                    }
                }
                bytes.clone()
            }
        }
    }

    fn end(self, whole: bool) -> (Told, Vec<u8>) {
        match self {
            Self::Stream(stream) => stream.end(),
            Self::Whole(dialect, Some(bytes), _) if whole => (Told::of(dialect, &bytes), Vec::new()),
            Self::Whole(_, _, length) => (Told::unheard(whole, length), Vec::new()),
        }
    }
}

/// An answer, and who hears it.
pub(crate) struct Relay<'a> {
    pub(crate) waits: &'a Waits,
    /// Fires when this server ends.
    pub(crate) stop: &'a CancellationToken,
    pub(crate) client: &'a mpsc::Sender<Result<Bytes, Cut>>,
}

impl Relay<'_> {
    /// Carries an answer, and hears it to its end, whether or not its client does: that is what is paid for.
    pub(crate) async fn carry(
        &self,
        mut answer: Incoming,
        dialect: Dialect,
        streamed: bool,
        wants_usage: bool,
    ) -> Heard {
        let mut ear = if streamed {
            Ear::Stream(Box::new(Stream::new(dialect, wants_usage)))
        } else {
            Ear::Whole(dialect, Some(Vec::new()), 0)
        };
        let mut alone: Option<Instant> = None;
        let whole = loop {
            let until = alone.map_or_else(
                || Instant::now() + self.waits.provider,
                |since| (since + self.waits.drain).min(Instant::now() + self.waits.provider),
            );
            let frame = tokio::select! {
                frame = tokio::time::timeout_at(until, answer.frame()) => frame,
                () = self.client.closed(), if alone.is_none() => {
                    alone = Some(Instant::now());
                    continue;
                }
                () = self.stop.cancelled() => break false,
            };
            let bytes = match frame {
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => bytes,
                    // Trailers say nothing that is asked for.
                    Err(_) => continue,
                },
                Ok(None) => break true,
                Ok(Some(Err(error))) => {
                    tracing::debug!(%error, "an answer broke off");
                    break false;
                }
                Err(_) => {
                    tracing::info!("an answer took too long");
                    break false;
                }
            };
            let wanted = ear.hear(&bytes);
            if alone.is_none() && !wanted.is_empty() && !self.pass(wanted).await {
                alone = Some(Instant::now());
            }
        };
        let (told, rest) = ear.end(whole);
        Heard { told, rest: if whole { Ok(rest) } else { Err(Cut) } }
    }

    /// Hands a piece to the client. `false` if it is gone, or takes nothing any more.
    async fn pass(&self, piece: Bytes) -> bool {
        let patience: Duration = self.waits.client;
        matches!(timeout(patience, self.client.send(Ok(piece))).await, Ok(Ok(())))
    }
}
