//! Processes and what they hold.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::namespaces::Pins;
use super::{Claim, Kind, Object, Roles, Scope, is_gone, shown};

/// Upper bound for what is read of one file of a process, in bytes. The kernel's own for arguments and environment
/// together is larger, but what is looked for comes early.
const MAX_TEXT: u64 = 256 * 1024;

/// One process, as far as the ledger cares.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) pid: i32,
    pub(super) parent: i32,
    pub(super) name: String,
    /// The path of its group in every hierarchy.
    pub(super) cgroups: Vec<String>,
    pub(super) arguments: Vec<u8>,
    pub(super) environment: Vec<u8>,
    /// Its working directory and its root.
    pub(super) folders: Vec<PathBuf>,
    pub(super) network: Option<u64>,
    pub(super) mounts: Option<u64>,
    /// Device and inode of its program.
    pub(super) program: Option<(u64, u64)>,
    pub(super) descriptors: Vec<Descriptor>,
    /// Whether one of its descriptors holds the lock of the data folder.
    pub(super) lock: bool,
}

/// An open file of a process.
#[derive(Debug)]
pub(super) struct Descriptor {
    pub(super) number: i32,
    /// A path, or a text such as `socket:[…]`.
    pub(super) target: PathBuf,
}

/// Reads all processes but this one and the kernel's own.
///
/// A process that has a capability which this one can't have is read as far as everybody may: a server with no more
/// privilege than this process can't have started it. Without root that goes for all that can't be read: most belong to
/// others.
pub(super) fn read(scope: &Scope, unreadable: &mut Vec<String>) -> io::Result<Vec<Process>> {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let root = rustix::process::geteuid().is_root();
    let bound = capabilities("CapBnd:", &text(Path::new("/proc/self/status"))?).unwrap_or(0);
    let mut processes = Vec::new();
    for entry in fs_err::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        if pid == own {
            continue;
        }
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let outcome = read_public(pid, &folder).and_then(|process| {
            let Some(mut process) = process else { return Ok(None) };
            match read_private(&mut process, &folder, &scope.data_dir) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    let held = capabilities("CapPrm:", &text(&folder.join("status"))?).unwrap_or(0);
                    if root && held & !bound == 0 { Err(error) } else { Ok(Some(process)) }
                }
                outcome => outcome.map(|()| Some(process)),
            }
        });
        match outcome {
            Ok(process) => processes.extend(process),
            Err(error) if is_gone(&error) => {}
            Err(error) => unreadable.push(format!("process {pid}: {error}")),
        }
    }
    Ok(processes)
}

/// What everybody may read; `None` for a thread of the kernel.
fn read_public(pid: i32, folder: &Path) -> io::Result<Option<Process>> {
    let stat = text(&folder.join("stat"))?;
    let Some((name, parent, kernel)) = parse_stat(&stat) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its stat reads not as documented"));
    };
    if kernel {
        return Ok(None);
    }
    Ok(Some(Process {
        pid,
        parent,
        name,
        cgroups: parse_cgroups(&text(&folder.join("cgroup"))?),
        arguments: text(&folder.join("cmdline"))?,
        ..Process::default()
    }))
}

/// What only its owner or root may read.
fn read_private(process: &mut Process, folder: &Path, data_dir: &Path) -> io::Result<()> {
    process.environment = if_there(text(&folder.join("environ")))?.unwrap_or_default();
    process.network = namespace(&folder.join("ns/net"))?;
    process.mounts = namespace(&folder.join("ns/mnt"))?;
    process.program = if_there(std::fs::metadata(folder.join("exe")))?.map(|file| (file.dev(), file.ino()));
    for link in ["cwd", "root"] {
        process.folders.extend(if_there(std::fs::read_link(folder.join(link)))?);
    }
    let Some(entries) = if_there(std::fs::read_dir(folder.join("fd")))? else { return Ok(()) };
    for entry in entries {
        let Some(entry) = if_there(entry)? else { break };
        let Some(target) = if_there(std::fs::read_link(entry.path()))? else { continue };
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if target == data_dir {
            let info = if_there(text(&folder.join(format!("fdinfo/{number}"))))?.unwrap_or_default();
            process.lock |= holds_lock(&info);
        }
        process.descriptors.push(Descriptor { number, target });
    }
    Ok(())
}

