//! Answers on their way to the client: what they say was used is heard beside it.
//!
//! Nothing is held back but one event at a time, and that only where the client must not see one. The provider is trusted with the
//! numbers, and with nothing else: lengths are bounded, and what is not understood is passed on.

mod events;

use sandglass_types::Micros;
use serde_json::{Map, Value};

use self::events::Events;
use crate::dialect::Dialect;
use crate::plan::{Facts, Plan, tokens_of};
use crate::price::Price;
use crate::usage::Usage;

/// What an answer said of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Told {
    /// What was used, if it said so.
    pub usage: Option<Usage>,
    /// Whether it came to its end.
    pub complete: bool,
    /// How long it was, in bytes.
    pub length: u64,
}

/// What a call comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settlement {
    /// What its budget pays: never more than was set aside.
    pub charged: Micros,
    /// What the provider bills above that, which the operator pays.
    pub overrun: Micros,
    /// Whether the provider did not say what was used, so that it was estimated.
    pub estimated: bool,
}

impl Told {
    /// An answer that came as a whole.
    #[must_use]
    pub fn of(dialect: Dialect, body: &[u8]) -> Self {
        let read: Option<Value> = serde_json::from_slice(body).ok();
        let usage = read.as_ref().and_then(|answer| Usage::told(dialect, answer.get("usage")?));
        Self { usage, complete: read.is_some(), length: u64::try_from(body.len()).unwrap_or(u64::MAX) }
    }

    /// What is charged for it.
    #[must_use]
    pub fn settle(&self, facts: &Facts, planned: &Plan, price: &Price) -> Settlement {
        let cost = self.usage.map_or_else(
            || {
                // It may have written as much as came, and thought as much as it could if it ended in the middle.
                let written = tokens_of(self.length);
                let output = if self.complete { written.min(planned.output) } else { planned.output };
                let image_output = facts.images.saturating_mul(price.max_output);
                let whole = Usage { input: facts.input, output, image_output, ..Usage::default() };
                price.of(&whole).min(planned.reserved)
            },
            |usage| price.of(&usage),
        );
        Settlement {
            charged: cost.min(planned.reserved),
            overrun: cost.without(planned.reserved),
            estimated: self.usage.is_none(),
        }
    }
}

/// An answer that comes piece by piece.
#[derive(Debug)]
pub struct Stream {
    dialect: Dialect,
    /// Whether the last chunk of Chat Completions, which the client did not ask for, is kept from it.
    hides: bool,
    events: Events,
    usage: Map<String, Value>,
    complete: bool,
    length: u64,
}

impl Stream {
    /// One that the client asked to be told at its end what was used, or did not.
    #[must_use]
    pub fn new(dialect: Dialect, wants_usage: bool) -> Self {
        let hides = dialect == Dialect::Chat && !wants_usage;
        Self { dialect, hides, events: Events::default(), usage: Map::new(), complete: false, length: 0 }
    }

    /// Hears the next bytes. Returns what goes on to the client of what has come so far.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.length = self.length.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        let mut whole = Vec::new();
        self.events.feed(bytes, |raw, data| whole.push((raw.to_vec(), data.to_owned())));
        let mut wanted = Vec::new();
        for (raw, data) in whole {
            if !self.hear(&data) {
                wanted.extend(raw);
            }
        }
        if self.hides { wanted } else { bytes.to_vec() }
    }

    /// What it said, and what of it has not gone on yet.
    #[must_use]
    pub fn end(self) -> (Told, Vec<u8>) {
        let usage = Usage::told(self.dialect, &Value::Object(self.usage));
        let rest = if self.hides { self.events.rest() } else { Vec::new() };
        (Told { usage, complete: self.complete, length: self.length }, rest)
    }

    /// Hears one event. `true` if it says nothing but what was used.
    fn hear(&mut self, data: &str) -> bool {
        if data == "[DONE]" {
            self.complete = true;
            return false;
        }
        let Ok(event) = serde_json::from_str::<Value>(data) else { return false };
        let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
        let usage = match self.dialect {
            Dialect::Messages => {
                self.complete |= kind == "message_stop";
                event.get("usage").or_else(|| event.get("message")?.get("usage"))
            }
            Dialect::Chat | Dialect::Images => event.get("usage"),
            Dialect::Responses => {
                self.complete |=
                    ["response.completed", "response.incomplete", "response.failed"].contains(&kind);
                event.get("response").and_then(|response| response.get("usage"))
            }
        };
        let Some(Value::Object(usage)) = usage else { return false };
        // Later ones are of all so far, and may leave out what has not changed.
        self.usage.extend(usage.clone());
        event.get("choices").and_then(Value::as_array).is_some_and(Vec::is_empty)
    }
}

#[cfg(test)]
mod tests;
