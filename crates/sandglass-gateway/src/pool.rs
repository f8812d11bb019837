//! What all calls have together, of which one team takes no more than its share: memory, and places.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandglass_types::TeamId;

/// One team may have one in so many, so that no team is kept out by another one.
const SHARE: u64 = 2;

/// So much of something.
#[derive(Debug)]
pub(crate) struct Pool {
    all: u64,
    each: u64,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: u64,
    /// Of each team that has any.
    of: HashMap<TeamId, u64>,
}

/// What somebody has of it, until this is dropped.
#[derive(Debug)]
#[must_use = "it is given back when this is dropped"]
pub(crate) struct Part {
    pool: Arc<Pool>,
    team: TeamId,
    amount: u64,
}

impl Pool {
    pub(crate) fn new(all: u64) -> Arc<Self> {
        Arc::new(Self { all, each: all.div_ceil(SHARE), taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing yet, for a team that may take some.
    pub(crate) fn nothing(self: &Arc<Self>, team: TeamId) -> Part {
        Part { pool: Arc::clone(self), team, amount: 0 }
    }

    /// Takes so much for a team. Nobody waits for it: who waited would keep others waiting. `None` if that is not there.
    pub(crate) fn take(self: &Arc<Self>, team: TeamId, amount: u64) -> Option<Part> {
        let mut part = self.nothing(team);
        part.grow_to(amount).then_some(part)
    }
}

impl Part {
    /// Whose it is.
    pub(crate) const fn team(&self) -> TeamId {
        self.team
    }

    /// Takes what it lacks to so much. `false` if that is not there, and then it is as it was.
    pub(crate) fn grow_to(&mut self, amount: u64) -> bool {
        let Some(more) = amount.checked_sub(self.amount) else { return true };
        let mut taken = self.pool.taken();
        let own = taken.of.get(&self.team).copied().unwrap_or_default();
        let (own, all) = (own.saturating_add(more), taken.all.saturating_add(more));
        if own > self.pool.each || all > self.pool.all {
            return false;
        }
        taken.all = all;
        if own > 0 {
            taken.of.insert(self.team, own);
        }
        drop(taken);
        self.amount = amount;
        true
    }

    /// Gives back all but so much.
    pub(crate) fn shrink_to(&mut self, amount: u64) {
        let Some(spare) = self.amount.checked_sub(amount) else { return };
        self.amount = amount;
        let mut taken = self.pool.taken();
        taken.all -= spare;
        if let Some(own) = taken.of.get_mut(&self.team) {
            *own -= spare;
            if *own == 0 {
                taken.of.remove(&self.team);
            }
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_team_keeps_another_one_out() {
        let pool = Pool::new(10);
        let (one, other, third) = (TeamId::random(), TeamId::random(), TeamId::random());
        let mut part = pool.take(one, 3).unwrap();
        assert!(part.grow_to(5) && !part.grow_to(6));
        assert!(pool.take(one, 1).is_none());
        let theirs = pool.take(other, 5).unwrap();
        assert!(pool.take(third, 1).is_none(), "nothing is left");
        part.shrink_to(4);
        let last = pool.take(third, 1).unwrap();
        drop((part, theirs, last));
        let taken = pool.taken();
        assert!(taken.all == 0 && taken.of.is_empty(), "{taken:?}");
    }

    #[test]
    fn the_only_one_is_somebody_s() {
        assert!(Pool::new(1).take(TeamId::random(), 1).is_some());
    }

    proptest! {
        #[test]
        fn whatever_is_taken_is_given_back(steps in proptest::collection::vec((0..3_usize, 0..40_u64), 0..60)) {
            let pool = Pool::new(50);
            let teams = [TeamId::random(), TeamId::random(), TeamId::random()];
            let mut parts: Vec<_> = teams.iter().map(|team| pool.nothing(*team)).collect();
            for (whose, amount) in steps {
                parts[whose].shrink_to(amount);
                let _there = parts[whose].grow_to(amount);
                let held: Vec<_> = parts.iter().map(|part| part.amount).collect();
                prop_assert!(held.iter().all(|held| *held <= 25) && held.iter().sum::<u64>() <= 50);
                prop_assert_eq!(pool.taken().all, held.iter().sum::<u64>());
            }
            drop(parts);
            prop_assert!(pool.taken().of.is_empty());
        }
    }
}
