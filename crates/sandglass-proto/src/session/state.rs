//! The state of a session behind its one lock: what frames do to it, and which frames it wants to send. Nothing
//! in here does I/O or waits.
//!
//! Everything that a peer can make grow has a bound: flows ([`MAX_FLOWS`]), what a flow has received and nobody
//! read ([`INITIAL_WINDOW`], or [`WINDOW`] for [`WIDE_FLOWS`] of them), what it wants to send ([`FULL_DATA`], or
//! [`SEND_BUFFER`] for [`BULK_FLOWS`] of them), control messages ([`MAX_EVENTS`], [`EVENT_BYTES`]) and small frames (one of each kind per flow, and one reset per flow that was open).

mod flow;
mod outgoing;

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;

use bytes::Bytes;
use tokio::sync::Notify;

use super::error::{Closed, FlowError, ResetCode};
use super::frame::{Epoch, FLAG_MORE, Frame, HEADER_LEN, Kind, MAX_PAYLOAD, Noise};
use super::{INITIAL_WINDOW, MAX_FLOWS, WIDE_FLOWS, WINDOW};
use crate::control::MAX_CONTROL_LEN;
use flow::FlowState;

/// Data of a full frame, in bytes. With its header it fills whole pages of a pipe.
const FULL_DATA: usize = MAX_PAYLOAD - HEADER_LEN;
/// What a flow may hold back for sending, in bytes: a few full frames, because in a sandbox it is dear to wait for
/// each one to be taken.
const SEND_BUFFER: usize = 4 * FULL_DATA;
/// If so many flows have something to send, each may hold back only one frame.
const BULK_FLOWS: usize = 16;
/// Control messages that were received and not yet taken.
const MAX_EVENTS: usize = 64;
/// Their length together, in bytes.
const EVENT_BYTES: usize = 4 * MAX_CONTROL_LEN;
/// Control messages that were sent and not yet written, in bytes.
const CONTROL_OUT_BYTES: usize = 2 * MAX_CONTROL_LEN;
/// Small frames that wait; only a peer that breaks the rules gets near.
const MAX_URGENT: usize = 4 * MAX_FLOWS;

/// The two ends differ in who attaches and who opens flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Server,
    Agent,
}

/// Names a flow among those of all attachments: ids start again with each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    attachment: u64,
    id: u32,
}

#[cfg(test)]
impl Key {
    pub(super) fn id(self) -> u32 {
        self.id
    }
}

/// Received and not yet taken by the owner of the session.
#[derive(Debug)]
pub(super) enum Event {
    Attached,
    Message(Vec<u8>),
}

/// A small frame that waits to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Urgent {
    Open(u32),
    Opened(u32),
    Window(u32),
    Reset(u32, ResetCode),
}

impl Urgent {
    const fn is_about_live(self, id: u32) -> bool {
        match self {
            Self::Open(flow) | Self::Opened(flow) | Self::Window(flow) => flow == id,
            Self::Reset(..) => false,
        }
    }
}

/// Counters of a session, for metrics and tests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// What the decoder threw away.
    pub noise: Noise,
    /// Intact frames that were received.
    pub frames: u64,
    /// Those among them that were of another epoch, of an unknown kind or about no open flow.
    pub ignored_frames: u64,
    /// Control messages that were too long or too many.
    pub dropped_messages: u64,
    /// Flows that were given up because the peer broke the rules.
    pub violations: u64,
    /// Flows that are open now.
    pub flows: usize,
}

#[derive(Debug)]
pub(super) struct State {
    role: Role,
    /// `None` at an agent that no server attached to.
    epoch: Option<Epoch>,
    attachment: u64,
    /// The server still has to write its padding and `ATTACH`.
    preamble: bool,
    closed: Option<Closed>,

    flows: HashMap<Key, FlowState>,
    /// How many of `flows` belong to the current attachment.
    live: usize,
    /// How many of `flows` have the full window.
    wide: usize,
    last_id: u32,
    /// Flows that the agent has not accepted yet.
    backlog: VecDeque<u32>,

    /// Flows with data or an end to send, in the order of their turns.
    ready: VecDeque<u32>,
    urgent: VecDeque<Urgent>,
    urgent_resets: usize,
    control_out: VecDeque<Bytes>,
    control_out_bytes: usize,
    ping: Option<u64>,
    pong: Option<u64>,
    held: bool,
    /// The driver is writing what it took last.
    in_flight: bool,
    writer: Option<Waker>,

