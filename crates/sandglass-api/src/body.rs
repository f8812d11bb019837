//! JSON request bodies: bounded in size and time, with errors that name the field.

use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};

use crate::audit::Who;
use crate::auth::identify;
use crate::error::ApiError;
use crate::router::ApiState;

/// Largest request body of the REST faces, in bytes.
pub(crate) const MAX_BODY_LEN: usize = 1024 * 1024;

/// How long a client may take to send a body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a body may be on its way for its key to be taken for the one that it was.
const AT_ONCE: Duration = Duration::from_millis(500);

/// A body that must be there.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

/// The same, with the text that it was read from.
#[derive(Debug)]
pub(crate) struct Verbatim<T>(pub(crate) T, pub(crate) Bytes);

/// A body that may be missing, which is the same as `{}`.
#[derive(Debug)]
pub(crate) struct OptionalJson<T>(pub(crate) T);

async fn read(body: Body) -> Result<Bytes, ApiError> {
    let body = Limited::new(body, MAX_BODY_LEN).collect();
    match tokio::time::timeout(READ_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "the request body is larger than 1 MiB"))
        }
        Ok(Err(_)) => Err(ApiError::invalid("the request body ended early")),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request body took too long")),
    }
}

/// A JSON object. Derived code alone would also read an array, field by field.
#[derive(Debug)]
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// A number of seconds: whole, of any size and sign, for its field to judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seconds(pub(crate) i64);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Whole;

        impl Visitor<'_> for Whole {
            type Value = Seconds;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number of seconds")
            }

            fn visit_i64<E>(self, seconds: i64) -> Result<Seconds, E> {
                Ok(Seconds(seconds))
            }

            fn visit_u64<E>(self, seconds: u64) -> Result<Seconds, E> {
                Ok(Seconds(i64::try_from(seconds).unwrap_or(i64::MAX)))
            }
        }

        deserializer.deserialize_i64(Whole)
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(body);
    let Object(value) = serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| ApiError::invalid(format!("invalid request body: {error}")))?;
    reader.end().map_err(|error| ApiError::invalid(format!("invalid request body: {error}")))?;
    Ok(value)
}

/// Reads a body, and asks once more who sent it if that took its time: their key may have been ended since.
async fn heard(request: Request, state: &ApiState) -> Result<Bytes, ApiError> {
    let (parts, body) = request.into_parts();
    let began = Instant::now();
    let body = read(body).await?;
    if began.elapsed() > AT_ONCE && parts.extensions.get::<Who>().is_some_and(|who| who.0.get().is_some()) {
        identify(&parts, state).await?;
    }
    Ok(body)
}

impl<T: DeserializeOwned> FromRequest<ApiState> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, ApiError> {
        parse(&heard(request, state).await?).map(Self)
    }
}

impl<T: DeserializeOwned> FromRequest<ApiState> for Verbatim<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, ApiError> {
        let body = heard(request, state).await?;
        Ok(Self(parse(&body)?, body))
    }
}

impl<T: DeserializeOwned> FromRequest<ApiState> for OptionalJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, ApiError> {
        let body = heard(request, state).await?;
        parse(if body.trim_ascii().is_empty() { b"{}" } else { &body }).map(Self)
    }
}
