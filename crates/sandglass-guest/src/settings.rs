//! What the server configured: identity, secrets and defaults of this generation.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use sandglass_proto::control::Configure;
use subtle::ConstantTimeEq as _;

/// Processes of one user when nothing was configured.
pub(crate) const DEFAULT_MAX_PROCESSES: u32 = 1024;

/// One generation's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings(Configure);

impl Settings {
    /// Takes over a configuration.
    pub(crate) const fn new(configure: Configure) -> Self {
        Self(configure)
    }

    /// The generation that they belong to.
    pub(crate) const fn generation(&self) -> u32 {
        self.0.generation
    }

    /// Whose they are.
    pub(crate) fn sandbox_id(&self) -> &str {
        &self.0.sandbox_id
    }

    /// Whether `given` is the access token, if there is one at all. Takes the same time for every wrong token of
    /// the right length.
    pub(crate) fn allows(&self, given: Option<&[u8]>) -> bool {
        match (&self.0.access_token, given) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(token), Some(given)) => token.as_bytes().ct_eq(given).into(),
        }
    }

    /// The access token, for checking signatures.
    pub(crate) fn token(&self) -> Option<&str> {
        self.0.access_token.as_deref()
    }

    /// The user of requests that name none.
    pub(crate) fn default_user(&self) -> Option<&str> {
        Some(self.0.default_user.as_str()).filter(|user| !user.is_empty())
    }

    /// The directory of requests that name none, if it is not the user's home.
    pub(crate) fn default_workdir(&self) -> Option<&str> {
        self.0.default_workdir.as_deref().filter(|dir| !dir.is_empty())
    }

    /// Environment of every process: what the server set, and who the sandbox is.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        let mut env = self.0.env.clone();
        env.extend(self.identity());
        env
    }

    /// The part of the environment that says who the sandbox is, of which nothing is a client's choice.
    pub(crate) fn identity(&self) -> [(String, String); 3] {
        [
            ("E2B_SANDBOX".into(), "true".into()),
            ("E2B_SANDBOX_ID".into(), self.0.sandbox_id.clone()),
            ("E2B_TEMPLATE_ID".into(), self.0.template_id.clone()),
        ]
    }

    /// Limit on the processes of one unprivileged user.
    pub(crate) fn max_processes(&self) -> u32 {
        if self.0.max_processes == 0 { DEFAULT_MAX_PROCESSES } else { self.0.max_processes }
    }
}

/// The settings in force; none until the server has sent some.
#[derive(Debug, Default)]
pub(crate) struct Current(RwLock<Option<Arc<Settings>>>);

impl Current {
    /// The settings in force.
    pub(crate) fn get(&self) -> Option<Arc<Settings>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts settings into force.
    pub(crate) fn set(&self, settings: Settings) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(settings));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn configure(token: Option<&str>) -> Configure {
        Configure {
            generation: 1,
            sandbox_id: "s".into(),
            template_id: "base".into(),
            access_token: token.map(Into::into),
            default_user: "user".into(),
            default_workdir: Some(String::new()),
            env: BTreeMap::from([("E2B_SANDBOX_ID".into(), "forged".into())]),
            max_processes: 0,
        }
    }

    #[test]
    fn the_token_decides_unless_there_is_none() {
        let open = Settings::new(configure(None));
        assert!(open.allows(None) && open.allows(Some(b"whatever")));
        let closed = Settings::new(configure(Some("secret")));
        assert!(closed.allows(Some(b"secret")));
        for wrong in [None, Some(&b""[..]), Some(b"secre"), Some(b"secret2"), Some(b"Secret")] {
            assert!(!closed.allows(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn identity_wins_over_what_a_client_set() {
        assert_eq!(Settings::new(configure(None)).env()["E2B_SANDBOX_ID"], "s");
    }
}
