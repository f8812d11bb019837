use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::*;
use crate::path::races::{Arena, Trap};

mod fuse;

const CREATE: EventType = EventType::EVENT_TYPE_CREATE;
const WRITE: EventType = EventType::EVENT_TYPE_WRITE;
const REMOVE: EventType = EventType::EVENT_TYPE_REMOVE;
const RENAME: EventType = EventType::EVENT_TYPE_RENAME;
const CHMOD: EventType = EventType::EVENT_TYPE_CHMOD;

#[derive(Debug, Default)]
struct Told {
    events: Vec<(String, EventType)>,
    lost: usize,
    end: Option<End>,
}

impl Sink for Told {
    fn tell(&mut self, name: &[u8], kind: EventType) -> bool {
        self.events.push((String::from_utf8_lossy(name).into_owned(), kind));
        true
    }
    fn lose(&mut self) {
        self.lost += 1;
    }
    fn end(&mut self, end: End) {
        self.end.get_or_insert(end);
    }
    fn has_ended(&self) -> bool {
        self.end.is_some()
    }
}

struct Watched {
    dir: tempfile::TempDir,
    tree: Tree,
    folders: Arc<Quota>,
}

impl Watched {
    fn try_new(recursive: bool, most: usize, prepare: impl FnOnce(&Path)) -> Result<Self, Refusal> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("w")).unwrap();
        prepare(&dir.path().join("w"));
        let folders = Arc::new(Quota::new(most));
        let wish = Wish { root: dir.path().into(), path: "/w".into(), recursive, networks: false };
        let tree = Tree::open(wish, &folders)?;
        Ok(Self { dir, tree, folders })
    }

    fn new(recursive: bool) -> Self {
        Self::try_new(recursive, 10_000, |_| {}).unwrap()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join("w").join(name)
    }

    fn drain(&mut self) -> Told {
        let mut told = Told::default();
        while !told.has_ended() && self.tree.drain(&mut told, true) != Drained::All {}
        told
    }

    fn events(&mut self) -> Vec<(String, EventType)> {
        let told = self.drain();
        assert_eq!((told.lost, told.end), (0, None));
        told.events
    }
}

fn named(events: &[(&str, EventType)]) -> Vec<(String, EventType)> {
    events.iter().map(|(name, kind)| ((*name).into(), *kind)).collect()
}

