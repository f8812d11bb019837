//! Control groups, version 1 and version 2, as far as sandboxes need them.
//!
//! All groups of an instance lie under one parent, `sandglass-<instance>`, one leaf per sandbox. Here
//! they are made, limited, found, read and removed. File formats:
//! `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/` of the kernel.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

mod counters;
mod leaf;
mod limit;
mod turn;

pub use leaf::{Leaf, Usage};
pub use limit::Ceiling;
pub use turn::Turn;

/// Where the kernel's groups are mounted by every distribution.
pub const ROOT: &str = "/sys/fs/cgroup";

/// Limits hang on these; without one of them no sandbox is bounded, so there is no sandbox.
const REQUIRED: [&str; 3] = ["cpu", "memory", "pids"];

/// What counts CPU time on version 1, where it is a controller of its own.
const ACCOUNTING: [&str; 1] = ["cpuacct"];

/// Where systemd keeps track of the processes of its units on version 1: a sandbox leaves them, or it would be killed when
/// the unit that its server runs in is stopped. The second is there in the hybrid layout; it is one of version 2, and
/// has no controllers.
const TRACKING: [&str; 2] = ["systemd", "unified"];

/// Enabled below the parent on version 2 where the kernel has them; the engine asks for some of them.
const OPTIONAL: [&str; 2] = ["cpuset", "io"];

/// Longest name of a group, in bytes.
const MAX_NAME_LEN: usize = 64;

/// How often a removal that found the group busy is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// How deep groups below a leaf are removed with it.
const MAX_DEPTH: usize = 4;

/// A failure around control groups.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// The folder holds neither version.
    #[error("no control groups are mounted at {}", .0.display())]
    NotMounted(PathBuf),
    /// A controller that limits hang on is missing.
    #[error("the {0} controller of control groups is not available")]
    NoController(&'static str),
    /// Not 1 to 64 characters of `a-z`, `0-9` and `-`.
    #[error("{0:?} is not a name for a control group")]
    Name(String),
    /// Processes did not leave in time.
    #[error("control group {} is still in use after {waited:?}", path.display())]
    Busy {
        /// Which one.
        path: PathBuf,
        /// How long it was tried.
        waited: Duration,
    },
    /// A file holds something else than documented.
    #[error("{} does not read as documented", .0.display())]
    Malformed(PathBuf),
    /// A file could not be read or written; the source names it.
    #[error("control group access failed")]
    Io(#[from] io::Error),
}

/// Which interface the kernel offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// A hierarchy per controller.
    V1,
    /// One hierarchy for all.
    V2,
}

/// The groups of one instance.
#[derive(Debug, Clone)]
pub struct Cgroups {
    version: Version,
    hierarchies: Vec<Hierarchy>,
    parent: String,
}

/// One mounted hierarchy: its controllers and where its root is. Version 2 has exactly one.
#[derive(Debug, Clone)]
struct Hierarchy {
    controllers: Vec<String>,
    root: PathBuf,
}

impl Cgroups {
    /// Looks at what is mounted below `root` (see [`ROOT`]) and makes nothing.
    ///
    /// # Errors
    /// [`CgroupError::Name`] for an instance that is no name, [`CgroupError::NotMounted`],
    /// [`CgroupError::NoController`].
    pub fn detect(root: &Path, instance: &str) -> Result<Self, CgroupError> {
        let parent = format!("sandglass-{}", checked_name(instance)?);
        let (version, hierarchies) = if root.join("cgroup.controllers").exists() {
            (Version::V2, vec![unified(root)?])
        } else {
            (Version::V1, split(root)?)
        };
        if hierarchies.is_empty() {
            return Err(CgroupError::NotMounted(root.to_owned()));
        }
        for required in REQUIRED {
            if !hierarchies.iter().any(|hierarchy| hierarchy.has(required)) {
                return Err(CgroupError::NoController(required));
            }
        }
        Ok(Self { version, hierarchies, parent })
    }

