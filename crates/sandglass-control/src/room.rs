//! Room on this machine: what has a row was promised it, and what was made for nobody yet gives way to that.
//!
//! Made for nobody are the unused copies of templates ([`crate::pools`]) and the computers of paused sandboxes that are made
//! ahead ([`crate::ahead`]). Each counts from before it is made until nothing of it is left. What was promised to somebody
//! and has no row yet ([`promised`]) counts as if it had one.

mod promised;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use sandglass_engine::host::{HostError, RefusalKind};
use sandglass_types::budget::{Amount, admit};
use sandglass_types::{Error, SandboxId};
use tokio::time::{Instant, sleep};

pub(crate) use self::promised::{Promise, Promises};
use crate::ahead::Place;
use crate::shared::Shared;

/// How long somebody waits for those that give way to be gone. It takes some dozens of milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// The wait between two looks whether they are.
const CHECK: Duration = Duration::from_millis(20);

/// What each takes.
pub(crate) type Amounts<K> = Vec<(K, Amount)>;

/// All that was made for nobody.
struct Spare {
    /// What is being made, or removed.
    passing: BTreeMap<What, Amount>,
    /// What can be given up, in that order.
    standing: Amounts<What>,
}

/// One that was made for nobody.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Unused(SandboxId),
    Ahead(u64),
}

