//! One sandbox: its row, its moves and its history.

use sandglass_egress::policy::{Policy, RequestHost};
use sandglass_types::budget::{Amount, Excess, admit};
use sandglass_types::{Digest, NodeId, SandboxId, SandboxState, TeamId, Timestamp};
use sqlx::{Row as _, SqliteConnection};

use super::rows::{
    self, json_text, map_text, on_timeout_text, pause_mode_text, reason_text, sandbox_columns, state_text,
};
use super::{SqliteStore, assignments, database, exists_or_database, teams, volumes};
use crate::{
    Admitted, Created, Event, IdempotencyKey, MAX_DETAIL, NewSandbox, Resume, Resumed, SandboxRow, StartPath,
    StoreError, Transition,
};

/// The query for [`promised`].
macro_rules! promised_to {
    ($owner:literal) => {
        concat!(
            "SELECT state, count(*) AS sandboxes, sum(cpus) AS cpus, sum(memory_mib) AS memory_mib, \
             sum(disk_mib) AS disk_mib FROM sandboxes WHERE state <> 'ended' AND ",
            $owner,
            " = ?1 GROUP BY state"
        )
    };
}
impl SqliteStore {
    pub(super) async fn insert(&self, new: &NewSandbox) -> Result<Created, StoreError> {
        let mut change = self.write().await?;
        teams::require_team(&mut change, new.team).await?;
        if let Some((key, digest)) = &new.idempotency
            && let Some(earlier) = earlier_request(&mut change, new.team, key, digest).await?
        {
            return Ok(earlier);
        }
        if let Some(user) = &new.assign_to
            && let Some(theirs) = assignments::standing(&mut change, new.team, user).await?
        {
            return Ok(Created::Assigned(theirs));
        }
        if let Some(name) = volumes::missing(&mut change, new.team, &new.volumes).await? {
            return Ok(Created::NoVolume(name));
        }
        let all = Amount::of(&new.limits);
        let asked = Asked {
            team: new.team,
            node: new.node,
            of_team: all,
            of_machine: all,
            quota: new.quota,
            capacity: new.capacity,
        };
        if let Some(refusal) = refused(&mut change, &asked).await? {
            return Ok(refusal.into());
        }
        insert_new(&mut change, new).await?;
        if let Some(user) = &new.assign_to {
            assignments::assign(&mut change, new, user).await?;
        }
        if let Some((key, digest)) = &new.idempotency {
            sqlx::query(
                "INSERT INTO idempotency_keys (team, key, digest, sandbox, created_at) VALUES (?1, ?2, ?3, ?4, ?5) \
                 ON CONFLICT (team, key) DO UPDATE SET digest = excluded.digest, sandbox = excluded.sandbox, \
                 created_at = excluded.created_at",
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
        change.commit().await.map_err(database)?;
        Ok(Created::Inserted)
    }

    pub(super) async fn move_state(&self, id: &SandboxId, change: &Transition) -> Result<bool, StoreError> {
        // Memory and files of a paused sandbox are on the disk, and so must be the word of them.
        let lasting = [change.from, change.to].iter().any(|state| {
            matches!(state, SandboxState::Pausing | SandboxState::Paused | SandboxState::Resuming)
        });
        let mut transaction = if lasting { self.write_durably().await? } else { self.write().await? };
        let seq: Option<i64> = sqlx::query_scalar(
            "UPDATE sandboxes SET \
                 state = ?1, \
                 end_reason = coalesce(?2, end_reason), \
                 pause_mode = coalesce(?6, pause_mode), \
                 started_at = CASE WHEN ?1 = 'running' THEN coalesce(started_at, ?3) ELSE started_at END, \
                 ended_at = CASE WHEN ?1 = 'ended' THEN ?3 ELSE ended_at END, \
                 events = events + 1 \
             WHERE id = ?4 AND state = ?5 RETURNING events",
        )
        .bind(state_text(change.to))
        .bind(change.end_reason.map(reason_text))
        .bind(change.at.as_millis())
        .bind(id.as_str())
        .bind(state_text(change.from))
        .bind(change.pause_mode.map(pause_mode_text))
        .fetch_optional(&mut *transaction)
        .await
        .map_err(database)?;
        let Some(seq) = seq else { return Ok(false) };
        let event = Event {
            seq: u32::try_from(seq).map_err(|error| rows::corrupt("sandbox", error))?,
            at: change.at,
            state: change.to,
            end_reason: change.end_reason,
            detail: change.detail.clone(),
        };
        insert_event(&mut transaction, id, &event).await?;
        transaction.commit().await.map_err(database)?;
        Ok(true)
    }

    pub(super) async fn begin_resume(&self, id: &SandboxId, resume: &Resume) -> Result<Resumed, StoreError> {
        let mut change = self.write_durably().await?;
        let Some(row) = row_of(&mut change, id).await?.filter(|row| row.state == SandboxState::Paused) else {
            return Ok(Resumed::NotPaused);
        };
        let all = Amount::of(&row.limits);
        // The machine holds its disk already.
        let asked = Asked {
            team: row.team,
            node: row.node,
            of_team: all,
            of_machine: Amount { disk_mib: 0, ..all },
            quota: resume.quota,
            capacity: resume.capacity,
        };
        match refused(&mut change, &asked).await? {
            Some(Refusal::Quota(excess)) => return Ok(Resumed::OverQuota(excess)),
            Some(Refusal::Capacity { excess, soon }) => return Ok(Resumed::OverCapacity { excess, soon }),
            None => {}
        }
        let seq: i64 = sqlx::query_scalar(
            "UPDATE sandboxes SET state = 'resuming', generation = generation + 1, end_at = ?1, max_end_at = ?2, \
             events = events + 1 WHERE id = ?3 RETURNING events",
        )
        .bind(resume.end_at.min(resume.max_end_at).as_millis())
        .bind(resume.max_end_at.as_millis())
        .bind(id.as_str())
        .fetch_one(&mut *change)
        .await
        .map_err(database)?;
        let event = Event {
            seq: u32::try_from(seq).map_err(|error| rows::corrupt("sandbox", error))?,
            at: resume.at,
            state: SandboxState::Resuming,
            end_reason: None,
            detail: resume.detail.clone(),
        };
        insert_event(&mut change, id, &event).await?;
        let Some(row) = row_of(&mut change, id).await? else { return Ok(Resumed::NotPaused) };
        change.commit().await.map_err(database)?;
        Ok(Resumed::Begun(Box::new(row)))
    }

    pub(super) async fn move_end(
        &self,
        id: &SandboxId,
        end_at: Timestamp,
        only_later: bool,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, StoreError> {
        let end: Option<i64> = sqlx::query_scalar(
            "UPDATE sandboxes SET end_at = CASE \
                 WHEN ?2 AND min(?1, max_end_at) <= end_at THEN end_at ELSE min(?1, max_end_at) END \
             WHERE id = ?3 AND state = 'running' AND (end_at > ?4 OR on_timeout <> 'kill') RETURNING end_at",
        )
        .bind(end_at.as_millis())
        .bind(only_later)
        .bind(id.as_str())
        .bind(now.as_millis())
        .fetch_optional(&self.writer)
        .await
        .map_err(database)?;
        Ok(end.map(Timestamp::from_millis))
    }

    pub(super) async fn replace_policy(
        &self,
        id: &SandboxId,
        policy: &Policy,
        allow_internet_access: Option<bool>,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE sandboxes SET policy = ?1, allow_internet_access = ?2 WHERE id = ?3 AND state = 'running'",
        )
        .bind(json_text(policy)?)
        .bind(allow_internet_access)
        .bind(id.as_str())
        .execute(&self.writer)
        .await
        .map_err(database)?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn replace_start_path(
        &self,
        id: &SandboxId,
        path: StartPath,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query("UPDATE sandboxes SET start_path = ?1 WHERE id = ?2 AND state = 'creating'")
            .bind(path.as_str())
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(database)?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn select(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        let mut reader = self.readers.acquire().await.map_err(database)?;
        row_of(&mut reader, id).await
    }

    pub(super) async fn in_use_on(&self, node: NodeId) -> Result<Amount, StoreError> {
        let mut reader = self.readers.acquire().await.map_err(database)?;
        Ok(held(&mut reader, node).await?.all())
    }

    pub(super) async fn select_events(&self, id: &SandboxId) -> Result<Vec<Event>, StoreError> {
        let found = sqlx::query(
            "SELECT seq, at, state, end_reason, detail FROM events WHERE sandbox = ?1 ORDER BY seq",
        )
        .bind(id.as_str())
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        found.iter().map(rows::event).collect()
    }

    pub(super) async fn forget_keys(&self, before: Timestamp) -> Result<u64, StoreError> {
        let mut forgotten = 0;
        for sql in [
            "DELETE FROM idempotency_keys WHERE created_at < ?1",
            "DELETE FROM run_keys WHERE created_at < ?1",
        ] {
            let done =
                sqlx::query(sql).bind(before.as_millis()).execute(&self.writer).await.map_err(database)?;
            forgotten += done.rows_affected();
        }
        Ok(forgotten)
    }
}

async fn row_of(connection: &mut SqliteConnection, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
    let found = sqlx::query(concat!("SELECT ", sandbox_columns!(), " FROM sandboxes WHERE id = ?1"))
        .bind(id.as_str())
        .fetch_optional(connection)
        .await
        .map_err(database)?;
    found.as_ref().map(rows::sandbox).transpose()
}

/// What something needs, and of whom.
pub(super) struct Asked {
    pub(super) team: TeamId,
    pub(super) node: NodeId,
    pub(super) of_team: Amount,
    pub(super) of_machine: Amount,
    pub(super) quota: Amount,
    pub(super) capacity: Amount,
}

/// Why there is no room for it.
pub(super) enum Refusal {
    Quota(Excess),
    Capacity { excess: Excess, soon: bool },
}

impl From<Refusal> for Created {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Quota(excess) => Self::OverQuota(excess),
            Refusal::Capacity { excess, soon } => Self::OverCapacity { excess, soon },
        }
    }
}

impl From<Refusal> for Admitted {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Quota(excess) => Self::OverQuota(excess),
            Refusal::Capacity { excess, soon } => Self::OverCapacity { excess, soon },
        }
    }
}

