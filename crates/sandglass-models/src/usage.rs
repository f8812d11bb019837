//! What a call used.

use serde::{Deserialize, Serialize};
use serde_json::Value;

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
    pub fn told(dialect: Dialect, usage: &Value) -> Option<Self> {
        let number = |path: &[&str]| path.iter().try_fold(usage, |value, name| value.get(name))?.as_u64();
        let some = |path: &[&str]| number(path).unwrap_or(0);
        match dialect {
            Dialect::Messages => {
                let written = some(&["cache_creation_input_tokens"]);
                let long = some(&["cache_creation", "ephemeral_1h_input_tokens"]).min(written);
                Some(Self {
                    input: number(&["input_tokens"])?,
                    cache_read: some(&["cache_read_input_tokens"]),
                    cache_write: written - long,
                    cache_write_long: long,
                    output: number(&["output_tokens"])?,
                    ..Self::default()
                })
            }
            Dialect::Chat => Some(Self::of_openai(
                number(&["prompt_tokens"])?,
                number(&["completion_tokens"])?,
                some(&["prompt_tokens_details", "cached_tokens"]),
                some(&["prompt_tokens_details", "cache_write_tokens"]),
                0,
            )),
            Dialect::Responses => Some(Self::of_openai(
                number(&["input_tokens"])?,
                number(&["output_tokens"])?,
                some(&["input_tokens_details", "cached_tokens"]),
                some(&["input_tokens_details", "cache_write_tokens"]),
                some(&["input_tokens_details", "cache_write_tokens_details", "ttl_12h"]),
            )),
            Dialect::Images => {
                let all = number(&["input_tokens"])?;
                let images = some(&["input_tokens_details", "image_tokens"]).min(all);
                Some(Self {
                    input: all - images,
                    image_input: images,
                    image_output: number(&["output_tokens"])?,
                    ..Self::default()
                })
            }
        }
    }

    /// Where all that was read is told in one number.
    fn of_openai(read: u64, output: u64, cached: u64, written: u64, long: u64) -> Self {
        let cache_read = cached.min(read);
        let written = written.min(read - cache_read);
        let cache_write_long = long.min(written);
        Self {
            input: read - cache_read - written,
            cache_read,
            cache_write: written - cache_write_long,
            cache_write_long,
            output,
            ..Self::default()
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
    use serde_json::json;

    use super::*;

    #[test]
    fn every_token_is_counted_once() {
        let messages = json!({
            "input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 30,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20},
            "output_tokens": 5,
        });
        let told = Usage::told(Dialect::Messages, &messages).unwrap();
        let expected = Usage {
            input: 10,
            cache_read: 100,
            cache_write: 10,
            cache_write_long: 20,
            output: 5,
            ..Usage::default()
        };
        assert_eq!((told, told.read()), (expected, 140));
        let chat = json!({
            "prompt_tokens": 140, "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 30},
        });
        let told = Usage::told(Dialect::Chat, &chat).unwrap();
        assert_eq!((told.input, told.cache_read, told.cache_write, told.read()), (10, 100, 30, 140));
        let responses = json!({
            "input_tokens": 140, "output_tokens": 5,
            "input_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 30, "cache_write_tokens_details": {"ttl_12h": 20}},
        });
        assert_eq!(Usage::told(Dialect::Responses, &responses).unwrap(), expected);
        let images = json!({"input_tokens": 50, "output_tokens": 4000, "input_tokens_details": {"text_tokens": 20, "image_tokens": 30}});
        let told = Usage::told(Dialect::Images, &images).unwrap();
        assert_eq!((told.input, told.image_input, told.image_output, told.output), (20, 30, 4000, 0));
    }

    #[test]
    fn nonsense_is_never_worth_less_than_it_says() {
        // More from a cache than was read at all.
        let odd = json!({"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": u64::MAX, "cache_write_tokens": 5}});
        assert_eq!(Usage::told(Dialect::Chat, &odd).unwrap().read(), 10);
        for none in [
            json!(null),
            json!({}),
            json!({"prompt_tokens": 1}),
            json!({"prompt_tokens": -1, "completion_tokens": 2}),
        ] {
            assert_eq!(Usage::told(Dialect::Chat, &none), None, "{none}");
        }
    }
}
