//! Volumes. What is on them outlives a loss of power, and so does every word of them.

use sandglass_types::budget::{Amount, admit};
use sandglass_types::{NodeId, SandboxId, TeamId, VolumeId, VolumeMount, VolumeName};
use sqlx::{Row as _, SqliteConnection};

use super::sandboxes::held;
use super::{SqliteStore, database, exists_or_database, rows, teams};
use crate::model::MAX_NAMED_USES;
use crate::{NewVolume, StoreError, VolumeAdmitted, VolumeDeletion, VolumeRow, VolumeUses};

/// The columns of a volume, for use in `concat!`; [`rows::volume`] reads them.
macro_rules! select {
    ($where:literal) => {
        concat!("SELECT id, node, team, name, size_mib, token, state, created_at FROM volumes WHERE ", $where)
    };
}

impl SqliteStore {
    pub(super) async fn insert_new_volume(&self, new: &NewVolume) -> Result<VolumeAdmitted, StoreError> {
        let mut change = self.write_durably().await?;
        teams::require_team(&mut change, new.team).await?;
        let corrupt = |error| rows::corrupt("sum over volumes", error);
        let found = sqlx::query(
            "SELECT count(*) AS count, coalesce(sum(size_mib), 0) AS mib, \
                 coalesce(sum(name = ?2), 0) AS of_name \
             FROM volumes WHERE team = ?1 AND state <> 'deleting'",
        )
        .bind(new.team.to_string())
        .bind(new.name.as_str())
        .fetch_one(&mut *change)
        .await
        .map_err(database)?;
        let number = |name| {
            let value: i64 = found.try_get(name).map_err(corrupt)?;
            u64::try_from(value).map_err(|error| rows::corrupt("sum over volumes", error))
        };
        let (count, in_use) = (number("count")?, number("mib")?);
        if number("of_name")? > 0 {
            return Ok(VolumeAdmitted::NameTaken);
        }
        if count >= new.quota.count {
            return Ok(VolumeAdmitted::TooMany { most: new.quota.count });
        }
        if in_use.saturating_add(new.size_mib.into()) > new.quota.mib {
            return Ok(VolumeAdmitted::TooLarge { most: new.quota.mib, in_use });
        }
        let asked = Amount { disk_mib: new.size_mib.into(), ..Amount::default() };
        if let Err(excess) = admit(&new.capacity, &held(&mut change, new.node).await?.all(), &asked) {
            return Ok(VolumeAdmitted::OverCapacity(excess));
        }
        sqlx::query(
            "INSERT INTO volumes (id, node, team, name, size_mib, token, state, created_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, 'making', ?7)",
        )
        .bind(new.id.as_str())
        .bind(new.node.to_string())
        .bind(new.team.to_string())
        .bind(new.name.as_str())
        .bind(new.size_mib)
        .bind(&new.token)
        .bind(new.created_at.as_millis())
        .execute(&mut *change)
        .await
        .map_err(|error| exists_or_database(error, "volume", new.id.as_str()))?;
        change.commit().await.map_err(database)?;
        Ok(VolumeAdmitted::Inserted)
    }

    pub(super) async fn finish_volume(&self, id: &VolumeId) -> Result<bool, StoreError> {
        let mut change = self.write_durably().await?;
        let done = sqlx::query("UPDATE volumes SET state = 'ready' WHERE id = ?1 AND state = 'making'")
            .bind(id.as_str())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn give_volume_up(&self, id: &VolumeId) -> Result<VolumeDeletion, StoreError> {
        let mut change = self.write_durably().await?;
        let uses = uses_of(&mut change, id).await?;
        if !uses.is_empty() {
            return Ok(VolumeDeletion::InUse(uses));
        }
        let done = sqlx::query("UPDATE volumes SET state = 'deleting' WHERE id = ?1 AND state <> 'deleting'")
            .bind(id.as_str())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(if done.rows_affected() == 1 { VolumeDeletion::Begun } else { VolumeDeletion::NotThere })
    }

    pub(super) async fn forget_volume_row(&self, id: &VolumeId) -> Result<(), StoreError> {
        let mut change = self.write_durably().await?;
        sqlx::query("DELETE FROM volumes WHERE id = ?1 AND state = 'deleting'")
            .bind(id.as_str())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)
    }

    pub(super) async fn volume_of(&self, id: &VolumeId) -> Result<Option<VolumeRow>, StoreError> {
        self.one_volume(select!("id = ?1 AND state = 'ready'"), id).await
    }

