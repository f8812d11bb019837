//! `sandglass verify`: tries to break out of a sandbox in every way that is known, and says what held.
//!
//! A *probe* is one attack. It is carried out from inside, as root, by code in the guest's own binary, and what it says
//! there counts for nothing: a *witness* outside decides, who looks at what the attack was after, or was told a secret
//! that only lies outside. The same attack then runs where it must succeed, on a *ground* that was weakened on purpose;
//! if it does not, the probe proves nothing and says so.
//!
//! ```text
//! verify          prepares the template on this machine, leaves the machine, waits
//! ├─ janitor      outlives it, and removes the control groups and pins: all else ends with its namespaces
//! └─ stage        process 1 of a machine of its own: processes, mounts, network, IPC, host name, a disk
//!    ├─ strict    a server as it is delivered, and sandboxes in it
//!    ├─ bare      a server whose sandboxes are processes of the stage, as root
//!    ├─ fence     a server in front of a network in which everything answers, sandboxes in it, and one whose walls were
//!    │            taken away
//!    └─ canaries  what the attacks are after
//! ```
//!
//! So an attack that succeeds hits the stage, which is thrown away. What weakens a sandbox is done to it from outside,
//! by the root user of the stage (`fence`), or is the documented engine for development (`bare`); there is nothing in `serve`
//! to switch off.

mod canary;
mod checklist;
mod egress;
mod ground;
pub(crate) mod janitor;
mod judge;
mod probes;
mod report;
mod sandbox;
mod secrets;
mod server;
pub(crate) mod stage;
mod there;
mod witness;
mod yard;

use std::process::ExitCode;

use anyhow::bail;
use sandglass_control::template;
use sandglass_types::InstanceId;

use crate::cli::verify::Verify;
use crate::startup::StartupError;
use crate::{guest_binary, serve};

pub(crate) use probes::Group;

/// Exit codes but 0, which says that every probe held.
const BROKEN: u8 = 1;
const SKIPPED: u8 = 3;

/// Attacks, and prints what held.
pub(crate) fn run(args: &Verify) -> anyhow::Result<ExitCode> {
    if args.list {
        report::list(&mut std::io::stdout().lock())?;
        return Ok(ExitCode::SUCCESS);
    }
    if let (Some(url), Some(key)) = (&args.url, &args.api_key) {
        return there::run(url, key, args);
    }
    if !rustix::process::geteuid().is_root() {
        bail!(
            "verify needs root for a machine of its own to attack; with --url it attacks a server that runs"
        );
    }
    // Before the network is left: the first time, this downloads packages.
    let guest = guest_binary::install(&args.cache_dir, None)?;
    template::prepare(&args.cache_dir, "base", |line| tracing::info!("{line}"))
        .map_err(StartupError::from)?;
    let plan = stage::Plan {
        cache: std::path::absolute(&args.cache_dir)?,
        runsc: serve::find_runsc(args.runsc.as_deref())?,
        guest: std::path::absolute(guest)?,
        strict: InstanceId::random(),
        bare: InstanceId::random(),
        fence: InstanceId::random(),
        only: args.only.clone(),
        cycles: args.cycles,
        json: args.json,
    };
    let janitor = janitor::start(&plan.cache, &[&plan.strict, &plan.bare, &plan.fence])?;
    let code = stage::enter(&plan);
    janitor.finish()?;
    code
}
