//! Checkpoint and restore: memory and files come back together or not at all.

use std::sync::atomic::{AtomicBool, Ordering};

use sandglass_engine::engine::{Compression, EngineError, Keep, Presence, SandboxSpec};
use sandglass_types::SandboxId;

use super::{Fixture, limits};

/// An image of a sandbox that knows and keeps something; the sandbox is left paused.
fn image(fixture: &Fixture<'_>) -> (SandboxSpec, SandboxId) {
    let (parent, mut agent) = fixture.run();
    assert_eq!(agent.sh("x=memory; echo disk > kept"), "<0>");
    let image = SandboxId::random();
    fixture.engine().pause(&parent.id).unwrap();
    fixture.engine().checkpoint(&parent.id, &image, Keep::Flushed).unwrap();
    let measured = fixture.engine().footprints(&[image.clone(), SandboxId::random()]).unwrap();
    let [(of, footprint)] = Vec::from_iter(measured.each).try_into().unwrap();
    assert!(
        of == image && footprint.exact && footprint.unique_bytes > 0,
        "an image of nothing: {footprint:?}"
    );
    assert_eq!(measured.together, footprint.bytes);
    assert_eq!(fixture.presence(&parent.id), Some(Presence::Paused));
    (parent, image)
}

pub(super) fn two_children_go_on_from_one_image(fixture: &mut Fixture<'_>) {
    let engine = fixture.engine();
    let (parent, image) = image(fixture);
    let again = engine.checkpoint(&parent.id, &image, Keep::Flushed);
    assert!(matches!(again, Err(EngineError::Exists(_))), "{again:?}");
    engine.resume(&parent.id).unwrap();
    let mut agent = fixture.attach(&parent.id);
    assert_eq!(agent.sh("echo $x; x=parent; echo parent >> kept"), "memory\n<0>");
    let children = [(); 2].map(|()| fixture.spec());
    for child in &children {
        engine.restore(child, &image).unwrap();
        assert_eq!(fixture.presence(&child.id), Some(Presence::Running));
        assert!(matches!(engine.restore(child, &image), Err(EngineError::Exists(_))));
        let mut agent = fixture.attach(&child.id);
        // What it was when the image was made, whatever parent and sister did since.
        assert_eq!(agent.sh("echo $x; busybox cat kept"), "memory\ndisk\n<0>");
        assert_eq!(agent.sh("x=child; echo child >> kept; busybox cat kept"), "disk\nchild\n<0>");
    }
    assert_eq!(agent.sh("echo $x; busybox cat kept"), "parent\ndisk\nparent\n<0>");
    // A copy is a sandbox like any other.
    let first = &children[0].id;
    engine.pause(first).unwrap();
    let next = SandboxId::random();
    engine.checkpoint(first, &next, Keep::Flushed).unwrap();
    let grandchild = fixture.spec();
    engine.restore(&grandchild, &next).unwrap();
    let said = fixture.attach(&grandchild.id).sh("echo $x; busybox cat kept");
    assert_eq!(said, "child\ndisk\nchild\n<0>");
}

pub(super) fn an_image_outlives_its_parent_and_its_host(fixture: &mut Fixture<'_>) {
    let (parent, image) = image(fixture);
    fixture.destroy(&parent.id);
    fixture.assert_nothing_left();
    fixture.reopen();
    let child = fixture.spec();
    fixture.engine().restore(&child, &image).unwrap();
    assert_eq!(fixture.attach(&child.id).sh("echo $x; busybox cat kept"), "memory\ndisk\n<0>");
}

