//! Content addresses.

use std::fmt;
use std::str::FromStr;

use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};

/// A SHA-256 digest that names an immutable thing in the cache folder: a root file system, a guest binary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

/// A text that is not 64 lower-case hex digits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a digest: expected 64 lower-case hex digits")]
pub struct InvalidDigest;

impl Digest {
    /// From the raw output of the hash.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let bytes = HEXLOWER.decode(text.as_bytes()).map_err(|_| InvalidDigest)?;
        bytes.try_into().map(Self).map_err(|_| InvalidDigest)
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Self, InvalidDigest> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        HEXLOWER.encode_display(&self.0).fmt(f)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_nothing_else_parses() {
        let digest = Digest::from_bytes([0xab; 32]);
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for text in ["", "ab", "../../../etc", &"AB".repeat(32), &"ab".repeat(33)] {
            assert_eq!(text.parse::<Digest>(), Err(InvalidDigest), "{text:?}");
        }
    }
}
