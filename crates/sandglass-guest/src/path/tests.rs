use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, lchown, symlink};
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

struct Tree {
    dir: TempDir,
    root: OwnedFd,
}

impl Tree {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = open_root(dir.path()).unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::write(dir.path().join("a/b/file"), "x").unwrap();
        Self { dir, root }
    }

    fn path(&self, path: &str) -> std::path::PathBuf {
        self.dir.path().join(path)
    }

    fn link(&self, target: impl AsRef<Path>, at: &str) {
        symlink(target, self.path(at)).unwrap();
    }

    fn find(&self, path: &str, walk: Walk<'_>) -> Result<Place, PathError> {
        resolve(borrow(&self.root), path, walk)
    }

    fn follow(&self, path: &str) -> Result<String, PathError> {
        self.find(path, Walk::FOLLOW).map(|place| place.path)
    }
}

fn myself() -> Identity {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    Identity { uid, gid, groups: vec![gid] }
}

#[test]
fn cleaning_is_lexical_and_bounded() {
    for (given, wanted) in
        [("/", "/"), ("//a//b/", "/a/b"), ("/a/./b/../c", "/a/c"), ("/../..", "/"), ("/a/..", "/")]
    {
        assert_eq!(clean(given).unwrap(), wanted, "{given:?}");
    }
    let long = format!("/{}", "x".repeat(256));
    let very_long = "/x".repeat(2049);
    for given in ["", "a", "/a\0b", &long, &very_long] {
        assert!(matches!(clean(given), Err(PathError::Invalid(_))), "{given:?}");
    }
}

#[test]
fn links_are_followed_inside_the_root() {
    let tree = Tree::new();
    tree.link("b", "a/relative");
    tree.link("/a/b", "absolute");
    tree.link("../../../../a/b/file", "a/b/up");
    assert_eq!(tree.follow("/a/relative/file").unwrap(), "/a/b/file");
    assert_eq!(tree.follow("/absolute/up").unwrap(), "/a/b/file");
    assert_eq!(tree.find("/absolute", Walk::NO_FOLLOW).unwrap().path, "/absolute");
    assert_eq!(tree.follow("/absolute").unwrap(), "/a/b");
    assert_eq!(tree.follow("/").unwrap(), "/");
}

#[test]
fn circles_end() {
    let tree = Tree::new();
    tree.link("two", "one");
    tree.link("one", "two");
    tree.link("self/self", "self");
    assert!(matches!(tree.follow("/one"), Err(PathError::Loop(_))));
    assert!(matches!(tree.follow("/self/x"), Err(PathError::Loop(_))));
}

#[test]
fn what_is_missing_is_named() {
    let tree = Tree::new();
    tree.link("nowhere", "dangling");
    assert!(matches!(tree.follow("/a/none/file"), Err(PathError::NotFound(path)) if path == "/a/none"));
    assert!(matches!(tree.follow("/a/b/file/x"), Err(PathError::NotADirectory(_))));
    let missing = tree.find("/a/none", Walk::FOLLOW).unwrap();
    assert!(missing.stat.is_none());
    assert_eq!(tree.find("/dangling", Walk::FOLLOW).unwrap().path, "/nowhere");
    assert!(tree.find("/dangling", Walk::NO_FOLLOW).unwrap().stat.is_some());
}

#[test]
fn parents_are_made_but_never_in_place_of_a_link() {
    let tree = Tree::new();
    let user = myself();
    let walk = Walk { follow_last: true, purpose: Purpose::MakeParents(&user) };
    assert_eq!(tree.find("/new/deep/file", walk).unwrap().path, "/new/deep/file");
    assert!(tree.path("new/deep").is_dir() && !tree.path("new/deep/file").exists());
    let walk = Walk { purpose: Purpose::MakeAll(&user), ..walk };
    tree.find("/new/deep/dir", walk).unwrap();
    assert!(tree.path("new/deep/dir").is_dir());
}

#[test]
fn links_of_processes_are_refused() {
    let root = open_root(Path::new("/")).unwrap();
    for path in ["/proc/self/root/etc", "/proc/self/fd/0", "/proc/self/cwd/x", "/proc/self", "/dev/stdin"] {
        let result = resolve(borrow(&root), path, Walk::FOLLOW);
        assert!(matches!(result, Err(PathError::Magic(_))), "{path}: {result:?}");
    }
    let tree = Tree::new();
    tree.link("/proc/self/root", "a/trap");
    let outside =
        resolve(borrow(&root), &format!("{}/etc/passwd", tree.path("a/trap").display()), Walk::FOLLOW);
    assert!(matches!(outside, Err(PathError::Magic(_))), "{outside:?}");
}

