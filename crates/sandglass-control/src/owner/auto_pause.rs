//! The pause of a sandbox whose time is up: it is tried again until it works, for nobody is there to be told. Pure.
//!
//! A sandbox whose memory can't be kept however often that is tried is paused with its files alone, and its history says
//! why. It runs on until one of both has worked.

use std::time::Duration;

use sandglass_types::PauseMode;
use tokio::time::Instant;

/// How often it is tried to keep its memory.
const FULL_TRIES: u32 = 3;

/// The wait after the first failure; each is twice as long as the one before.
const FIRST_WAIT: Duration = Duration::from_secs(1);

/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The tries of one pause.
#[derive(Debug, Default)]
pub(super) struct Tries {
    failed: u32,
    again: Option<Instant>,
    /// Why the last try with its memory failed.
    reason: Option<String>,
}

impl Tries {
    /// How long to wait for the next one.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        self.again.map_or(Duration::ZERO, |again| again.saturating_duration_since(now))
    }

    /// What the next one keeps, if `wanted` shall be kept.
    pub(super) const fn mode(&self, wanted: PauseMode) -> PauseMode {
        if self.failed < FULL_TRIES { wanted } else { PauseMode::Filesystem }
    }

    /// What the history says of the next one, which comes because of `cause`.
    pub(super) fn why(&self, cause: &str, wanted: PauseMode) -> String {
        match &self.reason {
            Some(reason) if self.mode(wanted) != wanted => {
                format!("{cause}; only its files are kept, for its memory could not be: {reason}")
            }
            _ => cause.to_owned(),
        }
    }

    /// The next one failed.
    pub(super) fn failed(&mut self, now: Instant, wanted: PauseMode, reason: &str) {
        if self.mode(wanted) == PauseMode::Full {
            self.reason = Some(reason.to_owned());
        }
        self.again = Some(now + (FIRST_WAIT * 2_u32.saturating_pow(self.failed.min(16))).min(LONGEST_WAIT));
        self.failed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_up_only_after_some_tries_and_with_the_reason() {
        let (mut tries, mut now) = (Tries::default(), Instant::now());
        for (n, wait) in [0, 1, 2, 4, 8, 16, 32, 60, 60].into_iter().enumerate() {
            assert_eq!(tries.wait(now), Duration::from_secs(wait));
            now += tries.wait(now);
            let full = n < 3;
            let mode = if full { PauseMode::Full } else { PauseMode::Filesystem };
            assert_eq!(tries.mode(PauseMode::Full), mode);
            assert_eq!(tries.mode(PauseMode::Filesystem), PauseMode::Filesystem);
            let why = tries.why("its time is up", PauseMode::Full);
            let expected = "its time is up; only its files are kept, for its memory could not be: reason 2";
            assert_eq!(why, if full { "its time is up" } else { expected });
            assert_eq!(tries.why("its time is up", PauseMode::Filesystem), "its time is up");
            tries.failed(now, PauseMode::Full, &format!("reason {n}"));
        }
    }
}
