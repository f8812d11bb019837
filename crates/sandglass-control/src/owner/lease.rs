//! When the time of a sandbox is up, and how that moves.

use std::time::Duration;

use sandglass_store::SandboxRow;
use sandglass_types::error::Chain;
use sandglass_types::{Error, Timestamp};
use tokio::time::Instant;

use super::Owner;
use super::bring_up::deadline;

impl Owner<'_> {
    pub(super) async fn set_end(&mut self, end_at: Timestamp, only_later: bool) -> Result<Timestamp, Error> {
        let now = self.shared.clock.now();
        self.set_end_of(end_at, only_later, now).await
    }

    /// The same for one whose time was not up at `asked`, but may be by now.
    pub(super) async fn set_end_of(
        &mut self,
        end_at: Timestamp,
        only_later: bool,
        asked: Timestamp,
    ) -> Result<Timestamp, Error> {
        let (id, now) = (self.row.id.clone(), self.shared.clock.now());
        // The host's deadline, which comes true without a server, is never earlier than the store's: it moves first where
        // it moves back, and last where it moves forth. Should this server die in between, the sandbox lives longer than
        // it need by no more than it was asked to, and never shorter than anybody was told.
        let wanted = end_at.min(self.row.max_end_at);
        let steady = Instant::now();
        let latest = (self.row.end_at.max(wanted), self.ends.max(steady + wanted.since(now)));
        if latest != (self.row.end_at, self.ends) {
            self.shared.host.set_deadline(&id, deadline(&self.row, latest.0, latest.1)).await?;
        }
        sandglass_failpoint::hit_async("control.deadline.store").await.map_err(crate::injected)?;
        let stored = self.shared.store.set_end(&id, end_at, only_later, asked).await;
        let stored = stored.map_err(|error| Error::internal("the timeout could not be stored", error))?;
        let end = stored.ok_or_else(|| crate::not_found(&id))?;
        self.ends = moved(self.ends, (end_at, end), (now, steady));
        self.row.end_at = end;
        if latest != (self.row.end_at, self.ends)
            && let Err(error) = self.shared.host.set_deadline(&id, deadline(&self.row, end, self.ends)).await
        {
            // It is in force: this server ends the sandbox in time, and so does the next one.
            tracing::error!(sandbox = %id, error = %Chain(&error), "without a server it would live longer");
        }
        Ok(end)
    }
}

/// How long a sandbox may live from `now`: a wall clock that was set back while nobody looked gives it no more than all of
/// its time again.
pub(super) fn budget(row: &SandboxRow, now: Timestamp) -> Duration {
    let (left, all) = (row.end_at.since(now), row.end_at.since(row.created_at));
    // An end before the creation was set by such a clock.
    if all.is_zero() { left } else { left.min(all) }
}

/// When its time is up by the steady clock, that was `ends`, after somebody asked for one end and the store has put another
/// or the same in force. `now` is the time by both clocks.
fn moved(ends: Instant, (asked, end): (Timestamp, Timestamp), now: (Timestamp, Instant)) -> Instant {
    let at = |time: Timestamp| now.1 + time.since(now.0);
    // Later than asked for is what it was before, and perhaps only seems to be later.
    if end > asked { ends.max(at(asked)) } else { at(end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn an_end_moves_by_the_clock_of_the_moment() {
        let (wall, steady) = (Timestamp::from_millis(0).plus(HOUR * 1000), Instant::now());
        let now = (wall, steady);
        let moved = |ends, asked, end| moved(steady + ends, (wall.plus(asked), wall.plus(end)), now) - steady;
        assert_eq!(moved(HOUR, HOUR * 2, HOUR * 2), HOUR * 2);
        assert_eq!(moved(HOUR, HOUR / 2, HOUR / 2), HOUR / 2);
        // Cut at the longest life.
        assert_eq!(moved(HOUR, HOUR * 9, HOUR * 5), HOUR * 5);
        // It lives longer anyway.
        assert_eq!(moved(HOUR * 3, HOUR, HOUR * 3), HOUR * 3);
        // The wall clock was set back: it only seems to live for a day more, and gets what was asked for.
        assert_eq!(moved(HOUR, HOUR * 2, HOUR * 25), HOUR * 2);
        assert_eq!(moved(HOUR * 3, HOUR * 2, HOUR * 25), HOUR * 3);
    }
}
