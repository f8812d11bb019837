//! Images that sandboxes are made from. They outlive a loss of power, and so does every word of them.

use sandglass_types::budget::Amount;
use sandglass_types::{NodeId, SnapshotId, TeamId, Timestamp};
use sqlx::{QueryBuilder, Row as _, Sqlite, SqliteConnection};

use super::rows::{self, json_text, purpose_text};
use super::sandboxes::{Asked, insert_new, refused};
use super::{SqliteStore, database, exists_or_database, teams};
use crate::{
    Admitted, Finished, NewSandbox, NewSnapshot, PageCursor, Purpose, SnapshotFilter, SnapshotKey,
    SnapshotPage, SnapshotRow, StoreError,
};

const SELECT: &str = "SELECT s.id, s.node, s.team, t.name AS team_name, s.purpose, s.name, s.tag, s.template, s.rootfs, \
     s.defaults, s.spec, s.cpus, s.memory_mib, s.disk_mib, s.processes, s.source, s.generation, s.state, s.created_at, s.volumes \
     FROM snapshots s JOIN teams t ON t.id = s.team WHERE ";

/// Those that clients see.
const VISIBLE: &str = "s.state = 'ready' AND s.purpose = 'snapshot' AND s.team = ";

impl SqliteStore {
    /// Inserts an image and the sandboxes that are to be made from it, or nothing at all.
    pub(super) async fn insert_image(
        &self,
        new: &NewSnapshot,
        children: &[NewSandbox],
    ) -> Result<Admitted, StoreError> {
        let mut change = self.write_durably().await?;
        teams::require_team(&mut change, new.team).await?;
        let of_children =
            children.iter().fold(Amount::default(), |sum, child| sum.and(Amount::of(&child.limits)));
        let asked = Asked {
            team: new.team,
            node: new.node,
            of_team: of_children,
            of_machine: of_children.and(Amount::of(&new.limits).as_image()),
            quota: new.quota,
            capacity: new.capacity,
        };
        if let Some(refusal) = refused(&mut change, &asked).await? {
            return Ok(refusal.into());
        }
        insert_row(&mut change, new).await?;
        for child in children {
            insert_new(&mut change, child).await?;
        }
        change.commit().await.map_err(database)?;
        Ok(Admitted::Inserted)
    }

    pub(super) async fn finish_image(
        &self,
        id: &SnapshotId,
        instead_of: Option<&SnapshotId>,
    ) -> Result<Finished, StoreError> {
        let mut change = self.write_durably().await?;
        match place_of(&mut change, id, instead_of).await? {
            Finished::Ready => {}
            refused => return Ok(refused),
        }
        // The name is that of the newest from now on.
        sqlx::query(
            "UPDATE snapshots SET name = NULL, tag = NULL WHERE state = 'ready' AND (team, name, tag) = \
             (SELECT team, name, tag FROM snapshots WHERE id = ?1 AND state = 'writing')",
        )
        .bind(id.as_str())
        .execute(&mut *change)
        .await
        .map_err(database)?;
        // And so is the template; sandboxes of the one before are made from what they have a share in.
        sqlx::query(
            "UPDATE snapshots SET state = 'deleting' WHERE state = 'ready' AND purpose = 'template' AND (node, template) = \
             (SELECT node, template FROM snapshots WHERE id = ?1 AND state = 'writing' AND purpose = 'template')",
        )
        .bind(id.as_str())
        .execute(&mut *change)
        .await
        .map_err(database)?;
        sqlx::query("UPDATE snapshots SET state = 'ready' WHERE id = ?1 AND state = 'writing'")
            .bind(id.as_str())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(Finished::Ready)
    }

