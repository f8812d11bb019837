//! What sandboxes may have together, and whether one more fits.
//!
//! What counts is what they were promised, not what they happen to use: a promise that is only kept while nobody takes it
//! up is none.

use crate::{Limits, SandboxState};

/// An amount of all that is budgeted: in use, asked for, or the most that there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    /// Sandboxes.
    pub sandboxes: u64,
    /// Cores.
    pub cpus: u64,
    /// Memory of programs inside, in MiB.
    pub memory_mib: u64,
    /// Size of the writable disks, in MiB.
    pub disk_mib: u64,
}

/// What can be used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// [`Amount::sandboxes`].
    Sandboxes,
    /// [`Amount::cpus`].
    Cpus,
    /// [`Amount::memory_mib`].
    Memory,
    /// [`Amount::disk_mib`].
    Disk,
}

/// Why something does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Excess {
    /// What there is too little of.
    pub resource: Resource,
    /// The most that there may be of it.
    pub budget: u64,
    /// What is in use of it.
    pub in_use: u64,
    /// What would come on top.
    pub asked: u64,
}

impl Amount {
    /// As a budget: no bound.
    pub const UNBOUNDED: Self =
        Self { sandboxes: u64::MAX, cpus: u64::MAX, memory_mib: u64::MAX, disk_mib: u64::MAX };

    /// What one sandbox with these limits is promised.
    #[must_use]
    pub fn of(limits: &Limits) -> Self {
        let [cpus, memory_mib, disk_mib] =
            [limits.cpus(), limits.memory_mib(), limits.disk_mib()].map(u64::from);
        Self { sandboxes: 1, cpus, memory_mib, disk_mib }
    }

    /// Both together.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_add(other.sandboxes),
            cpus: self.cpus.saturating_add(other.cpus),
            memory_mib: self.memory_mib.saturating_add(other.memory_mib),
            disk_mib: self.disk_mib.saturating_add(other.disk_mib),
        }
    }

    /// What of this, promised to sandboxes in `state`, counts against the quota of their team: nothing once their end has
    /// begun, or whoever ends one to start another would be refused, and nothing while it is paused.
    #[must_use]
    pub const fn of_team(self, state: SandboxState) -> Self {
        match state {
            SandboxState::Creating
            | SandboxState::Running
            | SandboxState::Pausing
            | SandboxState::Resuming => self,
            SandboxState::Paused | SandboxState::Ending | SandboxState::Ended => NONE,
        }
    }

    /// What of this, promised to sandboxes in `state`, the machine can't give to others: all of it until nothing is
    /// left, and of a paused one room on the disk for its files and its memory.
    #[must_use]
    pub const fn of_machine(self, state: SandboxState) -> Self {
        match state {
            SandboxState::Creating
            | SandboxState::Running
            | SandboxState::Pausing
            | SandboxState::Resuming
            | SandboxState::Ending => self,
            SandboxState::Paused => self.as_image(),
            SandboxState::Ended => NONE,
        }
    }

    /// What an image of sandboxes that were promised this is promised: room on the disk for their files and their memory.
    #[must_use]
    pub const fn as_image(self) -> Self {
        Self { disk_mib: self.disk_mib.saturating_add(self.memory_mib), ..NONE }
    }
}

const NONE: Amount = Amount { sandboxes: 0, cpus: 0, memory_mib: 0, disk_mib: 0 };

