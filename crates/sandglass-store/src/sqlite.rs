//! The store in one SQLite file.
//!
//! One connection writes at a time (`BEGIN IMMEDIATE`, so a verb never fails half-way for want of the lock), a few
//! read; the file is in WAL mode, so readers never wait for the writer. Several processes may have it open: the
//! server, and the command line beside it.
//!
//! A power cut may lose the last commits of ordinary verbs (`synchronous=NORMAL`): what they describe is gone with
//! the machine's memory anyway. Verbs on teams and keys are on disk when they return (`synchronous=FULL`), because
//! a revoked key must never come back, and so are those on secrets and connections, new runs and their ends, moves to and
//! from `Paused` and all of snapshots and volumes, because an
//! image outlives the power.

mod assignments;
mod audit;
mod broker;
mod grants;
mod keys;
mod list;
mod open;
mod rows;
mod runs;
mod samples;
mod sandboxes;
mod snapshots;
mod spending;
mod team_samples;
mod teams;
mod volumes;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use sandglass_broker::ConnectionName;
use sandglass_egress::policy::Policy;
use sandglass_types::budget::Amount;
use sandglass_types::{
    BudgetId, Digest, KeyId, Limits, Name, NodeId, SandboxId, SandboxState, SnapshotId, TeamId, Timestamp,
    UserName, VolumeId,
};
use sqlx::sqlite::{SqliteConnection, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Connection as _, Sqlite, Transaction};

use crate::{
    Admitted, ApiKey, Assignment, AuditEntry, BudgetRow, CallRow, Charge, ConnectionRow, Created, Event,
    Finished, Granted, IdempotencyKey, Identity, Kept, KeyDigest, ListFilter, ListPage, ModelGrant, Money,
    NewBudget, NewSandbox, NewSnapshot, NewVolume, Reservation, Reserved, Resume, Resumed, Sample,
    SandboxRow, SecretChange, SecretFilter, SecretKey, SecretPage, SecretRow, SnapshotFilter, SnapshotKey,
    SnapshotPage, SnapshotRow, StartPath, Store, StoreError, Team, TeamSample, Transition, VolumeAdmitted,
    VolumeDeletion, VolumeRow,
};

/// How long one verb waits for another process' write before it fails.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections that read; their queries take microseconds.
const READERS: u32 = 2;

/// The store in one SQLite file.
pub struct SqliteStore {
    path: PathBuf,
    /// Exactly one connection.
    writer: SqlitePool,
    /// Exactly one connection, whose commits are on disk.
    durable: SqlitePool,
    readers: SqlitePool,
    uses: keys::Uses,
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Opens the store, makes it (mode 0600) if there is no file, and brings an older schema up to date.
    ///
    /// # Errors
    /// [`StoreError::NewerSchema`], [`StoreError::NotOurs`], [`StoreError::Corrupt`] if its schema has another
    /// history than this program's or the file is damaged, [`StoreError::Full`], or [`StoreError::Database`].
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        open::prepare(path).await?;
        let options = open::options(path).synchronous(SqliteSynchronous::Normal);
        // Made once and kept. SQLite holds on to the descriptor of a connection that is closed while others are open, so
        // closing what is idle would give nothing back.
        let pool = |connections| {
            SqlitePoolOptions::new()
                .min_connections(connections)
                .max_connections(connections)
                .idle_timeout(None)
                .max_lifetime(None)
        };
        let one = || pool(1).after_release(|connection, _| Box::pin(is_clean(connection)));
        let writer = one().connect_with(options.clone()).await.map_err(database)?;
        // Content that was kept for a time is removed over this one, and overwritten.
        let durable = one()
            .connect_with(options.clone().synchronous(SqliteSynchronous::Full).pragma("secure_delete", "ON"))
            .await
            .map_err(database)?;
        let readers =
            pool(READERS).connect_with(options.pragma("query_only", "ON")).await.map_err(database)?;
        Ok(Self { path: path.to_owned(), writer, durable, readers, uses: keys::Uses::default() })
    }

    /// Opens an existing store for reading alone; every verb that writes fails. The schema must be the one that
    /// this program knows: an older one is left as it is and refused.
    ///
    /// # Errors
    /// As [`SqliteStore::open`]; [`StoreError::Database`] if there is no file.
    pub async fn open_read_only(path: &Path) -> Result<Self, StoreError> {
        let options = open::options(path).read_only(true);
        open::check_current(path, &options).await?;
        let pool = SqlitePoolOptions::new().max_connections(1).connect_lazy_with(options);
        let uses = keys::Uses::default();
        Ok(Self { path: path.to_owned(), writer: pool.clone(), durable: pool.clone(), readers: pool, uses })
    }

    /// Ends all connections. The last process to do so leaves a single file behind.
    pub async fn close(&self) {
        self.readers.close().await;
        self.durable.close().await;
        self.writer.close().await;
    }

    async fn write(&self) -> Result<Transaction<'static, Sqlite>, StoreError> {
        self.writer.begin_with("BEGIN IMMEDIATE").await.map_err(database)
    }

    async fn write_durably(&self) -> Result<Transaction<'static, Sqlite>, StoreError> {
        self.durable.begin_with("BEGIN IMMEDIATE").await.map_err(database)
    }
}

