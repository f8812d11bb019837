//! One flow: what its handle and the peer's frames do to it.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::task::{Context, Poll, Waker};

use tokio::io::ReadBuf;

use super::{
    BULK_FLOWS, FULL_DATA, INITIAL_WINDOW, Key, MAX_FLOWS, MAX_URGENT, SEND_BUFFER, State, Urgent,
    WIDE_FLOWS, WINDOW,
};
use crate::session::error::{FlowError, OpenError, ResetCode};
use crate::session::target::Target;

/// The receiver grants credit again when this part of the window was read, so that a sender seldom has to wait.
const GRANT_PART: u32 = 4;
/// More credit than this at once is clipped.
const MAX_CREDIT: u32 = 1 << 30;
/// An empty receive buffer larger than this is given back.
const KEPT_RECEIVE_BUFFER: usize = 128 * 1024;
/// Who sends or receives so many bytes at once goes on to, and gets a buffer that has not to grow.
const LARGE: usize = 16 * 1024;

/// The end of the data that this side sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendEnd {
    Open,
    /// After what is in the send buffer.
    Queued,
    Sent,
}

#[derive(Debug)]
pub(super) struct FlowState {
    pub(super) target: Option<Target>,
    /// `OPEN` was sent (server) or received (agent).
    pub(super) announced: bool,
    /// The agent connected it.
    opened: bool,
    /// A handle exists. Without one it is in the backlog, or finishing on its own after a shutdown.
    handle: bool,

    received: VecDeque<u8>,
    /// What the peer may still send, in bytes.
    window: u32,
    /// What was read and not yet granted again, in bytes.
    consumed: u32,
    /// A `WINDOW` frame waits.
    granting: bool,
    /// It has the full window.
    wide: bool,
    finished: bool,

    pub(super) unsent: Vec<u8>,
    /// What the peer can still take beyond `unsent`, in bytes.
    credit: u32,
    pub(super) send_end: SendEnd,
    /// It is in `ready`.
    pub(super) queued: bool,

    failed: Option<FlowError>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl FlowState {
    fn new(target: Target) -> Self {
        Self {
            target: Some(target),
            announced: false,
            opened: false,
            handle: false,
            received: VecDeque::new(),
            window: INITIAL_WINDOW,
            consumed: 0,
            granting: false,
            wide: false,
            finished: false,
            unsent: Vec::new(),
            credit: INITIAL_WINDOW,
            send_end: SendEnd::Open,
            queued: false,
            failed: None,
            reader: None,
            writer: None,
        }
    }

    fn fail(&mut self, why: FlowError, wakes: &mut Vec<Waker>) {
        self.failed = Some(why);
        self.unsent = Vec::new();
        self.queued = false;
        wakes.extend(self.reader.take());
        wakes.extend(self.writer.take());
    }

    /// Appends what the peer sent within its window. The buffer never grows beyond the window.
    fn receive(&mut self, payload: &[u8]) {
        let needed = self.received.len() + payload.len();
        let capacity = self.received.capacity();
        if needed > capacity {
            let large = self.wide && payload.len() >= LARGE;
            let wanted =
                needed.max(if large { WINDOW as usize } else { (2 * capacity).min(WINDOW as usize) });
            self.received.reserve_exact(wanted - self.received.len());
        }
        self.received.extend(payload);
    }

    /// Takes what is to be sent, and lets the flow's owner write again.
    pub(super) fn take_unsent(&mut self, wakes: &mut Vec<Waker>) -> Vec<u8> {
        wakes.extend(self.writer.take());
        std::mem::take(&mut self.unsent)
    }

    #[cfg(test)]
    pub(super) fn unread(&self) -> usize {
        self.received.len()
    }

    #[cfg(test)]
    pub(super) fn footprint(&self) -> usize {
        size_of::<Self>() + self.received.capacity() + self.unsent.capacity()
    }
}

/// What the handle of a flow asks for.
impl State {
    /// Makes a flow of the server; the caller makes a handle from the key.
    pub(in crate::session) fn open(&mut self, target: Target) -> Result<Key, OpenError> {
        if let Some(closed) = self.closed {
            return Err(OpenError::Closed(closed));
        }
        if self.live >= MAX_FLOWS || self.urgent_resets >= MAX_FLOWS {
            return Err(OpenError::TooManyFlows);
        }
        loop {
            self.last_id = self.last_id.wrapping_add(1);
            let key = self.key(self.last_id);
            if let Entry::Vacant(entry) = self.flows.entry(key) {
                entry.insert(FlowState { handle: true, ..FlowState::new(target) });
                self.live += 1;
                self.urgent.push_back(Urgent::Open(key.id));
                self.wake_writer();
                return Ok(key);
            }
        }
    }

