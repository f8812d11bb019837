//! The three ways to talk to a model: what is asked, and what is heard.

mod chat;
mod messages;
mod responses;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::talk::{Talk, Use};

/// Most text that is kept of one answer, in bytes, and of the input of one tool.
const MAX_TEXT: usize = 8 << 20;

/// Most tools that are used, and other parts that are kept, of one answer.
const MAX_PARTS: usize = 64;

/// A protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Dialect {
    /// Anthropic's Messages.
    Messages,
    /// OpenAI's Chat Completions.
    Chat,
    /// OpenAI's Responses.
    Responses,
}

/// A tool as the model is told of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tool {
    /// What it is called.
    pub name: &'static str,
    /// What it does.
    pub description: &'static str,
    /// What its input looks like, as a JSON schema.
    pub input: Value,
}

/// What the model is asked.
#[derive(Debug)]
pub(super) struct Question<'a> {
    /// Which model.
    pub model: &'a str,
    /// What it is told before anything else.
    pub system: &'a str,
    /// What was said.
    pub talk: &'a Talk,
    /// What it may use.
    pub tools: &'a [Tool],
    /// Most tokens of its answer.
    pub max_output: u64,
    /// Whether it shall say what is likeliest, the same each time.
    pub plain: bool,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Stop {
    /// All was said, or tools are wanted.
    #[default]
    Said,
    /// It got too long.
    Length,
    /// The model does not want to, or its provider does not.
    Refusal,
}

/// Tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Tokens {
    /// That were read, those of a cache included.
    pub read: u64,
    /// Of these, such as came from a cache.
    pub cached: u64,
    /// That were written.
    pub written: u64,
}

/// What the model said.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Answer {
    /// To the user.
    pub text: String,
    /// What it wants to be used.
    pub uses: Vec<Use>,
    /// What its provider wants to see again.
    pub kept: Vec<Value>,
    /// Why it ended.
    pub stop: Stop,
    /// What it used, if that was told.
    pub tokens: Tokens,
}

/// An answer that comes event by event.
pub(super) trait Hearing {
    /// Hears the next.
    fn hear(&mut self, event: &Value);
    /// The answer, if it came to its end.
    fn end(self: Box<Self>) -> Option<Answer>;
}

impl Dialect {
    /// Where it is spoken.
    pub(super) const fn path(self) -> &'static str {
        match self {
            Self::Messages => "/v1/messages",
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
        }
    }

    /// The question in its words. Its answer comes as a stream.
    pub(super) fn ask(self, question: &Question<'_>) -> Value {
        match self {
            Self::Messages => messages::ask(question),
            Self::Chat => chat::ask(question),
            Self::Responses => responses::ask(question),
        }
    }

    /// What hears an answer.
    pub(super) fn hearing(self) -> Box<dyn Hearing> {
        match self {
            Self::Messages => Box::<messages::Heard>::default(),
            Self::Chat => Box::<chat::Heard>::default(),
            Self::Responses => Box::<responses::Heard>::default(),
        }
    }
}

/// A text of an event; none is the same as an empty one.
fn text<'a>(event: &'a Value, path: &str) -> &'a str {
    event.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

fn number(event: &Value, path: &str) -> u64 {
    event.pointer(path).and_then(Value::as_u64).unwrap_or_default()
}

/// The position that an event is about.
fn index(event: &Value, path: &str) -> Option<usize> {
    usize::try_from(event.pointer(path)?.as_u64()?).ok().filter(|index| *index < MAX_PARTS)
}

fn add(to: &mut String, piece: &str) {
    if to.len() + piece.len() <= MAX_TEXT {
        to.push_str(piece);
    }
}

#[cfg(test)]
mod tests;