    events: VecDeque<Event>,
    event_bytes: usize,
    message: Vec<u8>,
    /// The rest of a message that was too long is being skipped.
    skipping: bool,
    /// `Attached` is among the events.
    unseen_attachment: bool,
    pings_sent: u64,
    pongs_seen: u64,
    stats: Stats,

    /// To wake once the lock is released.
    wakes: Vec<Waker>,
    /// To drop once the lock is released: it may be the last thing that holds a task, and so a flow.
    retired: Vec<Waker>,
    changed: bool,
}

/// A [`State`] and those who wait for it to change.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

impl Shared {
    pub(super) fn new(state: State) -> Self {
        Self { state: Mutex::new(state), changed: Notify::new() }
    }

    /// Runs `act` under the lock, and leaves those to wake to the next [`Self::with`].
    pub(super) fn quietly(&self, act: impl FnOnce(&mut State)) {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Runs `act` under the lock, and wakes afterwards.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut state);
        let wakes = std::mem::take(&mut state.wakes);
        let retired = std::mem::take(&mut state.retired);
        let changed = std::mem::take(&mut state.changed);
        drop(state);
        drop(retired);
        wakes.into_iter().for_each(Waker::wake);
        if changed {
            self.changed.notify_waiters();
        }
        result
    }

    /// Waits until `check` has a result. Cancel safe.
    pub(super) async fn wait<T>(&self, mut check: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            if let Some(result) = self.with(&mut check) {
                return result;
            }
            changed.await;
        }
    }

    pub(super) fn close(&self, why: Closed) {
        self.with(|state| state.close(why));
    }
}

impl State {
    pub(super) fn server(epoch: Epoch) -> Self {
        Self { epoch: Some(epoch), preamble: true, ..Self::agent() }.with_role(Role::Server)
    }

    fn with_role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    pub(super) fn agent() -> Self {
        Self {
            role: Role::Agent,
            epoch: None,
            attachment: 0,
            preamble: false,
            closed: None,
            flows: HashMap::new(),
            live: 0,
            wide: 0,
            last_id: 0,
            backlog: VecDeque::new(),
            ready: VecDeque::new(),
            urgent: VecDeque::new(),
            urgent_resets: 0,
            control_out: VecDeque::new(),
            control_out_bytes: 0,
            ping: None,
            pong: None,
            held: false,
            in_flight: false,
            writer: None,
            events: VecDeque::new(),
            event_bytes: 0,
            message: Vec::new(),
            skipping: false,
            unseen_attachment: false,
            pings_sent: 0,
            pongs_seen: 0,
            stats: Stats::default(),
            wakes: Vec::new(),
            retired: Vec::new(),
            changed: false,
        }
    }

    pub(super) fn closed(&self) -> Option<Closed> {
        self.closed
    }

    /// Ends the session; the first reason counts.
    pub(super) fn close(&mut self, why: Closed) {
        if self.closed.is_some() {
            return;
        }
        self.closed = Some(why);
        self.end_all_flows(FlowError::Closed, false);
        self.forget_outgoing();
        self.changed = true;
        self.wakes.extend(self.writer.take());
    }

    pub(super) fn stats(&self) -> Stats {
        Stats { flows: self.live, ..self.stats }
    }

    pub(super) fn set_noise(&mut self, noise: Noise) {
        self.stats.noise = noise;
    }

    /// Applies one frame from the peer.
    pub(super) fn on_frame(&mut self, frame: &Frame<'_>) {
        if self.closed.is_some() {
            return;
        }
        self.stats.frames += 1;
        let kind = Kind::from_wire(frame.kind);
        if self.role == Role::Agent && kind == Some(Kind::Attach) {
            self.on_attach(frame.epoch);
            return;
        }
        if self.epoch != Some(frame.epoch) {
            self.stats.ignored_frames += 1;
            return;
        }
        let known = match kind {
            Some(Kind::Control) => {
                self.on_control(frame);
                true
            }
            Some(Kind::Open) if self.role == Role::Agent => {
                self.on_open(frame.flow, frame.payload);
                true
            }
            Some(Kind::Opened) if self.role == Role::Server => self.on_opened(frame.flow),
            Some(Kind::Data) => self.on_data(frame.flow, frame.payload),
            Some(Kind::Fin) => self.on_fin(frame.flow),
            Some(Kind::Reset) => self.on_reset(frame.flow, frame.payload),
            Some(Kind::Window) => self.on_window(frame.flow, frame.payload),
            Some(Kind::Ping) => self.on_ping(frame.payload),
            Some(Kind::Pong) => self.on_pong(frame.payload),
            Some(Kind::Attach | Kind::Open | Kind::Opened) | None => false,
        };
        if !known {
            self.stats.ignored_frames += 1;
        }
    }

