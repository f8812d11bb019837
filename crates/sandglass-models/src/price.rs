//! What models cost: a table that the operator keeps, in whole micro-dollars per million tokens.
//!
//! There is no other place where a price could come from, and no default: a model that is not in the table can't be called.

use std::collections::BTreeMap;

use sandglass_types::{Digest, Micros};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::usage::Usage;

/// Tokens that a price is for.
const PER: u128 = 1_000_000;

/// What one model costs, in micro-dollars per million tokens unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// Tokens that are read.
    pub input: u64,
    /// Tokens that are written.
    pub output: u64,
    /// Tokens from a cache; as [`Self::input`] if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_read: Option<u64>,
    /// Tokens into a cache for minutes; as [`Self::input`] if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write: Option<u64>,
    /// Tokens into a cache for an hour or longer; as [`Self::cache_write`] if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write_long: Option<u64>,
    /// Tokens of images that are read; as [`Self::input`] if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_input: Option<u64>,
    /// Tokens of images that are made; a model without it makes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_output: Option<u64>,
    /// Each call, in micro-dollars.
    #[serde(default)]
    pub call: u64,
    /// What a call costs that reads more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long: Option<Long>,
    /// Tokens that an image takes at most where it is read, however large it is: providers shrink it first. A model without it reads none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_tokens: Option<u64>,
    /// Tokens that the provider adds to each call of itself, beside those that come with tools.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overhead: u64,
    /// The most tokens that the model reads in one call.
    pub max_input: u64,
    /// The most tokens that the model writes in one call.
    pub max_output: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Other prices for calls that read much: all of such a call is charged by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Long {
    /// For calls that read more tokens than this.
    pub over: u64,
    /// In place of [`Price::input`], and as much more for what is derived from it.
    pub input: u64,
    /// In place of [`Price::output`].
    pub output: u64,
}

/// The prices of one call, with nothing left open.
#[derive(Debug, Clone, Copy)]
struct Rates {
    input: u64,
    cache_read: u64,
    cache_write: u64,
    cache_write_long: u64,
    image_input: u64,
    output: u64,
    image_output: u64,
}

impl Price {
    /// Those of a call that reads so many tokens.
    fn rates(&self, read: u64) -> Rates {
        let long = self.long.filter(|long| read > long.over);
        // A provider's surcharge is for all that is read, whatever it is.
        let scaled = |price: u64| match long {
            Some(long) if self.input > 0 => {
                let scaled = (u128::from(price) * u128::from(long.input)).div_ceil(u128::from(self.input));
                u64::try_from(scaled).unwrap_or(u64::MAX)
            }
            _ => price,
        };
        let cache_write = self.cache_write.unwrap_or(self.input);
        Rates {
            input: long.map_or(self.input, |long| long.input),
            cache_read: scaled(self.cache_read.unwrap_or(self.input)),
            cache_write: scaled(cache_write),
            cache_write_long: scaled(self.cache_write_long.unwrap_or(cache_write)),
            image_input: scaled(self.image_input.unwrap_or(self.input)),
            output: long.map_or(self.output, |long| long.output),
            image_output: self.image_output.unwrap_or(0),
        }
    }

    /// What a call costs that used this, rounded up once.
    #[must_use]
    pub fn of(&self, usage: &Usage) -> Micros {
        let rates = self.rates(usage.read());
        let parts = [
            (usage.input, rates.input),
            (usage.cache_read, rates.cache_read),
            (usage.cache_write, rates.cache_write),
            (usage.cache_write_long, rates.cache_write_long),
            (usage.image_input, rates.image_input),
            (usage.output, rates.output),
            (usage.image_output, rates.image_output),
        ];
        let sum = parts
            .into_iter()
            .map(|(tokens, price)| u128::from(tokens) * u128::from(price))
            .fold(0, u128::saturating_add);
        let micros = sum.div_ceil(PER).saturating_add(u128::from(self.call));
        Micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// The most that so many tokens can cost that are read, whatever becomes of them.
    #[must_use]
    pub(crate) fn dearest_input(&self, read: u64, may_cache: bool) -> u64 {
        let rates = self.rates(read);
        let cached = if may_cache { rates.cache_write.max(rates.cache_write_long) } else { 0 };
        rates.input.max(rates.cache_read).max(rates.image_input).max(cached)
    }

    /// What a token costs that is written after so many were read.
    #[must_use]
    pub(crate) fn output_after(&self, read: u64) -> u64 {
        self.rates(read).output
    }
}

/// A model, where it is, and what it costs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Whose it is: one of the providers in the configuration.
    pub provider: String,
    /// What its provider calls it; as it is called here if that is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// What else it is called here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// What its provider heeds as the most tokens of an answer in Chat Completions.
    #[serde(default, skip_serializing_if = "Cap::is_both")]
    pub cap: Cap,
    /// What it costs.
    pub price: Price,
}

