//! How often one sandbox uses one connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sandglass_broker::ConnectionName;
use sandglass_broker::connection::Limits;
use sandglass_types::SandboxId;

const MINUTE: Duration = Duration::from_secs(60);

/// With more entries than this, those that count no more are dropped.
const MANY: usize = 1024;

type Key = (SandboxId, ConnectionName);

/// Counts uses.
#[derive(Debug, Clone, Default)]
pub(crate) struct Limiter(Arc<Mutex<HashMap<Key, Used>>>);

#[derive(Debug)]
struct Used {
    now: u32,
    since: Instant,
    in_minute: u32,
}

impl Used {
    fn counts(&self, at: Instant) -> bool {
        self.now > 0 || at.duration_since(self.since) < MINUTE
    }
}

/// The right to one use; it is over when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    of: Limiter,
    key: Key,
}

impl Limiter {
    /// A use that begins now.
    ///
    /// # Errors
    /// There are too many: in how many seconds there may be one again.
    pub(crate) fn take(
        &self,
        sandbox: &SandboxId,
        name: &ConnectionName,
        limits: Limits,
        at: Instant,
    ) -> Result<Turn, u64> {
        let key = (sandbox.clone(), name.clone());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MANY {
            all.retain(|_, used| used.counts(at));
        }
        let used = all.entry(key.clone()).or_insert(Used { now: 0, since: at, in_minute: 0 });
        if at.duration_since(used.since) >= MINUTE {
            (used.since, used.in_minute) = (at, 0);
        }
        if used.in_minute >= limits.requests_per_minute {
            return Err((used.since + MINUTE).duration_since(at).as_secs() + 1);
        }
        if used.now >= limits.concurrent {
            return Err(1);
        }
        used.now += 1;
        used.in_minute += 1;
        Ok(Turn { of: self.clone(), key })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut all = self.of.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(used) = all.get_mut(&self.key) {
            used.now -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_uses_a_connection_so_often_and_no_more() {
        let (limiter, start) = (Limiter::default(), Instant::now());
        let limits = Limits { requests_per_minute: 3, concurrent: 2, body_bytes: 0 };
        let (one, other) = (SandboxId::random(), SandboxId::random());
        let [a, b] = ["a", "b"].map(|name| name.parse::<ConnectionName>().unwrap());
        let take = |sandbox, name, seconds| {
            limiter.take(sandbox, name, limits, start + Duration::from_secs(seconds))
        };
        let first = take(&one, &a, 0).unwrap();
        let second = take(&one, &a, 1).unwrap();
        assert_eq!(take(&one, &a, 2).unwrap_err(), 1, "two at a time");
        drop((take(&other, &a, 2).unwrap(), take(&one, &b, 2).unwrap()));
        drop(first);
        drop(take(&one, &a, 3).unwrap());
        drop(second);
        assert_eq!(take(&one, &a, 10).unwrap_err(), 51, "three in a minute");
        drop(take(&one, &a, 60).unwrap());
    }

    #[test]
    fn what_counts_no_more_is_forgotten() {
        let (limiter, start, name) = (Limiter::default(), Instant::now(), "a".parse().unwrap());
        let held = limiter.take(&SandboxId::random(), &name, Limits::default(), start).unwrap();
        for second in 0..5000 {
            let at = start + Duration::from_secs(second);
            drop(limiter.take(&SandboxId::random(), &name, Limits::default(), at).unwrap());
        }
        assert!(limiter.0.lock().unwrap().len() <= MANY + 1);
        assert!(limiter.0.lock().unwrap().contains_key(&held.key));
    }
}
