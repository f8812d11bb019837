//! Control groups: one is made with the limits that sandboxes get, and removed.

use std::io;
use std::path::Path;
use std::time::Duration;

use sandglass_engine::gvisor::ceiling;
use sandglass_linux::cgroup::{CgroupError, Cgroups, Version};
use sandglass_types::Limits;

use super::check::Check;
use crate::startup::Reason;

pub(super) const NAME: &str = "control groups";

/// What stands in place of an instance in the names of groups that are only tried out; a process id follows.
const TRIAL: &str = "doctor-";

/// How long an empty group may take to go away.
const PATIENCE: Duration = Duration::from_secs(2);

/// What was found.
#[derive(Debug)]
pub(super) struct Facts {
    /// Where groups can be made, if anywhere.
    version: Result<Version, CgroupError>,
    delegated: Delegated,
    /// How it went to make a group, limit it and remove it.
    tried: Result<(), CgroupError>,
}

/// Whether version 2 shows a part of the machine's groups only, as in a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delegated {
    /// No: all of them.
    No,
    /// The part has no processes of its own, so its controllers can be passed on.
    Free,
    /// It has some, so nothing can be passed on (`cgroup-v2.rst`, "No Internal Process Constraint").
    Occupied,
}

pub(super) fn look(root: &Path) -> Facts {
    let cgroups = Cgroups::detect(root, &format!("{TRIAL}{}", std::process::id()));
    let tried = match &cgroups {
        Ok(cgroups) => {
            sweep(root);
            attempt(cgroups)
        }
        Err(_) => Ok(()),
    };
    Facts { version: cgroups.map(|cgroups| cgroups.version()), delegated: delegated(root), tried }
}

fn delegated(root: &Path) -> Delegated {
    // Every group has this file but the machine's root.
    if !root.join("cgroup.type").exists() {
        return Delegated::No;
    }
    let processes = std::fs::read_to_string(root.join("cgroup.procs")).unwrap_or_default();
    if processes.trim().is_empty() { Delegated::Free } else { Delegated::Occupied }
}

fn attempt(cgroups: &Cgroups) -> Result<(), CgroupError> {
    let leaf = cgroups.leaf("trial")?;
    let made = cgroups
        .make_parent()
        .and_then(|()| leaf.make())
        .and_then(|()| leaf.limit(&ceiling(Limits::default())))
        .and_then(|()| leaf.usage().map(drop));
    let removed = leaf.remove(PATIENCE).and_then(|()| cgroups.remove_parent());
    made.and(removed)
}

/// Removes what a doctor left that was killed.
fn sweep(root: &Path) {
    let Ok(own) = Cgroups::detect(root, TRIAL) else { return };
    let prefix = format!("sandglass-{TRIAL}");
    let roots = own.parent_folders().filter_map(|folder| folder.parent().map(Path::to_owned));
    let names = roots.filter_map(|root| std::fs::read_dir(root).ok()).flatten().flatten();
    for name in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        let Some(pid) = name.strip_prefix(&prefix) else { continue };
        if pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists() {
            let left = Cgroups::detect(root, &format!("{TRIAL}{pid}"));
            let removed = left.and_then(|left| {
                left.leaf("trial")?.remove(PATIENCE)?;
                left.remove_parent()
            });
            if let Err(error) = removed {
                tracing::debug!(%error, name, "a control group that was only tried out stays");
            }
        }
    }
}

pub(super) fn judge(facts: &Facts) -> Check {
    let bad = |error: &CgroupError| {
        Check::bad(NAME, Reason::NoCgroups, sandglass_types::error::Chain(error).to_string())
    };
    let version = match &facts.version {
        Ok(Version::V1) => "version 1",
        Ok(Version::V2) => "version 2",
        Err(error) => return bad(error),
    };
    match (&facts.tried, facts.delegated) {
        (Ok(()), Delegated::No) => Check::good(NAME, format!("{version}; limits can be set")),
        (Ok(()), _) => Check::good(NAME, format!("{version}, a delegated part of it; limits can be set")),
        (Err(_), Delegated::Occupied) => Check::bad(
            NAME,
            Reason::NoCgroups,
            "version 2, and the group that is the root here has processes of its own, so no limits can be set below it",
        )
        .with_remedy("move these processes into a group of their own, or give the container the machine's groups"),
        (Err(CgroupError::Io(error)), _) if is_refused(error) => bad(&CgroupError::Io(io::Error::new(
            error.kind(),
            format!("{version}, but groups can't be made: {error}"),
        ))),
        (Err(error), _) => bad(error),
    }
}

fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict;
    use super::*;

    /// A folder that looks like a mounted version 2.
    fn version_2(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(root.path().join(name), text).unwrap();
        }
        root
    }

    fn facts(delegated: Delegated, tried: Result<(), CgroupError>) -> Facts {
        Facts { version: Ok(Version::V2), delegated, tried }
    }

    #[test]
    fn a_delegated_part_is_told_from_the_whole() {
        let controllers = ("cgroup.controllers", "cpu memory pids");
        assert_eq!(delegated(version_2(&[controllers]).path()), Delegated::No);
        let part = ("cgroup.type", "domain\n");
        let free = version_2(&[controllers, part, ("cgroup.procs", "")]);
        assert_eq!(delegated(free.path()), Delegated::Free);
        let occupied = version_2(&[controllers, part, ("cgroup.procs", "1\n")]);
        assert_eq!(delegated(occupied.path()), Delegated::Occupied);
    }

    #[test]
    fn a_missing_controller_and_a_missing_mount_are_bad() {
        for (files, named) in [
            (&[("cgroup.controllers", "cpu memory")][..], "pids"),
            (&[("cgroup.controllers", "")], "cpu"),
            (&[], "no control groups are mounted"),
        ] {
            let check = judge(&look(version_2(files).path()));
            assert_eq!(check.verdict(), Verdict::Bad);
            assert!(check.text().contains(named), "{check:?}");
        }
    }

    #[test]
    fn a_group_that_can_not_be_limited_is_bad() {
        // Plain files: the kernel does not make a new group's, so its limits can't be written.
        let root = version_2(&[("cgroup.controllers", "cpu memory pids"), ("cgroup.subtree_control", "")]);
        let check = judge(&look(root.path()));
        assert_eq!(check.verdict(), Verdict::Bad, "{check:?}");
        assert_eq!(check.into_failure().unwrap().reason(), Reason::NoCgroups);
    }

    #[test]
    fn every_outcome_has_its_words() {
        let refused = || Err(CgroupError::Io(io::Error::from(io::ErrorKind::ReadOnlyFilesystem)));
        assert_eq!(judge(&facts(Delegated::No, Ok(()))).verdict(), Verdict::Good);
        assert!(judge(&facts(Delegated::Free, Ok(()))).text().contains("delegated"));
        let occupied = judge(&facts(Delegated::Occupied, refused()));
        assert!(occupied.text().contains("processes of its own"), "{occupied:?}");
        let refused = judge(&facts(Delegated::No, refused()));
        assert!(refused.text().contains("can't be made"), "{refused:?}");
        assert_eq!(refused.verdict(), Verdict::Bad);
    }

    #[test]
    fn a_real_group_is_made_and_removed_and_so_is_what_a_killed_doctor_left() {
        let root = Path::new(sandglass_linux::cgroup::ROOT);
        // A process id above all that the kernel gives out.
        let killed = Cgroups::detect(root, "doctor-4194305").unwrap();
        killed.make_parent().unwrap();
        let leaf = killed.leaf("trial").unwrap();
        leaf.make().unwrap();
        let check = judge(&look(root));
        assert_eq!(check.verdict(), Verdict::Good, "{check:?}");
        assert!(!leaf.exists() && killed.parent_folders().all(|folder| !folder.exists()));
        let own = Cgroups::detect(root, &format!("{TRIAL}{}", std::process::id())).unwrap();
        assert!(own.parent_folders().all(|folder| !folder.exists()));
    }
}
