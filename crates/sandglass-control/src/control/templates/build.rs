//! How templates get their images: an operator builds one in a sandbox of its own, and one that does not fit any more is
//! made anew from its disk.

use std::collections::BTreeMap;
use std::time::Duration;

use sandglass_egress::policy::{Ingress, Policy};
use sandglass_store::{CommandDefaults, SandboxRow, SnapshotRow, StartPath, TemplateSpec};
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, Lifetime, SandboxId, SnapshotId, TeamId, Timestamp};
use tokio::time::Instant;

use super::super::snapshots::Model;
use super::{Control, RunningImage, stored};
use crate::command;
use crate::definition::{BaseOf, Plan, TemplateDefinition};
use crate::owner::Origin;
use crate::request::{BUILD_LABEL, CreateSandbox};

/// How long a build may take. Whoever builds ends the sandbox sooner.
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);

/// A template of this server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownTemplate {
    /// What clients say for it.
    pub name: String,
    /// What it is besides; nothing is started in one that was never built.
    pub spec: TemplateSpec,
    /// What commands have that say nothing else.
    pub defaults: CommandDefaults,
    /// The limits of all that are made from it.
    pub limits: sandglass_types::Limits,
    /// Content of its root file system.
    pub rootfs: sandglass_types::Digest,
    /// The image of its running state, and when that was made.
    pub image: Option<(SnapshotId, Timestamp)>,
}

fn known(row: SnapshotRow, spec: TemplateSpec, defaults: CommandDefaults) -> KnownTemplate {
    KnownTemplate {
        name: row.template,
        spec,
        defaults,
        limits: row.limits,
        rootfs: row.rootfs,
        image: Some((row.id, row.created_at)),
    }
}

fn not_found(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("template '{name}' not found"))
}

impl Control {
    /// What a definition comes to here, and what its sandbox is made of.
    async fn plan(&self, definition: &TemplateDefinition) -> Result<(Plan, Model), Error> {
        self.can_image()?;
        let shared = self.shared();
        let own = shared.config.templates.get(definition.base());
        let model = match own {
            // Never from its own image, which has no other limits than its own.
            Some(own) => self.cold(own),
            None => {
                let image = self.running_image(definition.base()).await?;
                image.map(RunningImage::into_model).ok_or_else(|| not_found(definition.base()))?
            }
        };
        let defaults = shared.defaults(model.defaults.as_ref(), &model.template)?;
        let base = BaseOf { defaults, limits: model.limits, running: own.is_none() };
        let mut plan = definition.plan(base, shared.config.templates.contains_key(&definition.name))?;
        plan.spec.agent = shared.engine.agent;
        if let Origin::Template(_, of) = &model.origin {
            // Both live on in the image of what is built on it.
            (plan.spec.agent, plan.spec.inherited) = (of.agent, of.all_started());
        }
        let model = Model { limits: plan.limits, defaults: Some(plan.defaults.clone()), ..model };
        Ok((plan, model))
    }

    /// Makes the sandbox in which a template is built: of its base, with its limits, its environment and its network.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] with the field, [`ErrorKind::NotFound`] for the base, [`ErrorKind::Conflict`] if a team has a
    /// snapshot of that name, [`ErrorKind::Unsupported`] if the engine
    /// has no images, and as [`Control::create`].
    pub async fn begin_template(
        &self,
        team: TeamId,
        definition: &TemplateDefinition,
    ) -> Result<SandboxRow, Error> {
        let (plan, model) = self.plan(definition).await?;
        self.expect_free(&plan.name).await?;
        self.make_for_template(team, &plan.name, plan.policy, model).await
    }

    async fn make_for_template(
        &self,
        team: TeamId,
        name: &str,
        policy: Policy,
        model: Model,
    ) -> Result<SandboxRow, Error> {
        let request = CreateSandbox {
            template: model.template.clone(),
            lifetime: Lifetime {
                idle: Some(Duration::ZERO),
                ..Lifetime::of(BUILD_TIMEOUT.min(self.shared().config.max_lifetime))
            },
            secured: true,
            metadata: BTreeMap::from([(BUILD_LABEL.to_owned(), name.to_owned())]),
            env: BTreeMap::new(),
            allow_internet_access: None,
            policy,
            ingress: Ingress::default(),
            volumes: Vec::new(),
            connections: Vec::new(),
            idempotency: None,
        };
        let made = self.make_of(team, request, model, None).await?;
        made.ok_or_else(|| Error::new(ErrorKind::Conflict, "try again"))
    }

