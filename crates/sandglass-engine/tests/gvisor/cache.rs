//! What of the cache folder is needed by whom, as instances share it that do not know each other.

use std::path::{Path, PathBuf};

use sandglass_engine::engine::{Engine as _, Keep};
use sandglass_failpoint::NAMES;
use sandglass_testkit::conformance::limits;
use sandglass_types::{Digest, SandboxId};

use crate::fixture::{Fixture, ROOTFS, spec};
use crate::killed::{host, killed_at};

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn agents(fixture: &Fixture) -> Vec<String> {
    names(&fixture.cache().join("agents"))
}

/// Tidies, by an instance that needs nothing of its own but its agent.
fn tidy(fixture: &Fixture) {
    fixture.engine().tidy_cache(&[]).unwrap();
}

fn rootfs(fixture: &Fixture) -> PathBuf {
    fixture.cache().join("rootfs").join(ROOTFS.to_string())
}

#[test]
fn what_another_instance_has_paused_or_runs_stays() {
    let other = Fixture::new();
    let mut fixture = other.beside();
    let [before] = agents(&fixture).try_into().unwrap();
    let (parent, mut agent) = fixture.run();
    agent.sh("x=kept");
    let image = SandboxId::random();
    fixture.engine().pause(&parent.id).unwrap();
    fixture.engine().checkpoint(&parent.id, &image, Keep::Flushed).unwrap();
    fixture.engine().destroy(&parent.id).unwrap();
    // Both get another agent. What has the old one is an image of a server that does not run.
    for changed in [&other, &fixture] {
        changed.change_agent();
    }
    fixture.close();
    let mut other = other;
    other.reopen();
    tidy(&other);
    tidy(&other);
    assert!(agents(&fixture).contains(&before) && rootfs(&other).is_dir());
    // Its owner has it, and knows it by its records alone.
    fixture.reopen();
    let child = spec(parent.limits);
    fixture.engine().restore(&child, &image).unwrap();
    fixture.engine().remove_image(&image).unwrap();
    tidy(&fixture);
    tidy(&other);
    assert!(agents(&fixture).contains(&before) && rootfs(&other).is_dir());
    assert_eq!(fixture.attach(&child.id).sh("echo $x; busybox true"), "kept\n<0>");
    // When nobody has it any more it goes, and the one that both need stays.
    fixture.engine().destroy(&child.id).unwrap();
    tidy(&other);
    assert!(agents(&fixture).contains(&before), "its owner has not looked yet");
    tidy(&fixture);
    let after = agents(&fixture);
    assert!(!after.contains(&before) && after.len() == 1, "{after:?}");
    assert!(!rootfs(&other).exists());
    assert!(fixture.engine().create(&spec(parent.limits)).is_err(), "and is missed");
    fixture.assert_nothing_left();
}

#[test]
fn what_a_server_makes_sandboxes_from_stays_though_it_has_none() {
    let (one, two) = {
        let one = Fixture::new();
        let two = one.beside();
        (one, two)
    };
    one.engine().tidy_cache(&[ROOTFS, Digest::from_bytes([9; 32])]).unwrap();
    tidy(&two);
    assert!(rootfs(&two).is_dir());
    let sandbox = one.create();
    one.engine().destroy(&sandbox.id).unwrap();
    one.engine().tidy_cache(&[]).unwrap();
    assert!(!rootfs(&two).exists());
}

#[test]
fn while_a_record_or_an_image_can_not_be_read_nothing_is_given_up() {
    let (one, two) = {
        let one = Fixture::new();
        let two = one.beside();
        (one, two)
    };
    let sandbox = one.create();
    let folder = one.path().join("data/images").join(SandboxId::random().as_str());
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("meta.json"), "{").unwrap();
    one.engine().destroy(&sandbox.id).unwrap();
    for _ in 0..2 {
        tidy(&one);
        tidy(&two);
        assert!(rootfs(&two).is_dir());
    }
    std::fs::remove_dir_all(folder).unwrap();
    tidy(&one);
    assert!(!rootfs(&two).exists());
}

const KILLED: &str = "cache::a_host_killed_between_a_pin_and_its_use_harms_nobody";

#[test]
fn a_host_killed_between_a_pin_and_its_use_harms_nobody() {
    if let Some((point, engine)) = host() {
        if point.ends_with(".pinned") {
            engine.create(&spec(limits(1, 256, 128, 100))).unwrap();
        } else {
            engine.tidy_cache(&[]).unwrap();
        }
        return;
    }
    let points: Vec<_> = NAMES.iter().filter(|name| name.starts_with("engine.cache.")).collect();
    let [pinned, swept] = points.try_into().unwrap();
    let other = Fixture::new();
    let mut fixture = other.beside();
    killed_at(KILLED, pinned, &mut fixture);
    // It may have been about to use it.
    tidy(&other);
    assert!(rootfs(&other).is_dir());
    fixture.reopen();
    let sandbox = fixture.create();
    tidy(&fixture);
    tidy(&other);
    assert!(rootfs(&other).is_dir());
    fixture.engine().destroy(&sandbox.id).unwrap();

    // One that dies while it sweeps keeps nobody from it, and what it left half removed is gone the next time.
    killed_at(KILLED, swept, &mut fixture);
    let left = names(&fixture.cache().join("rootfs"));
    assert!(left.iter().all(|name| name.starts_with(".going-")) && left.len() == 1, "{left:?}");
    tidy(&other);
    assert_eq!(names(&fixture.cache().join("rootfs")), Vec::<String>::new());
    fixture.reopen();
    fixture.assert_nothing_left();
}
