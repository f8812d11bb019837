//! Runs: one job of an agent each, from a prompt to files.

mod artifacts;
mod events;
mod wire;

use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sandglass_store::{Order, RunFilter};
use sandglass_types::{Digest, RunId, RunStatus};
use sha2::{Digest as _, Sha256};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::wire::{CreateRun, NextTurn, RunDetailView, RunView};
use crate::audit::Note;
use crate::auth::Caller;
use crate::body::{Json, Verbatim};
use crate::e2b::routes::idempotency_key;
use crate::error::{ApiError, ErrorBody};
use crate::page;
use crate::query::Query;
use crate::router::ApiState;

/// Says that the same request came before.
pub(crate) const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

pub(super) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(create_run, list_runs))
        .routes(routes!(get_run))
        .routes(routes!(cancel_run))
        .routes(routes!(next_turn))
        .routes(routes!(events::run_events))
        .routes(routes!(artifacts::list_artifacts))
        .routes(routes!(artifacts::get_artifact))
}

/// The run that a path names. What can't be one is one that is not there.
#[derive(Debug)]
struct OfRun(RunId);

fn run_id(text: &str) -> Result<RunId, ApiError> {
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(64).collect();
        ApiError::new(StatusCode::NOT_FOUND, format!("run '{shown}' not found"))
    })
}

impl<S: Send + Sync> FromRequestParts<S> for OfRun {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let invalid = |_| ApiError::invalid("invalid id of a run");
        let Path(text) = Path::<String>::from_request_parts(parts, state).await.map_err(invalid)?;
        run_id(&text).map(Self)
    }
}

#[utoipa::path(post, path = "/v1/runs", tag = "native", request_body = CreateRun,
    params(("Idempotency-Key" = Option<String>, Header, description = "the same request under the same key makes one run")), responses(
    (status = 202, description = "It is stored, and goes on by itself", body = RunView,
     headers(("idempotent-replayed" = String, description = "`true` if the same request had made it before"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn create_run(
    State(state): State<ApiState>,
    caller: Caller,
    headers: HeaderMap,
    Verbatim(body, bytes): Verbatim<CreateRun>,
) -> Result<Response, ApiError> {
    let key = idempotency_key(&headers)?;
    let idempotency = key.map(|key| (key, Digest::from_bytes(Sha256::digest(canonical(&bytes)).into())));
    let (row, replayed) = state.backend.create_run(caller.0, body.accept(idempotency)?).await?;
    let note = Note(row.id.to_string());
    let mut response = (StatusCode::ACCEPTED, axum::Json(RunView::from(row))).into_response();
    if replayed {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    }
    response.extensions_mut().insert(note);
    Ok(response)
}

/// A body as every client would have written it: members in one order, without blanks.
fn canonical(body: &[u8]) -> Vec<u8> {
    let value: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    value.and_then(|value| serde_json::to_vec(&value).ok()).unwrap_or_default()
}

#[utoipa::path(get, path = "/v1/runs", tag = "native", params(
    ("status" = Option<String>, Query, description = "some of the statuses, joined by commas; all if absent"),
    ("limit" = Option<u32>, Query, description = "1 to 100 (default)"),
    ("nextToken" = Option<String>, Query, description = "x-next-token of the page before")), responses(
    (status = 200, description = "One page, newest first", body = Vec<RunView>,
     headers(("x-next-token" = String, description = "if there are more"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_runs(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let status = |text| {
        RunStatus::of(text)
            .ok_or_else(|| ApiError::invalid(format!("status must be those of runs, not {text:?}")))
    };
    let limit = query.number("limit", "1 to 100")?.unwrap_or(100);
    let filter = RunFilter {
        team: caller.0,
        statuses: query.many("status").map(status).collect::<Result<_, _>>()?,
        after: query.one("nextToken").map(|token| page::decode(token, Order::Descending)).transpose()?,
        limit: u32::try_from(limit)
            .ok()
            .filter(|limit| (1..=100).contains(limit))
            .ok_or_else(|| ApiError::invalid("limit must be 1 to 100"))?,
    };
    let page = state.backend.runs(filter).await?;
    let rows: Vec<RunView> = page.rows.into_iter().map(Into::into).collect();
    Ok(page::answer(&rows, page.next.as_ref(), Order::Descending))
}

#[utoipa::path(get, path = "/v1/runs/{id}", tag = "native", params(("id" = String, Path)), responses(
    (status = 200, description = "The run, with its money", body = RunDetailView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_run(
    State(state): State<ApiState>,
    caller: Caller,
    OfRun(id): OfRun,
) -> Result<axum::Json<RunDetailView>, ApiError> {
    Ok(axum::Json(state.backend.run(caller.0, &id).await?.into()))
}

#[utoipa::path(post, path = "/v1/runs/{id}/cancel", tag = "native", params(("id" = String, Path)), responses(
    (status = 200, description = "It had ended, and is as it was", body = RunView),
    (status = 202, description = "It ends soon; its agent has 5 seconds to do so by itself", body = RunView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn cancel_run(
    State(state): State<ApiState>,
    caller: Caller,
    OfRun(id): OfRun,
) -> Result<Response, ApiError> {
    let row = state.backend.cancel_run(caller.0, &id).await?;
    let status = if row.status.is_terminal() { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, axum::Json(RunView::from(row))).into_response())
}

#[utoipa::path(post, path = "/v1/runs/{id}/turns", tag = "native", params(("id" = String, Path)), request_body = NextTurn, responses(
    (status = 202, description = "The turn begins", body = RunView),
    (status = "4XX", description = "Refused; 409 if the run does not wait for a turn", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn next_turn(
    State(state): State<ApiState>,
    caller: Caller,
    OfRun(id): OfRun,
    Json(body): Json<NextTurn>,
) -> Result<Response, ApiError> {
    let row = state.backend.next_turn(caller.0, &id, body.accept()?).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(RunView::from(row))).into_response())
}
