//! What a sandbox reached, and what it could.

use std::net::IpAddr;

use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use http::HeaderValue;
use http::header::CONTENT_TYPE;
use sandglass_egress::policy::{Connection, Effective, Question, Seen, Transport, Verdict, decide};
use sandglass_types::net::{Hostname, Port};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::Caller;
use crate::e2b::routes::Named;
use crate::error::{ApiError, ErrorBody};
use crate::query::Query;
use crate::router::ApiState;

/// Receipts of an answer if the client does not say how many, and the most.
const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1000;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(receipts)).routes(routes!(explain))
}

#[utoipa::path(get, path = "/v1/sandboxes/{id}/egress", tag = "native", params(("id" = String, Path),
    ("limit" = Option<u32>, Query, description = "1 to 1000; 100 if absent")), responses(
    (status = 200, description = "The last receipts, newest last, each byte for byte as it was chained",
     body = Vec<Object>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn receipts(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let limit = query.one("limit").map_or(Ok(DEFAULT_LIMIT), str::parse);
    let limit = limit.ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
    let limit = limit.ok_or_else(|| ApiError::invalid(format!("limit must be 1 to {MAX_LIMIT}")))?;
    let lines = state.backend.receipts(caller.0, &id, limit).await?;
    // Read and written anew, a line would not be what its digest is of.
    let json = HeaderValue::from_static("application/json");
    Ok(([(CONTENT_TYPE, json)], format!("[{}]", lines.join(",\n"))).into_response())
}

/// What would become of a connection.
#[derive(Debug, Serialize, ToSchema)]
struct Explanation {
    host: String,
    port: u16,
    allowed: bool,
    /// What decides: the rules, or the default of the list that lacks one.
    rule: String,
    /// Why it is denied.
    reason: Option<String>,
    /// What would allow it; empty if nothing would.
    remedy: Option<String>,
}

#[utoipa::path(get, path = "/v1/sandboxes/{id}/egress/explain", tag = "native", params(("id" = String, Path),
    ("host" = String, Query, description = "a host name or an address"),
    ("port" = Option<u16>, Query, description = "443 if absent")), responses(
    (status = 200, description = "Whether it would be allowed, by which rule, or what would allow it",
     body = Explanation),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn explain(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<Explanation>, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let host = query.one("host").ok_or_else(|| ApiError::invalid("host is missing"))?;
    let port = query.one("port").map_or(Ok(Port::HTTPS), str::parse);
    let port = port.map_err(|error| ApiError::invalid(format!("port: {error}")))?;
    let row = state.backend.record(caller.0, &id).await?;
    let (policy, _) = state.backend.effective(&row)?;
    let verdict = verdict(&policy, host, port)?;
    let (reason, remedy) = match &verdict {
        Verdict::Allow(_) => (None, None),
        Verdict::Deny(denial) => (Some(denial.cause.to_string()), Some(denial.remedy.clone())),
    };
    Ok(axum::Json(Explanation {
        host: host.to_owned(),
        port: port.get(),
        allowed: verdict.is_allowed(),
        rule: verdict.rule(),
        reason,
        remedy,
    }))
}

fn verdict(policy: &Effective, host: &str, port: Port) -> Result<Verdict, ApiError> {
    if let Ok(address) = host.parse::<IpAddr>() {
        let transport = Transport::Tcp;
        let connection = Connection { transport, address, port, bound: &[], seen: Seen::Nothing };
        return Ok(decide(policy, Question::Connect(connection)));
    }
    let name: Hostname = host.parse().map_err(|error| ApiError::invalid(format!("host: {error}")))?;
    Ok(decide(policy, Question::Reach { name: &name, port }))
}
