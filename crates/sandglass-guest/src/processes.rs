//! The kernel's own list of processes.

use rustix::process::{Pid, Signal};

/// Processes that are looked at.
const MAX_PROCESSES: usize = 65_536;

/// The session in a `/proc/PID/stat` line. The name before it may hold anything, closing parentheses too.
fn session_of(stat: &str) -> Option<i32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(3)?.parse().ok()
}

/// Signals every process of a session. gVisor does not tell the programs on a terminal that its size has changed,
/// nor which of them is in front; for the others the signal means nothing. Blocks.
pub(crate) fn signal_session(session: i32, signal: Signal) {
    if session <= 1 {
        return;
    }
    let Ok(entries) = std::fs::read_dir("/proc") else { return };
    for entry in entries.take(MAX_PROCESSES).flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        let stat = std::fs::read(entry.path().join("stat")).unwrap_or_default();
        if session_of(&String::from_utf8_lossy(&stat)) == Some(session) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn finds_the_session_behind_any_name() {
        assert_eq!(session_of("7 (a) b) c) S 1 7 5 0 -1 4194304"), Some(5));
        assert_eq!(session_of("7 (sh) S 1 7"), None);
        assert_eq!(session_of(""), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text: String) {
            let _ = session_of(&text);
        }
    }
}
