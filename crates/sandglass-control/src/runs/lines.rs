//! What a worker says of itself. Every byte is the sandbox's: it is read as lines with bounds, its events are of few kinds, and there
//! are so many in a second and no more.

use std::time::Duration;

use sandglass_store::{NewRunEvent, Source};
use sandglass_types::Timestamp;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::note::event;
use crate::command::shown;

/// Longest line that is an event, in bytes, and most bytes of output in one event.
const MAX_LINE: usize = 16 << 10;

/// How many events a worker may have in a second, and how many at once after it had none.
const PER_SECOND: u32 = 50;

/// How many it may have in all.
const MAX_EVENTS: u32 = 20_000;

/// How often it is told how many were dropped, which is an event as well.
const DROPPED_EVERY: Duration = Duration::from_secs(10);

/// What the names of its events begin with.
const KINDS: [&str; 4] = ["worker.", "turn.", "shell.", "file."];

/// Longest name of an event.
const MAX_KIND: usize = 64;

/// How a program's output is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speaks {
    /// Lines of JSON, an event each.
    Events,
    /// As it comes.
    Text,
}

/// Reads what a worker writes.
#[derive(Debug)]
pub(super) struct Lines {
    speaks: Speaks,
    out: Vec<u8>,
    err: Vec<u8>,
    /// Whether the rest of a line that was too long is skipped.
    skipping: bool,
    ready: Vec<NewRunEvent>,
    /// How many more are taken now, in events, and since when that is so.
    tokens: f64,
    since: Instant,
    left: u32,
    dropped: u64,
    /// When it was last told that some were dropped.
    told_of_dropped: Option<Instant>,
}

impl Lines {
    /// For one program. `spent` is how many events the run's worker has had.
    pub(super) fn new(speaks: Speaks, spent: u32) -> Self {
        Self {
            speaks,
            out: Vec::new(),
            err: Vec::new(),
            skipping: false,
            ready: Vec::new(),
            tokens: PER_SECOND.into(),
            since: Instant::now(),
            left: MAX_EVENTS.saturating_sub(spent),
            dropped: 0,
            told_of_dropped: None,
        }
    }

    /// How many events the run's worker has had.
    pub(super) const fn spent(&self) -> u32 {
        MAX_EVENTS - self.left
    }

    /// Takes what came from its standard output.
    pub(super) fn output(&mut self, bytes: &[u8], at: Timestamp) {
        if self.speaks == Speaks::Text {
            self.out.extend_from_slice(bytes);
            self.cut_text("stdout", at, false);
            return;
        }
        for byte in bytes {
            if *byte == b'\n' {
                let line = std::mem::take(&mut self.out);
                if !std::mem::take(&mut self.skipping) {
                    self.line(&line, at);
                }
            } else if self.out.len() < MAX_LINE {
                self.out.push(*byte);
            } else if !std::mem::replace(&mut self.skipping, true) {
                self.dropped += 1;
            }
        }
    }

    /// Takes what came from its standard error.
    pub(super) fn errors(&mut self, bytes: &[u8], at: Timestamp) {
        self.err.extend_from_slice(bytes);
        self.cut_text("stderr", at, false);
    }

    /// It has ended: what is there of a last line counts.
    pub(super) fn end(&mut self, at: Timestamp) {
        if self.speaks == Speaks::Events {
            let line = std::mem::take(&mut self.out);
            if !line.is_empty() && !self.skipping {
                self.line(&line, at);
            }
        } else {
            self.cut_text("stdout", at, true);
        }
        self.cut_text("stderr", at, true);
        self.told_of_dropped = None;
    }

    /// What is to be stored, oldest first.
    pub(super) fn drain(&mut self, at: Timestamp) -> Vec<NewRunEvent> {
        let mut events = std::mem::take(&mut self.ready);
        let told = self.told_of_dropped.is_some_and(|at| at.elapsed() < DROPPED_EVERY);
        if self.dropped > 0 && !told {
            self.told_of_dropped = Some(Instant::now());
            let data = json!({ "dropped": std::mem::take(&mut self.dropped) });
            events.push(event(at, Source::Host, "worker.events_dropped", data));
        }
        events
    }

    /// Output in pieces that end with a line where they can.
    fn cut_text(&mut self, stream: &'static str, at: Timestamp, all: bool) {
        loop {
            let waiting = if stream == "stdout" { &mut self.out } else { &mut self.err };
            let most = waiting.len().min(MAX_LINE);
            let line = waiting[..most].iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
            let cut = match line {
                Some(cut) => cut,
                None if most == MAX_LINE || (all && most > 0) => most,
                None => return,
            };
            let text: Vec<u8> = waiting.drain(..cut).collect();
            let data = json!({ "stream": stream, "text": shown(&text), "bytes": text.len() });
            self.take(event(at, Source::Worker, "worker.output", data));
        }
    }

    fn line(&mut self, line: &[u8], at: Timestamp) {
        if line.trim_ascii().is_empty() {
            return;
        }
        match read(line) {
            Some((kind, data)) => self.take(event(at, Source::Worker, &kind, data.into())),
            None => {
                let data = json!({ "stream": "stdout", "text": shown(line), "bytes": line.len() });
                self.take(event(at, Source::Worker, "worker.output", data));
            }
        }
    }

