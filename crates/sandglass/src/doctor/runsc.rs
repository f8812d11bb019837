//! `runsc`: its version, what that version can't do, and whether it runs anything.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sandglass_engine::gvisor::{no_network_settings, over_control_socket, runsc_version};
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::process::{Launch, Step};
use sandglass_types::error::Chain;

use super::check::Check;
use super::outcome;
use crate::startup::Reason;

const VERSION: &str = "runsc";
const TRIAL: &str = "a trial sandbox";

/// The oldest release that was tested, as a date.
const OLDEST: u32 = 20_240_729;

/// The first release whose idle sandboxes leave the processor alone, as a date: google/gvisor, pull request 13470.
const QUIET: u32 = 20_260_701;

/// A sandbox starts in a fraction of a second; this is for a machine that stands still.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How the log of a sandbox's kernel begins. It is gVisor's own: this machine's kernel says nothing like it.
const GREETING: &str = "Starting gVisor";

/// What every release so far can't do, however it is set up.
const LIMITS: [(&str, &str); 2] = [
    (
        "set-uid programs",
        "set-uid bits and file capabilities do nothing in a sandbox: `su`, `ping` and the like stay unprivileged; \
         `sudo` works, because it asks the agent",
    ),
    (
        "extended attributes",
        "`user.*` attributes can't be set on a sandbox's disk, only on its memory file systems; the agent keeps the \
         metadata of uploaded files there, which programs inside do not see",
    ),
];

/// What was found.
#[derive(Debug)]
pub(super) struct Facts {
    program: Option<PathBuf>,
    version: Result<String, String>,
    /// What a trial sandbox printed; `None` if none was tried.
    trial: Option<Result<String, String>>,
}

/// Makes a trial sandbox if `trial` says so; that takes root.
pub(super) fn look(program: Option<&Path>, trial: bool) -> Facts {
    let version = match program {
        Some(program) => runsc_version(program).map_err(|error| Chain(&error).to_string()),
        None => Err("it is not installed".into()),
    };
    let trial = program.filter(|_| trial && version.is_ok()).map(try_out);
    Facts { program: program.map(Path::to_owned), version, trial }
}

/// Runs a command in a sandbox over this machine's own root file system, which it can't change. All that `runsc` writes
/// is on a memory file system that only it and its children see.
fn try_out(program: &Path) -> Result<String, String> {
    let run = Mount {
        source: c"none".into(),
        target: c"/run".into(),
        fstype: c"tmpfs".into(),
        flags: 0,
        data: c"size=16m".into(),
    };
    let mounts = MountNamespace::furnish(Propagation::Private, &[run, no_network_settings()]);
    let mounts = mounts.map_err(|error| Chain(&error).to_string())?;
    let launch = || {
        Launch::new(program)?
            .args(["--root", "/run", "--network=none", "--platform=systrap", "--ignore-cgroups"])?
            .args(["--overlay2=root:memory", "do", "/bin/dmesg"])?
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")?
            .env("TMPDIR", "/run")
            .map(|launch| launch.step(Step::EnterMounts(mounts.into())))
    };
    outcome(launch(), TIMEOUT).map_err(|why| format!("runsc: {why}"))
}

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let version = match &facts.version {
        Err(_) if facts.program.as_deref().is_none_or(|program| !program.is_file()) => {
            return vec![Check::bad(VERSION, Reason::NoRunsc, "it is not installed")];
        }
        Err(why) => {
            return vec![Check::bad(VERSION, Reason::UnusableRunsc, format!("it does not run: {why}"))];
        }
        Ok(version) => version,
    };
    let mut checks = vec![match date(version) {
        Some(date) if date < OLDEST => {
            return vec![Check::bad(VERSION, Reason::UnusableRunsc, format!("{version} is too old"))];
        }
        Some(_) => Check::good(VERSION, version.clone()),
        None => Check::note(VERSION, format!("{version} is of an unknown age")),
    }];
    checks.extend(facts.trial.as_ref().map(|trial| {
        match trial {
            Ok(said) if said.contains(GREETING) => Check::good(TRIAL, "ran a command, and is gone"),
            Ok(said) => {
                Check::bad(TRIAL, Reason::UnusableRunsc, format!("did not run what it should: {said:?}"))
            }
            Err(why) => Check::bad(TRIAL, Reason::UnusableRunsc, format!("could not be run: {why}"))
                .with_remedy("see what `runsc --network=none do true` says, as root"),
        }
    }));
    checks.push(if over_control_socket(version) {
        Check::good("control of sandboxes", "over their control sockets")
    } else {
        Check::note(
            "control of sandboxes",
            "by the command line: starts are slower, for this runsc was not tested with the other way",
        )
    });
    checks.extend(LIMITS.map(|(name, finding)| Check::note(name, finding)));
    if date(version).is_none_or(|date| date < QUIET) {
        checks.push(Check::note(
            "idle CPU",
            "an idle sandbox takes 2 to 4 % of a core with this version, until it is slowed 2 s later",
        ));
    }
    checks
}

