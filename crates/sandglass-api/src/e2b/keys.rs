//! The keys of a key's own team.

use axum::extract::{FromRequestParts, Path, State};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use http::request::Parts;
use sandglass_control::{KEY_PREFIX, KEY_VALUE_LEN};
use sandglass_store::ApiKey;
use sandglass_types::{KeyId, Name, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::wire::rfc3339;
use crate::audit::Made;
use crate::auth::{Caller, Holder};
use crate::body::Json;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_keys, create_key)).routes(routes!(rename_key, delete_key))
}

/// The key that a path names.
#[derive(Debug)]
struct OfKey(KeyId);

impl<S: Send + Sync> FromRequestParts<S> for OfKey {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let bad = || ApiError::invalid("Invalid API key ID");
        let text = Path::<String>::from_request_parts(parts, state).await.map_err(|_| bad())?;
        text.parse().map(Self).map_err(|_| bad())
    }
}

/// What is shown of a secret.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Mask {
    /// What all keys begin with.
    prefix: &'static str,
    /// Characters after that.
    value_length: usize,
    /// Always empty: of a secret no more is kept than the end.
    masked_value_prefix: &'static str,
    /// The last characters.
    masked_value_suffix: String,
}

/// Who made a key.
#[derive(Debug, Serialize, ToSchema)]
struct MadeBy {
    /// The id of a key, which may have ended since.
    #[schema(format = "uuid")]
    id: String,
    /// Always `null`: keys have no address.
    email: Option<String>,
}

/// A key without its secret.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TeamApiKey {
    #[schema(format = "uuid")]
    id: String,
    name: String,
    mask: Mask,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    /// `null` for one that was made on the server's machine.
    created_by: Option<MadeBy>,
    /// Told within a minute; `null` if it never was used.
    #[schema(format = DateTime)]
    last_used: Option<String>,
}

impl From<ApiKey> for TeamApiKey {
    fn from(key: ApiKey) -> Self {
        Self {
            id: key.id.to_string(),
            name: key.name,
            mask: Mask {
                prefix: KEY_PREFIX,
                value_length: KEY_VALUE_LEN,
                masked_value_prefix: "",
                masked_value_suffix: key.suffix,
            },
            created_at: key.created_at,
            created_by: key.made_by.map(|key| MadeBy { id: key.to_string(), email: None }),
            last_used: key.last_used_at.map(|at| at.to_string()),
        }
    }
}

/// A new key, with its secret.
#[derive(Serialize, ToSchema)]
struct CreatedTeamApiKey {
    #[serde(flatten)]
    shown: TeamApiKey,
    /// The secret, this one time.
    key: String,
}

/// The body of `POST /api-keys` and `PATCH /api-keys/{id}`.
#[derive(Debug, Deserialize, ToSchema)]
struct NamedKey {
    /// 1 to 64 bytes, without control characters.
    name: String,
}

impl NamedKey {
    fn name(&self) -> Result<Name, ApiError> {
        self.name.parse().map_err(|error| ApiError::invalid(format!("invalid name: {error}")))
    }
}

#[utoipa::path(get, path = "/api-keys", tag = "e2b", responses(
    (status = 200, description = "The keys of the team that work, oldest first", body = Vec<TeamApiKey>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_keys(
    State(state): State<ApiState>,
    caller: Caller,
) -> Result<axum::Json<Vec<TeamApiKey>>, ApiError> {
    let keys = state.backend.keys(caller.0).await?;
    Ok(axum::Json(keys.into_iter().map(Into::into).collect()))
}

#[utoipa::path(post, path = "/api-keys", tag = "e2b", request_body = NamedKey, responses(
    (status = 201, description = "A key of the same team, which is no operator's whoever makes it", body = CreatedTeamApiKey),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn create_key(
    State(state): State<ApiState>,
    Holder(by): Holder,
    Json(body): Json<NamedKey>,
) -> Result<Response, ApiError> {
    let new = state.backend.create_key(&by, body.name()?).await?;
    let made = Made::key(new.key.id);
    let created = CreatedTeamApiKey { shown: new.key.into(), key: new.secret };
    let mut response = (StatusCode::CREATED, axum::Json(created)).into_response();
    response.extensions_mut().insert(made);
    Ok(response)
}

#[utoipa::path(patch, path = "/api-keys/{id}", tag = "e2b", params(("id" = String, Path)), request_body = NamedKey,
    responses(
    (status = 200, description = "It has this name from now on", body = TeamApiKey),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn rename_key(
    State(state): State<ApiState>,
    Holder(by): Holder,
    OfKey(id): OfKey,
    Json(body): Json<NamedKey>,
) -> Result<axum::Json<TeamApiKey>, ApiError> {
    let renamed = state.backend.rename_key(&by, id, &body.name()?).await?;
    Ok(axum::Json(renamed.into()))
}

#[utoipa::path(delete, path = "/api-keys/{id}", tag = "e2b", params(("id" = String, Path)), responses(
    (status = 204, description = "It is refused from now on; what it made works on"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn delete_key(
    State(state): State<ApiState>,
    Holder(by): Holder,
    OfKey(id): OfKey,
) -> Result<StatusCode, ApiError> {
    state.backend.end_key(&by, id).await?;
    Ok(StatusCode::NO_CONTENT)
}
