use std::collections::BTreeMap;
use std::sync::Arc;

use sqlx::Row as _;
use tempfile::TempDir;

use super::*;
use crate::conformance::{all_of, at, digest, key_of, sandbox_of, step};
use crate::runs::RunStore as _;
use crate::{Artifact, NewRun, RunAdmitted};

async fn open() -> (SqliteStore, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&folder.path().join("store.db")).await.unwrap();
    (store, folder)
}

async fn fresh() -> (Arc<dyn Store>, TempDir) {
    let (store, folder) = open().await;
    (Arc::new(store), folder)
}

crate::store_conformance!(fresh());

/// JSON functions of `SQLite` cut texts here.
#[tokio::test]
async fn a_nul_is_a_character_like_others() {
    let (store, _folder) = open().await;
    let team = store.create_team("acme", at(0)).await.unwrap().id;
    let labels = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
    let new = NewSandbox { metadata: labels("a\0b", "c\0d"), ..sandbox_of(team, 0) };
    store.insert_sandbox(&new).await.unwrap();
    let row = store.sandbox(&new.id).await.unwrap().unwrap();
    assert_eq!(row.metadata, new.metadata);
    for (key, value, hits) in [("a\0b", "c\0d", 1), ("a", "c\0d", 0), ("a\0b", "c", 0), ("ab", "cd", 0)] {
        let filter = ListFilter { metadata: labels(key, value), ..all_of(team) };
        assert_eq!(store.list(&filter).await.unwrap().rows.len(), hits, "{key:?}");
    }
}

#[tokio::test]
async fn a_full_disk_fails_a_verb_and_none_after_it() {
    let (store, _folder) = open().await;
    let team = store.create_team("acme", at(0)).await.unwrap().id;
    // For this connection alone the file may not grow any more.
    sqlx::query("PRAGMA max_page_count = 1").execute(&store.writer).await.unwrap();
    let large = BTreeMap::from([("k".to_owned(), "v".repeat(60_000))]);
    let new = NewSandbox { metadata: large, ..sandbox_of(team, 0) };
    let error = store.insert_sandbox(&new).await.unwrap_err();
    assert!(matches!(error, StoreError::Full), "{error:?}");
    assert!(store.sandbox(&new.id).await.unwrap().is_none());
    store.insert_sandbox(&new).await.unwrap();
    assert_eq!(store.sandbox(&new.id).await.unwrap().unwrap().metadata, new.metadata);
}

#[tokio::test]
async fn rows_that_we_cannot_have_written_are_corrupt() {
    let (store, _folder) = open().await;
    let team = store.create_team("acme", at(0)).await.unwrap().id;
    store.create_key(&key_of(team, 1)).await.unwrap();
    let damage = [
        ("node", "'x'"),
        ("rootfs", "replace(hex(zeroblob(32)), '0', 'G')"),
        ("cpus", "0"),
        ("cpus", "-1"),
        ("memory_mib", "4294967296"),
        ("metadata", "'[]'"),
        ("env", "'{\"a\":1}'"),
        ("end_reason", "'bored'"),
        ("generation", "4294967297"),
    ];
    for (column, value) in damage {
        let new = sandbox_of(team, 0);
        store.insert_sandbox(&new).await.unwrap();
        sqlx::query(sqlx::AssertSqlSafe(format!("UPDATE sandboxes SET {column} = {value} WHERE id = ?1")))
            .bind(new.id.as_str())
            .execute(&store.writer)
            .await
            .unwrap();
        let read = store.sandbox(&new.id).await;
        assert!(
            matches!(read, Err(StoreError::Corrupt { what: "sandbox", .. })),
            "{column} = {value}: {read:?}"
        );
        sqlx::query("DELETE FROM sandboxes WHERE id = ?1")
            .bind(new.id.as_str())
            .execute(&store.writer)
            .await
            .unwrap();
    }
    sqlx::query("UPDATE api_keys SET id = 'x'").execute(&store.writer).await.unwrap();
    let read = store.keys(None).await;
    assert!(matches!(read, Err(StoreError::Corrupt { what: "key", .. })), "{read:?}");
}

