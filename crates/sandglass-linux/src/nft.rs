//! Packet filter rules: text that `nft` applies in one transaction.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::namespace::Netns;
use crate::process::{Launch, LaunchError, RunError, run};

/// Where the program is, by distribution.
const PROGRAMS: [&str; 3] = ["/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft"];

/// It needs milliseconds; this is for a machine that stands still.
const TIMEOUT: Duration = Duration::from_secs(20);

/// How much of its complaint is kept, in bytes.
const MAX_COMPLAINT: usize = 2048;

/// Rules that were not applied; the namespace has those from before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NftError {
    /// The program is not installed.
    #[error("nft is not installed")]
    NotInstalled,
    /// It could not be run.
    #[error("could not run nft")]
    Run(#[from] RunError),
    /// The namespace could not be entered.
    #[error("could not enter the network namespace")]
    Enter(#[source] io::Error),
    /// It refused the text.
    #[error("nft refused the rules ({status}): {complaint}")]
    Refused {
        /// How it ended.
        status: crate::process::ExitStatus,
        /// The start of what it wrote.
        complaint: String,
    },
}

impl From<LaunchError> for NftError {
    fn from(error: LaunchError) -> Self {
        Self::Run(error.into())
    }
}

/// Applies a ruleset inside a namespace: all of it or nothing.
///
/// # Errors
/// See [`NftError`].
pub fn apply(netns: &Netns, ruleset: &str) -> Result<(), NftError> {
    nft(netns, &["-f", "-"], ruleset).map(drop)
}

/// The rules in force in a namespace, as the program writes them, at most 64 KiB.
///
/// # Errors
/// See [`NftError`].
pub fn list(netns: &Netns) -> Result<String, NftError> {
    nft(netns, &["list", "ruleset"], "")
}

fn nft(netns: &Netns, arguments: &[&str], stdin: &str) -> Result<String, NftError> {
    let program = PROGRAMS.iter().find(|path| Path::new(path).exists()).ok_or(NftError::NotInstalled)?;
    let launch = Launch::new(program)?.args(arguments)?.env("LC_ALL", "C")?;
    let output =
        netns.run(|| run(launch, stdin.as_bytes(), TIMEOUT, 64 * 1024)).map_err(NftError::Enter)??;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = output.stderr.get(..MAX_COMPLAINT).unwrap_or(&output.stderr);
    Err(NftError::Refused {
        status: output.status,
        complaint: String::from_utf8_lossy(complaint).trim().replace('\n', " | "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_applied_whole_or_not_at_all() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let netns = Netns::create().unwrap();
        apply(&netns, "table inet first {\n}\n").unwrap();
        let error = apply(&netns, "table inet second {\n}\ntable inet first { nonsense }\n").unwrap_err();
        assert!(
            matches!(&error, NftError::Refused { complaint, .. } if complaint.contains("nonsense")),
            "{error}"
        );
        let rules = list(&netns).unwrap();
        assert!(rules.contains("first") && !rules.contains("second"), "{rules}");
        assert!(!list(&Netns::current().unwrap()).unwrap().contains("table inet first"));
    }
}
