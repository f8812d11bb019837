//! What the agent has to tell of commands, for whoever asks later: the last of it, and never more than so much.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Most entries.
const MAX_ENTRIES: usize = 1000;

/// Most bytes of all their texts.
const MAX_BYTES: usize = 256 << 10;

/// Longest text of one, in bytes. What is past it is cut off.
const MAX_TEXT: usize = 1024;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Info,
    Warn,
    Error,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Entry {
    /// When, in milliseconds since 1970, as the sandbox knows it. No two have the same.
    at: u64,
    level: Level,
    message: String,
    fields: BTreeMap<&'static str, String>,
}

impl Entry {
    fn len(&self) -> usize {
        self.message.len() + self.fields.values().map(String::len).sum::<usize>()
    }
}

#[derive(Debug, Default)]
struct Kept {
    entries: VecDeque<Entry>,
    bytes: usize,
}

/// The last entries.
#[derive(Debug, Default)]
pub(crate) struct Journal(Mutex<Kept>);

impl Journal {
    /// Adds one. The oldest make room for it.
    pub(crate) fn add(&self, level: Level, message: &str, fields: &[(&'static str, String)]) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let now = u64::try_from(now).unwrap_or(u64::MAX);
        let fields = fields.iter().map(|(name, value)| (*name, cut(value))).collect();
        let mut kept = self.kept();
        let at = kept.entries.back().map_or(now, |last| now.max(last.at.saturating_add(1)));
        let entry = Entry { at, level, message: cut(message), fields };
        kept.bytes += entry.len();
        kept.entries.push_back(entry);
        while kept.entries.len() > MAX_ENTRIES || kept.bytes > MAX_BYTES {
            let Some(oldest) = kept.entries.pop_front() else { break };
            kept.bytes -= oldest.len();
        }
    }

    /// All that is kept, oldest first.
    pub(crate) fn all(&self) -> Vec<Entry> {
        self.kept().entries.iter().cloned().collect()
    }

    /// Forgets all: it is of another sandbox.
    pub(crate) fn clear(&self) {
        *self.kept() = Kept::default();
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_are_kept_in_their_order_and_in_bounds() {
        let journal = Journal::default();
        for number in 0..MAX_ENTRIES + 5 {
            journal.add(Level::Info, &number.to_string(), &[("pid", "7".into())]);
        }
        let all = journal.all();
        assert_eq!((all.len(), all[0].message.as_str()), (MAX_ENTRIES, "5"));
        assert!(all.windows(2).all(|pair| pair[0].at < pair[1].at));
        let long = "\u{fc}".repeat(MAX_TEXT);
        for _ in 0..MAX_ENTRIES {
            journal.add(Level::Warn, &long, &[("user", long.clone())]);
        }
        let all = journal.all();
        assert!(all.iter().map(Entry::len).sum::<usize>() <= MAX_BYTES);
        assert_eq!(all[0].message.len(), MAX_TEXT);
        journal.clear();
        assert_eq!(journal.all(), []);
        journal.add(Level::Error, "after", &[]);
        assert_eq!(journal.all().len(), 1);
    }
}