/// Why there is no room for what is asked, if that is so.
pub(super) async fn refused(
    connection: &mut SqliteConnection,
    asked: &Asked,
) -> Result<Option<Refusal>, StoreError> {
    let of_team = promised(connection, promised_to!("team"), &asked.team.to_string()).await?;
    let in_use = total(&of_team, Amount::of_team);
    if let Err(excess) = admit(&asked.quota, &in_use, &asked.of_team) {
        return Ok(Some(Refusal::Quota(excess)));
    }
    let held = held(connection, asked.node).await?;
    if let Err(excess) = admit(&asked.capacity, &held.all(), &asked.of_machine) {
        let soon = admit(&asked.capacity, &held.staying(), &asked.of_machine).is_ok();
        return Ok(Some(Refusal::Capacity { excess, soon }));
    }
    Ok(None)
}

/// What a machine can't give to others.
pub(super) struct Held {
    /// By the state of the sandboxes.
    sandboxes: Vec<(SandboxState, Amount)>,
    /// Those that stay, and volumes.
    images: Amount,
    /// Those that are being removed.
    going: Amount,
}

impl Held {
    pub(super) fn all(&self) -> Amount {
        total(&self.sandboxes, Amount::of_machine).and(self.images).and(self.going)
    }

    /// Without what is at its end.
    fn staying(&self) -> Amount {
        let staying = self.sandboxes.iter().filter(|(state, _)| *state != SandboxState::Ending);
        total(staying, Amount::of_machine).and(self.images)
    }
}

