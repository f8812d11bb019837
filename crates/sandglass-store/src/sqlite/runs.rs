//! Runs. A change and the events that tell of it are one transaction, so nobody sees one without the other.

use async_trait::async_trait;
use sandglass_types::{NodeId, RunId, RunSandbox, RunStatus, SandboxId, StopReason, Timestamp};
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, SqliteConnection};

use super::rows::{self, json_text};
use super::{SqliteStore, database, exists_or_database, spending, teams};
use crate::model::{
    Artifact, NewRun, NewRunEvent, PIECE, RunAdmitted, RunChange, RunEventRow, RunFilter, RunPage, RunRow,
    Source,
};
use crate::runs::RunStore;
use crate::{PageCursor, StoreError};

macro_rules! columns {
    () => {
        "id, node, team, status, sandbox, sandbox_id, stop_reason, detail, budget, spec, prompt, prompt_bytes, turns, compute, \
         events, created_at, started_at, ended_at, cancelled_at, collected_at"
    };
}

#[async_trait]
impl RunStore for SqliteStore {
    async fn insert_run(&self, new: &NewRun) -> Result<RunAdmitted, StoreError> {
        let mut change = self.write_durably().await?;
        teams::require_team(&mut change, new.team).await?;
        if let Some(earlier) = earlier(&mut change, new).await? {
            return Ok(earlier);
        }
        let under_way: i64 =
            sqlx::query_scalar("SELECT count(*) FROM runs WHERE team = ?1 AND ended_at IS NULL")
                .bind(new.team.to_string())
                .fetch_one(&mut *change)
                .await
                .map_err(database)?;
        if under_way >= i64::from(new.most_under_way) {
            return Ok(RunAdmitted::TooMany(new.most_under_way));
        }
        spending::insert_new(&mut change, &new.budget).await?;
        sqlx::query(
            "INSERT INTO runs (id, node, team, status, budget, spec, prompt, prompt_bytes, created_at, forget_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        )
        .bind(new.id.as_str())
        .bind(new.node.to_string())
        .bind(new.team.to_string())
        .bind(RunStatus::Queued.as_str())
        .bind(new.budget.id.as_str())
        .bind(json_text(&new.spec)?)
        .bind(&new.prompt)
        .bind(number(new.prompt_bytes))
        .bind(new.created_at.as_millis())
        .bind(new.forget_at.as_millis())
        .execute(&mut *change)
        .await
        .map_err(|error| exists_or_database(error, "run", new.id.as_str()))?;
        if let Some((key, digest)) = &new.idempotency {
            sqlx::query(
                "INSERT INTO run_keys (team, key, digest, run, created_at) VALUES (?1, ?2, ?3, ?4, ?5)",
            )
            .bind(new.team.to_string())
            .bind(key.as_str())
            .bind(digest.to_string())
            .bind(new.id.as_str())
            .bind(new.created_at.as_millis())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        }
        append(&mut change, &new.id, &new.events).await?;
        change.commit().await.map_err(database)?;
        Ok(RunAdmitted::Inserted)
    }

    async fn change_run(&self, id: &RunId, wanted: &RunChange) -> Result<bool, StoreError> {
        // Whoever reads that a run has ended may rely on it.
        let ends = wanted.to.is_terminal();
        let mut change = if ends { self.write_durably().await? } else { self.write().await? };
        let Some(row) = row_of(&mut change, id).await? else { return Ok(false) };
        let sandbox = wanted.sandbox.unwrap_or(row.sandbox);
        if row.status != wanted.from || (sandbox != row.sandbox && !row.sandbox.leads_to(sandbox)) {
            return Ok(false);
        }
        if ends && !sandbox.is_over() {
            return Ok(false);
        }
        let stop = wanted.stop.as_ref();
        sqlx::query(
            "UPDATE runs SET status = ?2, sandbox = ?3, sandbox_id = coalesce(?4, sandbox_id), \
             stop_reason = coalesce(stop_reason, ?5), detail = coalesce(detail, ?6), turns = turns + ?7, \
             compute = coalesce(?8, compute), started_at = CASE WHEN ?7 THEN coalesce(started_at, ?9) ELSE started_at END, \
             ended_at = CASE WHEN ?10 THEN ?9 ELSE ended_at END, \
             collected_at = CASE WHEN ?11 THEN coalesce(collected_at, ?9) ELSE collected_at END WHERE id = ?1",
        )
        .bind(id.as_str())
        .bind(wanted.to.as_str())
        .bind(sandbox.as_str())
        .bind(wanted.sandbox_id.as_ref().map(SandboxId::as_str))
        .bind(stop.map(|(reason, _)| reason.as_str()))
        .bind(stop.map(|(_, detail)| detail.as_str()))
        .bind(wanted.begins)
        .bind(wanted.compute.as_ref().map(json_text).transpose()?)
        .bind(wanted.at.as_millis())
        .bind(ends)
        .bind(wanted.collected)
        .execute(&mut *change)
        .await
        .map_err(database)?;
        append(&mut change, id, &wanted.events).await?;
        change.commit().await.map_err(database)?;
        Ok(true)
    }

    async fn note_run(&self, id: &RunId, events: &[NewRunEvent]) -> Result<bool, StoreError> {
        let mut change = self.write().await?;
        if row_of(&mut change, id).await?.is_none_or(|row| row.status.is_terminal()) {
            return Ok(false);
        }
        append(&mut change, id, events).await?;
        change.commit().await.map_err(database)?;
        Ok(true)
    }

    async fn cancel_run(&self, id: &RunId, event: &NewRunEvent) -> Result<bool, StoreError> {
        let mut change = self.write().await?;
        let done = sqlx::query(
            "UPDATE runs SET cancelled_at = ?2 WHERE id = ?1 AND cancelled_at IS NULL AND ended_at IS NULL",
        )
        .bind(id.as_str())
        .bind(event.at.as_millis())
        .execute(&mut *change)
        .await
        .map_err(database)?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        append(&mut change, id, std::slice::from_ref(event)).await?;
        change.commit().await.map_err(database)?;
        Ok(true)
    }

    async fn run(&self, id: &RunId) -> Result<Option<RunRow>, StoreError> {
        let mut reader = self.readers.acquire().await.map_err(database)?;
        row_of(&mut reader, id).await
    }

    async fn run_of_sandbox(&self, id: &SandboxId) -> Result<Option<RunRow>, StoreError> {
        let found = sqlx::query(concat!("SELECT ", columns!(), " FROM runs WHERE sandbox_id = ?1"))
            .bind(id.as_str())
            .fetch_optional(&self.readers)
            .await
            .map_err(database)?;
        found.as_ref().map(run).transpose()
    }

    async fn runs(&self, filter: &RunFilter) -> Result<RunPage, StoreError> {
        let limit = usize::try_from(filter.limit.clamp(1, 100)).unwrap_or(100);
        let mut query = QueryBuilder::new(concat!("SELECT ", columns!(), " FROM runs WHERE team = "));
        query.push_bind(filter.team.to_string());
        if !filter.statuses.is_empty() {
            query.push(" AND status IN (");
            let mut list = query.separated(", ");
            for status in &filter.statuses {
                list.push_bind(status.as_str());
            }
            query.push(")");
        }
        if let Some(after) = &filter.after {
            query.push(" AND (created_at, id) < (").push_bind(after.created_at.as_millis());
            query.push(", ").push_bind(after.id.as_str().to_owned()).push(")");
        }
        query.push(" ORDER BY created_at DESC, id DESC LIMIT ").push_bind(number(limit as u64 + 1));
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        let more = found.len() > limit;
        let rows: Vec<RunRow> = found.iter().take(limit).map(run).collect::<Result<_, _>>()?;
        let cursor = |last: &RunRow| PageCursor { created_at: last.created_at, id: last.id.clone() };
        let next = rows.last().filter(|_| more).map(cursor);
        Ok(RunPage { rows, next })
    }

    async fn runs_under_way(&self, node: NodeId) -> Result<Vec<RunRow>, StoreError> {
        let found = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM runs WHERE node = ?1 AND ended_at IS NULL ORDER BY created_at, id"
        ))
        .bind(node.to_string())
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        found.iter().map(run).collect()
    }

    async fn run_events(&self, id: &RunId, after: u64, limit: u32) -> Result<Vec<RunEventRow>, StoreError> {
        let found = sqlx::query(
            "SELECT seq, at, source, type, data FROM run_events WHERE run = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
        )
        .bind(id.as_str())
        .bind(number(after))
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        found.iter().map(event).collect()
    }

    async fn keep_artifact(&self, id: &RunId, artifact: &Artifact, content: &[u8]) -> Result<(), StoreError> {
        let mut change = self.write().await?;
        sqlx::query(
            "INSERT INTO artifacts (run, number, path, mode, size, sha256) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )
        .bind(id.as_str())
        .bind(artifact.number)
        .bind(&artifact.path)
        .bind(artifact.mode)
        .bind(number(artifact.size))
        .bind(artifact.sha256.map(|sha256| sha256.to_string()))
        .execute(&mut *change)
        .await
        .map_err(|error| exists_or_database(error, "artifact", &artifact.number.to_string()))?;
        for (piece, bytes) in content.chunks(PIECE).enumerate() {
            sqlx::query("INSERT INTO artifact_pieces (run, number, piece, bytes) VALUES (?1, ?2, ?3, ?4)")
                .bind(id.as_str())
                .bind(artifact.number)
                .bind(number(piece as u64))
                .bind(bytes)
                .execute(&mut *change)
                .await
                .map_err(database)?;
        }
        change.commit().await.map_err(database)
    }

    async fn drop_artifacts(&self, id: &RunId) -> Result<(), StoreError> {
        let mut change = self.write().await?;
        sqlx::query("DELETE FROM artifacts WHERE run = ?1")
            .bind(id.as_str())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)
    }

    async fn artifacts(&self, id: &RunId) -> Result<Vec<Artifact>, StoreError> {
        let found = sqlx::query(
            "SELECT number, path, mode, size, sha256 FROM artifacts WHERE run = ?1 ORDER BY number",
        )
        .bind(id.as_str())
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        found.iter().map(artifact).collect()
    }

    async fn artifact_piece(
        &self,
        id: &RunId,
        number: u32,
        piece: u32,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        sqlx::query_scalar("SELECT bytes FROM artifact_pieces WHERE run = ?1 AND number = ?2 AND piece = ?3")
            .bind(id.as_str())
            .bind(number)
            .bind(piece)
            .fetch_optional(&self.readers)
            .await
            .map_err(database)
    }

    async fn forget_runs(&self, now: Timestamp) -> Result<u64, StoreError> {
        let mut change = self.write_durably().await?;
        let done = sqlx::query("DELETE FROM runs WHERE ended_at IS NOT NULL AND forget_at <= ?1")
            .bind(now.as_millis())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)?;
        if done.rows_affected() > 0 {
            // What was written once is in the log of the file until it is cut off.
            sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").execute(&self.durable).await.map_err(database)?;
        }
        Ok(done.rows_affected())
    }
}

