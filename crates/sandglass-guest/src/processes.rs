//! The kernel's own list of processes.

use rustix::process::{Pid, PidfdFlags, Signal};

/// Processes that are looked at.
const MAX_PROCESSES: usize = 65_536;

/// One process, as the list shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its id.
    pub pid: i32,
    /// That of its parent.
    pub parent: i32,
    /// Its session.
    pub session: i32,
    /// When it was started, in ticks of the kernel: with the id, it names one process for ever.
    pub started: u64,
}

impl Entry {
    /// From a `/proc/PID/stat` line (proc_pid_stat(5)). The name in it may hold anything, closing parentheses too.
    fn parse(pid: i32, stat: &str) -> Option<Self> {
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<_> = rest.split_whitespace().collect();
        Some(Self {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            session: fields.get(3)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
        })
    }

    fn read(pid: i32) -> Option<Self> {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        Self::parse(pid, &String::from_utf8_lossy(&stat))
    }

    /// Kills this very process, and not another that has its id by now.
    pub(crate) fn kill(&self) {
        let Some(pid) = Pid::from_raw(self.pid) else { return };
        let Ok(descriptor) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return };
        // What the descriptor means is settled, so what the list says now is about that process, or it is gone.
        if Self::read(self.pid).is_some_and(|now| now.started == self.started) {
            let _ = rustix::process::pidfd_send_signal(descriptor, Signal::KILL);
        }
    }
}

/// All processes. Blocks.
pub(crate) fn all() -> impl Iterator<Item = Entry> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten().take(MAX_PROCESSES);
    entries.filter_map(|entry| Entry::read(entry.file_name().to_str()?.parse().ok()?))
}

/// The process with the most memory, but not the one whose id is `spared`. Blocks.
pub(crate) fn largest(spared: u32) -> Option<i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten().take(MAX_PROCESSES);
    let sizes = entries.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let statm = std::fs::read_to_string(entry.path().join("statm")).ok()?;
        Some((resident(&statm)?, pid))
    });
    sizes.filter(|(_, pid)| u32::try_from(*pid) != Ok(spared)).max().map(|(_, pid)| pid)
}

/// Pages that a process has in memory, of a `/proc/PID/statm` line (proc_pid_statm(5)).
fn resident(statm: &str) -> Option<u64> {
    statm.split_whitespace().nth(1)?.parse().ok()
}

/// Signals every process of a session. gVisor does not tell the programs on a terminal that its size has changed,
/// nor which of them is in front; for the others the signal means nothing. Blocks.
pub(crate) fn signal_session(session: i32, signal: Signal) {
    if session <= 1 {
        return;
    }
    for pid in all().filter(|entry| entry.session == session).filter_map(|entry| Pid::from_raw(entry.pid)) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_are_found_behind_any_name() {
        let numbers = "4194304 0 0 0 0 0 0 0 0 20 0 1 0 77 0";
        let entry = Entry::parse(7, &format!("7 (a) b) c) S 1 7 5 0 -1 {numbers}"));
        assert_eq!(entry, Some(Entry { pid: 7, parent: 1, session: 5, started: 77 }));
        assert_eq!(Entry::parse(7, "7 (sh) S 1 7 5 0 -1"), None);
        assert_eq!(Entry::parse(7, ""), None);
    }

    #[test]
    fn the_largest_is_the_one_with_the_most_in_memory() {
        assert_eq!(resident("900 77 5 1 0 9 0\n"), Some(77));
        assert_eq!(resident("900"), None);
        let own = std::process::id();
        assert!(largest(own).is_none_or(|pid| u32::try_from(pid) != Ok(own)));
    }

    #[test]
    fn only_the_process_that_was_meant_is_killed() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let entry = Entry::read(i32::try_from(child.id()).unwrap()).unwrap();
        Entry { started: entry.started + 1, ..entry }.kill();
        assert!(all().any(|other| other == entry));
        assert_eq!(child.try_wait().unwrap(), None);
        entry.kill();
        assert!(!child.wait().unwrap().success());
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text: String) {
            let _ = Entry::parse(1, &text);
        }
    }
}
