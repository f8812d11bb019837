//! Secrets of a team. Their values come in and never go out.

use std::collections::BTreeMap;

use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use http::request::Parts;
use sandglass_broker::Secret;
use sandglass_broker::secret::InvalidSecret;
use sandglass_store::{Order, SecretKey, SecretRow};
use sandglass_types::{ErrorKind, SecretId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::list;
use super::wire::rfc3339;
use crate::audit::Made;
use crate::auth::Caller;
use crate::body::Json;
use crate::error::{ApiError, ErrorBody};
use crate::page;
use crate::query::Query;
use crate::router::ApiState;

/// By what programs know that a team has as many as it may have.
const LIMIT: &str = "secret_limit_reached";

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_secrets, create_secret)).routes(routes!(
        get_secret,
        update_secret,
        delete_secret
    ))
}

/// The secret that a path names: by its id, or by its name.
#[derive(Debug)]
struct Meant(SecretKey);

impl<S: Send + Sync> FromRequestParts<S> for Meant {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let none = || ApiError::new(StatusCode::NOT_FOUND, "secret not found");
        let text = Path::<String>::from_request_parts(parts, state).await.map_err(|_| none())?;
        let id = text.parse().map(SecretKey::Id);
        id.or_else(|_| text.parse().map(SecretKey::Name)).map(Self).map_err(|_| none())
    }
}

/// A value as it comes in, whatever it is: what is wrong with it is never said in words that have it in them.
#[derive(Deserialize)]
pub(crate) struct Unread(Value);

impl Unread {
    /// Reads it.
    ///
    /// # Errors
    /// 400 that does not repeat it.
    pub(crate) fn read(self) -> Result<Secret, ApiError> {
        let text = if let Value::String(text) = self.0 { text } else { String::new() };
        text.parse().map_err(|error: InvalidSecret| ApiError::invalid(format!("value: {error}")))
    }
}

/// The body of `POST /secrets`.
#[derive(Deserialize, ToSchema)]
struct NewSecret {
    /// What placeholders name: 1 to 256 bytes without braces and control characters.
    name: String,
    /// 8 to 4096 bytes of printable ASCII. It is never told again.
    #[schema(value_type = String)]
    value: Unread,
    metadata: Option<BTreeMap<String, String>>,
}

/// The body of `POST /secrets/{id}`.
#[derive(Deserialize, ToSchema)]
struct SecretUpdate {
    /// 8 to 4096 bytes of printable ASCII. It is never told again.
    #[schema(value_type = String)]
    value: Unread,
    /// In place of what there is; if absent, that stays.
    metadata: Option<BTreeMap<String, String>>,
}

/// A secret without its value.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Secret)]
struct SecretInfo {
    #[serde(rename = "secretID")]
    #[schema(value_type = String, format = "uuid")]
    secret_id: SecretId,
    name: String,
    /// Counts its values, from 1.
    current_version: u32,
    metadata: BTreeMap<String, String>,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    updated_at: Timestamp,
}

impl From<SecretRow> for SecretInfo {
    fn from(row: SecretRow) -> Self {
        Self {
            secret_id: row.id,
            name: row.name.to_string(),
            current_version: row.version,
            metadata: row.metadata,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

#[utoipa::path(get, path = "/secrets", tag = "e2b", params(
    ("limit" = Option<u32>, Query, description = "1 to 100 (default)"),
    ("nextToken" = Option<String>, Query, description = "x-next-token of the page before")), responses(
    (status = 200, description = "One page of the team's secrets, newest first", body = Vec<SecretInfo>,
     headers(("x-next-token" = String, description = "if there are more"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_secrets(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let after = query.one("nextToken").map(|token| page::decode(token, Order::Descending)).transpose()?;
    let page = state.backend.secrets(caller.0, after, list::limit(&query)?).await?;
    let rows: Vec<SecretInfo> = page.rows.into_iter().map(Into::into).collect();
    Ok(page::answer(&rows, page.next.as_ref(), Order::Descending))
}

#[utoipa::path(post, path = "/secrets", tag = "e2b", request_body = NewSecret, responses(
    (status = 201, description = "It is kept, sealed", body = SecretInfo),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn create_secret(
    State(state): State<ApiState>,
    caller: Caller,
    Json(body): Json<NewSecret>,
) -> Result<Response, ApiError> {
    let name = body.name.parse().map_err(|error| ApiError::invalid(format!("name: {error}")))?;
    let value = body.value.read()?;
    let created =
        state.backend.create_secret(caller.0, name, &value, body.metadata.unwrap_or_default()).await;
    let row = created.map_err(|error| match error.kind() {
        ErrorKind::Quota => ApiError::from(error).known_as(LIMIT),
        _ => error.into(),
    })?;
    let made = Made::secret(row.id);
    let mut response = (StatusCode::CREATED, axum::Json(SecretInfo::from(row))).into_response();
    response.extensions_mut().insert(made);
    Ok(response)
}

#[utoipa::path(get, path = "/secrets/{id}", tag = "e2b",
    params(("id" = String, Path, description = "id or name, URL-encoded")), responses(
    (status = 200, description = "The secret, without its value", body = SecretInfo),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_secret(
    State(state): State<ApiState>,
    caller: Caller,
    Meant(key): Meant,
) -> Result<axum::Json<SecretInfo>, ApiError> {
    Ok(axum::Json(state.backend.secret(caller.0, &key).await?.into()))
}

#[utoipa::path(post, path = "/secrets/{id}", tag = "e2b", request_body = SecretUpdate,
    params(("id" = String, Path, description = "id or name, URL-encoded")), responses(
    (status = 200, description = "It has this value from now on", body = SecretInfo),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn update_secret(
    State(state): State<ApiState>,
    caller: Caller,
    Meant(key): Meant,
    Json(body): Json<SecretUpdate>,
) -> Result<axum::Json<SecretInfo>, ApiError> {
    let value = body.value.read()?;
    Ok(axum::Json(state.backend.update_secret(caller.0, &key, &value, body.metadata).await?.into()))
}

#[utoipa::path(delete, path = "/secrets/{id}", tag = "e2b",
    params(("id" = String, Path, description = "id or name, URL-encoded")), responses(
    (status = 204, description = "It is gone"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn delete_secret(
    State(state): State<ApiState>,
    caller: Caller,
    Meant(key): Meant,
) -> Result<StatusCode, ApiError> {
    state.backend.delete_secret(caller.0, &key).await?;
    Ok(StatusCode::NO_CONTENT)
}
