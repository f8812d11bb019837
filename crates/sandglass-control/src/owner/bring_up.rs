//! Bringing a sandbox to where it can be reached: a new one, one that was found, and one from its image.

use std::sync::Arc;

use sandglass_egress::enforcer::Enforcer;
use sandglass_engine::deadline::Deadline;
use sandglass_engine::host::{Host, HostError, RefusalKind};
use sandglass_engine::{Exit, SandboxSpec};
use sandglass_store::SandboxRow;
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, OnTimeout, PauseMode, ResumeMode, SandboxId, Timestamp};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Pauses;
use crate::agent::{self, Line};
use crate::images::Lease;
use crate::live::Live;
use crate::shared::Shared;

/// Where a sandbox that comes up is from.
#[derive(Debug)]
pub(super) enum Origin {
    /// It is to be made.
    New,
    /// An earlier server made it, and it runs.
    Found,
    /// It is to be made from its image, which has its id.
    Image,
    /// It is to be started anew from the disk in its image, which has its id.
    Disk,
    /// It is to be made from an image of another one.
    Copy(Lease),
}

impl Origin {
    /// Of a paused sandbox that kept this, if it is resumed like that.
    pub(super) const fn of(kept: PauseMode, mode: ResumeMode) -> Self {
        match (kept, mode) {
            (PauseMode::Full, ResumeMode::Restore) => Self::Image,
            (PauseMode::Filesystem, _) | (_, ResumeMode::Reboot) => Self::Disk,
        }
    }

    /// Whether its memory is from an image, and knows nothing of the time since, nor of who it is now.
    const fn has_memory(&self) -> bool {
        matches!(self, Self::Image | Self::Copy(_))
    }

    /// Whether it is made from an image, be it the disk alone. Its time begins when it runs.
    pub(super) const fn is_of_image(&self) -> bool {
        matches!(self, Self::Image | Self::Disk | Self::Copy(_))
    }

    /// Whether it was paused before.
    pub(super) const fn is_resumed(&self) -> bool {
        matches!(self, Self::Image | Self::Disk)
    }

    /// Whether its agent starts.
    const fn starts(&self) -> bool {
        matches!(self, Self::New | Self::Disk)
    }
}

/// What the host is told of the end `at` by the wall clock, which is at `ends` by the steady one. Nothing of one that is to
/// be paused: only a server can do that, and without one it runs on, for it must never be lost.
pub(super) fn deadline(row: &SandboxRow, at: Timestamp, ends: Instant) -> Option<Deadline> {
    let after = ends.saturating_duration_since(Instant::now());
    let deadline = Deadline { at, after_millis: u64::try_from(after.as_millis()).unwrap_or(u64::MAX) };
    (row.lifetime.on_timeout == OnTimeout::Kill).then_some(deadline)
}

fn spec(row: &SandboxRow, ends: Instant) -> SandboxSpec {
    let deadline = deadline(row, row.end_at, ends);
    SandboxSpec { id: row.id.clone(), rootfs: row.rootfs, limits: row.limits, deadline }
}

/// Keeps the deadline of a found sandbox: what the last server could not say any more, or said by a clock that was set since.
/// Before anybody moves its end, so that it comes after no later word. A failure is not worth a sandbox.
pub(super) async fn keep_deadline(host: &Host, row: &SandboxRow, ends: Instant) {
    if let Err(error) = host.set_deadline(&row.id, deadline(row, row.end_at, ends)).await {
        tracing::error!(sandbox = %row.id, error = %Chain(&error), "its deadline can't be kept");
    }
}

/// Waits for the end of its processes. An engine that can't say whether they have ended has not said that they have.
pub(super) async fn exit_of(host: &Host, id: &SandboxId) -> Result<Exit, HostError> {
    let mut pauses = Pauses::new();
    loop {
        let error = match host.wait(id).await {
            Err(error) if error.refusal().is_some_and(|kind| kind != RefusalKind::NotFound) => error,
            outcome => return outcome,
        };
        tracing::warn!(sandbox = %id, error = %Chain(&error), "its processes can't be waited for");
        sleep(pauses.next()).await;
    }
}

