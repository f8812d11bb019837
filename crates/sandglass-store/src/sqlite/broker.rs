//! Secrets and connections. What is in here is sealed, and of no use to who has the file alone.

use data_encoding::HEXLOWER;
use sandglass_broker::ConnectionName;
use sandglass_types::TeamId;
use sqlx::{QueryBuilder, Sqlite, SqliteConnection};

use super::rows::{self, json_text, map_text};
use super::teams::require_team;
use super::{SqliteStore, database};
use crate::{
    ConnectionRow, Kept, MAX_CONNECTIONS, MAX_SECRETS, PageCursor, SecretChange, SecretFilter, SecretKey,
    SecretPage, SecretRow, StoreError,
};

const SECRETS: &str =
    "SELECT id, team, name, version, sealed, metadata, created_at, updated_at FROM secrets WHERE team = ";

const CONNECTIONS: &str =
    "SELECT team, name, written, sealed, created_at, updated_at FROM connections WHERE team = ";

fn that(team: TeamId, key: &SecretKey) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(SECRETS);
    query.push_bind(team.to_string());
    match key {
        SecretKey::Id(id) => query.push(" AND id = ").push_bind(id.to_string()),
        SecretKey::Name(name) => query.push(" AND name = ").push_bind(name.as_str().to_owned()),
    };
    query
}

async fn count(
    connection: &mut SqliteConnection,
    sql: &'static str,
    team: TeamId,
    name: &str,
) -> Result<(u32, bool), StoreError> {
    let (all, same): (i64, i64) = sqlx::query_as(sql)
        .bind(team.to_string())
        .bind(name)
        .fetch_one(connection)
        .await
        .map_err(database)?;
    Ok((u32::try_from(all).unwrap_or(u32::MAX), same > 0))
}

impl SqliteStore {
    pub(super) async fn keep_mark(&self, mark: &[u8]) -> Result<Vec<u8>, StoreError> {
        let mut change = self.write_durably().await?;
        sqlx::query("INSERT INTO meta (key, value) VALUES ('master_key', ?1) ON CONFLICT DO NOTHING")
            .bind(HEXLOWER.encode(mark))
            .execute(&mut *change)
            .await
            .map_err(database)?;
        let kept: String = sqlx::query_scalar("SELECT value FROM meta WHERE key = 'master_key'")
            .fetch_one(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)?;
        HEXLOWER.decode(kept.as_bytes()).map_err(|error| rows::corrupt("mark of the master key", error))
    }

