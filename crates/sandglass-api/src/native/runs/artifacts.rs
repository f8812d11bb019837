//! What a run left. It is the sandbox's, so a browser makes nothing of it.

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use http::header::{
    CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, X_CONTENT_TYPE_OPTIONS,
};
use http::request::Parts;
use http::{HeaderValue, StatusCode};
use sandglass_types::{Error, RunId};

use super::wire::ArtifactView;
use super::{OfRun, run_id};
use crate::auth::Caller;
use crate::error::{ApiError, ErrorBody};
use crate::router::ApiState;

#[utoipa::path(get, path = "/v1/runs/{id}/artifacts", tag = "native", params(("id" = String, Path)), responses(
    (status = 200, description = "All of them", body = Vec<ArtifactView>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
pub(super) async fn list_artifacts(
    State(state): State<ApiState>,
    caller: Caller,
    OfRun(id): OfRun,
) -> Result<axum::Json<Vec<ArtifactView>>, ApiError> {
    let artifacts = state.backend.artifacts(caller.0, &id).await?;
    Ok(axum::Json(artifacts.into_iter().map(Into::into).collect()))
}

/// An artifact that a path names.
pub(super) struct OfArtifact(RunId, String);

impl<S: Send + Sync> FromRequestParts<S> for OfArtifact {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let named = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((id, path)) =
            named.map_err(|_| ApiError::invalid("the path of a file must be URL-encoded UTF-8"))?;
        Ok(Self(run_id(&id)?, path))
    }
}

#[utoipa::path(get, path = "/v1/runs/{id}/artifacts/{path}", tag = "native", params(("id" = String, Path),
    ("path" = String, Path, description = "its path, URL-encoded as one part: `/` is `%2F`")), responses(
    (status = 200, description = "What is in it", content_type = "application/octet-stream",
     headers(("etag" = String, description = "the SHA-256 of it"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
pub(super) async fn get_artifact(
    State(state): State<ApiState>,
    caller: Caller,
    OfArtifact(id, path): OfArtifact,
) -> Result<Response, ApiError> {
    let artifacts = state.backend.artifacts(caller.0, &id).await?;
    let found = artifacts.into_iter().find(|one| one.path.as_deref() == Some(&*path));
    // Without a digest, its content is not kept.
    let found = found.and_then(|one| one.sha256.map(|sha256| (one.number, one.size, sha256)));
    let (number, size, sha256) =
        found.ok_or_else(|| ApiError::new(StatusCode::NOT_FOUND, "the run has left no such file"))?;
    let (backend, team) = (state.backend, caller.0);
    let body = Body::from_stream(stream::try_unfold(0, move |piece| {
        let (backend, id) = (backend.clone(), id.clone());
        async move {
            let bytes = backend.artifact_piece(team, &id, number, piece).await?;
            Ok::<_, Error>(bytes.map(|bytes| (bytes, piece + 1)))
        }
    }));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(size));
    if let Ok(tag) = HeaderValue::try_from(format!("\"{sha256}\"")) {
        headers.insert(ETAG, tag);
    }
    Ok(response)
}