/// Whether a connection that comes back may be used again. When the disk is full, SQLite ends a transaction by itself,
/// and sqlx goes on believing in it: every later one on that connection would fail.
async fn is_clean(connection: &mut SqliteConnection) -> sqlx::Result<bool> {
    // What the last user left to be rolled back comes before this.
    connection.ping().await?;
    Ok(!connection.is_in_transaction())
}

/// Tells a full disk and a damaged file (<https://www.sqlite.org/rescode.html>) from all other failures.
fn database(error: sqlx::Error) -> StoreError {
    const SQLITE_CORRUPT: u32 = 11;
    const SQLITE_FULL: u32 = 13;
    /// What a full disk looks like to the index of the write-ahead log.
    const SQLITE_IOERR_SHMSIZE: u32 = 4874;
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    match code.and_then(|code| code.parse::<u32>().ok()) {
        Some(SQLITE_IOERR_SHMSIZE) => StoreError::Full,
        // The low byte of an extended code is the kind of failure.
        Some(code) if code & 0xff == SQLITE_FULL => StoreError::Full,
        Some(code) if code & 0xff == SQLITE_CORRUPT => {
            StoreError::Corrupt { what: "file", detail: error.to_string() }
        }
        _ => StoreError::Database(Box::new(error)),
    }
}

