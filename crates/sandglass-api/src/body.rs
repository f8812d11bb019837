//! JSON request bodies: bounded in size and time, with errors that name the field.

use std::time::Duration;

use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use crate::error::ApiError;

/// Largest request body of the REST faces, in bytes.
pub(crate) const MAX_BODY_LEN: usize = 1024 * 1024;

/// How long a client may take to send a body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// A body that must be there.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

/// A body that may be missing, which is the same as `{}`.
#[derive(Debug)]
pub(crate) struct OptionalJson<T>(pub(crate) T);

async fn read(request: Request) -> Result<Bytes, ApiError> {
    let body = Limited::new(request.into_body(), MAX_BODY_LEN).collect();
    match tokio::time::timeout(READ_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "the request body is larger than 1 MiB"))
        }
        Ok(Err(_)) => Err(ApiError::invalid("the request body ended early")),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request body took too long")),
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| ApiError::invalid(format!("invalid request body: {error}")))?;
    reader.end().map_err(|error| ApiError::invalid(format!("invalid request body: {error}")))?;
    Ok(value)
}

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        parse(&read(request).await?).map(Self)
    }
}

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for OptionalJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let body = read(request).await?;
        parse(if body.trim_ascii().is_empty() { b"{}" } else { &body }).map(Self)
    }
}
