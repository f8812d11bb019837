//! Keys.

use std::collections::HashMap;
use std::mem;
use std::sync::{Mutex, PoisonError};

use sandglass_types::{KeyId, Name, TeamId, Timestamp};
use sqlx::sqlite::SqliteConnection;

use super::teams::require_team;
use super::{SqliteStore, database, exists_or_database, rows};
use crate::{ApiKey, Identity, KeyDigest, MAX_KEYS, StoreError};

/// How many keys of a team are remembered after their end.
const MAX_ENDED: u32 = 1000;

pub(super) const OWNER_OF_KEY: &str = "SELECT k.id, k.team, k.operator \
     FROM api_keys k JOIN teams t ON t.id = k.team \
     WHERE k.digest = ?1 AND k.revoked_at IS NULL AND t.revoked_at IS NULL";

/// When keys were used that is not written yet. It has one entry for each valid key at most.
#[derive(Debug, Default)]
pub(super) struct Uses(Mutex<HashMap<KeyId, Timestamp>>);

impl Uses {
    fn note(&self, key: KeyId, at: Timestamp) {
        let mut uses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = uses.entry(key).or_insert(at);
        *last = at.max(*last);
    }

    fn take(&self) -> HashMap<KeyId, Timestamp> {
        mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl SqliteStore {
    pub(super) async fn insert_key(&self, key: &ApiKey) -> Result<(), StoreError> {
        let mut change = self.write_durably().await?;
        require_team(&mut change, key.team).await?;
        require_room(&mut change, key.team).await?;
        if let Some(by) = key.made_by {
            require_key(&mut change, by).await?;
        }
        sqlx::query(
            "INSERT INTO api_keys \
             (id, team, name, digest, suffix, created_at, last_used_at, revoked_at, operator, made_by) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
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
        .bind(key.made_by.map(|key| key.to_string()))
        .execute(&mut *change)
        .await
        .map_err(|error| exists_or_database(error, "key", &key.name))?;
        change.commit().await.map_err(database)
    }

    pub(super) async fn select_keys(&self, team: Option<TeamId>) -> Result<Vec<ApiKey>, StoreError> {
        let found = sqlx::query(
            "SELECT id, team, name, digest, suffix, created_at, last_used_at, revoked_at, operator, made_by \
             FROM api_keys WHERE ?1 IS NULL OR team = ?1 ORDER BY created_at, id",
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

    pub(super) async fn end_key_of(
        &self,
        by: &Identity,
        key: KeyId,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let mut change = self.write_durably().await?;
        let done = sqlx::query(
            "UPDATE api_keys SET revoked_at = ?1 \
             WHERE id = ?2 AND team = ?3 AND revoked_at IS NULL AND operator <= ?4 \
             AND EXISTS (SELECT 1 FROM api_keys by WHERE by.id = ?5 AND by.revoked_at IS NULL) AND EXISTS \
             (SELECT 1 FROM api_keys other WHERE other.team = ?3 AND other.id <> ?2 AND other.revoked_at IS NULL)",
        )
        .bind(now.as_millis())
        .bind(key.to_string())
        .bind(by.team.to_string())
        .bind(by.operator)
        .bind(by.key.to_string())
        .execute(&mut *change)
        .await
        .map_err(database)?
        .rows_affected();
        change.commit().await.map_err(database)?;
        Ok(done == 1)
    }

    pub(super) async fn name_key(&self, by: &Identity, key: KeyId, name: &Name) -> Result<bool, StoreError> {
        let mut change = self.write_durably().await?;
        let done = sqlx::query(
            "UPDATE api_keys SET name = ?1 \
             WHERE id = ?2 AND team = ?3 AND revoked_at IS NULL AND operator <= ?4 \
             AND EXISTS (SELECT 1 FROM api_keys by WHERE by.id = ?5 AND by.revoked_at IS NULL)",
        )
        .bind(name.as_str())
        .bind(key.to_string())
        .bind(by.team.to_string())
        .bind(by.operator)
        .bind(by.key.to_string())
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
        self.uses.note(owner.key, now);
        Ok(Some(owner))
    }

    /// What can't be written is noted again, for the next time.
    pub(super) async fn write_uses(&self) -> Result<(), StoreError> {
        let uses = self.uses.take();
        if uses.is_empty() {
            return Ok(());
        }
        let written = async {
            let mut change = self.write().await?;
            for (key, at) in &uses {
                sqlx::query(
                    "UPDATE api_keys SET last_used_at = max(?1, coalesce(last_used_at, ?1)) WHERE id = ?2",
                )
                .bind(at.as_millis())
                .bind(key.to_string())
                .execute(&mut *change)
                .await
                .map_err(database)?;
            }
            change.commit().await.map_err(database)
        };
        let outcome = written.await;
        if outcome.is_err() {
            uses.into_iter().for_each(|(key, at)| self.uses.note(key, at));
        }
        outcome
    }
}

/// Fails unless the key works: one that was ended while it was used makes no other.
async fn require_key(connection: &mut SqliteConnection, key: KeyId) -> Result<(), StoreError> {
    let valid: Option<i64> =
        sqlx::query_scalar("SELECT 1 FROM api_keys WHERE id = ?1 AND revoked_at IS NULL")
            .bind(key.to_string())
            .fetch_optional(connection)
            .await
            .map_err(database)?;
    valid.map(|_| ()).ok_or_else(|| StoreError::Missing { what: "key", id: key.to_string() })
}

/// Fails if the team has as many keys as it may have, and makes sure that those that come and go do not pile up either.
async fn require_room(connection: &mut SqliteConnection, team: TeamId) -> Result<(), StoreError> {
    let valid: u32 =
        sqlx::query_scalar("SELECT count(*) FROM api_keys WHERE team = ?1 AND revoked_at IS NULL")
            .bind(team.to_string())
            .fetch_one(&mut *connection)
            .await
            .map_err(database)?;
    if valid >= MAX_KEYS {
        return Err(StoreError::TooMany { what: "keys", most: MAX_KEYS });
    }
    forget_ended(connection, team).await
}

/// Forgets the keys of a team whose end is long past. What one of them made counts as made by who made that one, so that
/// whatever came of a key is found for as long as it is there. One from which something came that works is remembered, unless
/// who made it has ended as well and is: so whoever ends a key can find by it what came of it, whatever was made of that since. Of those
/// there are no more than keys that work, because between two of them one does.
async fn forget_ended(connection: &mut SqliteConnection, team: TeamId) -> Result<(), StoreError> {
    let past: Vec<String> = sqlx::query_scalar(
        "WITH RECURSIVE makers (id) AS ( \
             SELECT made_by FROM api_keys WHERE team = ?1 AND revoked_at IS NULL AND made_by IS NOT NULL \
             UNION \
             SELECT k.made_by FROM api_keys k JOIN makers m ON k.id = m.id WHERE k.made_by IS NOT NULL) \
         SELECT id FROM api_keys WHERE team = ?1 AND revoked_at IS NOT NULL AND NOT (id IN makers AND \
             (made_by IS NULL OR made_by IN (SELECT id FROM api_keys WHERE team = ?1 AND revoked_at IS NULL))) \
         ORDER BY revoked_at DESC, id DESC LIMIT -1 OFFSET ?2",
    )
    .bind(team.to_string())
    .bind(MAX_ENDED)
    .fetch_all(&mut *connection)
    .await
    .map_err(database)?;
    for id in past {
        for step in [
            "UPDATE api_keys SET made_by = (SELECT made_by FROM api_keys WHERE id = ?2) \
             WHERE team = ?1 AND made_by = ?2",
            "DELETE FROM api_keys WHERE team = ?1 AND id = ?2",
        ] {
            sqlx::query(step)
                .bind(team.to_string())
                .bind(&id)
                .execute(&mut *connection)
                .await
                .map_err(database)?;
        }
    }
    Ok(())
}
