//! Room that somebody was promised and that no row tells of yet: that of a pause's image, and that of a copy which was taken
//! out of its pool by who has no row until then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandglass_types::budget::Amount;

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Promises(Mutex<Given>);

#[derive(Debug, Default)]
struct Given {
    next: u64,
    amounts: BTreeMap<u64, Amount>,
}

/// One promise, until it is dropped.
#[derive(Debug)]
pub(crate) struct Promise {
    of: Arc<Promises>,
    number: u64,
}

impl Promises {
    fn given(&self) -> MutexGuard<'_, Given> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts so much from now on.
    pub(crate) fn give(self: &Arc<Self>, amount: Amount) -> Promise {
        let mut given = self.given();
        let number = given.next;
        given.next += 1;
        given.amounts.insert(number, amount);
        Promise { of: Arc::clone(self), number }
    }

    /// What was promised, by number: so that of two looks none counts twice.
    pub(super) fn amounts(&self) -> BTreeMap<u64, Amount> {
        self.given().amounts.clone()
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.of.given().amounts.remove(&self.number);
    }
}
