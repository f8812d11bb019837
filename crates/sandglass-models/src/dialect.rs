//! The protocols in which models are called.

use serde::{Deserialize, Serialize};

/// A protocol. Each has a route, and answers what the others answer in its own words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// Anthropic's Messages, `POST /v1/messages`.
    Messages,
    /// OpenAI's Chat Completions, `POST /v1/chat/completions`.
    Chat,
    /// OpenAI's Responses, `POST /v1/responses`.
    Responses,
    /// OpenAI's image generation, `POST /v1/images/generations`.
    Images,
}

impl Dialect {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Messages, Self::Chat, Self::Responses, Self::Images];

    /// Where it is spoken, here and at its providers.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Messages => "/v1/messages",
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Images => "/v1/images/generations",
        }
    }

    /// The one that is spoken there.
    #[must_use]
    pub fn at(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dialect| dialect.path() == path)
    }
}
