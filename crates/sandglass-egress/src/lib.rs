//! What may leave a sandbox.
//!
//! A sandbox's packets end in its airlock, at sockets that this crate serves. What becomes of them is decided by one pure
//! function over the sandbox's [`policy`]; the rest carries the decision out ([`dns`]).
#![forbid(unsafe_code)]

pub mod dns;
pub mod policy;