#[test]
fn each_change_is_told_as_it_is_called() {
    let mut watched = Watched::new(false);
    fs::write(watched.at("a"), "x").unwrap();
    assert_eq!(watched.events(), named(&[("a", CREATE), ("a", WRITE)]));
    fs::rename(watched.at("a"), watched.at("b")).unwrap();
    assert_eq!(watched.events(), named(&[("a", RENAME), ("b", CREATE)]));
    fs::set_permissions(watched.at("b"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::remove_file(watched.at("b")).unwrap();
    let events = watched.events();
    assert_eq!((&events[0], events.last()), (&("b".into(), CHMOD), Some(&("b".into(), REMOVE))));
    // Only what is directly in it.
    fs::create_dir(watched.at("d")).unwrap();
    fs::write(watched.at("d/f"), "x").unwrap();
    assert_eq!(watched.events(), named(&[("d", CREATE)]));
    fs::set_permissions(watched.at(""), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    assert_eq!(watched.events(), named(&[(".", CHMOD)]));
}

#[test]
fn folders_that_appear_are_watched_with_all_that_is_in_them() {
    let mut watched = Watched::new(true);
    fs::create_dir_all(watched.at("a/b")).unwrap();
    fs::write(watched.at("a/b/f"), "").unwrap();
    assert_eq!(watched.events(), named(&[("a", CREATE), ("a/b", CREATE), ("a/b/f", CREATE)]));
    fs::write(watched.at("a/b/g"), "").unwrap();
    assert_eq!(watched.events(), named(&[("a/b/g", CREATE)]));
    // What is moved within keeps being watched; what is moved away is not.
    fs::rename(watched.at("a"), watched.at("c")).unwrap();
    fs::write(watched.at("c/b/h"), "").unwrap();
    assert_eq!(watched.events(), named(&[("a", RENAME), ("c", CREATE), ("c/b/h", CREATE)]));
    fs::rename(watched.at("c/b"), watched.dir.path().join("away")).unwrap();
    assert_eq!(watched.events(), named(&[("c/b", RENAME)]));
    fs::write(watched.dir.path().join("away/i"), "").unwrap();
    assert_eq!(watched.events(), []);
    // What comes from elsewhere is new.
    fs::rename(watched.dir.path().join("away"), watched.at("back")).unwrap();
    let mut events = watched.events();
    events.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(
        events,
        named(&[
            ("back", CREATE),
            ("back/f", CREATE),
            ("back/g", CREATE),
            ("back/h", CREATE),
            ("back/i", CREATE)
        ])
    );
    fs::remove_dir_all(watched.at("back")).unwrap();
    assert_eq!(watched.events().last(), Some(&("back".into(), REMOVE)));
    assert!(watched.folders.take(10_000 - 2), "the root and `c` are left");
}

#[test]
fn links_are_told_and_not_followed() {
    let mut watched = Watched::try_new(true, 100, |path| symlink("..", path.join("up")).unwrap()).unwrap();
    symlink("/", watched.at("root")).unwrap();
    fs::write(watched.dir.path().join("outside"), "").unwrap();
    assert_eq!(watched.events(), named(&[("root", CREATE)]));
    // The folder itself may be named by one.
    symlink("w", watched.dir.path().join("link")).unwrap();
    let wish = Wish { path: "/link".into(), ..watched.tree.wish.clone() };
    let mut other = Tree::open(wish, &watched.folders).unwrap();
    fs::create_dir(watched.at("d")).unwrap();
    let mut told = Told::default();
    other.drain(&mut told, true);
    assert_eq!((told.events, told.end), (named(&[("d", CREATE)]), None));
}

#[test]
fn names_may_be_any_bytes() {
    let mut watched = Watched::new(true);
    let dir = watched.at("").join(OsStr::from_bytes(b"d\xff"));
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join(OsStr::from_bytes(b"\xfe\n")), "").unwrap();
    assert_eq!(watched.events(), named(&[("d\u{fffd}", CREATE), ("d\u{fffd}/\u{fffd}\n", CREATE)]));
    fs::write(dir.join("g"), "").unwrap();
    assert_eq!(watched.events(), named(&[("d\u{fffd}/g", CREATE)]));
}

#[test]
fn the_folder_s_own_end_is_told() {
    let mut watched = Watched::new(true);
    fs::remove_dir(watched.at("")).unwrap();
    let told = watched.drain();
    assert_eq!((told.events, told.end), (named(&[(".", REMOVE)]), Some(End::Gone)));
    let mut watched = Watched::new(true);
    fs::rename(watched.at(""), watched.dir.path().join("v")).unwrap();
    let told = watched.drain();
    assert_eq!((told.events, told.end), (named(&[(".", RENAME)]), Some(End::Gone)));
}

#[test]
fn nobody_leads_a_watch_elsewhere() {
    let mut watched = Watched::new(true);
    let other = watched.dir.path().join("other");
    fs::create_dir_all(other.join("a/secret")).unwrap();
    // When the folder is looked for, its name leads to another one that has all the right names.
    fs::create_dir(watched.at("a")).unwrap();
    fs::create_dir(watched.at("a/b")).unwrap();
    fs::rename(watched.dir.path().join("w"), watched.dir.path().join("v")).unwrap();
    symlink("other", watched.dir.path().join("w")).unwrap();
    let told = watched.drain();
    assert!(
        told.end == Some(End::Gone) && told.events.iter().all(|(name, _)| !name.contains("secret")),
        "{told:?}"
    );
    // The same further down.
    let mut watched = Watched::new(true);
    let other = watched.dir.path().join("other");
    fs::create_dir_all(other.join("b/secret")).unwrap();
    fs::create_dir(watched.at("a")).unwrap();
    assert_eq!(watched.events(), named(&[("a", CREATE)]));
    fs::create_dir(watched.at("a/b")).unwrap();
    fs::rename(watched.at("a"), watched.dir.path().join("kept")).unwrap();
    symlink("../other", watched.at("a")).unwrap();
    let told = watched.drain();
    assert!(told.events.iter().all(|(name, _)| !name.contains("secret")), "{told:?}");
    fs::write(other.join("b/secret/f"), "").unwrap();
    assert_eq!(watched.events(), []);
}

/// The inodes that a watch has, as the kernel tells (`proc(5)`).
fn watched_inodes(tree: &Tree) -> Vec<u64> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", tree.inotify().as_raw_fd())).unwrap();
    let inodes = info.lines().filter(|line| line.starts_with("inotify"));
    let inode = |line: &str| {
        line.split_whitespace().find_map(|field| field.strip_prefix("ino:").map(ToOwned::to_owned))
    };
    inodes.map(|line| u64::from_str_radix(&inode(line).unwrap(), 16).unwrap()).collect()
}

#[test]
fn nobody_leads_a_watch_elsewhere_by_a_race() {
    let folders = Arc::new(Quota::new(10_000));
    let open = |path: String, recursive| {
        let wish = Wish { root: "/".into(), path: path::clean(&path).unwrap(), recursive, networks: false };
        Tree::open(wish, &folders)
    };
    Arena::is_lost(Trap::Magic, |arena, inside| match open(arena.path("door"), true) {
        Ok(tree) => {
            assert_eq!(watched_inodes(&tree), [fs::metadata(inside).unwrap().ino()]);
            true
        }
        Err(Refusal::Path(_) | Refusal::NotADirectory(_)) => false,
        Err(error) => panic!("{error:?}"),
    });
    // From above, where it is not followed whatever it leads to, and events come in the midst of it.
    let mut arena = Arena::new(Trap::Link);
    // Each swap is four events, and reading them must not take for ever.
    arena.pause = 20_000;
    let forbidden = arena.forbidden();
    let mut tree = open(arena.path(""), true).unwrap();
    let mut seen = 0;
    arena.race(|inside| {
        fs::create_dir_all(inside.join("new/below")).unwrap();
        let mut told = Told::default();
        tree.drain(&mut told, true);
        let inodes = watched_inodes(&tree);
        assert!(forbidden.iter().all(|inode| !inodes.contains(inode)));
        assert!(told.events.iter().all(|(name, _)| !name.contains("closed")), "{told:?}");
        seen += usize::from(inodes.contains(&fs::metadata(inside).unwrap().ino()));
        fs::remove_dir_all(inside.join("new")).unwrap();
        true
    });
    assert!(seen > 0, "the folder was never seen as one");
    drop(tree);
    assert!(folders.take(10_000), "folders were not given back");
}

#[test]
fn more_folders_than_there_may_be_are_refused_or_end_the_watch() {
    let deep = |path: &Path| fs::create_dir_all(path.join("d/".repeat(250))).unwrap();
    assert!(matches!(Watched::try_new(true, 10_000, deep), Err(Refusal::TooMuch(_))));
    assert!(Watched::try_new(false, 10_000, deep).is_ok());
    let some = |path: &Path| (0..5).for_each(|n| fs::create_dir(path.join(n.to_string())).unwrap());
    assert!(matches!(Watched::try_new(true, 5, some), Err(Refusal::TooMuch(_))));
    let mut watched = Watched::try_new(true, 6, some).unwrap();
    fs::create_dir(watched.at("more")).unwrap();
    assert_eq!(watched.drain().end, Some(End::Blind));
    let Watched { tree, folders, .. } = watched;
    drop(tree);
    assert!(folders.take(6));
}

#[test]
fn what_can_t_be_watched_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    symlink("loop", dir.path().join("loop")).unwrap();
    let folders = Arc::new(Quota::new(10));
    let open = |path: &str| {
        let wish = Wish { root: dir.path().into(), path: path.into(), recursive: true, networks: false };
        Tree::open(wish, &folders).unwrap_err()
    };
    assert!(matches!(open("/file"), Refusal::NotADirectory(_)));
    assert!(matches!(open("/none"), Refusal::Path(PathError::NotFound(_))));
    assert!(matches!(open("/loop"), Refusal::Path(PathError::Loop(_))));
    assert!(folders.take(10));
}

