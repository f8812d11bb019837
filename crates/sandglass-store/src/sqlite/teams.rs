//! Teams.

use sandglass_types::{TeamId, Timestamp};

use super::{SqliteStore, database, exists_or_database, rows, spending};
use crate::{StoreError, Team};

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
        let mut change = self.write_durably().await?;
        let done = sqlx::query("UPDATE teams SET revoked_at = ?1 WHERE id = ?2 AND revoked_at IS NULL")
            .bind(now.as_millis())
            .bind(team.to_string())
            .execute(&mut *change)
            .await
            .map_err(database)?
            .rows_affected();
        // Its sandboxes may run on for a while, and nobody is left who could close what they spend.
        if done == 1 {
            spending::close_all_of(&mut change, team, now).await?;
        }
        change.commit().await.map_err(database)?;
        Ok(done == 1)
    }

    /// Ends something by a statement that has the time and the id.
    pub(super) async fn end(
        &self,
        sql: &'static str,
        id: String,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
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
