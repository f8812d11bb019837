//! Templates as E2B's clients list them. What this server has are its operator's, and for all teams.

use axum::extract::{RawQuery, State};
use axum::response::Response;
use sandglass_control::KnownTemplate;
use sandglass_store::{Order, PageCursor};
use sandglass_types::reference::DEFAULT_TAG;
use sandglass_types::{Error, ErrorKind, Reference, Timestamp};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::{Builder, Uuid};

use super::list;
use super::snapshots::Meant;
use super::wire::{ENVD_VERSION, rfc3339};
use crate::auth::{Caller, own_team};
use crate::body::Json;
use crate::error::{ApiError, ErrorBody};
use crate::page;
use crate::query::Query;
use crate::router::ApiState;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_templates_v1))
        .routes(routes!(list_templates_v2))
        .routes(routes!(list_default_templates))
        .routes(routes!(get_template_with_builds, publish_template_v1))
        .routes(routes!(publish_template_v2))
        .routes(routes!(find_alias))
        .routes(routes!(list_tags))
}

/// The one state that there is of a build that can be seen here.
const READY: &str = "ready";

/// One template.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Template {
    /// Its name, which `create` takes.
    #[serde(rename = "templateID")]
    template_id: String,
    /// Names what sandboxes are made from today.
    #[serde(rename = "buildID")]
    #[schema(value_type = String, format = "uuid")]
    build_id: Uuid,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u32,
    /// Always true.
    public: bool,
    /// Its name.
    aliases: [String; 1],
    /// The same.
    names: [String; 1],
    /// When its image was made; the start of the server, for one that has none.
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    /// The same.
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    updated_at: Timestamp,
    /// Always `null`, as of E2B's own: they are the operator's.
    created_by: Option<String>,
    /// Always `null`, as of E2B's own.
    #[schema(format = DateTime)]
    last_spawned_at: Option<String>,
    /// Always 0, as of E2B's own.
    spawn_count: u32,
    /// Always 1: those before are gone.
    build_count: u32,
    envd_version: &'static str,
    /// Always `ready`.
    build_status: &'static str,
    /// Always true.
    is_default: bool,
}

/// What names a build: another root file system or another image is another one. Pure.
fn build_id(template: &KnownTemplate) -> Uuid {
    let mut text = format!("{}\n{}\n", template.name, template.rootfs);
    if let Some((image, _)) = &template.image {
        text.push_str(&image.to_string());
    }
    let digest: [u8; 32] = Sha256::digest(text).into();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    Builder::from_custom_bytes(bytes).into_uuid()
}

impl Template {
    fn new(template: &KnownTemplate, started: Timestamp) -> Self {
        let made = template.image.as_ref().map_or(started, |(_, made)| *made);
        let name = || [template.name.clone()];
        Self {
            template_id: template.name.clone(),
            build_id: build_id(template),
            cpu_count: template.limits.cpus(),
            memory_mb: template.limits.memory_mib(),
            disk_size_mb: template.limits.disk_mib(),
            public: true,
            aliases: name(),
            names: name(),
            created_at: made,
            updated_at: made,
            created_by: None,
            last_spawned_at: None,
            spawn_count: 0,
            build_count: 1,
            envd_version: ENVD_VERSION,
            build_status: READY,
            is_default: true,
        }
    }
}

/// What a template is made from today.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateBuild {
    #[serde(rename = "buildID")]
    #[schema(value_type = String, format = "uuid")]
    build_id: Uuid,
    /// Always `ready`.
    status: &'static str,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    updated_at: Timestamp,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    finished_at: Timestamp,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u32,
    envd_version: &'static str,
}

impl From<&Template> for TemplateBuild {
    fn from(template: &Template) -> Self {
        Self {
            build_id: template.build_id,
            status: READY,
            created_at: template.created_at,
            updated_at: template.updated_at,
            finished_at: template.updated_at,
            cpu_count: template.cpu_count,
            memory_mb: template.memory_mb,
            disk_size_mb: template.disk_size_mb,
            envd_version: template.envd_version,
        }
    }
}

