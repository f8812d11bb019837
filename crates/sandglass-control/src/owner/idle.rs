//! How long nobody has used a sandbox. Pure.
//!
//! It is used while a stream into it is open, and while a command runs that a client started, whether the client still
//! listens or not. The window begins anew when a server takes the sandbox up and when it is resumed, so that neither time
//! away nor time without a server counts.

use std::time::Duration;

use tokio::time::Instant;

/// The wait for the next look at a sandbox that nobody is connected to, and in which a command runs.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// The idle window of a sandbox that runs.
#[derive(Debug)]
pub(super) struct Idle {
    window: Duration,
    /// When it was used last, as far as is known.
    used: Instant,
    /// When its agent is asked at the earliest.
    ask: Instant,
}

impl Idle {
    pub(super) fn new(window: Duration, now: Instant) -> Self {
        Self { window, used: now, ask: now }
    }

    /// A stream was open, opened or ended.
    pub(super) fn used(&mut self, now: Instant) {
        self.used = now;
    }

    /// How much of the window is left; zero if nobody has used it for so long, unless a command has run.
    pub(super) fn left(&self, now: Instant) -> Duration {
        self.window.saturating_sub(now.saturating_duration_since(self.used))
    }

    /// Whether its agent is to be asked how long no command has run.
    pub(super) fn wants_to_know(&self, now: Instant) -> bool {
        self.left(now).is_zero() && now >= self.ask
    }

    /// How long no command has run, as its agent says, or that it doesn't. Returns whether the window is over.
    pub(super) fn told(&mut self, now: Instant, idle: Option<Duration>) -> bool {
        let idle = idle.unwrap_or_default();
        if let Some(ended) = now.checked_sub(idle) {
            self.used = self.used.max(ended);
        }
        if idle.is_zero() {
            self.ask = now + LOOK_AGAIN.min(self.window);
        }
        self.left(now).is_zero()
    }

    /// How long to wait until there may be something to do.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        self.left(now).max(self.ask.saturating_duration_since(now))
    }

    /// What its history says.
    pub(super) fn why(&self) -> String {
        format!("nobody has used it for {:?}", self.window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn the_window_is_over_when_neither_stream_nor_command_was_there_for_so_long() {
        let start = Instant::now();
        let mut idle = Idle::new(MINUTE, start);
        assert_eq!((idle.left(start), idle.wait(start)), (MINUTE, MINUTE));
        let now = start + MINUTE / 2;
        idle.used(now);
        assert_eq!(idle.wait(now), MINUTE);
        assert!(!idle.wants_to_know(now + MINUTE - Duration::from_millis(1)));
        let now = now + MINUTE;
        assert!(idle.wants_to_know(now));
        // A command runs: it counts from its end, whenever that is.
        assert!(!idle.told(now, Some(Duration::ZERO)));
        assert_eq!(idle.wait(now), MINUTE);
        let now = now + MINUTE;
        assert!(idle.wants_to_know(now));
        assert!(!idle.told(now, Some(MINUTE / 3)), "it ended in between");
        assert_eq!(idle.wait(now), MINUTE - MINUTE / 3);
        let now = now + MINUTE;
        assert!(idle.told(now, Some(MINUTE + MINUTE / 3)));
        assert_eq!(idle.why(), "nobody has used it for 60s");
    }

    #[test]
    fn an_agent_that_says_nothing_is_busy_and_time_away_is_no_idle_time() {
        let start = Instant::now();
        let mut idle = Idle::new(MINUTE, start);
        let now = start + MINUTE;
        assert!(!idle.told(now, None));
        assert_eq!(idle.wait(now), MINUTE);
        // As a sandbox says that was resumed a moment ago.
        let mut idle = Idle::new(MINUTE, start);
        assert!(!idle.told(start, Some(MINUTE * 1000)));
        assert_eq!(idle.left(start), MINUTE);
        assert!(!idle.told(start, Some(Duration::MAX)));
    }
}
