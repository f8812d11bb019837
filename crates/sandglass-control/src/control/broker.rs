//! What an operator decides of secrets and connections.

use std::collections::BTreeMap;
use std::sync::Arc;

use sandglass_broker::connection::Written;
use sandglass_broker::vault::{KEY, Unopened};
use sandglass_broker::{Connection, ConnectionName, Secret, Vault};
use sandglass_types::Error;

/// The most connections that one sandbox may be granted.
pub const MAX_GRANTED: usize = 16;

/// What an operator decides of secrets and connections. Clones share everything.
#[derive(Debug, Clone)]
pub struct Broker {
    /// Seals what teams keep.
    pub(crate) vault: Vault,
    /// Connections that sandboxes of every team may be granted.
    pub(crate) own: Arc<BTreeMap<ConnectionName, OwnConnection>>,
}

/// A connection of the operator's.
#[derive(Debug, Clone)]
pub struct OwnConnection {
    /// As it was written down.
    pub written: Written,
    /// The same, to be used.
    pub connection: Connection,
    /// Its credential.
    pub credential: Secret,
}

impl Broker {
    /// One that seals with this key.
    #[must_use]
    pub fn new(key: &[u8; KEY], own: impl IntoIterator<Item = OwnConnection>) -> Self {
        let own = own.into_iter().map(|own| (own.connection.name.clone(), own)).collect();
        Self { vault: Vault::new(key), own: Arc::new(own) }
    }

    /// What another start can tell from whether it has the same key.
    ///
    /// # Errors
    /// The machine gives no randomness.
    pub fn mark(&self) -> Result<Vec<u8>, Unopened> {
        self.vault.mark()
    }

    /// Whether what [`Broker::mark`] made is of one with the same key.
    #[must_use]
    pub fn made(&self, mark: &[u8]) -> bool {
        self.vault.made(mark)
    }
}

/// What the log says of something that can't be sealed or opened.
pub(super) fn vault(error: Unopened) -> Error {
    Error::internal("a secret can't be sealed or opened; the server's log says why", error)
}
