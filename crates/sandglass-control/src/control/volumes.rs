//! Volumes of teams: made, found, deleted, and put into sandboxes.
//!
//! A volume has a row from before it is made until after it is removed. While this process makes or removes one, it holds its
//! [`Claim`]; so a row that is half way to somewhere and that nobody holds was left by an earlier server.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_engine::Feature;
use sandglass_store::{
    NewVolume, VolumeAdmitted, VolumeDeletion, VolumeQuota, VolumeRow, VolumeState, VolumeUses,
};
use sandglass_types::error::Chain;
use sandglass_types::volume::{MAX_VOLUME_MIB, MIN_VOLUME_MIB};
use sandglass_types::{Error, ErrorKind, SandboxId, SnapshotId, TeamId, VolumeId, VolumeMount, VolumeName};

use super::{Control, injected, random_token, stored};
use crate::admission;
use crate::request::AskedVolume;

/// What an operator decides of volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumesConfig {
    /// Size of a volume whose client does not say, in MiB.
    pub default_mib: u32,
    /// What those of one team may be together.
    pub quota: VolumeQuota,
}

impl Default for VolumesConfig {
    fn default() -> Self {
        Self { default_mib: 1024, quota: VolumeQuota { count: 50, mib: 50 << 10 } }
    }
}

/// Which volumes this process makes or removes.
#[derive(Debug, Clone, Default)]
pub(crate) struct AtWork(Arc<Mutex<HashSet<VolumeId>>>);

/// The right to make or remove a volume. Nobody else has it meanwhile.
#[derive(Debug)]
struct Claim {
    id: VolumeId,
    of: AtWork,
}

