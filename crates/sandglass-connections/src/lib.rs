//! Requests of sandboxes to services, with credentials that they never see.
//!
//! A sandbox that was granted a connection reaches this under a name of its own, over a stream that says which sandbox it is ([`serve`]).
//! Whether a request may go on is decided by the pure functions of `sandglass_broker`; what goes on is what was judged ([`request`]),
//! to where the connection leads and nowhere else ([`upstream`]). On its way back the credential is taken out of the answer, and so is what
//! is about the account that it belongs to ([`answer`]). No redirect is followed. Each use has a receipt among those of the sandbox.
#![forbid(unsafe_code)]

mod answer;
mod grants;
mod limit;
mod request;
mod serve;
mod upstream;

pub use grants::{Granted, Grants, Reach, Use};
pub use serve::Connections;
