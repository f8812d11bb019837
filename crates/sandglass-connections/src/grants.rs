//! What the server knows of sandboxes, as far as it is needed here.

use std::fmt;

use async_trait::async_trait;
use sandglass_broker::{Connection, ConnectionName, Secret};
use sandglass_egress::policy::Effective;
use sandglass_types::{Error, SandboxId};

/// A connection that a sandbox may use now.
#[derive(Debug, Clone)]
pub struct Granted {
    /// What may be asked.
    pub connection: Connection,
    /// What is shown for it.
    pub credential: Secret,
    /// Where it may lead.
    pub reach: Reach,
}

/// Where a connection may lead.
#[derive(Debug, Clone)]
pub enum Reach {
    /// To where it says, whatever address that has: the operator wrote it.
    Trusted,
    /// To what the operator allows sandboxes, if they ask for everything: a team wrote it.
    Ceiling(Box<Effective>),
}

/// One request through a connection, when it is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// Through which.
    pub connection: ConnectionName,
    /// To which host; `None` if there is no such connection.
    pub host: Option<String>,
    /// With which method.
    pub method: String,
    /// The status that the sandbox heard.
    pub status: u16,
    /// Whether it went out.
    pub allowed: bool,
    /// Bytes of its body that went out.
    pub sent: u64,
    /// Bytes of the answer's body that came in.
    pub received: u64,
}

/// Who may use what.
#[async_trait]
pub trait Grants: fmt::Debug + Send + Sync {
    /// The connection of this name, if the sandbox was granted it and it is there. Asked for every request, so that what is taken
    /// away is not used any more.
    ///
    /// # Errors
    /// Nobody can tell.
    async fn granted(&self, sandbox: &SandboxId, name: &ConnectionName) -> Result<Option<Granted>, Error>;

    /// Writes down a use, among the receipts of the sandbox.
    fn used(&self, sandbox: &SandboxId, of: &Use);
}
