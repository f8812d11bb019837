//! What was said so far, whoever the model is, and how it is kept from turn to turn.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::dialect::Dialect;

/// Longest file that is read, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// Bytes of a token, fewer than there are in most texts.
const BYTES_PER_TOKEN: u64 = 3;

/// What stands in the place of an old result.
const LEFT_OUT: &str = "[This result is left out, because it is old. Use the tool again if you need it.]";

/// What a tool that was under way when everything ended is said to have done.
const INTERRUPTED: &str = "[This was interrupted. It may have been done in part.]";

/// A tool that the model wants to be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Use {
    /// What its result is told by.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// Its input, which should be JSON.
    pub input: String,
}

/// What came of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Of which.
    pub id: String,
    /// What the model is told.
    pub text: String,
    /// Whether it failed.
    pub failed: bool,
}

/// One of those who talk, and what it said.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub(super) enum Entry {
    /// The user.
    User {
        /// What the user wants.
        text: String,
    },
    /// The model.
    Model {
        /// What it said.
        text: String,
        /// What it wants to be done.
        uses: Vec<Use>,
        /// What its provider wants to see again, in its own words.
        kept: Vec<Value>,
    },
    /// The tools.
    Tools {
        /// What came of all that the model wanted, in its order.
        outcomes: Vec<Outcome>,
    },
}

/// All that was said.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Talk {
    dialect: Dialect,
    entries: Vec<Entry>,
}

impl Talk {
    /// One in which nothing was said.
    pub(super) const fn new(dialect: Dialect) -> Self {
        Self { dialect, entries: Vec::new() }
    }

    /// Goes on with what a file holds; from the start if there is none, or none that makes sense.
    pub(super) fn load(path: &Path, dialect: Dialect) -> io::Result<Self> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::new(dialect)),
            file => file?,
        };
        let mut text = Vec::new();
        file.take(MAX_FILE).read_to_end(&mut text)?;
        let mut talk: Self = serde_json::from_slice(&text)?;
        if talk.dialect != dialect {
            // Another provider can't do anything with it.
            for entry in &mut talk.entries {
                if let Entry::Model { kept, .. } = entry {
                    kept.clear();
                }
            }
            talk.dialect = dialect;
        }
        talk.mend();
        Ok(talk)
    }

    /// Puts it into a file, which is the old one or the new one at any moment.
    pub(super) fn save(&self, path: &Path) -> io::Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let aside = path.with_extension("new");
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        fs::rename(aside, path)
    }

    /// Says something more.
    pub(super) fn say(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    /// What was said, from the beginning.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Every use needs an outcome, or no provider goes on.
    fn mend(&mut self) {
        if let Some(Entry::Model { uses, .. }) = self.entries.last()
            && !uses.is_empty()
        {
            let interrupted =
                |one: &Use| Outcome { id: one.id.clone(), text: INTERRUPTED.into(), failed: true };
            let outcomes = uses.iter().map(interrupted).collect();
            self.entries.push(Entry::Tools { outcomes });
        }
    }

    /// How many tokens it is, or more.
    pub(super) fn tokens(&self) -> u64 {
        self.entries.iter().map(Entry::tokens).fold(0, u64::saturating_add)
    }

    /// Makes it shorter if it has more than so many tokens, to half of that: each time, what a provider keeps of it is lost. Results go
    /// first, then whole steps, the oldest before others. What the user said and the last step stay.
    pub(super) fn condense(&mut self, most: u64) {
        let mut tokens = self.tokens();
        if tokens <= most {
            return;
        }
        let most = most / 2;
        let last = self.last_step();
        for entry in &mut self.entries[..last] {
            if tokens <= most {
                break;
            }
            tokens -= entry.tokens();
            entry.leave_out();
            tokens += entry.tokens();
        }
        let mut goes = false;
        let kept = std::mem::take(&mut self.entries).into_iter().enumerate().filter(|(at, entry)| {
            match entry {
                Entry::User { .. } => goes = false,
                Entry::Model { .. } => goes = *at < last && tokens > most,
                // With what asked for them.
                Entry::Tools { .. } => {}
            }
            if goes {
                tokens -= entry.tokens();
            }
            !goes
        });
        self.entries = kept.map(|(_, entry)| entry).collect();
    }

    /// Where the last step begins.
    fn last_step(&self) -> usize {
        let is_model = |entry: &Entry| matches!(entry, Entry::Model { .. });
        self.entries.iter().rposition(is_model).unwrap_or(self.entries.len())
    }
}

