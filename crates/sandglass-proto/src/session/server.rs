//! The server's side of a session.

use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};

use super::error::{Closed, OpenError, SendError};
use super::flow::Flow;
use super::frame::Epoch;
use super::link::Link;
use super::state::{Event, Shared, State, Stats};
use super::target::Target;
use crate::control::{FromAgent, ToAgent};

/// Closes the session when the last handle of its owner is gone.
#[derive(Debug)]
pub(super) struct Owner(pub(super) Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.close(Closed::Local);
    }
}

/// A server's attachment to an agent. Clones are the same session; dropping the last one ends it, and with it
/// all flows.
#[derive(Debug, Clone)]
pub struct Session {
    owner: Arc<Owner>,
}

impl Session {
    /// A session and what drives it. The epoch must be made for this attachment from a good source of
    /// randomness. The padding and `ATTACH` are what the link sends first; the agent answers with
    /// [`FromAgent::Hello`].
    #[must_use]
    pub fn new(epoch: Epoch) -> (Self, Link) {
        let shared = Arc::new(Shared::new(State::server(epoch)));
        let link = Link::new(&shared, Some(epoch));
        (Self { owner: Arc::new(Owner(shared)) }, link)
    }

    /// As [`Self::new`], with a future that drives the session over two asynchronous byte streams: spawn it. It is
    /// ready when the session has ended.
    pub fn connect<R, W>(
        reader: R,
        writer: W,
        epoch: Epoch,
    ) -> (Self, impl Future<Output = Closed> + Send + use<R, W>)
    where
        R: AsyncRead + Send,
        W: AsyncWrite + Send,
    {
        let (session, link) = Self::new(epoch);
        (session, link.run(reader, writer))
    }

    /// Opens a flow, and waits until the agent has connected it; how long is up to the caller. Cancel safe: a
    /// flow that nobody waits for is reset.
    ///
    /// # Errors
    /// [`OpenError`]; a target where nothing listens is [`OpenError::Refused`] with
    /// [`ResetCode::Refused`](super::ResetCode::Refused).
    pub async fn open(&self, target: Target) -> Result<Flow, OpenError> {
        let shared = &self.owner.0;
        let key = shared.with(|state| state.open(target))?;
        let flow = Flow::new(Arc::clone(shared), key);
        poll_fn(|cx| flow.shared().with(|state| state.poll_opened(flow.key(), cx))).await?;
        Ok(flow)
    }

    /// Sends a control message; waits while too much is waiting already. Control messages overtake data and pass
    /// a [`Self::hold`].
    ///
    /// # Errors
    /// [`SendError`].
    pub async fn send_control(&self, message: &ToAgent) -> Result<(), SendError> {
        send(&self.owner.0, message).await
    }

    /// The next control message of the agent. Cancel safe. What is no control message is skipped and counted; so
    /// is what comes when 64 messages wait already.
    ///
    /// # Errors
    /// The session ended, and everything before was taken.
    pub async fn recv_control(&self) -> Result<FromAgent, Closed> {
        let shared = &self.owner.0;
        loop {
            let event = shared.wait(next_event).await?;
            if let Event::Message(message) = event {
                match serde_json::from_slice(&message) {
                    Ok(message) => return Ok(message),
                    Err(_) => shared.with(State::count_dropped_message),
                }
            }
        }
    }

    /// Waits until the agent shows that it is alive; how long is up to the caller. No answer comes while
    /// either side holds. Cancel safe.
    ///
    /// # Errors
    /// The session ended.
    pub async fn ping(&self) -> Result<(), Closed> {
        let shared = &self.owner.0;
        let number = shared.with(State::send_ping);
        shared
            .wait(|state| match state.closed() {
                _ if state.pong_seen(number) => Some(Ok(())),
                closed => closed.map(Err),
            })
            .await
    }

    /// Holds everything but control messages back, and waits until the frame in flight is written. Do it before
    /// sending [`ToAgent::Freeze`]: then that is the last thing in the stream.
    ///
    /// # Errors
    /// The session ended.
    pub async fn hold(&self) -> Result<(), Closed> {
        hold(&self.owner.0).await
    }

    /// Ends a [`Self::hold`].
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

    /// Ends the session and all its flows at once. The agent is not told, and stays.
    pub fn close(&self) {
        self.owner.0.close(Closed::Local);
    }

    /// Counters for metrics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.owner.0.with(|state| state.stats())
    }
}

pub(super) async fn send(shared: &Shared, message: &(impl Serialize + Sync)) -> Result<(), SendError> {
    let message = Bytes::from(serde_json::to_vec(message).map_err(SendError::Encode)?);
    shared.wait(|state| state.send_control(&message)).await
}

pub(super) fn next_event(state: &mut State) -> Option<Result<Event, Closed>> {
    match state.take_event() {
        Some(event) => Some(Ok(event)),
        None => state.closed().map(Err),
    }
}

pub(super) async fn hold(shared: &Shared) -> Result<(), Closed> {
    shared.with(|state| state.set_held(true));
    flush(shared).await
}

pub(super) async fn flush(shared: &Shared) -> Result<(), Closed> {
    shared
        .wait(|state| match state.closed() {
            Some(closed) => Some(Err(closed)),
            None => state.is_flushed().then_some(Ok(())),
        })
        .await
}
