//! Browsers may call from anywhere: access is decided by tokens alone, and none is sent by a browser on its own.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};

const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, PUT, PATCH, DELETE, HEAD");
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "Accept-Ranges, Cache-Control, Connect-Content-Encoding, Content-Disposition, Content-Encoding, \
     Content-Length, Content-Range, Content-Type, Grpc-Message, Grpc-Status, Grpc-Status-Details-Bin, \
     Last-Modified, Location, X-Content-Type-Options",
);

fn allow(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    headers.insert(name, value);
}

/// Answers preflight requests and marks all others.
pub(crate) async fn allow_all(request: Request, next: Next) -> Response {
    let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let preflight = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response =
        if preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    allow(headers, header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    if preflight {
        allow(headers, header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        // A plain `*` would not cover `Authorization`.
        allow(headers, header::ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(HeaderValue::from_static("*")));
        allow(headers, header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("7200"));
    } else {
        allow(headers, header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    response
}
