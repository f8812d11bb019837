//! Copies of a template that are made before anybody asks for one.

use std::sync::Arc;
use std::time::Duration;

use sandglass_engine::engine::Pace;
use sandglass_store::SandboxRow;
use sandglass_types::{Error, ErrorKind, PauseMode};
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use super::bring_up::{Means, Origin, come_up};
use crate::command;
use crate::images::Lease;
use crate::live::Live;
use crate::shared::Shared;

/// How long what served it while it was made may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Makes a copy of an image that is as `row` says, and no one's: it has no token and no sockets in its airlock, so none of
/// its packets goes anywhere. It has run two login shells, and stands still when this returns.
///
/// # Errors
/// What went wrong. The caller removes what there is of it.
pub(crate) async fn make_unused(shared: &Arc<Shared>, row: &SandboxRow, lease: Lease) -> Result<(), Error> {
    let (gone, tasks) = (shared.stop.child_token(), TaskTracker::new());
    let means = Means {
        shared: Arc::clone(shared),
        row: row.clone(),
        ends: Instant::now() + row.end_at.since(row.created_at),
        enforcer: None,
        gone: gone.clone(),
        tasks: tasks.clone(),
    };
    let made = async {
        let live = come_up(&means, Origin::Unused(lease)).await?;
        if shared.config.warm_up {
            command::warm_up(&live, row).await?;
        }
        stop_clock(&live).await
    }
    .await;
    // Whoever takes it has a session of its own.
    gone.cancel();
    tasks.close();
    let ended = timeout(PATIENCE, tasks.wait()).await;
    made?;
    ended.map_err(|elapsed| Error::internal("what served an unused sandbox goes on", elapsed))?;
    sandglass_failpoint::hit_async("control.pool.still").await.map_err(crate::injected)?;
    Ok(shared.host.pace(&row.id, Pace::Still).await?)
}

/// Makes time limits of commands stand still with it. They go on when somebody's session begins.
async fn stop_clock(live: &Live) -> Result<(), Error> {
    match live.freeze(PauseMode::Full).await {
        // It holds what no image could have; there will be none.
        Err(error) if error.kind() == ErrorKind::Conflict => {
            live.freeze(PauseMode::Filesystem).await.map(drop)
        }
        frozen => frozen.map(drop),
    }
}
