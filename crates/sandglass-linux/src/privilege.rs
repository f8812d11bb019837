//! Giving up root for good, and Landlock on top.
//!
//! Both act on the calling thread, and threads started later inherit them; so both refuse to work once the process
//! has a second thread, which would keep what the first gave up.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, LandlockStatus,
    PathBeneath, PathFd, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Who a process becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// User id; not 0.
    pub uid: u32,
    /// Group id; not 0. It becomes the only group.
    pub gid: u32,
}

/// What could not be given up. The process must end: it may be anything between root and what was wanted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrivilegeError {
    /// The wanted identity is root, or the reserved id that means "leave as is".
    #[error("uid {} and gid {} are not an identity without privilege", .0.uid, .0.gid)]
    Identity(Identity),
    /// Other threads would keep what this one gives up.
    #[error("the process has other threads; privilege is given up before the second one starts")]
    Threads,
    /// A system call failed.
    #[error("{step} failed")]
    Step {
        /// What was tried.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel accepted all and yet something is left.
    #[error("privilege was dropped but {0}")]
    Remains(&'static str),
    /// The kernel has no Landlock, or it is switched off.
    #[error("landlock is not available in this kernel")]
    NoLandlock,
    /// The folder or file that was to be allowed can't be opened.
    #[error("{} can't be opened for a landlock rule", path.display())]
    Path {
        /// Which one.
        path: PathBuf,
        /// Why.
        #[source]
        source: landlock::PathFdError,
    },
    /// Landlock refused the rules.
    #[error("landlock rules were refused")]
    Rules(#[from] landlock::RulesetError),
}

fn step<T, E: Into<io::Error>>(step: &'static str, result: Result<T, E>) -> Result<T, PrivilegeError> {
    result.map_err(|error| PrivilegeError::Step { step, source: error.into() })
}

fn check(return_value: libc::c_int) -> io::Result<()> {
    if return_value == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Asked of the kernel and not read from `/proc`, which a process that has changed its root may not see.
fn require_one_thread() -> Result<(), PrivilegeError> {
    // SAFETY: with CLONE_THREAD alone, `unshare` takes no pointer and changes nothing: it fails with EINVAL unless the
    // caller is the only thread of its process. rustix has no flag for it.
    let alone = unsafe { libc::unshare(libc::CLONE_THREAD) };
    if alone == 0 { Ok(()) } else { Err(PrivilegeError::Threads) }
}

/// Becomes `identity` without a way back: no other group, no capability in any set, none to be had from a set-uid or
/// capable file (`no_new_privs`), no core dumps and no tracing by equals (`PR_SET_DUMPABLE` 0).
///
/// A parent-death signal that was set before is cleared by the kernel when the uid changes: set it afterwards.
/// Descriptors stay open; what they may do is not taken back.
///
/// # Errors
/// See [`PrivilegeError`]; end the process.
pub fn drop_to(identity: Identity) -> Result<(), PrivilegeError> {
    become_identity(identity, open_status()?)
}

/// [`drop_to`] in a cell: `root` becomes the whole file system of this process, in which it may do all but execute files
/// and make devices, and [`confine`] takes the rest away. Returns how much of that the kernel enforces.
///
/// # Errors
/// See [`PrivilegeError`]; end the process.
pub fn enter_cell(
    root: &Path,
    identity: Identity,
    without: WithoutLandlock,
) -> Result<Enforcement, PrivilegeError> {
    let status = open_status()?;
    step("changing the root folder", rustix::process::chroot(root))?;
    step("entering the new root folder", rustix::process::chdir("/"))?;
    let own = Confinement { read_write: vec!["/".into()], read_only: Vec::new() };
    let enforcement = confine(&own, without)?;
    become_identity(identity, status)?;
    Ok(enforcement)
}

/// The rights over files that [`enter_files`] keeps.
const OVER_FILES: CapabilitySet =
    CapabilitySet::CHOWN.union(CapabilitySet::DAC_OVERRIDE).union(CapabilitySet::FOWNER);

/// Who works on files of others: an id that nobody has, so that there is no process that it could stop or trace.
const NOBODY_ELSE: Identity = Identity { uid: u32::MAX - 2, gid: u32::MAX - 2 };

/// Becomes one who may do all with the files below `root`, which becomes its whole file system, and nothing else: in new
/// namespaces of network and System V IPC, with no other group, of root's capabilities only those that are needed to change
/// files of others, and none to be had. What [`enter_cell`] takes away besides is taken away here too, as far as the kernel
/// has it.
///
/// # Errors
/// See [`PrivilegeError`]; end the process.
pub fn enter_files(root: &Path) -> Result<Enforcement, PrivilegeError> {
    let own = Confinement { read_write: vec!["/".into()], read_only: Vec::new() };
    enter_alone(root, &own, OVER_FILES)
}

/// As [`enter_files`], but it may only read them and list folders.
///
/// # Errors
/// See [`PrivilegeError`]; end the process.
pub fn enter_reading(root: &Path) -> Result<Enforcement, PrivilegeError> {
    let own = Confinement { read_write: Vec::new(), read_only: vec!["/".into()] };
    enter_alone(root, &own, CapabilitySet::DAC_READ_SEARCH)
}

fn enter_alone(root: &Path, own: &Confinement, kept: CapabilitySet) -> Result<Enforcement, PrivilegeError> {
    let status = open_status()?;
    require_one_thread()?;
    let apart = rustix::thread::UnshareFlags::NEWNET | rustix::thread::UnshareFlags::NEWIPC;
    // SAFETY: the flags leave the descriptor table shared, so no descriptor changes its meaning for another thread.
    step("leaving the network", unsafe { rustix::thread::unshare_unsafe(apart) })?;
    step("changing the root folder", rustix::process::chroot(root))?;
    step("entering the new root folder", rustix::process::chdir("/"))?;
    let enforcement = confine(own, WithoutLandlock::Allow)?;
    become_with(NOBODY_ELSE, kept, status)?;
    Ok(enforcement)
}

/// Where the kernel says what this process is. Opened first, because it may be out of reach later.
fn open_status() -> Result<fs_err::File, PrivilegeError> {
    step("opening the process status", fs_err::File::open("/proc/self/status"))
}

fn become_identity(identity: Identity, status: fs_err::File) -> Result<(), PrivilegeError> {
    become_with(identity, CapabilitySet::empty(), status)
}

/// Becomes this identity, and keeps these capabilities.
fn become_with(identity: Identity, kept: CapabilitySet, status: fs_err::File) -> Result<(), PrivilegeError> {
    let Identity { uid, gid } = identity;
    if [uid, gid].iter().any(|&id| id == 0 || id == u32::MAX) {
        return Err(PrivilegeError::Identity(identity));
    }
    require_one_thread()?;

    step("setting no_new_privs", rustix::thread::set_no_new_privs(true))?;
    // Needs CAP_SETPCAP, so it comes before the uid changes.
    for capability in known_capabilities().filter(|capability| !kept.contains(*capability)) {
        step("emptying the bounding set", rustix::thread::remove_capability_from_bounding_set(capability))?;
    }
    step("emptying the ambient set", rustix::thread::clear_ambient_capability_set())?;
    step("setting the keep-capabilities flag", rustix::thread::set_keep_capabilities(!kept.is_empty()))?;

    // The C library's forms and not the bare calls: they also tell it about the change.
    // SAFETY: a length of zero lets the kernel read nothing through the pointer.
    step("leaving all groups", check(unsafe { libc::setgroups(0, std::ptr::null()) }))?;
    // SAFETY: takes three integers.
    step("changing the group", check(unsafe { libc::setresgid(gid, gid, gid) }))?;
    // SAFETY: takes three integers.
    step("changing the user", check(unsafe { libc::setresuid(uid, uid, uid) }))?;

    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    step("emptying the capability sets", rustix::thread::set_capabilities(None, sets))?;
    step("clearing the keep-capabilities flag", rustix::thread::set_keep_capabilities(false))?;
    // Last, because a change of uid resets it.
    step("becoming undumpable", set_dumpable_behavior(DumpableBehavior::NotDumpable))?;
    verify(identity, kept, status)
}

/// Every capability that this kernel knows: numbers are handed out without gaps, and the first unknown one is an
/// error to ask about.
fn known_capabilities() -> impl Iterator<Item = CapabilitySet> {
    (0..u64::BITS)
        .map(|number| CapabilitySet::from_bits_retain(1 << number))
        .take_while(|&capability| rustix::thread::capability_is_in_bounding_set(capability).is_ok())
}

/// Reads back what the kernel thinks of this process.
fn verify(identity: Identity, kept: CapabilitySet, mut file: fs_err::File) -> Result<(), PrivilegeError> {
    let mut status = String::new();
    step("reading the process status", file.read_to_string(&mut status))?;
    remains(&status, identity, kept).map_or(Ok(()), |what| Err(PrivilegeError::Remains(what)))
}

/// Says what of `/proc/self/status` is more than an `identity` with these capabilities would have.
fn remains(status: &str, identity: Identity, kept: CapabilitySet) -> Option<&'static str> {
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let all_are = |name, id: u32| {
        field(name).is_some_and(|ids| {
            ids.split_whitespace().count() == 4 && ids.split_whitespace().all(|text| text.parse() == Ok(id))
        })
    };
    let holds = |name, kept: CapabilitySet| {
        field(name).is_some_and(|bits| u64::from_str_radix(bits, 16).ok() == Some(kept.bits()))
    };
    if !all_are("Uid", identity.uid) {
        return Some("a user id is another one");
    }
    if !all_are("Gid", identity.gid) {
        return Some("a group id is another one");
    }
    if field("Groups").is_none_or(|groups| !groups.is_empty()) {
        return Some("supplementary groups are left");
    }
    let none = CapabilitySet::empty();
    if !["CapInh", "CapAmb"].into_iter().all(|name| holds(name, none))
        || !["CapPrm", "CapEff", "CapBnd"].into_iter().all(|name| holds(name, kept))
    {
        return Some("capabilities are left");
    }
    if field("NoNewPrivs") != Some("1") {
        return Some("no_new_privs is not set");
    }
    None
}

/// The version of Landlock's interface in this kernel; `None` if it has none or it is switched off.
#[must_use]
pub fn landlock_abi() -> Option<u32> {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with this flag the call takes no pointer and makes nothing: it answers a number.
    let abi = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0_usize,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    u32::try_from(abi).ok().filter(|abi| *abi > 0)
}

/// What a confined process may still reach by path. Everything else on the file system is out of reach; descriptors
/// that are open already are not affected.
#[derive(Debug, Clone, Default)]
pub struct Confinement {
    /// Folders in which all may be done except executing files and making devices.
    pub read_write: Vec<PathBuf>,
    /// Folders and files that may be read and listed, not executed.
    pub read_only: Vec<PathBuf>,
}

/// What to do on a kernel without Landlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutLandlock {
    /// Fail with [`PrivilegeError::NoLandlock`].
    Refuse,
    /// Go on unconfined: the operator accepted that.
    Allow,
}

/// How much of a [`Confinement`] the kernel enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforcement {
    /// All of it: paths, TCP binds, signals and abstract Unix sockets.
    Full,
    /// The paths, and what else this kernel's ABI has.
    Partial,
    /// Nothing, as [`WithoutLandlock::Allow`] permits.
    None,
}