/// One template, with its builds.
#[derive(Debug, Serialize, ToSchema)]
struct TemplateWithBuilds {
    #[serde(flatten)]
    template: Template,
    /// The one that there is.
    builds: [TemplateBuild; 1],
}

/// What a name means.
#[derive(Debug, Serialize, ToSchema)]
struct TemplateAlias {
    #[serde(rename = "templateID")]
    template_id: String,
    /// Whether it is for all teams: of the team's own snapshots, none is.
    public: bool,
}

/// One tag of a template.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateTag {
    tag: &'static str,
    #[serde(rename = "buildID")]
    #[schema(value_type = String, format = "uuid")]
    build_id: Uuid,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
}

/// The body of `PATCH /templates/{id}`.
#[derive(Debug, Deserialize, ToSchema)]
struct Publish {
    /// `true`, which they all are. They can't be made otherwise here.
    public: Option<bool>,
}

/// The names of a template.
#[derive(Debug, Serialize, ToSchema)]
struct TemplateNames {
    names: [String; 1],
}

fn not_found(reference: &Reference) -> Error {
    Error::new(ErrorKind::NotFound, format!("template '{reference}' not found"))
}

/// The template that a reference means.
async fn known(state: &ApiState, reference: &Reference) -> Result<Template, ApiError> {
    let name = reference.bare_name().ok_or_else(|| not_found(reference))?;
    let template = state.backend.template(name).await?;
    Ok(Template::new(&template, state.started))
}

async fn all(state: &ApiState) -> Result<Vec<Template>, ApiError> {
    let all = state.backend.templates().await?;
    Ok(all.iter().map(|template| Template::new(template, state.started)).collect())
}

/// Reads the query of a list of templates, which may say which team asks.
fn asked(caller: &Caller, query: Option<&str>) -> Result<Query, ApiError> {
    let query = Query::parse(query)?;
    if let Some(team) = query.one("teamID") {
        own_team(caller.0, team)?;
    }
    Ok(query)
}

