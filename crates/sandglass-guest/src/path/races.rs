//! Races that everybody inside can run against the agent: a component of a path is one thing and then another, as fast as
//! can be, while the agent works on the path for the user who does that. Each verb has its race beside it.
//!
//! What must not be touched is seen to be untouched: not even the time of a change may differ.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, lchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use tempfile::TempDir;

use super::open_root;
use crate::exec::Identity;

/// How often each verb is tried in each kind of race, unless `SANDGLASS_RACES` says otherwise.
const ATTEMPTS: u32 = 2_000;

/// Turns of a loop between two swaps: some microseconds, in which a verb takes a step or two.
const PAUSE: u32 = 100;

/// How long a race goes on in which one side was not seen.
const PATIENCE: Duration = Duration::from_secs(30);

/// Who races, and for whom the agent works.
const RACER: u32 = 1000;

/// What can be read in the folder that is meant, and in the one that is not.
pub(crate) const PLAIN: &str = "plain";
/// See [`PLAIN`].
pub(crate) const GOLD: &str = "gold of root's";

/// What the folder that is meant is exchanged for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trap {
    /// A link of the user's to what is root's.
    Link,
    /// A link of `/proc` to it, through one of the user's.
    Magic,
    /// The folder is behind a link that root made, which is exchanged for one of the user's.
    Relinked,
}

/// How often a verb was carried out, and how often it was refused.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Outcomes {
    done: u32,
    refused: u32,
}

/// Ends the thread that swaps, also where a test fails.
pub(crate) struct Over<'a>(pub(crate) &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Folders for one race, in memory.
pub(crate) struct Arena {
    dir: TempDir,
    trap: Trap,
    /// Turns of a loop between two swaps.
    pub(crate) pause: u32,
    /// The root of all, for the agent.
    pub(crate) root: OwnedFd,
    before: BTreeMap<PathBuf, String>,
    _treasure: OwnedFd,
}

fn own(path: PathBuf) {
    lchown(path, Some(RACER), Some(RACER)).unwrap();
}

