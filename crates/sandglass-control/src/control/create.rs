//! How a sandbox comes to be: checked, inserted if there is room, and made by its owner.

use std::collections::BTreeSet;

use rand::RngExt as _;
use sandglass_store::{Created, NewSandbox, SandboxRow};
use sandglass_types::{Error, ErrorKind, Lifetime, SandboxId, TeamId, UserName};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::snapshots::Model;
use super::volumes::no_volume_named;
use super::{Control, REMOVAL_CHECK, REMOVAL_PATIENCE, injected, stored};
use crate::admission;
use crate::owner::{Begin, Origin};
use crate::request::{CreateSandbox, check_env_together, idle_window};

impl Control {
    /// Makes a sandbox, and answers when commands can run in it.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`], [`ErrorKind::NotFound`] for the template, [`ErrorKind::IdempotencyMismatch`],
    /// [`ErrorKind::IdempotencyInProgress`], [`ErrorKind::Quota`], [`ErrorKind::Capacity`], or what went wrong.
    pub async fn create(&self, team: TeamId, request: CreateSandbox) -> Result<SandboxRow, Error> {
        let started = Instant::now();
        let outcome = self.make(team, request, None).await;
        // Nobody has one for nobody.
        let outcome = outcome.and_then(|row| row.ok_or_else(|| Error::new(ErrorKind::Conflict, "try again")));
        self.0.metrics.created(&outcome, started.elapsed());
        outcome
    }

    /// Makes a sandbox that is this user's from its first row on. `None` if they have one.
    pub(super) async fn create_for(
        &self,
        team: TeamId,
        user: &UserName,
        request: CreateSandbox,
    ) -> Result<Option<SandboxRow>, Error> {
        let started = Instant::now();
        let outcome = self.make(team, request, Some(user.clone())).await.transpose();
        if let Some(outcome) = &outcome {
            self.0.metrics.created(outcome, started.elapsed());
        }
        outcome.transpose()
    }

    /// `None` if the user that it is for has one.
    async fn make(
        &self,
        team: TeamId,
        request: CreateSandbox,
        assign_to: Option<UserName>,
    ) -> Result<Option<SandboxRow>, Error> {
        // The first answer, also where what that was made of is not there any more.
        if let Some(key) = &request.idempotency
            && let Some(earlier) = self.0.store.earlier(team, key).await.map_err(stored)?
        {
            return self.not_inserted(team, earlier).await;
        }
        request.check(self.0.config.max_lifetime)?;
        self.check_granted(team, &request.connections).await?;
        let model = self.model(team, &request.template).await?;
        let model = model.with_volumes(self.mounts(team, &request.volumes).await?)?;
        self.make_of(team, request, model, assign_to).await
    }

