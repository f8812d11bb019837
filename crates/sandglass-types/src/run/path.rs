//! Paths within the folder of a run, and patterns of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest path or pattern, in bytes.
pub const MAX_PATH: usize = 512;

/// Longest part of one, in bytes (`NAME_MAX`).
const MAX_PART: usize = 255;

/// A file below [`super::PROJECT`]: relative, without `.`, `..`, empty parts and control characters, of at most [`MAX_PATH`] bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ProjectPath(Box<str>);

/// Which files are wanted: a [`ProjectPath`] whose parts may have `*`, `?` and `[…]`, or be `**`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern(Box<str>);

/// Not a [`ProjectPath`], and no [`Pattern`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be relative to the project's folder: at most {MAX_PATH} bytes, without '.', '..', control characters, '\\' and parts of \
     more than {MAX_PART} bytes"
)]
pub struct InvalidPath;

fn is_plain(text: &str) -> bool {
    let plain = |part: &str| {
        !matches!(part, "" | "." | "..")
            && part.len() <= MAX_PART
            && !part.chars().any(|c| c.is_control() || c == '\\')
    };
    text.len() <= MAX_PATH && text.split('/').all(plain)
}

macro_rules! relative {
    ($name:ident) => {
        impl $name {
            /// It as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidPath;

            fn from_str(text: &str) -> Result<Self, InvalidPath> {
                if is_plain(text) { Ok(Self(text.into())) } else { Err(InvalidPath) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidPath;

            fn try_from(text: String) -> Result<Self, InvalidPath> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(path: $name) -> Self {
                path.0.into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

relative!(ProjectPath);
relative!(Pattern);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_path_stays_in_its_folder() {
        for good in ["a", "index.html", "a/b c/\u{fc}", ".hidden/x", "a..b", &"x".repeat(255)] {
            assert_eq!(good.parse::<ProjectPath>().map(|path| path.to_string()).as_deref(), Ok(good));
        }
        let long = ["x".repeat(256), ["x"; 300].join("/")];
        for bad in [
            "", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\nb", "a\0", "a\\b", &long[0],
            &long[1],
        ] {
            assert_eq!(bad.parse::<ProjectPath>(), Err(InvalidPath), "{bad:?}");
        }
        assert!("**/*.js".parse::<Pattern>().is_ok() && "/etc/*".parse::<Pattern>().is_err());
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_relative(text in "/?(\\PC{0,6}/){0,4}\\PC{0,6}") {
            if let Ok(path) = text.parse::<ProjectPath>() {
                prop_assert!(path.as_str().split('/').all(|part| !matches!(part, "" | "." | "..")));
            }
        }
    }
}
