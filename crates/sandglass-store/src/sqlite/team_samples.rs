//! What teams had.

use sandglass_types::{NodeId, TeamId, Timestamp};

use super::{SqliteStore, database, rows};
use crate::{StoreError, TeamSample};

impl SqliteStore {
    pub(super) async fn insert_team_samples(
        &self,
        node: NodeId,
        since: Timestamp,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let span = now.as_millis().saturating_sub(since.as_millis());
        if span <= 0 {
            // A clock that stands still or goes back says nothing.
            return Ok(());
        }
        sqlx::query(
            "INSERT OR IGNORE INTO team_samples (team, at, concurrent, made, span) \
             SELECT team, ?3, concurrent, made, ?4 FROM (\
             SELECT t.id AS team, \
             (SELECT count(*) FROM sandboxes s WHERE s.team = t.id AND s.node = ?1 AND s.state <> 'ended' \
              AND s.state IN ('creating', 'running', 'pausing', 'resuming')) AS concurrent, \
             (SELECT count(*) FROM sandboxes s WHERE s.team = t.id AND s.node = ?1 \
              AND s.created_at > ?2 AND s.created_at <= ?3) AS made, \
             (SELECT l.concurrent + l.made FROM team_samples l WHERE l.team = t.id ORDER BY l.at DESC LIMIT 1) \
              AS before FROM teams t) \
             WHERE concurrent + made + coalesce(before, 0) > 0",
        )
        .bind(node.to_string())
        .bind(since.as_millis())
        .bind(now.as_millis())
        .bind(span)
        .execute(&self.writer)
        .await
        .map_err(database)?;
        Ok(())
    }

    pub(super) async fn select_team_samples(
        &self,
        team: TeamId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<TeamSample>, StoreError> {
        let found = sqlx::query(
            "SELECT at, concurrent, made, span FROM team_samples \
             WHERE team = ?1 AND (?2 IS NULL OR at >= ?2) AND (?3 IS NULL OR at <= ?3) ORDER BY at",
        )
        .bind(team.to_string())
        .bind(from.map(Timestamp::as_millis))
        .bind(to.map(Timestamp::as_millis))
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        found.iter().map(rows::team_sample).collect()
    }

    pub(super) async fn forget_team_samples(&self, before: Timestamp) -> Result<u64, StoreError> {
        let gone = sqlx::query("DELETE FROM team_samples WHERE at < ?1")
            .bind(before.as_millis())
            .execute(&self.writer)
            .await
            .map_err(database)?;
        Ok(gone.rows_affected())
    }
}