impl AtWork {
    fn claim(&self, id: &VolumeId) -> Option<Claim> {
        let new = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone());
        new.then(|| Claim { id: id.clone(), of: self.clone() })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.of.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

fn no_volume(id: &VolumeId) -> Error {
    Error::new(ErrorKind::NotFound, format!("volume '{id}' not found"))
}

/// What a client hears whose team has no volume of that name.
pub(super) fn no_volume_named(name: &VolumeName) -> Error {
    Error::new(ErrorKind::NotFound, format!("volume '{name}' not found: make it with POST /volumes first"))
}

fn taken() -> Error {
    Error::new(ErrorKind::Conflict, "the volume is being made or deleted: try again")
}

/// That a volume can't be deleted yet, and who must go first.
fn in_use(name: &VolumeName, uses: &VolumeUses) -> Error {
    let VolumeUses { sandboxes, snapshots } = uses;
    let list = |what: &str, ids: Vec<&str>| (!ids.is_empty()).then(|| format!("{what} {}", ids.join(", ")));
    let named = [
        list("sandboxes", sandboxes.iter().map(SandboxId::as_str).collect()),
        list("snapshots", snapshots.iter().map(SnapshotId::as_str).collect()),
    ];
    let named: Vec<_> = named.into_iter().flatten().collect();
    let message = format!("volume '{name}' is in use: end or delete {} first", named.join(" and "));
    Error::new(ErrorKind::Conflict, message)
}

impl Control {
    /// Makes a volume, of the operator's size if none is said.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a size out of range; [`ErrorKind::Conflict`] if the team has one of this name;
    /// [`ErrorKind::Quota`], [`ErrorKind::Capacity`], [`ErrorKind::Unsupported`], or what went wrong. Then there is none.
    pub async fn create_volume(
        &self,
        team: TeamId,
        name: VolumeName,
        size_mib: Option<u32>,
    ) -> Result<VolumeRow, Error> {
        let shared = self.shared();
        if shared.engine.refuses(Feature::Volumes) {
            let message = format!("the engine '{}' has no volumes", shared.engine.name);
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let config = shared.config.budgets.volumes;
        let size_mib = size_mib.unwrap_or(config.default_mib);
        if !(MIN_VOLUME_MIB..=MAX_VOLUME_MIB).contains(&size_mib) {
            let message = format!("sizeMB must be {MIN_VOLUME_MIB} to {MAX_VOLUME_MIB}");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let new = NewVolume {
            id: VolumeId::random(),
            node: shared.node,
            team,
            name,
            size_mib,
            token: random_token(),
            created_at: shared.clock.now(),
            quota: config.quota,
            capacity: shared.config.budgets.capacity,
        };
        // Before the row is there, so that the reconciler never takes it for one that nobody is at work on.
        let claim = shared.volumes.claim(&new.id).ok_or_else(taken)?;
        sandglass_failpoint::hit_async("control.volume.insert").await.map_err(injected)?;
        match shared.store.insert_volume(&new).await.map_err(stored)? {
            VolumeAdmitted::Inserted => {}
            VolumeAdmitted::NameTaken => {
                let message = format!("your team has a volume '{}' already", new.name);
                return Err(Error::new(ErrorKind::Conflict, message));
            }
            VolumeAdmitted::TooMany { most } => return Err(admission::too_many_volumes(most)),
            VolumeAdmitted::TooLarge { most, in_use } => {
                return Err(admission::too_large_volumes(most, in_use, size_mib.into()));
            }
            VolumeAdmitted::OverCapacity(excess) => return Err(admission::over_capacity(excess)),
        }
        let made = async {
            sandglass_failpoint::hit_async("control.volume.host").await.map_err(injected)?;
            shared.host.create_volume(&new.id, size_mib).await?;
            sandglass_failpoint::hit_async("control.volume.ready").await.map_err(injected)?;
            shared.store.volume_ready(&new.id).await.map_err(stored)
        };
        if let Err(error) = made.await {
            if let Err(error) = self.discard_volume(&claim).await {
                tracing::error!(volume = %new.id, error = %Chain(&error), "a volume that was not made is still there");
            }
            return Err(error);
        }
        drop(claim);
        self.volume(team, &new.id).await
    }

    /// All volumes of a team, oldest first.
    ///
    /// # Errors
    /// The store failed.
    pub async fn volumes(&self, team: TeamId) -> Result<Vec<VolumeRow>, Error> {
        self.shared().store.volumes(team).await.map_err(stored)
    }

    /// A volume of a team.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn volume(&self, team: TeamId, id: &VolumeId) -> Result<VolumeRow, Error> {
        let row = self.shared().store.volume(id).await.map_err(stored)?;
        row.filter(|row| row.team == team).ok_or_else(|| no_volume(id))
    }

    /// Deletes a volume and all that is on it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Conflict`] while a sandbox or a snapshot has it: then it is as it was.
    pub async fn delete_volume(&self, team: TeamId, id: &VolumeId) -> Result<(), Error> {
        let row = self.volume(team, id).await?;
        let claim = self.shared().volumes.claim(id).ok_or_else(taken)?;
        sandglass_failpoint::hit_async("control.volume.delete").await.map_err(injected)?;
        match self.shared().store.begin_volume_deletion(id).await.map_err(stored)? {
            VolumeDeletion::Begun => {}
            VolumeDeletion::NotThere => return Err(no_volume(id)),
            VolumeDeletion::InUse(uses) => return Err(in_use(&row.name, &uses)),
        }
        // Nobody finds it from here on; what is left of it is removed by the reconciler if it can't be now.
        self.shared().contents.cut(id);
        self.remove_volume(&claim).await
    }

    /// The volumes that a client asks for, of its team.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for the first that is not there.
    pub(super) async fn mounts(
        &self,
        team: TeamId,
        asked: &[AskedVolume],
    ) -> Result<Vec<VolumeMount>, Error> {
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.volumes(team).await?;
        let found = |AskedVolume { name, path }: &AskedVolume| {
            let row = rows.iter().find(|row| row.name == *name).ok_or_else(|| no_volume_named(name))?;
            Ok(VolumeMount { id: row.id.clone(), name: name.clone(), path: path.clone() })
        };
        asked.iter().map(found).collect()
    }

    /// Removes what is left of a volume that was never ready.
    async fn discard_volume(&self, claim: &Claim) -> Result<(), Error> {
        match self.shared().store.begin_volume_deletion(&claim.id).await.map_err(stored)? {
            VolumeDeletion::Begun | VolumeDeletion::NotThere => self.remove_volume(claim).await,
            VolumeDeletion::InUse(_) => Err(taken()),
        }
    }

    /// Removes a volume that is `Deleting`, and then its row.
    async fn remove_volume(&self, claim: &Claim) -> Result<(), Error> {
        sandglass_failpoint::hit_async("control.volume.remove").await.map_err(injected)?;
        self.shared().host.remove_volume(&claim.id).await?;
        sandglass_failpoint::hit_async("control.volume.forget").await.map_err(injected)?;
        self.shared().store.forget_volume(&claim.id).await.map_err(stored)
    }

    /// Removes volumes, and rows of them, that a dead server made or removed. It takes as long as it takes: nothing else may wait for it.
    ///
    /// A volume without a row is left as it is. No crash leaves one, since the row is there first and goes last; a store that
    /// was put back from a copy does, and what is on a volume is what is to last.
    pub(super) async fn reconcile_volumes(self) {
        if let Err(error) = self.repair_volumes().await {
            tracing::error!(error = %Chain(&error), "volumes could not be compared with the store");
        }
    }

    async fn repair_volumes(&self) -> Result<(), Error> {
        let shared = self.shared();
        // In this order: a row is there before its volume is.
        let there = shared.host.volumes().await?;
        let rows = shared.store.volumes_on_node(shared.node).await.map_err(stored)?;
        for id in there.iter().filter(|id| !rows.iter().any(|row| row.id == **id)) {
            tracing::warn!(volume = %id, "the store knows nothing of a volume that is there, so it stays");
        }
        for id in rows.iter().filter(|row| row.state != VolumeState::Ready).map(|row| &row.id) {
            let Some(claim) = shared.volumes.claim(id) else { continue };
            // It may have become ready since.
            if shared.store.volume(id).await.map_err(stored)?.is_some() {
                continue;
            }
            tracing::info!(volume = %id, "removing a volume that nobody needs");
            if let Err(error) = self.discard_volume(&claim).await {
                tracing::error!(volume = %id, error = %Chain(&error), "it could not be removed");
            }
        }
        Ok(())
    }
}
