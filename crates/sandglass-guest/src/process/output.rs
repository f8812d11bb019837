//! What a process writes, on its way to whoever is attached.
//!
//! Output goes to all subscribers that are attached at the time, and a subscriber that does not read holds the
//! process up: its queue and then the pipe fill. The last bytes are kept as well, for one case only: a server
//! that crashed and came back. What was on its way to it is lost with its session, so the first subscriber of a
//! later session gets the kept bytes before anything else, at the price of seeing some of them twice.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::reaper::{Child, Status};

/// Upper bound for one chunk of a pipe, in bytes.
pub(crate) const MAX_PIPE_CHUNK: usize = 32 * 1024;

/// Upper bound for one chunk of a terminal, in bytes.
pub(crate) const MAX_PTY_CHUNK: usize = 16 * 1024;

/// Chunks that may wait for one subscriber. With what HTTP, a flow and the pipe hold, less than 1 MiB in all.
const QUEUE: usize = 4;

/// Bytes of output that are kept for a server that comes back.
const KEPT: usize = 256 * 1024;

/// Subscribers of one process.
const MAX_SUBSCRIBERS: usize = 64;

/// How long a subscriber that does not read may hold up the last words of a process that has ended.
const LAST_WORDS: Duration = Duration::from_secs(30);

/// Where a process wrote to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    /// Its standard output.
    Stdout,
    /// Its standard error.
    Stderr,
    /// Its terminal.
    Pty,
}

/// Some output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Where to.
    pub channel: Channel,
    /// What.
    pub bytes: Bytes,
}

/// Where a subscriber came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Over the session with the server, in its n-th life as the agent counts them.
    Session(u32),
    /// From inside the sandbox, or a development listener: no server's crash concerns it.
    Local,
}

/// Why a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// By itself, or by somebody's signal.
    Itself,
    /// Its time limit was reached.
    TimeLimit,
    /// The sandbox was short of memory.
    Memory,
}

/// How and when a process ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    /// How.
    pub status: Status,
    /// Why.
    pub cause: Cause,
    /// When.
    pub at: Instant,
    /// In which life of the session.
    pub epoch: u32,
}

/// What a new subscriber gets.
#[derive(Debug)]
pub(crate) struct Subscription {
    /// Output from before, first.
    pub backlog: VecDeque<Chunk>,
    /// Output from here on; closed when the process has ended.
    pub live: mpsc::Receiver<Chunk>,
}

/// The last bytes of output. They are copied here, into one piece of memory: however small the pieces are in which they
/// come, none of them keeps a buffer alive, nor a hole in the heap where one was.
#[derive(Debug, Default)]
struct Ring {
    bytes: VecDeque<u8>,
    /// Where they were written to, and how many in a row.
    runs: VecDeque<(Channel, usize)>,
}

impl Ring {
    fn push(&mut self, chunk: &Chunk) {
        let bytes = &chunk.bytes[chunk.bytes.len().saturating_sub(KEPT)..];
        let mut excess = (self.bytes.len() + bytes.len()).saturating_sub(KEPT);
        self.bytes.drain(..excess);
        while let Some((_, len)) = self.runs.front_mut().filter(|_| excess > 0) {
            let gone = excess.min(*len);
            (*len, excess) = (*len - gone, excess - gone);
            if *len == 0 {
                self.runs.pop_front();
            }
        }
        self.bytes.extend(bytes);
        match self.runs.back_mut() {
            Some((channel, len)) if *channel == chunk.channel => *len += bytes.len(),
            _ => self.runs.push_back((chunk.channel, bytes.len())),
        }
    }

    fn chunks(&self) -> VecDeque<Chunk> {
        let mut bytes = Bytes::from(self.bytes.iter().copied().collect::<Vec<_>>());
        let mut chunks = VecDeque::new();
        for (channel, len) in &self.runs {
            let mut run = bytes.split_to(*len);
            while !run.is_empty() {
                let bytes = run.split_to(run.len().min(MAX_PTY_CHUNK));
                chunks.push_back(Chunk { channel: *channel, bytes });
            }
        }
        chunks
    }
}

#[derive(Debug)]
struct Subscriber {
    queue: mpsc::Sender<Chunk>,
    origin: Origin,
}

#[derive(Debug, Default)]
struct State {
    subscribers: Vec<Subscriber>,
    ring: Ring,
    /// The latest life of the session in which someone got output.
    delivered: u32,
    end: Option<End>,
}

/// The output of one process.
#[derive(Debug, Default)]
pub(crate) struct Output {
    state: Mutex<State>,
}

impl Output {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attaches a subscriber; `None` if there are too many.
    pub(crate) fn attach(&self, origin: Origin) -> Option<Subscription> {
        let (queue, live) = mpsc::channel(QUEUE);
        let mut state = self.state();
        let backlog = match origin {
            Origin::Session(epoch) if epoch > state.delivered && state.delivered > 0 => state.ring.chunks(),
            _ => VecDeque::new(),
        };
        if let Origin::Session(epoch) = origin {
            state.delivered = state.delivered.max(epoch);
        }
        if state.end.is_none() {
            state.subscribers.retain(|subscriber| !subscriber.queue.is_closed());
            if state.subscribers.len() >= MAX_SUBSCRIBERS {
                return None;
            }
            state.subscribers.push(Subscriber { queue, origin });
        }
        Some(Subscription { backlog, live })
    }

    /// Hands a chunk to everyone attached, as fast as the slowest takes it.
    pub(crate) async fn publish(&self, chunk: Chunk, child: &Child) {
        let targets: Vec<_> = {
            let mut state = self.state();
            state.ring.push(&chunk);
            state.subscribers.retain(|subscriber| !subscriber.queue.is_closed());
            state.subscribers.iter().map(|subscriber| subscriber.queue.clone()).collect()
        };
        for target in targets {
            if target.try_send(chunk.clone()).is_ok() {
                continue;
            }
            let too_late = async {
                child.wait().await;
                tokio::time::sleep(LAST_WORDS).await;
            };
            tokio::select! {
                _ = target.send(chunk.clone()) => {}
                () = too_late => self.state().subscribers.retain(|s| !s.queue.same_channel(&target)),
            }
        }
    }

    /// Lets go of every subscriber of an earlier life of the session: its connection is gone.
    pub(crate) fn forget_before(&self, epoch: u32) {
        self.state().subscribers.retain(|subscriber| match subscriber.origin {
            Origin::Session(theirs) => theirs >= epoch,
            Origin::Local => true,
        });
    }

    /// Records the end, after the last chunk.
    pub(crate) fn finish(&self, end: End) {
        let mut state = self.state();
        state.end = Some(end);
        state.subscribers.clear();
    }

    /// The end, if it was recorded.
    pub(crate) fn end(&self) -> Option<End> {
        self.state().end
    }

    /// Bytes of output that are kept.
    pub(crate) fn kept(&self) -> usize {
        self.state().ring.bytes.len()
    }
}

#[cfg(test)]
mod tests;