/// Brings a sandbox to where it can be reached. Stops between two steps once its end has begun.
pub(super) async fn bring_up(
    shared: Arc<Shared>,
    row: SandboxRow,
    ends: Instant,
    enforcer: Option<Arc<Enforcer>>,
    gone: CancellationToken,
    tasks: TaskTracker,
    origin: Origin,
) -> Result<Arc<Live>, Error> {
    let (host, id) = (&shared.host, &row.id);
    let (starts, restored) = (origin.starts(), origin.has_memory());
    match origin {
        Origin::New => {
            sandglass_failpoint::hit_async("control.create.host").await.map_err(crate::injected)?;
            host.create(spec(&row, ends)).await?;
        }
        Origin::Image => {
            sandglass_failpoint::hit_async("control.resume.host").await.map_err(crate::injected)?;
            host.restore(spec(&row, ends), id).await?;
        }
        Origin::Disk => {
            sandglass_failpoint::hit_async("control.resume.boot").await.map_err(crate::injected)?;
            host.boot(spec(&row, ends), id).await?;
        }
        Origin::Copy(lease) => {
            sandglass_failpoint::hit_async("control.copy.host").await.map_err(crate::injected)?;
            let restored = host.restore(spec(&row, ends), &lease.id().image()).await;
            restored.map_err(|error| match error.refusal() {
                Some(RefusalKind::NotFound) => {
                    Error::internal("the image of this snapshot is not on this machine any more", error)
                }
                _ => error.into(),
            })?;
            // It has a copy of all that it needs.
            drop(lease);
        }
        Origin::Found => {}
    }
    sandglass_failpoint::hit_async("control.create.guard").await.map_err(crate::injected)?;
    // Before anything runs in a new one. A found one lost its listeners with their server, and a restored one runs
    // already: its packets are reset until they are there.
    if let Some(enforcer) = enforcer {
        let egress = &shared.config.egress;
        agent::guard_airlock(host, id, &enforcer, egress, &gone, &tasks).await?;
    }
    if starts && !gone.is_cancelled() {
        sandglass_failpoint::hit_async("control.create.start").await.map_err(crate::injected)?;
        host.start(id).await?;
    }
    let ready = async {
        sandglass_failpoint::hit_async("control.create.attach").await.map_err(crate::injected)?;
        let session = agent::attach(host, id, &gone, &tasks).await?;
        let configure = async || {
            sandglass_failpoint::hit_async("control.create.configure").await.map_err(crate::injected)?;
            agent::configure(&session, &row, shared.template(&row.template)?).await
        };
        // A new one is still starting, and finds there at once what it shall be.
        if starts {
            configure().await?;
        }
        let hello = agent::greet(&session, id).await?;
        // One from an image is configured whatever it says: it was another one, or of another generation.
        if restored || hello.generation != row.generation.0 {
            if !starts {
                configure().await?;
            }
            agent::configured(&session, &row).await?;
        }
        let line = Line::new(session);
        // It said nothing more before its image was made, and knows nothing of the time in between.
        if restored {
            agent::thaw(&line).await?;
        }
        let (airlock, connections) = (shared.airlocks().cloned(), Arc::clone(&shared.connections));
        Ok(Arc::new(Live::new(&row, line, hello.revision, airlock, gone.clone(), connections)))
    };
    tokio::select! {
        outcome = ready => outcome,
        exit = exit_of(host, id) => {
            let why = format!("its processes are gone: {:?}", exit?);
            Err(Error::internal("the sandbox ended as soon as it was started", why))
        }
        () = gone.cancelled() => Err(Error::new(ErrorKind::Conflict, "the sandbox was ended")),
    }
}
