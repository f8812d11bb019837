//! Answers of the plain endpoints.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use connectrpc::ConnectError;
use connectrpc::envelope::Envelope;
use http::{HeaderMap, StatusCode, header};

/// The content type of a call with a stream, in the only codec that is spoken here.
const STREAM: &str = "application/connect+json";

/// An error as the plain endpoints write it: the code is the status.
pub(crate) fn error(status: StatusCode, message: &str) -> Response {
    let body = serde_json::json!({ "code": status.as_u16(), "message": message });
    (status, Json(body)).into_response()
}

/// A refusal of a call before its handler runs, in the form that its kind of call has. The body of a stream that
/// does not begin with 200 is not read by E2B's JavaScript client: the message would be lost.
pub(crate) fn rpc_error(request: &HeaderMap, error: &ConnectError) -> Response {
    if request.get(header::CONTENT_TYPE).is_some_and(|kind| kind == STREAM) {
        let end = [br#"{"error":"#, &*error.to_json(), b"}"].concat();
        return ([(header::CONTENT_TYPE, STREAM)], Envelope::end_stream(end.into()).encode()).into_response();
    }
    (error.http_status(), [(header::CONTENT_TYPE, "application/json")], error.to_json()).into_response()
}
