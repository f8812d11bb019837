//! What happened to a sandbox and in it: its history, and what its agent tells of commands.
//!
//! The first is the server's own. The second is the sandbox's, in its memory, and believed no further: it is bounded here,
//! and whoever is root inside can change it.

use std::collections::BTreeMap;
use std::time::Duration;

use http::Request;
use http::header::HOST;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use sandglass_store::{Event, SandboxRow};
use sandglass_types::error::Chain;
use sandglass_types::{EndReason, Error, SandboxId, TeamId, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::{Control, stored};
use crate::live::Live;

/// How long an agent may take to tell.
const PATIENCE: Duration = Duration::from_secs(5);

/// Most of what it tells that is read, in bytes: what it keeps, with room for how that is written.
const MAX_TOLD: usize = 1 << 20;

/// Most entries of it that are passed on: as many as it keeps.
const MAX_ENTRIES: usize = 1000;

/// Longest text that is passed on, in bytes.
const MAX_TEXT: usize = 4096;

/// Most fields of one entry.
const MAX_FIELDS: usize = 16;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// For whoever looks for a mistake.
    Debug,
    /// As it should be.
    Info,
    /// Not as somebody wanted it.
    Warn,
    /// Something broke.
    Error,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// When; of what happened inside, as the sandbox knows it.
    pub at: Timestamp,
    /// How bad it is.
    pub level: LogLevel,
    /// Who tells: `sandglass`, or `agent`, which is the sandbox itself.
    pub logger: &'static str,
    /// For people.
    pub message: String,
    /// For programs.
    pub fields: BTreeMap<String, String>,
}

/// One, as an agent writes it.
#[derive(Debug, Deserialize)]
struct Told {
    at: i64,
    level: LogLevel,
    message: String,
    #[serde(default)]
    fields: BTreeMap<String, String>,
}

impl LogEntry {
    /// What an agent told, and nothing of it was later than `now`.
    fn told(told: Told, now: Timestamp) -> Self {
        let cut = |text: String| text[..text.floor_char_boundary(MAX_TEXT)].to_owned();
        let fields = told.fields.into_iter().take(MAX_FIELDS).map(|(name, value)| (cut(name), cut(value)));
        Self {
            at: Timestamp::from_millis(told.at.clamp(0, now.as_millis())),
            level: told.level,
            logger: "agent",
            message: cut(told.message),
            fields: fields.collect(),
        }
    }
}

impl From<Event> for LogEntry {
    fn from(event: Event) -> Self {
        let level = match event.end_reason {
            None | Some(EndReason::Killed | EndReason::Timeout) => LogLevel::Info,
            Some(_) => LogLevel::Error,
        };
        let state = format!("{:?}", event.state).to_lowercase();
        let message =
            if event.detail.is_empty() { state.clone() } else { format!("{state}: {}", event.detail) };
        let fields = BTreeMap::from([("state".into(), state)]);
        Self { at: event.at, level, logger: "sandglass", message, fields }
    }
}

impl Control {
    /// What happened to a sandbox of this team and in it, oldest first. Of a paused one, what happened inside is told when it
    /// runs again.
    ///
    /// # Errors
    /// [`sandglass_types::ErrorKind::NotFound`], or the store failed.
    pub async fn logs(&self, team: TeamId, id: &SandboxId) -> Result<Vec<LogEntry>, Error> {
        let row = self.standing(team, id).await?;
        let events = self.0.store.events(id).await.map_err(stored)?;
        let mut entries: Vec<LogEntry> = events.into_iter().map(LogEntry::from).collect();
        if let Some(live) = self.live(id) {
            match timeout(PATIENCE, told(&live, &row)).await {
                Ok(Ok(told)) => {
                    let (now, surplus) = (self.0.clock.now(), told.len().saturating_sub(MAX_ENTRIES));
                    entries.extend(told.into_iter().skip(surplus).map(|told| LogEntry::told(told, now)));
                }
                // What is hostile can be silent. The rest is told all the same.
                Ok(Err(error)) => {
                    tracing::debug!(sandbox = %id, error = %Chain(&*error), "its agent told nothing of commands");
                }
                Err(_elapsed) => {
                    tracing::debug!(sandbox = %id, "its agent took too long to tell of commands");
                }
            }
        }
        entries.sort_by_key(|entry| entry.at.as_millis());
        Ok(entries)
    }
}

async fn told(live: &Live, row: &SandboxRow) -> Result<Vec<Told>, Box<dyn std::error::Error + Send + Sync>> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(live.guest_api().await?)).await?;
    let mut request = Request::get("/logs").header(HOST, "guest");
    if let Some(token) = &row.access_token {
        request = request.header("x-access-token", token);
    }
    let request = request.body(Empty::<Bytes>::new())?;
    let asked = async {
        let answer = sender.send_request(request).await?;
        // An agent of before has nothing of the kind.
        if !answer.status().is_success() {
            return Ok(Vec::new());
        }
        let body = Limited::new(answer.into_body(), MAX_TOLD).collect().await?.to_bytes();
        Ok(serde_json::from_slice(&body)?)
    };
    tokio::select! {
        told = asked => told,
        Err(error) = connection => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use sandglass_types::SandboxState;

    use super::*;

    #[test]
    fn what_an_agent_tells_is_bounded() {
        let fields: BTreeMap<_, _> = (0..100).map(|n| (n.to_string(), "x".repeat(10_000))).collect();
        let told = Told { at: 7, level: LogLevel::Warn, message: "\u{fc}".repeat(10_000), fields };
        let entry = LogEntry::told(told, Timestamp::from_millis(9));
        assert_eq!((entry.message.len(), entry.fields.len()), (MAX_TEXT, MAX_FIELDS));
        assert!(entry.fields.values().all(|value| value.len() == MAX_TEXT));
        assert_eq!((entry.logger, entry.at.as_millis()), ("agent", 7));
        for (at, expected) in [(i64::MIN, 0), (-1, 0), (10, 9), (i64::MAX, 9)] {
            let told = Told { at, level: LogLevel::Info, message: String::new(), fields: BTreeMap::new() };
            assert_eq!(LogEntry::told(told, Timestamp::from_millis(9)).at.as_millis(), expected);
        }
        assert!(serde_json::from_str::<Told>(r#"{"at":1,"level":"fatal","message":""}"#).is_err());
    }

    #[test]
    fn an_end_that_nobody_wanted_is_an_error() {
        let event = |end_reason| Event {
            seq: 1,
            at: Timestamp::from_millis(1),
            state: SandboxState::Ending,
            end_reason,
            detail: "because".into(),
        };
        assert_eq!(LogEntry::from(event(Some(EndReason::Killed))).level, LogLevel::Info);
        let crashed = LogEntry::from(event(Some(EndReason::Crashed)));
        assert_eq!((crashed.level, crashed.message.as_str()), (LogLevel::Error, "ending: because"));
    }
}
