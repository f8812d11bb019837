//! Checkpoint and restore: memory, processes and disk come back together or not at all.

use sandglass_engine::engine::{Engine as _, EngineError, Presence};
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, by_both, limits, spec};

#[test]
fn two_children_go_on_from_one_image_each_with_its_own_disk() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let engine = fixture.engine();
        let (parent, mut agent) = fixture.run();
        agent.sh("x=memory; echo disk > /kept; echo tmp > /tmp/kept; exec 5>>/open; echo one >&5");
        let image = SandboxId::random();
        engine.pause(&parent.id).unwrap();
        engine.checkpoint(&parent.id, &image).unwrap();
        assert_eq!(fixture.presence(&parent.id), Some(Presence::Paused));
        assert!(matches!(engine.checkpoint(&parent.id, &image), Err(EngineError::Exists(_))));
        engine.resume(&parent.id).unwrap();
        assert_eq!(agent.sh("echo parent >&5; echo $x; busybox cat /open"), "memory\none\nparent\n<0>");

        for n in 0..2 {
            let child = spec(parent.limits);
            engine.restore(&child, &image).unwrap();
            assert_eq!(fixture.presence(&child.id), Some(Presence::Running));
            let mut agent = fixture.attach(&child.id);
            assert_eq!(agent.sh("echo $x; busybox cat /kept /tmp/kept"), "memory\ndisk\ntmp\n<0>");
            assert_eq!(
                agent.sh(&format!("echo child{n} >&5; busybox cat /open")),
                format!("one\nchild{n}\n<0>")
            );
            engine.destroy(&child.id).unwrap();
        }
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
        let Err(EngineError::Step { step, source }) = engine.checkpoint(&spec.id, &SandboxId::random())
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
fn an_image_that_does_not_fit_is_refused_and_leaves_nothing() {
    let mut fixture = Fixture::new();
    let (parent, _agent) = fixture.run();
    let image = SandboxId::random();
    fixture.engine().pause(&parent.id).unwrap();
    fixture.engine().checkpoint(&parent.id, &image).unwrap();
    fixture.engine().destroy(&parent.id).unwrap();

    let other_limits = spec(limits(1, 512, 128, 100));
    let Err(EngineError::Step { source, .. }) = fixture.engine().restore(&other_limits, &image) else {
        panic!()
    };
    assert_eq!(source.to_string(), "it was made with another set of limits");
    let absent = fixture.engine().restore(&spec(parent.limits), &SandboxId::random());
    assert!(matches!(absent, Err(EngineError::NotFound(_))));
    // Another agent.
    std::fs::write(fixture.path().join("agent"), "#!/bin/busybox sh\n").unwrap();
    fixture.reopen();
    let Err(EngineError::Step { source, .. }) = fixture.engine().restore(&spec(parent.limits), &image) else {
        panic!()
    };
    assert_eq!(source.to_string(), "it was made with another agent");
    fixture.assert_nothing_left();
}
