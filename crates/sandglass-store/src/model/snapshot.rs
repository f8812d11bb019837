//! Images that sandboxes are made from.

use sandglass_types::budget::{Amount, Excess};
use sandglass_types::{
    Digest, Generation, Limits, NodeId, SandboxId, SnapshotId, TeamId, Timestamp, VolumeMount,
};

use super::{CommandDefaults, PageCursor, TemplateSpec};

/// How a sandbox came to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum MadeFrom {
    /// From its template.
    #[default]
    Template,
    /// As a copy of a snapshot, which may be deleted by now.
    Snapshot(SnapshotId),
    /// As a copy of another sandbox, which may have ended by now.
    Fork(SandboxId),
}

impl MadeFrom {
    /// Which of them it is, in one word.
    #[must_use]
    pub const fn origin(&self) -> &'static str {
        match self {
            Self::Template => "template",
            Self::Snapshot(_) => "snapshot",
            Self::Fork(_) => "fork",
        }
    }
}

/// What an image is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Purpose {
    /// For whoever asks for it, until it is deleted.
    Snapshot,
    /// For the children of one fork, until they run.
    Fork,
    /// For all that is made from the template whose name it has, until there is a newer one or it is deleted.
    Template(Box<TemplateSpec>),
}

/// How far an image has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageState {
    /// It is being written, or was when its server died.
    Writing,
    /// It is complete.
    Ready,
    /// It is being removed.
    Deleting,
}

/// What clients call a snapshot, within its team.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotName {
    /// Its name, without the namespace of the team.
    pub name: String,
    /// Its tag.
    pub tag: String,
}

/// An image that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSnapshot {
    /// Fresh id.
    pub id: SnapshotId,
    /// The machine that will have it.
    pub node: NodeId,
    /// The owner.
    pub team: TeamId,
    /// What it is for.
    pub purpose: Purpose,
    /// What clients will call it once it is ready; the snapshot that had the name before loses it then.
    pub name: Option<SnapshotName>,
    /// The name of the template of its source, or that of the template that it is for.
    pub template: String,
    /// What commands in its copies have that say nothing else; `None` is as the server's own template of that name says.
    pub defaults: Option<CommandDefaults>,
    /// The root file system of its source.
    pub rootfs: Digest,
    /// The limits of its source, and of all that are made from it.
    pub limits: Limits,
    /// The sandbox that it is of.
    pub source: SandboxId,
    /// The generation of that sandbox.
    pub generation: Generation,
    /// The volumes of that sandbox, and of all that are made from it.
    pub volumes: Vec<VolumeMount>,
    /// When the request came.
    pub created_at: Timestamp,
    /// What the team's sandboxes may have together: for a fork, whose children come with it.
    pub quota: Amount,
    /// What all sandboxes and images of the machine may have together, with this one.
    pub capacity: Amount,
}

/// One image as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRow {
    /// Its id.
    pub id: SnapshotId,
    /// The machine that has it.
    pub node: NodeId,
    /// The owner.
    pub team: TeamId,
    /// The namespace of the owner's names.
    pub namespace: String,
    /// What it is for.
    pub purpose: Purpose,
    /// What clients call it; `None` if it never had a name, or a newer one has it.
    pub name: Option<SnapshotName>,
    /// The name of the template of its source, or that of the template that it is for.
    pub template: String,
    /// What commands in its copies have that say nothing else; `None` is as the server's own template of that name says.
    pub defaults: Option<CommandDefaults>,
    /// The root file system that it needs.
    pub rootfs: Digest,
    /// The limits of all that are made from it.
    pub limits: Limits,
    /// The sandbox that it is of.
    pub source: SandboxId,
    /// The generation of that sandbox. What is made from it is in the next one.
    pub generation: Generation,
    /// The volumes of all that are made from it.
    pub volumes: Vec<VolumeMount>,
    /// How far it has come.
    pub state: ImageState,
    /// When it was asked for.
    pub created_at: Timestamp,
}

impl SnapshotRow {
    /// Its whole name, as clients write it.
    #[must_use]
    pub fn full_name(&self) -> Option<String> {
        self.name.as_ref().map(|SnapshotName { name, tag }| format!("{}/{name}:{tag}", self.namespace))
    }
}

/// What became of an insert with its check for room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admitted {
    /// All rows are there.
    Inserted,
    /// With it the team would have more than its quota. No row is there.
    OverQuota(Excess),
    /// With it the machine would have more than it can hold. No row is there.
    OverCapacity {
        /// What there is too little of.
        excess: Excess,
        /// Whether there is enough once all is gone that is at its end.
        soon: bool,
    },
}

/// What became of an image that is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// It is ready.
    Ready,
    /// It is not being written.
    NotWriting,
    /// Its template has another image than the one that it was to take the place of, or none. Nothing changed.
    Outdated,
    /// A snapshot has the name of its template, or a template has its own. Nothing changed.
    NameTaken,
}

/// Which snapshots a client means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotKey {
    /// That with this id,
    pub id: Option<SnapshotId>,
    /// or those with this name;
    pub name: String,
    /// `None` means any tag.
    pub tag: Option<String>,
}

/// Which snapshots to list: those that are ready, newest first.
#[derive(Debug, Clone)]
pub struct SnapshotFilter {
    /// Of this team.
    pub team: TeamId,
    /// Of this sandbox.
    pub source: Option<SandboxId>,
    /// That this means.
    pub key: Option<SnapshotKey>,
    /// After this one.
    pub after: Option<PageCursor<SnapshotId>>,
    /// At most so many; 1 to 100.
    pub limit: u32,
}

/// One page.
#[derive(Debug, Clone)]
pub struct SnapshotPage {
    /// The rows, in order.
    pub rows: Vec<SnapshotRow>,
    /// Set if there are more.
    pub next: Option<PageCursor<SnapshotId>>,
}
