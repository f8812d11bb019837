//! What a call used.

mod counts;

use serde::{Deserialize, Serialize};

pub(crate) use self::counts::{Counts, Word};
use crate::dialect::Dialect;

/// Tokens, and what is counted otherwise, each counted once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens that were read and came from no cache.
    pub input: u64,
    /// Tokens that came from a cache.
    pub cache_read: u64,
    /// Tokens that were put into a cache for minutes.
    pub cache_write: u64,
    /// Tokens that were put into a cache for an hour or longer.
    pub cache_write_long: u64,
    /// Tokens of images that were read.
    pub image_input: u64,
    /// Tokens that were written, thoughts included.
    pub output: u64,
    /// Tokens of images that were made.
    pub image_output: u64,
}

impl Usage {
    /// What the member `usage` of an answer says. `None` where it says nothing that can be charged.
    ///
    /// The meaning of the members differs (checked against the providers' own clients: `anthropic` 1.x counts what comes from a cache
    /// apart, `openai` 3.57 counts it in).
    #[must_use]
    pub(crate) fn told(dialect: Dialect, said: &Counts) -> Option<Self> {
        match dialect {
            Dialect::Messages => {
                let top = Self::of_anthropic(said)?;
                Some(said.rounds().map_or(top, |rounds| top.max(&rounds)))
            }
            Dialect::Chat => Some(Self::of_openai(said, said.prompt_tokens?, said.completion_tokens?)),
            Dialect::Responses => Some(Self::of_openai(said, said.input_tokens?, said.output_tokens?)),
            Dialect::Images => {
                let all = said.input_tokens?;
                let images = said.details().image_tokens.unwrap_or(0).min(all);
                Some(Self {
                    input: all - images,
                    image_input: images,
                    image_output: said.output_tokens?,
                    ..Self::default()
                })
            }
        }
    }

    /// Where what comes from a cache is told beside what was read.
    fn of_anthropic(said: &Counts) -> Option<Self> {
        let written = said.cache_creation_input_tokens.unwrap_or(0);
        let long = said.long_writes().min(written);
        Some(Self {
            input: said.input_tokens?,
            cache_read: said.cache_read_input_tokens.unwrap_or(0),
            cache_write: written - long,
            cache_write_long: long,
            output: said.output_tokens?,
            ..Self::default()
        })
    }

    /// Where all that was read is told in one number.
    fn of_openai(said: &Counts, read: u64, output: u64) -> Self {
        let details = said.details();
        let cache_read = details.cached_tokens.unwrap_or(0).min(read);
        let written = details.cache_write_tokens.unwrap_or(0).min(read - cache_read);
        let cache_write_long = details.long_writes().min(written);
        // xAI and Gemini count thoughts in the sum alone.
        let rest = said.total_tokens.unwrap_or(0).saturating_sub(read);
        Self {
            input: read - cache_read - written,
            cache_read,
            cache_write: written - cache_write_long,
            cache_write_long,
            output: output.max(rest),
            ..Self::default()
        }
    }

    /// Of each the larger number.
    fn max(self, other: &Self) -> Self {
        Self {
            input: self.input.max(other.input),
            cache_read: self.cache_read.max(other.cache_read),
            cache_write: self.cache_write.max(other.cache_write),
            cache_write_long: self.cache_write_long.max(other.cache_write_long),
            image_input: self.image_input.max(other.image_input),
            output: self.output.max(other.output),
            image_output: self.image_output.max(other.image_output),
        }
    }

