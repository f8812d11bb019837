//! How the ports of a sandbox are reached.

use std::num::NonZeroU16;

use axum::extract::{Path, State};
use sandglass_control::TrafficToken;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::Caller;
use crate::e2b::routes::sandbox_id;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(port))
}

/// The way to one port.
#[derive(Debug, Serialize, ToSchema)]
struct PortView {
    #[schema(value_type = u16)]
    port: NonZeroU16,
    /// Under which it is reached, if the server has a domain. The headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port` work
    /// always.
    host: Option<String>,
    /// Whether everybody may.
    public: bool,
    /// What else to send, as `e2b-traffic-access-token`: it opens this port and no other, and can be given away.
    traffic_access_token: Option<String>,
}

#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports/{port}", tag = "native",
    params(("id" = String, Path), ("port" = u16, Path)), responses(
    (status = 200, description = "How to reach it, whether something listens or not", body = PortView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn port(
    State(state): State<ApiState>,
    caller: Caller,
    path: Result<Path<(String, String)>, axum::extract::rejection::PathRejection>,
) -> Result<axum::Json<PortView>, ApiError> {
    let Path((id, port)) = path.map_err(|_| ApiError::invalid("Invalid sandbox ID"))?;
    let id = sandbox_id(&id)?;
    let port: NonZeroU16 =
        port.parse().map_err(|_| ApiError::invalid("a port is a number from 1 to 65535"))?;
    let row = state.backend.sandbox(caller.0, &id).await?;
    Ok(axum::Json(PortView {
        port,
        host: state.backend.domain().map(|domain| format!("{port}-{id}.{domain}")),
        public: row.traffic_token.is_none(),
        traffic_access_token: row.traffic_token.map(|token| TrafficToken::new(token).for_port(port)),
    }))
}
