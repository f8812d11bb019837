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