    /// Makes the template of a sandbox that [`Control::begin_template`] made for this definition, and that was set up since:
    /// runs two login shells, starts what it starts, waits until that is ready, and writes it to the template's image. The
    /// sandbox runs on.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if it was made for another definition, or a command failed: with its last lines. Otherwise as
    /// [`Control::keep_as_template`]. The template is as it was before.
    pub async fn finish_template(
        &self,
        team: TeamId,
        id: &SandboxId,
        definition: &TemplateDefinition,
    ) -> Result<KnownTemplate, Error> {
        let (plan, model) = self.plan(definition).await?;
        let row = self.capturable(team, id, ErrorKind::Conflict).await?;
        let made_for = (&row.template, row.rootfs, row.limits, row.defaults.as_ref());
        if made_for != (&model.template, model.rootfs, plan.limits, Some(&plan.defaults))
            || row.metadata.get(BUILD_LABEL) != Some(&plan.name)
        {
            let message = "the sandbox was not made for this template as it is defined now: build it anew";
            return Err(Error::new(ErrorKind::Conflict, message));
        }
        let live = self.live(id).ok_or_else(|| super::super::not_found(id))?;
        command::warm_up(&live, &row).await?;
        // Last, because what it starts must still run, or have ended well.
        command::begin(&live, &row, &plan.spec.own()).await?;
        drop(live);
        let (spec, defaults) = (plan.spec.clone(), plan.defaults.clone());
        let image = self.keep_as_template(team, id, &plan.name, spec, defaults, None).await?;
        Ok(known(image, plan.spec, plan.defaults))
    }

