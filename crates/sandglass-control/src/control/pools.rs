//! Keeping pools as large as they should be: one copy is made at a time.

use std::time::Duration;

use sandglass_engine::engine::{Feature, Presence};
use sandglass_store::{ImageState, Purpose, SandboxRow, StartPath};
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, Lifetime, PauseMode, SandboxId, SandboxState};
use tokio::time::sleep;

use super::Control;
use super::snapshots::{Model, next};
use super::stored;
use super::templates::RunningImage;
use crate::owner::{self, Origin};
use crate::pools::{Entry, Wanted, plan};
use crate::room::{self, Promise};

/// The most unused copies of one template that may be wanted.
pub const MAX_POOL: u32 = 256;

/// How often it is looked at without a reason.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How long a step may take to notice that this server stops.
const STEP_PATIENCE: Duration = Duration::from_secs(5);

/// The wait after something failed.
const RETRY: Duration = Duration::from_secs(10);

/// How old an entry is when the watchdog ends it where no server could use it. A server ends none for its age.
const ALONE: Duration = Duration::from_secs(600);

/// What follows a step.
enum Next {
    /// Another one.
    Another,
    /// Nothing, for so long.
    In(Duration),
}

impl Control {
    /// An unused copy for one who asks for what this model gives, if one is ready. The model is then what becomes of that.
    pub(super) fn take_unused(&self, model: &mut Model) -> Option<(Entry, Promise)> {
        let Origin::Template(lease, spec) = &model.origin else { return None };
        let taken = self.0.pools.take(lease.id(), &self.0.promises)?;
        let (lease, spec) = (lease.clone(), spec.clone());
        // It was told once already who it is, when it was made.
        model.generation = next(model.generation);
        model.start_path = StartPath::Pool;
        model.origin = Origin::Taken(lease, spec);
        Some(taken)
    }

    /// Keeps all pools until this server stops, and leaves none then.
    pub(super) async fn keep_pools(&self) {
        let shared = &self.0;
        if shared.engine.refuses(Feature::Checkpoint) {
            return;
        }
        while !shared.stop.is_cancelled() {
            let late = async {
                shared.stop.cancelled().await;
                sleep(STEP_PATIENCE).await;
            };
            // A step notices a stop by itself.
            let tended = tokio::select! {
                tended = self.tend_pools() => tended,
                () = late => break,
            };
            let pause = match tended {
                Ok(Next::Another) => continue,
                Ok(Next::In(pause)) => pause,
                Err(_) if shared.stop.is_cancelled() => break,
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "a pool could not be filled yet");
                    let _stopped = shared.stop.run_until_cancelled(sleep(RETRY)).await;
                    continue;
                }
            };
            tokio::select! {
                () = shared.pools.changed.notified() => {}
                // Whoever asks has the machine for itself: to look at all that is there takes as long as a claim.
                () = shared.pools.calm_again() => {}
                () = sleep(pause) => {}
                () = shared.stop.cancelled() => {}
            }
        }
        // Nobody could use them any more, nor what a step was at.
        shared.pools.give_up_all(shared);
    }

    /// One step, and when the next one is due if nothing happens before.
    async fn tend_pools(&self) -> Result<Next, Error> {
        let shared = &self.0;
        let rows = shared.store.snapshots_on_node(shared.node).await.map_err(stored)?;
        let wanted: Vec<Wanted> = rows
            .into_iter()
            .filter_map(|row| match (&row.purpose, row.state) {
                (Purpose::Template(spec), ImageState::Ready) => {
                    let size =
                        shared.config.pools.get(&row.template).copied().unwrap_or(spec.pool).min(MAX_POOL);
                    let target = shared.pools.target(&row.template, size);
                    Some(Wanted { template: row.template, image: row.id, target })
                }
                _ => None,
            })
            .collect();
        // What has a row by now comes first.
        room::yield_room(shared).await?;
        let ready = shared.pools.ready();
        if !ready.is_empty() {
            let there = shared.host.list().await?;
            let lives = |id: &SandboxId| {
                there.iter().any(|(one, presence)| one == id && *presence != Presence::Remains)
            };
            for (id, _) in ready.iter().filter(|(id, _)| !lives(id)) {
                tracing::warn!(sandbox = %id, "an unused sandbox has ended");
                shared.pools.give_up(shared, id);
            }
        }
        for id in plan(&wanted, &shared.pools.ready()).give_up {
            shared.pools.give_up(shared, &id);
        }
        let able: Vec<_> =
            wanted.into_iter().filter(|wanted| shared.pools.can_be_filled(&wanted.image)).collect();
        let Some(template) = plan(&able, &shared.pools.ready()).make else { return Ok(Next::In(LOOK_EVERY)) };
        // What was handed out just now has the machine for itself first.
        if let Some(pause) = shared.pools.until_calm() {
            return Ok(Next::In(pause));
        }
        let Some(image) = self.running_image(&template).await? else { return Ok(Next::In(LOOK_EVERY)) };
        let of = image.row.id.clone();
        let added = self.add_entry(image).await.inspect_err(|error| {
            if !shared.stop.is_cancelled() {
                // Others are filled meanwhile.
                shared.pools.failed(&of);
                if error.kind() != ErrorKind::Capacity {
                    shared.stale.note(&template, &of);
                }
            }
        })?;
        Ok(if added { Next::Another } else { Next::In(LOOK_EVERY) })
    }

    /// Makes a copy, and puts it into its pool. What can't be made to the end is removed. `false` if there is no room for it.
    async fn add_entry(&self, image: RunningImage) -> Result<bool, Error> {
        let shared = &self.0;
        let RunningImage { row: of, lease, .. } = image;
        let Some(claim) = shared.claim(&SandboxId::random()) else { return Ok(false) };
        let now = shared.clock.now();
        // What the copy is until somebody takes it. It is never stored.
        let row = SandboxRow {
            id: claim.id().clone(),
            node: shared.node,
            team: of.team,
            template: of.template,
            rootfs: of.rootfs,
            limits: of.limits,
            access_token: None,
            metadata: Default::default(),
            env: Default::default(),
            allow_internet_access: None,
            policy: Default::default(),
            traffic_token: None,
            request_host: None,
            lifetime: Lifetime::of(ALONE),
            pause_mode: PauseMode::Full,
            made_from: Default::default(),
            start_path: StartPath::Pool,
            defaults: of.defaults,
            volumes: Vec::new(),
            models: None,
            connections: Vec::new(),
            state: SandboxState::Creating,
            generation: next(of.generation),
            created_at: now,
            end_at: now.plus(ALONE),
            max_end_at: now.plus(ALONE),
            ended_at: None,
            end_reason: None,
        };
        // It takes room from before it is looked whether there is any: whoever asks meanwhile comes first, and sees it.
        shared.pools.begin(Entry { claim, lease: lease.clone(), limits: row.limits });
        let enough = room::is_enough(shared).await;
        if !matches!(enough, Ok(true)) {
            shared.pools.refrain();
            return enough;
        }
        match owner::make_unused(shared, &row, lease).await {
            Ok(()) => {
                tracing::debug!(sandbox = %row.id, template = row.template, "an unused sandbox is ready");
                shared.pools.made();
                Ok(true)
            }
            Err(error) => {
                shared.pools.give_up_making(shared);
                Err(error)
            }
        }
    }
}
