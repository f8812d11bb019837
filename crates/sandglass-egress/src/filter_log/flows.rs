//! Which of the packets that were held up are of one flow.

use std::collections::HashSet;
use std::mem;
use std::time::Duration;

use tokio::time::Instant;

use super::{Packet, entries};

/// How often a datagram is read, and how many at once after a silence. What is not read in time, the kernel counts.
pub(crate) const READS: (Duration, u32) = (Duration::from_millis(50), 50);

/// How often a receipt is written, and how many at once after a silence. Others are counted.
pub(crate) const RECEIPTS: (Duration, u32) = (Duration::from_millis(50), 200);

/// How long a flow is the same one without a packet, at least. A connection request is sent again after 32 s at most.
const SPAN: Duration = Duration::from_mins(1);

/// Of how many flows that is known, at most; twice as many with those that are about to be forgotten.
const MAX_FLOWS: usize = 512;

/// Tells the first packet of a flow from the others, and counts these and what did not arrive.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    /// The number of the next packet.
    next: u32,
    recent: HashSet<Packet>,
    /// Those that were recent before.
    older: HashSet<Packet>,
    /// Since when `recent` is.
    since: Option<Instant>,
}

/// What is new in a datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    /// How many packets were logged since the last datagram that get no receipt: they did not arrive, are of a flow that
    /// has one, or can't be read.
    pub(crate) left_out: u64,
    /// The first packets of their flows.
    pub(crate) new: Vec<Packet>,
}

impl Flows {
    pub(crate) fn take(&mut self, now: Instant, datagram: &[u8]) -> Taken {
        let mut taken = Taken { left_out: 0, new: Vec::new() };
        for entry in entries(datagram) {
            taken.left_out += u64::from(entry.number.wrapping_sub(self.next));
            self.next = entry.number.wrapping_add(1);
            match entry.packet {
                Some(packet) if self.is_new(now, packet) => taken.new.push(packet),
                _ => taken.left_out += 1,
            }
        }
        taken
    }

    /// Whether this is the first packet of its flow. From now on it is not.
    pub(crate) fn is_new(&mut self, now: Instant, packet: Packet) -> bool {
        let age = now.saturating_duration_since(*self.since.get_or_insert(now));
        if age >= SPAN || self.recent.len() >= MAX_FLOWS {
            self.older = mem::take(&mut self.recent);
            self.since = Some(now);
        }
        // After twice the span, none of them is of any use.
        if age >= SPAN * 2 {
            self.older.clear();
        }
        let known = self.older.remove(&packet);
        self.recent.insert(packet) && !known
    }
}

#[cfg(test)]
impl Flows {
    pub(super) fn known(&self) -> usize {
        self.recent.len() + self.older.len()
    }
}
