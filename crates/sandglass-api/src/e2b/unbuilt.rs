//! Endpoints that clients know and this version lacks: answered clearly, so that nobody looks for a typing error.

use axum::Router;
use axum::routing::{MethodFilter, on};
use http::StatusCode;

use crate::auth::Caller;
use crate::error::ApiError;
use crate::router::ApiState;

/// What an operator does with another tool.
const BUILDING: &str = "building templates: operators do it with `sandglass template build`";

/// Method, path, and what it would do.
pub(crate) const ENDPOINTS: &[(&str, &str, &str)] = &[
    ("POST", "/templates", BUILDING),
    ("POST", "/v2/templates", BUILDING),
    ("POST", "/v3/templates", BUILDING),
    ("POST", "/templates/{id}", BUILDING),
    ("POST", "/templates/tags", BUILDING),
    ("DELETE", "/templates/tags", BUILDING),
    ("GET", "/templates/{id}/files/{hash}", BUILDING),
    ("POST", "/v2/templates/{id}/builds/{build}", BUILDING),
    ("GET", "/templates/{id}/builds/{build}/status", BUILDING),
    ("GET", "/templates/{id}/builds/{build}/logs", BUILDING),
];

fn filter(method: &str) -> MethodFilter {
    match method {
        "POST" => MethodFilter::POST,
        "PUT" => MethodFilter::PUT,
        "PATCH" => MethodFilter::PATCH,
        "DELETE" => MethodFilter::DELETE,
        _ => MethodFilter::GET,
    }
}

/// Routes for all of [`ENDPOINTS`]; they want a key like every other.
pub(crate) fn router() -> Router<ApiState> {
    ENDPOINTS.iter().fold(Router::new(), |router, &(method, path, what)| {
        let refuse = move |_: Caller| async move {
            ApiError::new(
                StatusCode::NOT_IMPLEMENTED,
                format!("not supported by this version of sandglass: {what}"),
            )
        };
        router.route(path, on(filter(method), refuse))
    })
}
