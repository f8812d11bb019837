//! What happened to a sandbox and in it.

use std::collections::BTreeMap;

use axum::extract::{RawQuery, State};
use sandglass_control::{LogEntry, LogLevel};
use sandglass_types::Timestamp;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::routes::Named;
use super::wire::rfc3339;
use crate::auth::Caller;
use crate::error::{ApiError, ErrorBody};
use crate::query::Query;
use crate::router::ApiState;

/// Most entries of one answer.
const MAX_ENTRIES: usize = 1000;

/// Longest text that can be searched for, in characters.
const MAX_SEARCH: usize = 256;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(logs_v1)).routes(routes!(logs_v2))
}

/// One entry.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxLogEntry {
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    timestamp: Timestamp,
    message: String,
    /// `debug`, `info`, `warn` or `error`.
    level: &'static str,
    /// Who tells (`logger`: `sandglass`, or `agent`, which is the sandbox itself), and what programs may want of it.
    fields: BTreeMap<String, String>,
}

/// One entry as older clients read it.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxLog {
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    timestamp: Timestamp,
    /// A JSON object as a text, with `level`, `logger`, `message` and the fields.
    line: String,
}

/// Entries in both forms.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SandboxLogs {
    logs: Vec<SandboxLog>,
    log_entries: Vec<SandboxLogEntry>,
}

/// Entries.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxLogsV2 {
    logs: Vec<SandboxLogEntry>,
}

const fn name(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Debug => "debug",
        LogLevel::Info => "info",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
    }
}

impl From<LogEntry> for SandboxLogEntry {
    fn from(entry: LogEntry) -> Self {
        let mut fields = entry.fields;
        // The last word on who tells is the server's.
        fields.insert("logger".into(), entry.logger.into());
        Self { timestamp: entry.at, message: entry.message, level: name(entry.level), fields }
    }
}

impl From<&SandboxLogEntry> for SandboxLog {
    fn from(entry: &SandboxLogEntry) -> Self {
        let mut line = entry.fields.clone();
        line.insert("level".into(), entry.level.into());
        line.insert("message".into(), entry.message.clone());
        Self { timestamp: entry.timestamp, line: serde_json::to_string(&line).unwrap_or_default() }
    }
}

/// Which entries are wanted. Pure.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    /// Where to begin, which is included.
    from: Option<i64>,
    limit: usize,
    /// Whether later ones are wanted, or earlier ones, the latest first.
    forward: bool,
    /// No less than that.
    level: LogLevel,
    search: Option<String>,
}

impl Wanted {
    fn read(query: &Query, from: &str, forward: bool) -> Result<Self, ApiError> {
        let whole = |key| query.number(key, "a whole number, 0 or more");
        let limit = match whole("limit")? {
            None => MAX_ENTRIES,
            Some(limit) => usize::try_from(limit).unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES),
        };
        let level = match query.one("level") {
            None | Some("debug") => LogLevel::Debug,
            Some("info") => LogLevel::Info,
            Some("warn") => LogLevel::Warn,
            Some("error") => LogLevel::Error,
            Some(_) => return Err(ApiError::invalid("level must be debug, info, warn or error")),
        };
        let forward = match query.one("direction") {
            None => forward,
            Some("forward") => true,
            Some("backward") => false,
            Some(_) => return Err(ApiError::invalid("direction must be forward or backward")),
        };
        let search = query.one("search").map(str::to_owned);
        if search.as_ref().is_some_and(|text| text.chars().count() > MAX_SEARCH) {
            return Err(ApiError::invalid(format!("search must be at most {MAX_SEARCH} characters")));
        }
        Ok(Self { from: whole(from)?, limit, forward, level, search })
    }

    /// Of entries that are in their order. Those of one millisecond are never parted, so that whoever goes on after the last
    /// one misses none; that may be some more than the limit, and never so many more that it is none.
    fn of(&self, entries: Vec<LogEntry>) -> Vec<LogEntry> {
        let reached = |at: i64| match self.from {
            None => true,
            Some(from) => {
                if self.forward {
                    at >= from
                } else {
                    at <= from
                }
            }
        };
        let fits = |entry: &LogEntry| {
            entry.level >= self.level
                && reached(entry.at.as_millis())
                && self.search.as_ref().is_none_or(|text| entry.message.contains(text))
        };
        let mut found: Vec<_> = entries.into_iter().filter(fits).collect();
        if !self.forward {
            found.reverse();
        }
        let mut end = self.limit.min(found.len());
        let most = found.len().min(end + MAX_ENTRIES);
        while end > 0 && end < most && found[end].at == found[end - 1].at {
            end += 1;
        }
        found.truncate(end);
        found
    }
}