pub(super) fn an_image_that_does_not_fit_is_refused_and_leaves_nothing(fixture: &mut Fixture<'_>) {
    let (parent, image) = image(fixture);
    fixture.destroy(&parent.id);
    let mut other = fixture.spec();
    other.limits = limits(1, 512, 64, 100);
    let refused = fixture.engine().restore(&other, &image);
    let Err(EngineError::Step { source, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(source.to_string(), "it was made with another set of limits");
    let absent = fixture.engine().restore(&fixture.spec(), &SandboxId::random());
    assert!(matches!(absent, Err(EngineError::NotFound(_))), "{absent:?}");
    fixture.assert_nothing_left();
}

pub(super) fn it_starts_anew_from_its_disk(fixture: &mut Fixture<'_>) {
    let (parent, full) = image(fixture);
    let engine = fixture.engine();
    let disk = SandboxId::random();
    engine.keep_disk(&parent.id, &disk).unwrap();
    assert_eq!(fixture.presence(&parent.id), Some(Presence::Paused));
    let again = engine.keep_disk(&parent.id, &disk);
    assert!(matches!(again, Err(EngineError::Exists(_))), "{again:?}");
    // It runs on as if nothing had been.
    engine.resume(&parent.id).unwrap();
    let refused = engine.keep_disk(&parent.id, &SandboxId::random());
    assert!(matches!(refused, Err(EngineError::WrongState { .. })), "{refused:?}");
    assert_eq!(fixture.attach(&parent.id).sh("echo $x; echo parent >> kept"), "memory\n<0>");
    fixture.destroy(&parent.id);
    fixture.assert_nothing_left();
    fixture.reopen();
    let engine = fixture.engine();
    // Whether there is memory in the image or not: it is left out.
    for image in [&disk, &full] {
        let child = fixture.spec();
        engine.boot(&child, image).unwrap();
        assert_eq!(fixture.presence(&child.id), Some(Presence::Created));
        assert!(matches!(engine.boot(&child, image), Err(EngineError::Exists(_))));
        engine.start(&child.id).unwrap();
        assert_eq!(fixture.attach(&child.id).sh("echo $x; busybox cat kept"), "\ndisk\n<0>");
    }
    let refused = engine.restore(&fixture.spec(), &disk);
    let Err(EngineError::Step { source, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(source.to_string(), "it was made without memory");
    let mut other = fixture.spec();
    other.limits = limits(1, 512, 64, 100);
    let refused = engine.boot(&other, &disk);
    let Err(EngineError::Step { source, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(source.to_string(), "it was made with another set of limits");
    let absent = engine.boot(&fixture.spec(), &SandboxId::random());
    assert!(matches!(absent, Err(EngineError::NotFound(_))), "{absent:?}");
}

pub(super) fn one_that_was_compressed_is_what_it_was(fixture: &mut Fixture<'_>) {
    let (parent, image) = image(fixture);
    fixture.destroy(&parent.id);
    let is_compressed = |fixture: &Fixture<'_>| {
        let measured = fixture.engine().footprints(std::slice::from_ref(&image)).unwrap();
        measured.each[&image].compressed
    };
    let compressed = |fixture: &Fixture<'_>| {
        assert_eq!(fixture.engine().compress_image(&image).unwrap(), Compression::Compressed);
        assert_eq!(fixture.engine().compress_image(&image).unwrap(), Compression::Already);
        assert!(is_compressed(fixture));
    };
    assert!(!is_compressed(fixture));
    compressed(fixture);
    assert_eq!(fixture.engine().images().unwrap(), std::slice::from_ref(&image));
    fixture.reopen();
    let engine = fixture.engine();
    // Asked for, or in passing by who wants it.
    for _ in 0..2 {
        engine.expand_image(&image).unwrap();
        assert!(!is_compressed(fixture));
    }
    for way in ["restore", "compressed before", "boot"] {
        if way != "restore" {
            compressed(fixture);
        }
        let child = fixture.spec();
        if way == "boot" {
            engine.boot(&child, &image).unwrap();
            engine.start(&child.id).unwrap();
            assert_eq!(fixture.attach(&child.id).sh("echo $x; busybox cat kept"), "\ndisk\n<0>");
        } else {
            engine.restore(&child, &image).unwrap();
            assert_eq!(fixture.attach(&child.id).sh("echo $x; busybox cat kept"), "memory\ndisk\n<0>");
        }
        assert!(!is_compressed(fixture), "{way}");
        fixture.destroy(&child.id);
    }
    for absent in
        [engine.compress_image(&SandboxId::random()).map(drop), engine.expand_image(&SandboxId::random())]
    {
        assert!(matches!(absent, Err(EngineError::NotFound(_))), "{absent:?}");
    }
    compressed(fixture);
    engine.remove_image(&image).unwrap();
    assert_eq!(engine.images().unwrap(), []);
}

pub(super) fn it_may_be_flushed_after_its_source_runs_again(fixture: &mut Fixture<'_>) {
    let (parent, mut agent) = fixture.run();
    assert_eq!(agent.sh("x=memory"), "<0>");
    let engine = fixture.engine();
    let image = SandboxId::random();
    engine.pause(&parent.id).unwrap();
    engine.checkpoint(&parent.id, &image, Keep::Unflushed).unwrap();
    engine.resume(&parent.id).unwrap();
    engine.flush_image(&image).unwrap();
    let absent = engine.flush_image(&SandboxId::random());
    assert!(matches!(absent, Err(EngineError::NotFound(_))), "{absent:?}");
    let child = fixture.spec();
    engine.restore(&child, &image).unwrap();
    assert_eq!(fixture.attach(&child.id).sh("echo $x"), "memory\n<0>");
}

pub(super) fn it_can_be_looked_at_while_it_comes_back(fixture: &mut Fixture<'_>) {
    let (parent, image) = image(fixture);
    fixture.destroy(&parent.id);
    let engine = fixture.engine();
    for ahead in [true, false] {
        let child = fixture.spec();
        if ahead {
            engine.prepare_restore(&child, &image).unwrap();
        }
        let back = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                while !back.load(Ordering::Relaxed) {
                    engine.list().unwrap();
                }
            });
            let restored = engine.restore(&child, &image);
            back.store(true, Ordering::Relaxed);
            looks.join().unwrap();
            restored.unwrap();
        });
        assert_eq!(fixture.presence(&child.id), Some(Presence::Running));
        assert_eq!(fixture.attach(&child.id).sh("echo $x"), "memory\n<0>");
        fixture.destroy(&child.id);
    }
}