impl Arena {
    pub(crate) fn new(trap: Trap) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = |name: &str| dir.path().join(name);
        let mode = |name: &str, mode| fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
        // A temporary folder is closed to others.
        mode("", 0o755);
        fs::create_dir_all(at("treasure/closed")).unwrap();
        fs::write(at("treasure/file"), GOLD).unwrap();
        fs::write(at("treasure/closed/file"), GOLD).unwrap();
        mode("treasure/closed", 0o700);
        for folder in ["arena", "arena/plain", "arena/stash"] {
            fs::create_dir(at(folder)).unwrap();
            own(at(folder));
        }
        let treasure = open_root(&at("treasure")).unwrap();
        let target = match trap {
            Trap::Link | Trap::Relinked => at("treasure"),
            Trap::Magic => format!("/proc/self/fd/{}", treasure.as_raw_fd()).into(),
        };
        symlink(target, at("arena/trap")).unwrap();
        own(at("arena/trap"));
        match trap {
            // What is swapped is the folder itself: `plain` is another name of it only until the race begins.
            Trap::Link | Trap::Magic => fs::rename(at("arena/plain"), at("arena/door")).unwrap(),
            Trap::Relinked => symlink("plain", at("arena/door")).unwrap(),
        }
        let mut arena = Self {
            root: open_root("/".as_ref()).unwrap(),
            before: BTreeMap::new(),
            trap,
            pause: PAUSE,
            _treasure: treasure,
            dir,
        };
        arena.before = arena.treasure();
        arena
    }

    /// A path in the arena. `door` is what is swapped.
    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join("arena").join(name).to_str().unwrap().to_owned()
    }

    /// Who races.
    pub(crate) fn racer(&self) -> Identity {
        Identity { uid: RACER, gid: RACER, groups: vec![RACER] }
    }

    /// All that can be known of what must not be touched.
    fn treasure(&self) -> BTreeMap<PathBuf, String> {
        let mut known = BTreeMap::new();
        let mut pending = vec![self.dir.path().join("treasure")];
        while let Some(path) = pending.pop() {
            let stat = fs::symlink_metadata(&path).unwrap();
            let times = (stat.mtime(), stat.mtime_nsec(), stat.ctime(), stat.ctime_nsec());
            let text = format!("{} {} {} {:o} {times:?}", stat.ino(), stat.uid(), stat.gid(), stat.mode());
            if stat.is_dir() {
                pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            known.insert(path, text);
        }
        known
    }

    /// The inodes of what must not be touched.
    pub(crate) fn forbidden(&self) -> Vec<u64> {
        let inode = |path: &PathBuf| fs::symlink_metadata(path).unwrap().ino();
        self.before.keys().map(inode).collect()
    }

    /// Swaps the door for the trap as fast as can be, while `attempt` is made again and again in `inside`, the folder that is
    /// meant, which it may prepare there. `attempt` says whether the agent did it.
    pub(crate) fn race(&self, mut attempt: impl FnMut(&Path) -> bool) -> Outcomes {
        let (door, trap) = (self.path("door"), self.path("trap"));
        let meant = open_root(self.path(if self.trap == Trap::Relinked { "plain" } else { "door" }).as_ref())
            .unwrap();
        let inside = PathBuf::from(format!("/proc/self/fd/{}", meant.as_raw_fd()));
        let is_over = AtomicBool::new(false);
        let mut outcomes = Outcomes::default();
        std::thread::scope(|threads| {
            let _over = Over(&is_over);
            threads.spawn(|| {
                // An even number of times: then all is as before.
                while !is_over.load(Ordering::Relaxed) {
                    for _ in 0..2 {
                        renameat_with(CWD, &door, CWD, &trap, RenameFlags::EXCHANGE).unwrap();
                        // Else the agent would wait for the kernel's lock most of the time, and not be interrupted.
                        for _ in 0..self.pause {
                            std::hint::spin_loop();
                        }
                    }
                }
            });
            for _ in 0..attempts() {
                if attempt(&inside) {
                    outcomes.done += 1;
                } else {
                    outcomes.refused += 1;
                }
            }
        });
        outcomes
    }

    /// Looks before it leaps, as a program does that does not know better; whether it read what it should not.
    fn leap(&self) -> bool {
        let stat = fs::symlink_metadata(self.path("door")).unwrap();
        let looks_well = stat.is_dir() || (self.trap == Trap::Relinked && stat.uid() == 0);
        looks_well && fs::read_to_string(self.path("door/file")).is_ok_and(|text| text == GOLD)
    }

    /// The race of one verb. Nothing was touched, and both sides of the race were seen.
    pub(crate) fn is_lost(trap: Trap, attempt: impl Fn(&Self, &Path) -> bool) {
        let arena = Self::new(trap);
        let mut outcomes = arena.race(|inside| attempt(&arena, inside));
        // Where the machine is busy, one of the two may get no turn for a while.
        let patience = Instant::now() + PATIENCE;
        while (outcomes.done == 0 || outcomes.refused == 0) && Instant::now() < patience {
            let more = arena.race(|inside| attempt(&arena, inside));
            outcomes.done += more.done;
            outcomes.refused += more.refused;
        }
        assert_eq!(arena.treasure(), arena.before, "{trap:?}");
        assert!(outcomes.done > 0 && outcomes.refused > 0, "there was no race: {trap:?} {outcomes:?}");
    }
}

/// How often each verb is tried.
fn attempts() -> u32 {
    std::env::var("SANDGLASS_RACES").map_or(ATTEMPTS, |text| text.parse().unwrap())
}

#[test]
fn who_looks_first_and_then_leaps_loses() {
    for trap in [Trap::Link, Trap::Magic, Trap::Relinked] {
        let arena = Arena::new(trap);
        let mut lost = 0;
        let patience = Instant::now() + PATIENCE;
        while lost == 0 && Instant::now() < patience {
            arena.race(|inside| {
                fs::write(inside.join("file"), PLAIN).unwrap();
                // More often than the verbs, which take longer.
                lost += (0..10).filter(|_| arena.leap()).count();
                lost > 0
            });
        }
        assert!(lost > 0, "{trap:?}");
    }
}
