//! The content of volumes. Who has a volume's token may do all with what is on it, and nothing else.

use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, Path, RawQuery, Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt as _;
use sandglass_control::Content;
use sandglass_engine::volume::{Access, Ask, Entry, Kind, Said, Why};
use sandglass_types::{Timestamp, VolumeId};
use serde::{Deserialize, Serialize};
use tokio::time::{Duration, timeout};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::body::Json;
use crate::error::ApiError;
use crate::query::Query;
use crate::router::ApiState;

/// How long a client may take for the next piece of a file.
const PIECE_PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(stat, change, remove))
        .routes(routes!(list, make_dir))
        .routes(routes!(read, write))
}

/// A failure, as the clients of this API read it: its code is a text.
#[derive(Debug, Serialize, ToSchema)]
struct ContentError {
    code: &'static str,
    message: String,
}

#[derive(Debug)]
enum Failure {
    Refused(StatusCode, &'static str, String),
    Other(ApiError),
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Other(error)
    }
}

impl From<sandglass_types::Error> for Failure {
    fn from(error: sandglass_types::Error) -> Self {
        Self::Other(error.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, code, message) = match self {
            Self::Refused(status, code, message) => (status, code, message),
            Self::Other(error) => {
                let mut response = error.into_response();
                let status = response.status();
                let code = status.canonical_reason().unwrap_or("error");
                let refusal = response.extensions_mut().remove::<crate::error::Refusal>();
                let message = refusal.map(|crate::error::Refusal(message)| message).unwrap_or_default();
                (status, code, message)
            }
        };
        (status, axum::Json(ContentError { code, message })).into_response()
    }
}

fn refused(why: Why, message: String) -> Failure {
    let (status, code) = match why {
        Why::NotFound => (StatusCode::NOT_FOUND, "not_found"),
        Why::Invalid => (StatusCode::BAD_REQUEST, "invalid"),
        Why::Conflict => (StatusCode::CONFLICT, "conflict"),
        Why::NoRoom => (StatusCode::INSUFFICIENT_STORAGE, "no_room"),
        Why::Failed => (StatusCode::INTERNAL_SERVER_ERROR, "failed"),
    };
    Failure::Refused(status, code, message)
}

/// What of the answers is not what was asked for.
fn otherwise(said: Said) -> Failure {
    match said {
        Said::Refused { why, message } => refused(why, message),
        _ => refused(Why::Failed, "the volume gave another answer than was asked for".into()),
    }
}

/// The volume that a path names, and the token that came with the request.
struct Holder {
    id: Option<VolumeId>,
    token: String,
}

impl<S: Send + Sync> FromRequestParts<S> for Holder {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let token = token(&parts.headers)?.to_owned();
        let text = Path::<String>::from_request_parts(parts, state).await.ok();
        Ok(Self { id: text.and_then(|Path(text)| text.parse().ok()), token })
    }
}

fn token(headers: &HeaderMap) -> Result<&str, ApiError> {
    let value = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let (scheme, token) = value.and_then(|value| value.split_once(' ')).unwrap_or(("", ""));
    if scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() {
        return Ok(token);
    }
    Err(ApiError::unauthenticated("missing volume token: send it as a bearer token"))
}

impl Holder {
    async fn open(self, state: &ApiState) -> Result<Box<dyn Talk>, Failure> {
        // No volume has such an id, which is no more than a wrong token to who asks.
        let id = self.id.ok_or_else(|| ApiError::unauthenticated("invalid volume token"))?;
        Ok(state.backend.content(&id, &self.token).await?)
    }

    async fn ask(self, state: &ApiState, ask: Ask) -> Result<Said, Failure> {
        Ok(self.open(state).await?.ask(&ask).await?)
    }
}

