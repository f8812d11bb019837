//! Limits hold inside and spare the machine.

use std::time::{Duration, Instant};

use sandglass_engine::engine::{Exit, Presence};

use super::{Fixture, limits};

/// How long the use of the CPU is watched.
const WINDOW: Duration = Duration::from_millis(600);

pub(super) fn it_gets_no_more_cores_than_it_was_given(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run();
    let cores = std::thread::available_parallelism().unwrap().get();
    assert!(cores > 1, "one core can't show what more would do");
    agent.sh("for n in 1 2 3 4; do while :; do :; done & done");
    let used = || Duration::from_micros(fixture.engine().stats(&spec.id).unwrap().cpu_micros);
    let (before, began) = (used(), Instant::now());
    std::thread::sleep(WINDOW);
    let (used, elapsed) = (used() - before, began.elapsed());
    // A busy machine can only give it less. The kernel may be late by some of the periods that the quota is given for.
    assert!(used < elapsed.mul_f64(1.2), "{used:?} in {elapsed:?}, and one core was its limit");
    assert!(used > elapsed / 20, "{used:?} in {elapsed:?}: it does not work");
}

pub(super) fn memory_beyond_the_limit_ends_the_sandbox_and_says_so(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run_with(limits(1, 128, 64, 100));
    assert_eq!(agent.sh("busybox dd if=/dev/zero of=/dev/null bs=50M count=1 2>/dev/null"), "<0>");
    // A kernel of its own lets it have what the machine then has not.
    agent.ask("busybox dd if=/dev/zero of=/dev/null bs=300M count=1 2>/dev/null");
    assert_eq!(agent.answer(), None, "it got more memory than its limit");
    assert_eq!(fixture.wait(&spec.id), Exit::OutOfMemory);
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
    fixture.destroy(&spec.id);
}

pub(super) fn a_full_disk_is_a_clean_error_inside(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run_with(limits(1, 256, 64, 100));
    let said = agent.sh("busybox dd if=/dev/zero of=big bs=1M count=100; busybox rm big");
    assert!(said.contains("No space left on device"), "{said}");
    assert_eq!(agent.sh("echo ok > small; busybox cat small"), "ok\n<0>");
    let stats = fixture.engine().stats(&spec.id).unwrap();
    assert!(stats.disk_bytes <= 64 << 20, "{stats:?}");
}

pub(super) fn too_many_processes_end_the_sandbox_and_say_so(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run_with(limits(1, 512, 64, 16));
    // The engine has some of its own, so it is a multiple of what was promised that is too many.
    agent.ask("i=0; while [ $i -lt 320 ]; do busybox sleep 1000 & i=$((i+1)); done 2>/dev/null");
    assert_eq!(agent.answer(), None, "it got far more processes than its limit");
    assert_eq!(fixture.wait(&spec.id), Exit::Processes);
    fixture.destroy(&spec.id);
}
