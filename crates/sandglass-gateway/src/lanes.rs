//! How many calls a budget makes at a time and in a minute, and who waits for its money.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandglass_types::BudgetId;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::config::Limits;

/// Lanes that nobody uses are removed when there are more.
const MANY: usize = 256;

/// The lanes of all budgets.
#[derive(Debug)]
pub(crate) struct Lanes {
    limits: Limits,
    lanes: Mutex<HashMap<BudgetId, Arc<Lane>>>,
    all: Arc<Semaphore>,
}

/// What the calls of one budget share.
#[derive(Debug)]
pub(crate) struct Lane {
    at_once: Arc<Semaphore>,
    /// When all calls so far would have been made at the pace that is allowed.
    gone: Mutex<Instant>,
    /// Told when money came back.
    pub(crate) settled: Notify,
}

/// The right to make one call.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) lane: Arc<Lane>,
    _own: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

/// Why a call can't be made now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoTurn {
    /// There were too many in this minute.
    #[error("too many calls in a minute: at most {0}")]
    Pace(u32),
    /// There are too many of this budget.
    #[error("too many calls at a time: at most {0} with one token")]
    Own(usize),
    /// There are too many of all.
    #[error("the server makes as many calls as it can")]
    All,
}

impl Lanes {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, lanes: Mutex::default(), all: Arc::new(Semaphore::new(limits.together)) }
    }

    /// The lane of a budget.
    fn of(&self, budget: &BudgetId) -> Arc<Lane> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        if lanes.len() >= MANY {
            let now = Instant::now();
            // One whose pace is behind would be forgiven.
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1 || lane.owes(now));
        }
        let fresh = || {
            Arc::new(Lane {
                at_once: Arc::new(Semaphore::new(self.limits.at_once)),
                gone: Mutex::new(Instant::now()),
                settled: Notify::new(),
            })
        };
        Arc::clone(lanes.entry(budget.clone()).or_insert_with(fresh))
    }

    /// Counts a request that is no call against its budget's pace.
    pub(crate) fn pass(&self, budget: &BudgetId) -> Result<Arc<Lane>, NoTurn> {
        let lane = self.of(budget);
        let per_minute = self.limits.per_minute.get();
        if lane.passes(per_minute, Instant::now()) { Ok(lane) } else { Err(NoTurn::Pace(per_minute)) }
    }

    /// Waits for a turn, for so long.
    pub(crate) async fn enter(&self, budget: &BudgetId, patience: Duration) -> Result<Turn, NoTurn> {
        let lane = self.pass(budget)?;
        let until = Instant::now() + patience;
        let own = tokio::time::timeout_at(until, Arc::clone(&lane.at_once).acquire_owned()).await;
        let Ok(Ok(own)) = own else { return Err(NoTurn::Own(self.limits.at_once)) };
        let of_all = tokio::time::timeout_at(until, Arc::clone(&self.all).acquire_owned()).await;
        let Ok(Ok(of_all)) = of_all else { return Err(NoTurn::All) };
        Ok(Turn { lane, _own: own, _of_all: of_all })
    }
}

impl Lane {
    /// Whether one more goes now: as many at once as in a minute, and from then on at that pace.
    fn passes(&self, per_minute: u32, now: Instant) -> bool {
        const MINUTE: Duration = Duration::from_secs(60);
        let mut gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        let next = (*gone).max(now) + MINUTE / per_minute;
        let passes = next <= now + MINUTE;
        if passes {
            *gone = next;
        }
        passes
    }

    fn owes(&self, now: Instant) -> bool {
        *self.gone.lock().unwrap_or_else(PoisonError::into_inner) > now
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn lanes(at_once: usize, per_minute: u32, together: usize) -> Lanes {
        let per_minute = NonZeroU32::new(per_minute).unwrap();
        Lanes::new(Limits { output: 1, at_once, per_minute, together })
    }

    const PATIENCE: Duration = Duration::from_secs(2);

    #[tokio::test(start_paused = true)]
    async fn one_too_many_waits_for_its_turn_and_not_for_ever() {
        let lanes = lanes(2, 1000, 3);
        let (one, other) = (BudgetId::random(), BudgetId::random());
        let first = lanes.enter(&one, PATIENCE).await.unwrap();
        let _second = lanes.enter(&one, PATIENCE).await.unwrap();
        let before = Instant::now();
        assert_eq!(lanes.enter(&one, PATIENCE).await.unwrap_err(), NoTurn::Own(2));
        assert_eq!(before.elapsed(), PATIENCE);
        let _third = lanes.enter(&other, PATIENCE).await.unwrap();
        assert_eq!(lanes.enter(&other, PATIENCE).await.unwrap_err(), NoTurn::All);
        let (waits, ()) = tokio::join!(lanes.enter(&one, PATIENCE), async {
            tokio::time::sleep(PATIENCE / 2).await;
            drop(first);
        });
        waits.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_minute_s_calls_go_at_once_and_then_at_their_pace() {
        let lanes = lanes(100, 3, 100);
        let one = BudgetId::random();
        for _ in 0..3 {
            lanes.pass(&one).unwrap();
        }
        assert_eq!(lanes.pass(&one).unwrap_err(), NoTurn::Pace(3));
        lanes.pass(&BudgetId::random()).unwrap();
        tokio::time::advance(Duration::from_secs(20)).await;
        lanes.pass(&one).unwrap();
        assert!(lanes.pass(&one).is_err());
        // What nobody uses is forgotten, and nothing is forgiven by that.
        for _ in 0..2 * MANY {
            lanes.pass(&BudgetId::random()).unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert!(lanes.lanes.lock().unwrap().len() <= MANY);
        tokio::time::advance(Duration::from_secs(60)).await;
        for _ in 0..3 {
            lanes.pass(&one).unwrap();
        }
        assert!(lanes.pass(&one).is_err());
    }
}
