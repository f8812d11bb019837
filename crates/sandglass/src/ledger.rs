//! What one instance owns on this machine, read from the kernel, against what its store says it should own.
//!
//! ```text
//!   store (asked by a process without privilege) ──► Expected ─┐
//!                                                              ├─► judge ──► Verdict ──► report
//!   /proc, /sys, the data folder ─────────► Observed ──────────┘
//! ```
//!
//! [`judge`] is pure; [`observe`] only reads. The store is asked before and after each look at the machine: whatever
//! one of the two answers claims is owned, so a sandbox that comes or goes meanwhile is nobody's mistake.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sandglass_types::InstanceId;

use crate::cli::Engine;

mod claim;
mod judge;
mod observe;
pub(crate) mod owners;
mod report;

use judge::{Expected, Verdict, judge};
use owners::Owner;

/// Between two looks while waiting for nothing to be left over.
const INTERVAL: Duration = Duration::from_millis(100);

/// What to look at, and how to say it.
#[derive(Debug)]
pub(crate) struct Options {
    /// The data folder, absolute and without symbolic links.
    pub(crate) data_dir: PathBuf,
    /// Its id.
    pub(crate) instance: InstanceId,
    /// What its sandboxes are made of.
    pub(crate) engine: Engine,
    /// Print JSON.
    pub(crate) json: bool,
    /// Look again until nothing is left over, for at most so long.
    pub(crate) wait: Option<Duration>,
}

/// Prints the ledger. `true` if nothing is left over or missing, and all could be read.
///
/// `owners` answers what the store says now; [`owners::ask`] is the usual way.
///
/// # Errors
/// The store could not be asked, the machine shows nothing at all, or `out` is broken.
pub(crate) fn run(
    options: &Options,
    owners: &mut dyn FnMut() -> anyhow::Result<Vec<Owner>>,
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let deadline = options.wait.and_then(|wait| Instant::now().checked_add(wait));
    loop {
        let verdict = look(options, owners)?;
        let now = Instant::now();
        match deadline {
            Some(deadline) if !verdict.clean() && now < deadline => {
                std::thread::sleep(INTERVAL.min(deadline - now));
            }
            _ => {
                if options.json {
                    report::json(&verdict, &options.instance, out)?;
                } else {
                    report::text(&verdict, &options.instance, out)?;
                }
                return Ok(verdict.clean());
            }
        }
    }
}

fn look(
    options: &Options,
    owners: &mut dyn FnMut() -> anyhow::Result<Vec<Owner>>,
) -> anyhow::Result<Verdict> {
    let before = owners()?;
    let observed = observe::observe(&options.data_dir, &options.instance, options.engine)?;
    let after = owners()?;
    Ok(judge(observed, &Expected::new(&before, &after), options.engine))
}

#[cfg(test)]
mod tests;
