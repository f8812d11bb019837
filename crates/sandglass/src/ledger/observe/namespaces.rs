//! Network namespaces: by their pins, by the processes in them, and by sockets that keep one alive without either.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::ffi::OsStrExt as _;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use sandglass_linux::namespace::Netns;
use sandglass_types::SandboxId;

use super::{Claim, Kind, Object, Process, Roles, Scope, is_gone, shown};

/// What is in the folder of pins.
#[derive(Debug, Default)]
pub(super) struct Pins(Vec<Pin>);

#[derive(Debug)]
struct Pin {
    name: String,
    claim: Claim,
    /// `None` for a file on which nothing is mounted.
    inode: Option<u64>,
}

impl Pins {
    /// The slot that a namespace belongs to.
    pub(super) fn slot(&self, inode: u64) -> Option<Claim> {
        self.0.iter().find(|pin| pin.inode == Some(inode)).map(|pin| pin.claim.clone())
    }

    #[cfg(test)]
    pub(super) fn of(pins: &[(&str, u64)]) -> Self {
        let pin = |(slot, inode): &(&str, u64)| Pin {
            name: format!("{slot}-in"),
            claim: Claim::Slot((*slot).to_owned()),
            inode: Some(*inode),
        };
        Self(pins.iter().map(pin).collect())
    }
}

/// Reads the folder of pins.
pub(super) fn pins(scope: &Scope) -> io::Result<Pins> {
    let mut pins = Vec::new();
    let entries = match fs_err::read_dir(scope.pins()) {
        Err(error) if is_gone(&error) => return Ok(Pins(pins)),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let inode = match Netns::open(&entry.path()) {
            Ok(netns) => Some(netns.inode()?),
            Err(error) if is_gone(&error) => continue,
            // A pin belongs to root alone; a file, folder or link that is none is left over as such.
            Err(_) => None,
        };
        let name = entry.file_name();
        pins.push(Pin { claim: scope.of_pin(name.as_bytes()), name: shown(name.as_bytes()), inode });
    }
    Ok(Pins(pins))
}

/// Slots in whose namespaces processes of a sandbox run.
pub(super) fn used_slots(processes: &[Process], roles: &Roles, pins: &Pins) -> BTreeMap<String, SandboxId> {
    let mut slots = BTreeMap::new();
    for process in processes {
        if let Some(sandbox) = roles.sandbox(process)
            && let Some(Claim::Slot(slot)) = process.network.and_then(|inode| pins.slot(inode))
        {
            slots.insert(slot, sandbox.clone());
        }
    }
    slots
}

/// Every namespace that carries the instance.
pub(super) fn objects(
    processes: &[Process],
    roles: &Roles,
    pins: &Pins,
    unreadable: &mut Vec<String>,
) -> io::Result<Vec<Object>> {
    let mut objects: Vec<Object> = pins
        .0
        .iter()
        .map(|pin| {
            let name = match pin.inode {
                Some(inode) => format!("{} (net:[{inode}])", pin.name),
                None => format!("{} (a file without a namespace)", pin.name),
            };
            Object { kind: Kind::Namespace, name, claim: pin.claim.clone() }
        })
        .collect();
    let mut seen = BTreeSet::from([Netns::current()?.inode()?]);
    for process in processes {
        let unpinned = process.network.filter(|inode| pins.slot(*inode).is_none());
        if let Some(sandbox) = roles.sandbox(process)
            && let Some(inode) = unpinned
            && seen.insert(inode)
        {
            let name = format!("net:[{inode}] of process {} ({})", process.pid, process.name);
            objects.push(Object { kind: Kind::Namespace, name, claim: Claim::Sandbox(sandbox.clone()) });
        }
    }
    for process in processes.iter().filter(|process| roles.is_server(process)) {
        match of_sockets(process) {
            Ok(found) => {
                for (number, inode) in found {
                    if pins.slot(inode).is_none() && Some(inode) != process.network && seen.insert(inode) {
                        let (pid, comm) = (process.pid, &process.name);
                        let name = format!("net:[{inode}] kept by socket {number} of process {pid} ({comm})");
                        objects.push(Object { kind: Kind::Namespace, name, claim: Claim::Nobody });
                    }
                }
            }
            Err(error) if is_gone(&error) => {}
            Err(error) => unreadable.push(format!("sockets of process {}: {error}", process.pid)),
        }
    }
    Ok(objects)
}

/// The namespaces in which a process's sockets were made.
fn of_sockets(process: &Process) -> io::Result<Vec<(i32, u64)>> {
    let mut found = Vec::new();
    let Some(pid) = Pid::from_raw(process.pid) else { return Ok(found) };
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    for descriptor in &process.descriptors {
        if !descriptor.target.as_os_str().as_bytes().starts_with(b"socket:[") {
            continue;
        }
        // A copy that is closed at the end of this turn; the number may mean another file by now, or none.
        let socket = match pidfd_getfd(&pidfd, descriptor.number, PidfdGetfdFlags::empty()) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::BADF) => continue,
            Err(error) => return Err(error.into()),
        };
        match Netns::of_socket(&socket) {
            Ok(netns) => found.push((descriptor.number, netns.inode()?)),
            // Not a socket any more.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOTTY.raw_os_error()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}
