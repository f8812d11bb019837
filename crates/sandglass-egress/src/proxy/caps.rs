//! How much the connections of one sandbox may take.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::dns::Pace;
use crate::enforcer::Enforcer;
use crate::remembered::Carried;

/// The bounds on the connections of one sandbox. Bytes count from its creation on.
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
    /// Bytes that may go, both ways together. After that no connection carries another one, and none is made.
    pub bytes: Option<u64>,
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
            bytes: None,
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
    enforcer: Arc<Enforcer>,
    /// With a rate, when all that went out, and all that came in, would have gone at that rate.
    paces: Option<(NonZeroU64, [Mutex<Instant>; 2])>,
    /// Which refusals are written down.
    pub(super) refusals: Pace,
}

impl Meter {
    pub(super) fn new(caps: Caps, enforcer: Arc<Enforcer>) -> Self {
        let now = Instant::now();
        Self {
            caps,
            dials: Semaphore::new(caps.dials),
            enforcer,
            paces: caps.rate.map(|rate| (rate, [Mutex::new(now), Mutex::new(now)])),
            refusals: Pace::new(Duration::from_secs(1) / caps.refusals.get(), caps.refusals.get()),
        }
    }

    /// Waits until `count` bytes may go.
    ///
    /// # Errors
    /// They may not: the rule that says so.
    pub(super) async fn pass(&self, way: Way, count: usize) -> Result<(), &'static str> {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        let place = match way {
            Way::Out => {
                self.enforcer.count_out(count);
                0
            }
            Way::In => {
                self.enforcer.count_in(count);
                1
            }
        };
        if let Some(rule) = self.spent() {
            return Err(rule);
        }
        if let Some((rate, paces)) = &self.paces {
            let gone = &paces[place];
            let until =
                pace(*rate, &mut gone.lock().unwrap_or_else(PoisonError::into_inner), Instant::now(), count);
            tokio::time::sleep_until(until).await;
        }
        Ok(())
    }

    /// The rule by which nothing may go any more.
    pub(super) fn spent(&self) -> Option<&'static str> {
        let Carried { sent, received } = self.enforcer.carried();
        let beyond = self.caps.bytes.is_some_and(|bytes| sent.saturating_add(received) > bytes);
        beyond.then_some("limit/bytes")
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
    use crate::fixture::fixture;

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
        let meter =
            Meter::new(Caps { rate: NonZeroU64::new(1000), ..Caps::default() }, fixture("[]", &[]).enforcer);
        let start = Instant::now();
        let (out, into) = tokio::join!(meter.pass(Way::Out, 3000), meter.pass(Way::In, 2000));
        assert_eq!((out, into), (Ok(()), Ok(())));
        assert_eq!(start.elapsed(), Duration::from_secs(3));
    }

    #[tokio::test]
    async fn no_byte_goes_beyond_a_cap() {
        let meter = Meter::new(Caps { bytes: Some(10), ..Caps::default() }, fixture("[]", &[]).enforcer);
        assert_eq!(meter.pass(Way::Out, 7).await, Ok(()));
        assert_eq!(meter.pass(Way::In, 3).await, Ok(()));
        assert_eq!(meter.spent(), None);
        assert_eq!(meter.pass(Way::In, 1).await, Err("limit/bytes"));
        assert_eq!(meter.pass(Way::Out, 1).await, Err("limit/bytes"));
        assert_eq!(meter.spent(), Some("limit/bytes"));
    }

    #[tokio::test]
    async fn what_an_earlier_server_carried_counts() {
        let enforcer = fixture("[]", &[]).enforcer;
        let caps = Caps { bytes: Some(10), ..Caps::default() };
        Meter::new(caps, Arc::clone(&enforcer)).pass(Way::In, 11).await.unwrap_err();
        assert_eq!(enforcer.remembered().carried, Carried { sent: 0, received: 11 });
        assert_eq!(Meter::new(caps, enforcer).spent(), Some("limit/bytes"));
    }
}
