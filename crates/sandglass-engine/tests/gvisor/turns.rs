//! Who goes first when sandboxes want more of the processors than there is.

use std::time::{Duration, Instant};

use sandglass_engine::engine::{Engine as _, EngineError};
use sandglass_types::SandboxId;

use crate::fixture::Fixture;

/// Whether the kernel gives a sandbox what no other one wants, and nothing else.
fn is_last(fixture: &Fixture, id: &SandboxId) -> bool {
    let leaf = fixture.cgroups().leaf(id.as_str()).unwrap();
    let mut found = leaf.folders().filter_map(|folder| {
        let read = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
        match (read("cpu.idle"), read("cpu.shares"), read("cpu.weight")) {
            (Some(idle), ..) => Some(idle.trim() == "1"),
            // Kernels before 5.15.
            (None, Some(shares), _) => Some(shares.trim() == "2"),
            (None, None, weight) => weight.map(|weight| weight.trim() == "1"),
        }
    });
    found.next().unwrap()
}

fn until_last(fixture: &Fixture, id: &SandboxId) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_last(fixture, id) {
        assert!(Instant::now() < deadline, "it goes first for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_sandbox_goes_first_for_a_moment_when_somebody_asks_something_of_it() {
    let mut fixture = Fixture::new();
    let (spec, mut agent) = fixture.run();
    until_last(&fixture, &spec.id);
    assert_eq!(agent.sh("echo works"), "works\n<0>");
    // It is for less than a second, in which a busy machine may not get to look.
    let mut favours = std::iter::repeat_with(|| {
        fixture.engine().favour(&spec.id).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        !is_last(&fixture, &spec.id)
    });
    assert!(favours.by_ref().take(1_000).any(|first| first));
    until_last(&fixture, &spec.id);
    let absent = fixture.engine().favour(&SandboxId::random());
    assert!(matches!(absent, Err(EngineError::NotFound(_))), "{absent:?}");

    // What a host that died has left is not for ever.
    let leaf = fixture.cgroups().leaf(spec.id.as_str()).unwrap();
    leaf.take_turn(sandglass_linux::cgroup::Turn::First).unwrap();
    fixture.reopen();
    assert!(is_last(&fixture, &spec.id));
}