    /// A server attached: nothing that belongs to an older one is sent, answered or delivered any more.
    fn on_attach(&mut self, epoch: Epoch) {
        self.end_all_flows(FlowError::Detached, true);
        self.forget_outgoing();
        self.epoch = Some(epoch);
        self.attachment += 1;
        self.live = 0;
        self.held = false;
        self.message = Vec::new();
        self.skipping = false;
        self.events.clear();
        self.event_bytes = 0;
        self.events.push_back(Event::Attached);
        self.unseen_attachment = true;
        self.changed = true;
    }

    fn forget_outgoing(&mut self) {
        self.backlog.clear();
        self.ready.clear();
        self.urgent.clear();
        self.urgent_resets = 0;
        self.control_out.clear();
        self.control_out_bytes = 0;
        self.ping = None;
        self.pong = None;
    }

    fn on_control(&mut self, frame: &Frame<'_>) {
        let last = frame.flags & FLAG_MORE == 0;
        if !self.skipping && self.message.len() + frame.payload.len() <= MAX_CONTROL_LEN {
            self.message.extend_from_slice(frame.payload);
        } else {
            self.skipping = true;
            self.message = Vec::new();
        }
        if !last {
            return;
        }
        let message = std::mem::take(&mut self.message);
        let skipped = std::mem::take(&mut self.skipping);
        if skipped || self.events.len() >= MAX_EVENTS || self.event_bytes + message.len() > EVENT_BYTES {
            self.stats.dropped_messages += 1;
            return;
        }
        self.event_bytes += message.len();
        self.events.push_back(Event::Message(message));
        self.changed = true;
    }

    pub(super) fn take_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        match &event {
            Event::Attached => self.unseen_attachment = false,
            Event::Message(message) => self.event_bytes -= message.len(),
        }
        Some(event)
    }

    /// A message could not be understood.
    pub(super) fn count_dropped_message(&mut self) {
        self.stats.dropped_messages += 1;
    }

    /// Only the newest is answered; the peer's number says up to which.
    fn on_ping(&mut self, payload: &[u8]) -> bool {
        let Some(number) = payload.first_chunk() else { return false };
        self.pong = Some(u64::from_le_bytes(*number));
        self.wake_writer();
        true
    }

    fn on_pong(&mut self, payload: &[u8]) -> bool {
        let Some(number) = payload.first_chunk() else { return false };
        let number = u64::from_le_bytes(*number);
        if number <= self.pings_sent && number > self.pongs_seen {
            self.pongs_seen = number;
            self.changed = true;
        }
        true
    }

    /// Asks for a sign of life; see [`Self::pong_seen`].
    pub(super) fn send_ping(&mut self) -> u64 {
        self.pings_sent += 1;
        self.ping = Some(self.pings_sent);
        self.wake_writer();
        self.pings_sent
    }

    pub(super) fn pong_seen(&self, number: u64) -> bool {
        self.pongs_seen >= number
    }

    fn wake_writer(&mut self) {
        self.wakes.extend(self.writer.take());
    }

    /// What a flow received and nobody read, in bytes.
    #[cfg(test)]
    pub(super) fn unread(&self, key: Key) -> usize {
        self.flows.get(&key).map_or(0, FlowState::unread)
    }

    /// Bytes of memory that the peer's frames made this state hold, about.
    #[cfg(test)]
    pub(super) fn footprint(&self) -> usize {
        let flows: usize = self.flows.values().map(FlowState::footprint).sum();
        let events: usize = self
            .events
            .iter()
            .map(|event| match event {
                Event::Attached => 0,
                Event::Message(message) => message.capacity(),
            })
            .sum();
        let queues = self.ready.capacity() * size_of::<u32>()
            + self.backlog.capacity() * size_of::<u32>()
            + self.urgent.capacity() * size_of::<Urgent>()
            + self.events.capacity() * size_of::<Event>();
        flows + events + queues + self.message.capacity() + self.control_out_bytes
    }
}