    /// Ready once the agent connected the flow, or did not.
    pub(in crate::session) fn poll_opened(
        &mut self,
        key: Key,
        cx: &Context<'_>,
    ) -> Poll<Result<(), OpenError>> {
        let closed = self.closed;
        let Some(flow) = self.flows.get_mut(&key) else {
            return Poll::Ready(Err(OpenError::Refused(ResetCode::Cancelled)));
        };
        if flow.opened {
            return Poll::Ready(Ok(()));
        }
        let refused = match (closed, flow.failed) {
            (Some(closed), _) => OpenError::Closed(closed),
            (None, Some(FlowError::Reset(code) | FlowError::Violation(code))) => OpenError::Refused(code),
            (None, Some(_)) => OpenError::Refused(ResetCode::Cancelled),
            (None, None) => {
                self.retired.extend(flow.reader.replace(cx.waker().clone()));
                return Poll::Pending;
            }
        };
        Poll::Ready(Err(refused))
    }

    /// The next flow for the agent to connect.
    pub(in crate::session) fn take_backlog(&mut self) -> Option<(Key, Target)> {
        loop {
            let id = self.backlog.pop_front()?;
            let key = self.key(id);
            if let Some(flow) = self.flows.get_mut(&key)
                && let Some(target) = flow.target.take()
            {
                flow.handle = true;
                return Some((key, target));
            }
        }
    }

    /// The agent connected the flow.
    pub(in crate::session) fn accept(&mut self, key: Key) {
        if let Some(flow) = self.flows.get_mut(&key)
            && flow.failed.is_none()
            && !flow.opened
        {
            flow.opened = true;
            self.urgent.push_back(Urgent::Opened(key.id));
            self.wake_writer();
        }
    }

