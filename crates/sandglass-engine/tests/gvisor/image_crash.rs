//! A host that is killed while it writes a checkpoint image leaves no half of one.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use sandglass_engine::engine::{Engine as _, Keep, Presence};
use sandglass_engine::gvisor::Driver;
use sandglass_failpoint::{Failpoints, NAMES};
use sandglass_linux::process::{Launch, spawn};
use sandglass_testkit::conformance::limits;
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, Gvisor, open, spec};

const DIR: &str = "SANDGLASS_TEST_DIR";
const INSTANCE: &str = "SANDGLASS_TEST_INSTANCE";
const POINT: &str = "SANDGLASS_TEST_POINT";

/// The name of the image.
const IMAGE: &str = "iiiiiiiiiiiiiiiiiiii";

/// The host that the test below starts and kills: the same program, told by its environment where to work.
fn be_the_host(dir: &Path) {
    let points: Failpoints = format!("{}=hang", std::env::var(POINT).unwrap()).parse().unwrap();
    assert!(points.arm());
    let subject = Gvisor { network: false, driver: Driver::Fastest };
    let engine = open(dir, &std::env::var(INSTANCE).unwrap().parse().unwrap(), subject);
    let spec = spec(limits(1, 256, 128, 100));
    engine.create(&spec).unwrap();
    engine.start(&spec.id).unwrap();
    engine.pause(&spec.id).unwrap();
    engine.checkpoint(&spec.id, &IMAGE.parse().unwrap(), Keep::Flushed).unwrap();
}

#[test]
fn a_host_killed_while_it_writes_an_image_leaves_no_half_of_one() {
    if let Some(dir) = std::env::var_os(DIR) {
        return be_the_host(Path::new(&dir));
    }
    let mut fixture = Fixture::new();
    let image: SandboxId = IMAGE.parse().unwrap();
    for point in NAMES.iter().filter(|name| name.starts_with("engine.image.")) {
        fixture.close();
        let said = fixture.path().join("said");
        let stderr: OwnedFd = std::fs::File::create(&said).unwrap().into();
        let launch = Launch::new(std::env::current_exe().unwrap())
            .and_then(|launch| {
                launch.args([
                    "--exact",
                    "image_crash::a_host_killed_while_it_writes_an_image_leaves_no_half_of_one",
                    "--nocapture",
                ])
            })
            .and_then(|launch| launch.env(DIR, fixture.path().to_str().unwrap()))
            .and_then(|launch| launch.env(INSTANCE, fixture.instance().as_str()))
            .and_then(|launch| launch.env(POINT, point))
            .and_then(|launch| launch.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))
            .and_then(|launch| launch.stderr(stderr))
            .unwrap();
        let host = spawn(&launch).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let reached = format!("failpoint {point} reached\n");
        while !std::fs::read_to_string(&said).unwrap().contains(&reached) {
            let ended = host.wait(Some(Instant::now())).unwrap();
            assert_eq!(ended, None, "{}", std::fs::read_to_string(&said).unwrap());
            assert!(Instant::now() < deadline, "never reached {point}");
            std::thread::yield_now();
        }
        host.pidfd().kill().unwrap();
        host.wait(Some(deadline)).unwrap().expect("it ends");

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
