//! Telling why a sandbox ended from what the kernel counted.

use sandglass_linux::process::ExitStatus;

use crate::engine::Exit;

/// The Go runtime's exit code after a fatal error, such as a thread that could not be made.
const GO_FATAL: i32 = 2;
const SIGKILL: i32 = 9;

/// What is known after the end.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Evidence {
    /// How the sandbox process ended; unknown if a former host started it.
    pub(super) status: Option<ExitStatus>,
    /// Processes that the kernel killed at the memory limit, ever.
    pub(super) oom_kills: u64,
    /// Forks that failed at the limit on processes, ever.
    pub(super) process_limit_hits: u64,
}

/// The reason. A sandbox may live on after the kernel killed one of its guest's processes, so a count alone decides
/// only where the status is unknown.
pub(super) fn classify(evidence: Evidence) -> Exit {
    let killed = matches!(evidence.status, None | Some(ExitStatus::Signaled(SIGKILL)));
    let fatal = matches!(evidence.status, None | Some(ExitStatus::Exited(GO_FATAL)));
    if evidence.oom_kills > 0 && killed {
        Exit::OutOfMemory
    } else if evidence.process_limit_hits > 0 && fatal {
        Exit::Processes
    } else {
        Exit::Ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_and_counters_must_agree() {
        let killed = Some(ExitStatus::Signaled(9));
        let code = |code| Some(ExitStatus::Exited(code));
        for (status, oom_kills, process_limit_hits, expected) in [
            (killed, 1, 0, Exit::OutOfMemory),
            (killed, 0, 0, Exit::Ended),
            (killed, 0, 5, Exit::Ended),
            (code(2), 0, 5, Exit::Processes),
            (code(2), 0, 0, Exit::Ended),
            (code(2), 3, 5, Exit::Processes),
            (code(0), 3, 0, Exit::Ended),
            (code(137), 3, 0, Exit::Ended),
            (None, 0, 0, Exit::Ended),
            (None, 1, 1, Exit::OutOfMemory),
            (None, 0, 1, Exit::Processes),
        ] {
            let evidence = Evidence { status, oom_kills, process_limit_hits };
            assert_eq!(classify(evidence), expected, "{evidence:?}");
        }
    }
}
