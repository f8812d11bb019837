//! The list request.

use jiff::Timestamp as Instant;
use sandglass_store::{ListFilter, Order};
use sandglass_types::{SandboxState, TeamId, Timestamp};

use crate::error::ApiError;
use crate::page;
use crate::query::{Query, metadata_filter};

/// Sandboxes on one page, at most and by default.
pub(crate) const MAX_PAGE: u32 = 100;

fn states(query: &Query) -> Result<Vec<SandboxState>, ApiError> {
    const RUNNING: [SandboxState; 2] = [SandboxState::Running, SandboxState::Pausing];
    const PAUSED: [SandboxState; 2] = [SandboxState::Paused, SandboxState::Resuming];
    let mut states = Vec::new();
    for name in query.many("state") {
        match name {
            "running" if !states.contains(&RUNNING[0]) => states.extend(RUNNING),
            "paused" if !states.contains(&PAUSED[0]) => states.extend(PAUSED),
            "running" | "paused" => {}
            other => {
                return Err(ApiError::invalid(format!(
                    "invalid state '{}': expected running or paused",
                    other.chars().take(32).collect::<String>()
                )));
            }
        }
    }
    Ok(if states.is_empty() { [RUNNING, PAUSED].concat() } else { states })
}

fn started_after(query: &Query) -> Result<Option<Timestamp>, ApiError> {
    let parse = |text: &str| {
        let time: Instant = text.parse().map_err(|_| {
            ApiError::invalid("invalid startedAfter: expected a time like 2025-11-29T14:00:00Z")
        })?;
        // Inclusive, and rows are kept to the millisecond, so part of one must not exclude the whole of it.
        Ok(Timestamp::from_millis(time.as_millisecond()))
    };
    query.one("startedAfter").map(parse).transpose()
}

/// Reads the query of `GET /v2/sandboxes`.
///
/// # Errors
/// 400 that names the parameter.
pub(crate) fn filter(team: TeamId, query: &Query) -> Result<ListFilter, ApiError> {
    let order = match query.one("order") {
        None | Some("desc") => Order::Descending,
        Some("asc") => Order::Ascending,
        Some(_) => return Err(ApiError::invalid("invalid order: expected asc or desc")),
    };
    Ok(ListFilter {
        team,
        states: states(query)?,
        metadata: metadata_filter(query.one("metadata"))?,
        template: query.one("template").map(str::to_owned),
        created_from: started_after(query)?,
        order,
        after: query.one("nextToken").map(|token| page::decode(token, order)).transpose()?,
        limit: limit(query)?,
    })
}

/// Reads how many rows a page may have.
///
/// # Errors
/// 400.
pub(crate) fn limit(query: &Query) -> Result<u32, ApiError> {
    let Some(text) = query.one("limit") else { return Ok(MAX_PAGE) };
    let limit = text.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
    limit.ok_or_else(|| ApiError::invalid("invalid limit: expected 1 to 100"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &str) -> Result<ListFilter, ApiError> {
        filter(TeamId::random(), &Query::parse(Some(query)).unwrap())
    }

    #[test]
    fn defaults() {
        let all = read("").unwrap();
        use SandboxState::{Paused, Pausing, Resuming, Running};
        assert_eq!(all.states, [Running, Pausing, Paused, Resuming]);
        assert_eq!((all.limit, all.order), (100, Order::Descending));
        assert_eq!((all.after, all.template, all.created_from), (None, None, None));
    }

    #[test]
    fn states_joined_and_repeated() {
        use SandboxState::{Paused, Pausing, Resuming, Running};
        let all = [Running, Pausing, Paused, Resuming];
        assert_eq!(read("state=running,paused").unwrap().states, all);
        assert_eq!(
            read("state=paused&state=running&state=paused").unwrap().states,
            [Paused, Resuming, Running, Pausing]
        );
        assert_eq!(read("state=paused").unwrap().states, [Paused, Resuming]);
        assert_eq!(read("state=running").unwrap().states, [Running, Pausing]);
        assert!(read("state=ended").is_err());
    }

    #[test]
    fn every_parameter_arrives() {
        let read =
            read("order=asc&limit=7&template=base&startedAfter=2025-11-29T15:00:00.1239%2B01:00").unwrap();
        assert_eq!((read.order, read.limit), (Order::Ascending, 7));
        assert_eq!(read.template.as_deref(), Some("base"));
        assert_eq!(read.created_from, Some(Timestamp::from_millis(1_764_424_800_123)));
    }

    #[test]
    fn nonsense_is_refused() {
        for query in [
            "limit=0",
            "limit=101",
            "limit=x",
            "limit=-1",
            "order=up",
            "startedAfter=yesterday",
            "nextToken=%21",
            "metadata=x",
        ] {
            assert!(read(query).is_err(), "{query}");
        }
    }
}