    /// All templates of this server, by name.
    ///
    /// # Errors
    /// The store failed.
    pub async fn templates(&self) -> Result<Vec<KnownTemplate>, Error> {
        let shared = self.shared();
        let rows = shared.store.snapshots_on_node(shared.node).await.map_err(stored)?;
        let mut names: Vec<_> = shared.config.templates.keys().cloned().collect();
        names.extend(rows.into_iter().map(|row| row.template));
        names.sort();
        names.dedup();
        let mut all = Vec::new();
        for name in names {
            match self.template(&name).await {
                Ok(template) => all.push(template),
                // A snapshot's, or deleted by now.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    /// One of them.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn template(&self, name: &str) -> Result<KnownTemplate, Error> {
        let shared = self.shared();
        if let Some(RunningImage { row, spec, .. }) = self.running_image(name).await? {
            let defaults = shared.defaults(row.defaults.as_ref(), name)?;
            return Ok(known(row, *spec, defaults));
        }
        let own = shared.config.templates.get(name).ok_or_else(|| not_found(name))?;
        Ok(KnownTemplate {
            name: own.name.clone(),
            spec: TemplateSpec {
                base: own.name.clone(),
                start: None,
                ready: None,
                ready_timeout: 1,
                pool: 0,
                agent: None,
                inherited: Vec::new(),
            },
            defaults: own.defaults(),
            limits: shared.config.limits,
            rootfs: own.rootfs,
            image: None,
        })
    }

    /// Deletes the image of a template, and with it the template, unless it is one that the server prepares itself. What was
    /// made from it has all that it needs.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Forbidden`] where there is nothing but what the server prepares itself.
    pub async fn delete_template(&self, name: &str) -> Result<(), Error> {
        let shared = self.shared();
        let row = shared.store.template(shared.node, name).await.map_err(stored)?;
        let gone = match &row {
            Some(row) => shared.store.begin_snapshot_deletion(&row.id).await.map_err(stored)?,
            None => false,
        };
        shared.pools.changed.notify_one();
        if !gone {
            if shared.config.templates.contains_key(name) {
                let message =
                    format!("the template '{name}' is prepared by the server itself, and has no image");
                return Err(Error::new(ErrorKind::Forbidden, message));
            }
            return Err(not_found(name));
        }
        let rows = shared.store.snapshots_on_node(shared.node).await.map_err(stored)?;
        self.clear_images(&rows).await
    }

    /// Makes images anew that could not be used.
    pub(in crate::control) fn renew_templates(&self) {
        for (name, image) in self.shared().stale.due(Instant::now()) {
            let control = self.clone();
            let renewing = async move {
                match control.renew(&name, &image).await {
                    Ok(()) => tracing::info!(template = name, "its image was made anew"),
                    Err(error) => {
                        tracing::error!(template = name, error = %Chain(&error), "its image can't be made anew; build it");
                    }
                }
            };
            self.shared().tasks.spawn(self.shared().stop.clone().run_until_cancelled_owned(renewing));
        }
    }

    /// Whether the image of a template gives a sandbox, of which nobody wants anything.
    async fn can_be_restored(
        &self,
        row: &SnapshotRow,
        spec: &TemplateSpec,
        defaults: &CommandDefaults,
    ) -> Result<bool, Error> {
        let name = &row.template;
        let lease = self.shared().images.lease(&row.id).ok_or_else(|| not_found(name))?;
        let spec = Box::new(spec.clone());
        let model = RunningImage { row: row.clone(), spec, lease: lease.clone() }.into_model();
        // Without the cold start that would follow: only the image is in question.
        let model = Model { defaults: Some(defaults.clone()), origin: Origin::Copy(lease), ..model };
        match self.make_for_template(row.team, name, Policy::default(), model).await {
            Ok(made) => self.kill(made.team, &made.id).await.map(|()| true),
            // Whether it can is not known.
            Err(error) if matches!(error.kind(), ErrorKind::Capacity | ErrorKind::Quota) => Err(error),
            Err(error) => {
                tracing::info!(template = name, error = %Chain(&error), "its image can't be restored");
                Ok(false)
            }
        }
    }

    async fn renew(&self, name: &str, image: &SnapshotId) -> Result<(), Error> {
        let shared = self.shared();
        let found = shared.store.template(shared.node, name).await.map_err(stored)?;
        // It has another one by now, or none.
        let Some(row) = found.filter(|row| row.id == *image) else { return Ok(()) };
        let sandglass_store::Purpose::Template(spec) = row.purpose.clone() else { return Ok(()) };
        let row_agent = spec.agent;
        let defaults = shared.defaults(row.defaults.as_ref(), name)?;
        let spec = TemplateSpec { agent: shared.engine.agent, ..*spec };
        if row_agent == shared.engine.agent && self.can_be_restored(&row, &spec, &defaults).await? {
            // It was the machine, or what a client wanted of its sandbox.
            return Ok(());
        }
        let model = match shared.config.templates.get(name) {
            Some(own) => Model { defaults: Some(own.defaults()), ..self.cold(own) },
            // From its own disk: what its script made is there, and what it started is started again.
            None => {
                let lease = shared.images.lease(&row.id).ok_or_else(|| not_found(name))?;
                let spec = Box::new(spec.clone());
                let image = RunningImage { row: row.clone(), spec: spec.clone(), lease: lease.clone() };
                Model {
                    defaults: Some(defaults.clone()),
                    start_path: StartPath::Cold,
                    origin: Origin::TemplateDisk(lease, spec),
                    ..image.into_model()
                }
            }
        };
        let defaults = model.defaults.clone().unwrap_or(defaults);
        let made = self.make_for_template(row.team, name, Policy::default(), model).await?;
        let renewed = async {
            let live = self.live(&made.id).ok_or_else(|| super::super::not_found(&made.id))?;
            command::warm_up(&live, &made).await?;
            drop(live);
            // An operator may have built another one meanwhile; that it is so at the last moment is up to the store.
            let now = shared.store.template(shared.node, name).await.map_err(stored)?;
            if now.is_some_and(|now| now.id == row.id) {
                self.keep_as_template(made.team, &made.id, name, spec, defaults, Some(&row.id)).await?;
            }
            Ok(())
        };
        let renewed = renewed.await;
        self.kill(made.team, &made.id).await?;
        renewed
    }
}
