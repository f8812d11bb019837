//! What sandboxes used.

use sandglass_types::{Limits, SandboxId, TeamId, Timestamp};
use sqlx::QueryBuilder;

use super::{SqliteStore, database, rows};
use crate::{Sample, StoreError};

/// Milliseconds of what is thinned out to one sample.
const MINUTE: i64 = 60_000;

/// How far back that is done, in milliseconds. It is done every minute, and what a server missed that was down grows old as
/// well.
const BACK: i64 = 5 * MINUTE;

impl SqliteStore {
    pub(super) async fn insert_samples(&self, samples: &[Sample]) -> Result<(), StoreError> {
        let mut transaction = self.write().await?;
        for sample in samples {
            // A sandbox that was forgotten meanwhile has no history, and a clock that stands still says nothing new.
            sqlx::query(
                "INSERT OR IGNORE INTO samples (sandbox, at, cpu_per_mille, memory, disk) \
                 SELECT ?1, ?2, ?3, ?4, ?5 WHERE EXISTS (SELECT 1 FROM sandboxes WHERE id = ?1)",
            )
            .bind(sample.sandbox.as_str())
            .bind(sample.at.as_millis())
            .bind(sample.cpu_per_mille)
            .bind(i64::try_from(sample.memory_bytes).unwrap_or(i64::MAX))
            .bind(i64::try_from(sample.disk_bytes).unwrap_or(i64::MAX))
            .execute(&mut *transaction)
            .await
            .map_err(database)?;
        }
        transaction.commit().await.map_err(database)
    }

    pub(super) async fn select_samples(
        &self,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<Sample>, StoreError> {
        let found = sqlx::query(
            "SELECT sandbox, at, cpu_per_mille, memory, disk FROM samples \
             WHERE sandbox = ?1 AND (?2 IS NULL OR at >= ?2) AND (?3 IS NULL OR at <= ?3) ORDER BY at",
        )
        .bind(id.as_str())
        .bind(from.map(Timestamp::as_millis))
        .bind(to.map(Timestamp::as_millis))
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        found.iter().map(rows::sample).collect()
    }

    pub(super) async fn select_last_samples(
        &self,
        team: TeamId,
        ids: &[SandboxId],
    ) -> Result<Vec<(Limits, Sample)>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut query = QueryBuilder::new(
            "SELECT sandbox, at, cpu_per_mille, memory, disk, cpus, memory_mib, disk_mib, processes \
             FROM sandboxes JOIN samples ON sandbox = id \
             WHERE at = (SELECT max(at) FROM samples WHERE sandbox = id) \
             AND state IN ('running', 'pausing', 'paused', 'resuming') AND team = ",
        );
        query.push_bind(team.to_string()).push(" AND id IN (");
        let mut list = query.separated(", ");
        for id in ids {
            list.push_bind(id.as_str().to_owned());
        }
        query.push(")");
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        found.iter().map(|row| Ok((rows::limits(row)?, rows::sample(row)?))).collect()
    }

    pub(super) async fn thin_out_samples(
        &self,
        fine: Timestamp,
        before: Timestamp,
    ) -> Result<u64, StoreError> {
        let gone = sqlx::query(
            "DELETE FROM samples WHERE at < ?1 OR at BETWEEN ?2 - ?4 AND ?2 - 1 AND EXISTS (\
             SELECT 1 FROM samples AS earlier WHERE earlier.sandbox = samples.sandbox \
             AND earlier.at < samples.at AND earlier.at >= samples.at - samples.at % ?3)",
        )
        .bind(before.as_millis())
        .bind(fine.as_millis())
        .bind(MINUTE)
        .bind(BACK)
        .execute(&self.writer)
        .await
        .map_err(database)?;
        Ok(gone.rows_affected())
    }
}
