//! The value of a credential, and what it is called.

use std::fmt;
use std::str::FromStr;

use sandglass_types::SecretId;
use secrecy::{ExposeSecret as _, SecretString};

/// Longest name of a secret, in bytes.
pub const MAX_SECRET_NAME: usize = 256;

/// What a team calls a secret. A placeholder has it between braces, so it has none; it is shown, so it has no control characters; and
/// it does not read as an id, which it could be taken for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretName(Box<str>);

/// A text that is no [`SecretName`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a secret's name has 1 to {MAX_SECRET_NAME} bytes, no braces, no control characters, and is no id")]
pub struct InvalidSecretName;

impl SecretName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SecretName {
    type Err = InvalidSecretName;

    fn from_str(text: &str) -> Result<Self, InvalidSecretName> {
        let plain = !text.contains(|c: char| c.is_control() || matches!(c, '{' | '}'));
        let short = (1..=MAX_SECRET_NAME).contains(&text.len());
        if plain && short && text.parse::<SecretId>().is_err() {
            Ok(Self(text.into()))
        } else {
            Err(InvalidSecretName)
        }
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The fewest bytes of a secret: what is shorter is found in answers by accident, and would be taken out of them.
pub const MIN_SECRET: usize = 8;

/// The most bytes of a secret.
pub const MAX_SECRET: usize = 4096;

/// The value of a credential: printable ASCII, as headers carry it, with no blank at its ends. It is not shown by `Debug`, and is
/// overwritten where it is dropped.
#[derive(Clone)]
pub struct Secret(SecretString);

/// A text that is no [`Secret`]. It does not repeat it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a secret has {MIN_SECRET} to {MAX_SECRET} bytes of printable ASCII, and no blank at its ends")]
pub struct InvalidSecret;

impl Secret {
    /// The value, for the moment in which it is needed.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }
}

impl FromStr for Secret {
    type Err = InvalidSecret;

    fn from_str(text: &str) -> Result<Self, InvalidSecret> {
        let plain = text.bytes().all(|byte| matches!(byte, b' '..=b'~')) && text.trim() == text;
        if plain && (MIN_SECRET..=MAX_SECRET).contains(&text.len()) {
            Ok(Self(SecretString::from(text)))
        } else {
            Err(InvalidSecret)
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_between_the_braces_of_a_placeholder() {
        let longest = "x".repeat(MAX_SECRET_NAME);
        for good in ["a", "openai-api-key", "Zo\u{eb}'s key", " ", longest.as_str()] {
            assert_eq!(good.parse::<SecretName>().unwrap().as_str(), good);
        }
        let (long, id) = ("x".repeat(MAX_SECRET_NAME + 1), SecretId::random().to_string());
        for bad in ["", "a}", "{a", "a\nb", "\u{9d}", long.as_str(), id.as_str()] {
            assert_eq!(bad.parse::<SecretName>(), Err(InvalidSecretName), "{bad:?}");
        }
    }

    #[test]
    fn a_secret_is_what_a_header_can_carry_and_never_shown() {
        let secret: Secret = "hunter22 and more".parse().unwrap();
        assert_eq!(secret.expose(), "hunter22 and more");
        assert_eq!(format!("{secret:?}"), "Secret");
        for wrong in
            ["", "1234567", " 12345678", "12345678\n", "1234\r\n5678", "schlüssel", &"x".repeat(4097)]
        {
            assert!(wrong.parse::<Secret>().is_err(), "{wrong:?}");
        }
        assert!(!InvalidSecret.to_string().contains("hunter"));
    }
}
