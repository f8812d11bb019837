//! Rows as typed values.

mod broker;
mod run;
mod sample;
mod snapshot;
mod spending;
mod template;
mod volume;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use sandglass_broker::ConnectionName;
use sandglass_egress::policy::{Policy, RequestHost};
use sandglass_types::budget::{Amount, Excess};
use sandglass_types::{
    Digest, EndReason, Generation, KeyId, Lifetime, Limits, NodeId, PauseMode, SandboxId, SandboxState,
    TeamId, Timestamp, UserName, VolumeMount, VolumeName,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use broker::{
    ConnectionRow, Kept, MAX_CONNECTIONS, MAX_SECRETS, SecretChange, SecretFilter, SecretKey, SecretPage,
    SecretRow,
};
pub use run::{
    Artifact, Compute, NewRun, NewRunEvent, PIECE, RunAdmitted, RunChange, RunEventRow, RunFilter, RunPage,
    RunRow, Source,
};
pub use sample::{Sample, TeamSample};
pub use snapshot::{
    Admitted, Finished, ImageState, MadeFrom, NewSnapshot, Purpose, SnapshotFilter, SnapshotKey,
    SnapshotName, SnapshotPage, SnapshotRow,
};
pub use spending::{
    BudgetRow, CallRow, Charge, Granted, MAX_CALLS, ModelGrant, Money, NewBudget, Reservation, Reserved,
    SpendCaps,
};
pub use template::{CommandDefaults, StartPath, Started, TemplateSpec};
pub use volume::{
    MAX_NAMED_USES, NewVolume, VolumeAdmitted, VolumeDeletion, VolumeQuota, VolumeRow, VolumeState,
    VolumeUses,
};

/// An owner of keys and sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Team {
    /// Its id.
    pub id: TeamId,
    /// Unique name, for people.
    pub name: String,
    /// When it was added.
    pub created_at: Timestamp,
    /// When it was ended, if it was.
    pub revoked_at: Option<Timestamp>,
}

/// SHA-256 of an API key's secret: all that is kept of it. Made by [`ApiKey::digest_of`].
pub type KeyDigest = Digest;

/// The most keys of a team that work at one time.
pub const MAX_KEYS: u32 = 100;

/// An API key without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ApiKey {
    /// Its id.
    pub id: KeyId,
    /// Whom it acts for.
    pub team: TeamId,
    /// For people.
    pub name: String,
    /// Digest of the whole secret, prefix included.
    #[serde(skip)]
    pub digest: KeyDigest,
    /// The last four characters of the secret, to tell keys apart.
    pub suffix: String,
    /// Whether who has it may see what concerns all teams.
    pub operator: bool,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last used, as far as that is written: a use is, within a minute.
    pub last_used_at: Option<Timestamp>,
    /// When it was ended, if it was.
    pub revoked_at: Option<Timestamp>,
    /// The key that made it over the API, or that made that one if it is forgotten; `None` for the command line of the
    /// machine.
    pub made_by: Option<KeyId>,
}

impl ApiKey {
    /// What is kept of the secret of a key: SHA-256 of the whole text. It has 160 random bits, so it needs no salt and
    /// no slow hash.
    #[must_use]
    pub fn digest_of(secret: &str) -> KeyDigest {
        Digest::from_bytes(Sha256::digest(secret).into())
    }
}

/// Who a valid key acts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The team.
    pub team: TeamId,
    /// The key itself.
    pub key: KeyId,
    /// Whether it may see what concerns all teams.
    pub operator: bool,
}

/// A call that changed something, or was to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditEntry {
    /// When it was answered.
    pub at: Timestamp,
    /// For whom; `None` without a valid key, and for the command line of the machine itself.
    pub team: Option<TeamId>,
    /// With which key; never its secret.
    pub key: Option<KeyId>,
    /// The id of the request, 1 to 128 bytes.
    pub request: String,
    /// What was asked for: method and route, 1 to 128 bytes.
    pub action: String,
    /// What it was about, if that is known: an id, or an application's user, at most 128 bytes.
    pub target: Option<String>,
    /// How it went, as a status of HTTP.
    pub status: u16,
    /// Why not, if it was refused or failed, or what else is to be said. What is past [`MAX_DETAIL`] is cut off.
    pub detail: Option<String>,
}

/// A client's name for one create request: 1 to 255 of `[a-zA-Z0-9_-]`, scoped by team.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey(Box<str>);

/// Not an [`IdempotencyKey`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the idempotency key must be 1 to 255 characters of a-z, A-Z, 0-9, '-' and '_'")]
pub struct InvalidIdempotencyKey;

