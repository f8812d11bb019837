//! Room on this machine: what has a row was promised it, and what was made for nobody yet gives way to that.
//!
//! Made for nobody are the unused copies of templates ([`crate::pools`]) and the computers of paused sandboxes that are made
//! ahead ([`crate::ahead`]). Each counts from before it is made until nothing of it is left.

use std::sync::Arc;
use std::time::Duration;

use sandglass_types::budget::{Amount, admit};
use sandglass_types::{Error, SandboxId};
use tokio::time::{Instant, sleep};

use crate::shared::Shared;

/// How long somebody waits for those that give way to be gone. It takes some dozens of milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// The wait between two looks whether they are.
const CHECK: Duration = Duration::from_millis(20);

/// All that was made for nobody.
struct Spare {
    /// What is being made, or removed.
    passing: Amount,
    /// What can be given up, in that order.
    standing: Vec<(What, Amount)>,
}

/// What can be given up.
enum What {
    Unused(SandboxId),
    Ahead(u64),
}

impl Spare {
    /// What there is now. Copies are given up first, the newest of them first, for each takes as much as a sandbox does;
    /// then computers, and of them the oldest.
    fn of(shared: &Shared) -> Self {
        let (mut passing, unused) = shared.pools.amounts();
        let (going, ahead) = shared.ahead.amounts();
        passing = passing.and(going);
        let unused = unused.into_iter().map(|(id, amount)| (What::Unused(id), amount));
        let ahead = ahead.into_iter().map(|(number, amount)| (What::Ahead(number), amount));
        Self { passing, standing: unused.chain(ahead).collect() }
    }

    fn all(&self) -> Amount {
        self.standing.iter().fold(self.passing, |sum, (_, amount)| sum.and(*amount))
    }
}

/// Whether all that was made for nobody has room beside what there are rows for.
///
/// # Errors
/// The store failed.
pub(crate) async fn is_enough(shared: &Shared) -> Result<bool, Error> {
    let taken = shared.store.in_use(shared.node).await.map_err(crate::stored)?;
    Ok(admit(&shared.config.budgets.capacity, &taken, &Spare::of(shared).all()).is_ok())
}

/// Gives up as much of what was made for nobody as it takes that all that there are rows for has room, and `more` as well;
/// and waits until that is gone. It does not wait for ever: whoever asks was admitted before.
///
/// # Errors
/// The store failed.
pub(crate) async fn yield_room(shared: &Arc<Shared>, more: Amount) -> Result<(), Error> {
    let capacity = &shared.config.budgets.capacity;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let all = Spare::of(shared).all();
        if all == Amount::default() {
            return Ok(());
        }
        let taken = shared.store.in_use(shared.node).await.map_err(crate::stored)?.and(more);
        // Once more: it may be less by now.
        let spare = Spare::of(shared);
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

/// Gives up all that was made for nobody, because this machine itself lacks something, and waits until that is gone. `false` if
/// there was none, or some of it stays. It is a while until the next copy is made.
pub(crate) async fn make_room(shared: &Arc<Shared>) -> bool {
    shared.pools.lacked();
    let spare = Spare::of(shared);
    spare.standing.iter().for_each(|(what, _)| give_up(shared, what));
    let deadline = Instant::now() + PATIENCE;
    while Spare::of(shared).all() != Amount::default() {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(CHECK).await;
    }
    spare.all() != Amount::default()
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
}
