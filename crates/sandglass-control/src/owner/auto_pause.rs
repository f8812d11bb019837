//! The pause of a sandbox whose time is up: it is tried again until it works, for nobody is there to be told. Pure.
//!
//! A sandbox whose memory can't be kept however often that is tried is paused with its files alone, and its history says
//! why. It runs on until one of both has worked.

use std::time::Duration;

use sandglass_types::PauseMode;
use tokio::time::Instant;

/// How often it is tried to keep the memory of one that holds what no image can have.
const FULL_TRIES: u32 = 3;

/// How long it is tried where something else is in the way, a full disk for example.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// The wait after the first failure; each is twice as long as the one before.
const FIRST_WAIT: Duration = Duration::from_secs(1);

/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// What was in the way of a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hindrance {
    /// The sandbox itself, and that mostly stays so.
    Own,
    /// What may be over at the next try.
    Other,
}

/// The tries of one pause.
#[derive(Debug, Default)]
pub(super) struct Tries {
    failed: u32,
    /// Of them, because of the sandbox itself.
    own: u32,
    first: Option<Instant>,
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
    pub(super) fn mode(&self, wanted: PauseMode, now: Instant) -> PauseMode {
        let for_long = self.first.is_some_and(|first| now.saturating_duration_since(first) >= PATIENCE);
        if self.own >= FULL_TRIES || for_long { PauseMode::Filesystem } else { wanted }
    }

    /// What the history says of the next one, which keeps `mode` and comes because of `cause`.
    pub(super) fn why(&self, cause: &str, wanted: PauseMode, mode: PauseMode) -> String {
        match &self.reason {
            Some(reason) if mode != wanted => {
                format!("{cause}; only its files are kept, for its memory could not be: {reason}")
            }
            _ => cause.to_owned(),
        }
    }

    /// One that was to keep `mode` failed.
    pub(super) fn failed(&mut self, now: Instant, mode: PauseMode, hindrance: Hindrance, reason: &str) {
        if mode == PauseMode::Full {
            self.reason = Some(reason.to_owned());
            self.own += u32::from(hindrance == Hindrance::Own);
        }
        self.first.get_or_insert(now);
        self.again = Some(now + (FIRST_WAIT * 2_u32.saturating_pow(self.failed.min(16))).min(LONGEST_WAIT));
        self.failed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use PauseMode::{Filesystem, Full};

    #[test]
    fn memory_is_given_up_only_after_some_tries_and_with_the_reason() {
        let (mut tries, mut now) = (Tries::default(), Instant::now());
        for (n, wait) in [0, 1, 2, 4, 8, 16, 32, 60, 60].into_iter().enumerate() {
            assert_eq!(tries.wait(now), Duration::from_secs(wait));
            now += tries.wait(now);
            let mode = if n < 3 { Full } else { Filesystem };
            assert_eq!(tries.mode(Full, now), mode);
            assert_eq!(tries.mode(Filesystem, now), Filesystem);
            let expected = "its time is up; only its files are kept, for its memory could not be: reason 2";
            assert_eq!(
                tries.why("its time is up", Full, mode),
                if n < 3 { "its time is up" } else { expected }
            );
            assert_eq!(tries.why("its time is up", Filesystem, Filesystem), "its time is up");
            tries.failed(now, mode, Hindrance::Own, &format!("reason {n}"));
        }
    }

    #[test]
    fn for_what_may_be_over_soon_memory_is_not_given_up_soon() {
        let (mut tries, start) = (Tries::default(), Instant::now());
        let mut now = start;
        while tries.mode(Full, now) == Full {
            tries.failed(now, Full, Hindrance::Other, "the disk is full");
            now += tries.wait(now);
        }
        assert!(now - start >= PATIENCE && now - start < PATIENCE + LONGEST_WAIT * 2, "{:?}", now - start);
    }
}
