//! Writing the limits of a group.

use std::io;
use std::path::Path;

use super::{CgroupError, Leaf, Version};

/// What the processes of a group may use together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ceiling {
    /// CPU time per period, in microseconds; more than a period means more than one core.
    pub cpu_quota_micros: u64,
    /// Length of the period, in microseconds: 1,000 to 1,000,000.
    pub cpu_period_micros: u64,
    /// Memory, page cache included, in bytes. No swap comes on top.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub processes: u64,
}

impl Leaf {
    /// Puts limits on the group, which exists.
    ///
    /// # Errors
    /// The kernel refused a value, or memory in use is above the new limit.
    pub fn limit(&self, ceiling: &Ceiling) -> Result<(), CgroupError> {
        let Ceiling { cpu_quota_micros, cpu_period_micros, memory_bytes, processes } = ceiling;
        let (cpu, memory) = (self.folder("cpu")?, self.folder("memory")?);
        match self.version() {
            Version::V1 => {
                write(&cpu, "cpu.cfs_period_us", cpu_period_micros)?;
                write(&cpu, "cpu.cfs_quota_us", cpu_quota_micros)?;
                write(&memory, "memory.limit_in_bytes", memory_bytes)?;
                // Not there in a kernel that can't swap.
                write_if_there(&memory, "memory.swappiness", &0)?;
                // Not there when the kernel was started without swap accounting.
                write_if_there(&memory, "memory.memsw.limit_in_bytes", memory_bytes)?;
            }
            Version::V2 => {
                write(&cpu, "cpu.max", &format!("{cpu_quota_micros} {cpu_period_micros}"))?;
                write(&memory, "memory.max", memory_bytes)?;
                write_if_there(&memory, "memory.swap.max", &0)?;
            }
        }
        write(&self.folder("pids")?, "pids.max", processes)
    }
}

pub(super) fn write(folder: &Path, file: &str, value: &dyn ToString) -> Result<(), CgroupError> {
    Ok(fs_err::OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(folder.join(file))
        .and_then(|mut opened| io::Write::write_all(&mut opened, value.to_string().as_bytes()))?)
}

pub(super) fn write_if_there(folder: &Path, file: &str, value: &dyn ToString) -> Result<(), CgroupError> {
    match write(folder, file, value) {
        Err(CgroupError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cgroups;
    use super::*;

    const CEILING: Ceiling = Ceiling {
        cpu_quota_micros: 20_000,
        cpu_period_micros: 10_000,
        memory_bytes: 64 << 20,
        processes: 300,
    };

    /// A leaf in plain folders, with the files that the kernel would have made in it.
    fn leaf(root: &Path, files: &[&str]) -> Leaf {
        let leaf = Cgroups::detect(root, "inst0001").unwrap().leaf("leaf").unwrap();
        for folder in leaf.folders() {
            std::fs::create_dir_all(&folder).unwrap();
        }
        for file in files {
            std::fs::write(root.join(file), "old").unwrap();
        }
        leaf
    }

    #[test]
    fn version_2_gets_quota_and_period_in_one_file() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("cgroup.controllers"), "cpu memory pids").unwrap();
        let at = |file: &str| format!("sandglass-inst0001/leaf/{file}");
        let files = ["cpu.max", "memory.max", "memory.swap.max", "pids.max"].map(at);
        let files = files.each_ref().map(String::as_str);
        leaf(root.path(), &files).limit(&CEILING).unwrap();
        let read = |file: &str| std::fs::read_to_string(root.path().join(file)).unwrap();
        assert_eq!(files.map(read), ["20000 10000", "67108864", "0", "300"]);
    }

    #[test]
    fn version_1_does_without_swap_accounting_but_not_without_a_limit() {
        let root = tempfile::tempdir().unwrap();
        for name in ["cpu", "memory", "pids"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
            std::fs::write(root.path().join(name).join("cgroup.procs"), "").unwrap();
        }
        let at = |(controller, file): (&str, &str)| format!("{controller}/sandglass-inst0001/leaf/{file}");
        let files = [
            ("cpu", "cpu.cfs_period_us"),
            ("cpu", "cpu.cfs_quota_us"),
            ("memory", "memory.limit_in_bytes"),
            ("memory", "memory.swappiness"),
            ("pids", "pids.max"),
        ]
        .map(at);
        let files = files.each_ref().map(String::as_str);
        let leaf = leaf(root.path(), &files);
        leaf.limit(&CEILING).unwrap();
        let read = |file: &str| std::fs::read_to_string(root.path().join(file)).unwrap();
        assert_eq!(files.map(read), ["10000", "20000", "67108864", "0", "300"]);
        std::fs::remove_file(root.path().join(files[2])).unwrap();
        assert!(leaf.limit(&CEILING).is_err());
    }
}
