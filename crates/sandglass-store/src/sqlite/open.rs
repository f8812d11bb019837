//! From a path to a file with the right schema, whoever else is doing the same.

use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode};
use rustix::io::Errno;
use sandglass_types::NodeId;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions as _, Connection as _, SqlStr};

use super::{BUSY_TIMEOUT, database};
use crate::StoreError;

/// The files in `migrations/sqlite`, by version. `sqlx::migrate!` would find them itself, but all of sqlx, with `SQLite`,
/// would have to be built a second time for it.
const STEPS: [(i64, &str, &str); 21] = [
    (1, "init", include_str!("../../migrations/sqlite/0001_init.sql")),
    (2, "egress", include_str!("../../migrations/sqlite/0002_egress.sql")),
    (3, "bounds", include_str!("../../migrations/sqlite/0003_bounds.sql")),
    (4, "operator", include_str!("../../migrations/sqlite/0004_operator.sql")),
    (5, "pause", include_str!("../../migrations/sqlite/0005_pause.sql")),
    (6, "lifetimes", include_str!("../../migrations/sqlite/0006_lifetimes.sql")),
    (7, "idle", include_str!("../../migrations/sqlite/0007_idle.sql")),
    (8, "snapshots", include_str!("../../migrations/sqlite/0008_snapshots.sql")),
    (9, "assignments", include_str!("../../migrations/sqlite/0009_assignments.sql")),
    (10, "templates", include_str!("../../migrations/sqlite/0010_templates.sql")),
    (11, "measured", include_str!("../../migrations/sqlite/0011_measured.sql")),
    (12, "samples", include_str!("../../migrations/sqlite/0012_samples.sql")),
    (13, "uses", include_str!("../../migrations/sqlite/0013_uses.sql")),
    (14, "accounts", include_str!("../../migrations/sqlite/0014_accounts.sql")),
    (15, "volumes", include_str!("../../migrations/sqlite/0015_volumes.sql")),
    (16, "budgets", include_str!("../../migrations/sqlite/0016_budgets.sql")),
    (17, "marks", include_str!("../../migrations/sqlite/0017_marks.sql")),
    (18, "grants", include_str!("../../migrations/sqlite/0018_grants.sql")),
    (19, "runs", include_str!("../../migrations/sqlite/0019_runs.sql")),
    (20, "broker", include_str!("../../migrations/sqlite/0020_broker.sql")),
    (21, "collected", include_str!("../../migrations/sqlite/0021_collected.sql")),
];

/// All schema changes, oldest first.
pub(super) static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let step = |(version, description, sql): (i64, &'static str, &'static str)| {
        Migration::new(version, description.into(), MigrationType::Simple, SqlStr::from_static(sql), false)
    };
    Migrator::with_migrations(STEPS.map(step).into())
});

/// `SgSt`, in the header of every file of ours (<https://www.sqlite.org/pragma.html#pragma_application_id>).
const APPLICATION_ID: i32 = 0x5367_5374;

/// What a file was before we touched it.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// No table at all.
    Empty,
    /// Ours, with this schema version.
    Ours(i64),
}

/// What every connection has in common. It never makes a file.
pub(super) fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(false)
        .foreign_keys(true)
        .busy_timeout(BUSY_TIMEOUT)
        .pragma("temp_store", "MEMORY")
        // What a crafted schema could call is only what it needs.
        .pragma("trusted_schema", "OFF")
        .disable_statement_logging()
}

/// The newest schema that this program knows.
fn newest() -> i64 {
    MIGRATOR.iter().map(|step| step.version).max().unwrap_or(0)
}

/// Makes the file if there is none and brings its schema up to date.
pub(super) async fn prepare(path: &Path) -> Result<(), StoreError> {
    create_file(path).map_err(|error| match error {
        Errno::NOSPC | Errno::DQUOT => StoreError::Full,
        error => StoreError::Database(Box::new(error)),
    })?;
    let mut connection = options(path).connect().await.map_err(|error| not_a_database(error, path))?;
    let outcome = bring_up_to_date(&mut connection, path).await;
    let closed = connection.close().await.map_err(database);
    outcome.and(closed)
}