/// A question about the content of a volume, as [`Content`] has it.
#[async_trait::async_trait]
pub(crate) trait Talk: Send {
    async fn ask(&mut self, ask: &Ask) -> Result<Said, sandglass_types::Error>;
    async fn answer(&mut self) -> Result<Said, sandglass_types::Error>;
    async fn send_file(&mut self, bytes: &[u8]) -> Result<(), sandglass_types::Error>;
    async fn read_file(&mut self, left: u64) -> std::io::Result<Vec<u8>>;
}

#[async_trait::async_trait]
impl Talk for Content {
    async fn ask(&mut self, ask: &Ask) -> Result<Said, sandglass_types::Error> {
        Self::ask(self, ask).await
    }

    async fn answer(&mut self) -> Result<Said, sandglass_types::Error> {
        Self::answer(self).await
    }

    async fn send_file(&mut self, bytes: &[u8]) -> Result<(), sandglass_types::Error> {
        Self::send_file(self, bytes).await
    }

    async fn read_file(&mut self, left: u64) -> std::io::Result<Vec<u8>> {
        Self::read_file(self, left).await
    }
}

/// One file, folder or link.
#[derive(Debug, Serialize, ToSchema)]
struct VolumeEntryStat {
    name: String,
    /// `file`, `directory`, `symlink` or `unknown`.
    r#type: &'static str,
    path: String,
    size: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    #[schema(value_type = String, format = DateTime)]
    atime: String,
    #[schema(value_type = String, format = DateTime)]
    mtime: String,
    #[schema(value_type = String, format = DateTime)]
    ctime: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

impl From<Entry> for VolumeEntryStat {
    fn from(entry: Entry) -> Self {
        let time = |millis| Timestamp::from_millis(millis).to_string();
        Self {
            name: entry.name,
            r#type: match entry.kind {
                Kind::File => "file",
                Kind::Directory => "directory",
                Kind::Symlink => "symlink",
                Kind::Unknown => "unknown",
            },
            path: entry.path,
            size: entry.size,
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            atime: time(entry.atime),
            mtime: time(entry.mtime),
            ctime: time(entry.ctime),
            target: entry.target,
        }
    }
}

fn stat_of(said: Said) -> Result<axum::Json<VolumeEntryStat>, Failure> {
    match said {
        Said::Entry(entry) => Ok(axum::Json(entry.into())),
        other => Err(otherwise(other)),
    }
}

fn path_of(query: &Query) -> Result<String, ApiError> {
    query.one("path").map(str::to_owned).ok_or_else(|| ApiError::invalid("path is missing"))
}

fn number(query: &Query, name: &str) -> Result<Option<u32>, ApiError> {
    let number = |text: &str| text.parse().map_err(|_| ApiError::invalid(format!("{name} must be a number")));
    query.one(name).map(number).transpose()
}

fn access_of(query: &Query) -> Result<Access, ApiError> {
    let access =
        Access { uid: number(query, "uid")?, gid: number(query, "gid")?, mode: number(query, "mode")? };
    checked(access)
}

fn checked(access: Access) -> Result<Access, ApiError> {
    if access.mode.is_some_and(|mode| mode > 0o7777) {
        return Err(ApiError::invalid("mode must be at most 4095, which is 7777 in octal digits"));
    }
    // Which would be none at all.
    if [access.uid, access.gid].contains(&Some(u32::MAX)) {
        return Err(ApiError::invalid("uid and gid must be less than 4294967295"));
    }
    Ok(access)
}

fn force_of(query: &Query) -> Result<bool, ApiError> {
    match query.one("force") {
        None => Ok(false),
        Some(text) if text.eq_ignore_ascii_case("true") => Ok(true),
        Some(text) if text.eq_ignore_ascii_case("false") => Ok(false),
        Some(_) => Err(ApiError::invalid("force must be true or false")),
    }
}

#[utoipa::path(get, path = "/volumecontent/{id}/path", tag = "e2b", security(("VolumeToken" = [])), params(("id" = String, Path),
    ("path" = String, Query)), responses(
    (status = 200, description = "What is there", body = VolumeEntryStat),
    (status = "4XX", description = "Refused", body = ContentError),
    (status = "5XX", description = "Failed", body = ContentError)))]