impl IdempotencyKey {
    /// The key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for IdempotencyKey {
    type Err = InvalidIdempotencyKey;

    fn from_str(text: &str) -> Result<Self, InvalidIdempotencyKey> {
        let valid = (1..=255).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
        if valid { Ok(Self(text.into())) } else { Err(InvalidIdempotencyKey) }
    }
}

/// What a create request becomes.
#[derive(Clone)]
pub struct NewSandbox {
    /// Fresh id.
    pub id: SandboxId,
    /// The machine that runs it.
    pub node: NodeId,
    /// The owner.
    pub team: TeamId,
    /// The name of its template.
    pub template: String,
    /// The root file system that the template had at that moment.
    pub rootfs: Digest,
    /// Hard limits.
    pub limits: Limits,
    /// What clients must send to its guest API; `None` leaves it open.
    pub access_token: Option<String>,
    /// The client's labels.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// As the client asked; `None` if it did not say.
    pub allow_internet_access: Option<bool>,
    /// What it asks to reach, `allow_internet_access` included.
    pub policy: Policy,
    /// What clients must send to reach its ports, the guest API's aside; `None` leaves them open.
    pub traffic_token: Option<String>,
    /// The Host header that programs inside see; `None` is the one that the client sent.
    pub request_host: Option<RequestHost>,
    /// How long it lives, and what happens then.
    pub lifetime: Lifetime,
    /// How it is to be made.
    pub made_from: MadeFrom,
    /// Which way that goes, unless something else turns out.
    pub start_path: StartPath,
    /// What commands have that say nothing else; `None` is as the server's own template of that name says.
    pub defaults: Option<CommandDefaults>,
    /// The first, or the one after that of what it is a copy of.
    pub generation: Generation,
    /// When the request came.
    pub created_at: Timestamp,
    /// When its time is up.
    pub end_at: Timestamp,
    /// The latest `end_at` that any extension may reach.
    pub max_end_at: Timestamp,
    /// The client's key for this request and a digest of the request itself.
    pub idempotency: Option<(IdempotencyKey, Digest)>,
    /// The volumes that it has: only such as are there and are the team's.
    pub volumes: Vec<VolumeMount>,
    /// What lets it call models: that of what it is a fork of.
    pub models: Option<ModelGrant>,
    /// The connections that it may use, each once, if there are such.
    pub connections: Vec<ConnectionName>,
    /// Whose it shall be, if they have none.
    pub assign_to: Option<UserName>,
    /// What all sandboxes of the team may have together, with this one.
    pub quota: Amount,
    /// What all sandboxes of the machine may have together, with this one.
    pub capacity: Amount,
}

/// What became of an insert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Created {
    /// The row is there, in state `Creating`.
    Inserted,
    /// The same request came before and made this sandbox, which is past `Creating`.
    Replay(SandboxId),
    /// The same request came before and its sandbox is still being made.
    InProgress,
    /// Another request came before under this key.
    Mismatch,
    /// The team has no such volume.
    NoVolume(VolumeName),
    /// The user that it was for has this one.
    Assigned(SandboxId),
    /// With it the team would have more than its quota.
    OverQuota(Excess),
    /// With it the machine would have more than it can hold.
    OverCapacity {
        /// What there is too little of.
        excess: Excess,
        /// Whether there is enough once the sandboxes are gone that are at their end.
        soon: bool,
    },
}

/// That a sandbox is a user's, or was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Which one.
    pub sandbox: SandboxId,
    /// Since when.
    pub since: Timestamp,
    /// Until when; `None` for the one in force, whose sandbox may have ended since.
    pub until: Option<Timestamp>,
}

/// The wish that a paused sandbox runs again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resume {
    /// When it came.
    pub at: Timestamp,
    /// When its time is up.
    pub end_at: Timestamp,
    /// The latest `end_at` that any extension may reach.
    pub max_end_at: Timestamp,
    /// What all sandboxes of the team may have together, with this one.
    pub quota: Amount,
    /// What all sandboxes of the machine may have together, with this one.
    pub capacity: Amount,
    /// For people: why, one line.
    pub detail: String,
}

/// What became of a [`Resume`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resumed {
    /// It is `Resuming`, as this row says.
    Begun(Box<SandboxRow>),
    /// It is not paused.
    NotPaused,
    /// With it the team would have more than its quota.
    OverQuota(Excess),
    /// As [`Created::OverCapacity`].
    OverCapacity {
        /// What there is too little of.
        excess: Excess,
        /// Whether there is enough once the sandboxes are gone that are at their end.
        soon: bool,
    },
}

