//! Answers on their way to the client: what they say was used is heard beside it.
//!
//! Nothing is held back but one event at a time, and that only where the client must not see one. The provider is trusted with the
//! numbers, and with nothing else: lengths are bounded, nothing but the numbers is kept, and what is not understood is passed on.

mod events;
mod words;

use sandglass_types::Micros;

use self::events::Events;
use self::words::{Choices, Event, Whole};
use crate::dialect::Dialect;
use crate::plan::{Facts, Plan};
use crate::price::Price;
use crate::usage::{Counts, Usage};

/// Longest event that is understood, in bytes.
const LONGEST_EVENT: usize = 1 << 20;

/// As [`LONGEST_EVENT`], where the last one holds the whole answer once more, and the instructions and the tools of its request.
const LONGEST_RESPONSE: usize = 4 << 20;

/// Bytes of an answer that are a token, where nobody says how many there were: what stands around them takes more.
const BYTES_OF_TOKEN: u64 = 3;

/// What an answer said of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Told {
    /// What was used, if it said so.
    pub usage: Option<Usage>,
    /// Whether nothing was used after that: some say it over and over from the first word on, and go on writing.
    pub last: bool,
    /// Whether it came to an end of its own, which may be an error.
    pub complete: bool,
    /// How long it was, in bytes.
    pub length: u64,
    /// Whether it says that something was used that no price is for, such as a tool of the provider's.
    pub beyond: bool,
}

/// What a call comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settlement {
    /// What its budget pays: never more than was set aside.
    pub charged: Micros,
    /// What the provider bills above that, which the operator pays.
    pub overrun: Micros,
    /// Whether the provider did not say what was used in the end, so that it was estimated.
    pub estimated: bool,
}

impl Told {
    /// An answer that came as a whole.
    #[must_use]
    pub fn of(dialect: Dialect, body: &[u8]) -> Self {
        let length = u64::try_from(body.len()).unwrap_or(u64::MAX);
        let Ok(read) = serde_json::from_slice::<Whole>(body) else { return Self::unheard(false, length) };
        let usage = read.usage.and_then(|counts| Usage::told(dialect, &counts));
        Self { usage, last: usage.is_some(), complete: true, length, beyond: read.is_beyond() }
    }

    /// An answer that was too long to be read, or can't be. Whether it came to its end, and how long it was, in bytes.
    #[must_use]
    pub const fn unheard(complete: bool, length: u64) -> Self {
        Self { usage: None, last: false, complete, length, beyond: false }
    }

    /// What is charged for it.
    #[must_use]
    pub fn settle(&self, facts: &Facts, planned: &Plan, price: &Price) -> Settlement {
        let cost = match self.usage {
            Some(usage) if self.last => price.of(&usage),
            Some(usage) => {
                // What is only guessed is nobody's overrun.
                let output = usage.output.max(self.written(planned));
                let guessed = price.of(&Usage { output, ..usage }).min(planned.reserved);
                price.of(&usage).max(guessed)
            }
            None => {
                let image_output = facts.images.saturating_mul(price.max_output);
                let output = self.written(planned);
                let whole = Usage { input: planned.input, output, image_output, ..Usage::default() };
                price.of(&whole).min(planned.reserved)
            }
        };
        Settlement {
            charged: cost.min(planned.reserved),
            overrun: cost.without(planned.reserved),
            estimated: !self.last,
        }
    }

    /// Tokens that it may have written where it does not say so in the end: as many as came, and as it could if it was cut off, since it
    /// may have thought or gone on without anybody who heard it.
    fn written(&self, planned: &Plan) -> u64 {
        if self.complete { self.length.div_ceil(BYTES_OF_TOKEN).min(planned.output) } else { planned.output }
    }
}

/// An answer that comes piece by piece.
#[derive(Debug)]
pub struct Stream {
    /// Whether the last chunk of Chat Completions, which the client did not ask for, is kept from it.
    hides: bool,
    events: Events,
    heard: Heard,
    length: u64,
}

/// What was heard so far.
#[derive(Debug)]
struct Heard {
    dialect: Dialect,
    counts: Option<Counts>,
    last: bool,
    complete: bool,
    beyond: bool,
}

impl Stream {
    /// One that the client asked to be told at its end what was used, or did not.
    #[must_use]
    pub fn new(dialect: Dialect, wants_usage: bool) -> Self {
        let longest = if dialect == Dialect::Responses { LONGEST_RESPONSE } else { LONGEST_EVENT };
        let heard = Heard { dialect, counts: None, last: false, complete: false, beyond: false };
        let hides = dialect == Dialect::Chat && !wants_usage;
        Self { hides, events: Events::new(longest), heard, length: 0 }
    }

    /// Hears the next bytes. Returns what goes on to the client of what has come so far.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.length = self.length.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        let Self { hides, events, heard, .. } = self;
        let mut wanted = Vec::new();
        events.feed(bytes, |raw, data| {
            let of_usage_alone = heard.hear(data);
            if *hides && !of_usage_alone {
                wanted.extend_from_slice(raw);
            }
        });
        if *hides { wanted } else { bytes.to_vec() }
    }

    /// What it said, and what of it has not gone on yet.
    #[must_use]
    pub fn end(self) -> (Told, Vec<u8>) {
        let Heard { dialect, counts, last, complete, beyond } = self.heard;
        let usage = counts.and_then(|counts| Usage::told(dialect, &counts));
        let beyond = beyond || counts.is_some_and(|counts| counts.is_beyond());
        let rest = if self.hides { self.events.rest() } else { Vec::new() };
        let last = last && usage.is_some();
        (Told { usage, last, complete, length: self.length, beyond }, rest)
    }
}

impl Heard {
    /// Hears one event. `true` if it says nothing but what was used.
    fn hear(&mut self, data: &[u8]) -> bool {
        if data == b"[DONE]" {
            self.complete = true;
            self.last = true;
            return false;
        }
        let Ok(event) = serde_json::from_slice::<Event>(data) else { return false };
        self.beyond |= event.is_beyond();
        // Some providers break off with an error, and say no more.
        self.complete |= event.failed();
        let (counts, last) = match self.dialect {
            Dialect::Messages => {
                let ends = event.says_why_it_ends();
                self.complete |= ends || event.is("message_stop");
                let later = event.counts.filter(|_| ends);
                (event.counts.or_else(|| event.message?.counts), later.is_some())
            }
            Dialect::Chat | Dialect::Images => {
                let last = event.choices.is_some_and(|choices| choices.is_empty() || choices.finish);
                (event.counts, last)
            }
            Dialect::Responses => {
                let ends = ["response.completed", "response.incomplete", "response.failed"];
                let ends = ends.into_iter().any(|kind| event.is(kind));
                self.complete |= ends;
                (event.response.and_then(|response| response.counts), ends)
            }
        };
        let Some(counts) = counts else { return false };
        self.counts.get_or_insert_default().merge(&counts);
        self.last |= last;
        event.choices.is_some_and(Choices::is_empty)
    }
}

#[cfg(test)]
mod tests;