    pub(super) async fn insert_new_secret(&self, new: &SecretRow) -> Result<Kept, StoreError> {
        let mut change = self.write_durably().await?;
        require_team(&mut change, new.team).await?;
        let sql = "SELECT count(*), coalesce(sum(name = ?2), 0) FROM secrets WHERE team = ?1";
        match count(&mut change, sql, new.team, new.name.as_str()).await? {
            (_, true) => return Ok(Kept::NameTaken),
            (all, _) if all >= MAX_SECRETS => return Ok(Kept::TooMany { most: MAX_SECRETS }),
            _ => {}
        }
        sqlx::query(
            "INSERT INTO secrets (id, team, name, version, sealed, metadata, created_at, updated_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )
        .bind(new.id.to_string())
        .bind(new.team.to_string())
        .bind(new.name.as_str())
        .bind(new.version)
        .bind(&new.sealed)
        .bind(map_text(&new.metadata))
        .bind(new.created_at.as_millis())
        .bind(new.updated_at.as_millis())
        .execute(&mut *change)
        .await
        .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(Kept::Inserted)
    }

    pub(super) async fn change_secret(
        &self,
        team: TeamId,
        key: &SecretKey,
        new: &SecretChange,
    ) -> Result<Option<SecretRow>, StoreError> {
        let mut change = self.write_durably().await?;
        let Some(found) = that(team, key).build().fetch_optional(&mut *change).await.map_err(database)?
        else {
            return Ok(None);
        };
        let mut row = rows::secret(&found)?;
        row.version = row.version.saturating_add(1);
        row.sealed.clone_from(&new.sealed);
        row.updated_at = new.at;
        if let Some(metadata) = &new.metadata {
            row.metadata.clone_from(metadata);
        }
        sqlx::query(
            "UPDATE secrets SET version = ?1, sealed = ?2, metadata = ?3, updated_at = ?4 WHERE id = ?5",
        )
        .bind(row.version)
        .bind(&row.sealed)
        .bind(map_text(&row.metadata))
        .bind(row.updated_at.as_millis())
        .bind(row.id.to_string())
        .execute(&mut *change)
        .await
        .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(Some(row))
    }

    pub(super) async fn secret_of(
        &self,
        team: TeamId,
        key: &SecretKey,
    ) -> Result<Option<SecretRow>, StoreError> {
        let found = that(team, key).build().fetch_optional(&self.readers).await.map_err(database)?;
        found.as_ref().map(rows::secret).transpose()
    }

    pub(super) async fn page_of_secrets(&self, filter: &SecretFilter) -> Result<SecretPage, StoreError> {
        let limit = usize::try_from(filter.limit.clamp(1, 100)).unwrap_or(100);
        let mut query = QueryBuilder::new(SECRETS);
        query.push_bind(filter.team.to_string());
        if let Some(after) = &filter.after {
            query.push(" AND (created_at, id) < (").push_bind(after.created_at.as_millis());
            query.push(", ").push_bind(after.id.to_string()).push(")");
        }
        query.push(" ORDER BY created_at DESC, id DESC LIMIT ");
        query.push_bind(i64::try_from(limit + 1).unwrap_or(i64::MAX));
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        let more = found.len() > limit;
        let rows: Vec<_> = found.iter().take(limit).map(rows::secret).collect::<Result<_, _>>()?;
        let next =
            rows.last().filter(|_| more).map(|last| PageCursor { created_at: last.created_at, id: last.id });
        Ok(SecretPage { rows, next })
    }

    pub(super) async fn remove_secret(&self, team: TeamId, key: &SecretKey) -> Result<bool, StoreError> {
        let mut change = self.write_durably().await?;
        let Some(found) = that(team, key).build().fetch_optional(&mut *change).await.map_err(database)?
        else {
            return Ok(false);
        };
        sqlx::query("DELETE FROM secrets WHERE id = ?1")
            .bind(rows::secret(&found)?.id.to_string())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(true)
    }

    pub(super) async fn keep_connection(&self, new: &ConnectionRow) -> Result<Kept, StoreError> {
        let mut change = self.write_durably().await?;
        require_team(&mut change, new.team).await?;
        let sql = "SELECT count(*), coalesce(sum(name = ?2), 0) FROM connections WHERE team = ?1";
        let (all, replaced) = count(&mut change, sql, new.team, new.name.as_str()).await?;
        if !replaced && all >= MAX_CONNECTIONS {
            return Ok(Kept::TooMany { most: MAX_CONNECTIONS });
        }
        sqlx::query(
            "INSERT INTO connections (team, name, written, sealed, created_at, updated_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (team, name) DO UPDATE SET \
             written = excluded.written, sealed = excluded.sealed, updated_at = excluded.updated_at",
        )
        .bind(new.team.to_string())
        .bind(new.name.as_str())
        .bind(json_text(&new.written)?)
        .bind(&new.sealed)
        .bind(new.created_at.as_millis())
        .bind(new.updated_at.as_millis())
        .execute(&mut *change)
        .await
        .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(if replaced { Kept::Replaced } else { Kept::Inserted })
    }

    pub(super) async fn connection_of(
        &self,
        team: TeamId,
        name: &ConnectionName,
    ) -> Result<Option<ConnectionRow>, StoreError> {
        let mut query = QueryBuilder::<Sqlite>::new(CONNECTIONS);
        query.push_bind(team.to_string()).push(" AND name = ").push_bind(name.as_str().to_owned());
        let found = query.build().fetch_optional(&self.readers).await.map_err(database)?;
        found.as_ref().map(rows::connection).transpose()
    }

    pub(super) async fn connections_of(&self, team: TeamId) -> Result<Vec<ConnectionRow>, StoreError> {
        let mut query = QueryBuilder::<Sqlite>::new(CONNECTIONS);
        query.push_bind(team.to_string()).push(" ORDER BY name");
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        found.iter().map(rows::connection).collect()
    }

    pub(super) async fn remove_connection(
        &self,
        team: TeamId,
        name: &ConnectionName,
    ) -> Result<bool, StoreError> {
        let mut change = self.write_durably().await?;
        let done = sqlx::query("DELETE FROM connections WHERE team = ?1 AND name = ?2")
            .bind(team.to_string())
            .bind(name.as_str())
            .execute(&mut *change)
            .await
            .map_err(database)?
            .rows_affected();
        change.commit().await.map_err(database)?;
        Ok(done == 1)
    }
}
