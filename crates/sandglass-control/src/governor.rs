//! Says which sandboxes get how much of the machine's attention.
//!
//! Those that nobody uses are slowed: an idle one would otherwise take some percent of a core for ever, because its engine
//! looks for work many times in a millisecond. A sandbox into which a stream is open, or that works on something by itself,
//! keeps its pace. And one of which somebody has just asked something goes before those that work by themselves.

use std::sync::Arc;
use std::time::Duration;

use sandglass_engine::engine::Pace;
use sandglass_engine::host::{Host, HostError};
use sandglass_types::SandboxId;
use sandglass_types::error::Chain;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::live::Live;

/// How long nobody must have used a sandbox before it is slowed.
const IDLE_AFTER: Duration = Duration::from_secs(2);

/// How often a slowed sandbox is looked at: it may have begun to work by itself.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Above this share of a core, in percent, it works on something. The engine alone takes up to 4 % at full pace, and a
/// look costs some as well.
const WORKING_PERCENT: u128 = 10;

/// How often a sandbox is favoured anew while somebody waits for it. A favour lasts twice as long.
const FAVOUR_EVERY: Duration = Duration::from_millis(200);

/// For how long somebody who opened a stream counts as waiting, if it does not end before. Whoever waits for longer waits
/// for work.
const WAITING: Duration = Duration::from_secs(2);

/// What was seen of a sandbox during one stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// A stream was open, opened or ended.
    Used,
    /// No stream; its processes took this much of the time.
    Alone { cpu: Duration, of: Duration },
}

/// The pace for what was seen. Pure.
const fn pace_for(seen: Seen) -> Pace {
    match seen {
        Seen::Used => Pace::Full,
        Seen::Alone { cpu, of } if cpu.as_micros() * 100 >= of.as_micros() * WORKING_PERCENT => Pace::Full,
        Seen::Alone { .. } => Pace::Idle,
    }
}

/// Governs one sandbox, whose pace may be this one, for as long as the host answers for it.
pub(crate) async fn govern(host: Host, live: Arc<Live>, mut pace: Pace) {
    let (id, mut streams) = (live.id().clone(), live.streams());
    drop(live);
    let mut wanted = Pace::Full;
    loop {
        if wanted != pace {
            match host.pace(&id, wanted).await {
                Ok(()) => pace = wanted,
                Err(HostError::Gone) => return,
                Err(error) => {
                    tracing::debug!(sandbox = %id, error = %Chain(&error), "its pace could not be set");
                }
            }
        }
        let stretch = if pace == Pace::Idle { LOOK_EVERY } else { IDLE_AFTER };
        match look(&host, &id, &mut streams, stretch).await {
            Ok(seen) => wanted = pace_for(seen),
            Err(error) => {
                tracing::debug!(sandbox = %id, error = %Chain(&error), "it is not governed any more");
                return;
            }
        }
    }
}

/// Favours one sandbox while somebody waits for it, for as long as the host answers for it.
pub(crate) async fn favour(host: Host, live: Arc<Live>) {
    let (id, mut streams) = (live.id().clone(), live.streams());
    drop(live);
    while streams.changed().await.is_ok() {
        let mut waits_until = Instant::now() + WAITING;
        while *streams.borrow_and_update() > 0 && Instant::now() < waits_until {
            match host.favour(&id).await {
                Err(HostError::Gone) => return,
                Err(error) => {
                    tracing::debug!(sandbox = %id, error = %Chain(&error), "it could not be favoured");
                }
                Ok(()) => {}
            }
            sleep(FAVOUR_EVERY).await;
            match streams.has_changed() {
                Err(_) => return,
                Ok(true) => waits_until = Instant::now() + WAITING,
                Ok(false) => {}
            }
        }
    }
}

/// Looks at a sandbox for so long, or until it is used.
async fn look(
    host: &Host,
    id: &SandboxId,
    streams: &mut watch::Receiver<usize>,
    stretch: Duration,
) -> Result<Seen, HostError> {
    if *streams.borrow_and_update() > 0 {
        // Nothing to decide before it ends.
        let _sender_is_gone = streams.changed().await.is_err();
        return Ok(Seen::Used);
    }
    let (began, before) = (Instant::now(), host.stats(id).await?.cpu_micros);
    if timeout(stretch, streams.changed()).await.is_ok() {
        return Ok(Seen::Used);
    }
    let used = host.stats(id).await?.cpu_micros.saturating_sub(before);
    Ok(Seen::Alone { cpu: Duration::from_micros(used), of: began.elapsed() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_uses_and_does_nothing_is_slowed() {
        let of = Duration::from_secs(2);
        let alone = |millis| Seen::Alone { cpu: Duration::from_millis(millis), of };
        assert_eq!(pace_for(Seen::Used), Pace::Full);
        assert_eq!(pace_for(alone(0)), Pace::Idle);
        assert_eq!(pace_for(alone(80)), Pace::Idle, "an engine at full pace takes 4 %");
        assert_eq!(pace_for(alone(200)), Pace::Full);
        assert_eq!(pace_for(alone(4_000)), Pace::Full);
        assert_eq!(pace_for(Seen::Alone { cpu: Duration::ZERO, of: Duration::ZERO }), Pace::Full);
    }
}
