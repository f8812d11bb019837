//! Handlers: parse, call, render.

use std::time::Duration;

use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sandglass_egress::policy::Network;
use sandglass_engine::engine::Feature;
use sandglass_store::{IdempotencyKey, ListFilter, MadeFrom, Order, SandboxRow, StartPath};
use sandglass_types::{PauseMode, ResumeMode, SandboxId, SandboxState, TeamId};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::create::{Face, NewSandbox, ingress, policy, positive_seconds};
use super::list;
use super::wire::{ListedSandbox, Sandbox, SandboxDetail};
use crate::audit::Made;
use crate::auth::Caller;
use crate::backend::Backend;
use crate::body::{Json, Object, OptionalJson, Seconds};
use crate::error::{ApiError, ErrorBody};
use crate::page;
use crate::query::{Query, metadata_filter};
use crate::router::ApiState;

/// Says what was accepted and has less effect than its author may think.
pub(crate) const WARNING: HeaderName = HeaderName::from_static("x-sandglass-warning");

/// How a new sandbox came to be: `template`, started cold, or `snapshot`.
pub(crate) const ORIGIN: HeaderName = HeaderName::from_static("sandglass-origin");

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// How long a connect extends a sandbox's life if the client does not say, in seconds.
const DEFAULT_CONNECT: Seconds = Seconds(300);

/// How long a refresh extends it if the client does not say, in seconds.
const DEFAULT_REFRESH: Seconds = Seconds(15);

/// How long a resumed sandbox lives if the client does not say, in seconds.
const DEFAULT_RESUME: Seconds = Seconds(15);

/// Longest extension of one refresh, in seconds.
const MAX_REFRESH: i64 = 3600;

/// Most warnings in a header; clients bound what they read of one.
const MAX_WARNINGS: usize = 5;

/// Most pages that the list without paging collects.
const MAX_UNPAGED: usize = 100;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(create_v2))
        .routes(routes!(create_v1))
        .routes(routes!(list_v2))
        .routes(routes!(list_v1))
        .routes(routes!(get_sandbox, delete_sandbox))
        .routes(routes!(set_timeout))
        .routes(routes!(set_network))
        .routes(routes!(refresh))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(connect_v2))
        .routes(routes!(connect_v1))
        .routes(routes!(health))
}

/// The sandbox that a path names.
#[derive(Debug)]
pub(crate) struct Named(pub(crate) SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        // What can't be decoded is refused here, or it would be in words of the framework's.
        let text = Path::<String>::from_request_parts(parts, state).await.map_err(|_| no_id())?;
        let id = sandbox_id(&text)?;
        tracing::Span::current().record("sandbox", tracing::field::display(&id));
        Ok(Self(id))
    }
}

fn no_id() -> ApiError {
    ApiError::invalid("Invalid sandbox ID")
}

/// Reads an id from a path: old clients append `-` and a client id. Text that could be an id of some server but
/// not of this one names nothing.
pub(crate) fn sandbox_id(text: &str) -> Result<SandboxId, ApiError> {
    let id = text.split('-').next().unwrap_or("");
    if id.is_empty() || !id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) {
        return Err(no_id());
    }
    id.parse().map_err(|_| {
        let shown: String = id.chars().take(64).collect();
        ApiError::new(StatusCode::NOT_FOUND, format!("sandbox '{shown}' not found"))
    })
}

/// The key under which a request is made once, if it has one.
///
/// # Errors
/// 400 for two of them, or one that can't be.
pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<IdempotencyKey>, ApiError> {
    let mut keys = headers.get_all(IDEMPOTENCY_KEY).iter();
    match (keys.next(), keys.next()) {
        (None, _) => Ok(None),
        (Some(key), None) => {
            let key = key.to_str().unwrap_or("").parse();
            key.map(Some)
                .map_err(|error| ApiError::invalid(format!("invalid Idempotency-Key header: {error}")))
        }
        (Some(_), Some(_)) => Err(ApiError::invalid("more than one Idempotency-Key header")),
    }
}

