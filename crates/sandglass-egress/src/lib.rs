//! What may leave a sandbox.
//!
//! A sandbox's packets end in its airlock, at sockets that this crate serves. What becomes of them is decided by one pure
//! function over the sandbox's [`policy`]; the rest reads what must be known to decide ([`bindings`], [`tls`], [`http`],
//! [`resolver`]), carries the decision out ([`enforcer`], `dns`, [`proxy`], [`filter_log`]), and records it ([`receipt`], [`ledger`]).
#![forbid(unsafe_code)]

pub mod bindings;
mod dns;
pub mod enforcer;
pub mod filter_log;
pub mod http;
pub mod ledger;
pub mod policy;
#[cfg(any(test, fuzzing))]
pub mod properties;
pub mod proxy;
pub mod receipt;
pub mod remembered;
pub mod resolver;
pub mod retention;
pub mod tls;
pub mod totals;

#[cfg(test)]
mod fixture;
