//! Who uses an image now: one task writes or removes it, or many make sandboxes from it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_types::SnapshotId;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// The images that this process uses, by the ids of their rows.
#[derive(Debug, Default)]
pub(crate) struct Images(Mutex<HashMap<SnapshotId, Arc<RwLock<()>>>>);

/// The right to write an image, or to remove it. Nobody else uses it meanwhile.
#[derive(Debug)]
pub(crate) struct Whole {
    id: SnapshotId,
    guard: OwnedRwLockWriteGuard<()>,
}

/// A share in an image that stays as it is for as long as this lives.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    id: SnapshotId,
    _guard: Arc<OwnedRwLockReadGuard<()>>,
}

impl Images {
    fn lock_of(&self, id: &SnapshotId) -> Arc<RwLock<()>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // What nobody uses any more need not be known.
        all.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(all.entry(id.clone()).or_default())
    }

    /// All of an image, unless somebody uses it.
    pub(crate) fn try_whole(&self, id: &SnapshotId) -> Option<Whole> {
        let guard = self.lock_of(id).try_write_owned().ok()?;
        Some(Whole { id: id.clone(), guard })
    }

    /// All of an image, as soon as nobody else uses it.
    pub(crate) async fn whole(&self, id: &SnapshotId) -> Whole {
        Whole { id: id.clone(), guard: self.lock_of(id).write_owned().await }
    }

    /// Whether anybody uses an image, or waits to. Asking is in nobody's way.
    pub(crate) fn in_use(&self, id: &SnapshotId) -> bool {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(id).is_some_and(|lock| Arc::strong_count(lock) > 1)
    }

    /// A share in an image, unless somebody writes or removes it, or waits for that.
    pub(crate) fn lease(&self, id: &SnapshotId) -> Option<Lease> {
        let guard = self.lock_of(id).try_read_owned().ok()?;
        Some(Lease { id: id.clone(), _guard: Arc::new(guard) })
    }
}

impl Whole {
    /// Which image it is.
    pub(crate) const fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// Gives up the right to change it.
    pub(crate) fn share(self) -> Lease {
        Lease { id: self.id, _guard: Arc::new(self.guard.downgrade()) }
    }
}

impl Lease {
    /// Which image it is.
    pub(crate) const fn id(&self) -> &SnapshotId {
        &self.id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_is_written_by_one_and_read_by_many() {
        let (images, id) = (Images::default(), SnapshotId::random());
        assert!(!images.in_use(&id));
        let whole = images.try_whole(&id).unwrap();
        assert!(images.try_whole(&id).is_none() && images.lease(&id).is_none());
        assert!(images.try_whole(&SnapshotId::random()).is_some());
        let lease = whole.share();
        let (second, third) = (images.lease(&id).unwrap(), lease.clone());
        assert!(images.try_whole(&id).is_none());
        let mut waiting = Box::pin(images.whole(&id));
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("it is in use"),
            () = std::future::ready(()) => {}
        }
        assert!(images.lease(&id).is_none(), "nobody else comes before who waits");
        drop((lease, second, third));
        assert!(images.in_use(&id));
        drop(waiting.await);
        assert!(!images.in_use(&id));
        assert!(images.lease(&id).is_some());
    }
}
