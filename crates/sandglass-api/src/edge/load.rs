//! How many requests each sandbox has open.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_types::SandboxId;

/// Most requests and upgraded connections that one sandbox may have open.
const MAX_OPEN: usize = 1024;

/// Counts of all sandboxes that have any.
#[derive(Debug, Default, Clone)]
pub(crate) struct Load(Arc<Mutex<HashMap<SandboxId, usize>>>);

/// One open request; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Permit {
    load: Load,
    id: SandboxId,
}

impl Load {
    /// Counts one more; `None` if the sandbox has too many.
    pub(crate) fn enter(&self, id: &SandboxId) -> Option<Permit> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(id.clone()).or_default();
        if *count >= MAX_OPEN {
            return None;
        }
        *count += 1;
        Some(Permit { load: self.clone(), id: id.clone() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.load.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
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
        let permits: Vec<_> = (0..MAX_OPEN).map(|_| load.enter(&one).unwrap()).collect();
        assert!(load.enter(&one).is_none());
        assert!(load.enter(&other).is_some());
        drop(permits);
        assert!(load.enter(&one).is_some());
        assert!(load.0.lock().unwrap().is_empty());
    }
}
