//! Wall-clock time as a value, and where it comes from.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A point in wall-clock time, in milliseconds since the Unix epoch. Rows and messages carry it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(i64);

impl Timestamp {
    /// From milliseconds since the Unix epoch.
    #[must_use]
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// This time plus `span`, clipped at the end of representable time.
    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }

    /// This time minus `span`, clipped at the start of representable time.
    #[must_use]
    pub fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }

    /// How long until `self`, seen from `now`; zero if it has passed.
    #[must_use]
    pub fn since(self, now: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(now.0)).unwrap_or(0))
    }
}

/// A text that is no [`Timestamp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a time of RFC 3339, such as 2026-01-31T12:00:00Z")]
pub struct InvalidTime;

impl FromStr for Timestamp {
    type Err = InvalidTime;

    fn from_str(text: &str) -> Result<Self, InvalidTime> {
        text.parse::<jiff::Timestamp>().map(|time| Self(time.as_millisecond())).map_err(|_| InvalidTime)
    }
}

impl fmt::Display for Timestamp {
    /// RFC 3339 in UTC with milliseconds, as the APIs write it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = jiff::Timestamp::from_millisecond(self.0).unwrap_or(jiff::Timestamp::MAX);
        write!(f, "{time:.3}")
    }
}

/// A source of wall-clock time; tests inject their own.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The time now.
    fn now(&self) -> Timestamp;
}

/// The clock of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp(jiff::Timestamp::now().as_millisecond())
    }
}

/// A clock that moves only when told to, in either direction.
#[derive(Debug)]
pub struct ManualClock(AtomicI64);

impl ManualClock {
    /// A clock that stands at `start`.
    #[must_use]
    pub const fn new(start: Timestamp) -> Self {
        Self(AtomicI64::new(start.0))
    }

    /// Moves the clock forward.
    pub fn advance(&self, span: Duration) {
        self.0.store(self.now().plus(span).0, Ordering::SeqCst);
    }

    /// Moves the clock back, as a person or a time server may.
    pub fn set_back(&self, span: Duration) {
        self.0.store(self.now().minus(span).0, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_as_rfc_3339() {
        assert_eq!(Timestamp::from_millis(1_764_424_800_123).to_string(), "2025-11-29T14:00:00.123Z");
        assert_eq!(Timestamp::from_millis(0).to_string(), "1970-01-01T00:00:00.000Z");
        let read = |text: &str| text.parse::<Timestamp>().map(Timestamp::as_millis);
        assert_eq!(read("2025-11-29T15:00:00.123+01:00"), Ok(1_764_424_800_123));
        assert_eq!(read("yesterday"), Err(InvalidTime));
    }

    #[test]
    fn spans_do_not_go_negative_or_overflow() {
        let (early, late) = (Timestamp::from_millis(5), Timestamp::from_millis(9));
        assert_eq!(late.since(early), Duration::from_millis(4));
        assert_eq!(early.since(late), Duration::ZERO);
        assert_eq!(early.plus(Duration::MAX), Timestamp::from_millis(i64::MAX));
    }
}
