//! `sandglass doctor`: whether this machine can isolate, check by check, with the remedy.
//!
//! Each module looks at one thing: `look` acts and returns facts, `judge` makes checks of facts and is pure. What is
//! made to be looked at (a namespace, a mount, a loop device, a sandbox) lives in files without a name and in private
//! namespaces, so that the kernel takes it away however this process ends. Only a control group has no such owner: the
//! next doctor removes what a killed one left.

mod cgroups;
mod check;
mod disk;
mod kvm;
mod machine;
mod network;
mod room;
mod runsc;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::Table;
use sandglass_engine::gvisor::HostPaths;
use sandglass_linux::process::{Launch, LaunchError, RunError, run as run_program};
use sandglass_types::error::Chain;

use crate::cli;
use crate::data_dir::DataDir;
use crate::startup::{Reason, StartupError};
use check::{Check, Verdict};

/// Most bytes of what a program says that are looked at.
const MAX_SAID: usize = 4096;

/// Looks at everything, prints it, and exits with 0 only if sandboxes can be made.
pub(crate) fn run(args: &cli::Doctor) -> anyhow::Result<ExitCode> {
    let checks = examine(&args.data_dir, &args.cache_dir);
    let good = checks.iter().all(|check| check.verdict() != Verdict::Bad);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &serde_json::json!({ "good": good, "checks": checks }))?;
        writeln!(out)?;
    } else {
        let mut table = Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        for check in &checks {
            table.add_row([check.verdict().label(), check.name(), &check.text()]);
        }
        let summary = if good { "sandboxes can be made here" } else { "sandboxes can't be made here" };
        writeln!(out, "{table}\n{summary}")?;
    }
    Ok(ExitCode::from(u8::from(!good)))
}

fn examine(data_dir: &Path, cache_dir: &Path) -> Vec<Check> {
    let root = rustix::process::geteuid().is_root();
    let (data, cache) = (existing(data_dir), existing(cache_dir));
    let runsc = in_path("runsc");
    let mut checks = machine::judge(&machine::look());
    if root {
        checks.extend(network::judge(&network::look()));
        checks.push(cgroups::judge(&cgroups::look(Path::new(sandglass_linux::cgroup::ROOT))));
        checks.extend(disk::judge(&disk::look(data, cache)));
    } else {
        let names = [network::NAMES.as_slice(), &[cgroups::NAME], &disk::NAMES].concat();
        checks.extend(names.into_iter().map(Check::only_for_root));
    }
    checks.extend(runsc::judge(&runsc::look(runsc.as_deref(), root)));
    checks.push(template_tools(in_path("mmdebstrap").is_some()));
    checks.push(kvm::judge(&kvm::look(Path::new("/"))));
    checks.extend(room::judge(&room::look(data, cache)));
    checks
}

/// The checks without which a start makes no sense. A server that has sandboxes to take up starts even so, unless it
/// can't drive them: nothing else could end them.
pub(crate) fn before_start(data: &DataDir, cache_dir: &Path, runsc: &Path) -> Result<(), StartupError> {
    let cache_dir = existing(cache_dir);
    let mut checks = runsc::judge(&runsc::look(Some(runsc), false));
    let sandboxes = HostPaths { data: data.host(), cache: cache_dir.to_owned() }.sandboxes();
    let is_empty = std::fs::read_dir(sandboxes).map_or(true, |mut entries| entries.next().is_none());
    if is_empty {
        checks.push(cgroups::judge(&cgroups::look(Path::new(sandglass_linux::cgroup::ROOT))));
        checks.extend(network::judge(&network::look()));
        checks.extend(disk::judge(&disk::look(data.path(), cache_dir)));
    }
    checks.into_iter().find_map(Check::into_failure).map_or(Ok(()), Err)
}

fn template_tools(installed: bool) -> Check {
    const NAME: &str = "mmdebstrap";
    if installed {
        return Check::good(NAME, "there");
    }
    Check::bad(NAME, Reason::Template, "it is not installed, and builds the template")
        .with_remedy("`apt install mmdebstrap`")
}

/// A program, where the shell would find it.
pub(crate) fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// The folder, or that above it which it would be made in.
fn existing(folder: &Path) -> &Path {
    folder.ancestors().find(|path| path.is_dir()).unwrap_or_else(|| Path::new("/"))
}

/// The start of what a program said, in one line.
/// Runs a program and gives what it printed, or why it did not do what it should.
fn outcome(launch: Result<Launch, LaunchError>, timeout: Duration) -> Result<String, String> {
    let output = launch
        .map_err(RunError::from)
        .and_then(|launch| run_program(launch, b"", timeout, MAX_SAID))
        .map_err(|error| Chain(&error).to_string())?;
    if output.status.success() {
        Ok(said(&output.stdout))
    } else {
        Err(format!("{}: {}", output.status, said(&output.stderr)))
    }
}

fn said(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes.get(..MAX_SAID).unwrap_or(bytes)).trim().replace('\n', " | ");
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_can_isolate_and_set_uid_programs_are_spoken_of() {
        let folder = tempfile::tempdir().unwrap();
        let checks = examine(&folder.path().join("data"), &folder.path().join("cache"));
        let bad: Vec<_> = checks.iter().filter(|check| check.verdict() == Verdict::Bad).collect();
        assert!(bad.is_empty(), "{bad:?}");
        assert!(checks.iter().any(|check| check.name() == "set-uid programs"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "something is left");
    }

    #[test]
    fn a_folder_that_is_not_there_yet_counts_as_the_one_above() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(existing(&folder.path().join("a/b/c")), folder.path());
        assert_eq!(existing(Path::new("/no/such/folder")), Path::new("/"));
    }

    #[test]
    fn what_programs_say_is_one_short_line() {
        assert_eq!(said(b" a\nb\x1b[0m \n"), "a | b[0m");
        assert_eq!(said(&b"x".repeat(10_000)).len(), 200);
    }

    #[test]
    fn without_tools_there_is_no_template() {
        assert_eq!(template_tools(true).verdict(), Verdict::Good);
        assert!(template_tools(false).text().contains("apt install mmdebstrap"));
    }
}
