//! Which frames go out next.
//!
//! Control messages come first, then small frames, then data: what each flow has, in turn. While the session
//! is held only control messages go out.

use std::task::{Context, Poll};

use bytes::Bytes;

use super::flow::SendEnd;
use super::{CONTROL_OUT_BYTES, FULL_DATA, State, Urgent};
use crate::control::MAX_CONTROL_LEN;
use crate::session::batch::{Batch, Payload};
use crate::session::error::SendError;
use crate::session::frame::{FLAG_MORE, Kind, MAX_PAYLOAD};

impl State {
    /// Queues a control message. `None` means that there is no room for it yet.
    pub(in crate::session) fn send_control(&mut self, message: &Bytes) -> Option<Result<(), SendError>> {
        if let Some(closed) = self.closed {
            return Some(Err(SendError::Closed(closed)));
        }
        if self.epoch.is_none() || self.unseen_attachment {
            return Some(Err(SendError::Detached));
        }
        if message.len() > MAX_CONTROL_LEN {
            return Some(Err(SendError::TooLong(message.len())));
        }
        if self.control_out_bytes + message.len() > CONTROL_OUT_BYTES {
            return None;
        }
        self.control_out_bytes += message.len();
        self.control_out.push_back(message.clone());
        self.wake_writer();
        Some(Ok(()))
    }

    /// From now on only control messages go out, or everything again. A new attachment of a server ends a hold.
    pub(in crate::session) fn set_held(&mut self, held: bool) {
        self.held = held;
        self.changed = true;
        self.wake_writer();
    }

    /// Nothing is being written, and nothing waits that may be written now.
    pub(in crate::session) fn is_flushed(&self) -> bool {
        let idle = self.control_out.is_empty() && !self.in_flight && !self.preamble;
        let nothing = self.urgent.is_empty() && self.ready.is_empty();
        idle && (self.held || (nothing && self.ping.is_none() && self.pong.is_none()))
    }

    /// Takes back what the driver wrote and fills the batch anew. Ready with `false` when the session is closed.
    pub(in crate::session) fn poll_batch(&mut self, cx: &Context<'_>, batch: &mut Batch) -> Poll<bool> {
        batch.clear();
        if std::mem::take(&mut self.in_flight) {
            self.changed = true;
        }
        if self.closed.is_some() {
            return Poll::Ready(false);
        }
        self.fill(batch);
        if batch.is_empty() {
            self.retired.extend(self.writer.replace(cx.waker().clone()));
            return Poll::Pending;
        }
        self.in_flight = true;
        Poll::Ready(true)
    }

    fn fill(&mut self, batch: &mut Batch) {
        let Some(epoch) = self.epoch else { return };
        batch.begin(epoch);
        if std::mem::take(&mut self.preamble) {
            batch.push_padding();
            batch.push(Kind::Attach, 0, 0, Payload::None);
        }
        while !batch.is_full() && self.fill_control(batch) {}
        if self.held {
            return;
        }
        if let Some(number) = self.pong.take() {
            batch.push(Kind::Pong, 0, 0, Payload::Number(number));
        }
        if let Some(number) = self.ping.take() {
            batch.push(Kind::Ping, 0, 0, Payload::Number(number));
        }
        while !batch.is_full()
            && let Some(urgent) = self.urgent.pop_front()
        {
            self.fill_urgent(urgent, batch);
        }
        while !batch.is_full()
            && let Some(id) = self.ready.pop_front()
        {
            self.fill_data(id, batch);
        }
    }

    fn fill_control(&mut self, batch: &mut Batch) -> bool {
        let Some(message) = self.control_out.front_mut() else { return false };
        let part = message.split_to(message.len().min(MAX_PAYLOAD));
        let more = !message.is_empty();
        self.control_out_bytes -= part.len();
        batch.push(Kind::Control, if more { FLAG_MORE } else { 0 }, 0, Payload::Bytes(part));
        if !more {
            self.control_out.pop_front();
            self.changed = true;
        }
        true
    }

    fn fill_urgent(&mut self, urgent: Urgent, batch: &mut Batch) {
        match urgent {
            Urgent::Open(id) => {
                let key = self.key(id);
                if let Some(flow) = self.flows.get_mut(&key)
                    && let Some(target) = flow.target
                {
                    flow.announced = true;
                    batch.push(Kind::Open, 0, id, Payload::Bytes(target.encode().into()));
                }
            }
            Urgent::Opened(id) => batch.push(Kind::Opened, 0, id, Payload::None),
            Urgent::Window(id) => {
                let credit = self.grant(id);
                if credit > 0 {
                    batch.push(Kind::Window, 0, id, Payload::Code(credit));
                }
            }
            Urgent::Reset(id, code) => {
                self.urgent_resets -= 1;
                batch.push(Kind::Reset, 0, id, Payload::Code(code.to_wire()));
            }
        }
    }

    fn fill_data(&mut self, id: u32, batch: &mut Batch) {
        let key = self.key(id);
        let Some(flow) = self.flows.get_mut(&key) else { return };
        flow.queued = false;
        let mut unsent = Bytes::from(flow.take_unsent(&mut self.wakes));
        let ends = flow.send_end == SendEnd::Queued;
        while !unsent.is_empty() {
            let part = unsent.split_to(unsent.len().min(FULL_DATA));
            batch.push(Kind::Data, 0, id, Payload::Bytes(part));
        }
        if ends {
            batch.push(Kind::Fin, 0, id, Payload::None);
            self.after_fin(key);
        }
    }
}
