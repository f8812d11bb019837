//! The people that an application has sandboxes for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most bytes of a [`UserName`].
pub const MAX_USER_NAME: usize = 128;

/// What an application calls one of its people: its own words, which mean nothing here. From 1 to [`MAX_USER_NAME`] bytes,
/// without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct UserName(Box<str>);

/// A text that is no [`UserName`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a valid user: expected 1 to {MAX_USER_NAME} bytes without control characters")]
pub struct InvalidUserName;

impl UserName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for UserName {
    type Err = InvalidUserName;

    fn from_str(text: &str) -> Result<Self, InvalidUserName> {
        let fits = (1..=MAX_USER_NAME).contains(&text.len()) && !text.contains(char::is_control);
        if fits { Ok(Self(text.into())) } else { Err(InvalidUserName) }
    }
}

impl TryFrom<String> for UserName {
    type Error = InvalidUserName;

    fn try_from(text: String) -> Result<Self, InvalidUserName> {
        text.parse()
    }
}

impl From<UserName> for String {
    fn from(name: UserName) -> Self {
        name.0.into()
    }
}

impl fmt::Display for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_any_short_text_that_can_be_shown() {
        for good in ["a", "auth0|5f7c", "Zo\u{eb} / Q&A", &"x".repeat(MAX_USER_NAME)] {
            assert_eq!(good.parse::<UserName>().unwrap().as_str(), good);
        }
        for bad in ["", "a\nb", "a\0", "\u{1b}[2J", &"x".repeat(MAX_USER_NAME + 1)] {
            assert_eq!(bad.parse::<UserName>(), Err(InvalidUserName), "{bad:?}");
        }
    }
}