impl Spare {
    /// What there is now. Copies are given up first, the newest of them first, for each takes as much as a sandbox does;
    /// then computers, and of them the oldest.
    fn of(shared: &Shared) -> Self {
        let (moving, unused) = shared.pools.amounts();
        let (going, ahead) = shared.ahead.amounts();
        let of_pools = |(id, amount)| (What::Unused(id), amount);
        let of_ahead = |(number, amount)| (What::Ahead(number), amount);
        Self {
            passing: moving.into_iter().map(of_pools).chain(going.into_iter().map(of_ahead)).collect(),
            standing: unused.into_iter().map(of_pools).chain(ahead.into_iter().map(of_ahead)).collect(),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (&What, &Amount)> {
        self.passing.iter().chain(self.standing.iter().map(|(what, amount)| (what, amount)))
    }

    fn all(&self) -> Amount {
        self.iter().fold(Amount::default(), |sum, (_, amount)| sum.and(*amount))
    }
}

/// What is taken by somebody, and what was made for nobody.
///
/// A promise is given before a row is there, and kept until after that, so it is looked at before the rows and after them; and
/// after what it is taken out of, which is a pool.
async fn look(shared: &Shared) -> Result<(Amount, Spare), Error> {
    let mut promised = shared.promises.amounts();
    let stored = shared.store.in_use(shared.node).await.map_err(crate::stored)?;
    let spare = Spare::of(shared);
    promised.extend(shared.promises.amounts());
    Ok((promised.into_values().fold(stored, Amount::and), spare))
}

/// Whether all that was made for nobody has room beside what is taken.
///
/// # Errors
/// The store failed.
pub(crate) async fn is_enough(shared: &Shared) -> Result<bool, Error> {
    let (taken, spare) = look(shared).await?;
    Ok(admit(&shared.config.budgets.capacity, &taken, &spare.all()).is_ok())
}

/// The same without those that are to go for this one.
///
/// # Errors
/// The store failed.
pub(crate) async fn is_enough_for(shared: &Shared, place: &Place) -> Result<bool, Error> {
    let (taken, spare) = look(shared).await?;
    let replaced = place.replaces();
    let rest =
        spare.iter().filter(|(what, _)| !matches!(what, What::Ahead(number) if replaced.contains(number)));
    let rest = rest.fold(Amount::default(), |sum, (_, amount)| sum.and(*amount));
    Ok(admit(&shared.config.budgets.capacity, &taken, &rest).is_ok())
}

/// Gives up as much of what was made for nobody as it takes that all that is taken has room, and waits until that is gone. It
/// does not wait for ever: whoever asks was admitted before.
///
/// # Errors
/// The store failed.
pub(crate) async fn yield_room(shared: &Arc<Shared>) -> Result<(), Error> {
    let capacity = &shared.config.budgets.capacity;
    let deadline = Instant::now() + PATIENCE;
    loop {
        if Spare::of(shared).iter().next().is_none() {
            return Ok(());
        }
        let (taken, spare) = look(shared).await?;
        if admit(capacity, &taken, &spare.all()).is_ok() {
            return Ok(());
        }
        let amounts: Vec<_> = spare.standing.iter().map(|(_, amount)| *amount).collect();
        for (what, _) in spare.standing.iter().take(surplus(capacity, taken, &amounts)) {
            give_up(shared, what);
        }
        if Instant::now() >= deadline {
            tracing::warn!("what nobody uses has not made room in time");
            return Ok(());
        }
        sleep(CHECK).await;
    }
}

/// Why the host refused, if that is behind this error.
pub(crate) fn refusal(error: &Error) -> Option<RefusalKind> {
    let host = error.source().and_then(|source| source.downcast_ref::<HostError>());
    host.and_then(HostError::refusal)
}

/// Whether this is a host that lacks something which others may have.
pub(crate) fn is_lack(error: &Error) -> bool {
    matches!(refusal(error), Some(RefusalKind::NoRoom(_)))
}

/// Gives up all that was made for nobody, because this machine itself lacks something, and waits until that is gone, whatever
/// is made meanwhile. `false` if there was none, or all of it stays. It is a while until the next is made.
pub(crate) async fn make_room(shared: &Arc<Shared>) -> bool {
    shared.pools.lacked();
    let deadline = Instant::now() + PATIENCE;
    let there: Vec<_> = Spare::of(shared).iter().map(|(what, _)| what.clone()).collect();
    loop {
        let spare = Spare::of(shared);
        // One that was being made may be given up by now.
        spare
            .standing
            .iter()
            .filter(|(what, _)| there.contains(what))
            .for_each(|(what, _)| give_up(shared, what));
        let left = there.iter().filter(|what| spare.iter().any(|(one, _)| one == *what)).count();
        if left == 0 || Instant::now() >= deadline {
            return left < there.len();
        }
        sleep(CHECK).await;
    }
}

fn give_up(shared: &Arc<Shared>, what: &What) {
    match what {
        What::Unused(id) => {
            tracing::info!(sandbox = %id, "an unused sandbox makes room");
            shared.pools.give_up(shared, id);
        }
        What::Ahead(number) => shared.ahead.give_up(*number),
    }
}

/// How many of the first must go so that the others have room beside what is `taken`.
fn surplus(capacity: &Amount, taken: Amount, standing: &[Amount]) -> usize {
    let fits = |from: &usize| {
        let rest = standing[*from..].iter().fold(Amount::default(), |sum, amount| sum.and(*amount));
        admit(capacity, &taken, &rest).is_ok()
    };
    (0..standing.len()).find(fits).unwrap_or(standing.len())
}

#[cfg(test)]
mod tests {
    use sandglass_engine::engine::Lack;

    use super::*;

    #[test]
    fn no_more_goes_than_must() {
        let capacity = Amount { memory_mib: 10, disk_mib: 100, ..Amount::UNBOUNDED };
        let of = |memory_mib, disk_mib| Amount { memory_mib, disk_mib, ..Amount::default() };
        let standing = [of(3, 10), of(3, 10), of(1, 0)];
        let surplus = |taken| surplus(&capacity, taken, &standing);
        assert_eq!(surplus(of(3, 80)), 0);
        assert_eq!(surplus(of(4, 0)), 1);
        assert_eq!(surplus(of(0, 95)), 2, "what takes none of what is short stays");
        assert_eq!(surplus(of(9, 95)), 2);
        assert_eq!(surplus(of(11, 0)), 3, "also where that is not enough");
        assert_eq!(super::surplus(&capacity, of(11, 0), &[]), 0);
    }

    #[test]
    fn a_machine_that_is_busy_lacks_nothing() {
        let refused = |kind| Error::from(HostError::Refused { kind, message: String::new() });
        let [lack, busy] = [RefusalKind::NoRoom(Lack::Disk), RefusalKind::Busy].map(refused);
        assert_eq!(lack.kind(), busy.kind());
        assert_eq!([lack, busy].map(|error| is_lack(&error)), [true, false]);
    }

    #[test]
    fn what_is_promised_counts_until_that_is_over() {
        let promises = Arc::new(Promises::default());
        let amounts = || promises.amounts().into_values().collect::<Vec<_>>();
        let of = |memory_mib| Amount { memory_mib, ..Amount::default() };
        let [first, second] = [1, 2].map(|memory_mib| promises.give(of(memory_mib)));
        assert_eq!(amounts(), [of(1), of(2)]);
        drop(first);
        let third = promises.give(of(3));
        assert_eq!(amounts(), [of(2), of(3)]);
        drop((second, third));
        assert_eq!(amounts(), []);
    }
}