    /// The same of what is given, by a request that was checked.
    pub(super) async fn make_of(
        &self,
        team: TeamId,
        request: CreateSandbox,
        mut model: Model,
        assign_to: Option<UserName>,
    ) -> Result<Option<SandboxRow>, Error> {
        let shared = &self.0;
        // Before anything is made, so that the client hears of it.
        shared.config.egress.effective(&request.policy, BTreeSet::new())?;
        let defaults = shared.defaults(model.defaults.as_ref(), &model.template)?;
        check_env_together(&defaults.env, &request.env)?;
        if request.lifetime.on_timeout.pause().is_some() {
            shared.can_pause()?;
        }
        if shared.connections.available_permits() == 0 {
            return Err(admission::no_connection(shared.config.budgets.connections));
        }
        // One that is dropped on the way has no owner, and so is removed.
        let pooled = matches!(model.origin, Origin::Template(..));
        let mut unused = self.take_unused(&mut model);
        let now = shared.clock.now();
        let id = unused.as_ref().map_or_else(SandboxId::random, |(entry, _)| entry.claim.id().clone());
        tracing::Span::current().record("sandbox", tracing::field::display(&id));
        let new = NewSandbox {
            id,
            node: shared.node,
            team,
            template: model.template,
            rootfs: model.rootfs,
            limits: model.limits,
            defaults: model.defaults,
            volumes: model.volumes,
            models: None,
            connections: request.connections,
            start_path: model.start_path,
            access_token: request.secured.then(random_token),
            metadata: request.metadata,
            env: request.env,
            allow_internet_access: request.allow_internet_access,
            policy: request.policy,
            traffic_token: (!request.ingress.public).then(random_token),
            request_host: request.ingress.request_host,
            lifetime: Lifetime {
                idle: idle_window(request.lifetime.idle, shared.config.idle_timeout),
                ..request.lifetime
            },
            made_from: model.made_from,
            generation: model.generation,
            created_at: now,
            end_at: now.plus(request.lifetime.timeout),
            max_end_at: now.plus(shared.config.max_lifetime),
            idempotency: request.idempotency,
            assign_to,
            quota: shared.config.budgets.quota,
            capacity: shared.config.budgets.capacity,
        };
        // Before the row is there, so that the reconciler never takes it for one that nobody owns.
        let claim = if unused.is_some() { None } else { shared.claim(&new.id) };
        sandglass_failpoint::hit_async("control.create.insert").await.map_err(injected)?;
        let inserted = self.insert(&new).await;
        if !matches!(inserted, Ok(Created::Inserted))
            && let Some((entry, _promise)) = unused.take()
        {
            shared.pools.put(entry);
        }
        match inserted? {
            Created::Inserted if pooled => shared.pools.asked(&new.template, unused.is_some()),
            Created::Inserted => {}
            refused => return self.not_inserted(team, refused).await,
        }
        let claim = unused.map(|(entry, _promise)| entry.claim).or(claim);
        let claim = claim.ok_or_else(|| Error::new(ErrorKind::Conflict, "try again"))?;
        let row = self.row(&new.id).await?;
        sandglass_failpoint::hit_async("control.create.own").await.map_err(injected)?;
        let (made, outcome) = oneshot::channel();
        claim.own(row, Begin::Create(tracing::Span::current(), made, model.origin));
        let stopping = || Error::new(ErrorKind::Capacity, "the server is stopping; try again");
        outcome.await.map_err(|_| stopping())??;
        let row = self.row(&new.id).await?;
        shared.metrics.started(row.start_path);
        Ok(Some(row))
    }

    /// What a client gets where no sandbox was inserted; `None` if the user that it was for has one.
    pub(super) async fn not_inserted(&self, team: TeamId, why: Created) -> Result<Option<SandboxRow>, Error> {
        Err(match why {
            Created::Replay(id) => {
                return self.standing(team, &id).await.map(Some).map_err(|_| outcome_gone());
            }
            Created::Inserted | Created::Assigned(_) => return Ok(None),
            Created::InProgress => {
                let message = "the first request with this idempotency key is still running; try again";
                Error::new(ErrorKind::IdempotencyInProgress, message)
            }
            Created::Mismatch => {
                let message = "this idempotency key came with another request before; use a new one";
                Error::new(ErrorKind::IdempotencyMismatch, message)
            }
            Created::NoVolume(name) => no_volume_named(&name),
            Created::OverQuota(excess) => admission::over_quota(excess),
            Created::OverCapacity { excess, .. } => admission::over_capacity(excess),
        })
    }

    /// Inserts a sandbox, if there is room for it. Where there will be as soon as others are removed whose end has begun,
    /// it waits for that: whoever ends one sandbox and asks for another has done all that can be done.
    async fn insert(&self, new: &NewSandbox) -> Result<Created, Error> {
        let deadline = Instant::now() + REMOVAL_PATIENCE;
        loop {
            match self.0.store.insert_sandbox(new).await.map_err(stored)? {
                Created::OverCapacity { soon: true, .. } if Instant::now() < deadline => {
                    sleep(REMOVAL_CHECK).await;
                }
                outcome => return Ok(outcome),
            }
        }
    }
}

fn outcome_gone() -> Error {
    Error::new(ErrorKind::Conflict, "the sandbox that this idempotency key made has ended; use a new key")
}

/// 256 random bits.
pub(super) fn random_token() -> String {
    data_encoding::HEXLOWER.encode(&rand::rng().random::<[u8; 32]>())
}
