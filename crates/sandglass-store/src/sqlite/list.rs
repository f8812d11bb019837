//! Many sandboxes: pages for clients, and all of a node for its reconciler.

use sandglass_types::{NodeId, SandboxState};
use sqlx::{QueryBuilder, Sqlite};

use super::rows::{self, sandbox_columns, state_text};
use super::{SqliteStore, database};
use crate::{ListFilter, ListPage, Order, PageCursor, SandboxRow, StoreError};

impl SqliteStore {
    pub(super) async fn page(&self, filter: &ListFilter) -> Result<ListPage, StoreError> {
        if filter.states.is_empty() {
            return Ok(ListPage { rows: Vec::new(), next: None });
        }
        let limit = usize::try_from(filter.limit.clamp(1, 100)).unwrap_or(100);
        let mut query = page_query(filter, limit + 1);
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        let more = found.len() > limit;
        let rows: Vec<SandboxRow> = found.iter().take(limit).map(rows::sandbox).collect::<Result<_, _>>()?;
        let next = rows
            .last()
            .filter(|_| more)
            .map(|last| PageCursor { created_at: last.created_at, id: last.id.clone() });
        Ok(ListPage { rows, next })
    }

    pub(super) async fn select_on_node(
        &self,
        node: NodeId,
        states: &[SandboxState],
    ) -> Result<Vec<SandboxRow>, StoreError> {
        if states.is_empty() {
            return Ok(Vec::new());
        }
        let mut query =
            QueryBuilder::new(concat!("SELECT ", sandbox_columns!(), " FROM sandboxes WHERE node = "));
        query.push_bind(node.to_string());
        push_states(&mut query, states);
        query.push(" ORDER BY created_at, id");
        let found = query.build().fetch_all(&self.readers).await.map_err(database)?;
        found.iter().map(rows::sandbox).collect()
    }

    pub(super) async fn count_by_state(&self, node: NodeId) -> Result<Vec<(SandboxState, u64)>, StoreError> {
        let found: Vec<(String, i64)> = sqlx::query_as(
            "SELECT state, count(*) FROM sandboxes WHERE node = ?1 AND state <> 'ended' GROUP BY state",
        )
        .bind(node.to_string())
        .fetch_all(&self.readers)
        .await
        .map_err(database)?;
        let counted = |(state, count): &(String, i64)| {
            let count = u64::try_from(*count).map_err(|error| rows::corrupt("sandbox", error))?;
            Ok((rows::parse_state("sandbox", state)?, count))
        };
        found.iter().map(counted).collect()
    }
}

/// Everything that comes from a client is a parameter; only constants become text.
pub(super) fn page_query(filter: &ListFilter, limit: usize) -> QueryBuilder<Sqlite> {
    let mut query =
        QueryBuilder::new(concat!("SELECT ", sandbox_columns!(), " FROM sandboxes WHERE team = "));
    query.push_bind(filter.team.to_string());
    push_states(&mut query, &filter.states);
    if !filter.states.contains(&SandboxState::Ended) {
        // Says the same once more, in the words of the partial index.
        query.push(" AND state <> 'ended'");
    }
    if let Some(template) = &filter.template {
        query.push(" AND template = ").push_bind(template.clone());
    }
    if let Some(from) = filter.created_from {
        query.push(" AND created_at >= ").push_bind(from.as_millis());
    }
    if !filter.metadata.is_empty() {
        query.push(
            " AND (SELECT count(*) FROM sandbox_metadata m \
             WHERE m.sandbox = sandboxes.id AND (m.key, m.value) IN (",
        );
        query.push_values(&filter.metadata, |mut pair, (key, value)| {
            pair.push_bind(key.clone()).push_bind(value.clone());
        });
        // Keys are unique on both sides, so as many hits as pairs means that all are there.
        query.push(")) = ").push_bind(i64::try_from(filter.metadata.len()).unwrap_or(i64::MAX));
    }
    if let Some(after) = &filter.after {
        query
            .push(match filter.order {
                Order::Ascending => " AND (created_at, id) > (",
                Order::Descending => " AND (created_at, id) < (",
            })
            .push_bind(after.created_at.as_millis())
            .push(", ")
            .push_bind(after.id.as_str().to_owned())
            .push(")");
    }
    query.push(match filter.order {
        Order::Ascending => " ORDER BY created_at, id",
        Order::Descending => " ORDER BY created_at DESC, id DESC",
    });
    query.push(" LIMIT ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    query
}

fn push_states(query: &mut QueryBuilder<Sqlite>, states: &[SandboxState]) {
    query.push(" AND state IN (");
    let mut list = query.separated(", ");
    for state in states {
        list.push_bind(state_text(*state));
    }
    query.push(")");
}
