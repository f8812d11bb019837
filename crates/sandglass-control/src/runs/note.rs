//! Events of a run, and what of them may be kept.

use sandglass_store::{NewRunEvent, Source};
use sandglass_types::Timestamp;
use sandglass_types::run::Retention;
use serde_json::{Map, Value};

/// What is told of a run whose content must not be kept: these words are the server's own.
const WORDS: [&str; 17] = [
    "agent",
    "budget",
    "call_id",
    "cut_short",
    "ended",
    "model",
    "name",
    "outcome",
    "reason",
    "retention",
    "sandbox_id",
    "sandbox",
    "sha256",
    "source",
    "status",
    "stop_reason",
    "stream",
];

/// Numbers that a worker's events may keep: names are its own choice, and could be content.
const NUMBERS: [&str; 11] = [
    "bytes",
    "dropped",
    "duration_ms",
    "exit_code",
    "number",
    "pid",
    "seconds",
    "stderr_bytes",
    "stdout_bytes",
    "truncated",
    "turn",
];

/// An event of the server's.
pub(crate) fn event(at: Timestamp, source: Source, kind: &str, data: Value) -> NewRunEvent {
    NewRunEvent { at, source, kind: kind.to_owned(), data }
}

/// An event as it may be stored.
pub(crate) fn kept(retention: Retention, mut event: NewRunEvent) -> NewRunEvent {
    if retention == Retention::Full {
        return event;
    }
    let trusted = event.source != Source::Worker;
    let data = match event.data {
        Value::Object(data) => data,
        _ => Map::new(),
    };
    let mut safe = Map::new();
    for (key, value) in data {
        match value {
            Value::Number(_) | Value::Bool(_) if trusted || NUMBERS.contains(&&*key) => {
                safe.insert(key, value);
            }
            Value::String(text) if trusted => {
                // A digest of content says what it was to who has a guess.
                let tells = WORDS.contains(&&*key) && !(key == "sha256" && retention == Retention::None);
                if tells {
                    safe.insert(key, text.into());
                } else {
                    safe.insert(format!("{key}_bytes"), text.len().into());
                }
            }
            _ => {}
        }
    }
    event.data = safe.into();
    event
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn without_leave_no_content_is_kept() {
        let at = Timestamp::from_millis(1);
        let data = json!({"exit_code": 1, "secret 7": 7, "command": "marker", "model": "large", "sha256": "ab", "more": {"x": "marker"}});
        let of = |source, retention| kept(retention, event(at, source, "shell.exited", data.clone())).data;
        assert_eq!(of(Source::Worker, Retention::Full), data);
        assert_eq!(of(Source::Worker, Retention::Metadata), json!({"exit_code": 1}));
        let host =
            json!({"exit_code": 1, "secret 7": 7, "command_bytes": 6, "model": "large", "sha256": "ab"});
        assert_eq!(of(Source::Host, Retention::Metadata), host);
        let none =
            json!({"exit_code": 1, "secret 7": 7, "command_bytes": 6, "model": "large", "sha256_bytes": 2});
        assert_eq!(of(Source::Host, Retention::None), none);
        assert_eq!(kept(Retention::None, event(at, Source::Host, "x", json!("marker"))).data, json!({}));
    }
}