    /// Makes the moves of the next few milliseconds quick, by one of its own: the calling process goes to where it is.
    ///
    /// A move waits for an RCU grace period of some 10 ms, but for none if another one has just waited
    /// (`rcu_sync_enter` in the kernel's `kernel/rcu/sync.c`). Who knows that one is coming can have the wait behind it.
    ///
    /// # Errors
    /// The group of this process can't be found or written, so that the next move may be slow.
    pub fn expect_move(&self) -> io::Result<()> {
        let text = fs_err::read_to_string("/proc/self/cgroup")?;
        let group = self.group_of(&text).ok_or(io::ErrorKind::NotFound)?;
        let mut file = fs_err::OpenOptions::new().write(true).open(group.join("cgroup.procs"))?;
        io::Write::write_all(&mut file, b"0")
    }

    /// Moves the calling process, with all its threads, out of every group that it is in, to the top of each hierarchy: what
    /// is ended with a service, and what limits it, is then none of its business.
    ///
    /// # Errors
    /// The kernel refused at least once, here for the first time; every other hierarchy is left. On version 2 the top of a
    /// container's hierarchy takes no process.
    pub fn leave(&self) -> io::Result<()> {
        self.hierarchies
            .iter()
            .map(|hierarchy| fs_err::write(hierarchy.root.join("cgroup.procs"), "0"))
            .fold(Ok(()), io::Result::and)
    }

    /// In one of the hierarchies, the group of the process whose `/proc/PID/cgroup` reads so (cgroups(7)); `None` if it
    /// is not below what is mounted.
    fn group_of(&self, text: &str) -> Option<PathBuf> {
        const ONE: &str = "pids";
        let hierarchy = self.hierarchies.iter().find(|hierarchy| hierarchy.has(ONE))?;
        let path = text.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(":/")?;
            let here = match self.version {
                Version::V1 => controllers.split(',').any(|controller| controller == ONE),
                Version::V2 => controllers.is_empty(),
            };
            here.then_some(path)
        })?;
        (!path.split('/').any(|part| part == "..")).then(|| hierarchy.root.join(path))
    }

    /// Which version it is.
    #[must_use]
    pub const fn version(&self) -> Version {
        self.version
    }

    /// Makes the parent in every hierarchy, with the controllers enabled below it. May be repeated.
    ///
    /// # Errors
    /// The groups can't be written.
    pub fn make_parent(&self) -> Result<(), CgroupError> {
        for hierarchy in &self.hierarchies {
            let parent = hierarchy.root.join(&self.parent);
            if self.version == Version::V2 {
                enable(&hierarchy.root)?;
            }
            make_folder(&parent)?;
            if self.version == Version::V2 {
                enable(&parent)?;
            } else if hierarchy.has("cpuset") {
                inherit_cpuset(&hierarchy.root, &parent)?;
            }
        }
        Ok(())
    }

    /// Removes the parent again. `Ok` if there is none.
    ///
    /// # Errors
    /// A leaf is left: `DirectoryNotEmpty` or `ResourceBusy` in [`CgroupError::Io`].
    pub fn remove_parent(&self) -> Result<(), CgroupError> {
        for hierarchy in &self.hierarchies {
            match fs_err::remove_dir(hierarchy.root.join(&self.parent)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// The leaf of that name, whether it exists or not.
    ///
    /// # Errors
    /// [`CgroupError::Name`].
    pub fn leaf(&self, name: &str) -> Result<Leaf, CgroupError> {
        Ok(Leaf::new(self, checked_name(name)?))
    }

    /// Names of all groups below the parent, in any hierarchy, sorted.
    ///
    /// # Errors
    /// The groups can't be read.
    pub fn children(&self) -> Result<Vec<String>, CgroupError> {
        let mut names = Vec::new();
        for hierarchy in &self.hierarchies {
            names.extend(child_folders(&hierarchy.root.join(&self.parent))?);
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// The folders of the parent, for an audit.
    pub fn parent_folders(&self) -> impl Iterator<Item = PathBuf> {
        self.hierarchies.iter().map(|hierarchy| hierarchy.root.join(&self.parent))
    }
}

impl Hierarchy {
    fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|own| own == controller)
    }
}

fn checked_name(name: &str) -> Result<&str, CgroupError> {
    let valid = (1..=MAX_NAME_LEN).contains(&name.len())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'));
    if valid { Ok(name) } else { Err(CgroupError::Name(name.into())) }
}

fn unified(root: &Path) -> Result<Hierarchy, CgroupError> {
    let text = fs_err::read_to_string(root.join("cgroup.controllers"))?;
    let controllers = text.split_whitespace().map(str::to_owned).collect();
    Ok(Hierarchy { controllers, root: root.to_owned() })
}

/// The hierarchies of version 1 that matter: a folder each, named by its controllers (`cpu,cpuacct`), often with a link
/// per controller (`cpu`) beside it. A process is moved into each of them, and every move costs.
fn split(root: &Path) -> Result<Vec<Hierarchy>, CgroupError> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for name in child_folders(root)? {
        let folder = fs_err::canonicalize(root.join(&name))?;
        if !folder.join("cgroup.procs").exists() {
            continue;
        }
        let controllers = name.split(',').map(str::to_owned);
        match found.iter_mut().find(|hierarchy| hierarchy.root == folder) {
            Some(hierarchy) => hierarchy.controllers.extend(controllers),
            None => found.push(Hierarchy { controllers: controllers.collect(), root: folder }),
        }
    }
    found.retain(|hierarchy| {
        REQUIRED.iter().chain(&ACCOUNTING).chain(&TRACKING).any(|name| hierarchy.has(name))
    });
    Ok(found)
}

/// Names of the folders in a folder, links to folders included; none if it does not exist.
fn child_folders(folder: &Path) -> Result<Vec<String>, CgroupError> {
    let entries = match fs_err::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.path().is_dir() {
            names.extend(entry.file_name().into_string());
        }
    }
    Ok(names)
}