    pub(super) async fn give_image_up(&self, id: &SnapshotId) -> Result<bool, StoreError> {
        let mut change = self.write_durably().await?;
        let done =
            sqlx::query("UPDATE snapshots SET state = 'deleting' WHERE id = ?1 AND state <> 'deleting'")
                .bind(id.as_str())
                .execute(&mut *change)
                .await
                .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn forget_image(&self, id: &SnapshotId) -> Result<(), StoreError> {
        let mut change = self.write_durably().await?;
        sqlx::query("DELETE FROM snapshots WHERE id = ?1 AND state = 'deleting'")
            .bind(id.as_str())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)
    }

    pub(super) async fn find_snapshot(
        &self,
        team: TeamId,
        key: &SnapshotKey,
    ) -> Result<Option<SnapshotRow>, StoreError> {
        let mut query = visible(team);
        push_key(&mut query, key);
        // Nobody else's name is in the way of an id.
        query.push(" ORDER BY s.id = ").push_bind(key.id.as_ref().map(|id| id.as_str().to_owned()));
        query.push(" DESC, s.created_at DESC, s.id DESC LIMIT 1");
        let found = query.build().fetch_optional(&self.readers).await.map_err(database)?;
        found.as_ref().map(rows::snapshot).transpose()
    }

    pub(super) async fn page_of_snapshots(
        &self,
        filter: &SnapshotFilter,
    ) -> Result<SnapshotPage, StoreError> {
        let limit = usize::try_from(filter.limit.clamp(1, 100)).unwrap_or(100);
        let mut query = visible(filter.team);
        if let Some(source) = &filter.source {
            query.push(" AND s.source = ").push_bind(source.as_str().to_owned());
        }
        if let Some(key) = &filter.key {
            push_key(&mut query, key);
        }
        if let Some(after) = &filter.after {
            query.push(" AND (s.created_at, s.id) < (").push_bind(after.created_at.as_millis());
            query.push(", ").push_bind(after.id.as_str().to_owned()).push(")");
        }
        query.push(" ORDER BY s.created_at DESC, s.id DESC LIMIT ");
        query.push_bind(i64::try_from(limit + 1).unwrap_or(i64::MAX));
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        let more = found.len() > limit;
        let rows: Vec<_> = found.iter().take(limit).map(rows::snapshot).collect::<Result<_, _>>()?;
        let next = rows
            .last()
            .filter(|_| more)
            .map(|last| PageCursor { created_at: last.created_at, id: last.id.clone() });
        Ok(SnapshotPage { rows, next })
    }

    pub(super) async fn image_of_template(
        &self,
        node: NodeId,
        name: &str,
    ) -> Result<Option<SnapshotRow>, StoreError> {
        let mut query = QueryBuilder::new(SELECT);
        query.push("s.state = 'ready' AND s.purpose = 'template' AND s.node = ").push_bind(node.to_string());
        query.push(" AND s.template = ").push_bind(name.to_owned());
        let found = query.build().fetch_optional(&self.readers).await.map_err(database)?;
        found.as_ref().map(rows::snapshot).transpose()
    }

    pub(super) async fn images_of_node(&self, node: NodeId) -> Result<Vec<SnapshotRow>, StoreError> {
        let mut query = QueryBuilder::new(SELECT);
        query.push("s.node = ").push_bind(node.to_string()).push(" ORDER BY s.created_at, s.id");
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        found.iter().map(rows::snapshot).collect()
    }

    pub(super) async fn unused_snapshots(
        &self,
        node: NodeId,
        before: Timestamp,
    ) -> Result<Vec<SnapshotRow>, StoreError> {
        let mut query = QueryBuilder::new(SELECT);
        query.push("s.state = 'ready' AND s.purpose = 'snapshot' AND s.node = ").push_bind(node.to_string());
        query.push(" AND s.created_at < ").push_bind(before.as_millis());
        // Nobody but its own team makes anything from it.
        query.push(" AND NOT EXISTS (SELECT 1 FROM sandboxes b WHERE b.team = s.team AND b.created_at >= ");
        query.push_bind(before.as_millis()).push(" AND b.origin = 'snapshot' AND b.made_from = s.id)");
        query.push(" ORDER BY s.created_at, s.id");
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        found.iter().map(rows::snapshot).collect()
    }
}