/// Turns the violation of a uniqueness rule into [`StoreError::Exists`].
fn exists_or_database(error: sqlx::Error, what: &'static str, name: &str) -> StoreError {
    match &error {
        sqlx::Error::Database(cause) if cause.is_unique_violation() => {
            StoreError::Exists { what, name: name.to_owned() }
        }
        _ => database(error),
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn node(&self) -> Result<NodeId, StoreError> {
        let text: String = sqlx::query_scalar("SELECT value FROM meta WHERE key = 'node'")
            .fetch_one(&self.readers)
            .await
            .map_err(database)?;
        rows::parse("node", &text)
    }

    async fn create_team(&self, name: &str, now: Timestamp) -> Result<Team, StoreError> {
        self.insert_team(name, now).await
    }

    async fn teams(&self) -> Result<Vec<Team>, StoreError> {
        self.select_teams().await
    }

    async fn revoke_team(&self, team: TeamId, now: Timestamp) -> Result<bool, StoreError> {
        self.end_team(team, now).await
    }

    async fn create_key(&self, key: &ApiKey) -> Result<(), StoreError> {
        self.insert_key(key).await
    }

    async fn keys(&self, team: Option<TeamId>) -> Result<Vec<ApiKey>, StoreError> {
        self.select_keys(team).await
    }

    async fn revoke_key(&self, key: KeyId, now: Timestamp) -> Result<bool, StoreError> {
        self.end_key(key, now).await
    }

    async fn retire_key(&self, by: &Identity, key: KeyId, now: Timestamp) -> Result<bool, StoreError> {
        self.end_key_of(by, key, now).await
    }

    async fn rename_key(&self, by: &Identity, key: KeyId, name: &Name) -> Result<bool, StoreError> {
        self.name_key(by, key, name).await
    }

    async fn authenticate(&self, digest: &KeyDigest, now: Timestamp) -> Result<Option<Identity>, StoreError> {
        self.owner_of_key(digest, now).await
    }

    async fn note_uses(&self) -> Result<(), StoreError> {
        self.write_uses().await
    }

    async fn audit(&self, entry: &AuditEntry) -> Result<(), StoreError> {
        self.insert_audit(entry).await
    }

    async fn audited(&self, since: Option<Timestamp>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        self.select_audit(since, limit).await
    }

    async fn record_samples(&self, samples: &[Sample]) -> Result<(), StoreError> {
        self.insert_samples(samples).await
    }

    async fn samples(
        &self,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<Sample>, StoreError> {
        self.select_samples(id, from, to).await
    }

    async fn last_samples(
        &self,
        team: TeamId,
        ids: &[SandboxId],
    ) -> Result<Vec<(Limits, Sample)>, StoreError> {
        self.select_last_samples(team, ids).await
    }

    async fn thin_samples(&self, fine: Timestamp, before: Timestamp) -> Result<u64, StoreError> {
        self.thin_out_samples(fine, before).await
    }

    async fn sample_teams(&self, node: NodeId, since: Timestamp, now: Timestamp) -> Result<(), StoreError> {
        self.insert_team_samples(node, since, now).await
    }

    async fn team_samples(
        &self,
        team: TeamId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<TeamSample>, StoreError> {
        self.select_team_samples(team, from, to).await
    }

    async fn purge_team_samples(&self, before: Timestamp) -> Result<u64, StoreError> {
        self.forget_team_samples(before).await
    }

    async fn purge_audit(&self, before: Timestamp) -> Result<u64, StoreError> {
        self.forget_audit(before).await
    }

    async fn insert_sandbox(&self, new: &NewSandbox) -> Result<Created, StoreError> {
        self.insert(new).await
    }

    async fn earlier(
        &self,
        team: TeamId,
        (key, digest): &(IdempotencyKey, Digest),
    ) -> Result<Option<Created>, StoreError> {
        let mut reader = self.readers.acquire().await.map_err(database)?;
        sandboxes::earlier_request(&mut reader, team, key, digest).await
    }

    async fn transition(&self, id: &SandboxId, change: &Transition) -> Result<bool, StoreError> {
        self.move_state(id, change).await
    }

    async fn resume(&self, id: &SandboxId, resume: &Resume) -> Result<Resumed, StoreError> {
        self.begin_resume(id, resume).await
    }

    async fn insert_snapshot(
        &self,
        new: &NewSnapshot,
        children: &[NewSandbox],
    ) -> Result<Admitted, StoreError> {
        self.insert_image(new, children).await
    }

    async fn snapshot_ready(
        &self,
        id: &SnapshotId,
        instead_of: Option<&SnapshotId>,
    ) -> Result<Finished, StoreError> {
        self.finish_image(id, instead_of).await
    }

    async fn begin_snapshot_deletion(&self, id: &SnapshotId) -> Result<bool, StoreError> {
        self.give_image_up(id).await
    }

    async fn forget_snapshot(&self, id: &SnapshotId) -> Result<(), StoreError> {
        self.forget_image(id).await
    }

    async fn snapshot(&self, team: TeamId, key: &SnapshotKey) -> Result<Option<SnapshotRow>, StoreError> {
        self.find_snapshot(team, key).await
    }

    async fn list_snapshots(&self, filter: &SnapshotFilter) -> Result<SnapshotPage, StoreError> {
        self.page_of_snapshots(filter).await
    }

    async fn template(&self, node: NodeId, name: &str) -> Result<Option<SnapshotRow>, StoreError> {
        self.image_of_template(node, name).await
    }

    async fn snapshots_on_node(&self, node: NodeId) -> Result<Vec<SnapshotRow>, StoreError> {
        self.images_of_node(node).await
    }

    async fn cold_snapshots(&self, node: NodeId, before: Timestamp) -> Result<Vec<SnapshotRow>, StoreError> {
        self.unused_snapshots(node, before).await
    }

    async fn set_start_path(&self, id: &SandboxId, path: StartPath) -> Result<bool, StoreError> {
        self.replace_start_path(id, path).await
    }

    async fn open_budget(&self, new: &NewBudget) -> Result<(), StoreError> {
        self.insert_budget(new).await
    }

    async fn budget(&self, id: &BudgetId) -> Result<Option<BudgetRow>, StoreError> {
        self.budget_of(id).await
    }

    async fn reserve(&self, wanted: &Reservation) -> Result<Reserved, StoreError> {
        self.set_aside(wanted).await
    }

    async fn charge(&self, charge: &Charge) -> Result<bool, StoreError> {
        self.charge_call(charge).await
    }

    async fn close_budget(&self, id: &BudgetId, now: Timestamp) -> Result<Option<BudgetRow>, StoreError> {
        self.end_budget(id, now).await
    }

    async fn forfeit_calls(&self, now: Timestamp) -> Result<u64, StoreError> {
        self.forfeit_all(now).await
    }

    async fn calls(&self, id: &BudgetId) -> Result<Vec<CallRow>, StoreError> {
        self.calls_of(id).await
    }

    async fn grant_models(&self, id: &SandboxId, money: &Money) -> Result<Granted, StoreError> {
        self.grant_money(id, money).await
    }

    async fn spender(&self, id: &SandboxId) -> Result<Option<(ModelGrant, BudgetRow)>, StoreError> {
        self.money_of(id).await
    }

    async fn close_unheld_budgets(&self, now: Timestamp) -> Result<u64, StoreError> {
        self.end_unheld_budgets(now).await
    }

    async fn keep_prices(&self, digest: Digest, models: &str) -> Result<(), StoreError> {
        self.insert_prices(digest, models).await
    }

    async fn prices(&self, digest: Digest) -> Result<Option<String>, StoreError> {
        self.prices_of(digest).await
    }

    async fn mark_key(&self, mark: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.keep_mark(mark).await
    }

    async fn insert_secret(&self, new: &SecretRow) -> Result<Kept, StoreError> {
        self.insert_new_secret(new).await
    }

    async fn update_secret(
        &self,
        team: TeamId,
        key: &SecretKey,
        change: &SecretChange,
    ) -> Result<Option<SecretRow>, StoreError> {
        self.change_secret(team, key, change).await
    }

    async fn secret(&self, team: TeamId, key: &SecretKey) -> Result<Option<SecretRow>, StoreError> {
        self.secret_of(team, key).await
    }

    async fn list_secrets(&self, filter: &SecretFilter) -> Result<SecretPage, StoreError> {
        self.page_of_secrets(filter).await
    }

    async fn delete_secret(&self, team: TeamId, key: &SecretKey) -> Result<bool, StoreError> {
        self.remove_secret(team, key).await
    }

    async fn put_connection(&self, new: &ConnectionRow) -> Result<Kept, StoreError> {
        self.keep_connection(new).await
    }

    async fn connection(
        &self,
        team: TeamId,
        name: &ConnectionName,
    ) -> Result<Option<ConnectionRow>, StoreError> {
        self.connection_of(team, name).await
    }

    async fn connections(&self, team: TeamId) -> Result<Vec<ConnectionRow>, StoreError> {
        self.connections_of(team).await
    }

    async fn delete_connection(&self, team: TeamId, name: &ConnectionName) -> Result<bool, StoreError> {
        self.remove_connection(team, name).await
    }

    async fn insert_volume(&self, new: &NewVolume) -> Result<VolumeAdmitted, StoreError> {
        self.insert_new_volume(new).await
    }

    async fn volume_ready(&self, id: &VolumeId) -> Result<bool, StoreError> {
        self.finish_volume(id).await
    }

    async fn begin_volume_deletion(&self, id: &VolumeId) -> Result<VolumeDeletion, StoreError> {
        self.give_volume_up(id).await
    }

    async fn forget_volume(&self, id: &VolumeId) -> Result<(), StoreError> {
        self.forget_volume_row(id).await
    }

    async fn volume(&self, id: &VolumeId) -> Result<Option<VolumeRow>, StoreError> {
        self.volume_of(id).await
    }

    async fn volume_of_a_team_that_works(&self, id: &VolumeId) -> Result<Option<VolumeRow>, StoreError> {
        self.volume_of_working_team(id).await
    }

    async fn volumes(&self, team: TeamId) -> Result<Vec<VolumeRow>, StoreError> {
        self.volumes_of_team(team).await
    }

    async fn volumes_on_node(&self, node: NodeId) -> Result<Vec<VolumeRow>, StoreError> {
        self.volumes_of_node(node).await
    }

    async fn note_marks(&self, image: &SandboxId, marks: &str) -> Result<(), StoreError> {
        self.keep_marks(image, marks).await
    }

    async fn marks(&self, image: &SandboxId) -> Result<Option<String>, StoreError> {
        self.marks_of(image).await
    }

    async fn set_end(
        &self,
        id: &SandboxId,
        end_at: Timestamp,
        only_later: bool,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, StoreError> {
        self.move_end(id, end_at, only_later, now).await
    }

    async fn set_policy(
        &self,
        id: &SandboxId,
        policy: &Policy,
        allow_internet_access: Option<bool>,
    ) -> Result<bool, StoreError> {
        self.replace_policy(id, policy, allow_internet_access).await
    }

    async fn sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        self.select(id).await
    }

    async fn list(&self, filter: &ListFilter) -> Result<ListPage, StoreError> {
        self.page(filter).await
    }

    async fn on_node(&self, node: NodeId, states: &[SandboxState]) -> Result<Vec<SandboxRow>, StoreError> {
        self.select_on_node(node, states).await
    }

    async fn count_on_node(&self, node: NodeId) -> Result<Vec<(SandboxState, u64)>, StoreError> {
        self.count_by_state(node).await
    }

    async fn in_use(&self, node: NodeId) -> Result<Amount, StoreError> {
        self.in_use_on(node).await
    }

    async fn events(&self, id: &SandboxId) -> Result<Vec<Event>, StoreError> {
        self.select_events(id).await
    }

    async fn assignments(&self, team: TeamId, user: &UserName) -> Result<Vec<Assignment>, StoreError> {
        self.select_assignments(team, user).await
    }

    async fn release(&self, team: TeamId, user: &UserName, now: Timestamp) -> Result<bool, StoreError> {
        self.end_assignment(team, user, now).await
    }

    async fn purge_idempotency(&self, before: Timestamp) -> Result<u64, StoreError> {
        self.forget_keys(before).await
    }
}

#[cfg(test)]
mod tests;