    pub(super) async fn volume_of_working_team(
        &self,
        id: &VolumeId,
    ) -> Result<Option<VolumeRow>, StoreError> {
        let sql = select!(
            "id = ?1 AND state = 'ready' AND team IN (SELECT id FROM teams WHERE revoked_at IS NULL)"
        );
        self.one_volume(sql, id).await
    }

    async fn one_volume(&self, sql: &'static str, id: &VolumeId) -> Result<Option<VolumeRow>, StoreError> {
        let found =
            sqlx::query(sql).bind(id.as_str()).fetch_optional(&self.readers).await.map_err(database)?;
        found.as_ref().map(rows::volume).transpose()
    }

    pub(super) async fn volumes_of_team(&self, team: TeamId) -> Result<Vec<VolumeRow>, StoreError> {
        let found = sqlx::query(select!("team = ?1 AND state = 'ready' ORDER BY created_at, id"))
            .bind(team.to_string())
            .fetch_all(&self.readers)
            .await
            .map_err(database)?;
        found.iter().map(rows::volume).collect()
    }

    pub(super) async fn volumes_of_node(&self, node: NodeId) -> Result<Vec<VolumeRow>, StoreError> {
        let found = sqlx::query(select!("node = ?1 ORDER BY created_at, id"))
            .bind(node.to_string())
            .fetch_all(&self.readers)
            .await
            .map_err(database)?;
        found.iter().map(rows::volume).collect()
    }

    pub(super) async fn keep_marks(&self, image: &SandboxId, marks: &str) -> Result<(), StoreError> {
        let mut change = self.write_durably().await?;
        // Those of images that are gone by now.
        sqlx::query(
            "DELETE FROM volume_marks WHERE image = ?1 OR image NOT IN \
             (SELECT id FROM sandboxes WHERE state <> 'ended' UNION SELECT id FROM snapshots)",
        )
        .bind(image.as_str())
        .execute(&mut *change)
        .await
        .map_err(database)?;
        sqlx::query("INSERT INTO volume_marks (image, marks) VALUES (?1, ?2)")
            .bind(image.as_str())
            .bind(marks)
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)
    }

    pub(super) async fn marks_of(&self, image: &SandboxId) -> Result<Option<String>, StoreError> {
        sqlx::query_scalar("SELECT marks FROM volume_marks WHERE image = ?1")
            .bind(image.as_str())
            .fetch_optional(&self.readers)
            .await
            .map_err(database)
    }
}

/// The first of these volumes that is not there any more, or never was this team's.
pub(super) async fn missing(
    connection: &mut SqliteConnection,
    team: TeamId,
    volumes: &[VolumeMount],
) -> Result<Option<VolumeName>, StoreError> {
    for volume in volumes {
        let found: Option<i64> =
            sqlx::query_scalar("SELECT 1 FROM volumes WHERE id = ?1 AND team = ?2 AND state = 'ready'")
                .bind(volume.id.as_str())
                .bind(team.to_string())
                .fetch_optional(&mut *connection)
                .await
                .map_err(database)?;
        if found.is_none() {
            return Ok(Some(volume.name.clone()));
        }
    }
    Ok(None)
}

async fn uses_of(connection: &mut SqliteConnection, id: &VolumeId) -> Result<VolumeUses, StoreError> {
    let sandboxes: Vec<String> = sqlx::query_scalar(
        "SELECT s.id FROM sandboxes s WHERE s.state <> 'ended' AND EXISTS \
             (SELECT 1 FROM json_each(s.volumes) v WHERE json_extract(v.value, '$.id') = ?1) ORDER BY s.id LIMIT ?2",
    )
    .bind(id.as_str())
    .bind(MAX_NAMED_USES)
    .fetch_all(&mut *connection)
    .await
    .map_err(database)?;
    let snapshots: Vec<String> = sqlx::query_scalar(
        "SELECT s.id FROM snapshots s WHERE EXISTS \
             (SELECT 1 FROM json_each(s.volumes) v WHERE json_extract(v.value, '$.id') = ?1) ORDER BY s.id LIMIT ?2",
    )
    .bind(id.as_str())
    .bind(MAX_NAMED_USES)
    .fetch_all(&mut *connection)
    .await
    .map_err(database)?;
    Ok(VolumeUses {
        sandboxes: sandboxes.iter().map(|id| rows::parse("sandbox", id)).collect::<Result<_, _>>()?,
        snapshots: snapshots.iter().map(|id| rows::parse("snapshot", id)).collect::<Result<_, _>>()?,
    })
}