fn make_folder(folder: &Path) -> Result<(), CgroupError> {
    match fs_err::create_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => Ok(result?),
    }
}

/// Lets the groups below `group` have the controllers.
fn enable(group: &Path) -> Result<(), CgroupError> {
    let available = fs_err::read_to_string(group.join("cgroup.controllers"))?;
    let has = |name: &str| available.split_whitespace().any(|own| own == name);
    for required in REQUIRED {
        if !has(required) {
            return Err(CgroupError::NoController(required));
        }
    }
    let wanted: Vec<String> = REQUIRED
        .into_iter()
        .chain(OPTIONAL.into_iter().filter(|name| has(name)))
        .map(|name| format!("+{name}"))
        .collect();
    Ok(fs_err::write(group.join("cgroup.subtree_control"), wanted.join(" "))?)
}

/// A new group of the version 1 `cpuset` controller has no CPU and no memory node, and takes no process before it
/// has both.
fn inherit_cpuset(from: &Path, to: &Path) -> Result<(), CgroupError> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if fs_err::read_to_string(to.join(file))?.trim().is_empty() {
            fs_err::write(to.join(file), fs_err::read_to_string(from.join(file))?)?;
        }
    }
    Ok(())
}

/// Removes a group and those below it; waits until `deadline` for its last processes to leave.
fn remove_folder(
    folder: &Path,
    patience: Duration,
    deadline: Instant,
    depth: usize,
) -> Result<(), CgroupError> {
    if depth > 0 {
        for child in child_folders(folder)? {
            remove_folder(&folder.join(child), patience, deadline, depth - 1)?;
        }
    }
    loop {
        let error = match fs_err::remove_dir(folder) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        match error.kind() {
            io::ErrorKind::NotFound => return Ok(()),
            io::ErrorKind::ResourceBusy if Instant::now() < deadline => std::thread::sleep(RETRY_INTERVAL),
            io::ErrorKind::ResourceBusy => {
                return Err(CgroupError::Busy { path: folder.to_owned(), waited: patience });
            }
            _ => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests;
