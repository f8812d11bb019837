//! The group of one sandbox.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::counters::{keyed, single, text};
use super::{
    CgroupError, Cgroups, Hierarchy, MAX_DEPTH, Version, inherit_cpuset, make_folder, remove_folder,
};

/// A group below the parent of an instance. Holding one keeps nothing alive.
#[derive(Debug, Clone)]
pub struct Leaf {
    version: Version,
    hierarchies: Vec<Hierarchy>,
    /// `sandglass-<instance>/<name>`
    path: String,
}

/// What the processes of a group use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// CPU time since the group was made, in microseconds.
    pub cpu_micros: u64,
    /// Memory in use, page cache included, in bytes.
    pub memory_bytes: u64,
    /// Most memory that was in use at one time, in bytes. Kernels before 5.19 do not count it on version 2: there
    /// it is what is in use now.
    pub memory_peak_bytes: u64,
    /// Processes and threads.
    pub processes: u64,
}

impl Leaf {
    pub(super) fn new(cgroups: &Cgroups, name: &str) -> Self {
        Self {
            version: cgroups.version,
            hierarchies: cgroups.hierarchies.clone(),
            path: format!("{}/{name}", cgroups.parent),
        }
    }

    /// The group as `linux.cgroupsPath` of an OCI spec wants it: absolute, from the root of the hierarchies.
    #[must_use]
    pub fn oci_path(&self) -> String {
        format!("/{}", self.path)
    }

    /// Makes the group in every hierarchy, below a parent that exists. May be repeated.
    ///
    /// # Errors
    /// The groups can't be written.
    pub fn make(&self) -> Result<(), CgroupError> {
        for hierarchy in &self.hierarchies {
            let folder = hierarchy.root.join(&self.path);
            make_folder(&folder)?;
            if let Some(parent) = folder.parent()
                && self.version == Version::V1
                && hierarchy.has("cpuset")
            {
                inherit_cpuset(parent, &folder)?;
            }
        }
        Ok(())
    }

    /// Moves a process, with all its threads, into the group in every hierarchy.
    ///
    /// # Errors
    /// There is no such process or group.
    pub fn add(&self, pid: i32) -> Result<(), CgroupError> {
        for folder in self.folders() {
            fs_err::write(folder.join("cgroup.procs"), pid.to_string())?;
        }
        Ok(())
    }

    pub(super) const fn version(&self) -> Version {
        self.version
    }

    /// Whether the group exists in any hierarchy.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.folders().any(|folder| folder.exists())
    }

    /// What it uses now.
    ///
    /// # Errors
    /// `NotFound` in [`CgroupError::Io`] if there is no such group.
    pub fn usage(&self) -> Result<Usage, CgroupError> {
        let memory = self.folder("memory")?;
        let processes = single(&self.folder("pids")?.join("pids.current"))?;
        Ok(match self.version {
            Version::V1 => Usage {
                cpu_micros: self.cpu_micros()?,
                memory_bytes: single(&memory.join("memory.usage_in_bytes"))?,
                memory_peak_bytes: single(&memory.join("memory.max_usage_in_bytes"))?,
                processes,
            },
            Version::V2 => {
                let memory_bytes = single(&memory.join("memory.current"))?;
                Usage {
                    cpu_micros: self.cpu_micros()?,
                    memory_bytes,
                    memory_peak_bytes: or_missing(single(&memory.join("memory.peak")), memory_bytes)?,
                    processes,
                }
            }
        })
    }

    /// CPU time that it has used since it was made, in microseconds.
    ///
    /// # Errors
    /// As [`Leaf::usage`].
    pub fn cpu_micros(&self) -> Result<u64, CgroupError> {
        match self.version {
            Version::V1 => Ok(single(&self.folder("cpuacct")?.join("cpuacct.usage"))? / 1_000),
            Version::V2 => keyed(&self.folder("cpu")?.join("cpu.stat"), "usage_usec"),
        }
    }

    /// How many processes of the group the kernel has killed for lack of memory. The count lives as long as the
    /// group.
    ///
    /// # Errors
    /// As [`Leaf::usage`].
    pub fn oom_kills(&self) -> Result<u64, CgroupError> {
        let file = match self.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        keyed(&self.folder("memory")?.join(file), "oom_kill")
    }

    /// How often a fork failed because the limit on processes was reached.
    ///
    /// # Errors
    /// As [`Leaf::usage`].
    pub fn process_limit_hits(&self) -> Result<u64, CgroupError> {
        keyed(&self.folder("pids")?.join("pids.events"), "max")
    }

    /// The processes that are in the group in any hierarchy, sorted; none if there is no such group.
    ///
    /// # Errors
    /// The groups can't be read.
    pub fn processes(&self) -> Result<Vec<i32>, CgroupError> {
        let mut pids = BTreeSet::new();
        for folder in self.folders() {
            let file = folder.join("cgroup.procs");
            let text = match text(&file) {
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error.into()),
            };
            pids.extend(ids_of(&text).ok_or_else(|| CgroupError::Malformed(file.clone()))?);
        }
        Ok(pids.into_iter().collect())
    }

    /// Removes the group and what is below it from every hierarchy; waits up to `patience` in all for processes that
    /// are dying. `Ok` if there is none.
    ///
    /// # Errors
    /// [`CgroupError::Busy`] if a process is left.
    pub fn remove(&self, patience: Duration) -> Result<(), CgroupError> {
        let deadline = Instant::now() + patience;
        self.folders().try_for_each(|folder| remove_folder(&folder, patience, deadline, MAX_DEPTH))
    }

    /// Its folder in every hierarchy, for an audit.
    pub fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.hierarchies.iter().map(|hierarchy| hierarchy.root.join(&self.path))
    }

    pub(super) fn folder(&self, controller: &'static str) -> Result<PathBuf, CgroupError> {
        let own = |hierarchy: &&Hierarchy| self.version == Version::V2 || hierarchy.has(controller);
        let hierarchy = self.hierarchies.iter().find(own).ok_or(CgroupError::NoController(controller))?;
        Ok(hierarchy.root.join(Path::new(&self.path)))
    }
}

fn or_missing(value: Result<u64, CgroupError>, otherwise: u64) -> Result<u64, CgroupError> {
    match value {
        Err(CgroupError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(otherwise),
        value => value,
    }
}
/// The processes of the text of a `cgroup.procs`. One that is at its very end has no id any more, which the kernel writes as
/// 0 (seen on Linux 6.18); nobody can end it, and a removal of its group waits for it.
fn ids_of(text: &str) -> Option<Vec<i32>> {
    let ids = text.lines().map(|line| line.parse().ok()).collect::<Option<Vec<_>>>()?;
    Some(ids.into_iter().filter(|id| *id != 0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_no_id_any_more_is_left_out() {
        assert_eq!(ids_of("12\n0\n7\n"), Some(vec![12, 7]));
        assert_eq!(ids_of(""), Some(Vec::new()));
        assert_eq!(ids_of("12\nx\n"), None);
    }
}
