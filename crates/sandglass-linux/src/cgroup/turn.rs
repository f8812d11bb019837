//! Who goes first where groups want more of the processors than there is.

use std::io;

use super::limit::{write, write_if_there};
use super::{CgroupError, Leaf, Version};

/// When a group's processes get a processor, next to those of its siblings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Before all that are [`Turn::Last`], as a new group is.
    First,
    /// When no other sibling wants it. Siblings of this kind share what there is.
    Last,
}

impl Leaf {
    /// Sets when the group, which exists, gets a processor.
    ///
    /// Beside its purpose, [`Turn::Last`] keeps a group from stopping this machine: on kernels from 6.13 to 6.18.44, one
    /// whose processes wake each other without pause can hold the processors for ten seconds and more, against the processes
    /// of every other group (`reweight_entity` in the kernel's `kernel/sched/fair.c`, mended by commit 101f3498b4bd).
    ///
    /// # Errors
    /// `NotFound` in [`CgroupError::Io`] if there is no such group.
    pub fn take_turn(&self, turn: Turn) -> Result<(), CgroupError> {
        let cpu = self.folder("cpu")?;
        let idle = match turn {
            Turn::First => 0,
            Turn::Last => 1,
        };
        match write(&cpu, "cpu.idle", &idle) {
            Err(CgroupError::Io(error)) if error.kind() == io::ErrorKind::NotFound && cpu.exists() => {}
            result => return result,
        }
        // Kernels before 5.15: as little of the processors as can be said.
        let (file, weight) = match (self.version(), turn) {
            (Version::V1, Turn::First) => ("cpu.shares", 1024),
            (Version::V1, Turn::Last) => ("cpu.shares", 2),
            (Version::V2, Turn::First) => ("cpu.weight", 100),
            (Version::V2, Turn::Last) => ("cpu.weight", 1),
        };
        write_if_there(&cpu, file, &weight)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cgroups;
    use super::*;

    #[test]
    fn both_versions_and_older_kernels_are_told_in_their_own_words() {
        for (controllers, weight, [first, last]) in
            [(None, "cpu.shares", ["1024", "2"]), (Some("cpu memory pids"), "cpu.weight", ["100", "1"])]
        {
            let root = tempfile::tempdir().unwrap();
            match controllers {
                Some(all) => std::fs::write(root.path().join("cgroup.controllers"), all).unwrap(),
                None => {
                    for name in ["cpu", "memory", "pids"] {
                        std::fs::create_dir(root.path().join(name)).unwrap();
                        std::fs::write(root.path().join(name).join("cgroup.procs"), "").unwrap();
                    }
                }
            }
            let leaf = Cgroups::detect(root.path(), "inst0001").unwrap().leaf("leaf").unwrap();
            let absent = leaf.take_turn(Turn::Last).unwrap_err();
            assert!(matches!(absent, CgroupError::Io(error) if error.kind() == io::ErrorKind::NotFound));
            for folder in leaf.folders() {
                std::fs::create_dir_all(&folder).unwrap();
            }
            let cpu = leaf.folder("cpu").unwrap();
            for newer in [false, true] {
                let file = cpu.join(if newer { "cpu.idle" } else { weight });
                std::fs::write(&file, "").unwrap();
                for (turn, older) in [(Turn::Last, last), (Turn::First, first)] {
                    leaf.take_turn(turn).unwrap();
                    let expected = match turn {
                        _ if !newer => older,
                        Turn::First => "0",
                        Turn::Last => "1",
                    };
                    assert_eq!(std::fs::read_to_string(&file).unwrap(), expected, "{turn:?}");
                }
            }
        }
    }
}
