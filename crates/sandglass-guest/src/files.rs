//! Contents of files, streamed both ways over plain HTTP.

mod download;
mod paced;
#[cfg(test)]
mod races;
mod range;
mod upload;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Extension;
use axum::extract::{Query, Request, State};
use axum::response::Response;
use http::{HeaderMap, Method, StatusCode, Uri};
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use crate::agent::Agent;
use crate::http::auth::{self, Signed};
use crate::http::reply::error;
use crate::metadata::Metadata;
use crate::path::{self, PathError};
use crate::process::absolute;
use crate::settings::Settings;
use crate::users::User;

/// Bytes that are read or written at once, on a thread that may wait for the disk.
const CHUNK: usize = 256 * 1024;

/// The query of both directions.
#[derive(Debug, Deserialize)]
struct FileQuery {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<i64>,
}

impl FileQuery {
    /// Reads it from a request's URI.
    ///
    /// # Errors
    /// It is malformed, or no text: a path must not become another one on its way.
    fn parse(uri: &Uri) -> Result<Self, Refusal> {
        let malformed = |why: String| Refusal::new(StatusCode::BAD_REQUEST, format!("invalid query: {why}"));
        percent_decode_str(uri.query().unwrap_or(""))
            .decode_utf8()
            .map_err(|_| malformed("it is not UTF-8".into()))?;
        Query::try_from_uri(uri).map(|Query(query)| query).map_err(|error| malformed(error.body_text()))
    }
}

/// A refusal that is answered as it is.
#[derive(Debug)]
struct Refusal(StatusCode, String);

impl Refusal {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self(status, message.into())
    }

    fn into_response(self) -> Response {
        error(self.0, &self.1)
    }
}

impl From<PathError> for Refusal {
    fn from(error: PathError) -> Self {
        match &error {
            PathError::NotFound(_) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            PathError::NotADirectory(_) | PathError::Invalid(_) | PathError::Loop(_) => {
                Self::new(StatusCode::BAD_REQUEST, error.to_string())
            }
            PathError::Changed(_) => Self::new(StatusCode::CONFLICT, error.to_string()),
            PathError::Magic(_) | PathError::Denied(_) => Self::new(StatusCode::FORBIDDEN, error.to_string()),
            PathError::Io { errno, .. } => Self::io(&error.to_string(), *errno),
        }
    }
}

impl Refusal {
    /// A step that the kernel refused.
    fn io(step: &str, errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        match errno {
            Errno::NOSPC | Errno::DQUOT => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "not enough disk space available")
            }
            Errno::NOENT => Self::new(StatusCode::NOT_FOUND, format!("{step}: {errno}")),
            Errno::ISDIR | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG | Errno::TXTBSY | Errno::NXIO => {
                Self::new(StatusCode::BAD_REQUEST, format!("{step}: {errno}"))
            }
            Errno::EXIST => Self::new(StatusCode::CONFLICT, format!("{step}: {errno}")),
            Errno::ACCESS | Errno::PERM | Errno::ROFS => {
                Self::new(StatusCode::FORBIDDEN, format!("{step}: {errno}"))
            }
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{step}: {errno}")),
        }
    }
}

/// Who asks, and for what.
struct Access {
    agent: Arc<Agent>,
    settings: Arc<Settings>,
    user: User,
    /// What is attached to files that are written.
    metadata: Metadata,
}

impl Access {
    fn new(
        agent: Arc<Agent>,
        settings: Arc<Settings>,
        query: &FileQuery,
        headers: &HeaderMap,
        operation: &'static str,
    ) -> Result<Self, Refusal> {
        let signed = Signed {
            path: query.path.as_deref().unwrap_or(""),
            operation,
            user: query.username.as_deref().unwrap_or(""),
            signature: query.signature.as_deref(),
            expiration: query.signature_expiration,
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        auth::check_file_access(&settings, headers, &signed, i64::try_from(now).unwrap_or(i64::MAX))
            .map_err(|message| Refusal::new(StatusCode::UNAUTHORIZED, message))?;
        let named = query.username.as_deref().filter(|name| !name.is_empty());
        let name = named
            .or_else(|| settings.default_user())
            .ok_or_else(|| Refusal::new(StatusCode::BAD_REQUEST, "no user specified"))?;
        let user =
            auth::look_up(&agent, name).map_err(|message| Refusal::new(StatusCode::UNAUTHORIZED, message))?;
        let metadata = Metadata::parse(headers)
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.to_string()))?;
        Ok(Self { agent, settings, user, metadata })
    }

    fn clean(&self, path: &str) -> Result<String, Refusal> {
        let path = absolute(path, &self.user, &self.settings)
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.message.unwrap_or_default()))?;
        Ok(path::clean(&path)?)
    }

    fn root(&self) -> Result<OwnedFd, Refusal> {
        path::open_root(&self.agent.root)
            .map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
    }
}

/// `GET /files`.
pub(crate) async fn download(
    State(agent): State<Arc<Agent>>,
    Extension(settings): Extension<Arc<Settings>>,
    uri: Uri,
    method: Method,
    headers: HeaderMap,
) -> Response {
    let admitted = FileQuery::parse(&uri)
        .and_then(|query| Ok((Access::new(agent, settings, &query, &headers, "read")?, query.path)));
    let result = match admitted {
        Ok((access, path)) => download::serve(access, path.unwrap_or_default(), method, headers).await,
        Err(refusal) => Err(refusal),
    };
    result.unwrap_or_else(Refusal::into_response)
}

/// `POST /files`.
pub(crate) async fn upload(
    State(agent): State<Arc<Agent>>,
    Extension(settings): Extension<Arc<Settings>>,
    request: Request,
) -> Response {
    let admitted = FileQuery::parse(request.uri()).and_then(|query| {
        Ok((Access::new(agent, settings, &query, request.headers(), "write")?, query.path))
    });
    let result = match admitted {
        Ok((access, path)) => upload::receive(access, path, request, &mut HashSet::new()).await,
        Err(refusal) => Err(refusal),
    };
    result.unwrap_or_else(Refusal::into_response)
}
