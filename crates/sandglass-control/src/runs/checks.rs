//! What must be so after a turn. The server runs it in the sandbox, and alone judges it.

use std::time::Duration;

use sandglass_store::{SandboxRow, Source};
use sandglass_types::Error;
use sandglass_types::run::{Check, PROJECT};
use serde_json::json;
use tokio::time::Instant;

use super::task::Job;
use crate::command::{Ended, Program, run};
use crate::live::Live;

/// How much of a check's output a prompt repeats, in bytes.
const MAX_TOLD: usize = 3000;

/// A check that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    /// Its number, from 1 on.
    number: usize,
    /// What was run.
    command: String,
    /// How it ended.
    ended: Ended,
}

impl Failure {
    /// What the agent is asked to do about it.
    pub(super) fn prompt(&self, first: &str) -> String {
        let Self { command, ended, .. } = self;
        let from = ended.tail.len().saturating_sub(MAX_TOLD);
        let tail: String = ended.tail.char_indices().filter(|(at, _)| *at >= from).map(|(_, c)| c).collect();
        format!(
            "A check of your work failed. In {PROJECT}, this command must end with code 0:\n\n{command}\n\nIt ended with: \
             {}. The end of its output:\n\n{tail}\n\nMend the work so that the check passes. The task was:\n\n{first}",
            ended.status
        )
    }

    /// The same for who asked for the run.
    pub(super) fn detail(&self) -> String {
        format!("check {} failed: {}", self.number, self.ended.status)
    }
}

impl Job {
    /// Runs all checks until one fails.
    pub(super) async fn verify(
        &self,
        live: &Live,
        row: &SandboxRow,
        checks: &[Check],
    ) -> Result<Option<Failure>, Error> {
        for (number, Check { command, timeout }) in (1..).zip(checks) {
            let words: Vec<&str> = command.as_words().iter().map(String::as_str).collect();
            let program =
                Program { words: &words, folder: Some(PROJECT), limit: *timeout, ..Program::default() };
            let began = Instant::now();
            let ended = run(live, row, &program).await?;
            let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            let passed = ended.code == Some(0);
            let data = json!({
                "number": number, "command": command.shown(), "passed": passed, "exit_code": ended.code, "ended": outcome(&ended),
                "duration_ms": took, "output": ended.tail,
            });
            self.note(Source::Verifier, "check.result", data).await?;
            if !passed {
                return Ok(Some(Failure { number, command: command.shown(), ended }));
            }
        }
        Ok(None)
    }
}

/// How it ended, in words of our own.
fn outcome(ended: &Ended) -> &'static str {
    match ended.code {
        Some(_) => "exited",
        None => "killed",
    }
}

/// The longest that all checks may take together.
pub(super) fn longest(checks: &[Check]) -> Duration {
    checks.iter().map(|check| check.timeout).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repair_is_told_what_failed_and_no_more_than_fits() {
        let tail = format!("{}the end", "\u{fc}".repeat(4000));
        let ended = Ended { code: Some(3), status: "exit status 3".into(), tail };
        let failure = Failure { number: 2, command: "make test".into(), ended };
        let prompt = failure.prompt("build it");
        for part in ["make test", "exit status 3", "the end", "build it"] {
            assert!(prompt.contains(part), "{part}");
        }
        assert!(prompt.len() < MAX_TOLD + 400);
        assert_eq!(failure.detail(), "check 2 failed: exit status 3");
    }
}
