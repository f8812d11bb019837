//! One sandbox for each of an application's users.

use axum::extract::{FromRequestParts, Path, State};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use http::request::Parts;
use sandglass_control::CameBy;
use sandglass_store::Assignment;
use sandglass_types::{SandboxId, SandboxState, UserName};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::SandboxView;
use crate::audit::{Made, Note};
use crate::auth::Caller;
use crate::body::Json;
use crate::e2b::create::{Face, NewSandbox};
use crate::e2b::routes::warning;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(assign, assignments, release))
}

/// The user that a path names.
#[derive(Debug)]
struct OfUser(UserName);

impl<S: Send + Sync> FromRequestParts<S> for OfUser {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let invalid = || ApiError::invalid("the user in the path is no text: send it URL-encoded, in UTF-8");
        let Path(name) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| invalid())?;
        name.parse().map(Self).map_err(|error| ApiError::invalid(format!("{error}")))
    }
}

/// A user's sandbox.
#[derive(Debug, Serialize, ToSchema)]
struct AssignedView {
    #[schema(value_type = String)]
    user: UserName,
    /// `found` if it ran, `resumed` if it was paused, `created` if there was none.
    came_by: &'static str,
    sandbox: SandboxView,
}

/// One sandbox that a user has or had.
#[derive(Debug, Serialize, ToSchema)]
struct AssignmentView {
    #[schema(value_type = String)]
    sandbox: SandboxId,
    #[schema(format = DateTime)]
    since: String,
    /// `null` for the one in force.
    #[schema(format = DateTime)]
    until: Option<String>,
}

/// The sandboxes of one user.
#[derive(Debug, Serialize, ToSchema)]
struct AssignmentsView {
    #[schema(value_type = String)]
    user: UserName,
    /// The present one; `null` if it ended, or there is none.
    sandbox: Option<SandboxView>,
    /// The last hundred at most, newest first.
    history: Vec<AssignmentView>,
}

#[utoipa::path(put, path = "/v1/assignments/{user}", tag = "native", request_body = NewSandbox,
    params(("user" = String, Path, description = "what your application calls its user: 1 to 128 bytes")), responses(
    (status = 200, description = "The user's sandbox, which runs for at least `timeout` from now; the rest of the body \
     is for one that has to be made", body = AssignedView),
    (status = 201, description = "A new one, because there was none", body = AssignedView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn assign(
    State(state): State<ApiState>,
    caller: Caller,
    OfUser(user): OfUser,
    Json(body): Json<NewSandbox>,
) -> Result<Response, ApiError> {
    let request = body.accept(Face::V2)?.into_request(None);
    let (row, came_by) = state.backend.assign(caller.0, &user, request).await?;
    let (made, warning) = (Made::sandboxes([&row.id]), warning(&*state.backend, &row));
    let note = Note(format!("{} for the user {user}", came_by.name()));
    let sandbox = SandboxView::new(row, &*state.backend);
    let status = if came_by == CameBy::Created { StatusCode::CREATED } else { StatusCode::OK };
    let view = AssignedView { user, came_by: came_by.name(), sandbox };
    let mut response = (status, axum::Json(view)).into_response();
    response.headers_mut().extend(warning);
    response.extensions_mut().insert(made);
    response.extensions_mut().insert(note);
    Ok(response)
}

#[utoipa::path(get, path = "/v1/assignments/{user}", tag = "native", params(("user" = String, Path)), responses(
    (status = 200, description = "The user's sandbox, and those before", body = AssignmentsView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn assignments(
    State(state): State<ApiState>,
    caller: Caller,
    OfUser(user): OfUser,
) -> Result<axum::Json<AssignmentsView>, ApiError> {
    let history = state.backend.assignments(caller.0, &user).await?;
    if history.is_empty() {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "this user never had a sandbox"));
    }
    let sandbox = match history.iter().find(|one| one.until.is_none()) {
        Some(one) => Some(state.backend.record(caller.0, &one.sandbox).await?),
        None => None,
    };
    let stands = |state| !matches!(state, SandboxState::Ending | SandboxState::Ended);
    let sandbox = sandbox.filter(|row| stands(row.state)).map(|row| SandboxView::new(row, &*state.backend));
    let view = |Assignment { sandbox, since, until }| AssignmentView {
        sandbox,
        since: since.to_string(),
        until: until.map(|until| until.to_string()),
    };
    Ok(axum::Json(AssignmentsView { user, sandbox, history: history.into_iter().map(view).collect() }))
}

#[utoipa::path(delete, path = "/v1/assignments/{user}", tag = "native", params(("user" = String, Path)), responses(
    (status = 204, description = "The sandbox is nobody's, and lives on; the next PUT makes another"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn release(
    State(state): State<ApiState>,
    caller: Caller,
    OfUser(user): OfUser,
) -> Result<StatusCode, ApiError> {
    state.backend.release(caller.0, &user).await?;
    Ok(StatusCode::NO_CONTENT)
}
