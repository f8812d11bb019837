//! What people call their teams and keys.

use std::fmt;
use std::str::FromStr;

use crate::KeyId;

/// The most bytes of a [`Name`].
pub const MAX_NAME: usize = 64;

/// The name of a team or key, for people: 1 to [`MAX_NAME`] bytes. It appears in terminals and logs, so it has no control
/// characters and no blank at its ends, and it does not read as an id, which it could be taken for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(Box<str>);

/// A text that is no [`Name`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// It is too long, empty, or not plain.
    #[error("a name has 1 to {MAX_NAME} bytes, no control characters, and no blank at its ends")]
    Malformed,
    /// It reads as a UUID.
    #[error("a name must not look like an id")]
    LikeAnId,
}

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let plain = (1..=MAX_NAME).contains(&text.len()) && !text.contains(char::is_control);
        if !plain || text.trim() != text {
            return Err(InvalidName::Malformed);
        }
        if text.parse::<KeyId>().is_ok() {
            return Err(InvalidName::LikeAnId);
        }
        Ok(Self(text.into()))
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0.into()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_can_be_shown_and_is_no_id() {
        for good in ["a", "ci", "Zo\u{eb}'s laptop", &"x".repeat(MAX_NAME)] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        for bad in ["", " a", "a ", "a\nb", "\u{1b}[2J", "\u{9d}", &"x".repeat(MAX_NAME + 1)] {
            assert_eq!(bad.parse::<Name>(), Err(InvalidName::Malformed), "{bad:?}");
        }
        for id in [KeyId::random().to_string(), "{67e55044-10b1-426f-9247-bb680e5fe0c8}".into()] {
            assert_eq!(id.parse::<Name>(), Err(InvalidName::LikeAnId), "{id}");
        }
    }
}
