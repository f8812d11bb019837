//! A host that is killed while it writes a checkpoint image leaves no half of one.

use sandglass_engine::engine::{Engine as _, Keep, Presence};
use sandglass_failpoint::NAMES;
use sandglass_testkit::conformance::limits;
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, spec};
use crate::killed::{host, killed_at};

/// The name of the image.
const IMAGE: &str = "iiiiiiiiiiiiiiiiiiii";

const KILLED: &str = "image_crash::a_host_killed_while_it_writes_an_image_leaves_no_half_of_one";

#[test]
fn a_host_killed_while_it_writes_an_image_leaves_no_half_of_one() {
    if let Some((_, engine)) = host() {
        let spec = spec(limits(1, 256, 128, 100));
        engine.create(&spec).unwrap();
        engine.start(&spec.id).unwrap();
        engine.pause(&spec.id).unwrap();
        return engine.checkpoint(&spec.id, &IMAGE.parse().unwrap(), Keep::Flushed).unwrap();
    }
    let mut fixture = Fixture::new();
    let image: SandboxId = IMAGE.parse().unwrap();
    for point in NAMES.iter().filter(|name| name.starts_with("engine.image.")) {
        killed_at(KILLED, point, &mut fixture);
        fixture.reopen();
        let images = std::fs::read_dir(fixture.path().join("data/images")).unwrap();
        assert_eq!(images.count(), 0, "at {point}");
        let mut all = fixture.engine().list().unwrap();
        let (id, presence) = all.pop().unwrap();
        assert_eq!((presence, all.len()), (Presence::Paused, 0), "at {point}");
        // It goes on as if nothing had been.
        fixture.engine().checkpoint(&id, &image, Keep::Flushed).unwrap();
        fixture.engine().remove_image(&image).unwrap();
        fixture.engine().destroy(&id).unwrap();
        assert_eq!(fixture.leftovers(), Vec::<String>::new(), "at {point}");
    }
}

const COMPRESSED: &str =
    "image_crash::a_host_killed_while_it_changes_the_form_of_an_image_leaves_one_of_both";

#[test]
fn a_host_killed_while_it_changes_the_form_of_an_image_leaves_one_of_both() {
    let image: SandboxId = IMAGE.parse().unwrap();
    if let Some((point, engine)) = host() {
        if point.starts_with("engine.compress.") {
            engine.compress_image(&image).unwrap();
        } else {
            engine.expand_image(&image).unwrap();
        }
        return;
    }
    let mut fixture = Fixture::new();
    let (parent, mut agent) = fixture.run();
    assert_eq!(agent.sh("x=memory; echo disk > kept"), "<0>");
    fixture.engine().pause(&parent.id).unwrap();
    fixture.engine().checkpoint(&parent.id, &image, Keep::Flushed).unwrap();
    fixture.engine().destroy(&parent.id).unwrap();
    let is_compressed = |fixture: &Fixture| {
        let measured = fixture.engine().footprints(std::slice::from_ref(&image)).unwrap();
        measured.each[&image].compressed
    };
    let points = |begin: &'static str| NAMES.iter().filter(move |name| name.starts_with(begin));
    for point in points("engine.compress.").chain(points("engine.expand.")) {
        let (before, expands) = (is_compressed(&fixture), point.starts_with("engine.expand."));
        match (before, expands) {
            (false, true) => drop(fixture.engine().compress_image(&image).unwrap()),
            (true, false) => fixture.engine().expand_image(&image).unwrap(),
            _ => {}
        }
        killed_at(COMPRESSED, point, &mut fixture);
        let aside = std::fs::read_dir(fixture.path().join("data/images")).unwrap().count() - 1;
        assert_eq!(aside, usize::from(!point.ends_with(".begin")), "at {point}");
        fixture.reopen();
        let images = std::fs::read_dir(fixture.path().join("data/images")).unwrap();
        assert_eq!(images.count(), 1, "something is left aside at {point}");
        assert_eq!(is_compressed(&fixture), point.ends_with("swapped") != expands, "at {point}");
        let child = spec(parent.limits);
        fixture.engine().restore(&child, &image).unwrap();
        assert_eq!(
            fixture.attach(&child.id).sh("echo $x; busybox cat kept"),
            "memory\ndisk\n<0>",
            "at {point}"
        );
        fixture.engine().destroy(&child.id).unwrap();
    }
    fixture.assert_nothing_left();
}