/// One sandbox as it is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct SandboxRow {
    /// Its id.
    pub id: SandboxId,
    /// The machine that runs it.
    pub node: NodeId,
    /// The owner.
    pub team: TeamId,
    /// The name of its template.
    pub template: String,
    /// Its root file system.
    pub rootfs: Digest,
    /// Hard limits.
    pub limits: Limits,
    /// What clients must send to its guest API; `None` leaves it open.
    pub access_token: Option<String>,
    /// The client's labels.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// As the client asked; `None` if it did not say.
    pub allow_internet_access: Option<bool>,
    /// What it asks to reach, `allow_internet_access` included.
    pub policy: Policy,
    /// What clients must send to reach its ports, the guest API's aside; `None` leaves them open.
    pub traffic_token: Option<String>,
    /// The Host header that programs inside see; `None` is the one that the client sent.
    pub request_host: Option<RequestHost>,
    /// How long it lives, and what happens then.
    pub lifetime: Lifetime,
    /// What its last pause keeps, or kept.
    pub pause_mode: PauseMode,
    /// How it came to be.
    pub made_from: MadeFrom,
    /// Which way that went, or goes.
    pub start_path: StartPath,
    /// What commands have that say nothing else; `None` is as the server's own template of that name says.
    pub defaults: Option<CommandDefaults>,
    /// The volumes that it has.
    pub volumes: Vec<VolumeMount>,
    /// What lets it call models.
    pub models: Option<ModelGrant>,
    /// The connections that it may use, each once, if there are such.
    pub connections: Vec<ConnectionName>,
    /// Where it is in its life.
    pub state: SandboxState,
    /// Counts restores, also those of what it is a copy of.
    pub generation: Generation,
    /// When the create request came.
    pub created_at: Timestamp,
    /// When its time is up.
    pub end_at: Timestamp,
    /// The latest `end_at` that any extension may reach.
    pub max_end_at: Timestamp,
    /// When it was gone, if it is.
    pub ended_at: Option<Timestamp>,
    /// Why it ended, once that is decided.
    pub end_reason: Option<EndReason>,
}

impl fmt::Debug for SandboxRow {
    /// Leaves out tokens and environment, which logs must not show.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxRow")
            .field("id", &self.id)
            .field("team", &self.team)
            .field("template", &self.template)
            .field("state", &self.state)
            .field("end_reason", &self.end_reason)
            .finish_non_exhaustive()
    }
}

/// Upper bound for [`Event::detail`] and [`AuditEntry::detail`], in bytes.
pub const MAX_DETAIL: usize = 1024;

/// One step in a sandbox's life, and what it leaves in the history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    /// The state it must be in.
    pub from: SandboxState,
    /// The state it is in afterwards.
    pub to: SandboxState,
    /// What is kept of it, set when it is to be paused.
    pub pause_mode: Option<PauseMode>,
    /// Set when the end is decided.
    pub end_reason: Option<EndReason>,
    /// When.
    pub at: Timestamp,
    /// For people: what happened, one line. What is past [`MAX_DETAIL`] is cut off.
    pub detail: String,
}

/// One line of a sandbox's history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Counts from 1 without gaps, per sandbox.
    pub seq: u32,
    /// When.
    pub at: Timestamp,
    /// The state from here on.
    pub state: SandboxState,
    /// Why it ends, if this is the step that ends it.
    pub end_reason: Option<EndReason>,
    /// For people.
    pub detail: String,
}

/// By time of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Oldest first.
    Ascending,
    /// Newest first.
    #[default]
    Descending,
}

/// Where the next page starts: after this sandbox or snapshot. Stable while they come and go.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageCursor<Id = SandboxId> {
    /// Its time of creation.
    pub created_at: Timestamp,
    /// Its id, which orders those of one millisecond.
    pub id: Id,
}

/// Which sandboxes to list.
#[derive(Debug, Clone)]
pub struct ListFilter {
    /// Of this team.
    pub team: TeamId,
    /// In one of these states; empty matches nothing.
    pub states: Vec<SandboxState>,
    /// With all these labels.
    pub metadata: BTreeMap<String, String>,
    /// From this template.
    pub template: Option<String>,
    /// Created at or after this.
    pub created_from: Option<Timestamp>,
    /// By time of creation.
    pub order: Order,
    /// After this one.
    pub after: Option<PageCursor>,
    /// At most so many; 1 to 100.
    pub limit: u32,
}

/// One page.
#[derive(Debug, Clone)]
pub struct ListPage {
    /// The rows, in order.
    pub rows: Vec<SandboxRow>,
    /// Set if there are more.
    pub next: Option<PageCursor>,
}
