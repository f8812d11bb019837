//! New keys.

use data_encoding::HEXLOWER;
use rand::TryRng as _;
use sandglass_store::ApiKey;
use sandglass_types::{Error, KeyId, Name, TeamId, Timestamp};

/// What every secret begins with: E2B's SDKs check it.
pub const PREFIX: &str = "e2b_";

/// Random bytes in a secret.
const RANDOM_LEN: usize = 20;

/// Characters of a secret after its [`PREFIX`].
pub const VALUE_LEN: usize = 2 * RANDOM_LEN;

/// Characters of a secret that are kept, to tell keys apart. 144 of its 160 bits are left to guess.
const SUFFIX_LEN: usize = 4;

/// A new key that is in no store yet, and its secret, which is to be shown once and kept nowhere.
pub struct NewKey {
    /// The key.
    pub key: ApiKey,
    /// The secret.
    pub secret: String,
}

impl NewKey {
    /// Makes a key of a team, with a secret of the operating system's randomness.
    ///
    /// # Errors
    /// [`sandglass_types::ErrorKind::Internal`]: the system gave no random bytes.
    pub fn random(
        team: TeamId,
        name: Name,
        operator: bool,
        made_by: Option<KeyId>,
        now: Timestamp,
    ) -> Result<Self, Error> {
        let mut bytes = [0; RANDOM_LEN];
        rand::rngs::SysRng
            .try_fill_bytes(&mut bytes)
            .map_err(|error| Error::internal("the system gave no random bytes", error))?;
        let secret = format!("{PREFIX}{}", HEXLOWER.encode(&bytes));
        let key = ApiKey {
            id: KeyId::random(),
            team,
            name: name.into(),
            digest: ApiKey::digest_of(&secret),
            suffix: secret[secret.len() - SUFFIX_LEN..].to_owned(),
            operator,
            created_at: now,
            last_used_at: None,
            revoked_at: None,
            made_by,
        };
        Ok(Self { key, secret })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ_and_little_of_them_is_kept() {
        let now = Timestamp::from_millis(0);
        let made = [(); 2]
            .map(|()| NewKey::random(TeamId::random(), "a".parse().unwrap(), false, None, now).unwrap());
        for NewKey { key, secret } in &made {
            let value = secret.strip_prefix(PREFIX).unwrap();
            assert_eq!(value.len(), VALUE_LEN);
            assert!(value.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')), "{secret}");
            assert_eq!(key.digest, ApiKey::digest_of(secret));
            assert!(secret.ends_with(&key.suffix) && key.suffix.len() == 4);
            assert!(!format!("{key:?}").contains(value));
        }
        assert_ne!(made[0].secret, made[1].secret);
    }
}
