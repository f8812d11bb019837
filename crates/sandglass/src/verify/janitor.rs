//! Removes the control groups of the stage's servers, and what they needed of the cache folder, once `verify` has ended, also
//! when it was killed. They are all that it makes outside of its own namespaces.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use sandglass_engine::gvisor::cache;
use sandglass_linux::cgroup::{self, Cgroups};
use sandglass_types::InstanceId;

use crate::cli::verify::Janitor;

/// How long the last processes of a machine that was thrown away may take to be gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// The process that waits for the end of this one.
pub(super) struct Waiting {
    child: Child,
    /// Closes with this process, however it ends.
    line: Option<ChildStdin>,
}

/// Starts it. A group of its own keeps the terminal's Ctrl-C from it.
pub(super) fn start(cache: &Path, instances: &[&InstanceId]) -> anyhow::Result<Waiting> {
    let mut command = Command::new(std::env::current_exe().context("this program can't find itself")?);
    command.arg("verify-janitor").arg("--cache-dir").arg(cache);
    for instance in instances {
        command.arg("--instance").arg(instance.as_str());
    }
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
        .context("nobody could be started to clear up")?;
    let line = child.stdin.take();
    Ok(Waiting { child, line })
}

impl Waiting {
    /// Lets it clear up now.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        drop(self.line.take());
        if !self.child.wait()?.success() {
            bail!(
                "something of the stage is left: `sandglass-…` below {} names its control groups",
                cgroup::ROOT
            );
        }
        Ok(())
    }
}

/// Waits until nobody holds the other end of standard input any more, and clears up.
pub(crate) fn run(args: &Janitor) -> anyhow::Result<ExitCode> {
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
    for instance in &args.instance {
        let groups = Cgroups::detect(cgroup::ROOT.as_ref(), instance.as_str())?;
        for name in groups.children()? {
            groups.leaf(&name)?.remove(PATIENCE)?;
        }
        groups.remove_parent()?;
        cache::forget(&args.cache_dir, instance)?;
    }
    Ok(ExitCode::SUCCESS)
}