#[utoipa::path(get, path = "/templates", tag = "e2b", params(
    ("teamID" = Option<String>, Query, description = "that of the key")), responses(
    (status = 200, description = "All that sandboxes can be made from, by name; they are the same for all teams",
     body = Vec<Template>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_templates_v1(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<Vec<Template>>, ApiError> {
    asked(&caller, query.as_deref())?;
    Ok(axum::Json(all(&state).await?))
}

/// Where a page ends: names are the order, so there is no time in it.
fn cursor(name: Reference) -> PageCursor<Reference> {
    PageCursor { created_at: Timestamp::from_millis(0), id: name }
}

#[utoipa::path(get, path = "/v2/templates", tag = "e2b", params(
    ("teamID" = Option<String>, Query, description = "that of the key"),
    ("limit" = Option<u32>, Query, description = "1 to 100 (default)"),
    ("nextToken" = Option<String>, Query, description = "x-next-token of the page before")), responses(
    (status = 200, description = "One page, by name", body = Vec<Template>,
     headers(("x-next-token" = String, description = "if there are more"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_templates_v2(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let query = asked(&caller, query.as_deref())?;
    let limit = usize::try_from(list::limit(&query)?).unwrap_or(usize::MAX);
    let after = query.one("nextToken").map(|token| page::decode(token, Order::Ascending)).transpose()?;
    let mut rows = all(&state).await?;
    if let Some(PageCursor { id, .. }) = after {
        let id: Reference = id;
        rows.retain(|row| row.template_id.as_str() > id.name());
    }
    let more = rows.len() > limit;
    rows.truncate(limit);
    let last = rows.last().filter(|_| more).and_then(|row| row.template_id.parse().ok());
    Ok(page::answer(&rows, last.map(cursor).as_ref(), Order::Ascending))
}

#[utoipa::path(get, path = "/default-templates", tag = "e2b", responses(
    (status = 200, description = "The same as `GET /templates`: all are the operator's", body = Vec<Template>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_default_templates(
    State(state): State<ApiState>,
    _: Caller,
) -> Result<axum::Json<Vec<Template>>, ApiError> {
    Ok(axum::Json(all(&state).await?))
}

#[utoipa::path(get, path = "/templates/{id}", tag = "e2b", params(("id" = String, Path, description = "its name")),
    responses(
    (status = 200, description = "The template", body = TemplateWithBuilds),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_template_with_builds(
    State(state): State<ApiState>,
    _: Caller,
    Meant(reference): Meant,
) -> Result<axum::Json<TemplateWithBuilds>, ApiError> {
    let template = known(&state, &reference).await?;
    let builds = [TemplateBuild::from(&template)];
    Ok(axum::Json(TemplateWithBuilds { template, builds }))
}

/// Says nothing that is not so: whoever wants a template for one team alone must not believe that it is.
fn publish(
    Template { names, .. }: Template,
    wanted: &Publish,
) -> Result<axum::Json<TemplateNames>, ApiError> {
    if wanted.public == Some(false) {
        let message = "not supported by this version of sandglass: templates are for all teams of the server, and can't \
                       be for one alone";
        return Err(Error::new(ErrorKind::Unsupported, message).into());
    }
    Ok(axum::Json(TemplateNames { names }))
}

#[utoipa::path(patch, path = "/templates/{id}", tag = "e2b", params(("id" = String, Path, description = "its name")),
    request_body = Publish, responses(
    (status = 200, description = "It is public, as it was", body = TemplateNames),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed, or it was to be private", body = ErrorBody)))]
async fn publish_template_v1(
    State(state): State<ApiState>,
    _: Caller,
    Meant(reference): Meant,
    Json(body): Json<Publish>,
) -> Result<axum::Json<TemplateNames>, ApiError> {
    publish(known(&state, &reference).await?, &body)
}

#[utoipa::path(patch, path = "/v2/templates/{id}", tag = "e2b",
    params(("id" = String, Path, description = "its name")), request_body = Publish, responses(
    (status = 200, description = "It is public, as it was", body = TemplateNames),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed, or it was to be private", body = ErrorBody)))]
async fn publish_template_v2(
    State(state): State<ApiState>,
    _: Caller,
    Meant(reference): Meant,
    Json(body): Json<Publish>,
) -> Result<axum::Json<TemplateNames>, ApiError> {
    publish(known(&state, &reference).await?, &body)
}

#[utoipa::path(get, path = "/templates/aliases/{alias}", tag = "e2b",
    params(("alias" = String, Path, description = "name of a template, or of a snapshot of the team")), responses(
    (status = 200, description = "`create` takes it", body = TemplateAlias),
    (status = "4XX", description = "Refused; 404 if there is none of that name", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn find_alias(
    State(state): State<ApiState>,
    caller: Caller,
    Meant(reference): Meant,
) -> Result<axum::Json<TemplateAlias>, ApiError> {
    if let Some(name) = reference.bare_name() {
        match state.backend.template(name).await {
            Ok(template) => {
                return Ok(axum::Json(TemplateAlias { template_id: template.name, public: true }));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    let row = state.backend.find_snapshot(caller.0, &reference).await?;
    Ok(axum::Json(TemplateAlias { template_id: row.id.to_string(), public: false }))
}

#[utoipa::path(get, path = "/templates/{id}/tags", tag = "e2b",
    params(("id" = String, Path, description = "its name")), responses(
    (status = 200, description = "The one that there is, `default`", body = Vec<TemplateTag>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_tags(
    State(state): State<ApiState>,
    _: Caller,
    Meant(reference): Meant,
) -> Result<axum::Json<[TemplateTag; 1]>, ApiError> {
    let Template { build_id, updated_at, .. } = known(&state, &reference).await?;
    Ok(axum::Json([TemplateTag { tag: DEFAULT_TAG, build_id, created_at: updated_at }]))
}
