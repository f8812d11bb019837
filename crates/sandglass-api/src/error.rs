//! Every failure of the REST faces as the one JSON body that clients parse.

use axum::response::{IntoResponse, Response};
use http::header::RETRY_AFTER;
use http::{HeaderName, HeaderValue, StatusCode};
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind};
use serde::Serialize;
use utoipa::ToSchema;

/// Tells clients whether repeating the request can help; without it they repeat 429, 502, 503 and 504.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// What programs recognise a full machine by, in all answers that are for that reason.
pub(crate) const NO_CAPACITY: &str = "sandbox_capacity_unavailable";

/// The body of every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorBody {
    /// The HTTP status.
    code: u16,
    /// For people.
    message: String,
    /// For programs, where one status has several meanings.
    #[serde(skip_serializing_if = "Option::is_none")]
    error_code: Option<&'static str>,
}

#[cfg(test)]
impl ErrorBody {
    /// For people.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

/// Whether a client should send the request again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Retry {
    /// The status says it all.
    Unsaid,
    /// It would fail again.
    No,
    /// Soon.
    Soon,
}

/// Goes with the answer as far as the audit: why it is no success.
#[derive(Debug, Clone)]
pub(crate) struct Refusal(pub(crate) String);

/// A failed request.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    error_code: Option<&'static str>,
    retry: Retry,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: None, retry: Retry::Unsaid }
    }

    /// 400: the request can't be right.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// With what programs know it by.
    pub(crate) fn known_as(self, error_code: &'static str) -> Self {
        Self { error_code: Some(error_code), ..self }
    }

    /// As a part of an answer that is a success as a whole.
    pub(crate) fn into_body(self) -> ErrorBody {
        ErrorBody { code: self.status.as_u16(), message: self.message, error_code: self.error_code }
    }

    /// 403: the key does not allow it.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// 401, also for a key that is no longer valid.
    pub(crate) fn unauthenticated(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let (status, error_code, retry) = match error.kind() {
            ErrorKind::Invalid => (StatusCode::BAD_REQUEST, None, Retry::Unsaid),
            ErrorKind::Unauthenticated => (StatusCode::UNAUTHORIZED, None, Retry::Unsaid),
            ErrorKind::Forbidden => (StatusCode::FORBIDDEN, None, Retry::Unsaid),
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, None, Retry::Unsaid),
            ErrorKind::Conflict => (StatusCode::CONFLICT, None, Retry::Unsaid),
            ErrorKind::IdempotencyMismatch => {
                (StatusCode::UNPROCESSABLE_ENTITY, Some("idempotency_request_mismatch"), Retry::No)
            }
            ErrorKind::IdempotencyInProgress => {
                (StatusCode::CONFLICT, Some("idempotency_in_progress"), Retry::Soon)
            }
            ErrorKind::Quota => (StatusCode::TOO_MANY_REQUESTS, None, Retry::No),
            ErrorKind::Capacity => (StatusCode::SERVICE_UNAVAILABLE, Some(NO_CAPACITY), Retry::No),
            ErrorKind::Unsupported => (StatusCode::NOT_IMPLEMENTED, None, Retry::No),
            // Clients would repeat a 504, and a second create makes a second sandbox.
            ErrorKind::Timeout => (StatusCode::GATEWAY_TIMEOUT, None, Retry::No),
            ErrorKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, None, Retry::Unsaid),
        };
        if status.is_server_error() {
            tracing::warn!(error = %Chain(&error), "request failed");
        }
        Self { status, message: error.to_string(), error_code, retry }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, retry) = (self.status, self.retry);
        let body = self.into_body();
        let refusal = Refusal(body.message.clone());
        let mut response = (status, axum::Json(body)).into_response();
        response.extensions_mut().insert(refusal);
        let headers = response.headers_mut();
        match retry {
            Retry::Unsaid => {}
            Retry::No => {
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            }
            Retry::Soon => {
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("true"));
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn shown(error: ApiError) -> (u16, String, Option<String>) {
        let response = error.into_response();
        let retry = response.headers().get(SHOULD_RETRY).map(|v| v.to_str().unwrap().to_owned());
        let status = response.status().as_u16();
        let body = axum::body::to_bytes(response.into_body(), 4096).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap(), retry)
    }

    #[tokio::test]
    async fn every_kind_has_its_status_body_and_retry_header() {
        let table = [
            (ErrorKind::Invalid, 400, None, None),
            (ErrorKind::Unauthenticated, 401, None, None),
            (ErrorKind::Forbidden, 403, None, None),
            (ErrorKind::NotFound, 404, None, None),
            (ErrorKind::Conflict, 409, None, None),
            (ErrorKind::IdempotencyMismatch, 422, Some("idempotency_request_mismatch"), Some("false")),
            (ErrorKind::IdempotencyInProgress, 409, Some("idempotency_in_progress"), Some("true")),
            (ErrorKind::Quota, 429, None, Some("false")),
            (ErrorKind::Capacity, 503, Some("sandbox_capacity_unavailable"), Some("false")),
            (ErrorKind::Unsupported, 501, None, Some("false")),
            (ErrorKind::Timeout, 504, None, Some("false")),
            (ErrorKind::Internal, 500, None, None),
        ];
        for (kind, status, error_code, retry) in table {
            let cause = std::io::Error::other("/srv/secret");
            let (got, body, header) = shown(Error::new(kind, "went wrong").because(cause).into()).await;
            let code = error_code.map_or(String::new(), |code| format!(r#","error_code":"{code}""#));
            assert_eq!(got, status, "{kind:?}");
            assert_eq!(body, format!(r#"{{"code":{status},"message":"went wrong"{code}}}"#));
            assert_eq!(header.as_deref(), retry, "{kind:?}");
        }
    }
}