    /// Takes an event if there may be one more.
    fn take(&mut self, event: NewRunEvent) {
        let passed = std::mem::replace(&mut self.since, Instant::now());
        let passed = self.since.saturating_duration_since(passed).min(Duration::from_secs(1));
        self.tokens = (self.tokens + passed.as_secs_f64() * f64::from(PER_SECOND)).min(PER_SECOND.into());
        if self.tokens < 1.0 || self.left == 0 {
            self.dropped += 1;
            return;
        }
        self.tokens -= 1.0;
        self.left -= 1;
        self.ready.push(event);
    }
}

/// A line as an event: of a kind that a worker may have, and an object.
fn read(line: &[u8]) -> Option<(String, Map<String, Value>)> {
    let Value::Object(mut all) = serde_json::from_slice(line).ok()? else { return None };
    let Some(Value::String(kind)) = all.remove("type") else { return None };
    let plain =
        kind.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_'));
    if kind.len() > MAX_KIND || !plain || !KINDS.iter().any(|prefix| kind.starts_with(prefix)) {
        return None;
    }
    match all.remove("data") {
        Some(Value::Object(data)) => Some((kind, data)),
        None => Some((kind, Map::new())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at() -> Timestamp {
        Timestamp::from_millis(7)
    }

    fn kinds(lines: &mut Lines) -> Vec<String> {
        lines.drain(at()).into_iter().map(|event| event.kind).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn lines_are_events_of_few_kinds_and_everything_else_is_output() {
        let mut lines = Lines::new(Speaks::Events, 0);
        for piece in
            b"{\"type\":\"shell.started\",\"data\":{\"cmd\":\"ls\"}}\n{\"type\":\"turn.ended\"}\n".chunks(7)
        {
            lines.output(piece, at());
        }
        let events = lines.drain(at());
        assert_eq!((events[0].kind.as_str(), &events[0].data), ("shell.started", &json!({"cmd": "ls"})));
        assert_eq!(
            (events[1].kind.as_str(), &events[1].data, events[1].source),
            ("turn.ended", &json!({}), Source::Worker)
        );
        for bad in [
            r#"{"type":"run.completed"}"#,
            r#"{"type":"budget.charged","data":{}}"#,
            r#"{"type":"shell.\u0000"}"#,
            r#"{"type":"shell.x","data":[]}"#,
            r#"{"type":7}"#,
            "[]",
            "plain text",
        ] {
            lines.output(format!("{bad}\n").as_bytes(), at());
            assert_eq!(kinds(&mut lines), ["worker.output"], "{bad}");
        }
        lines.output(b"  \n", at());
        lines.output(b"the last", at());
        assert!(kinds(&mut lines).is_empty());
        lines.end(at());
        assert_eq!(kinds(&mut lines), ["worker.output"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_that_is_too_long_is_dropped_and_the_next_one_is_read() {
        let mut lines = Lines::new(Speaks::Events, 0);
        lines.output(&vec![b'x'; 100_000], at());
        assert!(lines.out.len() <= MAX_LINE);
        lines.output(b"\n{\"type\":\"turn.ended\"}\n", at());
        assert_eq!(kinds(&mut lines), ["turn.ended", "worker.events_dropped"]);
    }

    #[tokio::test(start_paused = true)]
    async fn so_many_in_a_second_and_no_more() {
        let mut lines = Lines::new(Speaks::Events, 0);
        lines.output("{\"type\":\"shell.output\"}\n".repeat(1000).as_bytes(), at());
        let events = lines.drain(at());
        assert_eq!(events.len(), 51);
        assert_eq!(
            (events[50].kind.as_str(), &events[50].data),
            ("worker.events_dropped", &json!({"dropped": 950}))
        );
        tokio::time::advance(Duration::from_secs(10)).await;
        lines.output("{\"type\":\"shell.output\"}\n".repeat(60).as_bytes(), at());
        assert_eq!(lines.drain(at()).len(), 51);
        let mut last = Lines::new(Speaks::Events, MAX_EVENTS - 1);
        last.output("{\"type\":\"shell.output\"}\n".repeat(2).as_bytes(), at());
        assert_eq!((kinds(&mut last).len(), last.spent()), (2, MAX_EVENTS));
    }

    #[tokio::test(start_paused = true)]
    async fn text_is_cut_at_lines() {
        let mut lines = Lines::new(Speaks::Text, 0);
        lines.output(b"one\ntwo\nthr", at());
        lines.errors(b"oh\x1b[2J", at());
        let [first] = &*lines.drain(at()) else { panic!("one event") };
        assert_eq!(first.data, json!({"stream": "stdout", "text": "one\ntwo\n", "bytes": 8}));
        lines.end(at());
        let texts: Vec<_> = lines.drain(at()).into_iter().map(|event| event.data["text"].clone()).collect();
        assert_eq!(texts, ["thr", "oh[2J"]);
        lines.output(&vec![b'x'; 40_000], at());
        assert_eq!(lines.drain(at()).len(), 2);
        assert!(lines.out.len() < MAX_LINE);
    }

    proptest! {
        #[test]
        fn whatever_comes_is_bounded(pieces in proptest::collection::vec("\\PC{0,40}\n?", 0..40)) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                let mut lines = Lines::new(Speaks::Events, 0);
                for piece in &pieces {
                    lines.output(piece.as_bytes(), at());
                }
                lines.end(at());
                for event in lines.drain(at()) {
                    assert!(event.source == Source::Host || KINDS.iter().any(|kind| event.kind.starts_with(kind)));
                }
            });
        }
    }
}
