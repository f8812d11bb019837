//! The vocabulary that every other crate shares: ids, states, limits, budgets, names and addresses, the domain error and the
//! clock.
//!
//! Nothing here does I/O. A value of one of these types has been validated: parse once at the edge,
//! then pass the type.
#![forbid(unsafe_code)]

pub mod budget;
pub mod clock;
pub mod digest;
pub mod error;
pub mod id;
pub mod lifetime;
pub mod limits;
pub mod money;
pub mod name;
pub mod net;
pub mod reference;
pub mod run;
pub mod state;
pub mod user;
pub mod volume;

pub use clock::{Clock, SystemClock, Timestamp};
pub use digest::Digest;
pub use error::{Error, ErrorKind};
pub use id::{
    BudgetId, CallId, Generation, InstanceId, KeyId, NodeId, RunId, SandboxId, SecretId, SnapshotId, TeamId,
    VolumeId,
};
pub use lifetime::{Lifetime, OnTimeout, PauseMode, ResumeMode};
pub use limits::Limits;
pub use money::Micros;
pub use name::{InvalidName, MAX_NAME, Name};
pub use reference::Reference;
pub use run::{RunSandbox, RunStatus, StopReason};
pub use state::{EndReason, SandboxState};
pub use user::{InvalidUserName, MAX_USER_NAME, UserName};
pub use volume::{MountPath, VolumeMount, VolumeName};
