//! Teams and keys.

use sandglass_types::{KeyId, TeamId, Timestamp};
use sqlx::Row as _;

use super::{SqliteStore, database, exists_or_database, rows};
use crate::{ApiKey, Identity, KeyDigest, StoreError, Team};

/// The use of a key is noted at most so often, in milliseconds: authentication must not wait for a write.
const USE_NOTED_EVERY: i64 = 60_000;

pub(super) const OWNER_OF_KEY: &str = "SELECT k.id, k.team, k.operator, k.last_used_at \
     FROM api_keys k JOIN teams t ON t.id = k.team \
     WHERE k.digest = ?1 AND k.revoked_at IS NULL AND t.revoked_at IS NULL";

impl SqliteStore {
    pub(super) async fn insert_team(&self, name: &str, now: Timestamp) -> Result<Team, StoreError> {
        let team = Team { id: TeamId::random(), name: name.to_owned(), created_at: now, revoked_at: None };
        let mut change = self.write_durably().await?;
        sqlx::query("INSERT INTO teams (id, name, created_at) VALUES (?1, ?2, ?3)")
            .bind(team.id.to_string())
            .bind(name)
            .bind(now.as_millis())
            .execute(&mut *change)
            .await
            .map_err(|error| exists_or_database(error, "team", name))?;
        change.commit().await.map_err(database)?;
        Ok(team)
    }

    pub(super) async fn select_teams(&self) -> Result<Vec<Team>, StoreError> {
        let found = sqlx::query("SELECT id, name, created_at, revoked_at FROM teams ORDER BY created_at, id")
            .fetch_all(&self.readers)
            .await
            .map_err(database)?;
        found.iter().map(rows::team).collect()
    }

    pub(super) async fn end_team(&self, team: TeamId, now: Timestamp) -> Result<bool, StoreError> {
        self.end(
            "UPDATE teams SET revoked_at = ?1 WHERE id = ?2 AND revoked_at IS NULL",
            team.to_string(),
            now,
        )
        .await
    }

    pub(super) async fn insert_key(&self, key: &ApiKey) -> Result<(), StoreError> {
        let mut change = self.write_durably().await?;
        require_team(&mut change, key.team).await?;
        sqlx::query(
            "INSERT INTO api_keys (id, team, name, digest, suffix, created_at, last_used_at, revoked_at, operator) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        )
        .bind(key.id.to_string())
        .bind(key.team.to_string())
        .bind(&key.name)
        .bind(key.digest.to_string())
        .bind(&key.suffix)
        .bind(key.created_at.as_millis())
        .bind(key.last_used_at.map(Timestamp::as_millis))
        .bind(key.revoked_at.map(Timestamp::as_millis))
        .bind(key.operator)
        .execute(&mut *change)
        .await
        .map_err(|error| exists_or_database(error, "key", &key.name))?;
        change.commit().await.map_err(database)
    }

    pub(super) async fn select_keys(&self, team: Option<TeamId>) -> Result<Vec<ApiKey>, StoreError> {
        let found = sqlx::query(
            "SELECT id, team, name, digest, suffix, created_at, last_used_at, revoked_at, operator FROM api_keys \
             WHERE ?1 IS NULL OR team = ?1 ORDER BY created_at, id",
        )
        .bind(team.map(|team| team.to_string()))
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        found.iter().map(rows::api_key).collect()
    }

    pub(super) async fn end_key(&self, key: KeyId, now: Timestamp) -> Result<bool, StoreError> {
        self.end(
            "UPDATE api_keys SET revoked_at = ?1 WHERE id = ?2 AND revoked_at IS NULL",
            key.to_string(),
            now,
        )
        .await
    }

    async fn end(&self, sql: &'static str, id: String, now: Timestamp) -> Result<bool, StoreError> {
        let mut change = self.write_durably().await?;
        let done = sqlx::query(sql)
            .bind(now.as_millis())
            .bind(id)
            .execute(&mut *change)
            .await
            .map_err(database)?
            .rows_affected();
        change.commit().await.map_err(database)?;
        Ok(done == 1)
    }

    pub(super) async fn owner_of_key(
        &self,
        digest: &KeyDigest,
        now: Timestamp,
    ) -> Result<Option<Identity>, StoreError> {
        let found = sqlx::query(OWNER_OF_KEY)
            .bind(digest.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(database)?;
        let Some(row) = found else { return Ok(None) };
        let owner = rows::identity(&row)?;
        let last_used: Option<i64> =
            row.try_get("last_used_at").map_err(|error| rows::corrupt("key", error))?;
        if last_used.is_none_or(|last| now.as_millis().saturating_sub(last) >= USE_NOTED_EVERY)
            && let Err(error) = self.note_use(owner.key, now).await
        {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(key = %owner.key, error, "the use of a key was not noted");
        }
        Ok(Some(owner))
    }

    /// One of many requests that come at the same time writes.
    async fn note_use(&self, key: KeyId, now: Timestamp) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE api_keys SET last_used_at = ?1 \
             WHERE id = ?2 AND (last_used_at IS NULL OR last_used_at <= ?1 - ?3)",
        )
        .bind(now.as_millis())
        .bind(key.to_string())
        .bind(USE_NOTED_EVERY)
        .execute(&self.writer)
        .await
        .map_err(database)?;
        Ok(())
    }
}

/// Fails unless the team is there and was not revoked.
pub(super) async fn require_team(
    connection: &mut sqlx::SqliteConnection,
    team: TeamId,
) -> Result<(), StoreError> {
    let valid: Option<i64> = sqlx::query_scalar("SELECT 1 FROM teams WHERE id = ?1 AND revoked_at IS NULL")
        .bind(team.to_string())
        .fetch_optional(connection)
        .await
        .map_err(database)?;
    valid.map(|_| ()).ok_or_else(|| StoreError::Missing { what: "team", id: team.to_string() })
}
