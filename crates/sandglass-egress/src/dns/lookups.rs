//! Questions to the resolver that are on their way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandglass_types::net::Hostname;
use tokio::sync::OnceCell;

use crate::resolver::{Resolve, ResolveError, Resolved};

type Outcome = Result<Resolved, ResolveError>;

/// Asks a resolver, but only once at a time about one name. How many names, the caller bounds.
#[derive(Debug)]
pub(crate) struct Lookups {
    resolver: Arc<dyn Resolve>,
    under_way: Mutex<HashMap<Hostname, Arc<OnceCell<Outcome>>>>,
}

impl Lookups {
    pub(crate) fn new(resolver: Arc<dyn Resolve>) -> Self {
        Self { resolver, under_way: Mutex::default() }
    }

    /// What the resolver says, or will have said to one who asked before.
    pub(crate) async fn resolve(&self, name: &Hostname) -> Outcome {
        let joined = Joined::new(self, name);
        // If the one that asks is dropped, another that waits asks in its place.
        joined.cell.get_or_init(|| self.resolver.resolve(name)).await.clone()
    }

    fn under_way(&self) -> MutexGuard<'_, HashMap<Hostname, Arc<OnceCell<Outcome>>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part in a question. The last one to leave removes it, so that the next gets an answer of its own.
struct Joined<'a> {
    lookups: &'a Lookups,
    name: &'a Hostname,
    cell: Arc<OnceCell<Outcome>>,
}

impl<'a> Joined<'a> {
    fn new(lookups: &'a Lookups, name: &'a Hostname) -> Self {
        let cell = Arc::clone(lookups.under_way().entry(name.clone()).or_default());
        Self { lookups, name, cell }
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        let mut under_way = self.lookups.under_way();
        // One count is the table's, one this; nobody joins while the table is locked.
        if Arc::strong_count(&self.cell) == 2 {
            under_way.remove(self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use async_trait::async_trait;
    use tokio::sync::Semaphore;
    use tokio::task::JoinSet;

    use super::*;

    /// Answers when a permit comes, and counts.
    #[derive(Debug)]
    struct Slow {
        asked: AtomicUsize,
        permits: Semaphore,
    }

    #[async_trait]
    impl Resolve for Slow {
        async fn resolve(&self, _: &Hostname) -> Outcome {
            self.asked.fetch_add(1, Ordering::SeqCst);
            self.permits.acquire().await.unwrap().forget();
            Ok(Resolved { addresses: Vec::new(), ttl: Duration::ZERO })
        }
    }

    fn lookups() -> (Arc<Slow>, Arc<Lookups>) {
        let slow = Arc::new(Slow { asked: AtomicUsize::new(0), permits: Semaphore::new(0) });
        (Arc::clone(&slow), Arc::new(Lookups::new(slow)))
    }

    fn ask(tasks: &mut JoinSet<Outcome>, lookups: &Arc<Lookups>, name: &str) {
        let (lookups, name) = (Arc::clone(lookups), name.parse().unwrap());
        tasks.spawn(async move { lookups.resolve(&name).await });
    }

    #[tokio::test]
    async fn questions_about_one_name_are_joined_while_one_is_under_way() {
        let (slow, lookups) = lookups();
        let mut tasks = JoinSet::new();
        for _ in 0..50 {
            ask(&mut tasks, &lookups, "a.example");
        }
        ask(&mut tasks, &lookups, "b.example");
        while slow.asked.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        slow.permits.add_permits(2);
        while let Some(outcome) = tasks.join_next().await {
            assert!(outcome.unwrap().is_ok());
        }
        assert_eq!(slow.asked.load(Ordering::SeqCst), 2);
        assert!(lookups.under_way().is_empty());
        slow.permits.add_permits(1);
        assert!(lookups.resolve(&"a.example".parse().unwrap()).await.is_ok());
        assert_eq!(slow.asked.load(Ordering::SeqCst), 3, "an answer is not kept");
    }

    #[tokio::test]
    async fn one_that_leaves_hands_the_question_on() {
        let (slow, lookups) = lookups();
        let mut first = JoinSet::new();
        ask(&mut first, &lookups, "a.example");
        while slow.asked.load(Ordering::SeqCst) < 1 {
            tokio::task::yield_now().await;
        }
        let mut second = JoinSet::new();
        ask(&mut second, &lookups, "a.example");
        first.shutdown().await;
        slow.permits.add_permits(1);
        assert!(second.join_next().await.unwrap().unwrap().is_ok());
        assert_eq!(slow.asked.load(Ordering::SeqCst), 2);
        assert!(lookups.under_way().is_empty());
        ask(&mut first, &lookups, "a.example");
        while slow.asked.load(Ordering::SeqCst) < 3 {
            tokio::task::yield_now().await;
        }
        first.shutdown().await;
        assert!(lookups.under_way().is_empty(), "nothing stays when all have left");
    }
}
