//! The native face: what E2B has no word for. Answers say which engine isolates, and how.

use std::collections::{BTreeMap, BTreeSet};

use axum::extract::{RawQuery, State};
use axum::response::Response;
use sandglass_egress::policy::Policy;
use sandglass_engine::EngineInfo;
use sandglass_engine::engine::{Feature, Isolation};
use sandglass_store::{Event, MadeFrom, SandboxRow};
use sandglass_types::limits::Unchecked;
use sandglass_types::{EndReason, OnTimeout, PauseMode, SandboxId, SandboxState};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::Caller;
use crate::backend::Backend;
use crate::e2b::list;
use crate::e2b::routes::{Named, warnings};
use crate::e2b::wire::pause_mode;
use crate::error::{ApiError, ErrorBody};
use crate::page;
use crate::query::Query;
use crate::router::ApiState;

mod archive;
mod assignments;
mod connections;
mod disk;
mod egress;
mod models;
mod ports;
pub(crate) mod runs;
mod snapshots;
mod templates;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(info))
        .routes(routes!(list_native))
        .routes(routes!(get_native))
        .merge(archive::router())
        .merge(assignments::router())
        .merge(connections::router())
        .merge(egress::router())
        .merge(models::router())
        .merge(ports::router())
        .merge(runs::router())
        .merge(snapshots::router())
        .merge(templates::router())
}

/// What isolates the sandboxes of this server.
#[derive(Debug, Serialize, ToSchema)]
struct EngineView {
    name: String,
    version: String,
    /// `userspace_kernel`, `virtual_machine` or `none`.
    #[schema(value_type = String)]
    isolation: Isolation,
    /// What it does not do: any of `checkpoint`, `prepare_restore`, `airlock`, `cpu_limit`, `memory_limit`, `disk_limit`,
    /// `process_limit`, `own_files`.
    #[schema(value_type = Vec<String>)]
    refuses: BTreeSet<Feature>,
}

impl From<&EngineInfo> for EngineView {
    fn from(info: &EngineInfo) -> Self {
        Self {
            name: info.name.clone(),
            version: info.version.clone(),
            isolation: info.isolation,
            refuses: info.refuses.clone(),
        }
    }
}

/// The server itself.
#[derive(Debug, Serialize, ToSchema)]
struct ServerInfo {
    version: &'static str,
    engine: EngineView,
}

/// Hard limits of one sandbox.
#[derive(Debug, Serialize, ToSchema)]
struct LimitsView {
    cpus: u32,
    memory_mib: u32,
    disk_mib: u32,
    processes: u32,
}

/// One sandbox.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxView {
    #[schema(value_type = String)]
    id: SandboxId,
    template: String,
    /// Content of its root file system.
    rootfs: String,
    /// `creating`, `running`, `pausing`, `paused`, `resuming`, `ending` or `ended`.
    #[schema(value_type = String)]
    state: SandboxState,
    /// Counts restores; 1 for a cold start, and for a copy one more than what it was made from had.
    generation: u32,
    /// `template`, `snapshot` or `fork`.
    origin: &'static str,
    /// Which way it came to run: `cold`, `restore` from an image of a running state, or `pool` if that was done before
    /// anybody asked.
    start_path: &'static str,
    /// The template, snapshot or sandbox that it was made from, which may be gone by now.
    made_from: String,
    engine: String,
    #[schema(value_type = String)]
    isolation: Isolation,
    limits: LimitsView,
    /// Whether its guest API wants an access token.
    secured: bool,
    /// `sealed` if nothing leaves, `policy` if what both the sandbox's policy and the operator's ceiling allow does. Or
    /// `machine`, if the engine refuses `airlock`.
    network: &'static str,
    metadata: BTreeMap<String, String>,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    end_at: String,
    /// The latest end that an extension can reach.
    #[schema(format = DateTime)]
    max_end_at: String,
    /// How long it lives from its creation, in seconds, and from each time that a request makes it run again.
    timeout: u64,
    /// What happens when its time is up: `kill`, `pause`, or `pause_filesystem`, which keeps its files alone.
    on_timeout: &'static str,
    /// The same happens when nobody has used it for so long, in seconds; `null` is never.
    idle_timeout: Option<u64>,
    /// Whether a request to one of its ports makes it run again when it is paused.
    auto_resume: bool,
    /// `full` if a paused sandbox has its memory, `filesystem` if it has its files alone; `null` if it is not paused.
    #[schema(value_type = Option<String>)]
    pause_mode: Option<PauseMode>,
    #[schema(value_type = Option<String>)]
    end_reason: Option<EndReason>,
}