/// A set of capabilities in `proc_pid_status(5)`.
fn capabilities(field: &str, status: &[u8]) -> Option<u64> {
    let status = String::from_utf8_lossy(status);
    let set = status.lines().find_map(|line| line.strip_prefix(field))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

/// `None` for what is gone: a process that ends loses its parts one by one.
fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn text(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(MAX_TEXT).read_to_end(&mut text)?;
    Ok(text)
}

fn namespace(path: &Path) -> io::Result<Option<u64>> {
    Ok(if_there(std::fs::read_link(path))?.and_then(|link| inode_of(link.as_os_str())))
}

/// The number in `net:[4026531840]`.
pub(super) fn inode_of(link: &OsStr) -> Option<u64> {
    link.to_str()?.split_once(":[")?.1.strip_suffix(']')?.parse().ok()
}

/// `proc_pid_stat(5)`: pid, name in parentheses, state, parent, …, flags. The name may hold anything.
fn parse_stat(stat: &[u8]) -> Option<(String, i32, bool)> {
    /// `PF_KTHREAD` of `include/linux/sched.h`.
    const KERNEL_THREAD: u64 = 0x0020_0000;
    let open = stat.iter().position(|byte| *byte == b'(')?;
    let close = stat.iter().rposition(|byte| *byte == b')')?;
    let name = shown(stat.get(open + 1..close)?);
    let mut rest = std::str::from_utf8(stat.get(close + 1..)?).ok()?.split_ascii_whitespace();
    let parent = rest.nth(1)?.parse().ok()?;
    let flags: u64 = rest.nth(4)?.parse().ok()?;
    Some((name, parent, flags & KERNEL_THREAD != 0))
}

/// `cgroups(7)`: `number:controllers:path` per line.
fn parse_cgroups(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).map(str::to_owned).collect()
}

/// `proc_pid_fdinfo(5)`: locks that were taken through this open file are listed.
fn holds_lock(info: &[u8]) -> bool {
    String::from_utf8_lossy(info).lines().any(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        words.first() == Some(&"lock:") && words.contains(&"FLOCK") && words.contains(&"WRITE")
    })
}

/// Finds out who is who.
pub(super) fn roles(scope: &Scope, processes: &[Process], pins: &Pins) -> Roles {
    let by_pid: BTreeMap<i32, &Process> = processes.iter().map(|process| (process.pid, process)).collect();
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let callers = ancestors(own, std::os::unix::process::parent_id(), &by_pid);

    let mut claims = BTreeMap::new();
    for process in processes {
        if let Some(claim) = claim(scope, process, pins, callers.contains(&process.pid)) {
            claims.insert(process.pid, claim);
        }
    }
    let in_group = |process: &Process| process.cgroups.iter().any(|path| scope.of_cgroup(path).is_some());
    let mut server: BTreeSet<i32> = processes
        .iter()
        .filter(|process| process.lock && !in_group(process) && !is_watchdog(scope, process))
        .map(|process| process.pid)
        .collect();
    // The half that started the other one may have let go of the lock.
    for pid in server.clone() {
        let parent = by_pid.get(&pid).and_then(|process| Some((process, by_pid.get(&process.parent)?)));
        if let Some((child, parent)) = parent
            && child.program.is_some()
            && child.program == parent.program
        {
            server.insert(parent.pid);
        }
    }
    // And programs that they run, unless a sandbox claims them.
    loop {
        let children: Vec<i32> = processes
            .iter()
            .filter(|process| server.contains(&process.parent) && !server.contains(&process.pid))
            .filter(|process| !matches!(claims.get(&process.pid), Some(Claim::Sandbox(_))))
            .filter(|process| !in_group(process))
            .map(|process| process.pid)
            .collect();
        if children.is_empty() {
            break;
        }
        server.extend(children);
    }
    claims.retain(|pid, _| !server.contains(pid));
    Roles { claims, server }
}

