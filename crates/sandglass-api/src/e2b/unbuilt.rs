//! Endpoints that clients know and this version lacks: answered clearly, so that nobody looks for a typing error.

use axum::Router;
use axum::routing::{MethodFilter, on};
use http::StatusCode;

use crate::auth::Caller;
use crate::error::ApiError;
use crate::router::ApiState;

/// Method, path, and what it would do.
pub(crate) const ENDPOINTS: &[(&str, &str, &str)] = &[
    ("GET", "/templates", "templates"),
    ("POST", "/templates", "templates"),
    ("GET", "/v2/templates", "templates"),
    ("POST", "/v2/templates", "templates"),
    ("POST", "/v3/templates", "templates"),
    ("GET", "/default-templates", "templates"),
    ("GET", "/templates/{id}", "templates"),
    ("POST", "/templates/{id}", "templates"),
    ("PATCH", "/templates/{id}", "templates"),
    ("PATCH", "/v2/templates/{id}", "templates"),
    ("GET", "/templates/aliases/{alias}", "templates"),
    ("POST", "/templates/tags", "templates"),
    ("DELETE", "/templates/tags", "templates"),
    ("GET", "/templates/{id}/tags", "templates"),
    ("GET", "/templates/{id}/files/{hash}", "templates"),
    ("POST", "/v2/templates/{id}/builds/{build}", "templates"),
    ("GET", "/templates/{id}/builds/{build}/status", "templates"),
    ("GET", "/templates/{id}/builds/{build}/logs", "templates"),
    ("GET", "/secrets", "secrets"),
    ("POST", "/secrets", "secrets"),
    ("GET", "/secrets/{id}", "secrets"),
    ("POST", "/secrets/{id}", "secrets"),
    ("DELETE", "/secrets/{id}", "secrets"),
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
