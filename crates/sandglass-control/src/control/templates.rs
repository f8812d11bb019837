//! Templates that have an image of a running state: what they give, and how they get one.

use sandglass_store::{
    CommandDefaults, ImageState, MadeFrom, NewSnapshot, Purpose, SnapshotRow, StartPath, TemplateSpec,
};
use sandglass_types::{Error, ErrorKind, Generation, Reference, SandboxId, SnapshotId, TeamId};

use super::snapshots::{Model, next};
use super::{Control, stored};
use crate::images::Lease;
use crate::owner::Origin;
use crate::template::Template;

mod build;

pub use build::KnownTemplate;

/// The image of a template's running state. It stays as it is for as long as this lives.
#[derive(Debug)]
pub(crate) struct RunningImage {
    /// Its row.
    pub(crate) row: SnapshotRow,
    /// What the template is besides.
    pub(crate) spec: Box<TemplateSpec>,
    /// The share in it.
    pub(crate) lease: Lease,
}

impl RunningImage {
    /// What it gives.
    pub(super) fn into_model(self) -> Model {
        let Self { row, spec, lease } = self;
        Model {
            template: row.template,
            rootfs: row.rootfs,
            limits: row.limits,
            generation: next(row.generation),
            made_from: MadeFrom::Template,
            defaults: row.defaults,
            start_path: StartPath::Restore,
            volumes: Vec::new(),
            origin: Origin::Template(lease, spec),
        }
    }
}

/// Whether the image of a template that the server prepares itself is of what it prepared last.
fn is_of(image: &SnapshotRow, own: &Template, limits: sandglass_types::Limits) -> bool {
    (image.rootfs, image.limits) == (own.rootfs, limits)
}

impl Control {
    /// The image of a running state of the template of this name, if it has one that fits what the server is today. That
    /// the engine is another one, or the agent in it is gone, is found by whoever restores it.
    ///
    /// # Errors
    /// The store failed.
    pub(crate) async fn running_image(&self, name: &str) -> Result<Option<RunningImage>, Error> {
        let shared = self.shared();
        let find = async || shared.store.template(shared.node, name).await.map_err(stored);
        // One that is replaced in between has a successor.
        while let Some(found) = find().await? {
            let Some(lease) = shared.images.lease(&found.id) else {
                tokio::task::yield_now().await;
                continue;
            };
            let Some(row) = find().await?.filter(|row| row.id == found.id) else { continue };
            let own = shared.config.templates.get(name);
            if own.is_some_and(|own| !is_of(&row, own, shared.config.limits)) {
                shared.stale.note(name, &row.id);
                return Ok(None);
            }
            let Purpose::Template(spec) = row.purpose.clone() else { return Ok(None) };
            if spec.agent != shared.engine.agent {
                // It serves until there is one with today's.
                shared.stale.note(name, &row.id);
            }
            return Ok(Some(RunningImage { row, spec, lease }));
        }
        Ok(None)
    }

    /// What a template gives, if a reference means one.
    pub(super) async fn model_of_template(&self, wanted: &Reference) -> Result<Option<Model>, Error> {
        let Some(name) = wanted.bare_name() else { return Ok(None) };
        if let Some(image) = self.running_image(name).await? {
            return Ok(Some(image.into_model()));
        }
        Ok(self.shared().config.templates.get(name).map(|own| self.cold(own)))
    }

    /// What a template gives that the server prepares itself, from its root file system.
    pub(super) fn cold(&self, own: &Template) -> Model {
        Model {
            template: own.name.clone(),
            rootfs: own.rootfs,
            limits: self.shared().config.limits,
            generation: Generation::FIRST,
            made_from: MadeFrom::Template,
            defaults: None,
            start_path: StartPath::Cold,
            volumes: Vec::new(),
            origin: Origin::New,
        }
    }

    /// Whether this server has a template of that name.
    pub(super) async fn has_template(&self, name: &str) -> Result<bool, Error> {
        let shared = self.shared();
        let own = shared.config.templates.contains_key(name);
        Ok(own || shared.store.template(shared.node, name).await.map_err(stored)?.is_some())
    }

