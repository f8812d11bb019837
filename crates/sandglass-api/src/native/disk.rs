//! What images take on the disk, as answers tell it.

use std::collections::BTreeMap;

use sandglass_control::DiskUse;
use sandglass_types::SnapshotId;
use serde::Serialize;
use utoipa::ToSchema;

use crate::backend::Backend;

/// Why a deletion would free nothing yet.
const IN_USE: &str = "sandboxes are being made from it, or stand ready in a pool: it is removed after them, and found by nobody else";

/// What an image takes on the disk at this moment.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DiskView {
    /// All of its blocks, also those that others share.
    bytes: u64,
    /// Its blocks that nobody shares; all of them where the file system shares none, or does not tell.
    unique_bytes: u64,
    /// What its deletion would free at once.
    freed_by_deletion_bytes: u64,
    /// Why that is nothing yet; `null` if it would be removed at once.
    deletion_deferred: Option<&'static str>,
    /// Whether all of it was looked at: what was not counts as shared.
    exact: bool,
    /// Whether it is compressed, because nobody has used it for long: then these are the bytes of that, and whoever wants it
    /// waits a little longer.
    compressed: bool,
}

impl From<&DiskUse> for DiskView {
    fn from(found: &DiskUse) -> Self {
        Self {
            bytes: found.footprint.bytes,
            unique_bytes: found.footprint.unique_bytes,
            freed_by_deletion_bytes: found.freed_by_deletion(),
            deletion_deferred: found.in_use.then_some(IN_USE),
            exact: found.footprint.exact,
            compressed: found.footprint.compressed,
        }
    }
}

/// What these images take. An image that can't be measured is told of without it: who asks wants to know that it is there.
pub(super) async fn of(
    backend: &dyn Backend,
    images: impl Iterator<Item = SnapshotId>,
) -> BTreeMap<SnapshotId, DiskView> {
    let images: Vec<_> = images.collect();
    if images.is_empty() {
        return BTreeMap::new();
    }
    measured(backend.disk_use(&images).await)
        .unwrap_or_default()
        .iter()
        .map(|(id, found)| (id.clone(), found.into()))
        .collect()
}

/// A number that is told of if it could be had.
pub(super) fn measured<T>(found: Result<T, sandglass_types::Error>) -> Option<T> {
    found
        .inspect_err(|error| {
            tracing::warn!(error = %sandglass_types::error::Chain(error), "what is on the disk can't be measured");
        })
        .ok()
}