async fn create(
    state: ApiState,
    team: TeamId,
    headers: &HeaderMap,
    body: NewSandbox,
    face: Face,
) -> Result<Response, ApiError> {
    let request = body.accept(face)?;
    let idempotency = idempotency_key(headers)?.map(|key| (key, request.digest()));
    let row = state.backend.create(team, request.into_request(idempotency)).await?;
    let made = Made::sandboxes([&row.id]);
    let warning = warning(&*state.backend, &row);
    let origin = origin(&row);
    let sandbox = Sandbox::new(row, state.backend.domain());
    let mut response = (StatusCode::CREATED, [(ORIGIN, origin)], axum::Json(sandbox)).into_response();
    response.headers_mut().extend(warning);
    response.extensions_mut().insert(made);
    Ok(response)
}

/// What a sandbox was made from, and which way it came to run where there is more than one.
fn origin(row: &SandboxRow) -> HeaderValue {
    match (&row.made_from, row.start_path) {
        (MadeFrom::Template, StartPath::Cold) => HeaderValue::from_static("template; path=cold"),
        (MadeFrom::Template, StartPath::Restore) => HeaderValue::from_static("template; path=restore"),
        (MadeFrom::Template, StartPath::Pool) => HeaderValue::from_static("template; path=pool"),
        (made_from, _) => HeaderValue::from_static(made_from.origin()),
    }
}

/// The header that says what the author of a sandbox's policy should know, if there is something.
pub(crate) fn warning(backend: &dyn Backend, row: &SandboxRow) -> Option<(HeaderName, HeaderValue)> {
    let mut warnings = warnings(backend, row);
    let more = warnings.len().saturating_sub(MAX_WARNINGS);
    warnings.truncate(MAX_WARNINGS);
    if more > 0 {
        warnings.push(format!("{more} more in GET /v1/sandboxes/{}", row.id));
    }
    if warnings.is_empty() {
        return None;
    }
    // Labels of rules and our own words: no byte of them is one that a header can't have.
    HeaderValue::try_from(warnings.join("; ")).ok().map(|text| (WARNING, text))
}

/// What the author of a sandbox's policy should know.
pub(crate) fn warnings(backend: &dyn Backend, row: &SandboxRow) -> Vec<String> {
    if backend.engine().refuses(Feature::Airlock) {
        return vec![
            "sandboxes of this engine have the network of the machine: no policy is enforced".into(),
        ];
    }
    match backend.effective(row) {
        Ok((_, warnings)) => warnings.iter().map(ToString::to_string).collect(),
        Err(error) => vec![format!("it is sealed, because its policy can't be enforced: {error}")],
    }
}