pub(super) async fn held(connection: &mut SqliteConnection, node: NodeId) -> Result<Held, StoreError> {
    let sandboxes = promised(connection, promised_to!("node"), &node.to_string()).await?;
    let (images, going) = images(connection, node).await?;
    let (volumes, volumes_going) = of_volumes(connection, node).await?;
    let (images, going) = (images.and(volumes), going.and(volumes_going));
    Ok(Held { sandboxes, images, going })
}

/// What the images of a machine were promised that sandboxes are made from: those that stay, and those that are being
/// removed.
async fn images(connection: &mut SqliteConnection, node: NodeId) -> Result<(Amount, Amount), StoreError> {
    let found = sqlx::query(
        "SELECT state = 'deleting' AS going, sum(memory_mib) AS memory_mib, sum(disk_mib) AS disk_mib \
         FROM snapshots WHERE node = ?1 GROUP BY going",
    )
    .bind(node.to_string())
    .fetch_all(connection)
    .await
    .map_err(database)?;
    let mut sums = (Amount::default(), Amount::default());
    for row in &found {
        let (going, amount) = rows::of_images(row)?;
        *(if going { &mut sums.1 } else { &mut sums.0 }) = amount.as_image();
    }
    Ok(sums)
}

/// What the volumes of a machine are promised: those that stay, and those that are being removed.
async fn of_volumes(connection: &mut SqliteConnection, node: NodeId) -> Result<(Amount, Amount), StoreError> {
    let found = sqlx::query(
        "SELECT state = 'deleting' AS going, 0 AS memory_mib, sum(size_mib) AS disk_mib \
         FROM volumes WHERE node = ?1 GROUP BY going",
    )
    .bind(node.to_string())
    .fetch_all(connection)
    .await
    .map_err(database)?;
    let mut sums = (Amount::default(), Amount::default());
    for row in &found {
        let (going, amount) = rows::of_images(row)?;
        *(if going { &mut sums.1 } else { &mut sums.0 }) = amount;
    }
    Ok(sums)
}

