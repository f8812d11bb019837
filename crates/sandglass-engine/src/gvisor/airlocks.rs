//! What the engine needs of the network.

use std::error::Error;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use sandglass_types::SandboxId;

use crate::engine::AirlockSocket;

/// A failure of the network; the engine adds which step it was.
pub type AirlockError = Box<dyn Error + Send + Sync>;

/// Ends what a sandbox has of the network: all that is needed of it where sandboxes are only removed.
pub trait Release: Send + Sync + fmt::Debug {
    /// Ends its pair of namespaces; `Ok` if it has none.
    ///
    /// # Errors
    /// The kernel refused; call again.
    fn release(&self, id: &SandboxId) -> Result<(), AirlockError>;
}

/// Hands each sandbox a pair of network namespaces: the inner one it runs in, the outer one, its airlock, that ends
/// at the server's sockets.
pub trait Airlocks: Release {
    /// Gives a sandbox its pair and says where the inner namespace is pinned. The same pair again if it has one.
    ///
    /// # Errors
    /// None could be made.
    fn assign(&self, id: &SandboxId) -> Result<PathBuf, AirlockError>;

    /// Makes sockets in its airlock: all of them, in this order, or none.
    ///
    /// # Errors
    /// It has no airlock, or the kernel refused.
    fn sockets(&self, id: &SandboxId, sockets: &[AirlockSocket]) -> Result<Vec<OwnedFd>, AirlockError>;

    /// Whether what the packet filters of airlocks hold up is logged.
    fn logs(&self) -> bool;

    /// Opens the guest's interface for an engine that brings its own network stack: a packet socket on `eth0` of the
    /// inner namespace, which loses its own address there. See [`sandglass_linux::packet`].
    ///
    /// # Errors
    /// It has no pair, or the kernel refused.
    fn guest_link(&self, id: &SandboxId) -> Result<OwnedFd, AirlockError>;

    /// Who has one, read from the kernel.
    ///
    /// # Errors
    /// It could not be read.
    fn assigned(&self) -> Result<Vec<SandboxId>, AirlockError>;
}
