//! Which sandbox is whose.

use sandglass_types::{SandboxId, TeamId, Timestamp, UserName};
use sqlx::{Row as _, SqliteConnection};

use super::{SqliteStore, database, rows};
use crate::{Assignment, NewSandbox, StoreError};

/// Assignments that are kept of one user.
const KEPT: i64 = 100;

/// The sandbox that a user has, unless its end has begun.
pub(super) async fn standing(
    connection: &mut SqliteConnection,
    team: TeamId,
    user: &UserName,
) -> Result<Option<SandboxId>, StoreError> {
    let found: Option<String> = sqlx::query_scalar(
        "SELECT a.sandbox FROM assignments a JOIN sandboxes s ON s.id = a.sandbox \
         WHERE a.team = ?1 AND a.user = ?2 AND a.until IS NULL AND s.state NOT IN ('ending', 'ended')",
    )
    .bind(team.to_string())
    .bind(user.as_str())
    .fetch_optional(connection)
    .await
    .map_err(database)?;
    found.map(|id| id.parse().map_err(|error| rows::corrupt("assignment", error))).transpose()
}

/// Makes a new sandbox its user's, in place of any other.
pub(super) async fn assign(
    connection: &mut SqliteConnection,
    new: &NewSandbox,
    user: &UserName,
) -> Result<(), StoreError> {
    let team = new.team.to_string();
    end(connection, new.team, user, new.created_at).await?;
    sqlx::query(
        "INSERT INTO assignments (team, user, seq, sandbox, since) VALUES (?1, ?2, \
         (SELECT coalesce(max(seq), 0) + 1 FROM assignments WHERE team = ?1 AND user = ?2), ?3, ?4)",
    )
    .bind(&team)
    .bind(user.as_str())
    .bind(new.id.as_str())
    .bind(new.created_at.as_millis())
    .execute(&mut *connection)
    .await
    .map_err(database)?;
    sqlx::query(
        "DELETE FROM assignments WHERE team = ?1 AND user = ?2 AND seq <= \
         (SELECT max(seq) FROM assignments WHERE team = ?1 AND user = ?2) - ?3",
    )
    .bind(&team)
    .bind(user.as_str())
    .bind(KEPT)
    .execute(&mut *connection)
    .await
    .map_err(database)?;
    Ok(())
}

/// Ends the assignment in force. `false` if there is none.
async fn end(
    connection: &mut SqliteConnection,
    team: TeamId,
    user: &UserName,
    now: Timestamp,
) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "UPDATE assignments SET until = max(since, ?3) WHERE team = ?1 AND user = ?2 AND until IS NULL",
    )
    .bind(team.to_string())
    .bind(user.as_str())
    .bind(now.as_millis())
    .execute(connection)
    .await
    .map_err(database)?;
    Ok(done.rows_affected() > 0)
}

impl SqliteStore {
    pub(super) async fn select_assignments(
        &self,
        team: TeamId,
        user: &UserName,
    ) -> Result<Vec<Assignment>, StoreError> {
        let found = sqlx::query(
            "SELECT sandbox, since, until FROM assignments WHERE team = ?1 AND user = ?2 ORDER BY seq DESC",
        )
        .bind(team.to_string())
        .bind(user.as_str())
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        let assignment = |row: &sqlx::sqlite::SqliteRow| {
            let sandbox: String = row.try_get("sandbox").map_err(database)?;
            let until: Option<i64> = row.try_get("until").map_err(database)?;
            Ok(Assignment {
                sandbox: sandbox.parse().map_err(|error| rows::corrupt("assignment", error))?,
                since: Timestamp::from_millis(row.try_get("since").map_err(database)?),
                until: until.map(Timestamp::from_millis),
            })
        };
        found.iter().map(assignment).collect()
    }

    pub(super) async fn end_assignment(
        &self,
        team: TeamId,
        user: &UserName,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let mut change = self.write().await?;
        let ended = end(&mut change, team, user, now).await?;
        change.commit().await.map_err(database)?;
        Ok(ended)
    }
}
