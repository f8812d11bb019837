//! All REST routes with what surrounds them.

use std::any::Any;
use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, Uri};
use tokio_util::task::TaskTracker;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{Any as AnyOrigin, CorsLayer};
use tracing::Instrument as _;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::backend::Backend;
use crate::e2b::routes::WARNING;
use crate::e2b::unbuilt;
use crate::error::ApiError;
use crate::page::NEXT_TOKEN;
use crate::{e2b, native};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What isolates the sandboxes of the server that answers.
pub(crate) const ISOLATION: HeaderName = HeaderName::from_static("sandglass-isolation");

/// What every handler gets.
#[derive(Clone)]
pub(crate) struct ApiState {
    pub(crate) backend: Arc<dyn Backend>,
    /// Owns work that outlives the request that started it.
    pub(crate) tasks: TaskTracker,
}

/// The documented routes of both faces.
pub(crate) fn documented() -> OpenApiRouter<ApiState> {
    e2b::routes::router().merge(native::router())
}

/// The service of the REST faces.
pub(crate) fn router(state: ApiState) -> Router {
    let (documented, _) = documented().split_for_parts();
    documented
        .merge(unbuilt::router())
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn(traced))
        .layer(
            CorsLayer::new()
                .allow_origin(AnyOrigin)
                .allow_methods(AnyOrigin)
                .allow_headers(AnyOrigin)
                .expose_headers([NEXT_TOKEN, WARNING, REQUEST_ID, ISOLATION]),
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

/// Gives every request an id and a span. Neither query nor headers are logged: they carry secrets.
async fn traced(request: Request, next: Next) -> Response {
    let id = Uuid::now_v7();
    let route = request.extensions().get::<MatchedPath>().map_or("-", MatchedPath::as_str);
    let span = tracing::info_span!(
        "request",
        %id,
        method = %request.method(),
        route,
        team = tracing::field::Empty
    );
    let started = std::time::Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    span.in_scope(|| tracing::info!(status = response.status().as_u16(), micros, "answered"));
    if let Ok(id) = HeaderValue::try_from(id.to_string()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

#[cfg(test)]
mod tests;
