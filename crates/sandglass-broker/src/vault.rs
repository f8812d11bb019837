//! Secrets at rest: sealed with a key that is not beside them, and each for its one place.

use std::fmt;

use chacha20poly1305::aead::{Aead as _, Generate as _, KeyInit as _, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

use sandglass_types::TeamId;

use crate::connection::Target;
use crate::{ConnectionName, Secret, SecretName};

/// Length of the key, in bytes.
pub const KEY: usize = 32;

const NONCE: usize = 24;

/// What stands before the rest. Another form would have another number.
const FORM: u8 = 1;

/// Seals and opens secrets (XChaCha20-Poly1305, a nonce by chance for each).
#[derive(Clone)]
pub struct Vault(XChaCha20Poly1305);

/// What a secret is sealed for. It can be opened for that alone, so that whoever can write rows can't have one team's secret sent to the
/// host of another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// A secret of this team, of this name.
    Secret(TeamId, &'a SecretName),
    /// The credential of a connection of this team, of this name, that leads there.
    Connection(TeamId, &'a ConnectionName, &'a Target),
    /// Nothing but to tell one key from another.
    Check,
}

impl fmt::Display for Place<'_> {
    /// One line for each part, and no part has a line end in it, so no two places read the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret(team, name) => write!(f, "secret\n{team}\n{name}"),
            Self::Connection(team, name, target) => write!(f, "connection\n{team}\n{name}\n{target}"),
            Self::Check => f.write_str("check"),
        }
    }
}

/// What is sealed to tell keys apart. It is no secret.
const CHECKED: &str = "sandglass master key";

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

    /// Seals a secret for a place.
    ///
    /// # Errors
    /// The machine gives no randomness.
    pub fn seal(&self, secret: &Secret, place: Place<'_>) -> Result<Vec<u8>, Unopened> {
        let nonce = XNonce::try_generate().map_err(|_| Unopened)?;
        let place = place.to_string();
        let payload = Payload { msg: secret.expose().as_bytes(), aad: place.as_bytes() };
        let sealed = self.0.encrypt(&nonce, payload).map_err(|_| Unopened)?;
        Ok([&[FORM], nonce.as_slice(), &sealed].concat())
    }

    /// Opens what was sealed for this place.
    ///
    /// # Errors
    /// [`Unopened`].
    pub fn open(&self, sealed: &[u8], place: Place<'_>) -> Result<Secret, Unopened> {
        let (&FORM, rest) = sealed.split_first().ok_or(Unopened)? else { return Err(Unopened) };
        let (nonce, sealed) = rest.split_first_chunk::<NONCE>().ok_or(Unopened)?;
        let place = place.to_string();
        let payload = Payload { msg: sealed, aad: place.as_bytes() };
        let opened = self.0.decrypt(nonce.into(), payload).map_err(|_| Unopened)?;
        String::from_utf8(opened).map_err(|_| Unopened)?.parse().map_err(|_| Unopened)
    }

    /// What another vault can tell from whether it has the same key.
    ///
    /// # Errors
    /// The machine gives no randomness.
    pub fn mark(&self) -> Result<Vec<u8>, Unopened> {
        self.seal(&CHECKED.parse().map_err(|_| Unopened)?, Place::Check)
    }

    /// Whether what [`Vault::mark`] made is of a vault with the same key.
    #[must_use]
    pub fn made(&self, mark: &[u8]) -> bool {
        self.open(mark, Place::Check).is_ok_and(|mark| mark.expose() == CHECKED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_opened_for_its_place_with_its_key_alone() {
        let (vault, other) = (Vault::new(&[1; KEY]), Vault::new(&[2; KEY]));
        let secret: Secret = "a secret of a team".parse().unwrap();
        let (team, github): (_, ConnectionName) = (TeamId::random(), "github".parse().unwrap());
        let [target, clear, elsewhere] = ["https://api.test", "http://api.test", "https://api.test:444"]
            .map(|target| target.parse::<Target>().unwrap());
        let place = Place::Connection(team, &github, &target);
        let sealed = vault.seal(&secret, place).unwrap();
        assert!(!sealed.windows(6).any(|part| part == b"secret"));
        assert_ne!(sealed, vault.seal(&secret, place).unwrap(), "a nonce came twice");
        assert_eq!(vault.open(&sealed, place).unwrap().expose(), secret.expose());
        assert!(other.open(&sealed, place).is_err());
        let (gitlab, named) = ("gitlab".parse().unwrap(), "github".parse().unwrap());
        for place in [
            Place::Connection(TeamId::random(), &github, &target),
            Place::Connection(team, &gitlab, &target),
            Place::Connection(team, &github, &clear),
            Place::Connection(team, &github, &elsewhere),
            Place::Secret(team, &named),
            Place::Check,
        ] {
            assert!(vault.open(&sealed, place).is_err(), "{place:?}");
        }
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(vault.open(&changed, place).is_err(), "{at}");
            assert!(vault.open(&sealed[..at], place).is_err(), "{at}");
        }
        assert_eq!(format!("{vault:?}"), "Vault");
    }

    #[test]
    fn a_key_is_told_from_another() {
        let (vault, other) = (Vault::new(&[1; KEY]), Vault::new(&[2; KEY]));
        let mark = vault.mark().unwrap();
        assert!(Vault::new(&[1; KEY]).made(&mark));
        assert!(!other.made(&mark));
        assert!(!vault.made(&[]));
        let secret = vault.seal(&"another secret".parse().unwrap(), Place::Check).unwrap();
        assert!(!vault.made(&secret));
    }
}