/// Everything below a folder, by kind.
fn found(at: &Path) -> (BTreeSet<String>, BTreeSet<String>) {
    fn walk(at: &Path, prefix: &str, found: &mut (BTreeSet<String>, BTreeSet<String>)) {
        for entry in fs::read_dir(at).unwrap().map(Result::unwrap) {
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                walk(&entry.path(), &format!("{name}/"), found);
                found.0.insert(name);
            } else {
                found.1.insert(name);
            }
        }
    }
    let mut all = Default::default();
    walk(at, "", &mut all);
    all
}

#[test]
fn what_is_made_in_folders_that_were_just_made_is_told_once() {
    let mut watched = Watched::new(true);
    let done = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..2)
        .map(|writer| {
            let top = watched.at(&format!("t{writer}"));
            std::thread::spawn(move || {
                for n in 0..1500 {
                    fs::create_dir_all(top.join(format!("{n}/x/y"))).unwrap();
                    fs::write(top.join(format!("{n}/f")), "").unwrap();
                    fs::write(top.join(format!("{n}/x/y/f")), "").unwrap();
                }
            })
        })
        .collect();
    let waiter = {
        let done = Arc::clone(&done);
        std::thread::spawn(move || {
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            done.store(true, Ordering::Release);
        })
    };
    let mut told = Told::default();
    loop {
        let last = done.load(Ordering::Acquire);
        if watched.tree.drain(&mut told, last) == Drained::All && last {
            break;
        }
    }
    waiter.join().unwrap();
    assert_eq!((told.lost, told.end), (0, None));
    let mut counts = BTreeMap::new();
    for (name, kind) in told.events {
        assert_eq!(kind, CREATE, "{name}");
        *counts.entry(name).or_insert(0) += 1;
    }
    assert_eq!(counts.values().max(), Some(&1));
    let (folders, files) = found(&watched.at(""));
    assert!(counts.keys().eq(folders.union(&files)));
}