/// What an earlier request under the same key means for this one.
async fn earlier(connection: &mut SqliteConnection, new: &NewRun) -> Result<Option<RunAdmitted>, StoreError> {
    let Some((key, digest)) = &new.idempotency else { return Ok(None) };
    let found = sqlx::query("SELECT digest, run FROM run_keys WHERE team = ?1 AND key = ?2")
        .bind(new.team.to_string())
        .bind(key.as_str())
        .fetch_optional(connection)
        .await
        .map_err(database)?;
    let Some(row) = found else { return Ok(None) };
    let columns = rows::Columns { what: "idempotency key", row: &row };
    let same = columns.text("digest")? == digest.to_string();
    Ok(Some(if same { RunAdmitted::Replay(columns.parsed("run")?) } else { RunAdmitted::Mismatch }))
}

/// Adds events with the numbers that follow.
async fn append(
    connection: &mut SqliteConnection,
    id: &RunId,
    events: &[NewRunEvent],
) -> Result<(), StoreError> {
    if events.is_empty() {
        return Ok(());
    }
    let last: i64 = sqlx::query_scalar("UPDATE runs SET events = events + ?2 WHERE id = ?1 RETURNING events")
        .bind(id.as_str())
        .bind(number(events.len() as u64))
        .fetch_one(&mut *connection)
        .await
        .map_err(database)?;
    let first = last - number(events.len() as u64) + 1;
    for (seq, event) in (first..).zip(events) {
        sqlx::query(
            "INSERT INTO run_events (run, seq, at, source, type, data) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )
        .bind(id.as_str())
        .bind(seq)
        .bind(event.at.as_millis())
        .bind(event.source.as_str())
        .bind(&event.kind)
        .bind(json_text(&event.data)?)
        .execute(&mut *connection)
        .await
        .map_err(database)?;
    }
    Ok(())
}

async fn row_of(connection: &mut SqliteConnection, id: &RunId) -> Result<Option<RunRow>, StoreError> {
    let found = sqlx::query(concat!("SELECT ", columns!(), " FROM runs WHERE id = ?1"))
        .bind(id.as_str())
        .fetch_optional(connection)
        .await
        .map_err(database)?;
    found.as_ref().map(run).transpose()
}

fn run(row: &SqliteRow) -> Result<RunRow, StoreError> {
    let columns = rows::Columns { what: "run", row };
    let unknown = |name: &str| rows::corrupt("run", format_args!("it has an unknown {name}"));
    let stop_reason = columns.maybe_text("stop_reason")?;
    Ok(RunRow {
        id: columns.parsed("id")?,
        node: columns.parsed("node")?,
        team: columns.parsed("team")?,
        status: RunStatus::of(columns.text("status")?).ok_or_else(|| unknown("status"))?,
        sandbox: RunSandbox::of(columns.text("sandbox")?).ok_or_else(|| unknown("state of its sandbox"))?,
        sandbox_id: columns.maybe_text("sandbox_id")?.map(|id| rows::parse("sandbox", id)).transpose()?,
        stop_reason: stop_reason
            .map(|text| StopReason::of(text).ok_or_else(|| unknown("reason")))
            .transpose()?,
        detail: columns.maybe_text("detail")?.map(str::to_owned),
        budget: columns.parsed("budget")?,
        spec: columns.maybe_json("spec")?.ok_or_else(|| unknown("specification"))?,
        prompt: columns.maybe_text("prompt")?.map(str::to_owned),
        prompt_bytes: columns.bytes("prompt_bytes")?,
        turns: columns.number("turns")?,
        compute: columns.maybe_json("compute")?,
        last_seq: columns.bytes("events")?,
        created_at: columns.time("created_at")?,
        started_at: columns.maybe_time("started_at")?,
        ended_at: columns.maybe_time("ended_at")?,
        cancelled_at: columns.maybe_time("cancelled_at")?,
        collected_at: columns.maybe_time("collected_at")?,
    })
}

fn event(row: &SqliteRow) -> Result<RunEventRow, StoreError> {
    let columns = rows::Columns { what: "event of a run", row };
    let source = Source::of(columns.text("source")?)
        .ok_or_else(|| rows::corrupt("event of a run", "it has an unknown source"))?;
    Ok(RunEventRow {
        seq: columns.bytes("seq")?,
        event: NewRunEvent {
            at: columns.time("at")?,
            source,
            kind: columns.text("type")?.to_owned(),
            data: columns.maybe_json("data")?.unwrap_or_default(),
        },
    })
}

fn artifact(row: &SqliteRow) -> Result<Artifact, StoreError> {
    let columns = rows::Columns { what: "artifact", row };
    Ok(Artifact {
        number: columns.number("number")?,
        path: columns.maybe_text("path")?.map(str::to_owned),
        mode: columns.number("mode")?,
        size: columns.bytes("size")?,
        sha256: columns.maybe_text("sha256")?.map(|text| rows::parse("digest", text)).transpose()?,
    })
}

/// A count as SQLite has it.
fn number(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
