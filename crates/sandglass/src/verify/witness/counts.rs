//! How many things there are on the stage, of each kind that a sandbox needs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use sandglass_linux::cgroup::{self, CgroupError, Cgroups};
use sandglass_linux::{loopdev, mount, process};

use crate::verify::ground::Scene;
use crate::verify::stage::DISK;

/// A kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::verify) enum Kind {
    Processes,
    Mounts,
    LoopDevices,
    Namespaces,
    ControlGroups,
    Files,
}

impl Kind {
    /// In the plural.
    pub(in crate::verify) const fn name(self) -> &'static str {
        match self {
            Self::Processes => "processes",
            Self::Mounts => "mounts",
            Self::LoopDevices => "loop devices",
            Self::Namespaces => "namespaces",
            Self::ControlGroups => "control groups",
            Self::Files => "files",
        }
    }
}

/// How many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::verify) struct Counts(BTreeMap<Kind, usize>);

impl Counts {
    pub(in crate::verify) fn of(&self, kind: Kind) -> usize {
        self.0.get(&kind).copied().unwrap_or_default()
    }

    /// What there is more of than before, for a person; empty if nothing is.
    pub(in crate::verify) fn excess(&self, before: &Self) -> String {
        let more = self.0.iter().filter_map(|(kind, count)| {
            let more = count.saturating_sub(before.of(*kind));
            (more > 0).then(|| format!("{more} {} more than before", kind.name()))
        });
        more.collect::<Vec<_>>().join(", ")
    }
}

impl Scene {
    /// The control groups of the strict server.
    pub(in crate::verify) fn groups(&self) -> Result<Cgroups, CgroupError> {
        Cgroups::detect(cgroup::ROOT.as_ref(), self.instance.as_str())
    }

    /// Counts, by what the kernel shows.
    pub(in crate::verify) fn counts(&self) -> anyhow::Result<Counts> {
        let loops = loopdev::attached()?.into_iter().filter(|(_, file)| file.starts_with(DISK)).count();
        let mut groups = 0;
        for folder in self.groups()?.parent_folders() {
            groups += entries(&folder, &|kind| kind.is_dir())?;
        }
        Ok(Counts(BTreeMap::from([
            (Kind::Processes, process::table()?.len()),
            (Kind::Mounts, mount::table(None)?.len()),
            (Kind::LoopDevices, loops),
            (Kind::Namespaces, namespaces()?),
            (Kind::ControlGroups, groups),
            (Kind::Files, entries(&self.setup.data().join("host"), &|_| true)?),
        ])))
    }
}

/// All namespaces that a process is in or holds.
fn namespaces() -> io::Result<usize> {
    let mut found = BTreeSet::<PathBuf>::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        if !entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        for folder in ["ns", "fd"] {
            // It may have ended meanwhile.
            for link in std::fs::read_dir(entry.path().join(folder)).into_iter().flatten().flatten() {
                let target = std::fs::read_link(link.path()).unwrap_or_default();
                let text = target.to_string_lossy();
                if ["net:[", "mnt:[", "pid:[", "ipc:[", "uts:[", "user:["]
                    .iter()
                    .any(|kind| text.starts_with(kind))
                {
                    found.insert(target);
                }
            }
        }
    }
    Ok(found.len())
}

/// What is below a folder.
fn entries(folder: &Path, counts: &dyn Fn(std::fs::FileType) -> bool) -> io::Result<usize> {
    let mut count = 0;
    let listed = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        listed => listed?,
    };
    for entry in listed {
        let entry = entry?;
        // It may be removed meanwhile.
        let Ok(kind) = entry.file_type() else { continue };
        count += usize::from(counts(kind));
        if kind.is_dir() {
            count += entries(&entry.path(), counts)?;
        }
    }
    Ok(count)
}
