//! Snapshots, with all that is known of them.

use std::collections::BTreeMap;

use axum::extract::{RawQuery, State};
use axum::response::Response;
use http::StatusCode;
use sandglass_store::{Order, SnapshotRow};
use sandglass_types::limits::Unchecked;
use sandglass_types::reference::DEFAULT_TAG;
use sandglass_types::{SandboxId, SnapshotId};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::LimitsView;
use super::disk::{self, DiskView};
use crate::auth::{Caller, Operator};
use crate::e2b::snapshots::{Meant, wanted};
use crate::error::{ApiError, ErrorBody};
use crate::page;
use crate::query::Query;
use crate::router::ApiState;

pub(super) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_snapshots_native)).routes(routes!(get_snapshot, delete_snapshot))
}

/// One snapshot.
#[derive(Debug, Serialize, ToSchema)]
struct SnapshotView {
    #[schema(value_type = String)]
    id: SnapshotId,
    /// Its whole name; `null` if it never had one, or a newer snapshot has it.
    name: Option<String>,
    /// The template of the sandbox that it is of.
    template: String,
    /// Content of its root file system.
    rootfs: String,
    /// Of all sandboxes that are made from it.
    limits: LimitsView,
    /// The sandbox that it is of.
    #[schema(value_type = String)]
    sandbox: SandboxId,
    /// The generation of that sandbox; what is made from it is in the next one.
    generation: u32,
    #[schema(format = DateTime)]
    created_at: String,
    /// What it takes on the disk at this moment; `null` if that could not be measured.
    disk: Option<DiskView>,
}

impl SnapshotView {
    fn new(row: SnapshotRow, disk: &mut BTreeMap<SnapshotId, DiskView>) -> Self {
        let Unchecked { cpus, memory_mib, disk_mib, processes } = row.limits.into();
        Self {
            name: row.full_name(),
            disk: disk.remove(&row.id),
            id: row.id,
            template: row.template,
            rootfs: row.rootfs.to_string(),
            limits: LimitsView { cpus, memory_mib, disk_mib, processes },
            sandbox: row.source,
            generation: row.generation.0,
            created_at: row.created_at.to_string(),
        }
    }
}

#[utoipa::path(get, path = "/v1/snapshots", tag = "native", params(
    ("sandboxID" = Option<String>, Query, description = "of this sandbox"),
    ("name" = Option<String>, Query, description = "name or id; all of its tags, if it has none"),
    ("limit" = Option<u32>, Query, description = "1 to 100 (default)"),
    ("nextToken" = Option<String>, Query, description = "x-next-token of the page before")), responses(
    (status = 200, description = "One page, newest first", body = Vec<SnapshotView>,
     headers(("x-next-token" = String, description = "if there are more"))),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_snapshots_native(
    State(state): State<ApiState>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let wanted = wanted(&Query::parse(query.as_deref())?)?;
    let page = state.backend.snapshots(caller.0, wanted).await?;
    let mut disk = disk::of(&*state.backend, page.rows.iter().map(|row| row.id.clone())).await;
    let view = |row| SnapshotView::new(row, &mut disk);
    let rows: Vec<SnapshotView> = page.rows.into_iter().map(view).collect();
    Ok(page::answer(&rows, page.next.as_ref(), Order::Descending))
}

#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "native",
    params(("id" = String, Path, description = "id or name of a snapshot, URL-encoded")), responses(
    (status = 200, description = "The snapshot", body = SnapshotView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn get_snapshot(
    State(state): State<ApiState>,
    caller: Caller,
    Meant(reference): Meant,
) -> Result<axum::Json<SnapshotView>, ApiError> {
    let row = state.backend.find_snapshot(caller.0, &reference).await?;
    let mut disk = disk::of(&*state.backend, [row.id.clone()].into_iter()).await;
    Ok(axum::Json(SnapshotView::new(row, &mut disk)))
}

#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "native",
    params(("id" = String, Path, description = "id of a snapshot of any team")), responses(
    (status = 204, description = "For keys of operators. It is gone; sandboxes that were made from it have all that they need"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn delete_snapshot(
    State(state): State<ApiState>,
    _: Operator,
    Meant(reference): Meant,
) -> Result<StatusCode, ApiError> {
    // Names are of a team each. E2B's clients write an id with a tag.
    let plain = reference.namespace().is_none() && reference.tag_or_default() == DEFAULT_TAG;
    let id = reference.name().parse().ok().filter(|_| plain);
    let id = id.ok_or_else(|| ApiError::invalid("a snapshot of any team is deleted by its id"))?;
    state.backend.delete_snapshot_of_any(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}
