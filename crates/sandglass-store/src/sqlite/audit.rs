//! Who changed what.

use sandglass_types::Timestamp;

use super::{SqliteStore, database, rows};
use crate::{AuditEntry, MAX_DETAIL, StoreError};

impl SqliteStore {
    pub(super) async fn insert_audit(&self, entry: &AuditEntry) -> Result<(), StoreError> {
        let detail = entry.detail.as_deref().map(|text| &text[..text.floor_char_boundary(MAX_DETAIL)]);
        sqlx::query(
            "INSERT INTO audit (at, team, key, request, action, target, status, detail) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )
        .bind(entry.at.as_millis())
        .bind(entry.team.map(|team| team.to_string()))
        .bind(entry.key.map(|key| key.to_string()))
        .bind(&entry.request)
        .bind(&entry.action)
        .bind(&entry.target)
        .bind(entry.status)
        .bind(detail)
        .execute(&self.writer)
        .await
        .map_err(database)?;
        Ok(())
    }

    pub(super) async fn select_audit(
        &self,
        since: Option<Timestamp>,
        limit: u32,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        let found = sqlx::query(
            "SELECT at, team, key, request, action, target, status, detail FROM audit \
             WHERE ?1 IS NULL OR at >= ?1 ORDER BY id DESC LIMIT ?2",
        )
        .bind(since.map(Timestamp::as_millis))
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        found.iter().rev().map(rows::audit).collect()
    }

    pub(super) async fn forget_audit(&self, before: Timestamp) -> Result<u64, StoreError> {
        let done = sqlx::query("DELETE FROM audit WHERE at < ?1")
            .bind(before.as_millis())
            .execute(&self.writer)
            .await
            .map_err(database)?;
        Ok(done.rows_affected())
    }
}