/// A history that can't be written takes the move back with it.
#[tokio::test]
async fn a_move_and_its_event_are_one() {
    let (store, _folder) = open().await;
    let team = store.create_team("acme", at(0)).await.unwrap().id;
    let new = sandbox_of(team, 0);
    store.insert_sandbox(&new).await.unwrap();
    sqlx::query("INSERT INTO events (sandbox, seq, at, state, detail) VALUES (?1, 2, 0, 'running', '')")
        .bind(new.id.as_str())
        .execute(&store.writer)
        .await
        .unwrap();
    let change = step(SandboxState::Creating, SandboxState::Running, 1);
    assert!(matches!(store.transition(&new.id, &change).await, Err(StoreError::Database(_))));
    assert_eq!(store.sandbox(&new.id).await.unwrap().unwrap().state, SandboxState::Creating);
}

#[tokio::test]
async fn connections_are_set_up_as_promised() {
    let (store, _folder) = open().await;
    for (pool, synchronous, query_only) in
        [(&store.writer, 1, 0), (&store.durable, 2, 0), (&store.readers, 1, 1)]
    {
        for (pragma, expected) in [
            ("foreign_keys", 1),
            ("busy_timeout", 10_000),
            ("temp_store", 2),
            ("trusted_schema", 0),
            ("synchronous", synchronous),
            ("query_only", query_only),
        ] {
            let sql = sqlx::AssertSqlSafe(format!("PRAGMA {pragma}"));
            let found: i64 = sqlx::query_scalar(sql).fetch_one(pool).await.unwrap();
            assert_eq!(found, expected, "{pragma}");
        }
        let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(pool).await.unwrap();
        assert_eq!(mode, "wal");
    }
}

/// What is asked with every request never reads a whole table.
#[tokio::test]
async fn hot_queries_use_their_indexes() {
    let (store, _folder) = open().await;
    let live = ListFilter { states: vec![SandboxState::Running], ..all_of(TeamId::random()) };
    let sql = list::page_query(&live, 100).sql().as_str().to_owned();
    let queries = [
        (super::keys::OWNER_OF_KEY.to_owned(), "sqlite_autoindex_api_keys"),
        (sql, "sandboxes_live_by_team"),
    ];
    for (sql, index) in queries {
        let plan: Vec<String> = sqlx::query(sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}")))
            .fetch_all(&store.readers)
            .await
            .unwrap()
            .iter()
            .map(|row| row.get("detail"))
            .collect();
        assert!(plan.iter().any(|line| line.contains(index)), "{sql}: {plan:?}");
        assert!(!plan.iter().any(|line| line.starts_with("SCAN")), "{sql}: {plan:?}");
        assert!(!plan.iter().any(|line| line.contains("TEMP B-TREE")), "{sql}: {plan:?}");
    }
    assert_eq!(store.authenticate(&digest(1), at(0)).await.unwrap(), None);
}

/// What was kept of a run for a time is not in the file any more when that is over, nor beside it.
#[tokio::test]
async fn what_is_forgotten_of_a_run_is_not_on_the_disk() {
    use crate::conformance::runs::{ended, run_of};
    let (store, folder) = open().await;
    let team = store.create_team("acme", at(0)).await.unwrap().id;
    let marker = "marker-7d1c".repeat(400);
    let new = NewRun { prompt: Some(marker.clone()), ..run_of(team, 0) };
    assert_eq!(store.insert_run(&new).await.unwrap(), RunAdmitted::Inserted);
    let file = Artifact { number: 1, path: Some(marker.clone()), mode: 0o644, size: 1, sha256: None };
    store.keep_artifact(&new.id, &file, marker.as_bytes()).await.unwrap();
    ended(&store, &new.id).await;
    let is_there = || {
        let files = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        files
            .map(|path| std::fs::read(path).unwrap())
            .any(|bytes| bytes.windows(11).any(|window| window == b"marker-7d1c"))
    };
    assert!(is_there());
    assert_eq!(store.forget_runs(at(1000)).await.unwrap(), 1);
    assert!(!is_there());
}