    /// That no team has a snapshot of the name of a template that is to have an image, before any work is done for it. As the
    /// store decides when that is ready: one that has an image already keeps its name.
    async fn expect_free(&self, name: &str) -> Result<(), Error> {
        let shared = self.shared();
        if shared.store.template(shared.node, name).await.map_err(stored)?.is_some() {
            return Ok(());
        }
        match self.snapshot_of_name(name).await? {
            Some(_) => Err(self.name_of_snapshot(name).await),
            None => Ok(()),
        }
    }

    /// The snapshot of whatever team that has this name, or this id.
    async fn snapshot_of_name(&self, name: &str) -> Result<Option<SnapshotRow>, Error> {
        let shared = self.shared();
        let rows = shared.store.snapshots_on_node(shared.node).await.map_err(stored)?;
        Ok(rows.into_iter().find(|row| {
            let named = row.id.as_str() == name || row.name.as_ref().is_some_and(|named| named.name == name);
            named && row.purpose == Purpose::Snapshot && row.state == ImageState::Ready
        }))
    }

    /// Why there can be no template of this name: said to operators, who are told whose snapshot it is.
    pub(super) async fn name_of_snapshot(&self, name: &str) -> Error {
        let told = async {
            let Some(row) = self.snapshot_of_name(name).await? else { return Ok(None) };
            let teams = self.shared().store.teams().await.map_err(stored)?;
            let team =
                teams.into_iter().find(|team| team.id == row.team).map_or(row.namespace, |team| team.name);
            Ok::<_, Error>(Some((row.id, team)))
        };
        let (whose, how) = match told.await {
            Ok(Some((id, team))) => (
                format!("the team '{team}' has a snapshot of the name '{name}', {id}"),
                format!(" (DELETE /v1/snapshots/{id})"),
            ),
            // It is gone by now, or the store can't say.
            Ok(None) | Err(_) => (format!("a team has a snapshot of the name '{name}'"), String::new()),
        };
        let message = format!(
            "{whose}, and a template of that name would take its place: choose another name, or delete the snapshot{how}"
        );
        Error::new(ErrorKind::Conflict, message)
    }

    pub(super) async fn is_template(&self, reference: &Reference) -> Result<bool, Error> {
        match reference.bare_name() {
            Some(name) => self.has_template(name).await,
            None => Ok(false),
        }
    }

    /// Writes a running sandbox, which runs on, to the image of the template of this name: what is made from that goes on
    /// from here. The one that it had before is removed once nobody is made from it any more; with `instead_of`, it must be
    /// that one.
    ///
    /// # Errors
    /// As [`Control::snapshot`]; [`ErrorKind::Conflict`] if a team has a snapshot of that name, or the template has another image.
    pub async fn keep_as_template(
        &self,
        team: TeamId,
        id: &SandboxId,
        name: &str,
        spec: TemplateSpec,
        defaults: CommandDefaults,
        instead_of: Option<&SnapshotId>,
    ) -> Result<SnapshotRow, Error> {
        let source = self.capturable(team, id, ErrorKind::Conflict).await?;
        let purpose = Purpose::Template(Box::new(spec));
        let new = NewSnapshot {
            template: name.to_owned(),
            defaults: Some(defaults),
            ..self.image_of(&source, purpose)
        };
        self.write_image(&source, &new, instead_of).await?;
        tracing::info!(sandbox = %source.id, template = name, image = %new.id, "a template has an image of it");
        self.0.pools.changed.notify_one();
        // What the template had before, at once if nobody needs it.
        let shared = self.shared();
        let rows = shared.store.snapshots_on_node(shared.node).await.map_err(stored)?;
        self.clear_images(&rows).await?;
        let written = rows.into_iter().find(|row| row.id == new.id);
        written.ok_or_else(|| Error::new(ErrorKind::NotFound, "the template was deleted at once"))
    }
}
