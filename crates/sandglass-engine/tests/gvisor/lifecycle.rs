//! From nothing to nothing again, by every way.

use std::time::{Duration, Instant};

use sandglass_engine::engine::{Engine as _, EngineError, Exit, Presence};
use sandglass_linux::process::PidFd;
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, by_both, limits, spec};

#[test]
fn a_sandbox_runs_its_agent_and_leaves_nothing() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let spec = fixture.create();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Created));
        fixture.engine().start(&spec.id).unwrap();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Running));
        let mut agent = fixture.attach(&spec.id);
        assert_eq!(agent.sh("echo hello"), "hello\n<0>");
        assert_eq!(agent.sh("busybox hostname"), format!("{}\n<0>", spec.id));
        assert_eq!(agent.sh("busybox cat /etc/template; echo $$"), "of the template\n1\n<0>");
        assert_eq!(agent.sh("busybox head -n 1 /etc/hosts"), "127.0.0.1\tlocalhost\n<0>");
        assert_eq!(agent.sh("busybox stat -c %a /tmp /usr /usr/bin/sudo"), "1777\n755\n755\n<0>");
        // Mounts are nowhere but in the sandbox's own namespace.
        let mounts = sandglass_linux::mount::below(fixture.path()).unwrap();
        assert_eq!(mounts, Vec::new());
        assert!(fixture.leftovers().iter().any(|held| held.starts_with("loop")), "{:?}", fixture.leftovers());

        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
        fixture.engine().destroy(&spec.id).unwrap();
        assert!(matches!(fixture.engine().start(&spec.id), Err(EngineError::NotFound(_))));
        assert!(matches!(fixture.engine().attach(&spec.id), Err(EngineError::NotFound(_))));
        assert!(matches!(fixture.engine().stats(&spec.id), Err(EngineError::NotFound(_))));
        assert!(matches!(fixture.engine().wait(&spec.id), Err(EngineError::NotFound(_))));
    });
}

#[test]
fn verbs_are_refused_in_states_where_they_make_no_sense() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let spec = fixture.create();
        let engine = fixture.engine();
        assert!(matches!(engine.create(&spec), Err(EngineError::Exists(_))));
        for (verb, result) in [("pause", engine.pause(&spec.id)), ("resume", engine.resume(&spec.id))] {
            let Err(EngineError::WrongState { state, verb: refused, .. }) = result else { panic!("{verb}") };
            assert_eq!((state, refused), ("created", verb));
        }
        engine.start(&spec.id).unwrap();
        assert!(matches!(engine.start(&spec.id), Err(EngineError::WrongState { state: "running", .. })));
        let image = SandboxId::random();
        assert!(matches!(engine.checkpoint(&spec.id, &image), Err(EngineError::WrongState { .. })));
    });
}

#[test]
fn a_pause_stops_it_and_a_resume_lets_it_run_on() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let (spec, mut agent) = fixture.run();
        let engine = fixture.engine();
        engine.pause(&spec.id).unwrap();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Paused));
        assert!(matches!(engine.pause(&spec.id), Err(EngineError::WrongState { state: "paused", .. })));
        engine.resume(&spec.id).unwrap();
        assert_eq!(agent.sh("echo on"), "on\n<0>");
    });
}

#[test]
fn a_template_that_is_absent_fails_and_leaves_nothing() {
    let fixture = Fixture::new();
    let mut spec = spec(limits(1, 256, 128, 100));
    spec.rootfs = sandglass_types::Digest::from_bytes([9; 32]);
    let Err(EngineError::Step { step, .. }) = fixture.engine().create(&spec) else { panic!() };
    assert_eq!(step, "find the root file system");
    fixture.assert_nothing_left();
}

#[test]
fn a_sandbox_outlives_its_host_and_is_found_again() {
    by_both(|driver| {
        let mut fixture = Fixture::driven(false, driver);
        let (spec, mut agent) = fixture.run();
        assert_eq!(agent.sh("x=kept"), "<0>");
        drop(agent);
        fixture.reopen();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Running));
        assert_eq!(fixture.attach(&spec.id).sh("echo $x"), "kept\n<0>");
        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
    });
}

