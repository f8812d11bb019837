//! What sandboxes used, and what teams had, looked at every few seconds or minutes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use sandglass_engine::Stats;
use sandglass_store::Sample;
use sandglass_types::error::Chain;
use sandglass_types::{Error, Limits, SandboxId, TeamId, Timestamp};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{Control, stored};
use crate::live::Live;

/// How often sandboxes are looked at.
const EVERY: Duration = Duration::from_secs(5);

/// For how long each look is kept; after that, the first of each minute.
const FINE: Duration = Duration::from_secs(3600);

/// For how long any is.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// How often what is older is removed, and what teams have is kept.
const EVERY_MINUTE: Duration = Duration::from_secs(60);

/// How many are looked at at one time.
const AT_ONCE: usize = 8;

/// CPU time that a sandbox had used by then, in microseconds.
type Before = (Instant, u64);

/// How much of all its processors a sandbox had between two looks, in per mille. Pure.
fn per_mille(used_micros: u64, of: Duration, cpus: u32) -> u16 {
    let whole = of.as_micros().saturating_mul(u128::from(cpus)).max(1);
    let share = u128::from(used_micros).saturating_mul(1000) / whole;
    u16::try_from(share.min(1000)).unwrap_or(1000)
}

impl Control {
    /// What was seen of a sandbox of this team from `from` to `to`, both included, oldest first, and what it may use: every
    /// five seconds in the last hour, and every minute in the last day.
    ///
    /// # Errors
    /// [`sandglass_types::ErrorKind::NotFound`], or the store failed.
    pub async fn samples(
        &self,
        team: TeamId,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<(Limits, Vec<Sample>), Error> {
        let limits = self.standing(team, id).await?.limits;
        Ok((limits, self.0.store.samples(id, from, to).await.map_err(stored)?))
    }

    /// What was seen last of these sandboxes, and what they may use: of those of this team that run or are paused.
    ///
    /// # Errors
    /// The store failed.
    pub async fn last_samples(
        &self,
        team: TeamId,
        ids: &[SandboxId],
    ) -> Result<Vec<(Limits, Sample)>, Error> {
        self.0.store.last_samples(team, ids).await.map_err(stored)
    }

    /// Looks at all that run until this server stops.
    pub(super) async fn keep_sampling(&self) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before: HashMap<SandboxId, Before> = HashMap::new();
        let mut thinned: Option<Instant> = None;
        let mut counted = self.0.clock.now();
        while self.0.stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let samples = self.sample(&mut before).await;
            if !samples.is_empty()
                && let Err(error) = self.0.store.record_samples(&samples).await
            {
                tracing::warn!(error = %Chain(&error), "what sandboxes used could not be kept");
            }
            if thinned.is_none_or(|at| at.elapsed() >= EVERY_MINUTE) {
                let now = self.0.clock.now();
                let (fine, kept) = (now.minus(FINE), now.minus(KEPT));
                if let Err(error) = self.0.store.thin_samples(fine, kept).await {
                    tracing::warn!(error = %Chain(&error), "what sandboxes used long ago could not be removed");
                }
                counted = self.once_a_minute(counted).await;
                thinned = Some(Instant::now());
            }
        }
        self.note_uses().await;
    }

    /// Keeps what teams have, and when their keys were used last. Returns when that was, for the next time.
    async fn once_a_minute(&self, before: Timestamp) -> Timestamp {
        let now = self.0.clock.now();
        let store = &self.0.store;
        let counted = async {
            store.sample_teams(self.0.node, before, now).await?;
            store.purge_team_samples(now.minus(KEPT)).await
        };
        if let Err(error) = counted.await {
            tracing::warn!(error = %Chain(&error), "what teams have could not be kept");
        }
        self.note_uses().await;
        now
    }

    async fn note_uses(&self) {
        if let Err(error) = self.0.store.note_uses().await {
            tracing::warn!(error = %Chain(&error), "when keys were used last could not be kept");
        }
    }

    /// One look. Of one that was not seen before, nobody can say how much CPU it had.
    async fn sample(&self, before: &mut HashMap<SandboxId, Before>) -> Vec<Sample> {
        let looked: Vec<(Arc<Live>, Before, Stats)> = stream::iter(self.0.live.all())
            .map(|live| async move {
                let stats = self.0.host.stats(live.id()).await.ok()?;
                let now = (Instant::now(), stats.cpu_micros);
                Some((live, now, stats))
            })
            .buffer_unordered(AT_ONCE)
            .filter_map(std::future::ready)
            .collect()
            .await;
        let at = self.0.clock.now();
        let known = std::mem::take(before);
        let mut samples = Vec::new();
        for (live, now, stats) in looked {
            if let Some((then, used)) = known.get(live.id()) {
                let of = now.0.duration_since(*then);
                samples.push(Sample {
                    sandbox: live.id().clone(),
                    at,
                    cpu_per_mille: per_mille(now.1.saturating_sub(*used), of, live.limits().cpus()),
                    memory_bytes: stats.memory_bytes,
                    disk_bytes: stats.disk_bytes,
                });
            }
            before.insert(live.id().clone(), now);
        }
        samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_all_processors() {
        let second = Duration::from_secs(1);
        assert_eq!(per_mille(500_000, second, 1), 500);
        assert_eq!(per_mille(500_000, second, 2), 250);
        assert_eq!(per_mille(2_000_000, second, 2), 1000);
        // What is over is of what was counted late.
        assert_eq!(per_mille(9_000_000, second, 2), 1000);
        assert_eq!(per_mille(0, Duration::ZERO, 0), 0);
        assert_eq!(per_mille(u64::MAX, Duration::ZERO, 1), 1000);
    }
}
