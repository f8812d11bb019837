//! What may leave a sandbox.
//!
//! A sandbox's packets end in its airlock, at sockets that this crate serves. What becomes of them is decided by one pure
//! function over the sandbox's [`policy`]; the rest reads what must be known to decide ([`bindings`], [`tls`], [`http`]),
//! carries the decision out ([`dns`]), and records it ([`receipt`]).
#![forbid(unsafe_code)]

pub mod bindings;
pub mod dns;
pub mod enforcer;
pub mod http;
pub mod policy;
pub mod receipt;
pub mod resolver;
pub mod tls;