#[test]
fn what_the_kernel_forgot_is_told_to_be_lost_and_the_watch_goes_on() {
    let mut watched = Watched::new(true);
    fs::create_dir(watched.at("a")).unwrap();
    watched.events();
    // More than the kernel keeps.
    for n in 0..40_000 {
        fs::write(watched.at("x"), "").unwrap();
        fs::rename(watched.at("x"), watched.at(if n % 2 == 0 { "y" } else { "z" })).unwrap();
    }
    fs::create_dir_all(watched.at("late/b")).unwrap();
    fs::remove_dir(watched.at("a")).unwrap();
    let told = watched.drain();
    assert!(told.lost == 1 && told.end.is_none(), "{} {:?}", told.lost, told.end);
    fs::write(watched.at("late/b/f"), "").unwrap();
    assert_eq!(watched.events(), named(&[("late/b/f", CREATE)]));
    assert!(watched.folders.take(10_000 - 3), "the root, `late` and `late/b` are left");
}

#[derive(Debug, Clone)]
enum Step {
    Make(String),
    Move(String, String),
    Remove(String),
    Drain,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = || prop::collection::vec("[abc]", 1..4).prop_map(|parts| parts.join("/"));
    prop::collection::vec(
        prop_oneof![
            4 => path().prop_map(Step::Make),
            4 => (path(), path()).prop_map(|(from, to)| Step::Move(from, to)),
            1 => path().prop_map(Step::Remove),
            2 => Just(Step::Drain),
        ],
        0..40,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn whatever_was_moved_where_all_folders_are_watched_by_their_names(steps in steps()) {
        let mut watched = Watched::new(true);
        let mut lost = 0;
        for step in steps {
            // Many of them are not possible, which is no matter.
            match step {
                Step::Make(path) => drop(fs::create_dir_all(watched.at(&path))),
                Step::Move(from, to) => drop(fs::rename(watched.at(&from), watched.at(&to))),
                Step::Remove(path) => drop(fs::remove_dir_all(watched.at(&path))),
                Step::Drain => {
                    let mut told = Told::default();
                    watched.tree.drain(&mut told, false);
                    lost += told.lost;
                }
            }
        }
        let told = watched.drain();
        prop_assert_eq!(told.end, None);
        prop_assume!(lost + told.lost == 0);
        let (folders, _) = found(&watched.at(""));
        let mut wanted = vec![("mark".to_owned(), CREATE)];
        fs::write(watched.at("mark"), "").unwrap();
        for folder in &folders {
            fs::write(watched.at(folder).join("mark"), "").unwrap();
            wanted.push((format!("{folder}/mark"), CREATE));
        }
        prop_assert_eq!(watched.events(), wanted);
    }
}
