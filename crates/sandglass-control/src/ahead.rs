//! Whose next computer is made ahead: of the paused sandboxes, a few that were paused last. Each of those has processes that
//! stand still, a loop device and a copy of its disk, so there is a bound, and they are given up where somebody else needs
//! the room.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandglass_types::Limits;
use sandglass_types::budget::Amount;
use tokio_util::sync::CancellationToken;

use crate::room::Amounts;

/// What one takes of this machine's memory, in MiB: the engine's own processes, with nothing in them.
const MEMORY_MIB: u64 = 16;

/// Most that its copy of a disk takes where the file system can't share blocks, in MiB: engines make none that takes more.
const DISK_MIB: u64 = 256;

/// Who has one.
#[derive(Debug)]
pub(crate) struct Ahead {
    max: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    /// By number, so oldest first.
    places: BTreeMap<u64, (CancellationToken, Amount)>,
}

/// The right to have one, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    of: Arc<Ahead>,
    number: u64,
    wanted: CancellationToken,
}

/// What the next computer of a sandbox with these limits takes while it stands still.
fn amount_of(limits: &Limits) -> Amount {
    Amount {
        sandboxes: 1,
        cpus: 0,
        memory_mib: MEMORY_MIB.min(limits.memory_mib().into()),
        disk_mib: DISK_MIB.min(limits.disk_mib().into()),
    }
}

impl Ahead {
    /// At most `max` have one, and for as long as it takes to give one up, one more.
    pub(crate) fn new(max: usize) -> Self {
        Self { max, taken: Mutex::default() }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for who was paused just now, which takes room from here on; `None` if there are none at all.
    pub(crate) fn place(self: &Arc<Self>, limits: &Limits) -> Option<Place> {
        if self.max == 0 {
            return None;
        }
        let mut taken = self.taken();
        let (number, wanted) = (taken.next, CancellationToken::new());
        taken.next += 1;
        taken.places.insert(number, (wanted.clone(), amount_of(limits)));
        Some(Place { of: Arc::clone(self), number, wanted })
    }

    /// Those that are being given up, and the others, oldest first, with what each takes.
    pub(crate) fn amounts(&self) -> (Amounts<u64>, Amounts<u64>) {
        let taken = self.taken();
        let (going, standing): (Vec<_>, Vec<_>) =
            taken.places.iter().partition(|(_, (wanted, _))| wanted.is_cancelled());
        let [going, standing] = [going, standing]
            .map(|of| of.into_iter().map(|(number, (_, amount))| (*number, *amount)).collect());
        (going, standing)
    }

    /// Makes one give up its place, as soon as it can.
    pub(crate) fn give_up(&self, number: u64) {
        if let Some((wanted, _)) = self.taken().places.get(&number) {
            wanted.cancel();
        }
    }
}

impl Taken {
    /// Those who have had one for longest, where more have one than `max`, up to this one.
    fn surplus(&self, max: usize, number: u64) -> impl Iterator<Item = (&u64, &CancellationToken)> {
        let surplus = self.places.len().saturating_sub(max);
        self.places.range(..number).take(surplus).map(|(number, (wanted, _))| (number, wanted))
    }
}

impl Place {
    /// Who is to give up theirs for this one.
    pub(crate) fn replaces(&self) -> BTreeSet<u64> {
        self.of.taken().surplus(self.of.max, self.number).map(|(number, _)| *number).collect()
    }

    /// There is room for it: makes them do so.
    pub(crate) fn settle(&self) {
        self.of.taken().surplus(self.of.max, self.number).for_each(|(_, wanted)| wanted.cancel());
    }

    /// Comes when somebody else needs it more.
    pub(crate) async fn wanted(&self) {
        self.wanted.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.taken().places.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_last_has_one() {
        let (ahead, limits) = (Arc::new(Ahead::new(2)), Limits::default());
        let place = || ahead.place(&limits).inspect(Place::settle).unwrap();
        let [first, second] = [(); 2].map(|()| place());
        assert!(!first.wanted.is_cancelled() && !second.wanted.is_cancelled());
        let third = place();
        assert!(first.wanted.is_cancelled());
        assert!(!second.wanted.is_cancelled() && !third.wanted.is_cancelled());
        let unsettled = ahead.place(&limits).unwrap();
        assert_eq!(unsettled.replaces(), BTreeSet::from([first.number, second.number]));
        assert!(!second.wanted.is_cancelled(), "there may be no room for it");
        drop((first, third, unsettled));
        let fourth = place();
        assert!(!second.wanted.is_cancelled() && !fourth.wanted.is_cancelled());
        assert!(Arc::new(Ahead::new(0)).place(&limits).is_none());
    }

    #[test]
    fn what_is_given_up_counts_until_it_is_gone() {
        let (ahead, limits) = (Arc::new(Ahead::new(2)), Limits::default());
        let one = amount_of(&limits);
        assert_eq!(ahead.amounts(), (Vec::new(), Vec::new()));
        let [first, second] = [(); 2].map(|()| ahead.place(&limits).unwrap());
        let (going, standing) = ahead.amounts();
        assert_eq!((going, standing.iter().map(|(_, amount)| *amount).collect()), (Vec::new(), vec![one; 2]));
        ahead.give_up(standing[0].0);
        assert!(first.wanted.is_cancelled());
        assert_eq!(ahead.amounts(), (vec![standing[0]], vec![standing[1]]));
        drop(first);
        assert_eq!(ahead.amounts(), (Vec::new(), vec![standing[1]]));
        drop(second);
        ahead.give_up(standing[1].0);
        assert_eq!(ahead.amounts(), (Vec::new(), Vec::new()));
    }
}
