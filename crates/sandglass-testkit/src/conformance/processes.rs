//! All that a sandbox starts is its own, is counted, and ends with it.

use std::time::Instant;

use sandglass_engine::engine::{Exit, Presence};

use super::Fixture;
use super::agent::PATIENCE;

/// A command line that goes on for ever and is found in the list of processes by the instance that it names.
fn for_ever(fixture: &Fixture<'_>) -> String {
    format!("busybox sh -c 'while :; do busybox sleep 1000; done; : {}'", fixture.instance())
}

fn assert_no_process(fixture: &Fixture<'_>) {
    assert_eq!(fixture.processes(), []);
}

pub(super) fn a_killed_agent_is_the_end_of_the_sandbox(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run();
    agent.ask("kill -9 $$");
    assert_eq!(agent.answer(), None);
    assert_eq!(fixture.wait(&spec.id), Exit::Ended);
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
    assert_no_process(fixture);
}

pub(super) fn what_an_agent_leaves_ends_with_it(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run();
    let forever = for_ever(fixture);
    // One of its own, an orphan, and one in a session of its own.
    let said = agent.sh(&format!("{forever} & ({forever} &) ; (busybox setsid {forever} &)"));
    assert_eq!(said, "<0>");
    agent.ask("exit");
    assert_eq!(fixture.wait(&spec.id), Exit::Ended);
    assert_no_process(fixture);
    assert_eq!(agent.answer(), None);
}

pub(super) fn what_wants_to_stay_is_destroyed(fixture: &mut Fixture<'_>) {
    for pause in [false, true] {
        let (spec, mut agent) = fixture.run();
        let forever = for_ever(fixture).replace("while", "trap \"\" TERM HUP INT; while");
        // Deaf, without an environment, and alone.
        let said = agent.sh(&format!("(busybox setsid busybox env -i /bin/{forever} &)"));
        assert_eq!(said, "<0>");
        if pause {
            fixture.engine().pause(&spec.id).unwrap();
        }
        fixture.destroy(&spec.id);
        assert_no_process(fixture);
        fixture.assert_nothing_left();
    }
}

pub(super) fn what_it_uses_is_counted(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run();
    let before = fixture.engine().stats(&spec.id).unwrap();
    assert!(before.processes >= 1 && before.memory_bytes > 0, "{before:?}");
    agent.sh("for n in 1 2 3 4 5 6 7 8; do busybox sleep 1000 & done");
    // CPU time may be counted in hundredths of a second.
    let used = || fixture.engine().stats(&spec.id).unwrap().cpu_micros;
    let deadline = Instant::now() + PATIENCE;
    while used() <= before.cpu_micros {
        assert!(Instant::now() < deadline, "CPU time is not counted");
        agent.sh("i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done");
    }
    agent.sh("busybox dd if=/dev/zero of=file bs=1M count=20; busybox sync");
    let after = fixture.engine().stats(&spec.id).unwrap();
    assert!(after.memory_peak_bytes >= after.memory_bytes && after.memory_bytes > 1 << 20, "{after:?}");
    assert!(after.processes > before.processes, "{before:?} {after:?}");
    assert!(after.disk_bytes > before.disk_bytes + (10 << 20), "{before:?} {after:?}");
}
