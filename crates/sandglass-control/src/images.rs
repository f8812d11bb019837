//! Who uses an image now: one task writes or removes it, or many make sandboxes from it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_types::{Error, SnapshotId};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// The images that this process uses, by the ids of their rows.
#[derive(Debug, Default)]
pub(crate) struct Images(Mutex<HashMap<SnapshotId, Arc<RwLock<Form>>>>);

/// What is known of an image for as long as somebody uses it.
#[derive(Debug, Default)]
struct Form {
    /// Whether it was expanded for those who use it. Held while it is, so that one asks for it and the others wait.
    expanded: tokio::sync::Mutex<bool>,
}

/// The right to write an image, or to remove it. Nobody else uses it meanwhile.
#[derive(Debug)]
pub(crate) struct Whole {
    id: SnapshotId,
    guard: OwnedRwLockWriteGuard<Form>,
}

/// A share in an image that stays as it is for as long as this lives.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    id: SnapshotId,
    guard: Arc<OwnedRwLockReadGuard<Form>>,
}

impl Images {
    fn lock_of(&self, id: &SnapshotId) -> Arc<RwLock<Form>> {
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
        Some(Lease { id: id.clone(), guard: Arc::new(guard) })
    }
}

impl Whole {
    /// Which image it is.
    pub(crate) const fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// Gives up the right to change it.
    pub(crate) fn share(self) -> Lease {
        Lease { id: self.id, guard: Arc::new(self.guard.downgrade()) }
    }
}

impl Lease {
    /// Which image it is.
    pub(crate) const fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// Makes sure that it is not compressed. Of all who use it at a time one does what that takes; where it fails, the next
    /// one tries it.
    ///
    /// # Errors
    /// That of `expand`.
    pub(crate) async fn expanded(
        &self,
        expand: impl Future<Output = Result<(), Error>>,
    ) -> Result<(), Error> {
        let mut expanded = self.guard.expanded.lock().await;
        if !*expanded {
            expand.await?;
            *expanded = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use sandglass_types::ErrorKind;

    use super::*;

    #[tokio::test]
    async fn of_all_who_use_it_one_expands_it() {
        let (images, id) = (Images::default(), SnapshotId::random());
        let tried = Cell::new(0);
        let expand = async |outcome| {
            tried.set(tried.get() + 1);
            tokio::task::yield_now().await;
            outcome
        };
        let failed = Err(Error::new(ErrorKind::Capacity, "full"));
        let [first, second] = [(); 2].map(|()| images.lease(&id).unwrap());
        let third = second.clone();
        let outcomes = tokio::join!(
            first.expanded(expand(failed)),
            second.expanded(expand(Ok(()))),
            third.expanded(expand(Ok(())))
        );
        assert!(outcomes.0.is_err() && outcomes.1.is_ok() && outcomes.2.is_ok());
        assert_eq!(tried.get(), 2, "after a failure the next one tries it");
        images.lease(&id).unwrap().expanded(expand(Ok(()))).await.unwrap();
        assert_eq!(tried.get(), 2);
        drop((first, second, third));
        // Nobody has used it meanwhile, so it may be compressed again.
        images.lease(&id).unwrap().expanded(expand(Ok(()))).await.unwrap();
        assert_eq!(tried.get(), 3);
    }

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