/// The name that the most tokens of an answer has in Chat Completions. `OpenAI` takes one of them, and refuses a call with both; others
/// take one, and write on where it is called by the other name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cap {
    /// `max_completion_tokens`.
    MaxCompletionTokens,
    /// `max_tokens`.
    MaxTokens,
    /// Both: there is none that is not heeded, and whoever takes one alone says so.
    #[default]
    Both,
}

impl Cap {
    pub(crate) const fn names(self) -> &'static [&'static str] {
        match self {
            Self::MaxCompletionTokens => &["max_completion_tokens"],
            Self::MaxTokens => &["max_tokens"],
            Self::Both => &["max_tokens", "max_completion_tokens"],
        }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
    fn is_both(&self) -> bool {
        *self == Self::Both
    }
}

/// All models that can be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prices {
    models: BTreeMap<String, Model>,
    names: BTreeMap<String, String>,
    text: String,
    snapshot: Digest,
}

/// A table that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum PricesError {
    /// It can't be read.
    #[error("the table of prices can't be read")]
    Text(#[from] toml::de::Error),
    /// It can't be told, or what was kept of it is no table.
    #[error("the table of prices can't be written, or was not kept as it was")]
    Written(#[from] serde_json::Error),
    /// A name means two models.
    #[error("'{0}' is the name of two models")]
    Twice(String),
    /// A number makes no sense.
    #[error("the price of '{model}': {why}")]
    Price {
        /// Whose.
        model: String,
        /// Why.
        why: &'static str,
    },
}

impl Prices {
    /// Reads a table: one table of TOML for each model, with the fields of [`Model`].
    ///
    /// # Errors
    /// [`PricesError`].
    pub fn parse(text: &str) -> Result<Self, PricesError> {
        Self::new(toml::from_str(text)?)
    }

    /// The table of these models.
    ///
    /// # Errors
    /// [`PricesError`].
    pub fn new(models: BTreeMap<String, Model>) -> Result<Self, PricesError> {
        let mut names = BTreeMap::new();
        for (name, model) in &models {
            let wrong = |why| PricesError::Price { model: name.clone(), why };
            let price = &model.price;
            if price.image_tokens == Some(0) {
                return Err(wrong("image_tokens must be what an image takes at most"));
            }
            if price.max_output == 0 || price.max_input == 0 {
                return Err(wrong(
                    "max_input and max_output must be what the model reads and writes at most",
                ));
            }
            if price.long.is_some_and(|long| long.input < price.input || long.output < price.output) {
                return Err(wrong("what reads more can't cost less"));
            }
            for called in std::iter::once(name).chain(&model.aliases) {
                if names.insert(called.clone(), name.clone()).is_some() {
                    return Err(PricesError::Twice(called.clone()));
                }
            }
        }
        // The order of members is that of the fields and of the names, so the text is the same for the same table.
        let text = serde_json::to_string(&models)?;
        let snapshot = Digest::from_bytes(Sha256::digest(&text).into());
        Ok(Self { models, names, text, snapshot })
    }

    /// The table of which [`Prices::text`] was kept.
    ///
    /// # Errors
    /// [`PricesError`].
    pub fn kept(text: &str) -> Result<Self, PricesError> {
        Self::new(serde_json::from_str(text)?)
    }

    /// All that it says, as JSON, to be kept under [`Prices::snapshot`].
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// All models with their own names.
    pub fn models(&self) -> impl Iterator<Item = (&str, &Model)> {
        self.models.iter().map(|(name, model)| (name.as_str(), model))
    }

    /// A model by one of its names, and its own.
    #[must_use]
    pub fn model(&self, called: &str) -> Option<(&str, &Model)> {
        let name = self.names.get(called)?;
        self.models.get_key_value(name).map(|(name, model)| (name.as_str(), model))
    }

    /// Names this very table: whoever keeps the name can tell later by which prices something was charged.
    #[must_use]
    pub const fn snapshot(&self) -> Digest {
        self.snapshot
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TABLE: &str = r#"
[large]
provider = "one"
aliases = ["large-latest"]
[large.price]
input = 4_000_000
output = 20_000_000
cache_read = 200_000
cache_write = 5_000_000
cache_write_long = 8_000_000
max_input = 1_000_000
max_output = 128_000
long = { over = 200_000, input = 8_000_000, output = 30_000_000 }

[small]
provider = "two"
upstream = "small-2026"
price = { input = 1, output = 3, max_input = 1000, max_output = 1000, call = 7 }
"#;

    fn price(model: &str) -> Price {
        Prices::parse(TABLE).unwrap().model(model).unwrap().1.price
    }

    #[test]
    fn a_call_costs_what_the_table_says_rounded_up_once() {
        let usage = Usage {
            input: 1000,
            cache_read: 2000,
            cache_write: 100,
            cache_write_long: 10,
            output: 50,
            ..Usage::default()
        };
        // 4,000 + 400 + 500 + 80 + 1,000.
        assert_eq!(price("large").of(&usage), Micros(5980));
        assert_eq!(
            price("large-latest").of(&Usage { input: 200_001, output: 1, ..Usage::default() }),
            Micros(1_600_038)
        );
        // Seven for the call, and less than one for all tokens together.
        assert_eq!(price("small").of(&Usage { input: 100, output: 100, ..Usage::default() }), Micros(8));
        assert_eq!(price("small").of(&Usage::default()), Micros(7));
        let all = u64::MAX;
        assert_eq!(price("large").of(&Usage { input: all, output: all, ..Usage::default() }), Micros(all));
    }

    #[test]
    fn tables_that_mean_two_things_are_refused() {
        let error = |text: &str| Prices::parse(text).unwrap_err().to_string();
        let model = "provider = \"x\"\nprice = { input = 1, output = 1, max_input = 1, max_output = 1 }\n";
        assert!(error(&format!("[a]\naliases = [\"b\"]\n{model}[b]\n{model}")).contains("two models"));
        assert!(
            error(
                "[a]\nprovider = \"x\"\nprice = { input = 1.5, output = 1, max_input = 1, max_output = 1 }"
            )
            .contains("can't be read")
        );
        assert!(
            error("[a]\nprovider = \"x\"\nprice = { input = 1, output = 1, max_input = 1, max_output = 0 }")
                .contains("max_output")
        );
        assert!(error("[a]\nprovider = \"x\"\nprice = { input = 2, output = 1, max_input = 9, max_output = 9, long = { over = 1, input = 1, output = 1 } }").contains("less"));
        assert!(Prices::parse(TABLE).unwrap().model("medium").is_none());
    }

    #[test]
    fn a_table_is_known_by_what_it_says() {
        let [one, same, other] =
            [TABLE.to_owned(), TABLE.replace('\n', "\n\n"), TABLE.replace("call = 7", "call = 8")]
                .map(|text| Prices::parse(&text).unwrap().snapshot());
        assert_eq!(one, same);
        assert_ne!(one, other);
        let table = Prices::parse(TABLE).unwrap();
        assert_eq!(Prices::kept(table.text()).unwrap(), table, "a kept table is the same");
    }

    proptest! {
        #[test]
        fn whoever_uses_more_pays_no_less(a in any::<[u32; 7]>(), more in 0..7_usize, by in any::<u32>()) {
            let usage = |n: [u64; 7]| Usage {
                input: n[0], cache_read: n[1], cache_write: n[2], cache_write_long: n[3], image_input: n[4], output: n[5], image_output: n[6],
            };
            let mut b = a.map(u64::from);
            b[more] += u64::from(by);
            let price = price("large");
            prop_assert!(price.of(&usage(a.map(u64::from))) <= price.of(&usage(b)));
        }
    }
}
