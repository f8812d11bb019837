//! What a call may write, and what is set aside for it: decided before it is sent, from what is left of its budget.

use sandglass_types::Micros;

use crate::price::Price;

/// Tokens for which it is worth to begin: agents take a cut answer for a failure, and ask again.
pub const LEAST_USEFUL: u64 = 1024;

/// Tokens that an image takes at most where it is read, however large it is: providers shrink it first.
pub const IMAGE_TOKENS: u64 = 8_192;

/// What is known of a call before it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The most tokens that it can read, as far as its length tells.
    pub input: u64,
    /// Whether some of that may be put into a cache, which costs more.
    pub caches: bool,
    /// How many tokens the client lets it write; all that the model can if it says nothing.
    pub output: Option<u64>,
    /// Images that it makes, each of no more tokens than the model writes at most.
    pub images: u64,
}

/// A call that can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
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
}

/// Tokens that so many bytes of text can be at most. English, code and JSON are a token for three to four bytes, and other scripts take more
/// bytes for each; what is more all the same is told apart as an overrun.
#[must_use]
pub const fn tokens_of(bytes: u64) -> u64 {
    bytes.div_ceil(3)
}

/// Sets aside what a call can cost at most, and lets it write what is left for that: as much as the client asks for, as the model can, and
/// as the operator allows with `most`.
///
/// # Errors
/// [`Unaffordable`], where there is not enough for an answer that is worth its money.
pub fn plan(facts: &Facts, price: &Price, left: Micros, most: u64) -> Result<Plan, Unaffordable> {
    if facts.input > price.max_input {
        return Err(Unaffordable::TooLong { input: facts.input, most: price.max_input });
    }
    if facts.images > 0 && price.image_output.is_none() {
        return Err(Unaffordable::NoImages);
    }
    let text = if facts.images > 0 { 0 } else { price.max_output };
    let cap = facts.output.unwrap_or(u64::MAX).min(text).min(most);
    // All in millionths of a micro-dollar, so that nothing is rounded before the end.
    let per_output = u128::from(price.output_after(facts.input));
    let fixed = u128::from(facts.input) * u128::from(price.dearest_input(facts.input, facts.caches))
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
    Ok(Plan { output, reserved: all(output) })
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
        call: 10,
        long: Some(crate::price::Long { over: 200_000, input: 8_000_000, output: 30_000_000 }),
        max_input: 1_000_000,
        max_output: 128_000,
    };

    #[test]
    fn an_answer_is_as_long_as_is_left_for_it() {
        let facts = Facts { input: 1000, caches: false, output: Some(128_000), images: 0 };
        // 4,010 for what is read and the call; the rest is for 20 micro-dollars a token.
        let planned = plan(&facts, &PRICE, Micros(44_010), u64::MAX).unwrap();
        assert_eq!(planned, Plan { output: 2000, reserved: Micros(44_010) });
        assert_eq!(plan(&facts, &PRICE, Micros(u64::MAX), 8000).unwrap().output, 8000);
        let unsaid = Facts { output: None, ..facts };
        assert_eq!(plan(&unsaid, &PRICE, Micros(u64::MAX), u64::MAX).unwrap().output, 128_000);
        let short = Facts { output: Some(16), ..facts };
        assert_eq!(
            plan(&short, &PRICE, Micros(4330), u64::MAX).unwrap(),
            Plan { output: 16, reserved: Micros(4330) }
        );
        assert_eq!(
            plan(&short, &PRICE, Micros(4329), u64::MAX),
            Err(Unaffordable::Budget { least: Micros(4330), left: Micros(4329) })
        );
        let cut = plan(&facts, &PRICE, Micros(4010 + 1023 * 20), u64::MAX);
        assert!(matches!(cut, Err(Unaffordable::Budget { .. })), "{cut:?}");
    }

    #[test]
    fn what_can_t_be_is_said() {
        let facts = Facts { input: 1_000_001, caches: false, output: None, images: 0 };
        assert!(matches!(plan(&facts, &PRICE, Micros(u64::MAX), 1), Err(Unaffordable::TooLong { .. })));
        let images = Facts { input: 1, images: 1, ..facts };
        assert_eq!(
            plan(&images, &Price { image_output: None, ..PRICE }, Micros(u64::MAX), 1),
            Err(Unaffordable::NoImages)
        );
        // A token that is read, the call, and an image of the most tokens.
        let planned = plan(&images, &PRICE, Micros(u64::MAX), 1).unwrap();
        assert_eq!(planned, Plan { output: 0, reserved: Micros(4 + 10 + 128_000 * 30) });
    }

    proptest! {
        /// Whatever a provider makes of a call that stays within what it may read and write: it costs no more than was set aside, and no
        /// more is set aside than was left.
        #[test]
        fn nothing_costs_more_than_was_set_aside(
            input in 0..900_000_u64, caches: bool, wanted in proptest::option::of(1..200_000_u64),
            left in 0..40_000_000_u64, split in any::<[u16; 4]>(), wrote in 0.0..=1.0_f64,
        ) {
            let facts = Facts { input, caches, output: wanted, images: 0 };
            let Ok(planned) = plan(&facts, &PRICE, Micros(left), 100_000) else { return Ok(()) };
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