    pub(in crate::session) fn poll_read(
        &mut self,
        key: Key,
        cx: &Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<(), FlowError>> {
        let Some(flow) = self.flows.get_mut(&key) else { return Poll::Ready(Err(FlowError::Closed)) };
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if flow.received.is_empty() {
            if flow.finished {
                return Poll::Ready(Ok(()));
            }
            if let Some(why) = flow.failed {
                return Poll::Ready(Err(why));
            }
            self.retired.extend(flow.reader.replace(cx.waker().clone()));
            return Poll::Pending;
        }
        let before = buf.remaining();
        let (front, back) = flow.received.as_slices();
        buf.put_slice(&front[..front.len().min(buf.remaining())]);
        buf.put_slice(&back[..back.len().min(buf.remaining())]);
        let count = before - buf.remaining();
        flow.received.drain(..count);
        if flow.received.is_empty() && flow.received.capacity() > KEPT_RECEIVE_BUFFER {
            flow.received = VecDeque::new();
        }
        // At most the window was received, so the count fits.
        flow.consumed += u32::try_from(count).unwrap_or(WINDOW);
        let live = !flow.finished && flow.failed.is_none();
        let window = if flow.wide { WINDOW } else { INITIAL_WINDOW };
        if live && flow.consumed >= window / GRANT_PART && !flow.granting {
            flow.granting = true;
            self.urgent.push_back(Urgent::Window(key.id));
            self.wake_writer();
        }
        Poll::Ready(Ok(()))
    }

    /// Accepts as much as the peer can take and the send buffer has room for.
    pub(in crate::session) fn poll_write(
        &mut self,
        key: Key,
        cx: &Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize, FlowError>> {
        let Some(flow) = self.flows.get_mut(&key) else { return Poll::Ready(Err(FlowError::Closed)) };
        if let Some(why) = flow.failed {
            return Poll::Ready(Err(why));
        }
        if flow.send_end != SendEnd::Open {
            return Poll::Ready(Err(FlowError::WriteAfterShutdown));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        // Those that hold back more than one frame are among the ready ones, so there are never more of them.
        let limit = if self.ready.len() < BULK_FLOWS { SEND_BUFFER } else { FULL_DATA };
        let room = u32::try_from(limit.saturating_sub(flow.unsent.len())).unwrap_or(0).min(flow.credit);
        let count = room.min(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        if count == 0 {
            self.retired.extend(flow.writer.replace(cx.waker().clone()));
            return Poll::Pending;
        }
        let accepted = &bytes[..count as usize];
        if flow.unsent.capacity() == 0 && accepted.len() >= LARGE {
            flow.unsent = Vec::with_capacity(room as usize);
        }
        flow.unsent.extend_from_slice(accepted);
        flow.credit -= count;
        self.make_ready(key);
        Poll::Ready(Ok(accepted.len()))
    }

    /// Ends this side's data; what was written before is still sent.
    pub(in crate::session) fn shutdown(&mut self, key: Key) -> Result<(), FlowError> {
        let Some(flow) = self.flows.get_mut(&key) else { return Err(FlowError::Closed) };
        if flow.send_end != SendEnd::Open {
            return Ok(());
        }
        if let Some(why) = flow.failed {
            return Err(why);
        }
        flow.send_end = SendEnd::Queued;
        self.make_ready(key);
        Ok(())
    }

    /// Gives the flow up with a reason. The handle stays valid and fails from now on.
    pub(in crate::session) fn reset(&mut self, key: Key, code: ResetCode) {
        if let Some(flow) = self.flows.get_mut(&key)
            && flow.failed.is_none()
        {
            flow.fail(FlowError::Reset(code), &mut self.wakes);
            let announced = flow.announced;
            self.unqueue(key.id);
            if announced {
                self.push_reset(key.id, code);
            }
        }
    }

    /// The handle is gone.
    pub(in crate::session) fn drop_handle(&mut self, key: Key) {
        let Some(flow) = self.flows.get_mut(&key) else { return };
        flow.handle = false;
        self.retired.extend(flow.reader.take());
        self.retired.extend(flow.writer.take());
        if flow.failed.is_some() || (flow.send_end == SendEnd::Sent && flow.finished) {
            self.forget(key);
        } else if flow.send_end == SendEnd::Queued {
            // Like a socket that is closed after a shutdown: what was written still goes out.
            flow.received = VecDeque::new();
        } else {
            self.reset(key, ResetCode::Cancelled);
            self.forget(key);
        }
    }
}

/// What the peer's frames do. Each returns whether the frame was about a flow that exists.
impl State {
    pub(super) fn on_open(&mut self, id: u32, target: &[u8]) {
        let key = self.key(id);
        if self.flows.contains_key(&key) {
            self.violate(key, ResetCode::Protocol);
            return;
        }
        let refused = match Target::decode(target) {
            _ if self.live >= MAX_FLOWS => ResetCode::TooManyFlows,
            None => ResetCode::Unsupported,
            Some(target) => {
                self.flows.insert(key, FlowState { announced: true, ..FlowState::new(target) });
                self.live += 1;
                self.backlog.push_back(id);
                self.changed = true;
                return;
            }
        };
        if self.urgent.len() < MAX_URGENT {
            self.push_reset(id, refused);
        }
    }

    pub(super) fn on_opened(&mut self, id: u32) -> bool {
        let key = self.key(id);
        let Some(flow) = self.flows.get_mut(&key).filter(|flow| flow.failed.is_none()) else { return false };
        flow.opened = true;
        self.wakes.extend(flow.reader.take());
        true
    }

    pub(super) fn on_data(&mut self, id: u32, payload: &[u8]) -> bool {
        let key = self.key(id);
        let Some(flow) = self.flows.get_mut(&key).filter(|flow| flow.failed.is_none()) else { return false };
        if flow.finished {
            self.violate(key, ResetCode::Protocol);
            return true;
        }
        match u32::try_from(payload.len()).ok().and_then(|length| flow.window.checked_sub(length)) {
            Some(window) => flow.window = window,
            None => {
                self.violate(key, ResetCode::WindowExceeded);
                return true;
            }
        }
        let abandoned = !flow.handle && flow.send_end != SendEnd::Open;
        if !abandoned {
            flow.receive(payload);
            self.wakes.extend(flow.reader.take());
        }
        true
    }

    pub(super) fn on_fin(&mut self, id: u32) -> bool {
        let key = self.key(id);
        let Some(flow) = self.flows.get_mut(&key).filter(|flow| flow.failed.is_none()) else { return false };
        flow.finished = true;
        self.wakes.extend(flow.reader.take());
        true
    }

    pub(super) fn on_reset(&mut self, id: u32, payload: &[u8]) -> bool {
        let key = self.key(id);
        let Some(flow) = self.flows.get_mut(&key).filter(|flow| flow.failed.is_none()) else { return false };
        let code = payload.first_chunk().map_or(0, |code| u32::from_le_bytes(*code));
        flow.fail(FlowError::Reset(ResetCode::from_wire(code)), &mut self.wakes);
        let handle = flow.handle;
        self.unqueue(id);
        if !handle {
            self.backlog.retain(|waiting| *waiting != id);
            self.forget(key);
        }
        true
    }

    pub(super) fn on_window(&mut self, id: u32, payload: &[u8]) -> bool {
        let key = self.key(id);
        let Some(flow) = self.flows.get_mut(&key).filter(|flow| flow.failed.is_none()) else { return false };
        let Some(credit) = payload.first_chunk() else { return false };
        flow.credit = flow.credit.saturating_add(u32::from_le_bytes(*credit)).min(MAX_CREDIT);
        self.wakes.extend(flow.writer.take());
        true
    }

    /// The peer broke the rules on this flow: it is given up, and what it received is not delivered.
    fn violate(&mut self, key: Key, code: ResetCode) {
        let Some(flow) = self.flows.get_mut(&key) else { return };
        if flow.failed.is_some() {
            return;
        }
        self.stats.violations += 1;
        flow.fail(FlowError::Violation(code), &mut self.wakes);
        flow.received = VecDeque::new();
        let handle = flow.handle;
        self.unqueue(key.id);
        self.push_reset(key.id, code);
        if !handle {
            self.backlog.retain(|waiting| *waiting != key.id);
            self.forget(key);
        }
    }
}

impl State {
    pub(super) fn key(&self, id: u32) -> Key {
        Key { attachment: self.attachment, id }
    }

    /// Fails all flows of the current attachment; those without a handle are forgotten.
    pub(super) fn end_all_flows(&mut self, why: FlowError, discard: bool) {
        let wakes = &mut self.wakes;
        self.flows.retain(|_, flow| {
            if flow.failed.is_none() {
                flow.fail(why, wakes);
            }
            if discard {
                flow.received = VecDeque::new();
                flow.wide = false;
                // Data was lost, so this must not look like an orderly end.
                flow.finished = false;
            }
            flow.handle
        });
        self.wide = self.flows.values().filter(|flow| flow.wide).count();
        let attachment = self.attachment;
        self.live = self.flows.keys().filter(|key| key.attachment == attachment).count();
    }

    /// After the end of its data was sent: a flow without a handle has nothing more to do.
    pub(super) fn after_fin(&mut self, key: Key) {
        let Some(flow) = self.flows.get_mut(&key) else { return };
        flow.send_end = SendEnd::Sent;
        if !flow.handle {
            if !flow.finished {
                self.reset(key, ResetCode::Cancelled);
            }
            self.forget(key);
        }
    }

    fn make_ready(&mut self, key: Key) {
        if let Some(flow) = self.flows.get_mut(&key)
            && !flow.queued
        {
            flow.queued = true;
            self.ready.push_back(key.id);
            self.wake_writer();
        }
    }

    fn push_reset(&mut self, id: u32, code: ResetCode) {
        self.urgent.push_back(Urgent::Reset(id, code));
        self.urgent_resets += 1;
        self.wake_writer();
    }

    /// Nothing waits to be sent for this flow any more.
    fn unqueue(&mut self, id: u32) {
        self.ready.retain(|ready| *ready != id);
        self.urgent.retain(|urgent| !urgent.is_about_live(id));
    }

    fn forget(&mut self, key: Key) {
        let Some(flow) = self.flows.remove(&key) else { return };
        self.wide -= usize::from(flow.wide);
        if key.attachment == self.attachment {
            self.live -= 1;
            self.unqueue(key.id);
        }
    }

    /// The credit for the next `WINDOW` frame of a flow; zero if none is due.
    pub(super) fn grant(&mut self, id: u32) -> u32 {
        let key = self.key(id);
        let Some(flow) = self.flows.get_mut(&key) else { return 0 };
        flow.granting = false;
        if flow.finished || flow.failed.is_some() {
            return 0;
        }
        let mut credit = std::mem::take(&mut flow.consumed);
        if !flow.wide && self.wide < WIDE_FLOWS {
            flow.wide = true;
            self.wide += 1;
            credit += WINDOW - INITIAL_WINDOW;
        }
        flow.window += credit;
        credit
    }
}
