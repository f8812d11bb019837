//! Durable state as verbs.
//!
//! [`Store`] says what can be asked and promised, not how it is kept. Every verb is one transaction; a verb that
//! moves a sandbox compares the state it expects and writes its event in the same transaction, so the history is
//! never behind or ahead of the state.
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod model;
pub mod runs;
pub mod sqlite;

pub use model::{
    Admitted, ApiKey, Artifact, Assignment, AuditEntry, BudgetRow, CallRow, Charge, CommandDefaults, Compute,
    ConnectionRow, Created, Event, Finished, Granted, IdempotencyKey, Identity, ImageState, Kept, KeyDigest,
    ListFilter, ListPage, MAX_CALLS, MAX_CONNECTIONS, MAX_DETAIL, MAX_KEYS, MAX_SECRETS, MadeFrom,
    ModelGrant, Money, NewBudget, NewRun, NewRunEvent, NewSandbox, NewSnapshot, NewVolume, Order, PageCursor,
    Purpose, Reservation, Reserved, Resume, Resumed, RunAdmitted, RunChange, RunEventRow, RunFilter, RunPage,
    RunRow, Sample, SandboxRow, SecretChange, SecretFilter, SecretKey, SecretPage, SecretRow, SnapshotFilter,
    SnapshotKey, SnapshotName, SnapshotPage, SnapshotRow, Source, SpendCaps, StartPath, Started, Team,
    TeamSample, TemplateSpec, Transition, VolumeAdmitted, VolumeDeletion, VolumeQuota, VolumeRow,
    VolumeState, VolumeUses,
};
pub use runs::RunStore;
pub use sqlite::SqliteStore;

use async_trait::async_trait;
use sandglass_broker::ConnectionName;
use sandglass_egress::policy::Policy;
use sandglass_types::budget::Amount;
use sandglass_types::{
    BudgetId, Digest, KeyId, Limits, Name, NodeId, SandboxId, SandboxState, SnapshotId, TeamId, Timestamp,
    UserName, VolumeId,
};

