//! How often something may happen.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Lets events pass at a rate, and so many at once after a silence. The rest wait, in the order of their coming.
#[derive(Debug)]
pub(crate) struct Pace {
    interval: Duration,
    burst: Duration,
    /// When the next one would pass if there were no bursts.
    next: Mutex<Instant>,
}

impl Pace {
    /// One event for each `interval`, and `burst` at once.
    pub(crate) fn new(interval: Duration, burst: u32) -> Self {
        Self { interval, burst: interval * burst.saturating_sub(1), next: Mutex::new(Instant::now()) }
    }

    /// Waits until one more may pass.
    pub(crate) async fn pass(&self) {
        if let Some(at) = self.due(|_| true) {
            sleep_until(at).await;
        }
    }

    /// Whether one more may pass now.
    pub(crate) fn try_pass(&self) -> bool {
        let now = Instant::now();
        self.due(|at| at <= now).is_none_or(|at| at <= now)
    }

    /// When one more may pass, at once if `None`; `takes` says whether it does then.
    fn due(&self, takes: impl Fn(Instant) -> bool) -> Option<Instant> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let due = (*next).max(Instant::now());
        let at = due.checked_sub(self.burst);
        if at.is_none_or(takes) {
            *next = due + self.interval;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(10);

    /// How long `count` events take.
    async fn time(pace: &Pace, count: u32) -> Duration {
        let start = Instant::now();
        for _ in 0..count {
            pace.pass().await;
        }
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_at_once_and_the_rest_at_the_rate() {
        let pace = Pace::new(INTERVAL, 5);
        assert_eq!(time(&pace, 5).await, Duration::ZERO);
        assert_eq!(time(&pace, 1).await, INTERVAL);
        assert_eq!(time(&pace, 100).await, 100 * INTERVAL);
        tokio::time::advance(2 * INTERVAL).await;
        assert_eq!(time(&pace, 2).await, Duration::ZERO);
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(time(&pace, 5).await, Duration::ZERO, "silence saves no more than a burst");
        assert_eq!(time(&pace, 1).await, INTERVAL);
    }

    #[tokio::test(start_paused = true)]
    async fn what_may_not_pass_now_takes_nobody_s_place() {
        let pace = Pace::new(INTERVAL, 5);
        let passed = |pace: &Pace| (0..50).filter(|_| pace.try_pass()).count();
        assert_eq!(passed(&pace), 5);
        tokio::time::advance(2 * INTERVAL).await;
        assert_eq!(passed(&pace), 2);
    }
}
