//! All REST routes with what surrounds them.

use std::any::Any;
use std::sync::Arc;

use axum::Router;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, StatusCode, Uri};
use sandglass_types::Timestamp;
use tokio_util::task::TaskTracker;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{Any as AnyOrigin, CorsLayer};
use utoipa_axum::router::OpenApiRouter;

use crate::audit::{Anonymous, REQUEST_ID, traced};
use crate::backend::Backend;
use crate::e2b::routes::{ORIGIN, WARNING};
use crate::e2b::unbuilt;
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::native::runs::REPLAYED;
use crate::page::NEXT_TOKEN;
use crate::{e2b, metrics, native};

/// What isolates the sandboxes of the server that answers.
pub(crate) const ISOLATION: HeaderName = HeaderName::from_static("sandglass-isolation");

/// What every handler gets.
#[derive(Clone)]
pub(crate) struct ApiState {
    pub(crate) backend: Arc<dyn Backend>,
    /// Owns work that outlives the request that started it.
    pub(crate) tasks: TaskTracker,
    /// How many rows of the audit calls without a valid key had.
    pub(crate) anonymous: Arc<Anonymous>,
    pub(crate) metrics: Arc<Metrics>,
    /// When this server began to answer.
    pub(crate) started: Timestamp,
}

/// The documented routes of both faces.
pub(crate) fn documented() -> OpenApiRouter<ApiState> {
    e2b::routes::router()
        .merge(e2b::snapshots::router())
        .merge(e2b::volumes::router())
        .merge(e2b::secrets::router())
        .merge(e2b::content::router())
        .merge(e2b::metrics::router())
        .merge(e2b::logs::router())
        .merge(e2b::teams::router())
        .merge(e2b::keys::router())
        .merge(e2b::templates::router())
        .merge(native::router())
        .merge(metrics::router())
}

/// The service of the REST faces.
pub(crate) fn router(state: ApiState) -> Router {
    let (documented, _) = documented().split_for_parts();
    documented
        .merge(unbuilt::router())
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(state.clone(), traced))
        .layer(
            CorsLayer::new()
                .allow_origin(AnyOrigin)
                .allow_methods(AnyOrigin)
                .allow_headers(AnyOrigin)
                .expose_headers([NEXT_TOKEN, WARNING, REQUEST_ID, ISOLATION, ORIGIN, REPLAYED]),
        )
        .with_state(state)
}

/// Paths of a sandbox's guest API: whoever asks the server for them has lost the sandbox on the way.
const GUEST_PATHS: &[&str] = &["/files", "/process.Process/", "/filesystem.Filesystem/"];

async fn no_route(uri: Uri) -> ApiError {
    let message = if GUEST_PATHS.iter().any(|path| uri.path().starts_with(path)) {
        "this path belongs to a sandbox: name it by its own host, or by the headers E2b-Sandbox-Id and \
         E2b-Sandbox-Port"
    } else {
        "no such route"
    };
    ApiError::new(StatusCode::NOT_FOUND, message)
}

async fn wrong_method() -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this route does not have that method")
}

#[expect(clippy::needless_pass_by_value, reason = "the signature that the layer wants")]
fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    tracing::error!(panic = text, "a handler panicked");
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error").into_response()
}

#[cfg(test)]
mod tests;
