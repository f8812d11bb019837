//! The product on the engine that isolates nothing: a real store, the real line to the host, real agents, and a clock
//! that the test sets. `SANDGLASS_GUEST` names the agent. Where sandboxes are written to images, the agents are scripts.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs, reason = "test code")]

#[path = "control/ahead.rs"]
mod ahead;
#[path = "control/bounds.rs"]
mod bounds;
#[path = "control/broker.rs"]
mod broker;
#[path = "control/clock.rs"]
mod clock;
#[path = "control/cold.rs"]
mod cold;
#[path = "control/copies.rs"]
mod copies;
#[path = "control/fixture.rs"]
mod fixture;
#[path = "control/lifecycle.rs"]
mod lifecycle;
#[path = "control/models.rs"]
mod models;
#[path = "control/policy.rs"]
mod policy;
#[path = "control/pools.rs"]
mod pools;
#[path = "control/restart.rs"]
mod restart;
#[path = "control/scripted.rs"]
mod scripted;
#[path = "control/templates.rs"]
mod templates;
#[path = "control/trouble.rs"]
mod trouble;
#[path = "control/troubled.rs"]
mod troubled;
#[path = "control/volumes.rs"]
mod volumes;