pub(super) fn one_that_was_prepared_is_taken(fixture: &mut Fixture<'_>) {
    let (parent, image) = image(fixture);
    let engine = fixture.engine();
    engine.resume(&parent.id).unwrap();
    let child = fixture.spec();
    engine.prepare_restore(&child, &image).unwrap();
    assert_eq!(fixture.presence(&child.id), Some(Presence::Created));
    let again = engine.prepare_restore(&child, &image);
    assert!(matches!(again, Err(EngineError::Exists(_))), "{again:?}");
    let started = engine.start(&child.id);
    assert!(matches!(started, Err(EngineError::WrongState { .. })), "{started:?}");
    assert!(matches!(engine.create(&child), Err(EngineError::Exists(_))));
    // What becomes of the parent meanwhile is none of its business.
    assert_eq!(fixture.attach(&parent.id).sh("x=parent; echo parent >> kept"), "<0>");
    engine.restore(&child, &image).unwrap();
    assert_eq!(fixture.presence(&child.id), Some(Presence::Running));
    assert!(matches!(engine.restore(&child, &image), Err(EngineError::Exists(_))));
    assert_eq!(fixture.attach(&child.id).sh("echo $x; busybox cat kept"), "memory\ndisk\n<0>");
    // It is a sandbox like any other.
    engine.pause(&child.id).unwrap();
    let next = SandboxId::random();
    engine.checkpoint(&child.id, &next, Keep::Flushed).unwrap();
    let grandchild = fixture.spec();
    engine.prepare_restore(&grandchild, &next).unwrap();
    fixture.destroy(&child.id);
    engine.restore(&grandchild, &next).unwrap();
    assert_eq!(fixture.attach(&grandchild.id).sh("echo $x; busybox cat kept"), "memory\ndisk\n<0>");
}

pub(super) fn one_that_was_prepared_stands_still_and_outlives_its_host(fixture: &mut Fixture<'_>) {
    let (parent, image) = image(fixture);
    fixture.destroy(&parent.id);
    let [taken, left] = [(); 2].map(|()| fixture.spec());
    for spec in [&taken, &left] {
        fixture.engine().prepare_restore(spec, &image).unwrap();
    }
    fixture.reopen();
    let engine = fixture.engine();
    let used = || engine.stats(&taken.id).unwrap().cpu_micros;
    let before = used();
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(used() - before < 1000, "it takes CPU time");
    assert_eq!(fixture.presence(&taken.id), Some(Presence::Created));
    engine.restore(&taken, &image).unwrap();
    assert_eq!(fixture.attach(&taken.id).sh("echo $x; busybox cat kept"), "memory\ndisk\n<0>");
    fixture.destroy(&taken.id);
    fixture.destroy(&left.id);
    fixture.assert_nothing_left();
}

pub(super) fn what_can_not_be_prepared_is_refused_and_leaves_nothing(fixture: &mut Fixture<'_>) {
    let (parent, image) = image(fixture);
    let engine = fixture.engine();
    let disk = SandboxId::random();
    engine.keep_disk(&parent.id, &disk).unwrap();
    fixture.destroy(&parent.id);
    let mut other = fixture.spec();
    other.limits = limits(1, 512, 64, 100);
    for (spec, image, said) in [
        (&other, &image, "it was made with another set of limits"),
        (&fixture.spec(), &disk, "it was made without memory"),
    ] {
        let refused = engine.prepare_restore(spec, image);
        let Err(EngineError::Step { source, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(source.to_string(), said);
    }
    let absent = engine.prepare_restore(&fixture.spec(), &SandboxId::random());
    assert!(matches!(absent, Err(EngineError::NotFound(_))), "{absent:?}");
    // One that was made for another image is none for this.
    let spec = fixture.spec();
    engine.prepare_restore(&spec, &image).unwrap();
    let another = engine.restore(&spec, &disk);
    assert!(matches!(another, Err(EngineError::Exists(_))), "{another:?}");
    fixture.destroy(&spec.id);
    fixture.assert_nothing_left();
}