/// Whether `asked` fits into `budget` beside what is `in_use`.
///
/// # Errors
/// The first resource of which there is too little.
pub fn admit(budget: &Amount, in_use: &Amount, asked: &Amount) -> Result<(), Excess> {
    let resources = [
        (Resource::Sandboxes, budget.sandboxes, in_use.sandboxes, asked.sandboxes),
        (Resource::Cpus, budget.cpus, in_use.cpus, asked.cpus),
        (Resource::Memory, budget.memory_mib, in_use.memory_mib, asked.memory_mib),
        (Resource::Disk, budget.disk_mib, in_use.disk_mib, asked.disk_mib),
    ];
    for (resource, budget, in_use, asked) in resources {
        if asked > 0 && in_use.saturating_add(asked) > budget {
            return Err(Excess { resource, budget, in_use, asked });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Unchecked;
    use proptest::prelude::*;

    const BUDGET: Amount = Amount { sandboxes: 3, cpus: 6, memory_mib: 3072, disk_mib: 12_288 };

    fn sandbox() -> Amount {
        Amount::of(&Limits::default())
    }

    #[test]
    fn it_fits_up_to_the_budget_and_not_beyond() {
        let two = sandbox().and(sandbox());
        assert_eq!(admit(&BUDGET, &two, &sandbox()), Ok(()));
        let over = |budget| admit(&budget, &two, &sandbox()).unwrap_err();
        let expected = |resource, budget, in_use, asked| Excess { resource, budget, in_use, asked };
        assert_eq!(over(Amount { sandboxes: 2, ..BUDGET }), expected(Resource::Sandboxes, 2, 2, 1));
        assert_eq!(over(Amount { cpus: 5, ..BUDGET }), expected(Resource::Cpus, 5, 4, 2));
        assert_eq!(over(Amount { memory_mib: 3071, ..BUDGET }), expected(Resource::Memory, 3071, 2048, 1024));
        assert_eq!(over(Amount { disk_mib: 12_287, ..BUDGET }), expected(Resource::Disk, 12_287, 8192, 4096));
    }

    #[test]
    fn what_is_over_budget_already_keeps_out_only_what_needs_more_of_it() {
        let in_use = Amount { memory_mib: 9000, ..sandbox() };
        assert_eq!(admit(&BUDGET, &in_use, &Amount { disk_mib: 1, ..Amount::default() }), Ok(()));
        assert_eq!(admit(&BUDGET, &in_use, &sandbox()).unwrap_err().resource, Resource::Memory);
    }

    #[test]
    fn an_ending_sandbox_is_the_machine_s_and_no_more_the_team_s() {
        use SandboxState::{Creating, Ended, Ending, Paused, Pausing, Resuming, Running};
        let counted = |of: fn(Amount, SandboxState) -> Amount| {
            [Creating, Running, Pausing, Resuming, Ending, Ended]
                .map(|state| of(sandbox(), state) == sandbox())
        };
        assert_eq!(counted(Amount::of_team), [true, true, true, true, false, false]);
        assert_eq!(counted(Amount::of_machine), [true, true, true, true, true, false]);
        assert_eq!(sandbox().of_team(Paused), NONE);
        let disk = Amount { disk_mib: sandbox().disk_mib + sandbox().memory_mib, ..NONE };
        assert_eq!(sandbox().of_machine(Paused), disk);
    }

    proptest! {
        #[test]
        fn nothing_that_is_admitted_exceeds_a_budget(
            budget in 0..200_u64, cpus in 1..=64_u32, memory_mib in 128..=4096_u32, count in 0..200_u64,
        ) {
            let raw = Unchecked { cpus, memory_mib, disk_mib: 64, processes: 16 };
            let one = Amount::of(&Limits::try_from(raw).unwrap());
            let budget = Amount { sandboxes: budget, cpus: budget, memory_mib: budget * 1024, disk_mib: u64::MAX };
            let mut in_use = Amount::default();
            for _ in 0..count {
                if admit(&budget, &in_use, &one).is_ok() {
                    in_use = in_use.and(one);
                }
            }
            prop_assert!(in_use.sandboxes <= budget.sandboxes);
            prop_assert!(in_use.cpus <= budget.cpus);
            prop_assert!(in_use.memory_mib <= budget.memory_mib);
            prop_assert_eq!(admit(&Amount::UNBOUNDED, &in_use, &one), Ok(()));
        }
    }
}
