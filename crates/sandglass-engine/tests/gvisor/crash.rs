//! A host that is killed at any moment leaves nothing that the next one can't find.

use std::path::Path;
use std::time::{Duration, Instant};

use sandglass_engine::engine::Engine as _;
use sandglass_engine::gvisor::Driver;
use sandglass_linux::process::{Launch, spawn};
use sandglass_testkit::conformance::limits;
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, Gvisor, by_both, open, spec};

const DIR: &str = "SANDGLASS_TEST_DIR";
const INSTANCE: &str = "SANDGLASS_TEST_INSTANCE";
const DRIVER: &str = "SANDGLASS_TEST_DRIVER";

/// The host that the test below starts and kills: the same program, told by its environment where to work.
fn be_the_host(dir: &Path) {
    let driver = if std::env::var_os(DRIVER).is_some() { Driver::CommandLine } else { Driver::Fastest };
    let engine =
        open(dir, &std::env::var(INSTANCE).unwrap().parse().unwrap(), Gvisor { network: true, driver });
    let spec = spec(limits(1, 256, 128, 100));
    engine.create(&spec).unwrap();
    engine.start(&spec.id).unwrap();
    engine.destroy(&spec.id).unwrap();
}

type Moment = (&'static str, fn(&View<'_>) -> bool);

/// What is seen from outside at a moment of the short life of a sandbox.
struct View<'a> {
    fixture: &'a Fixture,
    id: &'a SandboxId,
}

impl View<'_> {
    fn has(&self, file: &str) -> bool {
        self.fixture.sandbox_dir(self.id).join(file).exists()
    }

    fn processes(&self) -> usize {
        self.fixture.cgroups().leaf(self.id.as_str()).unwrap().processes().unwrap().len()
    }

    fn record_says(&self, progress: &str) -> bool {
        let record = self.fixture.sandbox_dir(self.id).join("state.json");
        std::fs::read_to_string(record)
            .is_ok_and(|text| text.contains(&format!("\"progress\":\"{progress}\"")))
    }

    fn runsc_says(&self, status: &str) -> bool {
        let state = self.fixture.path().join(format!("data/runsc/{0}_sandbox:{0}.state", self.id));
        std::fs::read_to_string(state).is_ok_and(|text| text.contains(&format!("\"status\":\"{status}\"")))
    }
}

#[test]
fn a_host_killed_at_any_moment_leaves_nothing_that_is_lost() {
    if let Some(dir) = std::env::var_os(DIR) {
        return be_the_host(Path::new(&dir));
    }
    by_both(kill_hosts);
}

fn kill_hosts(driver: Driver) {
    let moments: [Moment; 9] = [
        ("the folder exists", |view| view.has("")),
        ("the disk exists", |view| view.has("disk.img")),
        ("the files exist", |view| view.has("bundle/config.json")),
        ("runsc was started", |view| view.processes() > 0),
        ("runsc has children", |view| view.processes() > 1),
        ("the pid is known", |view| view.has("sandbox.pid")),
        ("it is created", |view| view.record_says("created") || view.runsc_says("created")),
        ("it runs", |view| view.record_says("running") || view.runsc_says("running")),
        ("it was seen and is gone", |view| !view.has("")),
    ];
    let mut fixture = Fixture::driven(true, driver);
    for (what, reached) in moments {
        fixture.close();
        let launch = Launch::new(std::env::current_exe().unwrap())
            .and_then(|launch| {
                launch.args([
                    "--exact",
                    "crash::a_host_killed_at_any_moment_leaves_nothing_that_is_lost",
                    "--nocapture",
                ])
            })
            .and_then(|launch| launch.env(DIR, fixture.path().to_str().unwrap()))
            .and_then(|launch| launch.env(INSTANCE, fixture.instance().as_str()))
            .and_then(|launch| match driver {
                Driver::Fastest => Ok(launch),
                Driver::CommandLine => launch.env(DRIVER, "command line"),
            })
            .and_then(|launch| launch.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))
            .unwrap();
        let mut host = spawn(&launch).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut seen = None;
        while !seen.as_ref().is_some_and(|id| reached(&View { fixture: &fixture, id })) {
            assert!(Instant::now() < deadline, "never saw that {what}");
            if let Some(status) = host.wait(Some(Instant::now())).unwrap() {
                // On a busy machine a moment can pass unseen.
                assert!(status.success(), "the host ended with {status}");
                host = spawn(&launch).unwrap();
                seen = None;
            }
            if seen.is_none() {
                let mut entries = std::fs::read_dir(fixture.path().join("data/sandboxes")).unwrap();
                seen =
                    entries.next().map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
            }
            std::thread::yield_now();
        }
        host.pidfd().kill().unwrap();
        host.wait(Some(deadline)).unwrap().expect("it ends");
        fixture.reopen();
        for (id, _) in fixture.engine().list().unwrap() {
            fixture.engine().destroy(&id).unwrap();
        }
        // Also not a moment later, when what the dead host had started would have come to life.
        assert_eq!(fixture.leftovers(), Vec::<String>::new(), "when {what}");
    }
}
