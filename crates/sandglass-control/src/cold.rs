//! Which cold snapshots need not be tried: those that are compressed, until somebody uses them again; and those that could not
//! be, or were not worth it, for a while.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sandglass_types::SnapshotId;
use tokio::time::Instant;

/// They, and until when; for ever where that is not said. Lost with the server, whose next one asks the host once more.
#[derive(Debug, Default)]
pub(crate) struct Settled(Mutex<HashMap<SnapshotId, Option<Instant>>>);

impl Settled {
    fn all(&self) -> MutexGuard<'_, HashMap<SnapshotId, Option<Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is to be done about it, until then if that is said.
    pub(crate) fn settle(&self, id: SnapshotId, until: Option<Instant>) {
        self.all().insert(id, until);
    }

    /// Somebody uses it.
    pub(crate) fn used(&self, id: &SnapshotId) {
        self.all().remove(id);
    }

    /// Whether it is one of them now.
    pub(crate) fn has(&self, id: &SnapshotId, now: Instant) -> bool {
        self.all().get(id).is_some_and(|until| until.is_none_or(|until| now < until))
    }

    /// Forgets all that are none of these.
    pub(crate) fn keep(&self, cold: &BTreeSet<SnapshotId>) {
        self.all().retain(|id, _| cold.contains(id));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_is_left_alone_until_it_is_used_or_its_time_is_up() {
        let (settled, now) = (Settled::default(), Instant::now());
        let [done, failed, other] = [(); 3].map(|()| SnapshotId::random());
        settled.settle(done.clone(), None);
        settled.settle(failed.clone(), Some(now + Duration::from_secs(1)));
        let has =
            |after| [&done, &failed, &other].map(|id| settled.has(id, now + Duration::from_millis(after)));
        assert_eq!(has(0), [true, true, false]);
        assert_eq!(has(1000), [true, false, false]);
        settled.used(&done);
        assert_eq!(has(0), [false, true, false]);
        settled.settle(done.clone(), None);
        settled.keep(&BTreeSet::from([done.clone(), other.clone()]));
        assert_eq!(has(0), [true, false, false]);
    }
}