/// A verb that could not be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is a thing of that name already.
    #[error("{what} named '{name}' exists already")]
    Exists {
        /// What kind of thing.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// There are as many of these as there may be.
    #[error("the team has {most} {what}, and may have no more: end one that nobody needs")]
    TooMany {
        /// What kind of thing, more than one.
        what: &'static str,
        /// How many there may be.
        most: u32,
    },
    /// What the new thing would belong to is not there, or was revoked.
    #[error("there is no {what} {id}, or it was revoked")]
    Missing {
        /// What kind of thing.
        what: &'static str,
        /// Its id.
        id: String,
    },
    /// The file holds something else; it was not touched.
    #[error("{path} is not a sandglass store")]
    NotOurs {
        /// Which file.
        path: String,
    },
    /// The data was written by a newer Sandglass.
    #[error("the store has schema {found}, newer than {known}: run the newer sandglass that wrote it")]
    NewerSchema {
        /// What the store says.
        found: i64,
        /// The newest that this program knows.
        known: i64,
    },
    /// A row that cannot have been written by us.
    #[error("the store holds a malformed {what}: {detail}")]
    Corrupt {
        /// Which kind of row.
        what: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// The file system has no room for it.
    #[error("the file system of the store is full")]
    Full,
    /// The database failed.
    #[error("the store failed")]
    Database(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Durable state. Implementations give the same answers; one suite proves it.
#[async_trait]
pub trait Store: RunStore + Send + Sync + std::fmt::Debug {
    /// The id of this machine, made once with the data folder.
    async fn node(&self) -> Result<NodeId, StoreError>;

    /// Adds a team. Names are unique.
    async fn create_team(&self, name: &str, now: Timestamp) -> Result<Team, StoreError>;

    /// All teams, oldest first, revoked ones included.
    async fn teams(&self) -> Result<Vec<Team>, StoreError>;

    /// Ends a team: its keys are refused from now on, and its budgets are closed as by [`Store::close_budget`]. `false` if there is none or it was revoked before.
    async fn revoke_team(&self, team: TeamId, now: Timestamp) -> Result<bool, StoreError>;

    /// Adds a key to a team, which may have [`MAX_KEYS`] that work; only the digest of its secret is kept. The key
    /// that makes it must work, if there is one.
    async fn create_key(&self, key: &ApiKey) -> Result<(), StoreError>;

    /// Keys of one team, or of all, oldest first; those that were revoked as well, the last thousand of each team.
    async fn keys(&self, team: Option<TeamId>) -> Result<Vec<ApiKey>, StoreError>;

    /// Ends a key. `false` if there is none or it was revoked before.
    async fn revoke_key(&self, key: KeyId, now: Timestamp) -> Result<bool, StoreError>;

    /// Ends a key of the team of `by`, as that one may: if it is no operator's unless `by` is one, and if it is not the last
    /// one of its team. `false` if not, or if there is none, or it was revoked before.
    async fn retire_key(&self, by: &Identity, key: KeyId, now: Timestamp) -> Result<bool, StoreError>;

    /// Calls a valid key of the team of `by` otherwise, if it is no operator's unless `by` is one. `false` if not.
    async fn rename_key(&self, by: &Identity, key: KeyId, name: &Name) -> Result<bool, StoreError>;

    /// Whose valid key has this digest. The use is noted in memory, so that nobody waits for a write.
    async fn authenticate(&self, digest: &KeyDigest, now: Timestamp) -> Result<Option<Identity>, StoreError>;

    /// Writes when keys were last used, as far as this process saw it.
    async fn note_uses(&self) -> Result<(), StoreError>;

    /// Adds a row to the audit.
    async fn audit(&self, entry: &AuditEntry) -> Result<(), StoreError>;

    /// The last rows of the audit, in the order in which they were added: at most `limit`, none of before `since`.
    async fn audited(&self, since: Option<Timestamp>, limit: u32) -> Result<Vec<AuditEntry>, StoreError>;

    /// Removes rows of the audit of before `before`. Returns how many.
    async fn purge_audit(&self, before: Timestamp) -> Result<u64, StoreError>;

    /// Keeps what was seen of sandboxes. One of a sandbox that is not there, or of a time that it has one of already, is left
    /// out.
    async fn record_samples(&self, samples: &[Sample]) -> Result<(), StoreError>;

    /// What was seen of a sandbox from `from` to `to`, both included, oldest first.
    async fn samples(
        &self,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<Sample>, StoreError>;

    /// What was seen last of each of these sandboxes of a team, and what it may use; of those that run, are paused, or are on
    /// the way between the two.
    async fn last_samples(
        &self,
        team: TeamId,
        ids: &[SandboxId],
    ) -> Result<Vec<(Limits, Sample)>, StoreError>;

    /// Removes samples of before `before`, and of each minute of the five before `fine` all but the first. Returns how many.
    async fn thin_samples(&self, fine: Timestamp, before: Timestamp) -> Result<u64, StoreError>;

    /// Keeps what each team has on a node at `now`, and how many sandboxes it made there after `since`. Nothing, of a team that
    /// has nothing and had nothing the last time.
    async fn sample_teams(&self, node: NodeId, since: Timestamp, now: Timestamp) -> Result<(), StoreError>;

    /// What a team had from `from` to `to`, both included, oldest first.
    async fn team_samples(
        &self,
        team: TeamId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<TeamSample>, StoreError>;

    /// Removes what teams had before `before`. Returns of how many times.
    async fn purge_team_samples(&self, before: Timestamp) -> Result<u64, StoreError>;

    /// Inserts a sandbox in state `Creating` with its first event. That check of the idempotency key, of the quota and of
    /// the capacity are one transaction with it, so that however many come at once, what is in use stays in bounds.
    async fn insert_sandbox(&self, new: &NewSandbox) -> Result<Created, StoreError>;

    /// What an earlier request under the same key means for one with this digest, as [`Store::insert_sandbox`] says it; `None`
    /// if the key is free.
    async fn earlier(
        &self,
        team: TeamId,
        idempotency: &(IdempotencyKey, Digest),
    ) -> Result<Option<Created>, StoreError>;

    /// Moves a sandbox from one state to another if it still is in `from`. `false` if it is not.
    async fn transition(&self, id: &SandboxId, change: &Transition) -> Result<bool, StoreError>;

    /// Moves a *paused* sandbox to `Resuming`, in its next generation and with a new end, if the team's quota and the
    /// machine's capacity have room for it: in one transaction with that check.
    async fn resume(&self, id: &SandboxId, resume: &Resume) -> Result<Resumed, StoreError>;

    /// Inserts an image in state `Writing`, and with it the sandboxes that a fork is to make from it, each in state
    /// `Creating` with its first event: all of them in one transaction with the check of quota and capacity, or none.
    async fn insert_snapshot(
        &self,
        new: &NewSnapshot,
        children: &[NewSandbox],
    ) -> Result<Admitted, StoreError>;

    /// Moves an image from `Writing` to `Ready`. A snapshot that was ready before under its name has none any more, and an
    /// image that its template had before on its node is `Deleting`: only if that is `instead_of`, where that is said. A name
    /// is either a template's or a snapshot's: who comes second is refused, in the same transaction.
    async fn snapshot_ready(
        &self,
        id: &SnapshotId,
        instead_of: Option<&SnapshotId>,
    ) -> Result<Finished, StoreError>;

    /// Moves an image to `Deleting`, after which no client finds it. `false` if it is not there, or is `Deleting` already.
    async fn begin_snapshot_deletion(&self, id: &SnapshotId) -> Result<bool, StoreError>;

    /// Removes the row of an image that is `Deleting`, once nothing of it is on the machine.
    async fn forget_snapshot(&self, id: &SnapshotId) -> Result<(), StoreError>;

    /// The *ready* snapshot of a team that `key` means: that with the id if there is one, else the newest with the name.
    async fn snapshot(&self, team: TeamId, key: &SnapshotKey) -> Result<Option<SnapshotRow>, StoreError>;

    /// A page of a team's *ready* snapshots.
    async fn list_snapshots(&self, filter: &SnapshotFilter) -> Result<SnapshotPage, StoreError>;

    /// The *ready* image of the template of this name on a node.
    async fn template(&self, node: NodeId, name: &str) -> Result<Option<SnapshotRow>, StoreError>;

    /// All images of a node that sandboxes are made from, whatever their purpose and state, oldest first.
    async fn snapshots_on_node(&self, node: NodeId) -> Result<Vec<SnapshotRow>, StoreError>;

    /// The *ready* snapshots of a node that were made before `before`, and that no sandbox was made from since then, oldest
    /// first.
    async fn cold_snapshots(&self, node: NodeId, before: Timestamp) -> Result<Vec<SnapshotRow>, StoreError>;

    /// Opens a budget.
    async fn open_budget(&self, new: &NewBudget) -> Result<(), StoreError>;

    /// A budget.
    async fn budget(&self, id: &BudgetId) -> Result<Option<BudgetRow>, StoreError>;

    /// Sets money aside for a call, in one conditional step that is the only check there is: of what is left of the budget, and of
    /// what its team may spend on that day and in that month.
    async fn reserve(&self, wanted: &Reservation) -> Result<Reserved, StoreError>;

    /// Charges a call, and gives back the rest of what was set aside for it. `false` if it is settled already, or there is none.
    async fn charge(&self, charge: &Charge) -> Result<bool, StoreError>;

    /// Closes a budget: calls that are under way are charged all that was set aside. Returns what it came to; `None` if there is
    /// none. It may be called again.
    async fn close_budget(&self, id: &BudgetId, now: Timestamp) -> Result<Option<BudgetRow>, StoreError>;

    /// Charges all calls that are under way as a whole: those of a server that has died. Returns how many.
    async fn forfeit_calls(&self, now: Timestamp) -> Result<u64, StoreError>;

    /// The last [`MAX_CALLS`] calls of a budget, oldest first.
    async fn calls(&self, id: &BudgetId) -> Result<Vec<CallRow>, StoreError>;

    /// Lets a *running* sandbox spend a budget of its team, which is opened in the same transaction if it is new. It may have had
    /// another one, if that is closed.
    async fn grant_models(&self, id: &SandboxId, money: &Money) -> Result<Granted, StoreError>;

    /// What a sandbox that is not at its end may spend, and what is left of that.
    async fn spender(&self, id: &SandboxId) -> Result<Option<(ModelGrant, BudgetRow)>, StoreError>;

    /// Closes the budgets that are to be closed with the last sandbox that may spend them, where there is none and no call is under
    /// way. Returns how many.
    async fn close_unheld_budgets(&self, now: Timestamp) -> Result<u64, StoreError>;

    /// Keeps a table of prices under the digest of what it says.
    async fn keep_prices(&self, digest: Digest, models: &str) -> Result<(), StoreError>;

    /// What [`Store::keep_prices`] keeps under a digest.
    async fn prices(&self, digest: Digest) -> Result<Option<String>, StoreError>;

    /// Keeps what the vault's key is known by, unless there is such already. Returns what is kept.
    async fn mark_key(&self, mark: &[u8]) -> Result<Vec<u8>, StoreError>;

    /// Adds a secret to a team, which may have [`MAX_SECRETS`], each with another name.
    async fn insert_secret(&self, new: &SecretRow) -> Result<Kept, StoreError>;

    /// Gives a secret of a team another value. Returns the row as it is then; `None` if there is none.
    async fn update_secret(
        &self,
        team: TeamId,
        key: &SecretKey,
        change: &SecretChange,
    ) -> Result<Option<SecretRow>, StoreError>;

    /// A secret of a team.
    async fn secret(&self, team: TeamId, key: &SecretKey) -> Result<Option<SecretRow>, StoreError>;

    /// A page of a team's secrets.
    async fn list_secrets(&self, filter: &SecretFilter) -> Result<SecretPage, StoreError>;

    /// Removes a secret of a team. `false` if there is none.
    async fn delete_secret(&self, team: TeamId, key: &SecretKey) -> Result<bool, StoreError>;

    /// Keeps a connection of a team, which may have [`MAX_CONNECTIONS`], in the place of the one of its name.
    async fn put_connection(&self, new: &ConnectionRow) -> Result<Kept, StoreError>;

    /// A connection of a team.
    async fn connection(
        &self,
        team: TeamId,
        name: &ConnectionName,
    ) -> Result<Option<ConnectionRow>, StoreError>;

    /// All connections of a team, by their names.
    async fn connections(&self, team: TeamId) -> Result<Vec<ConnectionRow>, StoreError>;

    /// Removes a connection of a team. `false` if there is none.
    async fn delete_connection(&self, team: TeamId, name: &ConnectionName) -> Result<bool, StoreError>;

    /// Inserts a volume in state `Making`: in one transaction with the check of its name, of the quota and of the capacity.
    async fn insert_volume(&self, new: &NewVolume) -> Result<VolumeAdmitted, StoreError>;

    /// Moves a volume from `Making` to `Ready`. `false` if it is not being made.
    async fn volume_ready(&self, id: &VolumeId) -> Result<bool, StoreError>;

    /// Moves a volume to `Deleting`, after which no client finds it, if no sandbox that has not ended and no image has it.
    async fn begin_volume_deletion(&self, id: &VolumeId) -> Result<VolumeDeletion, StoreError>;

    /// Removes the row of a volume that is `Deleting`, once nothing of it is on the machine.
    async fn forget_volume(&self, id: &VolumeId) -> Result<(), StoreError>;

    /// A *ready* volume, of whatever team.
    async fn volume(&self, id: &VolumeId) -> Result<Option<VolumeRow>, StoreError>;

    /// The same, unless that team was revoked.
    async fn volume_of_a_team_that_works(&self, id: &VolumeId) -> Result<Option<VolumeRow>, StoreError>;

    /// All *ready* volumes of a team, oldest first.
    async fn volumes(&self, team: TeamId) -> Result<Vec<VolumeRow>, StoreError>;

    /// All volumes of a node, whatever their state, oldest first.
    async fn volumes_on_node(&self, node: NodeId) -> Result<Vec<VolumeRow>, StoreError>;

    /// Keeps what programs in an image have of volumes, instead of what was kept of it before.
    async fn note_marks(&self, image: &SandboxId, marks: &str) -> Result<(), StoreError>;

    /// What [`Store::note_marks`] keeps of an image.
    async fn marks(&self, image: &SandboxId) -> Result<Option<String>, StoreError>;

    /// Sets when the time of a *running* sandbox is up. With `only_later` an end that is not later than the present one
    /// changes nothing. The end in force afterwards, or `None` if it is not running, or is to be ended by now.
    async fn set_end(
        &self,
        id: &SandboxId,
        end_at: Timestamp,
        only_later: bool,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, StoreError>;

    /// Replaces what a *running* sandbox asks to reach. `false` if it is not running.
    async fn set_policy(
        &self,
        id: &SandboxId,
        policy: &Policy,
        allow_internet_access: Option<bool>,
    ) -> Result<bool, StoreError>;

    /// Says which way a sandbox comes to run that is `Creating`. `false` if it is not.
    async fn set_start_path(&self, id: &SandboxId, path: StartPath) -> Result<bool, StoreError>;

    /// One sandbox, whatever its state.
    async fn sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError>;

    /// A page of a team's sandboxes.
    async fn list(&self, filter: &ListFilter) -> Result<ListPage, StoreError>;

    /// All sandboxes of a node that are in one of `states`.
    async fn on_node(&self, node: NodeId, states: &[SandboxState]) -> Result<Vec<SandboxRow>, StoreError>;

    /// How many sandboxes of a node have not ended, by state; a state that none is in may be missing.
    async fn count_on_node(&self, node: NodeId) -> Result<Vec<(SandboxState, u64)>, StoreError>;

    /// What the sandboxes and the images of a node are promised together, as it counts against the capacity.
    async fn in_use(&self, node: NodeId) -> Result<Amount, StoreError>;

    /// The history of one sandbox, oldest first.
    async fn events(&self, id: &SandboxId) -> Result<Vec<Event>, StoreError>;

    /// The sandboxes of one of a team's users: the present one first, if there is one, and the last that they had before.
    async fn assignments(&self, team: TeamId, user: &UserName) -> Result<Vec<Assignment>, StoreError>;

    /// Ends the assignment of a user's present sandbox, which stays as it is. `false` if they have none.
    async fn release(&self, team: TeamId, user: &UserName, now: Timestamp) -> Result<bool, StoreError>;

    /// Forgets idempotency keys older than `before`. Returns how many.
    async fn purge_idempotency(&self, before: Timestamp) -> Result<u64, StoreError>;
}