#[test]
fn a_directory_that_becomes_a_link_does_not_lead_elsewhere() {
    let tree = Tree::new();
    std::fs::create_dir(tree.path("secret")).unwrap();
    let place = tree.find("/a/b/file", Walk::FOLLOW).unwrap();
    std::fs::rename(tree.path("a/b"), tree.path("a/old")).unwrap();
    tree.link("../secret", "a/b");
    std::fs::remove_file(tree.path("a/old/file")).unwrap();
    tree.link("/secret", "a/old/file");
    assert_eq!(place.open(OFlags::RDONLY, Mode::empty()).unwrap_err(), Errno::LOOP);
}

#[test]
fn permissions_are_those_of_the_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let stat = |mode: u32, uid: u32, gid: u32| {
        let mut stat = rustix::fs::stat(dir.path()).unwrap();
        (stat.st_mode, stat.st_uid, stat.st_gid) = (mode, uid, gid);
        stat
    };
    let user = Identity { uid: 1000, gid: 1000, groups: vec![1000, 27] };
    for (mode, uid, gid, wanted) in [
        (0o200, 1000, 0, true),
        // The owner's class counts, however much others may.
        (0o077, 1000, 0, false),
        (0o020, 0, 27, true),
        (0o707, 0, 27, false),
        (0o002, 0, 0, true),
        (0o775, 0, 0, false),
    ] {
        assert_eq!(permits(&stat(mode, uid, gid), &user, WRITE), wanted, "{mode:o} {uid} {gid}");
    }
    let root = Identity { uid: 0, gid: 0, groups: vec![0] };
    assert!(permits(&stat(0, 1000, 1000), &root, WRITE | SEARCH));
    assert!(!permits(&stat(0o755, 0, 0), &user, WRITE | SEARCH));
}

#[test]
fn behind_a_user_s_link_only_what_the_user_may_is_changed() {
    let tree = Tree::new();
    let mode =
        |path: &str, mode| std::fs::set_permissions(tree.path(path), Permissions::from_mode(mode)).unwrap();
    // A temporary folder is closed to others.
    mode("", 0o755);
    let user = Identity { uid: 1000, gid: 1000, groups: vec![1000] };
    let change = |path: &str| tree.find(path, Walk { follow_last: true, purpose: Purpose::Change(&user) });
    let make = |path: &str| tree.find(path, Walk { follow_last: true, purpose: Purpose::MakeAll(&user) });
    tree.link("/a/b", "of-root");
    tree.link("/a/b", "of-user");
    lchown(tree.path("of-user"), Some(1000), Some(1000)).unwrap();

    // Root's links and plain paths mean what they name.
    for path in ["/a/b/file", "/of-root/file"] {
        let place = change(path).unwrap();
        assert!(!place.led && place.check_entry(&user).is_ok(), "{path}");
        assert!(place.check_file(place.stat.as_ref().unwrap(), &user).is_ok(), "{path}");
    }
    let place = change("/of-user/file").unwrap();
    assert!(place.led);
    assert!(matches!(place.check_entry(&user), Err(PathError::Denied(_))));
    assert!(matches!(place.check_file(place.stat.as_ref().unwrap(), &user), Err(PathError::Denied(_))));
    assert!(matches!(make("/of-user/new"), Err(PathError::Denied(_))));
    assert!(!tree.path("a/b/new").exists());
    // Looking is free, as everywhere.
    assert_eq!(tree.follow("/of-user/file").unwrap(), "/a/b/file");

    mode("a/b", 0o1777);
    make("/of-user/new").unwrap();
    assert!(change("/of-user/new").unwrap().check_entry(&user).is_ok());
    assert!(matches!(change("/of-user/file").unwrap().check_entry(&user), Err(PathError::Denied(_))));
    mode("a", 0o700);
    assert!(matches!(change("/of-user/new"), Err(PathError::Denied(_))));
}

proptest! {
    #[test]
    fn cleaned_paths_have_no_special_components(path in "/[a./]{0,40}") {
        let cleaned = clean(&path).unwrap();
        prop_assert!(cleaned.starts_with('/'));
        prop_assert!(cleaned.split('/').all(|part| part != "." && part != ".."));
        prop_assert_eq!(clean(&cleaned).unwrap(), cleaned);
    }
}
