//! Time in which the sandbox ran. The kernel's clocks go on while it is an image, and so would whatever waits by them: a
//! command must not lose its time while there is nobody to run it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// A clock that is stopped between a freeze and the thaw after it, in whatever life that comes.
#[derive(Debug)]
pub(crate) struct ActiveClock {
    state: Mutex<State>,
    stopped: watch::Sender<bool>,
}

#[derive(Debug)]
struct State {
    /// From here on it counts what was not away.
    start: Instant,
    away: Duration,
    stopped_at: Option<Instant>,
}

impl State {
    fn now(&self) -> Duration {
        let at = self.stopped_at.unwrap_or_else(Instant::now);
        at.saturating_duration_since(self.start).saturating_sub(self.away)
    }
}

impl Default for ActiveClock {
    fn default() -> Self {
        let state = State { start: Instant::now(), away: Duration::ZERO, stopped_at: None };
        Self { state: Mutex::new(state), stopped: watch::Sender::new(false) }
    }
}

impl ActiveClock {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops it. What sleeps by it sleeps on.
    pub(crate) fn stop(&self) {
        self.state().stopped_at.get_or_insert_with(Instant::now);
        self.stopped.send_replace(true);
    }

    /// Lets it go on, if it was stopped.
    pub(crate) fn go_on(&self) {
        let mut state = self.state();
        if let Some(at) = state.stopped_at.take() {
            state.away += at.elapsed();
        }
        drop(state);
        self.stopped.send_replace(false);
    }

    /// Sleeps for so long as this clock has it. The sleep of a stopped one ends after it went on.
    pub(crate) async fn sleep(&self, duration: Duration) {
        let end = self.state().now().saturating_add(duration);
        let mut stopped = self.stopped.subscribe();
        loop {
            // The sender lives in `self`.
            let _ = stopped.wait_for(|stopped| !stopped).await;
            let left = end.saturating_sub(self.state().now());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn time_away_does_not_count() {
        let clock = ActiveClock::default();
        let began = Instant::now();
        let away = async {
            tokio::time::sleep(SECOND * 4).await;
            clock.stop();
            clock.stop();
            tokio::time::sleep(SECOND * 1000).await;
            clock.go_on();
            clock.go_on();
        };
        tokio::join!(clock.sleep(SECOND * 10), away);
        assert_eq!(began.elapsed().as_secs(), 1010);
    }

    #[tokio::test(start_paused = true)]
    async fn who_begins_to_sleep_while_it_stands_still_gets_the_whole_time() {
        let clock = ActiveClock::default();
        let began = Instant::now();
        clock.stop();
        let going_on = async {
            tokio::time::sleep(SECOND * 100).await;
            clock.go_on();
        };
        tokio::join!(clock.sleep(SECOND * 10), going_on);
        assert_eq!(began.elapsed().as_secs(), 110);
    }
}