/// When a version was released: the eight digits in `0.0~20240729.0` or `release-20260601.0`.
fn date(version: &str) -> Option<u32> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .find(|digits| digits.len() == 8)
        .and_then(|digits| digits.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict;
    use super::*;

    const GOOD: &str = "0.0~20240729.0";

    fn facts(version: Result<&str, &str>, trial: Option<Result<&str, &str>>) -> Facts {
        let owned = |outcome: Result<&str, &str>| outcome.map(str::to_owned).map_err(str::to_owned);
        Facts { program: Some("/bin/sh".into()), version: owned(version), trial: trial.map(owned) }
    }

    fn reason(facts: &Facts) -> Option<Reason> {
        judge(facts).into_iter().find_map(Check::into_failure).map(|failure| failure.reason())
    }

    #[test]
    fn absent_broken_and_old_are_told_apart() {
        assert_eq!(reason(&facts(Ok(GOOD), None)), None);
        let absent = Facts { program: None, ..facts(Err("x"), None) };
        assert_eq!(reason(&absent), Some(Reason::NoRunsc));
        let gone = Facts { program: Some("/no/such/runsc".into()), ..facts(Err("x"), None) };
        assert_eq!(reason(&gone), Some(Reason::NoRunsc));
        assert_eq!(reason(&facts(Err("exit code 1"), None)), Some(Reason::UnusableRunsc));
        assert_eq!(reason(&facts(Ok("0.0~20221219.0"), None)), Some(Reason::UnusableRunsc));
        let unknown = judge(&facts(Ok("local-build"), None));
        assert_eq!(unknown[0].verdict(), Verdict::Note);
    }

    #[test]
    fn a_trial_must_have_run_under_gvisor() {
        assert_eq!(reason(&facts(Ok(GOOD), Some(Ok("[ 0.0] Starting gVisor...")))), None);
        let host = facts(Ok(GOOD), Some(Ok("[ 0.0] Linux version 6.1")));
        assert_eq!(reason(&host), Some(Reason::UnusableRunsc));
        assert_eq!(reason(&facts(Ok(GOOD), Some(Err("x")))), Some(Reason::UnusableRunsc));
    }

    #[test]
    fn limits_depend_on_the_version() {
        let names = |version| judge(&facts(Ok(version), None)).iter().map(Check::name).collect::<Vec<_>>();
        assert!(names(GOOD).contains(&"idle CPU") && names(GOOD).contains(&"set-uid programs"));
        assert!(!names("release-20270101.0").contains(&"idle CPU"));
        let driven = |version| judge(&facts(Ok(version), None)).remove(1).verdict();
        assert_eq!((driven(GOOD), driven("release-20270101.0")), (Verdict::Good, Verdict::Note));
    }

    #[test]
    fn versions_carry_their_date() {
        assert_eq!(date(GOOD), Some(OLDEST));
        assert_eq!(date("release-20260601.0-5-gabc"), Some(20_260_601));
        assert_eq!(date("1.0"), None);
    }
}