fn total<'a>(
    promised: impl IntoIterator<Item = &'a (SandboxState, Amount)>,
    counted: fn(Amount, SandboxState) -> Amount,
) -> Amount {
    promised.into_iter().fold(Amount::default(), |sum, (state, amount)| sum.and(counted(*amount, *state)))
}

/// What the sandboxes of a team or a machine were promised, by their state. Those that have ended are left out.
async fn promised(
    connection: &mut SqliteConnection,
    query: &'static str,
    owner: &str,
) -> Result<Vec<(SandboxState, Amount)>, StoreError> {
    let found = sqlx::query(query).bind(owner).fetch_all(connection).await.map_err(database)?;
    found.iter().map(rows::promised).collect()
}

/// What an earlier request under the same key means for this one; `None` if the key is free. It is free again once
/// the earlier attempt is known to have failed: a client that repeats a failed request wants another try.
pub(super) async fn earlier_request(
    connection: &mut SqliteConnection,
    team: TeamId,
    key: &IdempotencyKey,
    digest: &Digest,
) -> Result<Option<Created>, StoreError> {
    let found = sqlx::query(
        "SELECT i.digest, i.sandbox, s.state, s.started_at IS NOT NULL AS started \
         FROM idempotency_keys i JOIN sandboxes s ON s.id = i.sandbox WHERE i.team = ?1 AND i.key = ?2",
    )
    .bind(team.to_string())
    .bind(key.as_str())
    .fetch_optional(connection)
    .await
    .map_err(database)?;
    let Some(row) = found else { return Ok(None) };
    let what = "idempotency key";
    let text = |name| row.try_get::<&str, _>(name).map_err(|error| rows::corrupt(what, error));
    let earlier: Digest = rows::parse(what, text("digest")?)?;
    let sandbox: SandboxId = rows::parse(what, text("sandbox")?)?;
    let state = rows::parse_state(what, text("state")?)?;
    let started: bool = row.try_get("started").map_err(|error| rows::corrupt(what, error))?;
    Ok(match (state, started) {
        (SandboxState::Creating, _) | (_, true) if earlier != *digest => Some(Created::Mismatch),
        (SandboxState::Creating, _) => Some(Created::InProgress),
        (_, true) => Some(Created::Replay(sandbox)),
        (_, false) => None,
    })
}

