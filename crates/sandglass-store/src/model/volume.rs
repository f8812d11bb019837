//! Volumes.

use std::fmt;

use sandglass_types::budget::{Amount, Excess};
use sandglass_types::{NodeId, SandboxId, SnapshotId, TeamId, Timestamp, VolumeId, VolumeName};

/// Most sandboxes, and most snapshots, that are named where a volume is in use.
pub const MAX_NAMED_USES: u32 = 5;

/// How far a volume has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeState {
    /// It is being made, or was when its server died.
    Making,
    /// It is there.
    Ready,
    /// It is being removed.
    Deleting,
}

/// What the volumes of one team may be together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeQuota {
    /// How many.
    pub count: u64,
    /// Their sizes, in MiB.
    pub mib: u64,
}

impl VolumeQuota {
    /// No bound.
    pub const UNBOUNDED: Self = Self { count: u64::MAX, mib: u64::MAX };
}

/// A volume that is to be made.
#[derive(Clone)]
pub struct NewVolume {
    /// Fresh id.
    pub id: VolumeId,
    /// The machine that will have it.
    pub node: NodeId,
    /// The owner.
    pub team: TeamId,
    /// What the team calls it, and no other that it has.
    pub name: VolumeName,
    /// Its size, in MiB.
    pub size_mib: u32,
    /// What clients must send to reach its content: 64 characters.
    pub token: String,
    /// When the request came.
    pub created_at: Timestamp,
    /// What the team's volumes may be together, with this one.
    pub quota: VolumeQuota,
    /// What the machine can hold, with this one.
    pub capacity: Amount,
}

/// One volume as it is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct VolumeRow {
    /// Its id.
    pub id: VolumeId,
    /// The machine that has it.
    pub node: NodeId,
    /// The owner.
    pub team: TeamId,
    /// What the team calls it.
    pub name: VolumeName,
    /// Its size, in MiB.
    pub size_mib: u32,
    /// What clients must send to reach its content.
    pub token: String,
    /// How far it has come.
    pub state: VolumeState,
    /// When it was asked for.
    pub created_at: Timestamp,
}

impl fmt::Debug for VolumeRow {
    /// Leaves out the token, which logs must not show.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeRow")
            .field("id", &self.id)
            .field("team", &self.team)
            .field("name", &self.name)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// What became of an insert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeAdmitted {
    /// The row is there, in state `Making`.
    Inserted,
    /// The team has a volume of this name.
    NameTaken,
    /// The team has as many as it may have.
    TooMany {
        /// How many it may have.
        most: u64,
    },
    /// With it the team's volumes would be larger than they may be.
    TooLarge {
        /// How large they may be together, in MiB.
        most: u64,
        /// How large they are, in MiB.
        in_use: u64,
    },
    /// With it the machine would have more than it can hold.
    OverCapacity(Excess),
}

/// Who needs a volume: some of them, no more than [`MAX_NAMED_USES`] of each kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VolumeUses {
    /// Sandboxes that have not ended.
    pub sandboxes: Vec<SandboxId>,
    /// Images that sandboxes are made from.
    pub snapshots: Vec<SnapshotId>,
}

impl VolumeUses {
    /// Whether nobody needs it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sandboxes.is_empty() && self.snapshots.is_empty()
    }
}

/// What became of the wish to delete a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeDeletion {
    /// It is `Deleting`: no client finds it any more.
    Begun,
    /// It is not there, or is `Deleting` already.
    NotThere,
    /// Somebody needs it. Nothing changed.
    InUse(VolumeUses),
}
