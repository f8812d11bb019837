//! Snapshots and forks.

use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use http::request::Parts;
use sandglass_control::{ListSnapshots, MAX_CHILDREN};
use sandglass_store::{Order, SnapshotRow};
use sandglass_types::Reference;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::create::positive_seconds;
use super::list;
use super::routes::{Named, sandbox_id};
use super::wire::Sandbox;
use crate::audit::{Made, Note};
use crate::auth::Caller;
use crate::body::{OptionalJson, Seconds};
use crate::error::{ApiError, ErrorBody};
use crate::page;
use crate::query::Query;
use crate::router::ApiState;

/// How long a copy lives if the client does not say, in seconds.
const DEFAULT_FORK: Seconds = Seconds(15);

/// By what programs know that snapshots have memory.
const ONLY_FULL: &str = "snapshot_filesystem_only_disabled";

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(create_snapshot))
        .routes(routes!(list_snapshots))
        .routes(routes!(delete_by_reference))
        .routes(routes!(fork))
}

/// A snapshot as clients know it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SnapshotInfo {
    /// What makes sandboxes of it as `templateID`, and deletes it: it stays when the name has gone over to a newer one.
    #[serde(rename = "snapshotID")]
    id: String,
    /// Its whole name, `namespace/name:tag`, if it has one.
    names: Vec<String>,
}

impl From<&SnapshotRow> for SnapshotInfo {
    fn from(row: &SnapshotRow) -> Self {
        Self { id: format!("{}:default", row.id), names: row.full_name().into_iter().collect() }
    }
}

/// The snapshot that a path names.
#[derive(Debug)]
pub(crate) struct Meant(pub(crate) Reference);

impl<S: Send + Sync> FromRequestParts<S> for Meant {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let bad = || ApiError::invalid("Invalid template ID");
        let text = Path::<String>::from_request_parts(parts, state).await.map_err(|_| bad())?;
        text.parse().map(Self).map_err(|_| bad())
    }
}

fn reference(field: &str, text: &str) -> Result<Reference, ApiError> {
    text.parse().map_err(|error| ApiError::invalid(format!("invalid {field}: {error}")))
}

/// The body of `POST /sandboxes/{id}/snapshots`.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct NewSnapshot {
    /// `name` or `name:tag`. A snapshot that has it already keeps only its id.
    name: Option<String>,
    /// Whether its memory is in it, which is so if absent. Without it is not built yet.
    memory: Option<bool>,
}

#[utoipa::path(post, path = "/sandboxes/{id}/snapshots", tag = "e2b", params(("id" = String, Path)),
    request_body = NewSnapshot, responses(
    (status = 201, description = "Memory, processes and files are in the snapshot; the sandbox runs on", body = SnapshotInfo),
    (status = "4XX", description = "Refused; the sandbox is as it was", body = ErrorBody),
    (status = "5XX", description = "Failed; the sandbox is as it was", body = ErrorBody)))]
async fn create_snapshot(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    OptionalJson(body): OptionalJson<NewSnapshot>,
) -> Result<(StatusCode, axum::Json<SnapshotInfo>), ApiError> {
    if body.memory == Some(false) {
        let message = "snapshots without memory are not supported by this version: leave 'memory' out";
        return Err(ApiError::invalid(message).known_as(ONLY_FULL));
    }
    let name = body.name.as_deref().map(|name| reference("name", name)).transpose()?;
    let row = state.backend.snapshot(caller.0, &id, name.as_ref()).await?;
    Ok((StatusCode::CREATED, axum::Json(SnapshotInfo::from(&row))))
}

/// Reads the query of a list of snapshots.
///
/// # Errors
/// 400 that names the parameter.
pub(crate) fn wanted(query: &Query) -> Result<ListSnapshots, ApiError> {
    Ok(ListSnapshots {
        source: query.one("sandboxID").map(sandbox_id).transpose()?,
        name: query.one("name").map(|name| reference("name", name)).transpose()?,
        after: query.one("nextToken").map(|token| page::decode(token, Order::Descending)).transpose()?,
        limit: list::limit(query)?,
    })
}

#[utoipa::path(get, path = "/snapshots", tag = "e2b", params(
    ("sandboxID" = Option<String>, Query, description = "of this sandbox"),
    ("name" = Option<String>, Query, description = "name or id; all of its tags, if it has none"),
    ("limit" = Option<u32>, Query, description = "1 to 100 (default)"),
    ("nextToken" = Option<String>, Query, description = "x-next-token of the page before")), responses(
    (status = 200, description = "One page, newest first", body = Vec<SnapshotInfo>,
     headers(("x-next-token" = String, description = "if there are more"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_snapshots(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let wanted = wanted(&Query::parse(query.as_deref())?)?;
    let page = state.backend.snapshots(caller.0, wanted).await?;
    let rows: Vec<SnapshotInfo> = page.rows.iter().map(Into::into).collect();
    Ok(page::answer(&rows, page.next.as_ref(), Order::Descending))
}

#[utoipa::path(delete, path = "/templates/{id}", tag = "e2b",
    params(("id" = String, Path, description = "id or name of a snapshot, URL-encoded")), responses(
    (status = 204, description = "It is gone; sandboxes that were made from it have all that they need"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn delete_by_reference(
    State(state): State<ApiState>,
    caller: Caller,
    Meant(reference): Meant,
) -> Result<StatusCode, ApiError> {
    state.backend.delete_snapshot(caller.0, &reference).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The body of `POST /sandboxes/{id}/fork`.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct Fork {
    /// Seconds that each copy lives from when it runs; 15 if absent.
    #[schema(value_type = Option<i64>)]
    timeout: Option<Seconds>,
    /// How many, 1 to 100; 1 if absent.
    count: Option<i64>,
}

/// One copy, or why there is none.
#[derive(Debug, Serialize, ToSchema)]
struct ForkResult {
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<Sandbox>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorBody>,
}

#[utoipa::path(post, path = "/sandboxes/{id}/fork", tag = "e2b", params(("id" = String, Path)),
    request_body = Fork, responses(
    (status = 201, description = "Each copy goes on from where the sandbox was, with an id and tokens of its own; the \
     sandbox runs on", body = Vec<ForkResult>),
    (status = "4XX", description = "Refused; the sandbox is as it was, and there is no copy", body = ErrorBody),
    (status = "5XX", description = "Failed; the sandbox is as it was, and there is no copy", body = ErrorBody)))]
async fn fork(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    OptionalJson(body): OptionalJson<Fork>,
) -> Result<Response, ApiError> {
    let lives = positive_seconds(body.timeout.unwrap_or(DEFAULT_FORK))?;
    let count =
        usize::try_from(body.count.unwrap_or(1)).ok().filter(|count| (1..=MAX_CHILDREN).contains(count));
    let count = count.ok_or_else(|| ApiError::invalid(format!("count must be 1 to {MAX_CHILDREN}")))?;
    let made = state.backend.fork(caller.0, &id, count, lives).await?;
    let domain = state.backend.domain();
    let copies = Made::sandboxes(made.iter().flatten().map(|row| &row.id));
    let result = |outcome| match outcome {
        Ok(row) => ForkResult { sandbox: Some(Sandbox::new(row, domain)), error: None },
        Err(error) => ForkResult { sandbox: None, error: Some(ApiError::from(error).into_body()) },
    };
    let results: Vec<_> = made.into_iter().map(result).collect();
    let mut response = (StatusCode::CREATED, axum::Json(results)).into_response();
    response.extensions_mut().insert(copies);
    response.extensions_mut().insert(Note(format!("copied from {id}")));
    Ok(response)
}
