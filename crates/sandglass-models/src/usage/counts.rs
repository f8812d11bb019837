//! The numbers of an answer, of all protocols together. They are read one by one: an answer may be long, and nothing else of it is kept.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::Usage;

/// What a member `usage` says. What is no number is as if it were not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Counts {
    #[serde(deserialize_with = "number")]
    pub(super) input_tokens: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) output_tokens: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) prompt_tokens: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) completion_tokens: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) total_tokens: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) cache_read_input_tokens: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) cache_creation_input_tokens: Option<u64>,
    cache_creation: Option<Creation>,
    input_tokens_details: Option<Details>,
    prompt_tokens_details: Option<Details>,
    /// All rounds of sampling, where there was more than the answer's own.
    iterations: Option<Rounds>,
    server_tool_use: Option<Served>,
    #[serde(deserialize_with = "number")]
    num_sources_used: Option<u64>,
    service_tier: Option<Word>,
    speed: Option<Word>,
}

/// What went into a cache, by how long it stays there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
struct Creation {
    #[serde(deserialize_with = "number")]
    ephemeral_1h_input_tokens: Option<u64>,
}

/// What is counted in what was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub(super) struct Details {
    #[serde(deserialize_with = "number")]
    pub(super) cached_tokens: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) cache_write_tokens: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(super) image_tokens: Option<u64>,
    cache_write_tokens_details: Option<Writes>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
struct Writes {
    #[serde(deserialize_with = "number")]
    ttl_12h: Option<u64>,
}

/// How often the provider's own tools were used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Served {
    any: bool,
}

/// The sum of all rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Rounds {
    sum: Option<Usage>,
}

/// Whether a word is one that costs more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Word {
    /// It is one.
    pub(crate) dear: bool,
}

impl Counts {
    /// Takes in what was said later. All numbers are of all so far, so none becomes smaller: some upstreams end with zeros.
    pub(crate) fn merge(&mut self, later: &Self) {
        let most = |mine: &mut Option<u64>, theirs: Option<u64>| *mine = (*mine).max(theirs);
        most(&mut self.input_tokens, later.input_tokens);
        most(&mut self.output_tokens, later.output_tokens);
        most(&mut self.prompt_tokens, later.prompt_tokens);
        most(&mut self.completion_tokens, later.completion_tokens);
        most(&mut self.total_tokens, later.total_tokens);
        most(&mut self.cache_read_input_tokens, later.cache_read_input_tokens);
        most(&mut self.cache_creation_input_tokens, later.cache_creation_input_tokens);
        most(&mut self.num_sources_used, later.num_sources_used);
        if let Some(later) = later.cache_creation {
            let mine = self.cache_creation.get_or_insert_default();
            most(&mut mine.ephemeral_1h_input_tokens, later.ephemeral_1h_input_tokens);
        }
        for (mine, later) in [
            (&mut self.input_tokens_details, later.input_tokens_details),
            (&mut self.prompt_tokens_details, later.prompt_tokens_details),
        ] {
            let Some(later) = later else { continue };
            let mine = mine.get_or_insert_default();
            most(&mut mine.cached_tokens, later.cached_tokens);
            most(&mut mine.cache_write_tokens, later.cache_write_tokens);
            most(&mut mine.image_tokens, later.image_tokens);
            if let Some(later) = later.cache_write_tokens_details {
                most(&mut mine.cache_write_tokens_details.get_or_insert_default().ttl_12h, later.ttl_12h);
            }
        }
        if let Some(sum) = later.rounds() {
            let mine = &mut self.iterations.get_or_insert_default().sum;
            *mine = Some(mine.map_or(sum, |mine| mine.max(&sum)));
        }
        if let Some(later) = later.server_tool_use {
            self.server_tool_use.get_or_insert_default().any |= later.any;
        }
        for (mine, later) in [(&mut self.service_tier, later.service_tier), (&mut self.speed, later.speed)] {
            if let Some(later) = later {
                mine.get_or_insert_default().dear |= later.dear;
            }
        }
    }

    /// Whether something was used that no price is for: a tool of the provider's, or a faster way.
    pub(crate) fn is_beyond(&self) -> bool {
        self.server_tool_use.is_some_and(|served| served.any)
            || self.num_sources_used.is_some_and(|sources| sources > 0)
            || self.service_tier.is_some_and(|tier| tier.dear)
            || self.speed.is_some_and(|speed| speed.dear)
    }