#[test]
fn a_damaged_record_costs_the_sandbox_but_leaves_nothing() {
    for garbage in ["", "{\"version\":1}", "\0\0\0\0"] {
        let mut fixture = Fixture::new();
        let (spec, _agent) = fixture.run();
        std::fs::write(fixture.sandbox_dir(&spec.id).join("state.json"), garbage).unwrap();
        fixture.reopen();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
        assert!(matches!(fixture.engine().pause(&spec.id), Err(EngineError::NotFound(_))));
        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
    }
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
fn half_made_sandboxes_of_every_kind_are_removed() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        // Only a folder.
        let id = SandboxId::random();
        std::fs::create_dir(fixture.sandbox_dir(&id)).unwrap();
        assert_eq!(fixture.presence(&id), Some(Presence::Remains));
        fixture.engine().destroy(&id).unwrap();
        fixture.assert_nothing_left();
        // Only a control group, with a process in it that nobody remembers.
        let leaf = fixture.cgroups().leaf(id.as_str()).unwrap();
        leaf.make().unwrap();
        let sleeper = sandglass_linux::process::Launch::new("/usr/bin/sleep").unwrap().arg("1000").unwrap();
        let sleeper = sandglass_linux::process::spawn(&sleeper).unwrap();
        leaf.add(sleeper.pid()).unwrap();
        assert_eq!(fixture.presence(&id), Some(Presence::Remains));
        fixture.engine().destroy(&id).unwrap();
        assert!(sleeper.wait(Some(Instant::now())).unwrap().is_some());
        fixture.assert_nothing_left();
        // Made, but its folder vanished.
        let (spec, _agent) = fixture.run();
        std::fs::remove_dir_all(fixture.sandbox_dir(&spec.id)).unwrap();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
        // Killed by somebody else.
        let spec = fixture.create();
        for pid in fixture.cgroups().leaf(spec.id.as_str()).unwrap().processes().unwrap() {
            if let Some(fd) = PidFd::open(pid).unwrap() {
                fd.kill().unwrap();
            }
        }
        assert_eq!(fixture.wait(&spec.id), Exit::Ended);
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
        assert!(matches!(
            fixture.engine().attach(&spec.id),
            Err(EngineError::WrongState { state: "ended", .. })
        ));
        fixture.engine().destroy(&spec.id).unwrap();
        fixture.assert_nothing_left();
    });
}

#[test]
fn the_end_of_the_agent_is_the_end_of_the_sandbox() {
    by_both(|driver| {
        let fixture = Fixture::driven(false, driver);
        let (spec, agent) = fixture.run();
        agent.send("exit 7");
        assert_eq!(fixture.wait(&spec.id), Exit::Ended);
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
        // What it had mounted went with it, and its disk can still be read.
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

#[test]
fn many_at_once_do_not_touch_each_other() {
    let fixture = Fixture::new();
    let began = Instant::now();
    std::thread::scope(|scope| {
        for n in 0..10 {
            let fixture = &fixture;
            scope.spawn(move || {
                let (spec, mut agent) = fixture.run();
                assert_eq!(agent.sh(&format!("echo {n} > /tmp/n; busybox cat /tmp/n")), format!("{n}\n<0>"));
                assert_eq!(agent.sh("echo /tmp/*"), "/tmp/n\n<0>");
                fixture.engine().destroy(&spec.id).unwrap();
            });
        }
    });
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    fixture.assert_nothing_left();
}

#[test]
fn two_instances_on_one_machine_see_only_their_own() {
    let (one, two) = (Fixture::new(), Fixture::new());
    let (spec, mut agent) = one.run();
    assert_eq!(two.presence(&spec.id), None);
    two.engine().destroy(&spec.id).unwrap();
    assert_eq!(agent.sh("echo alive"), "alive\n<0>");
}
