//! Templates, for operators: what is made from them is for all teams.

use std::collections::BTreeMap;

use axum::extract::{FromRequestParts, Path, State};
use http::StatusCode;
use http::request::Parts;
use sandglass_control::{KnownTemplate, TemplateDefinition};
use sandglass_types::limits::Unchecked;
use sandglass_types::{SandboxId, SnapshotId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::LimitsView;
use super::disk::{self, DiskView};
use crate::auth::Operator;
use crate::backend::Backend;
use crate::body::Json;
use crate::e2b::routes::sandbox_id;
use crate::e2b::wire::Sandbox;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;

pub(super) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_templates, finish_template))
        .routes(routes!(begin_template))
        .routes(routes!(get_template, delete_template))
}

/// The template that a path names. One that it can't be is one that is not there.
#[derive(Debug)]
struct OfTemplate(String);

impl<S: Send + Sync> FromRequestParts<S> for OfTemplate {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = Path::<String>::from_request_parts(parts, state).await;
        name.map(|Path(name)| Self(name)).map_err(|_| ApiError::invalid("invalid name of a template"))
    }
}

/// The image of a running state.
#[derive(Debug, Serialize, ToSchema)]
struct ImageView {
    id: String,
    #[schema(format = DateTime)]
    created_at: String,
    /// What it takes on the disk at this moment; `null` if that could not be measured.
    disk: Option<DiskView>,
}

/// One template.
#[derive(Debug, Serialize, ToSchema)]
struct TemplateView {
    /// What clients say for it as `templateID`.
    name: String,
    /// The template that it was built on; its own name for one that the server prepares itself.
    base: String,
    /// The image that sandboxes are restored from; `null` if they start cold.
    image: Option<ImageView>,
    /// What runs on in each of them.
    start: Option<String>,
    /// What ends with 0 once that is ready.
    ready: Option<String>,
    /// How long that may take, in seconds.
    ready_timeout: u32,
    /// How many unused copies are kept ready.
    pool: u32,
    /// Who runs commands, and where; an empty folder is the home of the user.
    user: String,
    workdir: String,
    /// Environment of every command.
    env: BTreeMap<String, String>,
    limits: LimitsView,
    /// Content of its root file system.
    rootfs: String,
}

/// One template, with all that was made of it.
#[derive(Debug, Serialize, ToSchema)]
struct TemplateDetailView {
    #[serde(flatten)]
    template: TemplateView,
    /// What its image takes on the disk together with all snapshots of sandboxes that were made from it, blocks that they
    /// share counted once; `null` if that could not be measured.
    tree_bytes: Option<u64>,
}

impl TemplateView {
    fn new(template: KnownTemplate, disk: &mut BTreeMap<SnapshotId, DiskView>) -> Self {
        let KnownTemplate { name, spec, defaults, limits, rootfs, image } = template;
        let Unchecked { cpus, memory_mib, disk_mib, processes } = limits.into();
        Self {
            name,
            base: spec.base,
            image: image.map(|(id, created_at)| ImageView {
                id: id.to_string(),
                created_at: created_at.to_string(),
                disk: disk.remove(&id),
            }),
            start: spec.start,
            ready: spec.ready,
            ready_timeout: spec.ready_timeout,
            pool: spec.pool,
            user: defaults.user,
            workdir: defaults.workdir,
            env: defaults.env,
            limits: LimitsView { cpus, memory_mib, disk_mib, processes },
            rootfs: rootfs.to_string(),
        }
    }
}

/// What the images of templates take.
async fn disk_of(backend: &dyn Backend, templates: &[KnownTemplate]) -> BTreeMap<SnapshotId, DiskView> {
    let images = templates.iter().filter_map(|template| template.image.as_ref());
    disk::of(backend, images.map(|(id, _)| id.clone())).await
}

async fn view(backend: &dyn Backend, template: KnownTemplate) -> TemplateView {
    let mut disk = disk_of(backend, std::slice::from_ref(&template)).await;
    TemplateView::new(template, &mut disk)
}

/// The body of `POST /v1/templates`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct FinishTemplate {
    /// The sandbox that `POST /v1/templates/builds` made, set up by now.
    sandbox: String,
    /// The same definition as there.
    #[schema(value_type = Object)]
    template: TemplateDefinition,
}

#[utoipa::path(post, path = "/v1/templates/builds", tag = "native",
    request_body(content = Object, description = "the fields of a `template.toml`, as JSON, with its `name`"), responses(
    (status = 201, description = "A sandbox of the template's base, to set up and then to finish", body = Sandbox),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn begin_template(
    State(state): State<ApiState>,
    Operator(team): Operator,
    Json(definition): Json<TemplateDefinition>,
) -> Result<(StatusCode, axum::Json<Sandbox>), ApiError> {
    let row = state.backend.begin_template(team, &definition).await?;
    Ok((StatusCode::CREATED, axum::Json(Sandbox::new(row, state.backend.domain()))))
}

#[utoipa::path(post, path = "/v1/templates", tag = "native", request_body = FinishTemplate, responses(
    (status = 201, description = "What it starts is ready, and all that is made from the template goes on from there; the \
     sandbox runs on", body = TemplateView),
    (status = "4XX", description = "Refused, or one of its commands failed; the template is as it was", body = ErrorBody),
    (status = "5XX", description = "Failed; the template is as it was", body = ErrorBody)))]
async fn finish_template(
    State(state): State<ApiState>,
    Operator(team): Operator,
    Json(body): Json<FinishTemplate>,
) -> Result<(StatusCode, axum::Json<TemplateView>), ApiError> {
    let id: SandboxId = sandbox_id(&body.sandbox)?;
    let template = state.backend.finish_template(team, &id, &body.template).await?;
    Ok((StatusCode::CREATED, axum::Json(view(&*state.backend, template).await)))
}

#[utoipa::path(get, path = "/v1/templates", tag = "native", responses(
    (status = 200, description = "All of them, by name", body = Vec<TemplateView>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_templates(
    State(state): State<ApiState>,
    _: Operator,
) -> Result<axum::Json<Vec<TemplateView>>, ApiError> {
    let all = state.backend.templates().await?;
    let mut disk = disk_of(&*state.backend, &all).await;
    Ok(axum::Json(all.into_iter().map(|template| TemplateView::new(template, &mut disk)).collect()))
}

#[utoipa::path(get, path = "/v1/templates/{name}", tag = "native", params(("name" = String, Path)), responses(
    (status = 200, description = "The template", body = TemplateDetailView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_template(
    State(state): State<ApiState>,
    _: Operator,
    OfTemplate(name): OfTemplate,
) -> Result<axum::Json<TemplateDetailView>, ApiError> {
    let template = state.backend.template(&name).await?;
    let template = view(&*state.backend, template).await;
    let tree_bytes = disk::measured(state.backend.tree_of_template(&name).await);
    Ok(axum::Json(TemplateDetailView { template, tree_bytes }))
}

#[utoipa::path(delete, path = "/v1/templates/{name}", tag = "native", params(("name" = String, Path)), responses(
    (status = 204, description = "Its image is gone; what was made from it has all that it needs"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn delete_template(
    State(state): State<ApiState>,
    _: Operator,
    OfTemplate(name): OfTemplate,
) -> Result<StatusCode, ApiError> {
    state.backend.delete_template(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}
