//! Bringing a sandbox to where it can be reached: a new one, one that was found, and one from its image.

use std::sync::Arc;

use sandglass_egress::enforcer::Enforcer;
use sandglass_engine::deadline::Deadline;
use sandglass_engine::engine::SessionEnds;
use sandglass_engine::host::{Host, HostError, RefusalKind};
use sandglass_engine::{Exit, SandboxSpec};
use sandglass_store::{MadeFrom, SandboxRow, StartPath, TemplateSpec};
use sandglass_types::budget::Amount;
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, OnTimeout, PauseMode, ResumeMode, SandboxId, Timestamp};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Pauses;
use crate::agent::{self, Line};
use crate::command;
use crate::images::Lease;
use crate::live::Live;
use crate::room;
use crate::shared::Shared;
use crate::volume_marks;

/// Where a sandbox that comes up is from.
#[derive(Debug)]
pub(crate) enum Origin {
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
    /// It is to be made from the image of its template; or cold, if that fails.
    Template(Lease, Box<TemplateSpec>),
    /// It is to be made from this image for nobody yet.
    Unused(Lease),
    /// It was made like that, from the image of its template. If it is not fit for use, another is.
    Taken(Lease, Box<TemplateSpec>),
    /// The same, whatever it is fit for.
    Still,
    /// It is to be started anew from the disk in the image of its template.
    TemplateDisk(Lease, Box<TemplateSpec>),
}

