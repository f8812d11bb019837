//! Engines isolate sandboxes; the privileged *host* process runs them.
//!
//! Everything here runs as root, so it stays small, parses nothing that a guest or a client wrote, and takes only
//! validated types.
#![forbid(unsafe_code)]

pub mod collect;
pub mod deadline;
pub mod engine;
pub mod fake;
mod files;
mod footprint;
pub mod gvisor;
pub mod host;
mod locks;
pub mod network;
mod record;
mod session;
mod side_by_side;
pub mod volume;

pub use engine::{Engine, EngineError, EngineInfo, Exit, Feature, Isolation, Keep, SandboxSpec, Stats};
pub use footprint::{Footprint, Footprints};