    pub(super) fn long_writes(&self) -> u64 {
        self.cache_creation.and_then(|creation| creation.ephemeral_1h_input_tokens).unwrap_or(0)
    }

    pub(super) fn details(&self) -> Details {
        self.input_tokens_details.or(self.prompt_tokens_details).unwrap_or_default()
    }

    pub(super) fn rounds(&self) -> Option<Usage> {
        self.iterations?.sum
    }
}

impl Details {
    pub(super) fn long_writes(&self) -> u64 {
        self.cache_write_tokens_details.and_then(|writes| writes.ttl_12h).unwrap_or(0)
    }
}

/// A number of tokens, and nothing where it is none.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    struct Number;

    impl<'de> Visitor<'de> for Number {
        type Value = Option<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number of tokens")
        }

        fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
            Ok(Some(value))
        }

        fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
            Ok(u64::try_from(value).ok())
        }

        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a conversion of a number that is not negative ends at the largest"
        )]
        fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
            Ok((value >= 0.0).then(|| value.ceil() as u64))
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            while access.next_element::<IgnoredAny>()?.is_some() {}
            Ok(None)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            while access.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            Ok(None)
        }
    }

    deserializer.deserialize_any(Number)
}

/// [`number`], where it stands alone.
#[derive(Deserialize)]
struct Alone(#[serde(deserialize_with = "number")] Option<u64>);

impl<'de> Deserialize<'de> for Served {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tools;

        impl<'de> Visitor<'de> for Tools {
            type Value = Served;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("how often tools were used")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Served, A::Error> {
                let mut any = false;
                while let Some((IgnoredAny, Alone(times))) = access.next_entry()? {
                    any |= times.is_some_and(|times| times > 0);
                }
                Ok(Served { any })
            }
        }

        deserializer.deserialize_map(Tools)
    }
}

impl<'de> Deserialize<'de> for Rounds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each;

        impl<'de> Visitor<'de> for Each {
            type Value = Rounds;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("rounds of sampling")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Rounds, A::Error> {
                let mut sum: Option<Usage> = None;
                while let Some(Round { counts }) = access.next_element()? {
                    let Some(round) = Usage::of_anthropic(&counts) else { continue };
                    let so_far = sum.unwrap_or_default();
                    sum = Some(Usage {
                        input: so_far.input.saturating_add(round.input),
                        cache_read: so_far.cache_read.saturating_add(round.cache_read),
                        cache_write: so_far.cache_write.saturating_add(round.cache_write),
                        cache_write_long: so_far.cache_write_long.saturating_add(round.cache_write_long),
                        output: so_far.output.saturating_add(round.output),
                        ..so_far
                    });
                }
                Ok(Rounds { sum })
            }
        }

        deserializer.deserialize_seq(Each)
    }
}

/// One round. It has none in it: what looks like that is not read, so that nothing here calls itself.
struct Round {
    counts: Counts,
}

impl<'de> Deserialize<'de> for Round {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Flat {
            #[serde(deserialize_with = "number")]
            input_tokens: Option<u64>,
            #[serde(deserialize_with = "number")]
            output_tokens: Option<u64>,
            #[serde(deserialize_with = "number")]
            cache_read_input_tokens: Option<u64>,
            #[serde(deserialize_with = "number")]
            cache_creation_input_tokens: Option<u64>,
            cache_creation: Option<Creation>,
        }

        let flat = Flat::deserialize(deserializer)?;
        let counts = Counts {
            // A round that says half of it is not left out for that.
            input_tokens: Some(flat.input_tokens.unwrap_or(0)),
            output_tokens: Some(flat.output_tokens.unwrap_or(0)),
            cache_read_input_tokens: flat.cache_read_input_tokens,
            cache_creation_input_tokens: flat.cache_creation_input_tokens,
            cache_creation: flat.cache_creation,
            ..Counts::default()
        };
        Ok(Self { counts })
    }
}

impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// What providers call what costs more.
        const DEAR: [&str; 2] = ["priority", "fast"];

        struct Text;

        impl Visitor<'_> for Text {
            type Value = Word;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a word")
            }

            fn visit_str<E>(self, value: &str) -> Result<Word, E> {
                Ok(Word { dear: DEAR.contains(&value) })
            }
        }

        deserializer.deserialize_str(Text)
    }
}
