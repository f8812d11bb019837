//! Reading the machine. Nothing here decides what is left over.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Context as _;
use sandglass_linux::netlink::Rtnetlink;
use sandglass_types::{InstanceId, SandboxId};

use super::claim::{Claim, Scope};
use super::judge::{Kind, Object, Observed};
use crate::cli::Engine;

mod cgroups;
mod files;
mod mounts;
mod namespaces;
mod processes;

use processes::Process;

/// How many things that could not be read are told.
const MAX_UNREADABLE: usize = 20;

/// Reads all that carries the instance.
///
/// # Errors
/// A whole kind of things can't be read.
pub(super) fn observe(data_dir: &Path, instance: &InstanceId, engine: Engine) -> anyhow::Result<Observed> {
    let scope = Scope::new(data_dir, instance);
    let mut unreadable = Vec::new();
    let processes = processes::read(&scope, &mut unreadable).context("processes can't be listed")?;
    let pins = namespaces::pins(&scope).context("pinned namespaces can't be listed")?;
    let roles = processes::roles(&scope, &processes, &pins);

    // A slot belongs to the sandbox that is configured with it, or runs in it.
    let mut slots = files::configured_slots(&scope).context("sandbox folders can't be listed")?;
    slots.extend(namespaces::used_slots(&processes, &roles, &pins));

    let mut objects = processes::objects(&processes, &roles);
    objects.extend(processes::descriptors(&scope, &processes, &roles, &pins));
    objects.extend(files::objects(&scope).context("files can't be listed")?);
    // Other engines have nothing of these to make, and who may use them perhaps no right to look.
    if engine == Engine::Gvisor {
        objects.extend(namespaces::objects(&processes, &roles, &pins, &mut unreadable)?);
        objects.extend(mounts::objects(&scope, &processes, &mut unreadable).context("mounts can't be read")?);
        objects.extend(mounts::loop_devices(&scope).context("loop devices can't be listed")?);
        objects.extend(cgroups::objects(&scope).context("control groups can't be listed")?);
        objects.extend(links(instance).context("network links can't be listed")?);
    }

    for object in &mut objects {
        settle(&mut object.claim, &slots);
    }
    unreadable.truncate(MAX_UNREADABLE);
    let unused = files::unused(&scope).context("sandbox folders can't be listed")?;
    Ok(Observed { objects, unused, server: roles.server_runs(), unreadable })
}

/// Who does what among the processes.
#[derive(Debug, Default)]
struct Roles {
    /// Processes that belong to a sandbox or carry the instance otherwise.
    claims: BTreeMap<i32, Claim>,
    /// The server's halves, and programs that they run for no sandbox in particular.
    server: BTreeSet<i32>,
}

impl Roles {
    fn server_runs(&self) -> bool {
        !self.server.is_empty()
    }

    fn sandbox(&self, process: &Process) -> Option<&SandboxId> {
        match self.claims.get(&process.pid) {
            Some(Claim::Sandbox(id)) => Some(id),
            _ => None,
        }
    }

    fn is_server(&self, process: &Process) -> bool {
        self.server.contains(&process.pid)
    }
}

/// A slot's things are those of its sandbox.
fn settle(claim: &mut Claim, slots: &BTreeMap<String, SandboxId>) {
    if let Claim::Slot(slot) = claim
        && let Some(sandbox) = slots.get(slot)
    {
        *claim = Claim::Sandbox(sandbox.clone());
    }
}

/// Both ends of a slot's link are made inside namespaces, so one that the machine itself sees has lost its own.
fn links(instance: &InstanceId) -> std::io::Result<Vec<Object>> {
    let links = Rtnetlink::open()?.links()?;
    let ours = links.into_iter().filter(|link| link.name.contains(instance.as_str()));
    Ok(ours.map(|link| Object { kind: Kind::Link, name: link.name, claim: Claim::Nobody }).collect())
}

/// A name from outside, fit for a terminal.
fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().to_string()
}

/// Whether a process, or what of it was to be read, went away meanwhile.
fn is_gone(error: &std::io::Error) -> bool {
    let gone = [rustix::io::Errno::NOENT, rustix::io::Errno::SRCH].map(rustix::io::Errno::raw_os_error);
    // What wraps an error to name the path hides its number but keeps its kind.
    error.kind() == std::io::ErrorKind::NotFound
        || error.raw_os_error().is_some_and(|raw| gone.contains(&raw))
}
