//! Limits hold inside and spare the host.

use sandglass_engine::engine::{Engine as _, Exit, Presence};

use crate::fixture::{Fixture, limits, spec};

#[test]
fn a_full_disk_is_a_clean_error_inside() {
    let fixture = Fixture::new();
    let (spec, mut agent) = fixture.run();
    for target in ["/tmp/big", "/big"] {
        let said =
            agent.sh(&format!("busybox dd if=/dev/zero of={target} bs=1M count=1000; busybox rm {target}"));
        assert!(said.contains("No space left on device"), "{said}");
    }
    assert_eq!(agent.sh("echo ok > /tmp/small; busybox cat /tmp/small"), "ok\n<0>");
    let stats = fixture.engine().stats(&spec.id).unwrap();
    assert!(stats.disk_bytes <= 128 << 20, "{stats:?}");
    fixture.engine().destroy(&spec.id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn memory_file_systems_have_a_size() {
    let fixture = Fixture::new();
    let (_spec, mut agent) = fixture.run();
    for target in ["/dev/shm/big", "/run/big", "/dev/big"] {
        let said =
            agent.sh(&format!("busybox dd if=/dev/zero of={target} bs=1M count=1000; busybox rm {target}"));
        assert!(said.contains("No space left on device"), "{said}");
    }
}

#[test]
fn memory_beyond_the_limit_ends_the_sandbox_and_says_so() {
    let fixture = Fixture::new();
    let spec = spec(limits(1, 128, 64, 100));
    fixture.engine().create(&spec).unwrap();
    fixture.engine().start(&spec.id).unwrap();
    let mut agent = fixture.attach(&spec.id);
    let total = agent.sh("busybox grep MemTotal /proc/meminfo");
    assert_eq!(total.split_whitespace().nth(1), Some("131072"), "{total}");
    // The guest's root may mount what it likes, and ends its own sandbox with it.
    let mounted = agent.sh("busybox mkdir /big; busybox mount -t tmpfs -o size=1g big /big");
    assert_eq!(mounted, "<0>");
    agent.send("busybox dd if=/dev/zero of=/big/file bs=1M count=1000");
    assert_eq!(fixture.wait(&spec.id), Exit::OutOfMemory);
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
    fixture.engine().destroy(&spec.id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn too_many_processes_end_the_sandbox_and_say_so() {
    let fixture = Fixture::new();
    let spec = spec(limits(1, 512, 64, 16));
    fixture.engine().create(&spec).unwrap();
    fixture.engine().start(&spec.id).unwrap();
    let agent = fixture.attach(&spec.id);
    agent.send("while :; do busybox sleep 1000 & done");
    assert_eq!(fixture.wait(&spec.id), Exit::Processes);
    fixture.engine().destroy(&spec.id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn what_it_uses_is_counted() {
    let fixture = Fixture::new();
    let (spec, mut agent) = fixture.run();
    let before = fixture.engine().stats(&spec.id).unwrap();
    agent.sh("i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done");
    agent.sh("busybox dd if=/dev/zero of=/file bs=1M count=20; busybox sync");
    let after = fixture.engine().stats(&spec.id).unwrap();
    assert!(after.cpu_micros > before.cpu_micros, "{before:?} {after:?}");
    assert!(after.memory_bytes > 1 << 20 && after.memory_peak_bytes >= after.memory_bytes, "{after:?}");
    assert!(after.processes > 3, "{after:?}");
    assert!(after.disk_bytes > before.disk_bytes + (10 << 20), "{before:?} {after:?}");
}
