//! What a call may write, and what is set aside for it: decided before it is sent, from what is left of its budget.

use sandglass_types::Micros;

use crate::price::Price;
use crate::text::Tokens;

/// Tokens for which it is worth to begin: agents take a cut answer for a failure, and ask again.
pub const LEAST_USEFUL: u64 = 1024;

/// Tokens that a provider writes around a call of its own accord, and around its tools: Anthropic tells of up to 530, and of 735 for one
/// of the tools that it explains to its models itself.
const AROUND_TOOLS: u64 = 768;
const AROUND_TOOL: u64 = 1024;

/// What is known of a call before it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The text that it reads.
    pub text: Tokens,
    /// Images that it reads.
    pub pictures: u64,
    /// Whether it has tools.
    pub tools: bool,
    /// How many of them the provider explains to its model by itself.
    pub explained: u64,
    /// Whether some of that may be put into a cache, which costs more.
    pub caches: bool,
    /// How many tokens the client lets it write; all that the model can if it says nothing.
    pub output: Option<u64>,
    /// Images that it makes, each of no more tokens than the model writes at most.
    pub images: u64,
}

/// How a call is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Care {
    /// It reads what is likely.
    Usual,
    /// It reads all that it can: calls before it cost more than was likely.
    Wary,
}

impl Facts {
    /// The most tokens that it is set aside for to read them. A provider takes no more than the model reads, and bills nothing for what it
    /// does not take.
    fn input(&self, price: &Price, care: Care) -> u64 {
        let text = match care {
            Care::Usual => self.text.likely,
            Care::Wary => self.text.most,
        };
        self.with(text, price).min(price.max_input)
    }

    /// The tokens by which its price is chosen: a text that was made to be long in tokens is not twice as long as is likely.
    fn long(&self, price: &Price) -> u64 {
        let text = self.text.likely.saturating_mul(2).min(self.text.most);
        self.with(text, price).min(price.max_input)
    }

    fn with(&self, text: u64, price: &Price) -> u64 {
        let around = if self.tools { AROUND_TOOLS } else { 0 };
        text.saturating_add(self.pictures.saturating_mul(price.image_tokens.unwrap_or(0)))
            .saturating_add(around)
            .saturating_add(self.explained.saturating_mul(AROUND_TOOL))
            .saturating_add(price.overhead)
    }
}

/// A call that can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Tokens that it may read.
    pub input: u64,
    /// Tokens that it may write.
    pub output: u64,
    /// The most that it can cost.
    pub reserved: Micros,
}

/// Why a call can't be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unaffordable {
    /// What is left of the budget does not do.
    #[error("this call may cost {least}, and {left} of the budget is left")]
    Budget {
        /// The least that it would have to be able to cost.
        least: Micros,
        /// What is left.
        left: Micros,
    },
    /// The model can't read so much.
    #[error("this call may be {input} tokens long, and the model reads {most}")]
    TooLong {
        /// What it may be.
        input: u64,
        /// What the model can.
        most: u64,
    },
    /// It makes images, and the model has no price for them.
    #[error("this model makes no images")]
    NoImages,
    /// There are images in it, and the model has no price for them.
    #[error("this model reads no images")]
    NoPictures,
}

/// Bytes of a text that are at least one token, where it is hopelessly long: a provider would only say so.
const BYTES_AT_MOST: u64 = 16;

