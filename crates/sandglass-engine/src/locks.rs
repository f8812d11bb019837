//! One lock a sandbox, held for as long as a verb changes it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandglass_types::SandboxId;

/// The locks of the sandboxes that verbs are at work on.
#[derive(Debug, Default)]
pub(crate) struct Locks(Mutex<HashMap<SandboxId, Arc<Mutex<()>>>>);

impl Locks {
    /// The lock of one sandbox. Entries that nobody uses any more are dropped on the way.
    pub(crate) fn of(&self, id: &SandboxId) -> Arc<Mutex<()>> {
        let mut locks = lock(&self.0);
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(id.clone()).or_default())
    }
}

/// For what is valid between any two calls of the holder, so that a panic elsewhere spoils nothing.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
