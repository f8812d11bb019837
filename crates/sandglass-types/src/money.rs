//! Money.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An amount of money in millionths of a dollar. There is no negative one, and no fraction of one: what is computed is rounded
/// up, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Micros(pub u64);

impl Micros {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// Both together; the most that can be told if that is more.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// What is left of this without `other`; nothing if that is more.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Micros {
    /// As dollars, with all six digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "${}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_never_wraps_and_is_told_to_the_last_digit() {
        assert_eq!(Micros(u64::MAX).and(Micros(1)), Micros(u64::MAX));
        assert_eq!(Micros(1).without(Micros(2)), Micros::ZERO);
        assert_eq!(Micros(40_000).to_string(), "$0.040000");
        assert_eq!(Micros(12_000_001).to_string(), "$12.000001");
        assert_eq!(serde_json::to_string(&Micros(7)).unwrap(), "7");
        assert!(serde_json::from_str::<Micros>("-1").is_err());
        assert!(serde_json::from_str::<Micros>("1.5").is_err());
    }
}
