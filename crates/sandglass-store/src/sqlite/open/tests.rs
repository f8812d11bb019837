use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use sqlx::Row as _;
use tempfile::TempDir;

use super::*;
use crate::{SqliteStore, Store as _};

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    (folder, path)
}

async fn raw(path: &Path) -> SqliteConnection {
    options(path).connect().await.unwrap()
}

#[tokio::test]
async fn the_file_and_its_companions_are_private() {
    let (folder, path) = folder();
    let store = SqliteStore::open(&path).await.unwrap();
    store.create_team("acme", sandglass_types::Timestamp::from_millis(0)).await.unwrap();
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        names.push(entry.file_name().into_string().unwrap());
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o7777, 0o600, "{entry:?}");
    }
    names.sort();
    assert_eq!(names, ["store.db", "store.db-shm", "store.db-wal"]);
    store.close().await;
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn the_node_stays_the_same() {
    let (_folder, path) = folder();
    let first = SqliteStore::open(&path).await.unwrap();
    let node = first.node().await.unwrap();
    first.close().await;
    let second = SqliteStore::open(&path).await.unwrap();
    assert_eq!(second.node().await.unwrap(), node);
}

#[tokio::test]
async fn foreign_files_are_refused_and_left_alone() {
    let (_folder, path) = folder();
    let text = "not a database, but long enough to have a header ".repeat(50);
    std::fs::write(&path, &text).unwrap();
    for outcome in [SqliteStore::open(&path).await, SqliteStore::open_read_only(&path).await] {
        assert!(matches!(outcome, Err(StoreError::NotOurs { .. })), "{outcome:?}");
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);

    std::fs::remove_file(&path).unwrap();
    let mut other = options(&path).create_if_missing(true).connect().await.unwrap();
    sqlx::query("CREATE TABLE teams (id)").execute(&mut other).await.unwrap();
    other.close().await.unwrap();
    let before = std::fs::read(&path).unwrap();
    for outcome in [SqliteStore::open(&path).await, SqliteStore::open_read_only(&path).await] {
        assert!(matches!(outcome, Err(StoreError::NotOurs { .. })), "{outcome:?}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[tokio::test]
async fn newer_and_changed_schemas_are_refused() {
    let (_folder, path) = folder();
    SqliteStore::open(&path).await.unwrap().close().await;
    let mut connection = raw(&path).await;
    sqlx::query("UPDATE _sqlx_migrations SET checksum = x'00'").execute(&mut connection).await.unwrap();
    sqlx::query("INSERT INTO _sqlx_migrations SELECT ?1, description, installed_on, success, checksum, 0 FROM _sqlx_migrations LIMIT 1")
        .bind(newest() + 1)
        .execute(&mut connection)
        .await
        .unwrap();
    for outcome in [SqliteStore::open(&path).await, SqliteStore::open_read_only(&path).await] {
        let Err(StoreError::NewerSchema { found, known }) = outcome else { panic!("{outcome:?}") };
        assert_eq!((found, known), (newest() + 1, newest()));
    }
    let count = "SELECT count(*) FROM _sqlx_migrations";
    let before: i64 = sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap();
    assert_eq!(usize::try_from(before).unwrap(), MIGRATOR.iter().count() + 1);
}

#[tokio::test]
async fn reading_alone_changes_nothing_and_needs_a_current_store() {
    let (_folder, path) = folder();
    assert!(matches!(SqliteStore::open_read_only(&path).await, Err(StoreError::Database(_))));
    assert!(!path.exists());

    let server = SqliteStore::open(&path).await.unwrap();
    let now = sandglass_types::Timestamp::from_millis(0);
    server.create_team("acme", now).await.unwrap();
    let reader = SqliteStore::open_read_only(&path).await.unwrap();
    assert_eq!(reader.teams().await.unwrap().len(), 1, "sees what a live server wrote");
    assert!(matches!(reader.create_team("other", now).await, Err(StoreError::Database(_))));
    server.create_team("later", now).await.unwrap();
    assert_eq!(reader.teams().await.unwrap().len(), 2);
    reader.close().await;
    server.close().await;

    let reader = SqliteStore::open_read_only(&path).await.unwrap();
    assert_eq!(reader.teams().await.unwrap().len(), 2, "and what a dead one left");
}

/// What a killed server leaves: a file, and a log with its last commits.
#[tokio::test]
async fn commits_of_a_killed_server_are_read() {
    let (folder, path) = folder();
    let server = SqliteStore::open(&path).await.unwrap();
    server.create_team("acme", sandglass_types::Timestamp::from_millis(0)).await.unwrap();
    let copy = folder.path().join("copy.db");
    for end in ["", "-wal"] {
        let with_end = |path: &Path| PathBuf::from(format!("{}{end}", path.display()));
        std::fs::copy(with_end(&path), with_end(&copy)).unwrap();
    }
    let reader = SqliteStore::open_read_only(&copy).await.unwrap();
    assert_eq!(reader.teams().await.unwrap().len(), 1);
    reader.close().await;
    let next = SqliteStore::open(&copy).await.unwrap();
    assert_eq!(next.teams().await.unwrap().len(), 1);
    assert_eq!(next.node().await.unwrap(), server.node().await.unwrap());
}

/// The definition of everything in the file, `SQLite`'s and sqlx's own tables left out.
async fn schema(connection: &mut SqliteConnection) -> Vec<(String, String, String)> {
    sqlx::query(
        "SELECT type, name, coalesce(sql, '') FROM sqlite_schema WHERE name NOT LIKE '\\_sqlx%' ESCAPE '\\' \
         ORDER BY type, name",
    )
    .fetch_all(connection)
    .await
    .unwrap()
    .iter()
    .map(|row| (row.get(0), row.get(1), row.get(2)))
    .collect()
}

#[tokio::test]
async fn every_older_schema_becomes_the_newest() {
    let (_folder, path) = folder();
    SqliteStore::open(&path).await.unwrap().close().await;
    let newest_schema = schema(&mut raw(&path).await).await;
    assert!(newest_schema.iter().any(|(kind, name, _)| kind == "table" && name == "sandboxes"));
    for old in MIGRATOR.iter().map(|step| step.version) {
        let (_folder, path) = folder();
        let mut connection = options(&path).create_if_missing(true).connect().await.unwrap();
        sqlx::query("PRAGMA application_id = 1399280500").execute(&mut connection).await.unwrap();
        MIGRATOR.run_direct(Some(old), &mut connection, false).await.unwrap();
        let node = NodeId::random();
        sqlx::query("INSERT INTO meta (key, value) VALUES ('node', ?1)")
            .bind(node.to_string())
            .execute(&mut connection)
            .await
            .unwrap();
        connection.close().await.unwrap();
        let store = SqliteStore::open(&path).await.unwrap();
        assert_eq!(schema(&mut raw(&path).await).await, newest_schema, "from version {old}");
        assert_eq!(store.node().await.unwrap(), node);
    }
}

#[test]
fn schema_versions_count_up_and_none_is_forgotten() {
    let versions: Vec<i64> = MIGRATOR.iter().map(|step| step.version).collect();
    assert!(versions.iter().zip(1..).all(|(found, expected)| *found == expected), "{versions:?}");
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/sqlite")).unwrap();
    let mut files: Vec<_> = folder.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    assert_eq!(files, STEPS.map(|(version, description, _)| format!("{version:04}_{description}.sql")));
}

/// Not a test by itself: the other process of the one below.
#[tokio::test]
async fn another_process() {
    let Some(path) = std::env::var_os("SANDGLASS_TEST_STORE") else { return };
    let store = SqliteStore::open(Path::new(&path)).await.unwrap();
    let name = std::process::id();
    let now = sandglass_types::Timestamp::from_millis(0);
    for team in 0..10 {
        store.create_team(&format!("{name}-{team}"), now).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn several_processes_and_tasks_make_one_store() {
    let (_folder, path) = folder();
    let test = std::env::current_exe().unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| {
            Command::new(&test)
                .args(["--exact", "sqlite::open::tests::another_process"])
                .env("SANDGLASS_TEST_STORE", &path)
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let path = path.clone();
        tasks.spawn(async move { SqliteStore::open(&path).await.unwrap() });
    }
    let stores = tasks.join_all().await;
    for child in children {
        let outcome = tokio::task::spawn_blocking(move || child.wait_with_output()).await.unwrap().unwrap();
        assert!(outcome.status.success(), "{outcome:?}");
    }
    for store in &stores {
        assert_eq!(store.teams().await.unwrap().len(), 30);
        assert_eq!(store.node().await.unwrap(), stores[0].node().await.unwrap());
    }
}