#[utoipa::path(post, path = "/v2/sandboxes", tag = "e2b", request_body = NewSandbox, responses(
    (status = 201, description = "Created; its guest API answers", body = Sandbox,
     headers(("sandglass-origin" = String, description = "`template; path=cold`, \
     `template; path=restore` if from an image of a running state, `template; path=pool` if that was done before \
     anybody asked, or `snapshot`"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn create_v2(
    State(state): State<ApiState>,
    caller: Caller,
    headers: HeaderMap,
    Json(body): Json<NewSandbox>,
) -> Result<Response, ApiError> {
    create(state, caller.0, &headers, body, Face::V2).await
}

#[utoipa::path(post, path = "/sandboxes", tag = "e2b", request_body = NewSandbox, responses(
    (status = 201, description = "Created; its guest API answers", body = Sandbox,
     headers(("sandglass-origin" = String, description = "`template; path=cold`, \
     `template; path=restore` if from an image of a running state, `template; path=pool` if that was done before \
     anybody asked, or `snapshot`"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn create_v1(
    State(state): State<ApiState>,
    caller: Caller,
    headers: HeaderMap,
    Json(body): Json<NewSandbox>,
) -> Result<Response, ApiError> {
    create(state, caller.0, &headers, body, Face::V1).await
}

#[utoipa::path(get, path = "/v2/sandboxes", tag = "e2b", params(
    ("metadata" = Option<String>, Query, description = "key=value pairs joined by &, URL-encoded"),
    ("state" = Option<String>, Query, description = "running, paused, or both joined by a comma"),
    ("order" = Option<String>, Query, description = "asc or desc (default) by time of creation"),
    ("startedAfter" = Option<String>, Query, description = "RFC 3339, inclusive"),
    ("template" = Option<String>, Query, description = "name of a template"),
    ("limit" = Option<u32>, Query, description = "1 to 100 (default)"),
    ("nextToken" = Option<String>, Query, description = "x-next-token of the page before")), responses(
    (status = 200, description = "One page", body = Vec<ListedSandbox>,
     headers(("x-next-token" = String, description = "if there are more"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_v2(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let filter = list::filter(caller.0, &Query::parse(query.as_deref())?)?;
    let order = filter.order;
    let page = state.backend.list(filter).await?;
    let rows: Vec<ListedSandbox> = page.rows.into_iter().map(Into::into).collect();
    Ok(page::answer(&rows, page.next.as_ref(), order))
}

#[utoipa::path(get, path = "/sandboxes", tag = "e2b", params(
    ("metadata" = Option<String>, Query, description = "key=value pairs joined by &, URL-encoded")), responses(
    (status = 200, description = "All running sandboxes", body = Vec<ListedSandbox>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_v1(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<Vec<ListedSandbox>>, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let mut filter = ListFilter {
        team: caller.0,
        states: vec![SandboxState::Running, SandboxState::Pausing],
        metadata: metadata_filter(query.one("metadata"))?,
        template: None,
        created_from: None,
        order: Order::Descending,
        after: None,
        limit: list::MAX_PAGE,
    };
    let mut all = Vec::new();
    for _ in 0..MAX_UNPAGED {
        let page = state.backend.list(filter.clone()).await?;
        all.extend(page.rows.into_iter().map(ListedSandbox::from));
        match page.next {
            Some(cursor) => filter.after = Some(cursor),
            None => break,
        }
    }
    Ok(axum::Json(all))
}

#[utoipa::path(get, path = "/sandboxes/{id}", tag = "e2b", params(("id" = String, Path)), responses(
    (status = 200, description = "The sandbox", body = SandboxDetail),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_sandbox(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
) -> Result<axum::Json<SandboxDetail>, ApiError> {
    let row = state.backend.standing(caller.0, &id).await?;
    Ok(axum::Json(SandboxDetail::new(row, state.backend.domain())))
}

#[utoipa::path(delete, path = "/sandboxes/{id}", tag = "e2b", params(("id" = String, Path)), responses(
    (status = 204, description = "It is gone"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn delete_sandbox(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
) -> Result<StatusCode, ApiError> {
    state.backend.kill(caller.0, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The body of `PUT /sandboxes/{id}/network`: all that is asked for from now on. What is left out is cleared.
///
/// Field by field those of [`Network`]: flattened, errors would not name them.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SetNetwork {
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    allow_public_traffic: Option<bool>,
    mask_request_host: Option<String>,
    dns_servers: Option<Value>,
    egress_proxy: Option<Value>,
    https_ports: Option<Value>,
    rules: Option<Value>,
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
}

impl From<SetNetwork> for Network {
    fn from(body: SetNetwork) -> Self {
        Self {
            allow_out: body.allow_out,
            deny_out: body.deny_out,
            allow_public_traffic: body.allow_public_traffic,
            mask_request_host: body.mask_request_host,
            dns_servers: body.dns_servers,
            egress_proxy: body.egress_proxy,
            https_ports: body.https_ports,
            rules: body.rules,
        }
    }
}

/// How ports are reached is decided at creation. To say it again is no mistake; to say something else would go unheard.
fn refuse_change(network: &Network, row: &SandboxRow) -> Result<(), ApiError> {
    let asked = ingress(network)?;
    let fixed =
        |field| ApiError::invalid(format!("network.{field} can only be set when a sandbox is created"));
    if network.allow_public_traffic.is_some() && asked.public != row.traffic_token.is_none() {
        return Err(fixed("allowPublicTraffic"));
    }
    if asked.request_host.is_some() && asked.request_host != row.request_host {
        return Err(fixed("maskRequestHost"));
    }
    Ok(())
}

#[utoipa::path(put, path = "/sandboxes/{id}/network", tag = "e2b", params(("id" = String, Path)),
    request_body(content = Object, description = "`allowOut`, `denyOut` and `allow_internet_access`, as at creation"),
    responses(
    (status = 204, description = "In force; connections that are not allowed any more are cut",
     headers(("x-sandglass-warning" = String, description = "if there is something to know about it"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn set_network(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    Json(Object(body)): Json<Object<SetNetwork>>,
) -> Result<Response, ApiError> {
    let (internet, network) = (body.allow_internet_access, Network::from(body));
    let policy = policy(&network, internet)?;
    let backend = &state.backend;
    refuse_change(&network, &backend.sandbox(caller.0, &id).await?)?;
    backend.set_policy(caller.0, &id, policy, internet).await?;
    let row = backend.sandbox(caller.0, &id).await?;
    let mut response = StatusCode::NO_CONTENT.into_response();
    response.headers_mut().extend(warning(&**backend, &row));
    Ok(response)
}

/// The body of `POST /sandboxes/{id}/timeout`.
#[derive(Debug, Deserialize, ToSchema)]
struct SetTimeout {
    /// Seconds from now; with 0 its time is up now.
    #[schema(value_type = i64)]
    timeout: Seconds,
}

/// Seconds that may be zero.
fn duration(Seconds(seconds): Seconds) -> Result<Duration, ApiError> {
    u64::try_from(seconds)
        .map(Duration::from_secs)
        .map_err(|_| ApiError::invalid("timeout must not be negative"))
}

#[utoipa::path(post, path = "/sandboxes/{id}/timeout", tag = "e2b", params(("id" = String, Path)),
    request_body = SetTimeout, responses(
    (status = 204, description = "Set; it may be sooner than before"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn set_timeout(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    Json(body): Json<SetTimeout>,
) -> Result<StatusCode, ApiError> {
    state.backend.set_timeout(caller.0, &id, duration(body.timeout)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The body of `POST /sandboxes/{id}/refreshes`.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct Refresh {
    /// Seconds from now, 0 to 3600; 15 if absent.
    #[schema(value_type = Option<i64>)]
    duration: Option<Seconds>,
}

#[utoipa::path(post, path = "/sandboxes/{id}/refreshes", tag = "e2b", params(("id" = String, Path)),
    request_body = Refresh, responses(
    (status = 204, description = "Extended; never shortened"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn refresh(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    OptionalJson(body): OptionalJson<Refresh>,
) -> Result<StatusCode, ApiError> {
    let seconds = body.duration.unwrap_or(DEFAULT_REFRESH);
    if !(0..=MAX_REFRESH).contains(&seconds.0) {
        return Err(ApiError::invalid("duration must be 0 to 3600 seconds"));
    }
    state.backend.extend(caller.0, &id, duration(seconds)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The body of connect.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct Connect {
    /// Seconds from now; v2 takes 300 if absent, v1 wants it.
    #[schema(value_type = Option<i64>)]
    timeout: Option<Seconds>,
    /// `false` gives up the memory of a paused sandbox, and starts it anew from its disk.
    memory: Option<bool>,
}

/// How a paused sandbox shall be made to run again.
const fn resume_mode(memory: Option<bool>) -> ResumeMode {
    match memory {
        Some(false) => ResumeMode::Reboot,
        Some(true) | None => ResumeMode::Restore,
    }
}

async fn connect(
    state: ApiState,
    team: TeamId,
    id: &SandboxId,
    timeout: Seconds,
    mode: ResumeMode,
) -> Result<(StatusCode, axum::Json<Sandbox>), ApiError> {
    let (row, resumed) = state.backend.connect(team, id, positive_seconds(timeout)?, mode).await?;
    let status = if resumed { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, axum::Json(Sandbox::new(row, state.backend.domain()))))
}

/// The body of `POST /sandboxes/{id}/pause`.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct Pause {
    /// Whether its memory and its processes are kept, which is so if absent, or its files alone.
    memory: Option<bool>,
}

#[utoipa::path(post, path = "/sandboxes/{id}/pause", tag = "e2b", params(("id" = String, Path)),
    request_body = Pause, responses(
    (status = 204, description = "It is paused: memory, processes and files are kept, or its files alone, and it uses no CPU and no memory"),
    (status = "4XX", description = "Refused; it is as it was", body = ErrorBody),
    (status = "5XX", description = "Failed; it is as it was", body = ErrorBody)))]
async fn pause(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    OptionalJson(body): OptionalJson<Pause>,
) -> Result<StatusCode, ApiError> {
    let mode = if body.memory == Some(false) { PauseMode::Filesystem } else { PauseMode::Full };
    state.backend.pause(caller.0, &id, mode).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The body of `POST /sandboxes/{id}/resume`.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct ResumeSandbox {
    /// Seconds from now; 15 if absent.
    #[schema(value_type = Option<i64>)]
    timeout: Option<Seconds>,
    /// `false` gives up its memory, and starts it anew from its disk.
    memory: Option<bool>,
}

#[utoipa::path(post, path = "/sandboxes/{id}/resume", tag = "e2b", params(("id" = String, Path)),
    request_body = ResumeSandbox, responses(
    (status = 201, description = "It runs again, from where it was", body = Sandbox),
    (status = "4XX", description = "Refused; it is as it was", body = ErrorBody),
    (status = "5XX", description = "Failed; it is paused as before", body = ErrorBody)))]
async fn resume(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    OptionalJson(body): OptionalJson<ResumeSandbox>,
) -> Result<(StatusCode, axum::Json<Sandbox>), ApiError> {
    let timeout = positive_seconds(body.timeout.unwrap_or(DEFAULT_RESUME))?;
    let row = state.backend.resume(caller.0, &id, timeout, resume_mode(body.memory)).await?;
    Ok((StatusCode::CREATED, axum::Json(Sandbox::new(row, state.backend.domain()))))
}

#[utoipa::path(post, path = "/v2/sandboxes/{id}/connect", tag = "e2b", params(("id" = String, Path)),
    request_body = Connect, responses(
    (status = 200, description = "It runs; its end is never brought forward", body = Sandbox),
    (status = 201, description = "It was paused, and runs again", body = Sandbox),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn connect_v2(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    OptionalJson(body): OptionalJson<Connect>,
) -> Result<(StatusCode, axum::Json<Sandbox>), ApiError> {
    let timeout = body.timeout.unwrap_or(DEFAULT_CONNECT);
    connect(state, caller.0, &id, timeout, resume_mode(body.memory)).await
}

#[utoipa::path(post, path = "/sandboxes/{id}/connect", tag = "e2b", params(("id" = String, Path)),
    request_body = Connect, responses(
    (status = 200, description = "It runs; its end is never brought forward", body = Sandbox),
    (status = 201, description = "It was paused, and runs again", body = Sandbox),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn connect_v1(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    Json(body): Json<Connect>,
) -> Result<(StatusCode, axum::Json<Sandbox>), ApiError> {
    let timeout = body.timeout.ok_or_else(|| ApiError::invalid("timeout is missing"))?;
    connect(state, caller.0, &id, timeout, resume_mode(body.memory)).await
}

#[utoipa::path(get, path = "/health", tag = "e2b", security(()), responses(
    (status = 204, description = "Ready: the listener opens only when the server is")))]
async fn health() -> StatusCode {
    StatusCode::NO_CONTENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_in_paths() {
        let status = |text: &str| match sandbox_id(text) {
            Ok(id) => id.to_string(),
            Err(error) => error.into_response().status().as_str().to_owned(),
        };
        assert_eq!(status("abcdefghij0123456789"), "abcdefghij0123456789");
        assert_eq!(status("abcdefghij0123456789-6532622b-x"), "abcdefghij0123456789");
        assert_eq!(status("nonexistent"), "404");
        assert_eq!(status("non-existing"), "404");
        for text in ["", "-", "ABC", "..", "a_b", "é", "a b", "-abcdefghij0123456789"] {
            assert_eq!(status(text), "400", "{text:?}");
        }
    }
}