impl SandboxView {
    fn new(row: SandboxRow, backend: &dyn Backend) -> Self {
        let engine = backend.engine();
        let network = match backend.effective(&row) {
            _ if engine.refuses(Feature::Airlock) => "machine",
            Ok((policy, _)) if !policy.is_sealed() => "policy",
            Ok(_) | Err(_) => "sealed",
        };
        let Unchecked { cpus, memory_mib, disk_mib, processes } = row.limits.into();
        let made_from = match &row.made_from {
            MadeFrom::Template => row.template.clone(),
            MadeFrom::Snapshot(id) => id.to_string(),
            MadeFrom::Fork(id) => id.to_string(),
        };
        Self {
            timeout: row.lifetime.timeout.as_secs(),
            on_timeout: match row.lifetime.on_timeout {
                OnTimeout::Kill => "kill",
                OnTimeout::Pause { .. } => "pause",
                OnTimeout::PauseFilesystem => "pause_filesystem",
            },
            idle_timeout: row.lifetime.idle.map(|idle| idle.as_secs()),
            auto_resume: row.lifetime.on_timeout.auto_resumes(),
            pause_mode: pause_mode(&row),
            origin: row.made_from.origin(),
            start_path: row.start_path.as_str(),
            made_from,
            id: row.id,
            template: row.template,
            rootfs: row.rootfs.to_string(),
            state: row.state,
            generation: row.generation.0,
            engine: engine.name.clone(),
            isolation: engine.isolation,
            limits: LimitsView { cpus, memory_mib, disk_mib, processes },
            secured: row.access_token.is_some(),
            network,
            metadata: row.metadata,
            created_at: row.created_at.to_string(),
            end_at: row.end_at.to_string(),
            max_end_at: row.max_end_at.to_string(),
            end_reason: row.end_reason,
        }
    }
}

/// One line of a sandbox's history.
#[derive(Debug, Serialize, ToSchema)]
struct EventView {
    seq: u32,
    #[schema(format = DateTime)]
    at: String,
    #[schema(value_type = String)]
    state: SandboxState,
    #[schema(value_type = Option<String>)]
    end_reason: Option<EndReason>,
    detail: String,
}

impl From<Event> for EventView {
    fn from(event: Event) -> Self {
        let Event { seq, at, state, end_reason, detail } = event;
        Self { seq, at: at.to_string(), state, end_reason, detail }
    }
}

/// What a sandbox uses now.
#[derive(Debug, Serialize, ToSchema)]
struct UsageView {
    cpu_micros: u64,
    memory_bytes: u64,
    memory_peak_bytes: u64,
    processes: u64,
    disk_bytes: u64,
}

/// One sandbox in full.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxDetailView {
    #[serde(flatten)]
    sandbox: SandboxView,
    /// What it asks to reach, rule by rule.
    #[schema(value_type = Object)]
    policy: Policy,
    /// What the author of the policy should know.
    warnings: Vec<String>,
    /// `null` if it could not be measured.
    usage: Option<UsageView>,
    /// For how many seconds nobody has used it, if it runs: no request or connection was open, and no command ran. It counts
    /// from when this server took it up. If it is paused, for how long it is; otherwise, and if it does not say, `null`.
    unused_for: Option<u64>,
    /// What its disk, or its image if it is paused, takes together with all its snapshots, in bytes: blocks that they share
    /// are counted once. `null` if that could not be measured.
    tree_bytes: Option<u64>,
    events: Vec<EventView>,
}

#[utoipa::path(get, path = "/v1/info", tag = "native", responses(
    (status = 200, description = "The server", body = ServerInfo),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn info(State(state): State<ApiState>, _: Caller) -> axum::Json<ServerInfo> {
    axum::Json(ServerInfo { version: env!("CARGO_PKG_VERSION"), engine: state.backend.engine().into() })
}

#[utoipa::path(get, path = "/v1/sandboxes", tag = "native", params(
    ("metadata" = Option<String>, Query, description = "key=value pairs joined by &, URL-encoded"),
    ("order" = Option<String>, Query, description = "asc or desc (default) by time of creation"),
    ("template" = Option<String>, Query, description = "name of a template"),
    ("limit" = Option<u32>, Query, description = "1 to 100 (default)"),
    ("nextToken" = Option<String>, Query, description = "x-next-token of the page before")), responses(
    (status = 200, description = "One page of running sandboxes", body = Vec<SandboxView>,
     headers(("x-next-token" = String, description = "if there are more"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_native(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let filter = list::filter(caller.0, &Query::parse(query.as_deref())?)?;
    let order = filter.order;
    let page = state.backend.list(filter).await?;
    let view = |row| SandboxView::new(row, &*state.backend);
    let rows: Vec<SandboxView> = page.rows.into_iter().map(view).collect();
    Ok(page::answer(&rows, page.next.as_ref(), order))
}

#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "native", params(("id" = String, Path)), responses(
    (status = 200, description = "The sandbox", body = SandboxDetailView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_native(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
) -> Result<axum::Json<SandboxDetailView>, ApiError> {
    let row = state.backend.record(caller.0, &id).await?;
    let events = state.backend.events(caller.0, &id).await?;
    let usage = state.backend.stats(caller.0, &id).await.ok().map(|stats| UsageView {
        cpu_micros: stats.cpu_micros,
        memory_bytes: stats.memory_bytes,
        memory_peak_bytes: stats.memory_peak_bytes,
        processes: stats.processes,
        disk_bytes: stats.disk_bytes,
    });
    let unused = state.backend.unused(caller.0, &id).await?;
    let tree_bytes = disk::measured(state.backend.tree_of_sandbox(caller.0, &id).await);
    Ok(axum::Json(SandboxDetailView {
        unused_for: unused.map(|unused| unused.as_secs()),
        policy: row.policy.clone(),
        warnings: warnings(&*state.backend, &row),
        sandbox: SandboxView::new(row, &*state.backend),
        usage,
        tree_bytes,
        events: events.into_iter().map(Into::into).collect(),
    }))
}