/// The ABI whose rights are known and were reviewed: 4 denies TCP binds, 5 device ioctls, 6 scopes signals and
/// abstract Unix sockets.
const REVIEWED: ABI = ABI::V6;

/// Confines the process by Landlock, for good: paths as in `confinement`, no binding of TCP ports, no executing, no
/// signals to and no abstract Unix sockets of processes outside, each as far as the kernel has it.
///
/// # Errors
/// See [`PrivilegeError`]; a path that does not exist is one.
pub fn confine(confinement: &Confinement, without: WithoutLandlock) -> Result<Enforcement, PrivilegeError> {
    require_one_thread()?;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = AccessFs::from_all(REVIEWED)
        & !(AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev);

    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(REVIEWED))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::Signal | Scope::AbstractUnixSocket)?
        .create()?;
    for (paths, access) in [(&confinement.read_write, write), (&confinement.read_only, read)] {
        for path in paths {
            ruleset = ruleset.add_rule(rule(path, access)?)?;
        }
    }
    let status = ruleset.restrict_self()?;
    let available = matches!(status.landlock, LandlockStatus::Available { .. });
    match (status.ruleset, available, without) {
        (RulesetStatus::FullyEnforced, true, _) => Ok(Enforcement::Full),
        (RulesetStatus::PartiallyEnforced, true, _) => Ok(Enforcement::Partial),
        (_, _, WithoutLandlock::Allow) => Ok(Enforcement::None),
        (_, _, WithoutLandlock::Refuse) => Err(PrivilegeError::NoLandlock),
    }
}

