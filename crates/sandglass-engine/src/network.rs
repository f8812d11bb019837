//! The network of a sandbox: one that ends at sockets of the server.
//!
//! A *slot* is two network namespaces joined by one pair of links. The inner one is the sandbox's own: `eth0`, with
//! the same addresses in every sandbox, so that a checkpoint fits every copy. The outer one, the *airlock*, has the
//! far end and nothing else: no second interface, no route, no forwarding. What arrives there and is not for a socket
//! that the server made in it has nowhere to go:
//!
//! ```text
//!  inner namespace              airlock
//!  eth0 10.11.12.2/30 ───────── 10.11.12.1/30   UDP and TCP port 53 of any address ─► sockets of the server
//!  default via 10.11.12.1                       TCP to 10.11.12.1:80 ─► a socket of the server
//!                                               TCP to other always-denied addresses ─► reset
//!                                               every other TCP ─► a socket of the server
//!                                               everything else ─► dropped
//! ```
//!
//! What is reset or dropped by its address is logged to a socket of the server as well, which writes it down.
//!
//! Where the server does not listen, or has died, a connection is reset: what is redirected has nowhere else to go.
//!
//! Nothing is kept in memory that could be lost: the names of the pins say which slots there are.

use std::io;

use sandglass_linux::nft::NftError;

mod assignments;
mod plan;
mod pool;
mod ruleset;
mod slot;

pub use assignments::{Assigned, Assignments};
pub use plan::{
    AIRLOCK_ADDRESS, AIRLOCK_MAC, AIRLOCK_NETWORK, DNS_PORT, EGRESS_PORT, GUEST_ADDRESS, GUEST_MAC,
    PREFIX_LEN, SlotName,
};
pub use pool::{DEFAULT_SIZE, Pool};
pub use ruleset::{Filter, ruleset};
pub use slot::{Slot, try_log};

/// A slot that could not be made, used or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// A text that no slot is named by.
    #[error("not the name of a network slot")]
    Name,
    /// A step failed.
    #[error("could not {step}")]
    Step {
        /// Which one.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The rules that seal it were not applied.
    #[error("could not seal the airlock")]
    Seal(#[from] NftError),
}

/// For `map_err`: says what was tried.
fn step<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> NetworkError {
    move |error| NetworkError::Step { step, source: error.into() }
}

#[cfg(test)]
mod tests;
