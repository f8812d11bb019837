//! Connections: services that sandboxes may be let use with a credential that comes in here and never goes out.

use axum::extract::{FromRequestParts, Path, State};
use http::StatusCode;
use http::request::Parts;
use sandglass_broker::ConnectionName;
use sandglass_broker::connection::{Limits, Written, WrittenAttach};
use sandglass_control::KnownConnection;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::Caller;
use crate::body::{Json, Object};
use crate::e2b::secrets::Unread;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;

pub(super) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_connections)).routes(routes!(
        get_connection,
        put_connection,
        delete_connection
    ))
}

/// The connection that a path names.
#[derive(Debug)]
struct NamedConnection(ConnectionName);

impl<S: Send + Sync> FromRequestParts<S> for NamedConnection {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let none = || ApiError::new(StatusCode::NOT_FOUND, "no connection has this name");
        let text = Path::<String>::from_request_parts(parts, state).await.map_err(|_| none())?;
        text.parse().map(Self).map_err(|error| ApiError::invalid(format!("{error}")))
    }
}

/// What a connection may be used for at most.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct LimitsBody {
    /// Requests of one sandbox in a minute: 600 if absent.
    requests_per_minute: Option<u32>,
    /// Requests of one sandbox at one time: 16 if absent.
    concurrent: Option<u32>,
    /// Bytes of one request's body: 64 MiB if absent.
    body_bytes: Option<u64>,
}

/// The body of `PUT /v1/connections/{id}`.
#[derive(Deserialize, ToSchema)]
struct ConnectionBody {
    /// `https://HOST`, or with a port.
    target: String,
    /// Methods that may be used; 1 to 64, in capital letters.
    methods: Vec<String>,
    /// Beginnings of paths that may be asked for; 1 to 64, and `/` is all.
    paths: Vec<String>,
    /// How the credential is shown: `"bearer"`, `{"basic": {"user"}}`, `{"header": {"name", "prefix"}}` or `{"query": {"name"}}`.
    credential: Value,
    /// Whether requests may name a second resource, as copies and GraphQL do, which nobody looks at. `false` if absent.
    second_resource: Option<bool>,
    #[schema(value_type = Option<LimitsBody>)]
    limits: Option<Object<LimitsBody>>,
    /// The credential: 8 to 4096 bytes of printable ASCII. It is never told again. If absent it stays what it was, which it can't
    /// where the target changes.
    #[schema(value_type = Option<String>)]
    value: Option<Unread>,
}

impl ConnectionBody {
    fn written(&mut self, name: &ConnectionName) -> Result<Written, ApiError> {
        // Somebody may have put the credential itself here, so it is not repeated.
        let credential: WrittenAttach = serde_json::from_value(self.credential.take()).map_err(|_| {
            ApiError::invalid(
                "credential says how it is shown: \"bearer\", {\"basic\": {\"user\"}}, {\"header\": {\"name\"}} or \
                 {\"query\": {\"name\"}}; what it is belongs in value",
            )
        })?;
        let usual = Limits::default();
        let asked = self.limits.take().map(|Object(limits)| limits).unwrap_or_default();
        Ok(Written {
            name: name.to_string(),
            target: std::mem::take(&mut self.target),
            methods: std::mem::take(&mut self.methods),
            paths: std::mem::take(&mut self.paths),
            credential,
            second_resource: self.second_resource.unwrap_or_default(),
            limits: Limits {
                requests_per_minute: asked.requests_per_minute.unwrap_or(usual.requests_per_minute),
                concurrent: asked.concurrent.unwrap_or(usual.concurrent),
                body_bytes: asked.body_bytes.unwrap_or(usual.body_bytes),
            },
        })
    }
}

/// A connection without its credential.
#[derive(Debug, Serialize, ToSchema)]
struct ConnectionView {
    /// Sandboxes that were granted it reach it at `http://NAME.broker.internal`.
    name: String,
    /// `team`, or `operator` for one of the server's configuration, which is for all teams.
    by: &'static str,
    target: String,
    methods: Vec<String>,
    paths: Vec<String>,
    #[schema(value_type = Value)]
    credential: WrittenAttach,
    second_resource: bool,
    #[schema(value_type = Object)]
    limits: Limits,
    /// `null` for one of the operator's.
    #[schema(format = DateTime)]
    created_at: Option<String>,
    #[schema(format = DateTime)]
    updated_at: Option<String>,
}

impl From<KnownConnection> for ConnectionView {
    fn from(KnownConnection { written, of_team }: KnownConnection) -> Self {
        Self {
            name: written.name,
            by: if of_team.is_some() { "team" } else { "operator" },
            target: written.target,
            methods: written.methods,
            paths: written.paths,
            credential: written.credential,
            second_resource: written.second_resource,
            limits: written.limits,
            created_at: of_team.map(|(created, _)| created.to_string()),
            updated_at: of_team.map(|(_, updated)| updated.to_string()),
        }
    }
}

#[utoipa::path(get, path = "/v1/connections", tag = "native", responses(
    (status = 200, description = "All that sandboxes of the team may be granted, by their names", body = Vec<ConnectionView>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_connections(
    State(state): State<ApiState>,
    caller: Caller,
) -> Result<axum::Json<Vec<ConnectionView>>, ApiError> {
    let all = state.backend.connections(caller.0).await?;
    Ok(axum::Json(all.into_iter().map(Into::into).collect()))
}

#[utoipa::path(get, path = "/v1/connections/{id}", tag = "native",
    params(("id" = String, Path, description = "its name")), responses(
    (status = 200, description = "The connection", body = ConnectionView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_connection(
    State(state): State<ApiState>,
    caller: Caller,
    NamedConnection(name): NamedConnection,
) -> Result<axum::Json<ConnectionView>, ApiError> {
    Ok(axum::Json(state.backend.connection(caller.0, &name).await?.into()))
}

#[utoipa::path(put, path = "/v1/connections/{id}", tag = "native", request_body = ConnectionBody,
    params(("id" = String, Path, description = "its name: 1 to 63 small letters, digits, and hyphens between them")), responses(
    (status = 200, description = "It is so from now on, also for sandboxes that use it", body = ConnectionView),
    (status = 201, description = "It is new", body = ConnectionView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn put_connection(
    State(state): State<ApiState>,
    caller: Caller,
    NamedConnection(name): NamedConnection,
    Json(mut body): Json<ConnectionBody>,
) -> Result<(StatusCode, axum::Json<ConnectionView>), ApiError> {
    let written = body.written(&name)?;
    let credential = body.value.map(Unread::read).transpose()?;
    let (kept, new) = state.backend.put_connection(caller.0, written, credential.as_ref()).await?;
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, axum::Json(kept.into())))
}

#[utoipa::path(delete, path = "/v1/connections/{id}", tag = "native",
    params(("id" = String, Path, description = "its name")), responses(
    (status = 204, description = "It is gone, and sandboxes that used it can't any more"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn delete_connection(
    State(state): State<ApiState>,
    caller: Caller,
    NamedConnection(name): NamedConnection,
) -> Result<StatusCode, ApiError> {
    state.backend.delete_connection(caller.0, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}
