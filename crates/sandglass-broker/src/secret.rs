//! The value of a credential.

use std::fmt;
use std::str::FromStr;

use secrecy::{ExposeSecret as _, SecretString};

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