/// Sets aside what a call can cost at most, and lets it write what is left for that: as much as the client asks for, as the model can, and
/// as the operator allows with `most`.
///
/// # Errors
/// [`Unaffordable`], where there is not enough for an answer that is worth its money.
pub fn plan(facts: &Facts, price: &Price, care: Care, left: Micros, most: u64) -> Result<Plan, Unaffordable> {
    // Whether it is too long is for the provider to say, in words that agents know what to do at.
    let shortest = facts.text.most / BYTES_AT_MOST;
    if shortest > price.max_input {
        return Err(Unaffordable::TooLong { input: shortest, most: price.max_input });
    }
    if facts.pictures > 0 && price.image_tokens.is_none() {
        return Err(Unaffordable::NoPictures);
    }
    if facts.images > 0 && price.image_output.is_none() {
        return Err(Unaffordable::NoImages);
    }
    let text = if facts.images > 0 { 0 } else { price.max_output };
    let cap = facts.output.unwrap_or(u64::MAX).min(text).min(most);
    // All in millionths of a micro-dollar, so that nothing is rounded before the end.
    let (input, long) = (facts.input(price, care), facts.long(price));
    let per_output = u128::from(price.output_after(long));
    let fixed = u128::from(input) * u128::from(price.dearest_input(long, facts.caches))
        + u128::from(facts.images)
            * u128::from(price.max_output)
            * u128::from(price.image_output.unwrap_or(0))
        + u128::from(price.call) * 1_000_000;
    let all = |output: u64| {
        let micros = (fixed + u128::from(output) * per_output).div_ceil(1_000_000);
        Micros(u64::try_from(micros).unwrap_or(u64::MAX))
    };
    let least = cap.min(LEAST_USEFUL);
    if all(least) > left {
        return Err(Unaffordable::Budget { least: all(least), left });
    }
    let spare = (u128::from(left.0) * 1_000_000).saturating_sub(fixed);
    let affordable =
        spare.checked_div(per_output).map_or(u64::MAX, |tokens| u64::try_from(tokens).unwrap_or(u64::MAX));
    let output = cap.min(affordable);
    Ok(Plan { input, output, reserved: all(output) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::usage::Usage;

    const PRICE: Price = Price {
        input: 4_000_000,
        output: 20_000_000,
        cache_read: Some(200_000),
        cache_write: Some(5_000_000),
        cache_write_long: Some(8_000_000),
        image_input: None,
        image_output: Some(30_000_000),
        image_tokens: Some(1600),
        overhead: 0,
        call: 10,
        long: Some(crate::price::Long { over: 200_000, input: 8_000_000, output: 30_000_000 }),
        max_input: 1_000_000,
        max_output: 128_000,
    };

    fn text(tokens: u64) -> Facts {
        Facts {
            text: Tokens { likely: tokens, most: tokens },
            pictures: 0,
            tools: false,
            explained: 0,
            caches: false,
            output: None,
            images: 0,
        }
    }

    #[test]
    fn an_answer_is_as_long_as_is_left_for_it() {
        let facts = Facts { output: Some(128_000), ..text(1000) };
        // 4,010 for what is read and the call; the rest is for 20 micro-dollars a token.
        let planned = plan(&facts, &PRICE, Care::Usual, Micros(44_010), u64::MAX).unwrap();
        assert_eq!(planned, Plan { input: 1000, output: 2000, reserved: Micros(44_010) });
        assert_eq!(plan(&facts, &PRICE, Care::Usual, Micros(u64::MAX), 8000).unwrap().output, 8000);
        let unsaid = Facts { output: None, ..facts };
        assert_eq!(plan(&unsaid, &PRICE, Care::Usual, Micros(u64::MAX), u64::MAX).unwrap().output, 128_000);
        let short = Facts { output: Some(16), ..facts };
        assert_eq!(
            plan(&short, &PRICE, Care::Usual, Micros(4330), u64::MAX).unwrap(),
            Plan { input: 1000, output: 16, reserved: Micros(4330) }
        );
        assert_eq!(
            plan(&short, &PRICE, Care::Usual, Micros(4329), u64::MAX),
            Err(Unaffordable::Budget { least: Micros(4330), left: Micros(4329) })
        );
        let cut = plan(&facts, &PRICE, Care::Usual, Micros(4010 + 1023 * 20), u64::MAX);
        assert!(matches!(cut, Err(Unaffordable::Budget { .. })), "{cut:?}");
    }

    #[test]
    fn what_can_t_be_is_said() {
        let facts = text(16_000_016);
        assert!(matches!(
            plan(&facts, &PRICE, Care::Usual, Micros(u64::MAX), 1),
            Err(Unaffordable::TooLong { .. })
        ));
        let images = Facts { images: 1, ..text(1) };
        assert_eq!(
            plan(&images, &Price { image_output: None, ..PRICE }, Care::Usual, Micros(u64::MAX), 1),
            Err(Unaffordable::NoImages)
        );
        // A token that is read, the call, and an image of the most tokens.
        let planned = plan(&images, &PRICE, Care::Usual, Micros(u64::MAX), 1).unwrap();
        assert_eq!(planned, Plan { input: 1, output: 0, reserved: Micros(4 + 10 + 128_000 * 30) });
    }

    #[test]
    fn what_is_read_is_set_aside_for_with_what_the_provider_adds() {
        let all = Micros(u64::MAX);
        let input =
            |facts: &Facts, price: &Price, care| plan(facts, price, care, all, 1).map(|plan| plan.input);
        let facts = Facts { tools: true, explained: 2, pictures: 3, ..text(10) };
        assert_eq!(input(&facts, &PRICE, Care::Usual), Ok(10 + 768 + 2 * 1024 + 3 * 1600));
        let dear = Price { overhead: 50, ..PRICE };
        assert_eq!(input(&text(10), &dear, Care::Usual), Ok(60));
        let blind = Price { image_tokens: None, ..PRICE };
        assert_eq!(input(&facts, &blind, Care::Usual), Err(Unaffordable::NoPictures));
        // Who was wrong once is not believed again.
        let made = Facts { text: Tokens { likely: 100, most: 300 }, ..text(0) };
        assert_eq!(input(&made, &PRICE, Care::Usual), Ok(100));
        assert_eq!(input(&made, &PRICE, Care::Wary), Ok(300));
    }

    #[test]
    fn a_long_conversation_goes_on_and_costs_no_more_than_the_longest() {
        // Likely more than the model reads, and perhaps not.
        let long = text(4_000_000);
        let planned = plan(&long, &PRICE, Care::Usual, Micros(u64::MAX), 10).unwrap();
        assert_eq!(planned, Plan { input: 1_000_000, output: 10, reserved: Micros(8_000_310) });
    }

    #[test]
    fn the_price_is_that_of_what_it_may_turn_out_to_be() {
        let short = Facts { text: Tokens { likely: 110_000, most: 150_000 }, ..text(0) };
        let planned = |facts| plan(facts, &PRICE, Care::Usual, Micros(u64::MAX), 10).unwrap().reserved;
        assert_eq!(planned(&short), Micros(440_210));
        let made = Facts { text: Tokens { likely: 110_000, most: 330_000 }, ..text(0) };
        assert_eq!(planned(&made), Micros(880_310));
    }

    proptest! {
        /// Whatever a provider makes of a call that stays within what it may read and write: it costs no more than was set aside, and no
        /// more is set aside than was left.
        #[test]
        fn nothing_costs_more_than_was_set_aside(
            input in 0..900_000_u64, caches: bool, wanted in proptest::option::of(1..200_000_u64),
            left in 0..40_000_000_u64, split in any::<[u16; 4]>(), wrote in 0.0..=1.0_f64,
        ) {
            let facts = Facts { caches, output: wanted, ..text(input) };
            let Ok(planned) = plan(&facts, &PRICE, Care::Usual, Micros(left), 100_000) else { return Ok(()) };
            prop_assert!(planned.reserved <= Micros(left));
            let whole = split.iter().map(|part| u64::from(*part)).sum::<u64>().max(1);
            let mut part = split.map(|part| input * u64::from(part) / whole);
            if !caches {
                (part[2], part[3]) = (0, 0);
            }
            #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of it")]
            let output = (planned.output as f64 * wrote) as u64;
            let usage = Usage {
                input: part[0], cache_read: part[1], cache_write: part[2], cache_write_long: part[3], output, ..Usage::default()
            };
            prop_assert!(PRICE.of(&usage) <= planned.reserved, "{:?} {:?}", usage, planned);
        }
    }
}
