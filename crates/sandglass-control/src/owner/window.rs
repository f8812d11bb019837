//! How it is noticed that nobody has used a sandbox for as long as it may be idle.

use sandglass_store::SandboxRow;
use sandglass_types::error::Chain;
use tokio::sync::watch;
use tokio::time::Instant;

use super::idle::Idle;
use crate::live::Live;

/// The idle window of a sandbox that can be reached.
pub(super) struct Window {
    pub(super) idle: Idle,
    streams: watch::Receiver<usize>,
}

impl Window {
    /// That of a sandbox that has one.
    pub(super) fn of(row: &SandboxRow, live: &Live) -> Option<Self> {
        let idle = Idle::new(row.lifetime.idle?, Instant::now());
        Some(Self { idle, streams: live.streams() })
    }

    /// Whether nobody has used it for so long. Its agent is asked only where no stream says more.
    pub(super) async fn is_over(&mut self, live: &Live) -> bool {
        let now = Instant::now();
        // Also one that was there between two looks.
        let changed = self.streams.has_changed().unwrap_or(false);
        if *self.streams.borrow_and_update() > 0 || changed {
            self.idle.used(now);
        }
        if !self.idle.wants_to_know(now) {
            return false;
        }
        let said = live.idle().await.inspect_err(|error| {
            tracing::debug!(sandbox = %live.id(), error = %Chain(error), "it can't be said whether it is idle");
        });
        // Somebody may have come while it was asked.
        if *self.streams.borrow() > 0 || self.streams.has_changed().unwrap_or(false) {
            return false;
        }
        self.idle.told(now, said.ok())
    }
}