impl Entry {
    fn tokens(&self) -> u64 {
        let bytes: usize = match self {
            Self::User { text } => text.len(),
            Self::Model { text, uses, kept } => {
                let uses: usize = uses.iter().map(|one| one.name.len() + one.input.len() + 50).sum();
                let kept: usize = kept.iter().map(|one| one.to_string().len()).sum();
                text.len() + uses + kept
            }
            Self::Tools { outcomes } => outcomes.iter().map(|one| one.text.len() + 50).sum(),
        };
        u64::try_from(bytes).unwrap_or(u64::MAX) / BYTES_PER_TOKEN + 10
    }

    fn leave_out(&mut self) {
        if let Self::Tools { outcomes } = self {
            for outcome in outcomes.iter_mut().filter(|outcome| outcome.text.len() > LEFT_OUT.len()) {
                outcome.text = LEFT_OUT.into();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(text: &str) -> Entry {
        Entry::User { text: text.into() }
    }

    fn step(number: u32, size: usize) -> [Entry; 2] {
        let id = format!("c{number}");
        let one = Use { id: id.clone(), name: "shell".into(), input: "{}".into() };
        [
            Entry::Model { text: String::new(), uses: vec![one], kept: vec![number.into()] },
            Entry::Tools { outcomes: vec![Outcome { id, text: "x".repeat(size), failed: false }] },
        ]
    }

    fn talk(steps: u32, size: usize) -> Talk {
        let mut talk = Talk::new(Dialect::Messages);
        talk.say(user("first"));
        for number in 0..steps {
            step(number, size).into_iter().for_each(|entry| talk.say(entry));
        }
        talk.say(user("second"));
        step(steps, size).into_iter().for_each(|entry| talk.say(entry));
        talk
    }

    /// Every outcome follows its use.
    fn is_whole(talk: &Talk) -> bool {
        let mut open: Vec<String> = Vec::new();
        let whole = talk.entries().iter().all(|entry| match entry {
            Entry::User { .. } => open.is_empty(),
            Entry::Model { uses, .. } => {
                let answered = open.is_empty();
                open = uses.iter().map(|one| one.id.clone()).collect();
                answered
            }
            Entry::Tools { outcomes } => {
                let ids: Vec<String> = outcomes.iter().map(|one| one.id.clone()).collect();
                std::mem::take(&mut open) == ids
            }
        });
        whole && open.is_empty()
    }

    #[test]
    fn what_is_long_gets_shorter_and_stays_a_talk() {
        let whole = talk(20, 3000);
        for most in [100, 300, 1000, 3000, 10_000, 30_000] {
            let mut talk = whole.clone();
            talk.condense(most);
            assert!(is_whole(&talk), "{talk:?}");
            let users = talk.entries().iter().filter(|entry| matches!(entry, Entry::User { .. })).count();
            assert_eq!((users, talk.entries().last()), (2, whole.entries().last()), "{most}");
            let last = step(20, 3000).iter().map(Entry::tokens).sum::<u64>();
            assert!(talk.tokens() <= (most / 2).max(last + 50) || talk == whole, "{most}: {}", talk.tokens());
        }
        let mut same = whole.clone();
        same.condense(whole.tokens());
        assert_eq!(same, whole);
        // Results go before anything that was thought.
        let mut some = whole.clone();
        some.condense(whole.tokens() - 1);
        assert_eq!(some.entries().len(), whole.entries().len());
    }

    #[test]
    fn it_is_kept_and_goes_on_where_it_was_interrupted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/history.json");
        assert_eq!(Talk::load(&path, Dialect::Chat).unwrap(), Talk::new(Dialect::Chat));
        let mut talk = talk(2, 10);
        talk.save(&path).unwrap();
        assert_eq!(Talk::load(&path, Dialect::Messages).unwrap(), talk);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        talk.say(step(9, 0)[0].clone());
        talk.save(&path).unwrap();
        let mended = Talk::load(&path, Dialect::Chat).unwrap();
        assert!(is_whole(&mended) && !is_whole(&talk));
        // Of another provider's own words nothing is left.
        let kept = mended
            .entries()
            .iter()
            .any(|entry| matches!(entry, Entry::Model { kept, .. } if !kept.is_empty()));
        assert!(!kept);
        std::fs::write(&path, "{").unwrap();
        Talk::load(&path, Dialect::Chat).unwrap_err();
    }
}
