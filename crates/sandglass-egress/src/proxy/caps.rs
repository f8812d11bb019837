//! How much the connections of one sandbox may take.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::dns::Pace;

/// The bounds on the connections of one sandbox, counted since its server took it up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// Connections at a time, also those that are not decided yet. One more is reset.
    pub flows: usize,
    /// How many of them may be waiting for a server to take them. The others wait for their turn.
    pub dials: usize,
    /// How long the guest may take to send a ClientHello or the head of a request.
    pub head: Duration,
    /// How long a server may take to take a connection, with the wait for a turn.
    pub dial: Duration,
    /// How long a connection may rest. It ends after one to two times as long without a byte in either direction.
    pub idle: Duration,
    /// Bytes that may leave. With the first one more, connections end.
    pub sent: Option<u64>,
    /// Bytes that may come in. With the first one more, connections end.
    pub received: Option<u64>,
    /// Bytes per second in each direction.
    pub rate: Option<NonZeroU64>,
    /// Receipts of refused connections per second, and at once after a silence. More are counted and left out.
    pub refusals: NonZeroU32,
}

impl Default for Caps {
    fn default() -> Self {
        Self {
            flows: 256,
            dials: 64,
            head: Duration::from_secs(10),
            dial: Duration::from_secs(10),
            idle: Duration::from_mins(10),
            sent: None,
            received: None,
            rate: None,
            refusals: const { NonZeroU32::new(20).expect("not zero") },
        }
    }
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Out of the sandbox.
    Out,
    /// Into the sandbox.
    In,
}

/// Measures what [`Caps`] bounds.
#[derive(Debug)]
pub(super) struct Meter {
    pub(super) caps: Caps,
    pub(super) dials: Semaphore,
    out: Total,
    into: Total,
    /// Which refusals are written down.
    pub(super) refusals: Pace,
}

/// What went one way.
#[derive(Debug)]
struct Total {
    bytes: AtomicU64,
    cap: Option<u64>,
    /// What exceeds it, in receipts.
    rule: &'static str,
    /// With the rate, when all that went would have gone at that rate.
    pace: Option<(NonZeroU64, Mutex<Instant>)>,
}

impl Meter {
    pub(super) fn new(caps: Caps) -> Self {
        let now = Instant::now();
        let total = |cap, rule| Total {
            bytes: AtomicU64::new(0),
            cap,
            rule,
            pace: caps.rate.map(|rate| (rate, Mutex::new(now))),
        };
        Self {
            caps,
            dials: Semaphore::new(caps.dials),
            out: total(caps.sent, "limit/sent"),
            into: total(caps.received, "limit/received"),
            refusals: Pace::new(Duration::from_secs(1) / caps.refusals.get(), caps.refusals.get()),
        }
    }

    /// Waits until `count` bytes may go.
    ///
    /// # Errors
    /// They may not: the rule that says so.
    pub(super) async fn pass(&self, way: Way, count: usize) -> Result<(), &'static str> {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        let total = match way {
            Way::Out => &self.out,
            Way::In => &self.into,
        };
        let before = total.bytes.fetch_add(count, Ordering::Relaxed);
        if total.cap.is_some_and(|cap| before.saturating_add(count) > cap) {
            return Err(total.rule);
        }
        if let Some((rate, gone)) = &total.pace {
            let until =
                pace(*rate, &mut gone.lock().unwrap_or_else(PoisonError::into_inner), Instant::now(), count);
            tokio::time::sleep_until(until).await;
        }
        Ok(())
    }

    /// The rule by which nothing may go any more.
    pub(super) fn spent(&self) -> Option<&'static str> {
        let over = |total: &&Total| total.cap.is_some_and(|cap| total.bytes.load(Ordering::Relaxed) > cap);
        [&self.out, &self.into].into_iter().find(over).map(|total| total.rule)
    }
}

/// When `count` bytes may go, so that all bytes go at `rate`. What was not used of the last second is not lost.
fn pace(rate: NonZeroU64, gone: &mut Instant, now: Instant, count: u64) -> Instant {
    let earliest = now.checked_sub(Duration::from_secs(1)).unwrap_or(now);
    let start = (*gone).max(earliest);
    let nanos = u128::from(count) * 1_000_000_000 / u128::from(rate.get());
    *gone = start + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
    *gone
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_at_the_rate_after_a_second_s_worth() {
        let (rate, now) = (NonZeroU64::new(1000).unwrap(), Instant::now() + Duration::from_hours(1));
        let mut gone = now - Duration::from_mins(1);
        assert_eq!(pace(rate, &mut gone, now, 1000), now, "what was saved up goes at once");
        assert_eq!(pace(rate, &mut gone, now, 500), now + Duration::from_millis(500));
        assert_eq!(pace(rate, &mut gone, now, 500), now + Duration::from_secs(1));
        let later = now + Duration::from_millis(1500);
        assert_eq!(pace(rate, &mut gone, later, 500), later, "and of what was saved since, as much");
    }

    #[tokio::test(start_paused = true)]
    async fn each_direction_has_the_rate_to_itself() {
        let meter = Meter::new(Caps { rate: NonZeroU64::new(1000), ..Caps::default() });
        let start = Instant::now();
        let (out, into) = tokio::join!(meter.pass(Way::Out, 3000), meter.pass(Way::In, 2000));
        assert_eq!((out, into), (Ok(()), Ok(())));
        assert_eq!(start.elapsed(), Duration::from_secs(3));
    }

    #[tokio::test]
    async fn no_byte_goes_beyond_a_cap() {
        let meter = Meter::new(Caps { sent: Some(10), ..Caps::default() });
        assert_eq!(meter.pass(Way::Out, 10).await, Ok(()));
        assert_eq!(meter.pass(Way::In, 1000).await, Ok(()), "the other way has its own");
        assert_eq!(meter.spent(), None);
        assert_eq!(meter.pass(Way::Out, 1).await, Err("limit/sent"));
        assert_eq!(meter.spent(), Some("limit/sent"));
    }
}
