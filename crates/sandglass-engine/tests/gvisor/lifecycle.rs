//! What is special about the life of a gVisor sandbox; the rest is in the conformance suite.

use std::time::Instant;

use sandglass_engine::engine::{Engine as _, Exit, Presence};
use sandglass_linux::process::PidFd;
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, by_both};

#[test]
fn what_is_inside_is_as_it_should_be_and_mounted_nowhere_else() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let (spec, mut agent) = fixture.run();
        assert_eq!(agent.sh("busybox hostname; echo $$"), format!("{}\n1\n<0>", spec.id));
        assert_eq!(agent.sh("busybox head -n 1 /etc/hosts"), "127.0.0.1\tlocalhost\n<0>");
        assert_eq!(agent.sh("busybox stat -c %a /tmp /usr /usr/bin/sudo"), "1777\n755\n755\n<0>");
        let total = agent.sh("busybox grep MemTotal /proc/meminfo");
        assert_eq!(total.split_whitespace().nth(1), Some("262144"), "{total}");
        // Mounts are nowhere but in the sandbox's own namespace.
        let mounts = sandglass_linux::mount::below(fixture.path()).unwrap();
        assert_eq!(mounts, Vec::new());
        assert!(fixture.leftovers().iter().any(|held| held.starts_with("loop")), "{:?}", fixture.leftovers());
        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
    });
}

#[test]
fn a_record_with_another_process_s_pid_harms_nobody() {
    let mut fixture = Fixture::new();
    let (spec, _agent) = fixture.run();
    let path = fixture.sandbox_dir(&spec.id).join("state.json");
    let mut record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    // This very test, with a start time that is not its own: as after a reuse of the pid.
    record["sandbox"]["pid"] = std::process::id().into();
    std::fs::write(&path, record.to_string()).unwrap();
    fixture.reopen();
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
    fixture.engine().destroy(&spec.id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn processes_that_nobody_remembers_are_found_by_their_group() {
    let fixture = Fixture::new();
    let id = SandboxId::random();
    let leaf = fixture.cgroups().leaf(id.as_str()).unwrap();
    leaf.make().unwrap();
    let sleeper = sandglass_linux::process::Launch::new("/usr/bin/sleep").unwrap().arg("1000").unwrap();
    let sleeper = sandglass_linux::process::spawn(&sleeper).unwrap();
    leaf.add(sleeper.pid()).unwrap();
    assert_eq!(fixture.presence(&id), Some(Presence::Remains));
    fixture.engine().destroy(&id).unwrap();
    assert!(sleeper.wait(Some(Instant::now())).unwrap().is_some());
    fixture.assert_nothing_left();
}

#[test]
fn one_that_was_killed_before_its_start_has_ended() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let spec = fixture.create();
        for pid in fixture.cgroups().leaf(spec.id.as_str()).unwrap().processes().unwrap() {
            if let Some(fd) = PidFd::open(pid).unwrap() {
                fd.kill().unwrap();
            }
        }
        assert_eq!(fixture.wait(&spec.id), Exit::Ended);
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
    });
}

#[test]
fn mounts_end_with_the_agent_and_the_disk_can_still_be_read() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let (spec, agent) = fixture.run();
        agent.send("exit 7");
        assert_eq!(fixture.wait(&spec.id), Exit::Ended);
        assert!(
            !fixture.leftovers().iter().any(|held| held.starts_with("mount")),
            "{:?}",
            fixture.leftovers()
        );
        assert!(fixture.sandbox_dir(&spec.id).join("disk.img").exists());
        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
    });
}
