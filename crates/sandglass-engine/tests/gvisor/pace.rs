//! An idle sandbox is slowed, with all its threads, and wakes up again.

use std::collections::BTreeSet;

use sandglass_engine::engine::{Engine as _, EngineError, Pace};
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, by_both};

/// The timer slacks of all threads of a sandbox, in microseconds.
fn slacks(fixture: &Fixture, id: &SandboxId) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    for pid in fixture.cgroups().leaf(id.as_str()).unwrap().processes().unwrap() {
        for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let thread = thread.unwrap().file_name().into_string().unwrap();
            // It may have ended just now.
            if let Ok(nanos) = std::fs::read_to_string(format!("/proc/{thread}/timerslack_ns")) {
                found.insert(nanos.trim().parse::<u64>().unwrap() / 1000);
            }
        }
    }
    found
}

#[test]
fn an_idle_sandbox_is_slowed_and_wakes_up() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let (spec, mut agent) = fixture.run();
        assert_eq!(slacks(&fixture, &spec.id), BTreeSet::from([50]));
        fixture.engine().pace(&spec.id, Pace::Idle).unwrap();
        assert_eq!(slacks(&fixture, &spec.id), BTreeSet::from([100_000]));
        // It works all the same, and what it starts takes after it.
        assert_eq!(agent.sh("busybox sleep 1000 & echo there"), "there\n<0>");
        assert_eq!(slacks(&fixture, &spec.id), BTreeSet::from([100_000]));
        fixture.engine().pace(&spec.id, Pace::Full).unwrap();
        assert_eq!(slacks(&fixture, &spec.id), BTreeSet::from([50]));
        let absent = fixture.engine().pace(&SandboxId::random(), Pace::Idle);
        assert!(matches!(absent, Err(EngineError::NotFound(_))), "{absent:?}");
    });
}
