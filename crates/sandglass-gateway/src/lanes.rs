//! How many calls a sandbox, a budget and a team make at a time and in a minute, and who waits for a budget's money.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandglass_types::{BudgetId, SandboxId, TeamId};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::config::Limits;

/// Lanes that nobody uses are removed when there are more.
const MANY: usize = 256;

/// Of all calls at a time, one team may make one in so many.
const SHARE: usize = 2;

/// Bytes of a body for which it counts once: what is longer is more work.
const WORK: usize = 1 << 20;

/// The lanes of all budgets.
#[derive(Debug)]
pub(crate) struct Lanes {
    limits: Limits,
    lanes: Mutex<HashMap<BudgetId, Arc<Lane>>>,
    /// The paces of sandboxes, whatever they ask for.
    paces: Mutex<HashMap<SandboxId, Pace>>,
    /// Places of each team. There are as many as the operator made.
    teams: Mutex<HashMap<TeamId, Arc<Semaphore>>>,
    all: Arc<Semaphore>,
}

/// What the calls of one budget share.
#[derive(Debug)]
pub(crate) struct Lane {
    at_once: Arc<Semaphore>,
    pace: Mutex<Pace>,
    /// Told when money came back.
    pub(crate) settled: Notify,
}

/// When all that was done so far would have been done at the pace that is allowed.
#[derive(Debug, Clone, Copy)]
struct Pace(Instant);

/// The right to make one call.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) lane: Arc<Lane>,
    _own: OwnedSemaphorePermit,
    _of_team: OwnedSemaphorePermit,
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
    /// There are too many of its team.
    #[error("the team makes as many calls as it may at a time")]
    Team,
    /// There are too many of all.
    #[error("the server makes as many calls as it can")]
    All,
}

impl Lanes {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            lanes: Mutex::default(),
            paces: Mutex::default(),
            teams: Mutex::default(),
            all: Arc::new(Semaphore::new(limits.together)),
        }
    }

    /// The lane of a budget.
    fn of(&self, budget: &BudgetId) -> Arc<Lane> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        if lanes.len() >= MANY {
            let now = Instant::now();
            // One whose pace is behind would be forgiven.
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1 || lane.pace().owes(now));
        }
        let fresh = || {
            Arc::new(Lane {
                at_once: Arc::new(Semaphore::new(self.limits.at_once)),
                pace: Mutex::new(Pace(Instant::now())),
                settled: Notify::new(),
            })
        };
        Arc::clone(lanes.entry(budget.clone()).or_insert_with(fresh))
    }

    /// Counts a request of a sandbox, before anything is looked up for it.
    pub(crate) fn knock(&self, sandbox: &SandboxId) -> Result<(), NoTurn> {
        let now = Instant::now();
        let mut paces = self.paces.lock().unwrap_or_else(PoisonError::into_inner);
        if paces.len() >= MANY {
            paces.retain(|_, pace| pace.owes(now));
        }
        let per_minute = self.limits.per_minute.get();
        let pace = paces.entry(sandbox.clone()).or_insert(Pace(now));
        if pace.passes(per_minute, 1, now) { Ok(()) } else { Err(NoTurn::Pace(per_minute)) }
    }

    /// Counts a request of a budget.
    pub(crate) fn pass(&self, budget: &BudgetId) -> Result<Arc<Lane>, NoTurn> {
        let lane = self.of(budget);
        self.count(&lane, 1)?;
        Ok(lane)
    }

    /// Counts the body of a request, once that is known: a long one as several requests.
    pub(crate) fn weigh(&self, lane: &Lane, length: usize) -> Result<(), NoTurn> {
        // However slow the pace is, a long one goes once in a while.
        let most = self.limits.per_minute.get() / 2;
        self.count(lane, u32::try_from(length / WORK).unwrap_or(u32::MAX).min(most))
    }

    /// Counts a call that its provider refused, as another one: it cost nothing, and took as much work.
    pub(crate) fn in_vain(&self, lane: &Lane) {
        // Where it is one too many, the next one hears it.
        let _passes = self.count(lane, 1);
    }

    fn count(&self, lane: &Lane, times: u32) -> Result<(), NoTurn> {
        let per_minute = self.limits.per_minute.get();
        let passes = lane.pace().passes(per_minute, times, Instant::now());
        if passes { Ok(()) } else { Err(NoTurn::Pace(per_minute)) }
    }

    /// Waits for a turn, for so long: first for one of those of the budget, then of its team's, so that nobody waits among all who may not go.
    pub(crate) async fn enter(
        &self,
        lane: Arc<Lane>,
        team: TeamId,
        patience: Duration,
    ) -> Result<Turn, NoTurn> {
        let until = Instant::now() + patience;
        let one_of =
            |places: &Arc<Semaphore>| tokio::time::timeout_at(until, Arc::clone(places).acquire_owned());
        let Ok(Ok(own)) = one_of(&lane.at_once).await else { return Err(NoTurn::Own(self.limits.at_once)) };
        let share = || Arc::new(Semaphore::new(self.limits.together.div_ceil(SHARE)));
        let team = {
            let mut teams = self.teams.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(teams.entry(team).or_insert_with(share))
        };
        let Ok(Ok(of_team)) = one_of(&team).await else { return Err(NoTurn::Team) };
        let Ok(Ok(of_all)) = one_of(&self.all).await else { return Err(NoTurn::All) };
        Ok(Turn { lane, _own: own, _of_team: of_team, _of_all: of_all })
    }
}

