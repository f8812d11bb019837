//! Answers of the plain endpoints.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use connectrpc::ConnectError;
use http::{StatusCode, header};

/// An error as the plain endpoints write it: the code is the status.
pub(crate) fn error(status: StatusCode, message: &str) -> Response {
    let body = serde_json::json!({ "code": status.as_u16(), "message": message });
    (status, Json(body)).into_response()
}

/// An error as unary calls write it, for refusals before a stream begins.
pub(crate) fn rpc_error(error: &ConnectError) -> Response {
    (error.http_status(), [(header::CONTENT_TYPE, "application/json")], error.to_json()).into_response()
}
