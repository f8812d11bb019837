//! `sandglass doctor`: whether this machine can isolate, check by check, with the remedy.

use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use comfy_table::Table;
use serde::Serialize;

use crate::cli;

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// As it should be.
    Good,
    /// Works, but an operator should know.
    Note,
    /// Sandboxes can't be made.
    Bad,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    /// What was found, and what to do if it is not good.
    finding: String,
}

impl Check {
    fn new(name: &'static str, outcome: Result<String, String>) -> Self {
        let (verdict, finding) = match outcome {
            Ok(found) => (Verdict::Good, found),
            Err(missing) => (Verdict::Bad, missing),
        };
        Self { name, verdict, finding }
    }

    fn note(name: &'static str, finding: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Note, finding: finding.into() }
    }
}

/// What the gVisor of Debian's package can't do, however it is set up.
const GVISOR_LIMITS: [(&str, &str); 3] = [
    (
        "set-uid programs",
        "set-uid bits and file capabilities do nothing in a sandbox: `su`, `ping` and the like stay unprivileged; \
         `sudo` works, because it asks the agent",
    ),
    (
        "extended attributes",
        "`user.*` attributes can't be set on a sandbox's disk, only on its memory file systems",
    ),
    (
        "idle CPU",
        "an idle sandbox takes 2 to 4 % of a core with the systrap platform of versions before mid-2026",
    ),
];

/// Looks at everything, prints it, and exits with 0 only if sandboxes can be made.
pub(crate) fn run(args: &cli::Doctor) -> anyhow::Result<ExitCode> {
    let checks = examine();
    let good = checks.iter().all(|check| check.verdict != Verdict::Bad);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &serde_json::json!({ "good": good, "checks": checks }))?;
        writeln!(out)?;
    } else {
        let mut table = Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        for check in &checks {
            let verdict = match check.verdict {
                Verdict::Good => "good",
                Verdict::Note => "note",
                Verdict::Bad => "BAD",
            };
            table.add_row([verdict, check.name, &check.finding]);
        }
        writeln!(out, "{table}")?;
        writeln!(
            out,
            "{}",
            if good { "sandboxes can be made here" } else { "sandboxes can't be made here" }
        )?;
    }
    Ok(ExitCode::from(u8::from(!good)))
}

fn examine() -> Vec<Check> {
    let root = rustix::process::geteuid().is_root();
    let mut checks = vec![
        Check::new("root", root.then(|| "yes".into()).ok_or_else(|| "run this, and `serve`, as root".into())),
        Check::new("kernel", kernel()),
        Check::new("network namespaces", exists("/proc/self/ns/net", "use a kernel with network namespaces")),
        overlay(),
        Check::new("loop devices", exists("/dev/loop-control", "load the `loop` module: `modprobe loop`")),
        Check::new("control groups", control_groups()),
        Check::new(
            "runsc",
            program(
                "runsc",
                "--version",
                "`make setup`, or `apt install runsc` (Debian 12: bookworm-backports)",
            ),
        ),
        Check::new("nft", program("nft", "--version", "`apt install nftables`")),
        Check::new("mkfs.ext4", program("mkfs.ext4", "-V", "`apt install e2fsprogs`")),
        Check::new("mmdebstrap", program("mmdebstrap", "--version", "`apt install mmdebstrap`")),
    ];
    checks.extend(GVISOR_LIMITS.map(|(name, finding)| Check::note(name, finding)));
    checks
}

fn exists(path: &str, remedy: &str) -> Result<String, String> {
    if Path::new(path).exists() { Ok("there".into()) } else { Err(format!("{path} is missing: {remedy}")) }
}

fn kernel() -> Result<String, String> {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    // Landlock came with 5.13; without it the half of the server that reads hostile bytes refuses to start.
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let version: (u32, u32) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if version >= (5, 13) { Ok(release) } else { Err(format!("{release} is too old: Landlock needs 5.13")) }
}

fn overlay() -> Check {
    const NAME: &str = "overlay file system";
    let known = fs_err::read_to_string("/proc/filesystems").unwrap_or_default();
    if known.lines().any(|line| line.ends_with("\toverlay")) {
        Check::new(NAME, Ok("there".into()))
    } else {
        Check::note(NAME, "not loaded; the kernel loads it at first use, if it can: else `modprobe overlay`")
    }
}

fn control_groups() -> Result<String, String> {
    let root = Path::new(sandglass_linux::cgroup::ROOT);
    if root.join("cgroup.controllers").exists() {
        return Ok("version 2".into());
    }
    let missing: Vec<_> =
        ["cpu", "memory", "pids"].into_iter().filter(|name| !root.join(name).is_dir()).collect();
    if missing.is_empty() {
        Ok("version 1".into())
    } else {
        Err(format!("the controllers {} are not mounted under {}", missing.join(", "), root.display()))
    }
}

/// The first line that the program says of its version.
fn program(name: &str, flag: &str, remedy: &str) -> Result<String, String> {
    let said = Command::new(name).arg(flag).stdin(Stdio::null()).output();
    let said = said.map_err(|_| format!("{name} is not installed: {remedy}"))?;
    let text = if said.stdout.is_empty() { said.stderr } else { said.stdout };
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().next().unwrap_or("there").trim().chars().take(80).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_its_remedy() {
        let missing = program("no-such-program", "-V", "`apt install it`").unwrap_err();
        assert_eq!(missing, "no-such-program is not installed: `apt install it`");
        assert!(exists("/no/such/path", "make it").unwrap_err().contains("make it"));
        assert_eq!(Check::new("x", Err("y".into())).verdict, Verdict::Bad);
    }

    #[test]
    fn this_machine_can_isolate_and_set_uid_programs_are_spoken_of() {
        let checks = examine();
        let bad: Vec<_> = checks.iter().filter(|check| check.verdict == Verdict::Bad).collect();
        assert!(bad.is_empty(), "{bad:?}");
        assert!(checks.iter().any(|check| check.name == "set-uid programs"));
    }
}