#[utoipa::path(get, path = "/sandboxes/{id}/logs", tag = "e2b", params(("id" = String, Path),
    ("start" = Option<i64>, Query, description = "Milliseconds since 1970; the beginning if absent"),
    ("limit" = Option<u32>, Query, description = "1000 at most")), responses(
    (status = 200, description = "What happened from there on, oldest first", body = SandboxLogs),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn logs_v1(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<SandboxLogs>, ApiError> {
    let wanted = Wanted::read(&Query::parse(query.as_deref())?, "start", true)?;
    let entries = wanted.of(state.backend.logs(caller.0, &id).await?);
    let log_entries: Vec<SandboxLogEntry> = entries.into_iter().map(SandboxLogEntry::from).collect();
    Ok(axum::Json(SandboxLogs { logs: log_entries.iter().map(SandboxLog::from).collect(), log_entries }))
}

#[utoipa::path(get, path = "/v2/sandboxes/{id}/logs", tag = "e2b", params(("id" = String, Path),
    ("cursor" = Option<i64>, Query, description = "Where to begin, in milliseconds since 1970, that one included"),
    ("limit" = Option<u32>, Query, description = "1000 at most"),
    ("direction" = Option<String>, Query, description = "backward, which is the latest first, or forward"),
    ("level" = Option<String>, Query, description = "debug, info, warn or error, and what is worse"),
    ("search" = Option<String>, Query, description = "What the message must hold, at most 256 characters")), responses(
    (status = 200, description = "What happened", body = SandboxLogsV2),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn logs_v2(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<SandboxLogsV2>, ApiError> {
    let wanted = Wanted::read(&Query::parse(query.as_deref())?, "cursor", false)?;
    let entries = wanted.of(state.backend.logs(caller.0, &id).await?);
    Ok(axum::Json(SandboxLogsV2 { logs: entries.into_iter().map(SandboxLogEntry::from).collect() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(query: &str, forward: bool) -> Result<Wanted, ApiError> {
        Wanted::read(&Query::parse(Some(query)).unwrap(), "from", forward)
    }

    fn entry(at: i64, level: LogLevel, message: &str) -> LogEntry {
        let (at, message) = (Timestamp::from_millis(at), message.to_owned());
        LogEntry { at, level, logger: "agent", message, fields: BTreeMap::new() }
    }

    #[test]
    fn what_is_wanted_of_it() {
        use LogLevel::{Debug, Error, Info, Warn};
        let all = [(1, Debug, "a"), (2, Info, "ab"), (2, Warn, "b"), (3, Error, "c"), (4, Info, "d")];
        let all = all.map(|(at, level, message)| entry(at, level, message));
        for (query, forward, expected) in [
            ("", true, "a ab b c d"),
            ("", false, "d c b ab a"),
            ("direction=forward", false, "a ab b c d"),
            ("from=3", true, "c d"),
            ("from=3", false, "c b ab a"),
            ("level=warn", true, "b c"),
            ("level=error", false, "c"),
            ("search=b", true, "ab b"),
            ("limit=1", true, "a"),
            // Those of one millisecond stay together.
            ("limit=2", true, "a ab b"),
            ("limit=3", false, "d c b ab"),
            ("limit=0", true, ""),
            ("from=9", true, ""),
        ] {
            let found = wanted(query, forward).unwrap().of(all.to_vec());
            let messages: Vec<_> = found.iter().map(|entry| entry.message.as_str()).collect();
            assert_eq!(messages.join(" "), expected, "{query} {forward}");
        }
        let same = vec![entry(7, Info, ""); 5 * MAX_ENTRIES];
        assert_eq!(wanted("limit=1", true).unwrap().of(same).len(), 1 + MAX_ENTRIES);
        for query in ["from=x", "from=-1", "limit=-1", "limit=x", "level=fatal", "direction=up"] {
            assert!(wanted(query, true).is_err(), "{query}");
        }
        assert!(wanted(&format!("search={}", "x".repeat(MAX_SEARCH + 1)), true).is_err());
        wanted(&format!("search={}", "x".repeat(MAX_SEARCH)), true).unwrap();
    }

    #[test]
    fn nobody_else_says_who_tells() {
        let mut forged = entry(1, LogLevel::Info, "m");
        for name in ["logger", "level", "message"] {
            forged.fields.insert(name.into(), "forged".into());
        }
        let log = SandboxLog::from(&SandboxLogEntry::from(forged));
        let line: BTreeMap<String, String> = serde_json::from_str(&log.line).unwrap();
        assert_eq!((&*line["logger"], &*line["level"], &*line["message"]), ("agent", "info", "m"));
    }
}