    /// All tokens that were read.
    #[must_use]
    pub fn read(&self) -> u64 {
        [self.input, self.cache_read, self.cache_write, self.cache_write_long, self.image_input]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn told(dialect: Dialect, said: &Value) -> Option<Usage> {
        Usage::told(dialect, &Counts::deserialize(said).unwrap())
    }

    #[test]
    fn every_token_is_counted_once() {
        let messages = json!({
            "input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 30,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20},
            "output_tokens": 5,
        });
        let said = told(Dialect::Messages, &messages).unwrap();
        let expected = Usage {
            input: 10,
            cache_read: 100,
            cache_write: 10,
            cache_write_long: 20,
            output: 5,
            ..Usage::default()
        };
        assert_eq!((said, said.read()), (expected, 140));
        let chat = json!({
            "prompt_tokens": 140, "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 30},
        });
        let said = told(Dialect::Chat, &chat).unwrap();
        assert_eq!((said.input, said.cache_read, said.cache_write, said.read()), (10, 100, 30, 140));
        let responses = json!({
            "input_tokens": 140, "output_tokens": 5,
            "input_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 30, "cache_write_tokens_details": {"ttl_12h": 20}},
        });
        assert_eq!(told(Dialect::Responses, &responses).unwrap(), expected);
        let images = json!({"input_tokens": 50, "output_tokens": 4000, "input_tokens_details": {"text_tokens": 20, "image_tokens": 30}});
        let said = told(Dialect::Images, &images).unwrap();
        assert_eq!((said.input, said.image_input, said.image_output, said.output), (20, 30, 4000, 0));
    }

    #[test]
    fn nonsense_is_never_worth_less_than_it_says() {
        // More from a cache than was read at all.
        let odd = json!({"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": u64::MAX, "cache_write_tokens": 5}});
        assert_eq!(told(Dialect::Chat, &odd).unwrap().read(), 10);
        for none in [
            json!({}),
            json!({"prompt_tokens": 1}),
            json!({"prompt_tokens": null, "completion_tokens": 2}),
            json!({"prompt_tokens": "3", "completion_tokens": 2}),
            json!({"prompt_tokens": -1, "completion_tokens": 2}),
        ] {
            assert_eq!(told(Dialect::Chat, &none), None, "{none}");
        }
        // Some write all numbers as fractions.
        let fractions =
            json!({"prompt_tokens": 3.0, "completion_tokens": 2.5, "prompt_tokens_details": null});
        assert_eq!(
            told(Dialect::Chat, &fractions).unwrap(),
            Usage { input: 3, output: 3, ..Usage::default() }
        );
    }

    #[test]
    fn thoughts_that_are_counted_in_the_sum_alone_are_written_tokens() {
        // xAI's own example.
        let said = json!({
            "prompt_tokens": 10_120, "completion_tokens": 1499, "total_tokens": 14_428,
            "completion_tokens_details": {"reasoning_tokens": 2809},
        });
        assert_eq!(told(Dialect::Chat, &said).unwrap().output, 1499 + 2809);
        let responses = json!({"input_tokens": 5, "output_tokens": 7, "total_tokens": 12});
        assert_eq!(told(Dialect::Responses, &responses).unwrap().output, 7);
        let wrong = json!({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 0});
        assert_eq!(told(Dialect::Chat, &wrong).unwrap().output, 7);
    }

    #[test]
    fn rounds_that_the_provider_ran_beside_the_answer_are_counted() {
        // The example in Anthropic's documentation of compaction.
        let said = json!({
            "input_tokens": 23_000, "output_tokens": 1000,
            "iterations": [
                {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3500},
                {"type": "message", "input_tokens": 23_000, "output_tokens": 1000, "cache_creation_input_tokens": 9,
                    "cache_creation": {"ephemeral_1h_input_tokens": 4}},
            ],
        });
        let expected =
            Usage { input: 203_000, output: 4500, cache_write: 5, cache_write_long: 4, ..Usage::default() };
        assert_eq!(told(Dialect::Messages, &said).unwrap(), expected);
        for none in [json!(null), json!([])] {
            let said = json!({"input_tokens": 2, "output_tokens": 1, "iterations": none});
            assert_eq!(
                told(Dialect::Messages, &said).unwrap(),
                Usage { input: 2, output: 1, ..Usage::default() }
            );
        }
    }

    #[test]
    fn what_has_no_price_here_is_noticed() {
        for (said, expected) in [
            (json!({"server_tool_use": {"web_search_requests": 1}}), true),
            (json!({"server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 2}}), true),
            (json!({"speed": "fast"}), true),
            (json!({"service_tier": "priority"}), true),
            (json!({"num_sources_used": 3}), true),
            (
                json!({"server_tool_use": {"web_search_requests": 0}, "service_tier": "standard", "speed": null}),
                false,
            ),
            (json!({"server_tool_use": null, "num_sources_used": 0}), false),
        ] {
            assert_eq!(Counts::deserialize(&said).unwrap().is_beyond(), expected, "{said}");
        }
    }
}
