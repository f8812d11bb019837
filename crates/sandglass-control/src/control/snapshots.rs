//! Snapshots and forks: images of running sandboxes, and the sandboxes that are made from them.
//!
//! An image has a row from before it is written until after it is removed, and while this process uses it in any way,
//! [`crate::images`] knows. So a row that is half way to somewhere and that nobody uses was left by an earlier server.

use std::collections::BTreeMap;
use std::time::Duration;

use sandglass_egress::remembered::{Carried, Remembered};
use sandglass_engine::engine::Feature;
use sandglass_store::{
    Admitted, CommandDefaults, Finished, ImageState, MadeFrom, NewSandbox, NewSnapshot, PageCursor, Purpose,
    SandboxRow, SnapshotFilter, SnapshotKey, SnapshotName, SnapshotPage, SnapshotRow, StartPath,
};
use sandglass_types::error::Chain;
use sandglass_types::reference::{DEFAULT_TAG, namespace_of};
use sandglass_types::{
    Digest, Error, ErrorKind, Generation, Lifetime, Limits, Reference, SandboxId, SandboxState, SnapshotId,
    TeamId, VolumeMount,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use super::{
    Control, REMOVAL_CHECK, REMOVAL_PATIENCE, in_between, injected, not_found, random_token, stored,
};
use crate::admission;
use crate::images::Whole;
use crate::owner::{Begin, Captured, Origin, Wanted};
use crate::reconcile;
use crate::request::{BUILD_LABEL, check_timeout};
use crate::shared::Claim;

/// Most children of one fork.
pub const MAX_CHILDREN: usize = 100;

/// Which snapshots a client wants to see.
#[derive(Debug, Clone, Default)]
pub struct ListSnapshots {
    /// Of this sandbox.
    pub source: Option<SandboxId>,
    /// With this name or id.
    pub name: Option<Reference>,
    /// After this one.
    pub after: Option<PageCursor<SnapshotId>>,
    /// At most so many; 1 to 100.
    pub limit: u32,
}

/// What a new sandbox is made from.
pub(super) struct Model {
    pub(super) template: String,
    pub(super) rootfs: Digest,
    pub(super) limits: Limits,
    /// Of the new one.
    pub(super) generation: Generation,
    pub(super) made_from: MadeFrom,
    /// What commands in it have, if its template is not the server's own.
    pub(super) defaults: Option<CommandDefaults>,
    pub(super) start_path: StartPath,
    /// Those of what it is a copy of.
    pub(super) volumes: Vec<VolumeMount>,
    pub(super) origin: Origin,
}

impl Model {
    /// The same with these volumes. What is in the memory of an image knows no mount that its source had not: so what is made from
    /// a template is started cold, and a copy has those of its source.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a copy that is to have others.
    pub(super) fn with_volumes(mut self, volumes: Vec<VolumeMount>) -> Result<Self, Error> {
        if volumes.is_empty() {
            return Ok(self);
        }
        self.origin = match self.origin {
            Origin::Template(lease, spec) if spec.base != self.template => Origin::TemplateDisk(lease, spec),
            // What the server prepares itself has nothing on its disk.
            Origin::Template(..) => Origin::New,
            Origin::Copy(_) => {
                let message = "what is made from a snapshot has the volumes that its source had: leave volumeMounts out";
                return Err(Error::new(ErrorKind::Invalid, message));
            }
            other => other,
        };
        self.start_path = StartPath::Cold;
        self.volumes = volumes;
        Ok(self)
    }
}

/// The generation of what is made from an image of this one.
pub(super) const fn next(generation: Generation) -> Generation {
    Generation(generation.0.saturating_add(1))
}

fn by_id(id: &SnapshotId) -> SnapshotKey {
    SnapshotKey { id: Some(id.clone()), name: String::new(), tag: None }
}

/// What a reference means; with `any_tag`, one without a tag means all of its name.
fn by_reference(reference: &Reference, any_tag: bool) -> SnapshotKey {
    // An id has no namespace, and no other tag than the one that is meant without.
    let plain = reference.namespace().is_none() && reference.tag_or_default() == DEFAULT_TAG;
    let tag = if any_tag { reference.tag() } else { Some(reference.tag_or_default()) };
    SnapshotKey {
        id: reference.name().parse().ok().filter(|_| plain),
        name: reference.name().to_owned(),
        tag: tag.map(str::to_owned),
    }
}

impl Control {
    /// What a client means that wants a sandbox: a template, or a snapshot of its team.
    pub(super) async fn model(&self, team: TeamId, reference: &str) -> Result<Model, Error> {
        let shared = &self.0;
        let wanted: Reference = reference.parse().map_err(|error| {
            Error::new(ErrorKind::Invalid, format!("invalid template reference {reference:?}: {error}"))
        })?;
        if let Some(model) = self.model_of_template(&wanted).await? {
            return Ok(model);
        }
        let unknown = || {
            let message =
                format!("template '{wanted}' not found, and no snapshot of your team has that name or id");
            Error::new(ErrorKind::NotFound, message)
        };
        let found = self.find(team, &wanted).await?.ok_or_else(unknown)?;
        self.can_image()?;
        let lease = shared.images.lease(&found.id).ok_or_else(unknown)?;
        // It may have been deleted before there was a lease.
        let row =
            shared.store.snapshot(team, &by_id(&found.id)).await.map_err(stored)?.ok_or_else(unknown)?;
        if row.defaults.is_none() && !shared.config.templates.contains_key(&row.template) {
            let message = format!(
                "this server has no template '{}' any more, whose users and environment sandboxes of this snapshot need",
                row.template
            );
            return Err(Error::new(ErrorKind::Conflict, message));
        }
        Ok(Model {
            template: row.template,
            rootfs: row.rootfs,
            limits: row.limits,
            generation: next(row.generation),
            made_from: MadeFrom::Snapshot(row.id),
            defaults: row.defaults,
            start_path: StartPath::Restore,
            volumes: row.volumes,
            origin: Origin::Copy(lease),
        })
    }

    /// Writes a running sandbox to a snapshot; it runs on. The snapshot that had the name before has none any more, and is
    /// deleted with the next ones that are made, as those without a name are of which there are too many.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], also for a paused sandbox; [`ErrorKind::Conflict`] if it is on its way to another state, or
    /// holds something that can't be written, and runs on, and for the name of a template; [`ErrorKind::Invalid`] for a name
    /// that is not the team's to give; [`ErrorKind::Capacity`]; [`ErrorKind::Unsupported`] if the engine can't.
    pub async fn snapshot(
        &self,
        team: TeamId,
        id: &SandboxId,
        name: Option<&Reference>,
    ) -> Result<SnapshotRow, Error> {
        let source = self.capturable(team, id, ErrorKind::NotFound).await?;
        let name = match name {
            Some(name) => Some(self.name_for(team, name).await?),
            None => None,
        };
        let new = NewSnapshot { name, ..self.image_of(&source, Purpose::Snapshot) };
        self.write_image(&source, &new, None).await?;
        tracing::info!(sandbox = %source.id, snapshot = %new.id, "a snapshot of it is ready");
        let row = self.0.store.snapshot(team, &by_id(&new.id)).await.map_err(stored)?;
        // It may take the place of an older one.
        let control = self.clone();
        let sweeping = async move { control.sweep_snapshots().await };
        self.0.tasks.spawn(self.0.stop.clone().run_until_cancelled_owned(sweeping));
        row.ok_or_else(|| Error::new(ErrorKind::NotFound, "the snapshot was deleted at once"))
    }

    /// Writes a running sandbox to an image that stays; it runs on. The image of a template takes the place of `instead_of`, where
    /// that is said, and of no other. Of an image that fails nothing is left.
    pub(super) async fn write_image(
        &self,
        source: &SandboxRow,
        new: &NewSnapshot,
        instead_of: Option<&SnapshotId>,
    ) -> Result<(), Error> {
        let whole = self.0.images.try_whole(&new.id).ok_or_else(taken)?;
        sandglass_failpoint::hit_async("control.snapshot.insert").await.map_err(injected)?;
        self.admit(new, &[]).await?;
        let finished = async {
            self.capture(source.team, source, &new.id).await?;
            sandglass_failpoint::hit_async("control.snapshot.flush").await.map_err(injected)?;
            self.0.host.flush_image(&new.id.image()).await?;
            sandglass_failpoint::hit_async("control.snapshot.ready").await.map_err(injected)?;
            let finished = self.0.store.snapshot_ready(&new.id, instead_of).await;
            match finished.map_err(stored)? {
                Finished::Ready => Ok(()),
                // A name must mean one thing to all teams.
                Finished::NameTaken => Err(match &new.name {
                    Some(SnapshotName { name, .. }) => name_of_template(name),
                    None => self.name_of_snapshot(&new.template).await,
                }),
                Finished::NotWriting | Finished::Outdated => {
                    let message = "what it was to take the place of is not there any more";
                    Err(Error::new(ErrorKind::Conflict, message))
                }
            }
        };
        if let Err(error) = finished.await {
            self.discard(whole).await;
            return Err(error);
        }
        Ok(())
    }

    /// A page of a team's snapshots, newest first.
    ///
    /// # Errors
    /// The store failed.
    pub async fn snapshots(&self, team: TeamId, wanted: ListSnapshots) -> Result<SnapshotPage, Error> {
        let ListSnapshots { source, name, after, limit } = wanted;
        if let Some(namespace) = name.as_ref().and_then(Reference::namespace)
            && namespace != self.namespace(team).await?
        {
            return Ok(SnapshotPage { rows: Vec::new(), next: None });
        }
        let key = name.map(|name| by_reference(&name, true));
        let filter = SnapshotFilter { team, source, key, after, limit };
        self.0.store.list_snapshots(&filter).await.map_err(stored)
    }

    /// A snapshot of a team, by its id or name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn find_snapshot(&self, team: TeamId, reference: &Reference) -> Result<SnapshotRow, Error> {
        let found = self.find(team, reference).await?;
        found.ok_or_else(|| no_snapshot(reference))
    }

    /// Deletes a snapshot. What was made from it has all that it needs; what is being made from it is made first.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Forbidden`] for a template.
    pub async fn delete_snapshot(&self, team: TeamId, reference: &Reference) -> Result<(), Error> {
        if self.is_template(reference).await? {
            let message = format!("'{reference}' is a template of this server, and no snapshot");
            return Err(Error::new(ErrorKind::Forbidden, message));
        }
        let row = self.find_snapshot(team, reference).await?;
        sandglass_failpoint::hit_async("control.snapshot.delete").await.map_err(injected)?;
        if self.delete(row.id).await? { Ok(()) } else { Err(no_snapshot(reference)) }
    }

    /// The same of a snapshot of whatever team, for operators.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], also for the image of a template.
    pub async fn delete_snapshot_of_any(&self, id: &SnapshotId) -> Result<(), Error> {
        let unknown = || Error::new(ErrorKind::NotFound, format!("snapshot '{id}' not found"));
        let rows = self.0.store.snapshots_on_node(self.0.node).await.map_err(stored)?;
        let found = rows.into_iter().find(|row| row.id == *id && row.purpose == Purpose::Snapshot);
        let row = found.filter(|row| row.state == ImageState::Ready).ok_or_else(unknown)?;
        if self.delete(row.id).await? { Ok(()) } else { Err(unknown()) }
    }

    /// Deletes a snapshot; `false` if somebody else does. What is being made from it is made first.
    async fn delete(&self, id: SnapshotId) -> Result<bool, Error> {
        if !self.0.store.begin_snapshot_deletion(&id).await.map_err(stored)? {
            return Ok(false);
        }
        // Nobody finds it from here on, however long the rest takes.
        self.0.pools.changed.notify_one();
        let control = self.clone();
        let removing = async move { control.discard(control.0.images.whole(&id).await).await };
        let removing = self.0.tasks.spawn(self.0.stop.clone().run_until_cancelled_owned(removing));
        let _goes_on = timeout(REMOVAL_PATIENCE, removing).await;
        Ok(true)
    }

    /// Deletes the snapshots that are not kept any longer. What fails is done the next time.
    pub(super) async fn sweep_snapshots(&self) {
        let swept = async {
            let rows = self.0.store.snapshots_on_node(self.0.node).await.map_err(stored)?;
            for id in self.0.config.keep_snapshots.surplus(&rows, self.0.clock.now()) {
                tracing::info!(snapshot = %id, "deleting a snapshot that has no name, and newer ones or its time behind it");
                self.delete(id).await?;
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = swept.await {
            tracing::error!(error = %Chain(&error), "old snapshots could not be deleted");
        }
    }

    /// Makes `count` copies of a running sandbox, which runs on: all are admitted together or none, and then each is made or
    /// fails by itself. Each has its labels, environment and network, tokens of its own, and lives so long from when it runs.
    ///
    /// # Errors
    /// As [`Control::snapshot`], but [`ErrorKind::Conflict`] for a paused sandbox; [`ErrorKind::Quota`]. Then there is no
    /// copy.
    pub async fn fork(
        &self,
        team: TeamId,
        id: &SandboxId,
        count: usize,
        lives: Duration,
    ) -> Result<Vec<Result<SandboxRow, Error>>, Error> {
        let shared = &self.0;
        if !(1..=MAX_CHILDREN).contains(&count) {
            return Err(Error::new(ErrorKind::Invalid, format!("count must be 1 to {MAX_CHILDREN}")));
        }
        check_timeout(lives, shared.config.max_lifetime)?;
        let source = self.capturable(team, id, ErrorKind::Conflict).await?;
        // What its children need, before anything is written.
        shared.defaults(source.defaults.as_ref(), &source.template)?;
        if shared.connections.available_permits() == 0 {
            return Err(admission::no_connection(shared.config.budgets.connections));
        }
        let started = Instant::now();
        let new = self.image_of(&source, Purpose::Fork);
        let children: Vec<_> = (0..count).map(|_| self.child_of(&source, &new, lives)).collect();
        let whole = shared.images.try_whole(&new.id).ok_or_else(taken)?;
        let claims = children.iter().map(|child| shared.claim(&child.id).ok_or_else(taken));
        let claims: Vec<Claim> = claims.collect::<Result<_, _>>()?;
        sandglass_failpoint::hit_async("control.fork.insert").await.map_err(injected)?;
        self.admit(&new, &children).await?;
        let mut claimed = Vec::new();
        for (child, claim) in children.iter().zip(claims) {
            claimed.push((claim, self.row(&child.id).await?));
        }
        let captured = async {
            let captured = self.capture(team, &source, &new.id).await?;
            sandglass_failpoint::hit_async("control.fork.children").await.map_err(injected)?;
            Ok(captured)
        };
        let captured = match captured.await {
            Ok(captured) => captured,
            Err(error) => {
                for (claim, row) in claimed {
                    claim.own(row, Begin::Fail(format!("its source could not be copied: {}", Chain(&error))));
                }
                self.discard(whole).await;
                return Err(error);
            }
        };
        let lease = whole.share();
        let mut answers = Vec::new();
        for (claim, row) in claimed {
            self.hand_down(&row.id, captured.remembered.as_ref()).await;
            let (made, answer) = oneshot::channel();
            answers.push((row.id.clone(), answer));
            claim.own(row, Begin::Create(tracing::Span::current(), made, Origin::Copy(lease.clone())));
        }
        drop(lease);
        let mut outcomes = Vec::new();
        for (id, answer) in answers {
            let stopping = |_| Error::new(ErrorKind::Capacity, "the server is stopping; try again");
            let outcome = match answer.await.map_err(stopping).flatten() {
                Ok(()) => self.row(&id).await,
                Err(error) => Err(error),
            };
            shared.metrics.created(&outcome, started.elapsed());
            if let Ok(row) = &outcome {
                shared.metrics.started(row.start_path);
            }
            outcomes.push(outcome);
        }
        self.discard(shared.images.whole(&new.id).await).await;
        Ok(outcomes)
    }

    /// The ready snapshot of a team that a reference means.
    async fn find(&self, team: TeamId, reference: &Reference) -> Result<Option<SnapshotRow>, Error> {
        let found = self.0.store.snapshot(team, &by_reference(reference, false)).await.map_err(stored)?;
        Ok(found.filter(|row| reference.namespace().is_none_or(|namespace| namespace == row.namespace)))
    }

    async fn namespace(&self, team: TeamId) -> Result<String, Error> {
        let teams = self.0.store.teams().await.map_err(stored)?;
        Ok(teams.iter().find(|one| one.id == team).map(|one| namespace_of(&one.name)).unwrap_or_default())
    }

    /// The name that a client gives a snapshot, if it may.
    async fn name_for(&self, team: TeamId, name: &Reference) -> Result<SnapshotName, Error> {
        let refused = |message: String| Err(Error::new(ErrorKind::Invalid, message));
        if let Some(namespace) = name.namespace() {
            let own = self.namespace(team).await?;
            if namespace != own {
                return refused(format!(
                    "names of your team's snapshots begin with '{own}/', not with '{namespace}/'"
                ));
            }
        }
        if self.has_template(name.name()).await? {
            return Err(name_of_template(name.name()));
        }
        Ok(SnapshotName { name: name.name().to_owned(), tag: name.tag_or_default().to_owned() })
    }

    pub(super) fn can_image(&self) -> Result<(), Error> {
        if self.0.engine.refuses(Feature::Checkpoint) {
            let message = format!("the engine '{}' has no snapshots and no forks", self.0.engine.name);
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(())
    }

    /// A sandbox of this team that an image can be made of; for one that is paused, an error of this kind.
    pub(super) async fn capturable(
        &self,
        team: TeamId,
        id: &SandboxId,
        paused: ErrorKind,
    ) -> Result<SandboxRow, Error> {
        use SandboxState::{Creating, Ended, Ending, Paused, Pausing, Resuming, Running};
        let row = self.row(id).await?;
        let (kind, message) = match row.state {
            _ if row.team != team => return Err(not_found(id)),
            Running => return self.can_image().map(|()| row),
            Creating | Ended => return Err(not_found(id)),
            Paused => (paused, "the sandbox is paused: resume it first"),
            Pausing | Resuming => return Err(in_between(row.state).unwrap_or_else(|| not_found(id))),
            Ending => (ErrorKind::Conflict, "the sandbox is being ended"),
        };
        Err(Error::new(kind, message))
    }

    pub(super) fn image_of(&self, source: &SandboxRow, purpose: Purpose) -> NewSnapshot {
        NewSnapshot {
            id: SnapshotId::random(),
            node: source.node,
            team: source.team,
            purpose,
            name: None,
            template: source.template.clone(),
            defaults: source.defaults.clone(),
            rootfs: source.rootfs,
            limits: source.limits,
            source: source.id.clone(),
            generation: source.generation,
            volumes: source.volumes.clone(),
            created_at: self.0.clock.now(),
            quota: self.0.config.budgets.quota,
            capacity: self.0.config.budgets.capacity,
        }
    }

    fn child_of(&self, source: &SandboxRow, image: &NewSnapshot, lives: Duration) -> NewSandbox {
        let own = |token: &Option<String>| token.as_ref().map(|_| random_token());
        NewSandbox {
            id: SandboxId::random(),
            node: image.node,
            team: image.team,
            template: image.template.clone(),
            defaults: source.defaults.clone(),
            start_path: StartPath::Restore,
            rootfs: image.rootfs,
            limits: image.limits,
            access_token: own(&source.access_token),
            metadata: labels_of_copy(&source.metadata),
            env: source.env.clone(),
            allow_internet_access: source.allow_internet_access,
            policy: source.policy.clone(),
            traffic_token: own(&source.traffic_token),
            request_host: source.request_host.clone(),
            // A copy is made for what it is asked to do, and nothing of it stays.
            lifetime: Lifetime { idle: source.lifetime.idle, ..Lifetime::of(lives) },
            made_from: MadeFrom::Fork(source.id.clone()),
            generation: next(image.generation),
            volumes: image.volumes.clone(),
            models: source.models.clone(),
            connections: source.connections.clone(),
            created_at: image.created_at,
            end_at: image.created_at.plus(lives),
            max_end_at: image.created_at.plus(self.0.config.max_lifetime),
            idempotency: None,
            assign_to: None,
            quota: image.quota,
            capacity: image.capacity,
        }
    }

    /// Inserts an image and what is to be made from it, if there is room. Where there will be as soon as others are
    /// removed, it waits for that, as a creation does.
    async fn admit(&self, new: &NewSnapshot, children: &[NewSandbox]) -> Result<(), Error> {
        let deadline = Instant::now() + REMOVAL_PATIENCE;
        loop {
            match self.0.store.insert_snapshot(new, children).await.map_err(stored)? {
                Admitted::Inserted => return Ok(()),
                Admitted::OverQuota(excess) => return Err(admission::over_quota(excess)),
                Admitted::OverCapacity { soon: true, .. } if Instant::now() < deadline => {
                    sleep(REMOVAL_CHECK).await;
                }
                Admitted::OverCapacity { excess, .. } => return Err(admission::over_capacity(excess)),
            }
        }
    }

    async fn capture(
        &self,
        team: TeamId,
        source: &SandboxRow,
        image: &SnapshotId,
    ) -> Result<Captured, Error> {
        self.owner(team, &source.id).await?.capture(&source.id, image, Wanted::of(source)).await
    }

    /// Lets a child know what its source had resolved: its programs go on with the addresses. What they make of it is
    /// decided by the child's own policy, and counted as its own.
    async fn hand_down(&self, child: &SandboxId, remembered: Option<&Remembered>) {
        let Some(remembered) = remembered else { return };
        let remembered = Remembered { carried: Carried::default(), ..remembered.clone() };
        let folder = self.0.config.egress.receipts.join(child.as_str());
        let written = tokio::task::spawn_blocking(move || {
            fs_err::create_dir_all(&folder).and_then(|()| remembered.write(&folder))
        });
        if let Err(error) = written.await.map_err(std::io::Error::other).flatten() {
            tracing::warn!(sandbox = %child, %error, "what its source resolved is forgotten");
        }
    }

    /// Removes an image and then its row. What fails here, the reconciler does.
    pub(super) async fn discard(&self, whole: Whole) {
        let (id, shared) = (whole.id(), &self.0);
        let discarded = async {
            sandglass_failpoint::hit_async("control.snapshot.remove").await.map_err(injected)?;
            // First, because the store may have no room for a word before that of the image is free.
            shared.host.remove_image(&id.image()).await?;
            sandglass_failpoint::hit_async("control.snapshot.forget").await.map_err(injected)?;
            shared.store.begin_snapshot_deletion(id).await.map_err(stored)?;
            shared.store.forget_snapshot(id).await.map_err(stored)
        };
        if let Err(error) = discarded.await {
            tracing::error!(snapshot = %id, error = %Chain(&error), "its image could not be removed yet");
        }
    }

    /// Removes what earlier servers left half way to somewhere, and what could not be removed before.
    pub(super) async fn clear_images(&self, rows: &[SnapshotRow]) -> Result<(), Error> {
        for row in rows.iter().filter(|row| reconcile::is_passing(row)) {
            let Some(whole) = self.0.images.try_whole(&row.id) else { continue };
            // It may have come to where it was to go before nobody used it any more.
            let now = self.0.store.snapshots_on_node(self.0.node).await.map_err(stored)?;
            if now.iter().any(|now| now.id == row.id && reconcile::is_passing(now)) {
                tracing::info!(snapshot = %row.id, state = ?row.state, "removing an image that is not needed any more");
                self.discard(whole).await;
            }
        }
        Ok(())
    }
}

/// What a copy has of the labels of its source. Nothing is built in a copy of what a template is built in.
fn labels_of_copy(source: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut labels = source.clone();
    labels.remove(BUILD_LABEL);
    labels
}

fn no_snapshot(reference: &Reference) -> Error {
    Error::new(ErrorKind::NotFound, format!("snapshot '{reference}' not found"))
}

fn name_of_template(name: &str) -> Error {
    Error::new(ErrorKind::Conflict, format!("'{name}' is the name of a template: choose another name"))
}

fn taken() -> Error {
    Error::new(ErrorKind::Conflict, "try again")
}