async fn stat(
    State(state): State<ApiState>,
    holder: Holder,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<VolumeEntryStat>, Failure> {
    let query = Query::parse(query.as_deref())?;
    stat_of(holder.ask(&state, Ask::Stat { path: path_of(&query)? }).await?)
}

/// The body of `PATCH /volumecontent/{id}/path`.
#[derive(Debug, Deserialize, ToSchema)]
struct Change {
    uid: Option<u32>,
    gid: Option<u32>,
    mode: Option<u32>,
}

#[utoipa::path(patch, path = "/volumecontent/{id}/path", tag = "e2b", security(("VolumeToken" = [])), params(("id" = String, Path),
    ("path" = String, Query)), request_body = Change, responses(
    (status = 200, description = "It is somebody else's", body = VolumeEntryStat),
    (status = "4XX", description = "Refused", body = ContentError),
    (status = "5XX", description = "Failed", body = ContentError)))]
async fn change(
    State(state): State<ApiState>,
    holder: Holder,
    RawQuery(query): RawQuery,
    body: Result<Json<Change>, ApiError>,
) -> Result<axum::Json<VolumeEntryStat>, Failure> {
    let query = Query::parse(query.as_deref())?;
    let Json(Change { uid, gid, mode }) = body?;
    let access = checked(Access { uid, gid, mode })?;
    stat_of(holder.ask(&state, Ask::Change { path: path_of(&query)?, access }).await?)
}

#[utoipa::path(delete, path = "/volumecontent/{id}/path", tag = "e2b", security(("VolumeToken" = [])), params(("id" = String, Path),
    ("path" = String, Query)), responses(
    (status = 204, description = "It is gone, with all that was in it"),
    (status = "4XX", description = "Refused", body = ContentError),
    (status = "5XX", description = "Failed", body = ContentError)))]
async fn remove(
    State(state): State<ApiState>,
    holder: Holder,
    RawQuery(query): RawQuery,
) -> Result<StatusCode, Failure> {
    let query = Query::parse(query.as_deref())?;
    match holder.ask(&state, Ask::Remove { path: path_of(&query)? }).await? {
        Said::Removed => Ok(StatusCode::NO_CONTENT),
        other => Err(otherwise(other)),
    }
}

#[utoipa::path(get, path = "/volumecontent/{id}/dir", tag = "e2b", security(("VolumeToken" = [])), params(("id" = String, Path),
    ("path" = String, Query), ("depth" = Option<u32>, Query, description = "how many layers; 1 if absent")), responses(
    (status = 200, description = "What is in it, by path", body = Vec<VolumeEntryStat>),
    (status = "4XX", description = "Refused", body = ContentError),
    (status = "5XX", description = "Failed", body = ContentError)))]
async fn list(
    State(state): State<ApiState>,
    holder: Holder,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<Vec<VolumeEntryStat>>, Failure> {
    let query = Query::parse(query.as_deref())?;
    let depth = number(&query, "depth")?.unwrap_or(1);
    match holder.ask(&state, Ask::List { path: path_of(&query)?, depth }).await? {
        Said::Entries(entries) => Ok(axum::Json(entries.into_iter().map(Into::into).collect())),
        other => Err(otherwise(other)),
    }
}

#[utoipa::path(post, path = "/volumecontent/{id}/dir", tag = "e2b", security(("VolumeToken" = [])), params(("id" = String, Path),
    ("path" = String, Query), ("uid" = Option<u32>, Query), ("gid" = Option<u32>, Query),
    ("mode" = Option<u32>, Query), ("force" = Option<bool>, Query, description = "make those above it as well")), responses(
    (status = 201, description = "It is there", body = VolumeEntryStat),
    (status = "4XX", description = "Refused", body = ContentError),
    (status = "5XX", description = "Failed", body = ContentError)))]
