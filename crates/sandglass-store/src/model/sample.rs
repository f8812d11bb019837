//! What a sandbox used, and what a team had, at one time.

use std::time::Duration;

use sandglass_types::{SandboxId, Timestamp};

/// What was seen of a sandbox that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Of which one.
    pub sandbox: SandboxId,
    /// When. A sandbox has one for each millisecond at most.
    pub at: Timestamp,
    /// How much of all its processors it had since it was seen before, in per mille: 0 to 1000.
    pub cpu_per_mille: u16,
    /// Memory in use, in bytes, the engine's own included.
    pub memory_bytes: u64,
    /// Bytes of its disk that hold data.
    pub disk_bytes: u64,
}

/// What a team had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TeamSample {
    /// When.
    pub at: Timestamp,
    /// Sandboxes that were being made, ran, or were on the way to a pause or back.
    pub concurrent: u32,
    /// How many were made since the look before.
    pub made: u32,
    /// How long ago that was; never 0.
    pub span: Duration,
}
