//! How long what ended sandboxes left in their folders is kept.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fs_err as fs;
use sandglass_types::SandboxId;

/// What is kept at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// For so long after the last line was written.
    pub age: Duration,
    /// Bytes of all sandboxes together, those that run included. The oldest of those that ended go first.
    pub bytes: u64,
}

/// What is in one sandbox's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    folder: PathBuf,
    last: SystemTime,
    bytes: u64,
    runs: bool,
}

/// Removes what is not to be kept below `receipts`, and says how many folders that were. `runs` is asked after the
/// folders were listed, so it may read what is claimed before a folder is made. It blocks.
///
/// # Errors
/// Something can't be read or removed; what else there is to do is done by the next try.
pub fn sweep(
    receipts: &Path,
    retention: Retention,
    now: SystemTime,
    runs: impl FnOnce() -> Box<dyn Fn(&SandboxId) -> bool>,
) -> io::Result<usize> {
    let mut found = Vec::new();
    let listed: Vec<_> = match fs::read_dir(receipts) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?.collect::<Result<_, _>>()?,
    };
    let runs = runs();
    for entry in listed {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok()) else {
            continue;
        };
        let (mut last, mut bytes) = (entry.metadata()?.modified()?, 0);
        for file in fs::read_dir(entry.path())? {
            let about = file?.metadata()?;
            last = last.max(about.modified()?);
            bytes += about.len();
        }
        found.push(Found { folder: entry.path(), last, bytes, runs: runs(&id) });
    }
    let doomed = doomed(found, retention, now);
    for folder in &doomed {
        fs::remove_dir_all(folder)?;
    }
    Ok(doomed.len())
}

/// Which folders go, the oldest first.
fn doomed(mut found: Vec<Found>, retention: Retention, now: SystemTime) -> Vec<PathBuf> {
    let mut bytes: u64 = found.iter().map(|found| found.bytes).sum();
    found.retain(|found| !found.runs);
    found.sort_by_key(|found| found.last);
    let old = |found: &Found| now.duration_since(found.last).is_ok_and(|age| age > retention.age);
    let mut doomed = Vec::new();
    for found in found {
        if !old(&found) && bytes <= retention.bytes {
            break;
        }
        bytes -= found.bytes;
        doomed.push(found.folder);
    }
    doomed
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    fn found(name: &str, hours: u32, bytes: u64, runs: bool) -> Found {
        Found { folder: name.into(), last: SystemTime::UNIX_EPOCH + HOUR * hours, bytes, runs }
    }

    #[test]
    fn the_oldest_go_first_and_what_runs_never_does() {
        let all = vec![
            found("new", 90, 10, false),
            found("runs", 0, 50, true),
            found("old", 10, 10, false),
            found("older", 5, 10, false),
            found("tomorrow", 999, 10, false),
        ];
        let doomed = |hours, bytes| {
            let retention = Retention { age: HOUR * hours, bytes };
            let names = doomed(all.clone(), retention, SystemTime::UNIX_EPOCH + HOUR * 100);
            names.into_iter().map(|name| name.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(doomed(1000, 1000), [""; 0]);
        assert_eq!(doomed(92, 1000), ["older"]);
        assert_eq!(doomed(20, 1000), ["older", "old"]);
        assert_eq!(doomed(1000, 90), [""; 0]);
        assert_eq!(doomed(1000, 89), ["older"]);
        assert_eq!(doomed(1000, 79), ["older", "old"]);
        assert_eq!(doomed(1000, 0), ["older", "old", "new", "tomorrow"]);
    }

    #[test]
    fn folders_of_sandboxes_are_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (ended, running) = (SandboxId::random(), SandboxId::random());
        for name in [ended.as_str(), running.as_str(), "something"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("egress.jsonl"), "line\n").unwrap();
        }
        let none = Retention { age: HOUR, bytes: 0 };
        let alive = running.clone();
        let runs = || Box::new(move |id: &SandboxId| *id == alive) as Box<dyn Fn(&SandboxId) -> bool>;
        assert_eq!(sweep(folder.path(), none, SystemTime::now(), runs).unwrap(), 1);
        assert!(!folder.path().join(ended.as_str()).exists());
        assert!(folder.path().join(running.as_str()).join("egress.jsonl").exists());
        assert!(folder.path().join("something").exists());
        let nowhere = folder.path().join("nowhere");
        assert_eq!(sweep(&nowhere, none, SystemTime::now(), || unreachable!()).unwrap(), 0);
    }
}