/// A sandbox that came up.
pub(super) struct CameUp {
    pub(super) live: Arc<Live>,
    /// Which way it came to run, for one that was made.
    pub(super) path: StartPath,
    /// What its history says of it.
    pub(super) why: String,
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
        matches!(
            self,
            Self::Image
                | Self::Copy(_)
                | Self::Template(..)
                | Self::Unused(_)
                | Self::Taken(..)
                | Self::Still
        )
    }

    /// Whether it is made from an image, be it the disk alone. Its time begins when it runs.
    pub(super) const fn is_of_image(&self) -> bool {
        match self {
            Self::Image
            | Self::Disk
            | Self::Copy(_)
            | Self::Template(..)
            | Self::TemplateDisk(..)
            | Self::Unused(_)
            | Self::Taken(..)
            | Self::Still => true,
            Self::New | Self::Found => false,
        }
    }

    /// Whether it was paused before.
    pub(super) const fn is_resumed(&self) -> bool {
        matches!(self, Self::Image | Self::Disk)
    }

    /// Whether its agent starts.
    const fn starts(&self) -> bool {
        matches!(self, Self::New | Self::Disk | Self::TemplateDisk(..))
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
    SandboxSpec {
        id: row.id.clone(),
        rootfs: row.rootfs,
        limits: row.limits,
        deadline,
        unused: false,
        volumes: row.volumes.clone(),
    }
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

/// What it takes to bring a sandbox up.
#[derive(Clone)]
pub(super) struct Means {
    pub(super) shared: Arc<Shared>,
    pub(super) row: SandboxRow,
    /// When its time is up.
    pub(super) ends: Instant,
    /// If its engine has airlocks.
    pub(super) enforcer: Option<Arc<Enforcer>>,
    /// Fires when its end begins.
    pub(super) gone: CancellationToken,
    /// Those that serve it until then.
    pub(super) tasks: TaskTracker,
}

/// Makes its computer, if it has none.
async fn make(means: &Means, origin: &Origin) -> Result<(), Error> {
    let Means { shared, row, ends, .. } = means;
    let (host, id, ends) = (&shared.host, &row.id, *ends);
    if !matches!(origin, Origin::Found | Origin::Unused(_) | Origin::Taken(..) | Origin::Still) {
        room::yield_room(shared).await?;
    }
    match origin {
        Origin::New => {
            sandglass_failpoint::hit_async("control.create.host").await.map_err(crate::injected)?;
            host.create(spec(row, ends)).await?;
        }
        Origin::Image => {
            volume_marks::check(shared, id, &row.volumes).await?;
            sandglass_failpoint::hit_async("control.resume.host").await.map_err(crate::injected)?;
            if let Err(error) = host.restore(spec(row, ends), id).await {
                return Err(volume_marks::explain(shared, id, &row.volumes, error.into()).await);
            }
        }
        Origin::Disk => {
            sandglass_failpoint::hit_async("control.resume.boot").await.map_err(crate::injected)?;
            host.boot(spec(row, ends), id).await?;
        }
        Origin::TemplateDisk(lease, _) => host.boot(spec(row, ends), &lease.id().image()).await?,
        Origin::Copy(lease) | Origin::Template(lease, _) => {
            // Nothing else is ever compressed, so nobody else waits behind one that is.
            if matches!(row.made_from, MadeFrom::Snapshot(_)) {
                lease.expanded(expand(shared, row, lease)).await?;
            }
            let image = lease.id().image();
            volume_marks::check(shared, &image, &row.volumes).await?;
            sandglass_failpoint::hit_async("control.copy.host").await.map_err(crate::injected)?;
            if let Err(error) = host.restore(spec(row, ends), &image).await {
                return Err(volume_marks::explain(shared, &image, &row.volumes, absent(error)).await);
            }
        }
        Origin::Unused(lease) => {
            sandglass_failpoint::hit_async("control.pool.host").await.map_err(crate::injected)?;
            let unused = SandboxSpec { unused: true, ..spec(row, ends) };
            host.restore(unused, &lease.id().image()).await?;
        }
        // The rest of it is made as well: see `hand_out`.
        Origin::Taken(..) | Origin::Still | Origin::Found => {}
    }
    Ok(())
}

/// Has the image that this one is made from expanded, if it is compressed: it has the same limits. Its own room was never given
/// away, but for a while both forms are there.
async fn expand(shared: &Shared, row: &SandboxRow, lease: &Lease) -> Result<(), Error> {
    sandglass_failpoint::hit_async("control.expand.host").await.map_err(crate::injected)?;
    shared.settled.used(lease.id());
    let _promise = shared.promises.give(Amount::of(&row.limits).as_image());
    shared.host.expand_image(&lease.id().image()).await.map_err(absent)
}

/// That an image is not there is nothing that a client could have known.
fn absent(error: HostError) -> Error {
    match error.refusal() {
        Some(RefusalKind::NotFound) => {
            Error::internal("the image of this snapshot is not on this machine any more", error)
        }
        _ => error.into(),
    }
}

/// Brings a sandbox to where it can be reached. Stops between two steps once its end has begun.
pub(super) async fn bring_up(means: Means, origin: Origin) -> Result<CameUp, Error> {
    let path = means.row.start_path;
    let (lease, spec, path, before) = match origin {
        Origin::Template(lease, spec) => (lease, spec, path, String::new()),
        Origin::Taken(lease, spec) => match come_up_unused(&means).await? {
            Ok(live) => {
                return Ok(CameUp { live, path, why: "an unused sandbox of its template was ready".into() });
            }
            Err(error) => {
                let before = format!("an unused sandbox could not be handed out: {}; ", Chain(&error));
                (lease, spec, StartPath::Restore, before)
            }
        },
        origin => {
            let live = come_up(&means, origin).await?;
            return Ok(CameUp { live, path, why: "the agent is ready".into() });
        }
    };
    // What serves the first try must not serve the second.
    let first = Means { gone: means.gone.child_token(), ..means.clone() };
    let error = match come_up(&first, Origin::Copy(lease.clone())).await {
        Ok(live) => return Ok(CameUp { live, path, why: format!("{before}the agent is ready") }),
        // With less room it can't be made the other way either.
        Err(error) if means.gone.is_cancelled() || error.kind() == ErrorKind::Capacity => return Err(error),
        Err(error) => error,
    };
    let Means { shared, row, .. } = &means;
    let why = format!(
        "{before}the image of its template could not be restored: {}; it was started cold",
        Chain(&error)
    );
    tracing::warn!(sandbox = %row.id, template = row.template, error = %Chain(&error), "it is started cold");
    shared.stale.note(&row.template, lease.id());
    first.gone.cancel();
    sandglass_failpoint::hit_async("control.template.cold").await.map_err(crate::injected)?;
    shared.host.destroy(&row.id).await?;
    let stored = shared.store.set_start_path(&row.id, StartPath::Cold).await.map_err(crate::stored)?;
    if !stored {
        return Err(Error::new(ErrorKind::Conflict, "the sandbox was ended"));
    }
    // What the server prepares itself has nothing on its disk.
    let of_server = spec.base == row.template;
    let cold = if of_server { Origin::New } else { Origin::TemplateDisk(lease, spec) };
    let live = come_up(&means, cold).await?;
    Ok(CameUp { live, path: StartPath::Cold, why })
}

/// Hands out a sandbox that was ready, or says why it was not fit for that: then nothing of it is left.
async fn come_up_unused(means: &Means) -> Result<Result<Arc<Live>, Error>, Error> {
    // What serves this try must not serve the next.
    let first = Means { gone: means.gone.child_token(), ..means.clone() };
    let error = match come_up(&first, Origin::Still).await {
        Ok(live) => return Ok(Ok(live)),
        Err(error) if means.gone.is_cancelled() => return Err(error),
        Err(error) => error,
    };
    let Means { shared, row, .. } = means;
    tracing::warn!(sandbox = %row.id, template = row.template, error = %Chain(&error), "it is made from the image instead");
    first.gone.cancel();
    sandglass_failpoint::hit_async("control.pool.instead").await.map_err(crate::injected)?;
    shared.host.destroy(&row.id).await?;
    let stored = shared.store.set_start_path(&row.id, StartPath::Restore).await.map_err(crate::stored)?;
    if stored { Ok(Err(error)) } else { Err(Error::new(ErrorKind::Conflict, "the sandbox was ended")) }
}

/// Has the host give one to its user that was unused: it goes on, and no further than its user's time.
async fn hand_out(means: &Means) -> Result<SessionEnds, Error> {
    let Means { shared, row, ends, .. } = means;
    sandglass_failpoint::hit_async("control.pool.claim").await.map_err(crate::injected)?;
    Ok(shared.host.hand_out(&row.id, deadline(row, row.end_at, *ends)).await?)
}

pub(super) async fn come_up(means: &Means, origin: Origin) -> Result<Arc<Live>, Error> {
    let Means { shared, row, enforcer, gone, tasks, .. } = means;
    let (host, id) = (&shared.host, &row.id);
    let (starts, restored) = (origin.starts(), origin.has_memory());
    let still = matches!(origin, Origin::Still);
    match make(means, &origin).await {
        // Whoever runs needs the room more than who may be resumed.
        Err(error)
            if room::is_lack(&error)
                && !matches!(origin, Origin::Unused(_))
                && !gone.is_cancelled()
                && room::make_room(shared).await =>
        {
            tracing::info!(sandbox = %id, error = %Chain(&error), "made room for it");
            make(means, &origin).await?;
        }
        made => made?,
    }
    // It has a copy of all that it needs of an image.
    let begins = match origin {
        Origin::TemplateDisk(_, spec) => Some(spec),
        other => {
            drop(other);
            None
        }
    };
    // Before anything runs in a new one. A found one lost its listeners with their server, and one with memory runs
    // already, or goes on at the same time: its packets are reset until they are there.
    let guarded = async {
        sandglass_failpoint::hit_async("control.create.guard").await.map_err(crate::injected)?;
        let Some(enforcer) = enforcer else { return Ok(()) };
        agent::guard_airlock(host, id, enforcer, &shared.config.egress, gone, tasks).await
    };
    let ends = if still {
        // Both to their ends: whoever removes it after a failure must not meet the other.
        let (ends, guarded) = tokio::join!(hand_out(means), guarded);
        guarded.and(ends.map(Some))?
    } else {
        guarded.await?;
        None
    };
    if starts && !gone.is_cancelled() {
        sandglass_failpoint::hit_async("control.create.start").await.map_err(crate::injected)?;
        host.start(id).await?;
    }
    let ready = async {
        sandglass_failpoint::hit_async("control.create.attach").await.map_err(crate::injected)?;
        let session = match ends {
            Some(ends) => agent::session(ends, gone, tasks)?,
            None => agent::attach(host, id, gone, tasks).await?,
        };
        let configure = async || {
            sandglass_failpoint::hit_async("control.create.configure").await.map_err(crate::injected)?;
            let defaults = shared.defaults(row.defaults.as_ref(), &row.template)?;
            agent::configure(&session, row, defaults).await
        };
        // A new one is still starting, and finds there at once what it shall be. One that was unused is told so, whatever it says.
        if starts || still {
            configure().await?;
        }
        let hello = agent::greet(&session, id).await?;
        // One from an image is configured whatever it says: it was another one, or of another generation.
        if restored || hello.generation != row.generation.0 {
            if !starts && !still {
                configure().await?;
            }
            agent::configured(&session, row).await?;
        }
        let line = Line::new(session);
        // It said nothing more before its image was made, and knows nothing of the time in between.
        if restored {
            agent::awake(&line).await?;
        }
        let (airlock, connections) = (shared.airlocks().cloned(), Arc::clone(&shared.connections));
        let live = Arc::new(Live::new(row, line, hello.revision, airlock, gone.clone(), connections));
        if let Some(spec) = begins {
            for started in spec.all_started() {
                command::begin(&live, row, &started).await?;
            }
        }
        Ok(live)
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
