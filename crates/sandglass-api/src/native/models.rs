//! Models for ordinary sandboxes: a budget, a token, and what was spent.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use sandglass_control::{GrantRequest, GrantedModels, Purse};
use sandglass_models::Dialect;
use sandglass_store::{BudgetRow, CallRow};
use sandglass_types::{BudgetId, Clock as _, Micros, SystemClock};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::audit::Note;
use crate::auth::Caller;
use crate::body::Json;
use crate::e2b::routes::Named;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;

/// Most models that a request can name.
const MAX_MODELS: usize = 100;

/// How long a grant holds if the client does not say, in seconds.
const DEFAULT_SECONDS: u64 = 3600;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(grant)).routes(routes!(budget, close))
}

/// What a sandbox may spend, and on what.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewGrant {
    /// The most that it may spend, in micro-dollars. Its forks spend of the same.
    max_cost_micros: u64,
    /// Which models, by whatever they are called here; all if absent.
    #[serde(default)]
    models: Vec<String>,
    /// In which protocols: any of `messages`, `chat`, `responses` and `images`; in all if absent.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    dialects: Vec<Dialect>,
    /// How long the token is good; an hour if absent.
    timeout_seconds: Option<u64>,
}

/// What a program in the sandbox needs.
#[derive(Debug, Serialize, ToSchema)]
struct GrantView {
    #[schema(value_type = String)]
    budget: BudgetId,
    /// For clients of Anthropic's protocol; those of OpenAI's want `/v1` behind it.
    base_url: String,
    /// In place of a key. It is worth something in this sandbox and its forks alone, and is shown once.
    token: String,
    #[schema(format = DateTime)]
    expires_at: String,
}

/// A call of a model.
#[derive(Debug, Serialize, ToSchema)]
struct CallView {
    id: String,
    model: String,
    reserved_micros: u64,
    /// `null` while it is under way.
    charged_micros: Option<u64>,
    /// What the provider billed above what was set aside: the operator's, and not the budget's.
    overrun_micros: u64,
    /// Whether the provider did not say what was used.
    estimated: bool,
    /// Tokens by kind, as the provider told them.
    #[schema(value_type = Option<Object>)]
    usage: Option<serde_json::Value>,
    #[schema(format = DateTime)]
    asked_at: String,
    #[schema(format = DateTime)]
    settled_at: Option<String>,
}

/// A budget.
#[derive(Debug, Serialize, ToSchema)]
struct BudgetView {
    #[schema(value_type = String)]
    id: BudgetId,
    max_cost_micros: u64,
    /// Set aside for calls that are under way.
    reserved_micros: u64,
    charged_micros: u64,
    left_micros: u64,
    overrun_micros: u64,
    #[schema(format = DateTime)]
    created_at: String,
    /// From then on it pays for nothing.
    #[schema(format = DateTime)]
    closed_at: Option<String>,
    /// Oldest first.
    calls: Vec<CallView>,
}

impl From<CallRow> for CallView {
    fn from(row: CallRow) -> Self {
        Self {
            id: row.id.to_string(),
            model: row.model,
            reserved_micros: row.reserved.0,
            charged_micros: row.charged.map(|charged| charged.0),
            overrun_micros: row.overrun.0,
            estimated: row.estimated,
            usage: row.usage.and_then(|usage| serde_json::from_str(&usage).ok()),
            asked_at: row.asked_at.to_string(),
            settled_at: row.settled_at.map(|at| at.to_string()),
        }
    }
}

impl BudgetView {
    fn new(row: &BudgetRow, calls: Vec<CallRow>) -> Self {
        Self {
            id: row.id.clone(),
            max_cost_micros: row.most.0,
            reserved_micros: row.reserved.0,
            charged_micros: row.charged.0,
            left_micros: row.left().0,
            overrun_micros: row.overrun.0,
            created_at: row.created_at.to_string(),
            closed_at: row.closed_at.map(|at| at.to_string()),
            calls: calls.into_iter().map(Into::into).collect(),
        }
    }
}

fn budget_id(path: Result<Path<String>, PathRejection>) -> Result<BudgetId, ApiError> {
    let invalid = || ApiError::invalid("Invalid budget ID");
    let Path(id) = path.map_err(|_| invalid())?;
    id.parse().map_err(|_| invalid())
}

#[utoipa::path(post, path = "/v1/sandboxes/{id}/models", tag = "native", request_body = NewGrant,
    params(("id" = String, Path)), responses(
    (status = 201, description = "Programs in the sandbox may call models with this, for no more than that",
     body = GrantView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn grant(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    Json(body): Json<NewGrant>,
) -> Result<Response, ApiError> {
    if body.models.len() > MAX_MODELS || body.dialects.len() > Dialect::ALL.len() {
        return Err(ApiError::invalid(format!("at most {MAX_MODELS} models, and each protocol once")));
    }
    let seconds = body.timeout_seconds.unwrap_or(DEFAULT_SECONDS);
    let request = GrantRequest {
        purse: Purse::New(Micros(body.max_cost_micros)),
        models: body.models,
        dialects: body.dialects,
        expires: SystemClock.now().plus(std::time::Duration::from_secs(seconds)),
    };
    let granted = state.backend.grant_models(caller.0, &id, request).await?;
    let GrantedModels { budget, base_url, token, expires } = granted;
    let note = Note(format!("models for {} micro-dollars, budget {budget}", body.max_cost_micros));
    let view = GrantView { budget, base_url, token, expires_at: expires.to_string() };
    let mut response = (StatusCode::CREATED, axum::Json(view)).into_response();
    response.extensions_mut().insert(note);
    Ok(response)
}

#[utoipa::path(get, path = "/v1/budgets/{id}", tag = "native", params(("id" = String, Path)), responses(
    (status = 200, description = "What is left of it, and the calls that it paid for", body = BudgetView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn budget(
    State(state): State<ApiState>,
    caller: Caller,
    path: Result<Path<String>, PathRejection>,
) -> Result<axum::Json<BudgetView>, ApiError> {
    let (row, calls) = state.backend.budget(caller.0, &budget_id(path)?).await?;
    Ok(axum::Json(BudgetView::new(&row, calls)))
}

#[utoipa::path(delete, path = "/v1/budgets/{id}", tag = "native", params(("id" = String, Path)), responses(
    (status = 200, description = "It is closed: its tokens are worth nothing more, and calls that were under way are \
     charged as they were set aside", body = BudgetView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn close(
    State(state): State<ApiState>,
    caller: Caller,
    path: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let id = budget_id(path)?;
    state.backend.close_budget(caller.0, &id).await?;
    let (row, calls) = state.backend.budget(caller.0, &id).await?;
    let note = Note(format!("budget {id}: {} micro-dollars charged", row.charged.0));
    let mut response = axum::Json(BudgetView::new(&row, calls)).into_response();
    response.extensions_mut().insert(note);
    Ok(response)
}
