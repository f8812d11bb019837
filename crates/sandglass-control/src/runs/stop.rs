//! What stops a run from outside: somebody who wants that, its time, or its money.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sandglass_types::StopReason;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Says once why a run shall stop.
#[derive(Debug)]
pub(crate) struct Stopper {
    said: watch::Sender<Option<StopReason>>,
    lasts: Duration,
    /// When its time is up, once it counts.
    deadline: Mutex<Option<Instant>>,
}

impl Stopper {
    /// For a run that may take so long from when its time begins.
    pub(crate) fn new(lasts: Duration) -> Self {
        Self { said: watch::Sender::new(None), lasts, deadline: Mutex::default() }
    }

    /// Says it. The first word counts.
    pub(crate) fn stop(&self, reason: StopReason) {
        self.said.send_if_modified(|said| {
            let first = said.is_none();
            said.get_or_insert(reason);
            first
        });
    }

    /// Its time begins.
    pub(crate) fn begin(&self) {
        let mut deadline = self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        deadline.get_or_insert(Instant::now() + self.lasts);
    }

    /// How much of its time is left.
    pub(crate) fn left(&self) -> Duration {
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        deadline.map_or(self.lasts, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Waits until it shall stop, and says why.
    pub(crate) async fn stopped(&self) -> StopReason {
        let mut said = self.said.subscribe();
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        let time_is_up = async {
            match deadline {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            Ok(reason) = said.wait_for(Option::is_some) => reason.unwrap_or(StopReason::Cancelled),
            () = time_is_up => {
                self.stop(StopReason::Timeout);
                StopReason::Timeout
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_word_counts() {
        let stopper = Stopper::new(Duration::from_secs(9));
        assert_eq!(stopper.left(), Duration::from_secs(9));
        stopper.begin();
        let began = Instant::now();
        assert_eq!(stopper.stopped().await, StopReason::Timeout);
        assert_eq!((began.elapsed().as_secs(), stopper.left()), (9, Duration::ZERO));
        stopper.stop(StopReason::Cancelled);
        assert_eq!(stopper.stopped().await, StopReason::Timeout);
        let stopper = Stopper::new(Duration::from_secs(9));
        stopper.stop(StopReason::BudgetExhausted);
        stopper.stop(StopReason::Cancelled);
        assert_eq!(stopper.stopped().await, StopReason::BudgetExhausted);
    }
}