impl Lane {
    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pace {
    /// Whether so many more go now: as many at once as in a minute, and from then on at that pace.
    fn passes(&mut self, per_minute: u32, times: u32, now: Instant) -> bool {
        const MINUTE: Duration = Duration::from_secs(60);
        let next = self.0.max(now) + MINUTE / per_minute * times;
        let passes = next <= now + MINUTE;
        if passes {
            self.0 = next;
        }
        passes
    }

    fn owes(&self, now: Instant) -> bool {
        self.0 > now
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

    async fn enter(lanes: &Lanes, budget: &BudgetId, team: TeamId) -> Result<Turn, NoTurn> {
        let lane = lanes.pass(budget)?;
        lanes.enter(lane, team, PATIENCE).await
    }

    #[tokio::test(start_paused = true)]
    async fn one_too_many_waits_for_its_turn_and_not_for_ever() {
        let lanes = lanes(2, 1000, 4);
        let (one, other, third) = (BudgetId::random(), BudgetId::random(), BudgetId::random());
        let (team, others, thirds) = (TeamId::random(), TeamId::random(), TeamId::random());
        let first = enter(&lanes, &one, team).await.unwrap();
        let second = enter(&lanes, &one, team).await.unwrap();
        let before = Instant::now();
        assert_eq!(enter(&lanes, &one, team).await.unwrap_err(), NoTurn::Own(2));
        assert_eq!(before.elapsed(), PATIENCE);
        // Another budget of the team's finds that the team has its share, and another team does not wait behind it.
        assert_eq!(enter(&lanes, &other, team).await.unwrap_err(), NoTurn::Team);
        let third_one = enter(&lanes, &third, others).await.unwrap();
        let _fourth = enter(&lanes, &third, others).await.unwrap();
        assert_eq!(enter(&lanes, &other, thirds).await.unwrap_err(), NoTurn::All);
        let (waits, ()) = tokio::join!(enter(&lanes, &one, team), async {
            tokio::time::sleep(PATIENCE / 2).await;
            drop(first);
        });
        drop((waits.unwrap(), second));
        enter(&lanes, &other, thirds).await.unwrap();
        drop(third_one);
    }

    #[tokio::test(start_paused = true)]
    async fn long_bodies_and_calls_in_vain_count_as_several() {
        let lanes = lanes(100, 10, 100);
        let lane = lanes.pass(&BudgetId::random()).unwrap();
        lanes.weigh(&lane, WORK - 1).unwrap();
        lanes.weigh(&lane, 5 * WORK).unwrap();
        lanes.weigh(&lane, 3 * WORK).unwrap();
        assert_eq!(lanes.weigh(&lane, 2 * WORK).unwrap_err(), NoTurn::Pace(10));
        lanes.in_vain(&lane);
        assert!(lanes.count(&lane, 1).is_err());
        let lane = lanes.pass(&BudgetId::random()).unwrap();
        lanes.weigh(&lane, usize::MAX).unwrap();
        assert!(lanes.weigh(&lane, usize::MAX).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_has_a_pace_whatever_it_asks() {
        let lanes = lanes(100, 3, 100);
        let one = SandboxId::random();
        for _ in 0..3 {
            lanes.knock(&one).unwrap();
        }
        assert_eq!(lanes.knock(&one).unwrap_err(), NoTurn::Pace(3));
        lanes.knock(&SandboxId::random()).unwrap();
        tokio::time::advance(Duration::from_secs(20)).await;
        lanes.knock(&one).unwrap();
        for _ in 0..2 * MANY {
            lanes.knock(&SandboxId::random()).unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert!(lanes.paces.lock().unwrap().len() <= MANY);
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
