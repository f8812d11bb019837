//! What images take on the disk, what it would free to delete one, and what of the cache folder is needed.

use std::collections::BTreeMap;
use std::time::Duration;

use sandglass_engine::Footprint;
use sandglass_store::{ImageState, Purpose, SandboxRow, SnapshotRow};
use sandglass_types::error::Chain;
use sandglass_types::{Error, SandboxId, SandboxState, SnapshotId, TeamId};
use tokio::time::Instant;

use super::{Control, stored};
use crate::metrics::ImageTotals;

/// For how long the totals are told that were measured last: whoever watches asks often, and one who looks at all that is
/// on the disk is enough.
const TOTALS_AGE: Duration = Duration::from_secs(60);

/// What an image takes on the disk at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUse {
    /// Its blocks, and those of them that nobody shares.
    pub footprint: Footprint,
    /// Whether sandboxes are being made from it, or stand ready in a pool. It is removed after them.
    pub in_use: bool,
}

impl DiskUse {
    /// What its deletion would free at once, in bytes.
    #[must_use]
    pub const fn freed_by_deletion(&self) -> u64 {
        if self.in_use { 0 } else { self.footprint.unique_bytes }
    }
}

/// What is added up for whoever watches, and when that was.
#[derive(Debug, Default)]
pub(crate) struct Measured(tokio::sync::Mutex<Option<(Instant, ImageTotals)>>);

impl Control {
    /// What these images take on the disk. Those that are not there are missing.
    ///
    /// # Errors
    /// They can't be read.
    pub async fn disk_use(&self, images: &[SnapshotId]) -> Result<BTreeMap<SnapshotId, DiskUse>, Error> {
        let ids: Vec<_> = images.iter().map(SnapshotId::image).collect();
        let measured = self.0.host.footprints(&ids).await?;
        let found = images.iter().filter_map(|image| {
            let footprint = *measured.each.get(&image.image())?;
            Some((image.clone(), DiskUse { footprint, in_use: self.0.images.in_use(image) }))
        });
        Ok(found.collect())
    }

    /// What a template takes on the disk together with all snapshots of sandboxes that were made from it, whichever team
    /// they belong to, in bytes. Blocks that they share are counted once.
    ///
    /// # Errors
    /// They can't be read.
    pub async fn tree_of_template(&self, name: &str) -> Result<u64, Error> {
        let of_it = |row: &SnapshotRow| row.template == name && row.purpose != Purpose::Fork;
        self.together(None, of_it).await
    }

    /// What a sandbox of this team takes on the disk, running or paused, together with all its snapshots, in bytes. Blocks
    /// that they share are counted once.
    ///
    /// # Errors
    /// [`NotFound`](sandglass_types::ErrorKind::NotFound), or they can't be read.
    pub async fn tree_of_sandbox(&self, team: TeamId, id: &SandboxId) -> Result<u64, Error> {
        self.record(team, id).await?;
        let of_it = |row: &SnapshotRow| row.source == *id && row.purpose == Purpose::Snapshot;
        self.together(Some(id.clone()), of_it).await
    }

    /// Has what nobody needs any more removed from the cache folder. What fails is done the next time.
    pub(super) async fn tidy_cache(&self) {
        let rootfs = self.0.config.templates.values().map(|template| template.rootfs).collect();
        if let Err(error) = self.0.host.tidy_cache(rootfs).await {
            tracing::error!(error = %Chain(&error), "the cache folder can't be tidied");
        }
    }

    async fn together(
        &self,
        sandbox: Option<SandboxId>,
        of_it: impl Fn(&SnapshotRow) -> bool,
    ) -> Result<u64, Error> {
        let rows = self.0.store.snapshots_on_node(self.0.node).await.map_err(stored)?;
        let images = rows.iter().filter(|row| of_it(row)).map(|row| row.id.image());
        let ids: Vec<_> = sandbox.into_iter().chain(images).collect();
        Ok(self.0.host.footprints(&ids).await?.together)
    }

    /// What all images take, by what they are for; what was measured within the last minute is not measured again. `None` if
    /// it can't be.
    ///
    /// # Errors
    /// The store failed.
    pub(super) async fn image_totals(&self) -> Result<Option<ImageTotals>, Error> {
        let mut measured = self.0.measured.0.lock().await;
        if let Some((at, totals)) = &*measured
            && at.elapsed() < TOTALS_AGE
        {
            return Ok(Some(totals.clone()));
        }
        let shared = &self.0;
        let snapshots = shared.store.snapshots_on_node(shared.node).await.map_err(stored)?;
        let paused = shared.store.on_node(shared.node, &[SandboxState::Paused]).await.map_err(stored)?;
        let kinds = kinds(&snapshots, &paused);
        let ids: Vec<_> = kinds.iter().map(|(id, _)| id.clone()).collect();
        match shared.host.footprints(&ids).await {
            Ok(found) => {
                let mut totals = ImageTotals::new(found.together);
                for (id, kind) in &kinds {
                    totals.add(*kind, found.each.get(id));
                }
                *measured = Some((Instant::now(), totals.clone()));
                Ok(Some(totals))
            }
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "what images take on the disk can't be measured");
                Ok(None)
            }
        }
    }
}

/// What an image is there for, as metrics tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ImageKind {
    /// Of a paused sandbox.
    Paused,
    /// A snapshot that is ready.
    Snapshot,
    /// That of a template.
    Template,
    /// It is being written or removed, or is for a fork under way.
    Passing,
}

impl ImageKind {
    pub(crate) const ALL: [Self; 4] = [Self::Paused, Self::Snapshot, Self::Template, Self::Passing];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Paused => "paused",
            Self::Snapshot => "snapshot",
            Self::Template => "template",
            Self::Passing => "passing",
        }
    }
}

fn kinds(snapshots: &[SnapshotRow], paused: &[SandboxRow]) -> Vec<(SandboxId, ImageKind)> {
    let of_row = |row: &SnapshotRow| match (&row.purpose, row.state) {
        (Purpose::Fork, _) | (_, ImageState::Writing | ImageState::Deleting) => ImageKind::Passing,
        (Purpose::Snapshot, ImageState::Ready) => ImageKind::Snapshot,
        (Purpose::Template(_), ImageState::Ready) => ImageKind::Template,
    };
    let snapshots = snapshots.iter().map(|row| (row.id.image(), of_row(row)));
    snapshots.chain(paused.iter().map(|row| (row.id.clone(), ImageKind::Paused))).collect()
}
