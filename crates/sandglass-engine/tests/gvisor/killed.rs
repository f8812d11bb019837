//! A host that hangs at a failpoint and is killed there: the program of these tests, started once more with the one test
//! that is told to be it.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use sandglass_engine::gvisor::{Driver, GvisorEngine};
use sandglass_failpoint::Failpoints;
use sandglass_linux::process::{Launch, spawn};

use crate::fixture::{Fixture, Gvisor, open};

const DIR: &str = "SANDGLASS_TEST_DIR";
const INSTANCE: &str = "SANDGLASS_TEST_INSTANCE";
const POINT: &str = "SANDGLASS_TEST_POINT";

/// The point that this process is to reach, and its engine, if it is the host that [`killed_at`] started.
pub(crate) fn host() -> Option<(String, GvisorEngine)> {
    let dir = std::env::var_os(DIR)?;
    let point = std::env::var(POINT).unwrap();
    let subject = Gvisor { network: false, driver: Driver::Fastest };
    let engine = open(Path::new(&dir), &std::env::var(INSTANCE).unwrap().parse().unwrap(), subject);
    assert!(format!("{point}=hang").parse::<Failpoints>().unwrap().arm());
    Some((point, engine))
}

/// Closes the engine of the fixture, starts the host that `test` is, and kills it once it has reached the point.
pub(crate) fn killed_at(test: &str, point: &str, fixture: &mut Fixture) {
    fixture.close();
    let said = fixture.path().join("said");
    let stderr: OwnedFd = std::fs::File::create(&said).unwrap().into();
    let launch = Launch::new(std::env::current_exe().unwrap())
        .and_then(|launch| launch.args(["--exact", test, "--nocapture"]))
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
}
