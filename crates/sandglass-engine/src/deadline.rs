//! When the time of a sandbox is up, kept in a file beside it: who ends it then need ask no server, and no engine.

use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use sandglass_types::{Clock as _, SandboxId, SystemClock, Timestamp};
use serde::{Deserialize, Serialize};

use crate::files;

/// The name of the file in the sandbox's folder.
const FILE: &str = "deadline";

/// Upper bound of the file, in bytes. A real one has about 50.
const MAX_LEN: u64 = 1024;

/// When the time of a sandbox is up: whichever of the two comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deadline {
    /// At this time of the wall clock, which may be set.
    pub at: Timestamp,
    /// After so much time has passed, in milliseconds from the moment when this is said.
    pub after_millis: u64,
}

/// What both clocks say at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// The wall clock.
    pub wall: Timestamp,
    /// The clock that nobody sets, in milliseconds since some time in this boot.
    pub steady_millis: u64,
}

impl Moment {
    /// The present.
    #[must_use]
    pub fn now() -> Self {
        let steady = clock_gettime(ClockId::Monotonic);
        let steady = Duration::try_from(steady).unwrap_or_default().as_millis();
        Self { wall: SystemClock.now(), steady_millis: u64::try_from(steady).unwrap_or(u64::MAX) }
    }
}

/// A deadline as it is kept.
///
/// The steady clock means nothing in another boot. It need not: no process of the sandbox outlives this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    at: Timestamp,
    steady_millis: u64,
}

impl Kept {
    /// How much time is left; zero if it is up.
    #[must_use]
    pub fn left(&self, now: Moment) -> Duration {
        let steady = Duration::from_millis(self.steady_millis.saturating_sub(now.steady_millis));
        self.at.since(now.wall).min(steady)
    }
}

/// Keeps the deadline of the sandbox in `folder`, or that it has none.
pub(crate) fn keep(folder: &Path, deadline: Option<Deadline>, now: Moment) -> io::Result<()> {
    let path = folder.join(FILE);
    let Some(Deadline { at, after_millis }) = deadline else {
        return match fs_err::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    };
    let kept = Kept { at, steady_millis: now.steady_millis.saturating_add(after_millis) };
    files::replace(&path, &serde_json::to_vec(&kept)?)
}

/// The deadlines of all sandboxes that have one. `sandboxes` is the folder with one folder for each; one that is not there
/// holds none.
///
/// # Errors
/// The folder can't be read. One sandbox whose deadline can't be read has none: who has time left must never be ended by
/// mistake, and the next server ends the others.
pub fn all(sandboxes: &Path) -> io::Result<Vec<(SandboxId, Kept)>> {
    let entries = match fs_err::read_dir(sandboxes) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match read(&entry.path()) {
            Ok(kept) => all.extend(kept.map(|kept| (id, kept))),
            Err(error) => tracing::warn!(%id, %error, "the deadline of a sandbox can't be read"),
        }
    }
    Ok(all)
}

fn read(folder: &Path) -> io::Result<Option<Kept>> {
    let text = files::read_small(&folder.join(FILE), MAX_LEN)?;
    Ok(text.map(|text| serde_json::from_slice(&text)).transpose()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000;

    fn moment(wall: i64, steady_millis: u64) -> Moment {
        Moment { wall: Timestamp::from_millis(wall), steady_millis }
    }

    fn in_an_hour() -> Deadline {
        Deadline { at: Timestamp::from_millis(10 * 3_600_000), after_millis: HOUR }
    }

    /// Nine o'clock, and an hour after the boot.
    const NINE: i64 = 9 * 3_600_000;

    #[test]
    fn it_is_up_by_the_clock_that_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        keep(folder.path(), Some(in_an_hour()), moment(NINE, HOUR)).unwrap();
        let kept = read(folder.path()).unwrap().unwrap();
        let left = |wall, steady| kept.left(moment(wall, steady)).as_millis();
        assert_eq!(left(NINE, HOUR), 3_600_000);
        assert_eq!(left(NINE + 600_000, HOUR + 600_000), 3_000_000);
        assert_eq!(left(NINE + 3_600_000, 2 * HOUR), 0);
        // The wall clock was set back, and forth.
        assert_eq!(left(0, HOUR + 600_000), 3_000_000);
        assert_eq!(left(0, 2 * HOUR), 0);
        assert_eq!(left(NINE + 3_600_000, HOUR), 0);
        assert_eq!(left(i64::MAX, u64::MAX), 0);
    }

    #[test]
    fn the_present_goes_on() {
        let (first, second) = (Moment::now(), Moment::now());
        assert!(first.steady_millis <= second.steady_millis && first.steady_millis > 0);
    }

    #[test]
    fn all_that_have_one_are_found_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(all(&folder.path().join("absent")).unwrap(), []);
        let sandbox = |_| {
            let id = SandboxId::random();
            std::fs::create_dir(folder.path().join(id.as_str())).unwrap();
            id
        };
        let [kept, none, damaged, linked] = [0; 4].map(sandbox);
        let of = |id: &SandboxId| folder.path().join(id.as_str());
        let now = Moment::now();
        keep(&of(&kept), Some(in_an_hour()), now).unwrap();
        keep(&of(&none), Some(in_an_hour()), now).unwrap();
        keep(&of(&none), None, now).unwrap();
        keep(&of(&none), None, now).unwrap();
        std::fs::write(of(&damaged).join(FILE), "{\"at\":0").unwrap();
        std::os::unix::fs::symlink(of(&kept).join(FILE), of(&linked).join(FILE)).unwrap();
        std::fs::create_dir(folder.path().join("else")).unwrap();
        std::fs::copy(of(&kept).join(FILE), folder.path().join("else").join(FILE)).unwrap();
        let found: Vec<_> = all(folder.path()).unwrap().into_iter().map(|(id, _)| id).collect();
        assert_eq!(found, [kept]);
    }
}
