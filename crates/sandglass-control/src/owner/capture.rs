//! Writing a sandbox to an image while it goes on: the one point at which snapshots and forks part from their source.
//!
//! The agent falls silent, all processes stop, memory and disk are written, and then it runs on, under the same id and to
//! the same end. Streams through the agent ride on the session and notice a pause at most. Connections through the airlock
//! are cut by the checkpoint, on the guest's side alone, so the server drops its own ends. Whatever fails on the way, the
//! source runs on; what there may be of the image is its row's to remove. Until that row says that it is ready, nobody counts
//! on it, so it is flushed when the source runs again, and not at all if it is only there for the copies of a fork.

use std::sync::Arc;

use sandglass_egress::enforcer::Enforcer;
use sandglass_egress::policy::Policy;
use sandglass_egress::remembered::Remembered;
use sandglass_engine::Keep;
use sandglass_engine::host::{HostError, RefusalKind};
use sandglass_store::SandboxRow;
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, Generation, PauseMode, SandboxState, SnapshotId};
use tracing::Instrument as _;

use super::pause::{Ended, written};
use super::{Owner, Request};
use crate::live::Live;
use crate::room;
use crate::shared::Shared;
use crate::volume_marks;

/// What came of it.
#[derive(Debug)]
pub(crate) struct Captured {
    /// What the source had resolved by then, if it has an airlock.
    pub(crate) remembered: Option<Remembered>,
}

/// What the source must still be when its turn comes, because what is made of it was stored as that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    generation: Generation,
    policy: Policy,
    allow_internet_access: Option<bool>,
}

impl Wanted {
    /// What it is now.
    pub(crate) fn of(row: &SandboxRow) -> Self {
        Self {
            generation: row.generation,
            policy: row.policy.clone(),
            allow_internet_access: row.allow_internet_access,
        }
    }
}

impl Owner<'_> {
    /// Writes it to an image and lets it run on, unless it is ended meanwhile. Who wants something else of it waits.
    pub(super) async fn capture(
        &mut self,
        live: &Arc<Live>,
        image: &SnapshotId,
        wanted: &Wanted,
    ) -> (Result<Captured, Error>, Option<Ended>) {
        // Left by one before this.
        self.go_on(Some(live)).await;
        if self.stopped || self.row.state != SandboxState::Running || Wanted::of(&self.row) != *wanted {
            return (Err(Error::new(ErrorKind::Conflict, "the sandbox changed: try again")), None);
        }
        self.stopped = true;
        let writing =
            write_copy(Arc::clone(&self.shared), Arc::clone(live), self.enforcer.clone(), image.clone());
        let mut writing = std::pin::pin!(writing);
        // Who asks for more time meanwhile gets it, also if it is up once this is done: nobody could have ended it.
        let (mut ended, mut moves) = (None, Vec::new());
        let captured = loop {
            let asked = tokio::select! {
                captured = &mut writing => break captured,
                asked = self.requests.recv() => asked,
            };
            match asked {
                Some((span, Request::Kill(reply))) => {
                    self.end_during(&mut ended, reply).instrument(span).await;
                }
                Some((_, Request::SetEnd { end_at, only_later, reply })) => {
                    moves.push((end_at, only_later, reply));
                }
                Some(asked) => self.deferred.push_back(asked),
                // Every handle is gone, so this server stops.
                None => std::future::pending().await,
            }
        };
        if let Err(error) = &captured {
            tracing::warn!(sandbox = %self.row.id, error = %Chain(error), "no image of it was made; it runs on");
        }
        if ended.is_none() {
            self.go_on(Some(live)).await;
        }
        for (end_at, only_later, reply) in moves {
            let _gone = reply.send(self.set_end_of(end_at, only_later, self.row.created_at).await);
        }
        (captured, ended)
    }

    /// Lets it run on if its processes were stopped for an image. Where that fails, whoever waits for its end tries again;
    /// then its agent is to speak again as well.
    pub(super) async fn go_on(&mut self, live: Option<&Arc<Live>>) {
        if !self.stopped {
            return;
        }
        match self.shared.host.resume(&self.row.id).await {
            Ok(()) => {}
            // It was not stopped yet, or is gone: who waits for its end finds that.
            Err(HostError::Refused { kind: RefusalKind::WrongState | RefusalKind::NotFound, .. }) => {}
            Err(error) => {
                tracing::error!(sandbox = %self.row.id, error = %Chain(&error), "it could not be made to run on");
                return;
            }
        }
        self.stopped = false;
        if let Some(live) = live
            && let Err(error) = live.thaw().await
        {
            tracing::warn!(sandbox = %self.row.id, error = %Chain(&error), "its agent does not speak again yet");
        }
    }
}

async fn write_copy(
    shared: Arc<Shared>,
    live: Arc<Live>,
    enforcer: Option<Arc<Enforcer>>,
    image: SnapshotId,
) -> Result<Captured, Error> {
    let (host, id, image) = (&shared.host, live.id(), image.image());
    // Its row was admitted.
    room::yield_room(&shared).await?;
    sandglass_failpoint::hit_async("control.snapshot.freeze").await.map_err(crate::injected)?;
    let in_use = live.freeze(PauseMode::Full).await?;
    sandglass_failpoint::hit_async("control.snapshot.host").await.map_err(crate::injected)?;
    host.pause(id).await?;
    volume_marks::note(&shared, id, &image, &in_use).await?;
    sandglass_failpoint::hit_async("control.snapshot.image").await.map_err(crate::injected)?;
    let written = written(&shared, id, &image, Some(Keep::Unflushed)).await;
    // Also if it failed: it may have come as far as that. Before it runs on, so that nothing new is taken for old.
    live.sever();
    if let Some(enforcer) = &enforcer {
        enforcer.sever();
    }
    written?;
    sandglass_failpoint::hit_async("control.snapshot.go_on").await.map_err(crate::injected)?;
    Ok(Captured { remembered: enforcer.map(|enforcer| enforcer.remembered()) })
}