fn ancestors(own: i32, parent: u32, by_pid: &BTreeMap<i32, &Process>) -> BTreeSet<i32> {
    let mut found = BTreeSet::from([own]);
    let mut next = i32::try_from(parent).unwrap_or_default();
    while let Some(process) = by_pid.get(&next)
        && found.insert(next)
    {
        next = process.parent;
    }
    found
}

/// Whose a process is. What called the ledger may well mention paths, and is not left over for it.
fn claim(scope: &Scope, process: &Process, pins: &Pins, caller: bool) -> Option<Claim> {
    let by_group = || first(process.cgroups.iter().filter_map(|path| scope.of_cgroup(path)));
    let by_folder = || first(process.folders.iter().filter_map(|path| scope.of_path(path)));
    let by_text = || {
        let texts = [&process.arguments, &process.environment];
        first(texts.iter().filter_map(|text| scope.of_arguments(text))).filter(|_| !caller)
    };
    let by_network = || process.network.and_then(|inode| pins.slot(inode));
    if is_watchdog(scope, process) {
        return Some(Claim::Instance);
    }
    by_group().or_else(by_folder).or_else(by_text).or_else(by_network).map(|claim| match claim {
        // A process is never part of a reserve.
        Claim::Instance => Claim::Nobody,
        claim => claim,
    })
}

/// Whether it ends sandboxes in time whose server is dead.
fn is_watchdog(scope: &Scope, process: &Process) -> bool {
    let mut arguments = process.arguments.split(|byte| *byte == 0).skip(1);
    let expected = [&b"watchdog"[..], b"--data-dir", scope.data_dir.as_os_str().as_bytes()];
    expected.iter().all(|expected| arguments.next() == Some(expected))
}

/// A sandbox among the claims, else the first one.
fn first(claims: impl Iterator<Item = Claim>) -> Option<Claim> {
    let claims: Vec<Claim> = claims.collect();
    claims.iter().find(|claim| matches!(claim, Claim::Sandbox(_))).or_else(|| claims.first()).cloned()
}

/// The processes themselves.
pub(super) fn objects(processes: &[Process], roles: &Roles) -> Vec<Object> {
    let claimed = processes.iter().filter_map(|process| Some((process, roles.claims.get(&process.pid)?)));
    claimed
        .map(|(process, claim)| Object {
            kind: Kind::Process,
            name: format!("{} ({})", process.pid, process.name),
            claim: claim.clone(),
        })
        .collect()
}

/// Open files below the privileged half's folder. The server may open what it likes, except what belongs to a sandbox:
/// that it must let go of.
pub(super) fn descriptors(scope: &Scope, processes: &[Process], roles: &Roles, pins: &Pins) -> Vec<Object> {
    let mut objects = Vec::new();
    for process in processes {
        for Descriptor { number, target } in &process.descriptors {
            let server = roles.is_server(process);
            let claim = if let Some(claim) = scope.of_path(target) {
                if server && !matches!(claim, Claim::Sandbox(_)) {
                    continue;
                }
                claim
            } else if !server && inode_of(target.as_os_str()).is_some_and(|inode| pins.slot(inode).is_some())
            {
                roles.sandbox(process).cloned().map_or(Claim::Nobody, Claim::Sandbox)
            } else if !server && process.lock && *target == scope.data_dir {
                // It would keep the next server out, unless it is the watchdog, which lets go of it soon.
                if is_watchdog(scope, process) { Claim::Instance } else { Claim::Nobody }
            } else {
                continue;
            };
            let name = format!(
                "{number} of process {} ({}): {}",
                process.pid,
                process.name,
                shown(target.as_os_str().as_bytes())
            );
            objects.push(Object { kind: Kind::Descriptor, name, claim });
        }
    }
    objects
}

#[cfg(test)]
mod tests;
