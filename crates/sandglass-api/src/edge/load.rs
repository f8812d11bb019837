//! How many requests each sandbox has open.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_types::SandboxId;

/// Most requests and upgraded connections that one sandbox may have open.
const MAX_OPEN: usize = 1024;

/// How many of them may come from other sandboxes, so that these keep no client out.
const MAX_FROM_SANDBOXES: usize = MAX_OPEN / 4;

/// What one sandbox has open.
#[derive(Debug, Default)]
struct Open {
    all: usize,
    from_sandboxes: usize,
}

/// Counts of all sandboxes that have any.
#[derive(Debug, Default, Clone)]
pub(crate) struct Load(Arc<Mutex<HashMap<SandboxId, Open>>>);

/// One open request; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Permit {
    load: Load,
    id: SandboxId,
    from_sandbox: bool,
}

impl Load {
    /// Counts one more; `None` if the sandbox has too many.
    pub(crate) fn enter(&self, id: &SandboxId, from_sandbox: bool) -> Option<Permit> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(id.clone()).or_default();
        if count.all >= MAX_OPEN || (from_sandbox && count.from_sandboxes >= MAX_FROM_SANDBOXES) {
            return None;
        }
        count.all += 1;
        count.from_sandboxes += usize::from(from_sandbox);
        Some(Permit { load: self.clone(), id: id.clone(), from_sandbox })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.load.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.id) {
            count.all -= 1;
            count.from_sandboxes -= usize::from(self.from_sandbox);
            if count.all == 0 {
                open.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_has_its_own_limit_and_leaves_nothing_behind() {
        let load = Load::default();
        let (one, other) = (SandboxId::random(), SandboxId::random());
        let permits: Vec<_> = (0..MAX_OPEN).map(|_| load.enter(&one, false).unwrap()).collect();
        assert!(load.enter(&one, false).is_none());
        assert!(load.enter(&other, false).is_some());
        drop(permits);
        assert!(load.enter(&one, false).is_some());
        assert!(load.0.lock().unwrap().is_empty());
    }

    #[test]
    fn other_sandboxes_leave_most_of_it_to_clients() {
        let (load, id) = (Load::default(), SandboxId::random());
        let theirs: Vec<_> = (0..MAX_OPEN / 4).map(|_| load.enter(&id, true).unwrap()).collect();
        assert!(load.enter(&id, true).is_none());
        let rest: Vec<_> = (0..MAX_OPEN * 3 / 4).map(|_| load.enter(&id, false).unwrap()).collect();
        assert!(load.enter(&id, false).is_none());
        drop(theirs);
        assert!(load.enter(&id, true).is_some());
        drop(rest);
        assert!(load.0.lock().unwrap().is_empty());
    }
}
