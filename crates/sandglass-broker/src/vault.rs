//! Secrets at rest: sealed with a key that is not beside them, and each for its one place.

use std::fmt;

use chacha20poly1305::aead::{Aead as _, Generate as _, KeyInit as _, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

use crate::Secret;

/// Length of the key, in bytes.
pub const KEY: usize = 32;

const NONCE: usize = 24;

/// What stands before the rest. Another form would have another number.
const FORM: u8 = 1;

/// Seals and opens secrets (XChaCha20-Poly1305, a nonce by chance for each).
#[derive(Clone)]
pub struct Vault(XChaCha20Poly1305);

/// What is sealed can't be opened: it was changed, was sealed with another key, or for another place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a secret can't be opened: it was sealed with another key or for something else, or was changed")]
pub struct Unopened;

impl fmt::Debug for Vault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Vault")
    }
}

impl Vault {
    /// One with this key.
    #[must_use]
    pub fn new(key: &[u8; KEY]) -> Self {
        Self(XChaCha20Poly1305::new(key.into()))
    }

    /// Seals a secret for a place: it can be opened for that one alone, so that whoever can write rows can't have one team's secret
    /// sent to the host of another's.
    ///
    /// # Errors
    /// The machine gives no randomness.
    pub fn seal(&self, secret: &Secret, place: &str) -> Result<Vec<u8>, Unopened> {
        let nonce = XNonce::try_generate().map_err(|_| Unopened)?;
        let payload = Payload { msg: secret.expose().as_bytes(), aad: place.as_bytes() };
        let sealed = self.0.encrypt(&nonce, payload).map_err(|_| Unopened)?;
        Ok([&[FORM], nonce.as_slice(), &sealed].concat())
    }

    /// Opens what was sealed for this place.
    ///
    /// # Errors
    /// [`Unopened`].
    pub fn open(&self, sealed: &[u8], place: &str) -> Result<Secret, Unopened> {
        let (&FORM, rest) = sealed.split_first().ok_or(Unopened)? else { return Err(Unopened) };
        let (nonce, sealed) = rest.split_first_chunk::<NONCE>().ok_or(Unopened)?;
        let payload = Payload { msg: sealed, aad: place.as_bytes() };
        let opened = self.0.decrypt(nonce.into(), payload).map_err(|_| Unopened)?;
        String::from_utf8(opened).map_err(|_| Unopened)?.parse().map_err(|_| Unopened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_opened_for_its_place_with_its_key_alone() {
        let (vault, other) = (Vault::new(&[1; KEY]), Vault::new(&[2; KEY]));
        let secret: Secret = "a secret of a team".parse().unwrap();
        let sealed = vault.seal(&secret, "team a, github, https://api.test").unwrap();
        assert!(!sealed.windows(6).any(|part| part == b"secret"));
        assert_ne!(
            sealed,
            vault.seal(&secret, "team a, github, https://api.test").unwrap(),
            "a nonce came twice"
        );
        assert_eq!(
            vault.open(&sealed, "team a, github, https://api.test").unwrap().expose(),
            secret.expose()
        );
        assert!(vault.open(&sealed, "team b, github, https://api.test").is_err());
        assert!(other.open(&sealed, "team a, github, https://api.test").is_err());
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(vault.open(&changed, "team a, github, https://api.test").is_err(), "{at}");
            assert!(vault.open(&sealed[..at], "team a, github, https://api.test").is_err(), "{at}");
        }
        assert_eq!(format!("{vault:?}"), "Vault");
    }
}
