//! What sandboxes used.

use std::collections::BTreeMap;

use axum::extract::{RawQuery, State};
use sandglass_store::Sample;
use sandglass_types::{Limits, Timestamp};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::routes::{Named, sandbox_id};
use super::wire::rfc3339;
use crate::auth::Caller;
use crate::error::{ApiError, ErrorBody};
use crate::query::Query;
use crate::router::ApiState;

/// Most sandboxes of one question.
const MAX_ASKED: usize = 100;

/// What an end of a window is.
const SECONDS: &str = "a number of seconds since 1970";

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(sandbox_metrics)).routes(routes!(last_metrics_of_sandboxes))
}

/// What a sandbox used at one time.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SandboxMetric {
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    timestamp: Timestamp,
    /// The same, in whole seconds since 1970.
    timestamp_unix: i64,
    /// Its cores.
    cpu_count: u32,
    /// Of all of them together, since the sample before.
    cpu_used_pct: f32,
    /// Memory in use, in bytes, that of the engine included.
    mem_used: u64,
    /// What there may be, in bytes.
    mem_total: u64,
    /// Always 0: what is cached can't be told from what is used, seen from outside.
    mem_cache: u64,
    /// Bytes of its disk that hold data, or did.
    disk_used: u64,
    /// The size of its disk, in bytes.
    disk_total: u64,
}

impl SandboxMetric {
    fn new(limits: Limits, sample: &Sample) -> Self {
        let mib = |count: u32| u64::from(count) << 20;
        Self {
            timestamp: sample.at,
            timestamp_unix: sample.at.as_millis().div_euclid(1000),
            cpu_count: limits.cpus(),
            cpu_used_pct: f32::from(sample.cpu_per_mille) / 10.0,
            // What the engine needs comes on top of what the sandbox may use.
            mem_used: sample.memory_bytes.min(mib(limits.memory_mib())),
            mem_total: mib(limits.memory_mib()),
            mem_cache: 0,
            disk_used: sample.disk_bytes.min(mib(limits.disk_mib())),
            disk_total: mib(limits.disk_mib()),
        }
    }
}

/// The last samples of several sandboxes.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxesMetrics {
    /// By id; those that are not there, or have none yet, are missing.
    sandboxes: BTreeMap<String, SandboxMetric>,
}

/// Reads `start` and `end`, in whole seconds, both included.
///
/// # Errors
/// 400 that names the parameter.
pub(crate) fn window(query: &Query) -> Result<(Option<Timestamp>, Option<Timestamp>), ApiError> {
    let (start, end) = (query.number("start", SECONDS)?, query.number("end", SECONDS)?);
    if let (Some(start), Some(end)) = (start, end)
        && start > end
    {
        return Err(ApiError::invalid("start must not be after end"));
    }
    let from = start.map(|start| Timestamp::from_millis(start.saturating_mul(1000)));
    let to = end.map(|end| Timestamp::from_millis(end.saturating_mul(1000).saturating_add(999)));
    Ok((from, to))
}

#[utoipa::path(get, path = "/sandboxes/{id}/metrics", tag = "e2b", params(("id" = String, Path),
    ("start" = Option<i64>, Query, description = "Seconds since 1970; the first sample if absent"),
    ("end" = Option<i64>, Query, description = "Seconds since 1970, that second included; now if absent")),
    responses(
    (status = 200, description = "What it used: every 5 s in the last hour, every minute in the last day; oldest first",
     body = [SandboxMetric]),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn sandbox_metrics(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<Vec<SandboxMetric>>, ApiError> {
    let (from, to) = window(&Query::parse(query.as_deref())?)?;
    let (limits, samples) = state.backend.samples(caller.0, &id, from, to).await?;
    Ok(axum::Json(samples.iter().map(|sample| SandboxMetric::new(limits, sample)).collect()))
}

#[utoipa::path(get, path = "/sandboxes/metrics", tag = "e2b", params(
    ("sandbox_ids" = String, Query, description = "At most 100, joined by commas")), responses(
    (status = 200, description = "What each of them used last", body = SandboxesMetrics),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn last_metrics_of_sandboxes(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<SandboxesMetrics>, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let asked: Vec<&str> = query.many("sandbox_ids").collect();
    if asked.is_empty() || asked.len() > MAX_ASKED {
        return Err(ApiError::invalid(format!("sandbox_ids must name 1 to {MAX_ASKED} sandboxes")));
    }
    // One that could be no sandbox of this server's is as one that is not there.
    let ids: Vec<_> = asked.into_iter().filter_map(|text| sandbox_id(text).ok()).collect();
    let found = state.backend.last_samples(caller.0, &ids).await?;
    let metric = |(limits, sample): (Limits, Sample)| {
        (sample.sandbox.to_string(), SandboxMetric::new(limits, &sample))
    };
    Ok(axum::Json(SandboxesMetrics { sandboxes: found.into_iter().map(metric).collect() }))
}
