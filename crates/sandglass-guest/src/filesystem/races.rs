//! Each verb in a race against the user whom it works for. See [`crate::path::races`].

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, lchown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::*;
use crate::path::races::{Arena, Over, PLAIN, Trap};

const ALL: [Trap; 3] = [Trap::Link, Trap::Magic, Trap::Relinked];

fn call(arena: &Arena) -> Call {
    let user =
        User { name: "racer".into(), home: "/".into(), shell: "/bin/sh".into(), identity: arena.racer() };
    let root = arena.root.try_clone().unwrap();
    Call { root, users: Users::default(), labels: Arc::default(), user }
}

/// Whether it was done; a refusal must be one of those that a race may bring.
fn done<T>(result: Result<T, ConnectError>) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => {
            use ErrorCode::{Aborted, InvalidArgument, NotFound, PermissionDenied};
            assert!(
                [Aborted, InvalidArgument, NotFound, PermissionDenied].contains(&error.code),
                "{error:?}"
            );
            false
        }
    }
}

fn put(inside: &Path, name: &str) {
    fs::write(inside.join(name), PLAIN).unwrap();
}

#[test]
fn looking_is_never_led_into_processes() {
    Arena::is_lost(Trap::Magic, |arena, inside| {
        put(inside, "file");
        let entry = call(arena).entry(&arena.path("door/file"));
        assert!(entry.as_ref().is_ok_and(|entry| entry.size == 5) || entry.is_err(), "{entry:?}");
        done(entry)
    });
    Arena::is_lost(Trap::Magic, |arena, inside| {
        put(inside, "file");
        let entries = call(arena).list(&arena.path("door"), 3);
        if let Ok(entries) = &entries {
            let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
            assert_eq!(names, ["file"]);
        }
        done(entries)
    });
}

#[test]
fn a_listing_of_all_that_is_below_is_never_led_elsewhere() {
    // Also not by a link that may be looked through: it is not followed here.
    let arena = Arena::new(Trap::Link);
    let mut seen = [0, 0];
    arena.race(|inside| {
        put(inside, "file");
        let entries = call(&arena).list(&arena.path(""), 3).unwrap();
        let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
        assert!(!names.contains(&"closed") && entries.iter().all(|entry| entry.size != 14), "{names:?}");
        seen[usize::from(names.contains(&"file"))] += 1;
        true
    });
    assert!(seen[1] > 0, "the folder was never seen as one: {seen:?}");
}

#[test]
fn folders_are_not_made_elsewhere() {
    for trap in ALL {
        Arena::is_lost(trap, |arena, inside| {
            let _ = fs::remove_dir_all(inside.join("new"));
            let made = done(call(arena).make_dir(&arena.path("door/new/below")));
            assert!(!made || inside.join("new/below").is_dir());
            made
        });
    }
}

#[test]
fn nothing_is_moved_from_or_to_elsewhere() {
    for trap in ALL {
        Arena::is_lost(trap, |arena, inside| {
            put(inside, "file");
            let (door, stash) = (arena.path("door/file"), arena.path("stash/file"));
            let out = done(call(arena).rename(&door, &stash));
            assert!(!out || fs::read_to_string(&stash).unwrap() == PLAIN);
            fs::write(&stash, PLAIN).unwrap();
            let into = done(call(arena).rename(&stash, &door));
            assert_eq!(Path::new(&stash).exists(), !into);
            out && into
        });
    }
}

#[test]
fn nothing_is_removed_elsewhere() {
    for trap in ALL {
        Arena::is_lost(trap, |arena, inside| {
            put(inside, "file");
            let _ = fs::create_dir(inside.join("closed"));
            put(inside, "closed/file");
            let file = done(call(arena).remove(&arena.path("door/file")));
            let folder = done(call(arena).remove(&arena.path("door/closed")));
            file && folder
        });
    }
}

#[test]
fn all_below_a_folder_is_removed_and_nothing_elsewhere() {
    let arena = Arena::new(Trap::Link);
    let forbidden = arena.forbidden();
    arena.race(|inside| {
        put(inside, "file");
        // Both names are in it, whatever they are just now: the folder is emptied, and the link removed.
        let tree = arena.path("tree");
        let _ = fs::create_dir(&tree);
        let _ = fs::create_dir(format!("{tree}/folder"));
        let _ = std::os::unix::fs::symlink(arena.path("trap"), format!("{tree}/link"));
        done(call(&arena).remove(&tree))
    });
    assert_eq!(arena.forbidden(), forbidden);
}

#[test]
fn what_takes_the_place_of_a_new_folder_stays_its_owner_s() {
    let arena = Arena::new(Trap::Link);
    let (new, roots, aside) = (arena.path("new"), arena.path("roots"), arena.path("aside"));
    fs::create_dir(&roots).unwrap();
    fs::write(format!("{roots}/secret"), "").unwrap();
    fs::set_permissions(&roots, fs::Permissions::from_mode(0o700)).unwrap();
    let inode = fs::metadata(&roots).unwrap().ino();
    let is_over = AtomicBool::new(false);
    let mut exchanged = 0;
    std::thread::scope(|threads| {
        let _over = Over(&is_over);
        threads.spawn(|| {
            // As soon as the folder is there, the other one has its name.
            while !is_over.load(Ordering::Relaxed) {
                let _ = renameat_with(CWD, &roots, CWD, &new, RenameFlags::EXCHANGE);
            }
        });
        for _ in 0..20_000 {
            done(call(&arena).make_dir(&new));
            // Undone, whichever has which name now; both keep theirs for a moment.
            let owner = |path: &str| {
                fs::metadata(path).ok().filter(|stat| stat.ino() == inode).map(|stat| stat.uid())
            };
            assert!([owner(&new), owner(&roots)].iter().flatten().all(|uid| *uid == 0));
            exchanged += u32::from(owner(&new).is_some());
            while fs::rename(&new, &aside).is_ok() {
                if fs::metadata(&aside).unwrap().ino() == inode {
                    let _ = fs::rename(&roots, format!("{aside}-made"));
                    fs::rename(&aside, &roots).unwrap();
                    let _ = fs::remove_dir(format!("{aside}-made"));
                } else {
                    fs::remove_dir(&aside).unwrap();
                }
            }
        }
    });
    assert!(exchanged > 0, "there was no race");
    // What was made for nobody else is the user's.
    call(&arena).make_dir(&arena.path("mine")).unwrap();
    assert_eq!(fs::metadata(arena.path("mine")).unwrap().uid(), arena.racer().uid);
    lchown(arena.path("mine"), Some(0), Some(0)).unwrap();
}

#[test]
fn a_folder_that_is_another_s_is_not_moved_to_elsewhere() {
    let arena = Arena::new(Trap::Link);
    let (open, link, loot) = (arena.path("../open"), arena.path("link"), arena.path("stash/loot"));
    for folder in [open.clone(), format!("{open}/roots")] {
        fs::create_dir(&folder).unwrap();
    }
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    std::os::unix::fs::symlink(&open, &link).unwrap();
    lchown(&link, Some(arena.racer().uid), None).unwrap();
    let moved = |to: &str| call(&arena).rename(&format!("{link}/roots"), to).map_err(|error| error.code);
    assert_eq!(moved(&loot).unwrap_err(), ErrorCode::PermissionDenied);
    // To give it another name there is everybody's right in this folder.
    moved(&format!("{link}/other")).unwrap();
    assert!(fs::metadata(format!("{open}/other")).is_ok());
}
