//! What may leave a sandbox.
//!
//! A sandbox's packets end in its airlock, at sockets that this crate serves. Decisions are pure functions
//! ([`decide`]); the rest carries them out. The policy so far is the empty one: nothing may leave. TCP is reset by
//! the airlock itself, so only DNS arrives here.
#![forbid(unsafe_code)]

pub mod decide;
pub mod dns;