/// Whether an image may become ready: by its name, and by the image that it is to take the place of.
async fn place_of(
    connection: &mut SqliteConnection,
    id: &SnapshotId,
    instead_of: Option<&SnapshotId>,
) -> Result<Finished, StoreError> {
    let found = sqlx::query(
        "SELECT n.purpose = 'template' AS for_template, \
             (SELECT id FROM snapshots t WHERE t.state = 'ready' AND t.purpose = 'template' AND t.node = n.node AND \
                 t.template = CASE n.purpose WHEN 'template' THEN n.template ELSE n.name END) AS of_template, \
             EXISTS (SELECT 1 FROM snapshots s WHERE s.state = 'ready' AND s.purpose = 'snapshot' AND \
                 n.template IN (s.name, s.id)) AS of_snapshot \
         FROM snapshots n WHERE n.id = ?1 AND n.state = 'writing'",
    )
    .bind(id.as_str())
    .fetch_optional(connection)
    .await
    .map_err(database)?;
    let Some(row) = found else { return Ok(Finished::NotWriting) };
    let corrupt = |error| rows::corrupt("snapshot", error);
    let for_template: bool = row.try_get("for_template").map_err(corrupt)?;
    let of_template: Option<&str> = row.try_get("of_template").map_err(corrupt)?;
    let of_snapshot: bool = row.try_get("of_snapshot").map_err(corrupt)?;
    Ok(match (for_template, of_template) {
        (true, found) if instead_of.is_some_and(|wanted| found != Some(wanted.as_str())) => {
            Finished::Outdated
        }
        // One that has its name already keeps it.
        (true, None) if of_snapshot => Finished::NameTaken,
        (false, Some(_)) => Finished::NameTaken,
        _ => Finished::Ready,
    })
}

fn visible(team: TeamId) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(SELECT);
    query.push(VISIBLE).push_bind(team.to_string());
    query
}

fn push_key(query: &mut QueryBuilder<Sqlite>, key: &SnapshotKey) {
    query.push(" AND (s.id = ").push_bind(key.id.as_ref().map(|id| id.as_str().to_owned()));
    query.push(" OR (s.name = ").push_bind(key.name.clone());
    if let Some(tag) = &key.tag {
        query.push(" AND s.tag = ").push_bind(tag.clone());
    }
    query.push("))");
}

async fn insert_row(connection: &mut SqliteConnection, new: &NewSnapshot) -> Result<(), StoreError> {
    let spec = match &new.purpose {
        Purpose::Template(spec) => Some(json_text(&**spec)),
        Purpose::Snapshot | Purpose::Fork => None,
    };
    sqlx::query(
        "INSERT INTO snapshots (id, node, team, purpose, name, tag, template, rootfs, cpus, memory_mib, disk_mib, \
             processes, source, generation, state, created_at, defaults, spec, volumes) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, 'writing', ?15, ?16, ?17, ?18)",
    )
    .bind(new.id.as_str())
    .bind(new.node.to_string())
    .bind(new.team.to_string())
    .bind(purpose_text(&new.purpose))
    .bind(new.name.as_ref().map(|name| name.name.as_str()))
    .bind(new.name.as_ref().map(|name| name.tag.as_str()))
    .bind(&new.template)
    .bind(new.rootfs.to_string())
    .bind(new.limits.cpus())
    .bind(new.limits.memory_mib())
    .bind(new.limits.disk_mib())
    .bind(new.limits.processes())
    .bind(new.source.as_str())
    .bind(new.generation.0)
    .bind(new.created_at.as_millis())
    .bind(new.defaults.as_ref().map(json_text).transpose()?)
    .bind(spec.transpose()?)
    .bind(rows::mounts_text(&new.volumes)?)
    .execute(connection)
    .await
    .map_err(|error| exists_or_database(error, "snapshot", new.id.as_str()))?;
    Ok(())
}
