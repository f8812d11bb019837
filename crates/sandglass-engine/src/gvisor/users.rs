//! Who uses an image now. Its form changes only while nobody does: to compress it, one waits for nobody and gives up as soon
//! as somebody wants it; to expand it, all wait who want it, and one of them does it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use sandglass_types::SandboxId;

use crate::locks::lock;

/// The images that verbs are at work on.
#[derive(Debug, Default)]
pub(super) struct Users(Mutex<HashMap<SandboxId, Arc<UsersOfOne>>>);

/// Those of one image.
#[derive(Debug, Default)]
pub(super) struct UsersOfOne {
    form: RwLock<()>,
    /// How many want it now.
    wanted: AtomicUsize,
    /// How often somebody has wanted it.
    asked: AtomicU64,
}

/// Somebody who wants an image, until it is dropped.
#[derive(Debug)]
pub(super) struct Wanting<'a>(&'a UsersOfOne);

impl Users {
    /// Those of this image. Entries that nobody uses any more are dropped on the way.
    pub(super) fn of(&self, image: &SandboxId) -> Arc<UsersOfOne> {
        let mut all = lock(&self.0);
        all.retain(|_, users| Arc::strong_count(users) > 1);
        Arc::clone(all.entry(image.clone()).or_default())
    }
}

impl UsersOfOne {
    /// Says that somebody wants it.
    pub(super) fn want(&self) -> Wanting<'_> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.wanted.fetch_add(1, Ordering::SeqCst);
        Wanting(self)
    }

    /// How often somebody has: whoever looks seldom sees by that also who wanted it for a moment.
    pub(super) fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }

    /// Whether anybody does.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst) > 0
    }

    /// It stays in its form, as soon as nobody changes that.
    pub(super) fn stays(&self) -> RwLockReadGuard<'_, ()> {
        self.form.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The right to change its form, as soon as nobody uses it.
    pub(super) fn change(&self) -> RwLockWriteGuard<'_, ()> {
        self.form.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, if nobody uses it at this moment.
    pub(super) fn try_change(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        match self.form.try_write() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Drop for Wanting<'_> {
    fn drop(&mut self) {
        self.0.wanted.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_form_changes_while_nobody_uses_it_and_who_wants_it_is_noticed() {
        let (users, id) = (Users::default(), SandboxId::random());
        let (one, other) = (users.of(&id), users.of(&id));
        assert!(users.of(&SandboxId::random()).try_change().is_some());
        let stays = [one.stays(), other.stays()];
        assert!(one.try_change().is_none() && !one.is_wanted());
        drop(stays);
        let changing = one.try_change().unwrap();
        assert!(other.try_change().is_none());
        let (first, second) = (one.want(), other.want());
        assert!(one.is_wanted());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| drop(other.stays()));
            drop(changing);
            waits.join().unwrap();
        });
        drop(first);
        assert!(one.is_wanted(), "the other one wants it still");
        drop(second);
        assert!(!one.is_wanted());
        assert_eq!(one.asked(), 2);
        // Nobody holds a lock for those who are gone.
        drop(one.change());
        drop((one, other));
        assert!(!users.of(&id).is_wanted());
        assert_eq!(lock(&users.0).len(), 1);
    }
}