fn rule(path: &Path, access: BitFlags<AccessFs>) -> Result<PathBeneath<PathFd>, PrivilegeError> {
    let fd = PathFd::new(path).map_err(|source| PrivilegeError::Path { path: path.to_owned(), source })?;
    let is_folder = step("reading the kind of a path", fs_err::metadata(path))?.is_dir();
    // The kernel refuses rights for folders on anything else.
    let access = if is_folder { access } else { access & AccessFs::from_file(REVIEWED) };
    Ok(PathBeneath::new(fd, access))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: Identity = Identity { uid: 65534, gid: 65533 };

    const DROPPED: &str = "Name:\tx\nUid:\t65534\t65534\t65534\t65534\nGid:\t65533\t65533\t65533\t65533\n\
        Groups:\t \nNoNewPrivs:\t1\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\n\
        CapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\n";

    #[test]
    fn a_process_without_privilege_has_no_remains() {
        assert_eq!(remains(DROPPED, NOBODY, CapabilitySet::empty()), None);
    }

    #[test]
    fn every_remaining_privilege_is_noticed() {
        let changes = [
            ("Uid:\t65534\t65534\t65534\t65534", "Uid:\t65534\t65534\t0\t65534"),
            ("Uid:\t65534\t65534\t65534\t65534", "Uid:\t65534"),
            ("Gid:\t65533\t65533\t65533\t65533", "Gid:\t0\t65533\t65533\t65533"),
            ("Groups:\t ", "Groups:\t0 "),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
            ("CapInh:\t0000000000000000", "CapInh:\t0000000000000001"),
            ("CapPrm:\t0000000000000000", "CapPrm:\t0000000000000400"),
            ("CapEff:\t0000000000000000", "CapEff:\t"),
            ("CapBnd:\t0000000000000000", "CapBnd:\t000001ffffffffff"),
            ("CapAmb:\t0000000000000000\n", ""),
        ];
        for (from, to) in changes {
            let status = DROPPED.replace(from, to);
            assert_ne!(status, DROPPED);
            assert!(remains(&status, NOBODY, CapabilitySet::empty()).is_some(), "{to:?}");
        }
        assert!(remains("", NOBODY, CapabilitySet::empty()).is_some());
    }

    #[test]
    fn root_and_the_reserved_id_are_no_identity() {
        for (uid, gid) in [(0, 1), (1, 0), (u32::MAX, 1), (1, u32::MAX)] {
            let result = drop_to(Identity { uid, gid });
            assert!(matches!(result, Err(PrivilegeError::Identity(_))), "{uid} {gid}");
        }
    }

    #[test]
    fn a_process_with_threads_is_refused() {
        // The test harness itself has a second thread.
        let result = std::thread::spawn(|| drop_to(NOBODY)).join().unwrap();
        assert!(matches!(result, Err(PrivilegeError::Threads)));
        let result = std::thread::spawn(|| confine(&Confinement::default(), WithoutLandlock::Refuse));
        assert!(matches!(result.join().unwrap(), Err(PrivilegeError::Threads)));
    }
}
