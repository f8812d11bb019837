//! Volumes: made, listed and deleted.

use axum::extract::{FromRequestParts, Path, State};
use http::StatusCode;
use http::request::Parts;
use sandglass_store::VolumeRow;
use sandglass_types::volume::{MAX_VOLUME_MIB, MIN_VOLUME_MIB};
use sandglass_types::{VolumeId, VolumeName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::Caller;
use crate::body::Json;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(create_volume, list_volumes))
        .routes(routes!(get_volume, delete_volume))
}

/// The volume that a path names.
#[derive(Debug)]
pub(crate) struct NamedVolume(pub(crate) VolumeId);

impl<S: Send + Sync> FromRequestParts<S> for NamedVolume {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let none = || ApiError::new(StatusCode::NOT_FOUND, "no volume has this id");
        // What can't be decoded is refused here, or it would be in words of the framework's.
        let text = Path::<String>::from_request_parts(parts, state).await.map_err(|_| none())?;
        text.parse().map(Self).map_err(|_| none())
    }
}

/// The body of `POST /volumes`.
#[derive(Debug, Deserialize, ToSchema)]
struct NewVolume {
    /// 1 to 128 of a-z, A-Z, 0-9, `-` and `_`; no other volume of the team has it.
    name: String,
    /// Its size in MiB: all that can be on it. The operator's default if absent. E2B has no such field.
    #[serde(rename = "sizeMB")]
    #[schema(value_type = Option<i64>)]
    size_mb: Option<i64>,
}

/// A volume in a list.
#[derive(Debug, Serialize, ToSchema)]
struct ListedVolume {
    #[serde(rename = "volumeID")]
    #[schema(value_type = String)]
    volume_id: VolumeId,
    #[schema(value_type = String)]
    name: VolumeName,
    /// Its size in MiB.
    #[serde(rename = "sizeMB")]
    size_mb: u32,
}

/// A volume, and what its content is reached with.
#[derive(Debug, Serialize, ToSchema)]
struct Volume {
    #[serde(flatten)]
    listed: ListedVolume,
    /// What the content API wants as a bearer token. It is worth the content of this volume and nothing else.
    token: String,
    /// Under which the content API has the host name `api.`.
    #[serde(skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
}

impl From<VolumeRow> for ListedVolume {
    fn from(row: VolumeRow) -> Self {
        Self { volume_id: row.id, name: row.name, size_mb: row.size_mib }
    }
}

impl Volume {
    fn new(row: VolumeRow, domain: Option<&str>) -> Self {
        Self { token: row.token.clone(), domain: domain.map(str::to_owned), listed: row.into() }
    }
}

#[utoipa::path(post, path = "/volumes", tag = "e2b", request_body = NewVolume, responses(
    (status = 201, description = "It is there, and empty", body = Volume),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn create_volume(
    State(state): State<ApiState>,
    caller: Caller,
    Json(body): Json<NewVolume>,
) -> Result<(StatusCode, axum::Json<Volume>), ApiError> {
    let name = body.name.parse().map_err(|error| ApiError::invalid(format!("name: {error}")))?;
    let out_of_range = |_| ApiError::invalid(format!("sizeMB must be {MIN_VOLUME_MIB} to {MAX_VOLUME_MIB}"));
    let size = body.size_mb.map(u32::try_from).transpose().map_err(out_of_range)?;
    let row = state.backend.create_volume(caller.0, name, size).await?;
    Ok((StatusCode::CREATED, axum::Json(Volume::new(row, state.backend.domain()))))
}

#[utoipa::path(get, path = "/volumes", tag = "e2b", responses(
    (status = 200, description = "All volumes of the team, oldest first", body = Vec<ListedVolume>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_volumes(
    State(state): State<ApiState>,
    caller: Caller,
) -> Result<axum::Json<Vec<ListedVolume>>, ApiError> {
    let rows = state.backend.volumes(caller.0).await?;
    Ok(axum::Json(rows.into_iter().map(Into::into).collect()))
}

#[utoipa::path(get, path = "/volumes/{id}", tag = "e2b", params(("id" = String, Path)), responses(
    (status = 200, description = "The volume", body = Volume),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_volume(
    State(state): State<ApiState>,
    caller: Caller,
    NamedVolume(id): NamedVolume,
) -> Result<axum::Json<Volume>, ApiError> {
    let row = state.backend.volume(caller.0, &id).await?;
    Ok(axum::Json(Volume::new(row, state.backend.domain())))
}

#[utoipa::path(delete, path = "/volumes/{id}", tag = "e2b", params(("id" = String, Path)), responses(
    (status = 204, description = "It is gone, and so is all that was on it"),
    (status = "4XX", description = "Refused: a sandbox or a snapshot has it", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn delete_volume(
    State(state): State<ApiState>,
    caller: Caller,
    NamedVolume(id): NamedVolume,
) -> Result<StatusCode, ApiError> {
    state.backend.delete_volume(caller.0, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
