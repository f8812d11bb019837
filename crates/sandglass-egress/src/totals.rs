//! What all sandboxes of a server did together, for who watches it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::receipt::{Kind, Outcome};

/// Counts since the server started. They only grow.
#[derive(Debug, Default)]
pub struct Totals {
    verdicts: [[AtomicU64; 2]; 4],
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    unwritten: AtomicU64,
}

/// All kinds of receipts.
pub const KINDS: [Kind; 4] = [Kind::Dns, Kind::Connection, Kind::Request, Kind::Use];

/// All outcomes.
pub const OUTCOMES: [Outcome; 2] = [Outcome::Allowed, Outcome::Denied];

const fn place(kind: Kind, outcome: Outcome) -> (usize, usize) {
    let kind = match kind {
        Kind::Dns => 0,
        Kind::Connection => 1,
        Kind::Request => 2,
        Kind::Use => 3,
    };
    let outcome = match outcome {
        Outcome::Allowed => 0,
        Outcome::Denied => 1,
    };
    (kind, outcome)
}

impl Totals {
    pub(crate) fn decided(&self, kind: Kind, outcome: Outcome, count: u64) {
        let (kind, outcome) = place(kind, outcome);
        self.verdicts[kind][outcome].fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn unwritten(&self, count: u64) {
        self.unwritten.fetch_add(count, Ordering::Relaxed);
    }

    /// How often something of a kind was decided so. A connection that was allowed counts when it has ended.
    #[must_use]
    pub fn verdicts(&self, kind: Kind, outcome: Outcome) -> u64 {
        let (kind, outcome) = place(kind, outcome);
        self.verdicts[kind][outcome].load(Ordering::Relaxed)
    }

    /// Bytes that left sandboxes.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Bytes that came into sandboxes.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Receipts that were counted and not written.
    #[must_use]
    pub fn receipts_left_out(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
    }
}
