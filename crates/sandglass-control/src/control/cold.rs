//! Snapshots that nobody has used for long: their images are compressed, one at a time, and expanded for who wants them.
//!
//! Only snapshots. The image of a template is wanted at any moment, that of a fork is gone soon, and that of a paused sandbox
//! is what somebody waits for who comes back: it is used once and then removed, so it would be expanded for nothing but the
//! wait, and there may be a computer that was made ahead for it.

use std::time::Duration;

use sandglass_engine::engine::{Compression, Feature};
use sandglass_engine::host::{HostError, RefusalKind};
use sandglass_store::SnapshotRow;
use sandglass_types::Error;
use sandglass_types::budget::Amount;
use sandglass_types::error::Chain;
use tokio::time::{Instant, sleep};

use super::{Control, injected, stored};
use crate::room;

/// How often it is looked for some, if they are not to be found sooner.
const LOOK_EVERY: Duration = Duration::from_secs(5 * 60);

/// The wait after one could not be compressed.
const RETRY: Duration = Duration::from_secs(3600);

/// The wait after one was not worth it: those that it shares its blocks with may be gone by then.
const NOT_WORTH: Duration = Duration::from_secs(24 * 3600);

/// What follows a look.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// The next one.
    Look,
    /// None: it can't be done here.
    Never,
}

impl Control {
    /// Has cold snapshots compressed until this server stops. What is under way in the host then, that gives up.
    pub(super) async fn keep_compressing(&self) {
        let shared = &self.0;
        let Some(after) =
            shared.config.compress_after.filter(|_| !shared.engine.refuses(Feature::Checkpoint))
        else {
            return;
        };
        let pause = LOOK_EVERY.min(after / 2);
        let compressing = async {
            loop {
                sleep(pause).await;
                match self.compress_cold(after).await {
                    Ok(Next::Look) => {}
                    Ok(Next::Never) => break,
                    Err(error) => {
                        tracing::warn!(error = %Chain(&error), "cold snapshots could not be looked for");
                    }
                }
            }
        };
        let _stopped = shared.stop.run_until_cancelled(compressing).await;
    }

    async fn compress_cold(&self, after: Duration) -> Result<Next, Error> {
        let shared = &self.0;
        let settled = &shared.settled;
        let before = shared.clock.now().minus(after);
        let cold = shared.store.cold_snapshots(shared.node, before).await.map_err(stored)?;
        settled.keep(&cold.iter().map(|row| row.id.clone()).collect());
        for row in cold {
            if settled.has(&row.id, Instant::now()) || shared.images.in_use(&row.id) {
                continue;
            }
            // Both forms are there for a while. Nobody gives way to what nobody waits for.
            let _promise = shared.promises.give(Amount::of(&row.limits).as_image());
            if !room::is_enough(shared).await? {
                // A smaller one may have room.
                continue;
            }
            match self.compress(&row).await {
                Ok(Compression::GivenUp) => {}
                Ok(Compression::Compressed | Compression::Already) => settled.settle(row.id, None),
                Ok(Compression::NotWorth) => settled.settle(row.id, Some(Instant::now() + NOT_WORTH)),
                Err(error) => {
                    let refusal = room::refusal(&error);
                    if refusal == Some(RefusalKind::Unsupported) {
                        tracing::warn!(error = %Chain(&error), "snapshots are not compressed");
                        return Ok(Next::Never);
                    }
                    // It may have been deleted just now.
                    if refusal != Some(RefusalKind::NotFound) {
                        tracing::warn!(snapshot = %row.id, error = %Chain(&error), "it could not be compressed");
                    }
                    settled.settle(row.id, Some(Instant::now() + RETRY));
                }
            }
        }
        Ok(Next::Look)
    }

    async fn compress(&self, row: &SnapshotRow) -> Result<Compression, Error> {
        sandglass_failpoint::hit_async("control.compress.host").await.map_err(injected)?;
        let began = Instant::now();
        let outcome = self.0.host.compress_image(&row.id.image()).await.map_err(HostError::into);
        if matches!(outcome, Ok(Compression::Compressed | Compression::NotWorth)) {
            let seconds = began.elapsed().as_secs_f32();
            tracing::info!(snapshot = %row.id, ?outcome, seconds, "nobody has used a snapshot for long");
        }
        outcome
    }
}