/// Checks that a store is one that this program can read as it is.
pub(super) async fn check_current(path: &Path, options: &SqliteConnectOptions) -> Result<(), StoreError> {
    let mut connection = options.connect().await.map_err(|error| not_a_database(error, path))?;
    let found = identify(&mut connection, path).await;
    let closed = connection.close().await.map_err(database);
    match found.and_then(|found| closed.map(|()| found))? {
        Found::Ours(version) if version == newest() => Ok(()),
        Found::Ours(version) => Err(StoreError::Corrupt {
            what: "schema",
            detail: format!("version {version} must be brought to {} by the server first", newest()),
        }),
        Found::Empty => Err(StoreError::NotOurs { path: path.display().to_string() }),
    }
}

/// Makes an empty file that nobody else can read. It is never opened here: closing any descriptor of a file drops
/// all POSIX locks that this process holds on it, those of `SQLite` included.
fn create_file(path: &Path) -> Result<(), Errno> {
    match rustix::fs::mknodat(CWD, path, FileType::RegularFile, Mode::RUSR | Mode::WUSR, 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn bring_up_to_date(connection: &mut SqliteConnection, path: &Path) -> Result<(), StoreError> {
    // Nothing is written before it is certain that the file is ours to write.
    let found = identify(connection, path).await?;
    switch_to_wal(connection).await?;
    if found == Found::Ours(newest()) {
        return Ok(());
    }
    let mut change = connection.begin_with("BEGIN IMMEDIATE").await.map_err(database)?;
    // Another process may have done it while this one waited for the lock.
    if identify(&mut change, path).await? == Found::Empty {
        // A constant; PRAGMA takes no parameters.
        sqlx::query("PRAGMA application_id = 1399280500").execute(&mut *change).await.map_err(database)?;
    }
    MIGRATOR.run_direct(None, &mut *change, false).await.map_err(migration)?;
    sqlx::query("INSERT INTO meta (key, value) VALUES ('node', ?1) ON CONFLICT DO NOTHING")
        .bind(NodeId::random().to_string())
        .execute(&mut *change)
        .await
        .map_err(database)?;
    change.commit().await.map_err(database)
}

/// Reads what the file is, in one transaction: another process may be making it.
async fn identify(connection: &mut SqliteConnection, path: &Path) -> Result<Found, StoreError> {
    let mut read = connection.begin().await.map_err(|error| not_a_database(error, path))?;
    let id: i32 = sqlx::query_scalar("PRAGMA application_id")
        .fetch_one(&mut *read)
        .await
        .map_err(|error| not_a_database(error, path))?;
    let tables: i64 = sqlx::query_scalar("SELECT count(*) FROM sqlite_schema")
        .fetch_one(&mut *read)
        .await
        .map_err(|error| not_a_database(error, path))?;
    match (id, tables) {
        (0, 0) => return Ok(Found::Empty),
        (APPLICATION_ID, _) => {}
        _ => return Err(StoreError::NotOurs { path: path.display().to_string() }),
    }
    let version: Option<i64> = sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations")
        .fetch_one(&mut *read)
        .await
        .map_err(database)?;
    read.commit().await.map_err(database)?;
    let found = version.unwrap_or(0);
    if found > newest() {
        return Err(StoreError::NewerSchema { found, known: newest() });
    }
    Ok(Found::Ours(found))
}

/// The switch needs the file for itself and doesn't wait for it, so wait here while others open the same file.
async fn switch_to_wal(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    const SQLITE_BUSY: &str = "5";
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        let outcome: Result<String, _> =
            sqlx::query_scalar("PRAGMA journal_mode = WAL").fetch_one(&mut *connection).await;
        match outcome {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(mode) => {
                let detail = format!("the file system allows journal mode {mode} only");
                return Err(StoreError::Database(detail.into()));
            }
            Err(sqlx::Error::Database(cause))
                if cause.code().is_some_and(|code| code == SQLITE_BUSY) && Instant::now() < deadline =>
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(error) => return Err(database(error)),
        }
    }
}

/// `SQLITE_NOTADB` says that the file is none of ours; everything else is a failure.
fn not_a_database(error: sqlx::Error, path: &Path) -> StoreError {
    const SQLITE_NOTADB: &str = "26";
    match &error {
        sqlx::Error::Database(cause) if cause.code().is_some_and(|code| code == SQLITE_NOTADB) => {
            StoreError::NotOurs { path: path.display().to_string() }
        }
        _ => database(error),
    }
}

fn migration(error: MigrateError) -> StoreError {
    match error {
        MigrateError::VersionMismatch(version) | MigrateError::VersionMissing(version) => {
            StoreError::Corrupt {
                what: "schema",
                detail: format!("step {version} was another one when it was applied"),
            }
        }
        error => StoreError::Database(Box::new(error)),
    }
}

#[cfg(test)]
mod tests;
