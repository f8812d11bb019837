//! An idle sandbox is slowed, with all its threads, and wakes up again.

use std::collections::BTreeSet;
use std::time::Duration;

use sandglass_engine::deadline::{self, Deadline};
use sandglass_engine::engine::{Engine as _, EngineError, Pace, SandboxSpec, UNUSED};
use sandglass_testkit::conformance::{LineAgent, limits};
use sandglass_types::{Clock as _, SandboxId, SystemClock};

use crate::fixture::{Fixture, by_both, spec};

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

#[test]
fn one_that_nobody_has_stands_still_until_it_is_handed_out() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let engine = fixture.engine();
        let spec = SandboxSpec { unused: true, ..spec(limits(1, 256, 128, 100)) };
        engine.create(&spec).unwrap();
        engine.start(&spec.id).unwrap();
        let mut maker = fixture.attach(&spec.id);
        assert_eq!(maker.sh("counted=1; echo there"), "there\n<0>");
        engine.pace(&spec.id, Pace::Still).unwrap();
        drop(maker);
        // A thread that is on a processor has a moment until it stops.
        let pause = || std::thread::sleep(Duration::from_millis(300));
        pause();
        let used = || engine.stats(&spec.id).unwrap().cpu_micros;
        let before = used();
        // Nobody hears this before it has a user.
        fixture.attach(&spec.id).send("counted=$((counted + 1))");
        pause();
        assert_eq!(used(), before);
        let ends = || {
            let at = SystemClock.now().plus(Duration::from_secs(3600));
            engine.hand_out(&spec.id, Some(Deadline { at, after_millis: 3_600_000 }))
        };
        let mut user = LineAgent::new(ends().unwrap());
        assert_eq!(user.sh("echo $counted"), "2\n<0>");
        assert!(!fixture.sandbox_dir(&spec.id).join(UNUSED).exists());
        let kept = deadline::all(&fixture.path().join("data/sandboxes")).unwrap();
        assert!(kept.iter().map(|(id, _)| id).eq([&spec.id]));
        drop(user);
        // Whose it is already goes on as it does.
        assert_eq!(LineAgent::new(ends().unwrap()).sh("echo $counted"), "2\n<0>");
        let absent = engine.hand_out(&SandboxId::random(), None);
        assert!(matches!(absent, Err(EngineError::NotFound(_))), "{absent:?}");
    });
}