/// Inserts a sandbox with its labels and its first event.
pub(super) async fn insert_new(
    connection: &mut SqliteConnection,
    new: &NewSandbox,
) -> Result<(), StoreError> {
    insert_row(connection, new).await?;
    for (key, value) in &new.metadata {
        sqlx::query("INSERT INTO sandbox_metadata (sandbox, key, value) VALUES (?1, ?2, ?3)")
            .bind(new.id.as_str())
            .bind(key)
            .bind(value)
            .execute(&mut *connection)
            .await
            .map_err(database)?;
    }
    let first = Event {
        seq: 1,
        at: new.created_at,
        state: SandboxState::Creating,
        end_reason: None,
        detail: "requested".into(),
    };
    insert_event(connection, &new.id, &first).await
}

async fn insert_row(connection: &mut SqliteConnection, new: &NewSandbox) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO sandboxes (id, node, team, template, rootfs, cpus, memory_mib, disk_mib, processes, \
             access_token, metadata, env, allow_internet_access, policy, traffic_token, request_host, state, \
             generation, created_at, end_at, max_end_at, events, timeout, on_timeout, idle_timeout, origin, made_from, \
             defaults, start_path, volumes, models_budget, models_origin, connections) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, 'creating', ?23, ?17, ?18, \
             ?19, 1, ?20, ?21, ?22, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31)",
    )
    .bind(new.id.as_str())
    .bind(new.node.to_string())
    .bind(new.team.to_string())
    .bind(&new.template)
    .bind(new.rootfs.to_string())
    .bind(new.limits.cpus())
    .bind(new.limits.memory_mib())
    .bind(new.limits.disk_mib())
    .bind(new.limits.processes())
    .bind(&new.access_token)
    .bind(map_text(&new.metadata))
    .bind(map_text(&new.env))
    .bind(new.allow_internet_access)
    .bind(json_text(&new.policy)?)
    .bind(&new.traffic_token)
    .bind(new.request_host.as_ref().map(RequestHost::as_str))
    .bind(new.created_at.as_millis())
    .bind(new.end_at.min(new.max_end_at).as_millis())
    .bind(new.max_end_at.as_millis())
    .bind(rows::span(new.lifetime.timeout))
    .bind(on_timeout_text(new.lifetime.on_timeout))
    .bind(new.lifetime.idle.map(rows::span))
    .bind(new.generation.0)
    .bind(new.made_from.origin())
    .bind(rows::made_from_text(&new.made_from))
    .bind(new.defaults.as_ref().map(json_text).transpose()?)
    .bind(new.start_path.as_str())
    .bind(rows::mounts_text(&new.volumes)?)
    .bind(new.models.as_ref().map(|models| models.budget.as_str()))
    .bind(new.models.as_ref().map(|models| models.origin.as_str()))
    .bind(rows::names_text(&new.connections)?)
    .execute(connection)
    .await
    .map_err(|error| exists_or_database(error, "sandbox", new.id.as_str()))?;
    Ok(())
}

async fn insert_event(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    event: &Event,
) -> Result<(), StoreError> {
    let detail = &event.detail[..event.detail.floor_char_boundary(MAX_DETAIL)];
    sqlx::query(
        "INSERT INTO events (sandbox, seq, at, state, end_reason, detail) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )
    .bind(id.as_str())
    .bind(event.seq)
    .bind(event.at.as_millis())
    .bind(state_text(event.state))
    .bind(event.end_reason.map(reason_text))
    .bind(detail)
    .execute(connection)
    .await
    .map_err(database)?;
    Ok(())
}
