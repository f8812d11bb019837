//! What a sandbox has in place of a provider's key: a token that says what it is worth, and is worth nothing elsewhere.
//!
//! It is signed and not looked up, so that a call needs one statement of the store and no more; the money is not in it, but in the one
//! row that it names, and closing that row revokes it. It is good in its own sandbox alone, whose airlock the call must come from.

use std::fmt;

use data_encoding::BASE64URL_NOPAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sandglass_types::{BudgetId, SandboxId, Timestamp};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::dialect::Dialect;

/// What it begins with, so that whoever searches for secrets can find it.
const PREFIX: &str = "sgm_";

/// Longest token that is looked at, in bytes.
const MAX_LEN: usize = 8 << 10;

/// What is signed before the rest. Another form would have another number.
const FORM: &[u8] = b"sandglass model token 1\n";

/// What a token says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// The row that pays.
    pub budget: BudgetId,
    /// The sandbox that may use it.
    pub sandbox: SandboxId,
    /// In which protocols.
    pub dialects: Vec<Dialect>,
    /// Which models, by what they are called here.
    pub models: Vec<String>,
    /// Until when.
    pub expires: Timestamp,
}

/// Why a token opens nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// It was not made here, or was changed.
    #[error("this is no token of this server's")]
    Unknown,
    /// Its time is over.
    #[error("this token has expired")]
    Expired,
    /// It is another sandbox's.
    #[error("this token is another sandbox's")]
    Elsewhere,
    /// It is for other protocols.
    #[error("this token is not for this route")]
    Dialect,
    /// It is for other models.
    #[error("this token is not for this model")]
    Model,
}

/// A token of this server's that has not expired, of which nothing is told before it is known where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened(Claims);

/// Makes tokens, and knows them again.
#[derive(Clone)]
pub struct Signer([u8; 32]);

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signer")
    }
}

impl Signer {
    /// One with this secret.
    #[must_use]
    pub const fn new(secret: [u8; 32]) -> Self {
        Self(secret)
    }

    fn mac(&self, claims: &[u8]) -> Result<Hmac<Sha256>, TokenError> {
        // A key of any length is right.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).map_err(|_| TokenError::Unknown)?;
        mac.update(FORM);
        mac.update(claims);
        Ok(mac)
    }

    /// A token that says this.
    ///
    /// # Errors
    /// The claims can't be written, or are longer than what is looked at.
    pub fn mint(&self, claims: &Claims) -> Result<String, TokenError> {
        let claims = serde_json::to_vec(claims).map_err(|_| TokenError::Unknown)?;
        let signature = self.mac(&claims)?.finalize().into_bytes();
        let token =
            format!("{PREFIX}{}.{}", BASE64URL_NOPAD.encode(&claims), BASE64URL_NOPAD.encode(&signature));
        if token.len() > MAX_LEN { Err(TokenError::Unknown) } else { Ok(token) }
    }

    /// Opens a token that has not expired. It takes no look into the store, so that whoever sends nonsense costs nobody one.
    ///
    /// # Errors
    /// [`TokenError::Unknown`], [`TokenError::Expired`]. Nothing of it is read before the signature is known to be right.
    pub fn open(&self, token: &str, now: Timestamp) -> Result<Opened, TokenError> {
        let claims = self.signed(token).ok_or(TokenError::Unknown)?;
        let claims: Claims = serde_json::from_slice(&claims).map_err(|_| TokenError::Unknown)?;
        if claims.expires <= now {
            return Err(TokenError::Expired);
        }
        Ok(Opened(claims))
    }

    fn signed(&self, token: &str) -> Option<Vec<u8>> {
        if token.len() > MAX_LEN {
            return None;
        }
        let (claims, signature) = token.strip_prefix(PREFIX)?.split_once('.')?;
        let decode = |text: &str| BASE64URL_NOPAD.decode(text.as_bytes()).ok();
        let (claims, signature) = (decode(claims)?, decode(signature)?);
        // It takes the same time for every signature.
        self.mac(&claims).ok()?.verify_slice(&signature).ok()?;
        Some(claims)
    }
}

impl Opened {
    /// What it says, if it was made for this sandbox.
    ///
    /// # Errors
    /// [`TokenError::Elsewhere`].
    pub fn of(self, sandbox: &SandboxId) -> Result<Claims, TokenError> {
        if self.0.sandbox == *sandbox { Ok(self.0) } else { Err(TokenError::Elsewhere) }
    }
}

impl Claims {
    /// Lets a call pass that the token is for. `model` is its own name, and no alias.
    ///
    /// # Errors
    /// [`TokenError::Dialect`], [`TokenError::Model`].
    pub fn allow(&self, dialect: Dialect, model: &str) -> Result<(), TokenError> {
        if !self.dialects.contains(&dialect) {
            return Err(TokenError::Dialect);
        }
        if self.models.iter().any(|allowed| allowed == model) { Ok(()) } else { Err(TokenError::Model) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn claims() -> Claims {
        Claims {
            budget: BudgetId::random(),
            sandbox: SandboxId::random(),
            dialects: vec![Dialect::Messages],
            models: vec!["large".into()],
            expires: Timestamp::from_millis(1000),
        }
    }

    #[test]
    fn a_token_is_good_in_its_sandbox_until_it_expires() {
        let (signer, claims) = (Signer::new([7; 32]), claims());
        let token = signer.mint(&claims).unwrap();
        let open = |signer: &Signer, from: &SandboxId, at: i64| {
            signer.open(&token, Timestamp::from_millis(at)).and_then(|opened| opened.of(from))
        };
        assert_eq!(open(&signer, &claims.sandbox, 999), Ok(claims.clone()));
        assert_eq!(open(&signer, &claims.sandbox, 1000), Err(TokenError::Expired));
        assert_eq!(open(&signer, &SandboxId::random(), 0), Err(TokenError::Elsewhere));
        assert_eq!(open(&Signer::new([8; 32]), &claims.sandbox, 0), Err(TokenError::Unknown));
        assert_eq!(claims.allow(Dialect::Messages, "large"), Ok(()));
        assert_eq!(claims.allow(Dialect::Chat, "large"), Err(TokenError::Dialect));
        assert_eq!(claims.allow(Dialect::Messages, "larger"), Err(TokenError::Model));
        assert!(!format!("{signer:?}").contains('7'));
        let many = Claims { models: vec!["m".repeat(100); 100], ..claims };
        assert!(signer.mint(&many).is_err(), "nobody could open it");
    }

    proptest! {
        #[test]
        fn whatever_is_changed_in_it_makes_it_worthless(at: proptest::sample::Index, byte: u8) {
            let (signer, claims) = (Signer::new([7; 32]), claims());
            let token = signer.mint(&claims).unwrap();
            let mut changed = token.clone().into_bytes();
            let at = at.index(changed.len());
            changed[at] = byte;
            let Ok(changed) = String::from_utf8(changed) else { return Ok(()) };
            let opened = signer.open(&changed, Timestamp::from_millis(0));
            prop_assert_eq!(opened.is_ok(), changed == token);
        }
    }
}
