//! Whether there may be one more sandbox: the quota of its team, and the room on this machine.
//!
//! The store decides, together with the insert; here is what a client hears of it.

use sandglass_store::VolumeQuota;
use sandglass_types::budget::{Amount, Excess, Resource};
use sandglass_types::{Error, ErrorKind};

use crate::control::VolumesConfig;

/// What an operator lets be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budgets {
    /// What the sandboxes of one team may have together.
    pub quota: Amount,
    /// What all sandboxes of this machine may have together. Each has a loop device.
    pub capacity: Amount,
    /// Connections into all sandboxes together, to their guest APIs and their ports.
    pub connections: usize,
    /// Paused sandboxes whose next computer is made ahead. What such a computer takes of `capacity` is given up when something
    /// else needs it.
    pub ahead: usize,
    /// What volumes may be.
    pub volumes: VolumesConfig,
}

impl Budgets {
    /// No bounds, and nothing ahead.
    pub const UNBOUNDED: Self = Self {
        quota: Amount::UNBOUNDED,
        capacity: Amount::UNBOUNDED,
        connections: tokio::sync::Semaphore::MAX_PERMITS,
        ahead: 0,
        volumes: VolumesConfig { default_mib: 1024, quota: VolumeQuota::UNBOUNDED },
    };
}

/// What a client hears whose team has used up its quota.
pub(crate) fn over_quota(excess: Excess) -> Error {
    let Excess { resource, budget, in_use, asked } = excess;
    let (what, key) = match resource {
        Resource::Sandboxes => ("sandboxes", "sandboxes"),
        Resource::Cpus => ("cores", "cpus"),
        Resource::Memory => ("MiB of memory", "memory_mib"),
        Resource::Disk => ("MiB of disk", "disk_mib"),
    };
    let message = format!(
        "your team may have {budget} {what} at a time and has {in_use}, so {asked} more can't be given: kill sandboxes \
         that you do not need any more, or ask the operator to raise quota.{key}"
    );
    Error::new(ErrorKind::Quota, message)
}

/// What a client hears whose team has as many volumes as it may have.
pub(crate) fn too_many_volumes(most: u64) -> Error {
    let message = format!(
        "your team may have {most} volumes: delete one that you do not need any more, or ask the operator to raise \
         quota.volumes"
    );
    Error::new(ErrorKind::Quota, message)
}

/// What a client hears whose team's volumes would be too large together.
pub(crate) fn too_large_volumes(most: u64, in_use: u64, asked: u64) -> Error {
    let message = format!(
        "the volumes of your team may have {most} MiB together and have {in_use}, so {asked} more can't be given: delete \
         one that you do not need any more, or ask the operator to raise quota.volumes_mib"
    );
    Error::new(ErrorKind::Quota, message)
}

/// What a client hears when this machine is full.
pub(crate) fn over_capacity(excess: Excess) -> Error {
    let Excess { resource, budget, in_use, asked } = excess;
    let (what, key) = match resource {
        Resource::Sandboxes => ("loop devices", "loop_devices"),
        Resource::Cpus => ("cores, over-committed,", "cpu_overcommit"),
        Resource::Memory => ("MiB of memory", "memory_mib"),
        Resource::Disk => ("MiB of disk", "disk_mib"),
    };
    full(&format!("{asked} {what} were asked for, and {in_use} of {budget} are given away (host.{key})"))
}

/// What a client hears when there are as many connections into sandboxes as there may be.
pub(crate) fn no_connection(connections: usize) -> Error {
    full(&format!("all {connections} connections into sandboxes are in use (host.connections)"))
}

fn full(why: &str) -> Error {
    let message =
        format!("this machine has no room for another sandbox now: {why}; try again when others have ended");
    Error::new(ErrorKind::Capacity, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_which_bound_it_was_its_value_and_what_to_do() {
        let excess = Excess { resource: Resource::Memory, budget: 4096, in_use: 3500, asked: 1024 };
        let (quota, capacity) = (over_quota(excess), over_capacity(excess));
        assert_eq!((quota.kind(), capacity.kind()), (ErrorKind::Quota, ErrorKind::Capacity));
        for (error, words) in [
            (quota, ["4096 MiB of memory", "3500", "1024", "kill sandboxes", "quota.memory_mib"]),
            (capacity, ["3500 of 4096", "1024 MiB of memory", "now", "try again", "host.memory_mib"]),
            (no_connection(7), ["all 7", "connections", "now", "try again", "host.connections"]),
        ] {
            let text = error.to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
}