async fn make_dir(
    State(state): State<ApiState>,
    holder: Holder,
    RawQuery(query): RawQuery,
) -> Result<(StatusCode, axum::Json<VolumeEntryStat>), Failure> {
    let query = Query::parse(query.as_deref())?;
    let (path, access, force) = (path_of(&query)?, access_of(&query)?, force_of(&query)?);
    let made = stat_of(holder.ask(&state, Ask::MakeDir { path, access, force }).await?)?;
    Ok((StatusCode::CREATED, made))
}

#[utoipa::path(get, path = "/volumecontent/{id}/file", tag = "e2b", security(("VolumeToken" = [])), params(("id" = String, Path),
    ("path" = String, Query)), responses(
    (status = 200, description = "The file", content_type = "application/octet-stream"),
    (status = "4XX", description = "Refused", body = ContentError),
    (status = "5XX", description = "Failed", body = ContentError)))]
async fn read(
    State(state): State<ApiState>,
    holder: Holder,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    let query = Query::parse(query.as_deref())?;
    let path = path_of(&query)?;
    let mut talk = holder.open(&state).await?;
    let size = match talk.ask(&Ask::Read { path }).await? {
        Said::File { size } => size,
        other => return Err(otherwise(other)),
    };
    // One that got shorter meanwhile has no good end.
    let pieces = futures_util::stream::try_unfold((talk, size), async |(mut talk, left)| {
        let piece = talk.read_file(left).await?;
        let left = left.saturating_sub(u64::try_from(piece.len()).unwrap_or(u64::MAX));
        Ok::<_, std::io::Error>((!piece.is_empty()).then(|| (Bytes::from(piece), (talk, left))))
    });
    let headers = [(CONTENT_TYPE, "application/octet-stream".to_owned()), (CONTENT_LENGTH, size.to_string())];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

#[utoipa::path(put, path = "/volumecontent/{id}/file", tag = "e2b", security(("VolumeToken" = [])), params(("id" = String, Path),
    ("path" = String, Query), ("uid" = Option<u32>, Query), ("gid" = Option<u32>, Query),
    ("mode" = Option<u32>, Query), ("force" = Option<bool>, Query, description = "make folders above it as well")),
    request_body(content = String, content_type = "application/octet-stream"), responses(
    (status = 201, description = "It is there as a whole", body = VolumeEntryStat),
    (status = "4XX", description = "Refused; what was there is there", body = ContentError),
    (status = "5XX", description = "Failed; what was there is there", body = ContentError)))]
async fn write(
    State(state): State<ApiState>,
    holder: Holder,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<(StatusCode, axum::Json<VolumeEntryStat>), Failure> {
    let query = Query::parse(query.as_deref())?;
    let (path, access, force) = (path_of(&query)?, access_of(&query)?, force_of(&query)?);
    let mut talk = holder.open(&state).await?;
    match talk.ask(&Ask::Write { path, access, force }).await? {
        Said::GoOn => {}
        other => return Err(otherwise(other)),
    }
    let mut body = request.into_body();
    loop {
        let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the file took too long");
        let Some(frame) = timeout(PIECE_PATIENCE, body.frame()).await.map_err(late)? else { break };
        // Without its end, nothing of it is kept.
        let frame = frame.map_err(|_| ApiError::invalid("the request body ended early"))?;
        let Some(piece) = frame.data_ref().filter(|piece| !piece.is_empty()) else { continue };
        if let Err(error) = talk.send_file(piece).await {
            // It may have said why it takes no more.
            return Err(talk.answer().await.map_or_else(|_| error.into(), otherwise));
        }
    }
    let said = match talk.send_file(&[]).await {
        Ok(()) => talk.answer().await?,
        Err(error) => return Err(talk.answer().await.map_or_else(|_| error.into(), otherwise)),
    };
    Ok((StatusCode::CREATED, stat_of(said)?))
}
