//! The agent's side of a session.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::error::{Closed, ResetCode, SendError};
use super::flow::Flow;
use super::link::Link;
use super::server::{Owner, flush, hold, next_event, send};
use super::state::{Event, Shared, State, Stats};
use super::target::Target;
use crate::control::{FromAgent, ToAgent};

/// What the control lane brings to the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentEvent {
    /// A server attached, and expects [`FromAgent::Hello`]. All flows of the one before are gone, as are its
    /// messages and a hold.
    Attached,
    /// A message of the server that attached last.
    Control(ToAgent),
}

/// The agent's end, which outlives the servers that attach to it. Clones are the same session; dropping the last
/// one ends it.
#[derive(Debug, Clone)]
pub struct AgentSession {
    owner: Arc<Owner>,
}

impl AgentSession {
    /// A session that nobody attached to, and what drives it.
    #[must_use]
    pub fn new() -> (Self, Link) {
        let shared = Arc::new(Shared::new(State::agent()));
        let link = Link::new(&shared, None);
        (Self { owner: Arc::new(Owner(shared)) }, link)
    }

    /// As [`Self::new`], driven by two threads: see [`Link::spawn_threads`].
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(
        reader: impl Read + Send + 'static,
        writer: impl Write + Send + 'static,
    ) -> io::Result<(Self, [JoinHandle<()>; 2])> {
        let (session, link) = Self::new();
        let threads = link.spawn_threads(reader, writer)?;
        Ok((session, threads))
    }

    /// The next thing on the control lane. Cancel safe. Messages that this agent does not know are skipped.
    ///
    /// # Errors
    /// The session ended, and everything before was taken.
    pub async fn next_event(&self) -> Result<AgentEvent, Closed> {
        let shared = &self.owner.0;
        loop {
            match shared.wait(next_event).await? {
                Event::Attached => return Ok(AgentEvent::Attached),
                Event::Message(message) => match serde_json::from_slice(&message) {
                    Ok(message) => return Ok(AgentEvent::Control(message)),
                    Err(_) => shared.with(State::count_dropped_message),
                },
            }
        }
    }

    /// Sends a control message; waits while too much is waiting already. Control messages overtake data and pass
    /// a [`Self::hold`].
    ///
    /// # Errors
    /// [`SendError`]; above all [`SendError::Detached`] if the server that it was meant for is gone.
    pub async fn send_control(&self, message: &FromAgent) -> Result<(), SendError> {
        send(&self.owner.0, message).await
    }

    /// The next flow that the server opened. Cancel safe.
    ///
    /// # Errors
    /// The session ended.
    pub async fn accept(&self) -> Result<Incoming, Closed> {
        let shared = &self.owner.0;
        let (key, target) = shared
            .wait(|state| match state.closed() {
                Some(closed) => Some(Err(closed)),
                None => state.take_backlog().map(Ok),
            })
            .await?;
        Ok(Incoming { target, flow: Flow::new(Arc::clone(shared), key) })
    }

    /// Holds everything but control messages back, and waits until the frame in flight is written. Do it before
    /// sending [`FromAgent::Frozen`]: then that is the last thing in the stream.
    ///
    /// # Errors
    /// The session ended.
    pub async fn hold(&self) -> Result<(), Closed> {
        hold(&self.owner.0).await
    }

    /// Ends a [`Self::hold`]; so does the next attachment.
    pub fn release(&self) {
        self.owner.0.with(|state| state.set_held(false));
    }

    /// Waits until everything that may be written now is written.
    ///
    /// # Errors
    /// The session ended.
    pub async fn flush(&self) -> Result<(), Closed> {
        flush(&self.owner.0).await
    }

    /// Waits until the session ends.
    pub async fn closed(&self) -> Closed {
        self.owner.0.wait(|state| state.closed()).await
    }

    /// Counters for metrics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.owner.0.with(|state| state.stats())
    }
}

/// A flow that the server wants. Dropping it resets the flow.
#[derive(Debug)]
pub struct Incoming {
    target: Target,
    flow: Flow,
}

impl Incoming {
    /// Where it shall lead.
    #[must_use]
    pub fn target(&self) -> Target {
        self.target
    }

    /// The target is connected: tells the server, and gives the flow.
    #[must_use]
    pub fn accept(self) -> Flow {
        self.flow.accept();
        self.flow
    }

    /// The target can't be connected.
    pub fn refuse(self, code: ResetCode) {
        self.flow.reset(code);
    }
}
