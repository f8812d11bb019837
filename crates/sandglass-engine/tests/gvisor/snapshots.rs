//! Checkpoint and restore: memory, processes and disk come back together or not at all.

use std::collections::BTreeSet;
use std::path::PathBuf;

use sandglass_engine::engine::{Engine as _, EngineError, Keep};
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, by_both, spec};

#[test]
fn open_files_and_the_temporary_folder_come_back() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let engine = fixture.engine();
        let (parent, mut agent) = fixture.run();
        agent.sh("echo tmp > /tmp/kept; exec 5>>/open; echo one >&5");
        let image = SandboxId::random();
        engine.pause(&parent.id).unwrap();
        engine.checkpoint(&parent.id, &image, Keep::Flushed).unwrap();
        engine.resume(&parent.id).unwrap();
        assert_eq!(agent.sh("echo parent >&5; busybox cat /open"), "one\nparent\n<0>");
        let child = spec(parent.limits);
        engine.restore(&child, &image).unwrap();
        let mut agent = fixture.attach(&child.id);
        assert_eq!(agent.sh("echo child >&5; busybox cat /open /tmp/kept"), "one\nchild\ntmp\n<0>");
        engine.destroy(&child.id).unwrap();
        engine.destroy(&parent.id).unwrap();
        engine.remove_image(&image).unwrap();
        engine.remove_image(&image).unwrap();
        fixture.assert_nothing_left();
        assert_eq!(std::fs::read_dir(fixture.path().join("data/images")).unwrap().count(), 0);
    });
}

#[test]
fn a_refused_checkpoint_leaves_the_sandbox_alive_and_no_image() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let engine = fixture.engine();
        let (spec, mut agent) = fixture.run();
        // A file that is open but deleted can't be saved.
        agent.sh("exec 5>/gone; busybox rm /gone");
        engine.pause(&spec.id).unwrap();
        let Err(EngineError::Step { step, source }) =
            engine.checkpoint(&spec.id, &SandboxId::random(), Keep::Flushed)
        else {
            panic!()
        };
        assert_eq!(step, "checkpoint");
        assert!(source.to_string().contains("deleted"), "{source}");
        engine.resume(&spec.id).unwrap();
        assert_eq!(agent.sh("exec 5>&-; echo alive"), "alive\n<0>");
        assert_eq!(std::fs::read_dir(fixture.path().join("data/images")).unwrap().count(), 0);
    });
}

#[test]
fn an_image_is_restored_with_its_own_agent_as_long_as_that_is_there() {
    let mut fixture = Fixture::new();
    let (parent, _agent) = fixture.run();
    let image = SandboxId::random();
    fixture.engine().pause(&parent.id).unwrap();
    fixture.engine().checkpoint(&parent.id, &image, Keep::Flushed).unwrap();
    fixture.engine().destroy(&parent.id).unwrap();
    let layers = || -> BTreeSet<PathBuf> {
        let agents = std::fs::read_dir(fixture.path().join("cache/agents")).unwrap();
        agents.map(|entry| entry.unwrap().path()).collect()
    };
    let before = layers();
    std::fs::write(fixture.path().join("agent"), "#!/bin/busybox sh\n").unwrap();
    fixture.reopen();
    let child = spec(parent.limits);
    fixture.engine().restore(&child, &image).unwrap();
    assert_eq!(fixture.attach(&child.id).sh("echo works"), "works\n<0>");
    // What is made of it has that agent as well.
    let next = SandboxId::random();
    fixture.engine().pause(&child.id).unwrap();
    fixture.engine().checkpoint(&child.id, &next, Keep::Flushed).unwrap();
    fixture.engine().destroy(&child.id).unwrap();
    fixture.engine().remove_image(&image).unwrap();
    let child = spec(parent.limits);
    fixture.engine().restore(&child, &next).unwrap();
    fixture.engine().destroy(&child.id).unwrap();

    for layer in before {
        std::fs::remove_dir_all(layer).unwrap();
    }
    let image = next;
    let refused = fixture.engine().restore(&spec(parent.limits), &image);
    assert!(matches!(refused, Err(EngineError::Mismatch { what: "the agent", .. })), "{refused:?}");
    fixture.assert_nothing_left();
}
