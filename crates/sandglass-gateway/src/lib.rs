//! Calls of models out of sandboxes.
//!
//! A sandbox that was granted a budget reaches this under a name of its own, over a connection that says which sandbox it is
//! ([`serve`]). What it sends is judged by the pure functions of `sandglass_models`; the money is set aside in one statement of the
//! store before anything goes on, and what the provider says was used is charged before the client hears the end. The provider's key is
//! added here, and nothing that comes back carries it in.
//!
//! From the moment at which money is set aside, a call is a task of its own: whatever becomes of its client, it is heard to its end and
//! settled.
#![forbid(unsafe_code)]

mod answer;
mod call;
pub mod config;
mod headers;
mod inlet;
mod lanes;
mod patient;
mod pool;
mod provider;
mod relay;
mod route;
mod serve;
mod shape;
mod tables;
mod witness;

pub use config::{Config, Key, Limits, Provider, Waits};
pub use provider::BadProvider;
pub use serve::Gateway;
pub use witness::{Answered, Asked, Nobody, Witness};
