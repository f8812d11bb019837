//! What happens, as lines of JSON: `{"type": "shell.started", "data": {…}}`.
//!
//! Whoever reads takes only so many and only such as are short, so they are made so here.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

/// Most bytes of a text in one event, as they are written in JSON. The line stays below the 16 KiB that are read of one.
const MAX_TEXT: usize = 8 << 10;

/// Where events go.
pub(super) struct Events(Mutex<Box<dyn Write + Send>>);

impl Events {
    /// Standard output.
    pub(super) fn to_stdout() -> Self {
        Self::to(Box::new(io::stdout()))
    }

    /// Somewhere else.
    pub(super) fn to(out: Box<dyn Write + Send>) -> Self {
        Self(Mutex::new(out))
    }

    /// Tells one. Nobody may be listening: then the work goes on all the same.
    pub(super) fn say(&self, kind: &str, data: &Value) {
        let mut line = json!({"type": kind, "data": data}).to_string();
        line.push('\n');
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
    }
}

/// Bytes of a character in JSON.
const fn width(character: char) -> usize {
    match character {
        '"' | '\\' | '\n' | '\r' | '\t' => 2,
        '\0'..='\x1f' => 6,
        _ => character.len_utf8(),
    }
}

/// Cuts a text into pieces, each short enough for one event.
pub(super) fn pieces(text: &str) -> Vec<&str> {
    let (mut pieces, mut start, mut wide) = (Vec::new(), 0, 0);
    for (at, character) in text.char_indices() {
        if wide + width(character) > MAX_TEXT {
            pieces.push(&text[start..at]);
            (start, wide) = (at, 0);
        }
        wide += width(character);
    }
    if start < text.len() {
        pieces.push(&text[start..]);
    }
    pieces
}

/// The beginning of a text, short enough for one event.
pub(super) fn clip(text: &str) -> &str {
    pieces(text).first().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_fits_and_nothing_is_lost() {
        for text in ["", "short", &"\0".repeat(20_000), &"ä\"\n".repeat(9_000), &"x".repeat(8 << 10)] {
            let pieces = pieces(text);
            assert_eq!(pieces.concat(), text);
            assert!(pieces.iter().all(|piece| json!(piece).to_string().len() <= MAX_TEXT + 2));
            assert!(text.starts_with(clip(text)));
        }
        assert_eq!(pieces(&"x".repeat(MAX_TEXT)).len(), 1);
        assert_eq!(pieces(&"x".repeat(MAX_TEXT + 1)).len(), 2);
    }
}
