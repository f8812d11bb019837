//! Whose next computer is made ahead: of the paused sandboxes, a few that were paused last. Each of those has processes that
//! stand still, a loop device and a copy of its disk, so there is a bound, and all are given up where somebody else needs
//! the room.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

/// How long those that are given up may take to go.
const PATIENCE: Duration = Duration::from_secs(5);

/// The wait between two looks whether they are gone.
const CHECK: Duration = Duration::from_millis(20);

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
    places: BTreeMap<u64, CancellationToken>,
}

/// The right to have one, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    of: Arc<Ahead>,
    number: u64,
    wanted: CancellationToken,
}

impl Ahead {
    /// At most `max` have one, and for as long as it takes to give one up, one more.
    pub(crate) fn new(max: usize) -> Self {
        Self { max, taken: Mutex::default() }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for who was paused just now. Where all are taken, who has had one for longest is to give it up; `None` if
    /// there are none at all.
    pub(crate) fn place(self: &Arc<Self>) -> Option<Place> {
        if self.max == 0 {
            return None;
        }
        let mut taken = self.taken();
        let surplus = (taken.places.len() + 1).saturating_sub(self.max);
        taken.places.values().take(surplus).for_each(CancellationToken::cancel);
        let (number, wanted) = (taken.next, CancellationToken::new());
        taken.next += 1;
        taken.places.insert(number, wanted.clone());
        Some(Place { of: Arc::clone(self), number, wanted })
    }

    /// Makes all give up their places, and waits until they have. `false` if nobody had one, or somebody keeps it.
    pub(crate) async fn make_room(&self) -> bool {
        let numbers: Vec<u64> = {
            let taken = self.taken();
            taken.places.values().for_each(CancellationToken::cancel);
            taken.places.keys().copied().collect()
        };
        let deadline = Instant::now() + PATIENCE;
        while numbers.iter().any(|number| self.taken().places.contains_key(number)) {
            if Instant::now() >= deadline {
                return false;
            }
            sleep(CHECK).await;
        }
        !numbers.is_empty()
    }
}

impl Place {
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

    #[tokio::test]
    async fn who_comes_last_has_one() {
        let ahead = Arc::new(Ahead::new(2));
        let [first, second] = [(); 2].map(|()| ahead.place().unwrap());
        assert!(!first.wanted.is_cancelled() && !second.wanted.is_cancelled());
        let third = ahead.place().unwrap();
        first.wanted().await;
        assert!(!second.wanted.is_cancelled() && !third.wanted.is_cancelled());
        drop((first, third));
        let fourth = ahead.place().unwrap();
        assert!(!second.wanted.is_cancelled() && !fourth.wanted.is_cancelled());
        assert!(Arc::new(Ahead::new(0)).place().is_none());
    }

    #[tokio::test]
    async fn all_are_given_up_where_there_is_no_room() {
        let ahead = Arc::new(Ahead::new(2));
        assert!(!ahead.make_room().await, "nobody has one");
        let kept = ahead.place().unwrap();
        let gives_up = async move {
            kept.wanted().await;
            drop(kept);
        };
        let (room, ()) = tokio::join!(ahead.make_room(), gives_up);
        assert!(room);
    }
}
