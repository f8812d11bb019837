//! Child processes: starting them after kernel set-up, waiting for them, and telling one from another.
//!
//! A process that adopts orphans ([`adopt_orphans`]) has exactly one place that calls `wait`, so nothing in it
//! may use [`std::process::Command`]: use [`run`] and [`spawn`].

mod children;
mod identity;
mod launch;
mod leisure;
mod run;
mod slice;
mod table;
mod threads;
mod urgent;

pub use children::{Child, ExitStatus, Watch, adopt_orphans, spawn, watch};
pub use identity::{PidFd, ProcessIdentity, boot_id};
pub use launch::{Launch, LaunchError, Step};
pub use leisure::at_leisure;
pub use run::{Output, RunError, run};
pub use rustix::process::Signal;
pub use slice::{SHORTEST_SLICE, set_slice};
pub use table::{Entry, environment, is_stopped, resident_bytes, table};
pub use threads::{Cpus, DEFAULT_TIMER_SLACK, set_timer_slack};
pub use urgent::become_urgent;
