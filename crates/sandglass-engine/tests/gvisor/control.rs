//! Sandboxes that are driven over the control socket: what a host that died left, and a change of the driver.

use std::io::Write as _;
use std::os::unix::net::UnixStream;

use sandglass_engine::engine::{Engine as _, EngineError, Keep, Presence};
use sandglass_engine::gvisor::Driver;
use sandglass_types::SandboxId;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::fixture::{Fixture, by_both, spec};

/// Does what a host had done when it died.
fn call(fixture: &Fixture, id: &SandboxId, method: &str, argument: &Value) {
    let mut stream = UnixStream::connect(fixture.path().join(format!("data/runsc/runsc-{id}.sock"))).unwrap();
    stream.write_all(json!({"method": method, "arg": argument}).to_string().as_bytes()).unwrap();
    let answer = Value::deserialize(&mut serde_json::Deserializer::from_reader(&stream)).unwrap();
    assert_eq!(answer["success"], true, "{answer}");
}

fn state_file(fixture: &Fixture, id: &SandboxId) -> Value {
    let path = fixture.path().join(format!("data/runsc/{id}_sandbox:{id}.state"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn this_runsc_is_driven_over_its_control_socket_unless_told_otherwise() {
    for (driver, status) in [(Driver::Fastest, "created"), (Driver::CommandLine, "running")] {
        let fixture = Fixture::driven(false, driver);
        let (spec, _agent) = fixture.run();
        assert_eq!(state_file(&fixture, &spec.id)["status"], status);
    }
}

#[test]
fn a_start_that_was_begun_and_not_ended_can_be_destroyed() {
    let mut fixture = Fixture::with_network();
    let spec = fixture.create();
    let loopback = json!({
        "LoopbackLinks": [{"Name": "lo", "Addresses": [{"Address": "127.0.0.1", "PrefixLen": 8}], "Routes": []}],
    });
    call(&fixture, &spec.id, "Network.CreateLinksAndRoutes", &loopback);
    fixture.reopen();
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Created));
    // Not with half a network.
    let Err(EngineError::Step { step, source }) = fixture.engine().start(&spec.id) else { panic!() };
    assert_eq!(step, "start the guest's network");
    assert!(source.to_string().contains("duplicate"), "{source}");
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Created));
    fixture.engine().destroy(&spec.id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn a_guest_runs_also_when_nobody_could_write_that_down() {
    let mut fixture = Fixture::new();
    let spec = fixture.create();
    call(&fixture, &spec.id, "containerManager.StartRoot", &json!(spec.id));
    fixture.reopen();
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Running));
    let refused = fixture.engine().start(&spec.id);
    assert!(matches!(refused, Err(EngineError::WrongState { state: "running", .. })));
    assert_eq!(fixture.attach(&spec.id).sh("echo alive"), "alive\n<0>");
    fixture.engine().pause(&spec.id).unwrap();
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Paused));
    fixture.engine().destroy(&spec.id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn a_guest_that_is_paused_and_not_known_to_be_is_never_resumed_too_often() {
    let mut fixture = Fixture::new();
    let (spec, _agent) = fixture.run();
    call(&fixture, &spec.id, "containerManager.Pause", &Value::Null);
    fixture.reopen();
    fixture.engine().pause(&spec.id).unwrap();
    fixture.engine().resume(&spec.id).unwrap();
    // It is still paused, so it is silent, but nothing of it broke.
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Running));
    call(&fixture, &spec.id, "containerManager.Resume", &Value::Null);
    assert_eq!(fixture.attach(&spec.id).sh("echo alive"), "alive\n<0>");
}

#[test]
fn a_pause_that_cannot_be_written_down_is_undone() {
    let fixture = Fixture::new();
    let (spec, mut agent) = fixture.run();
    // Where the next version of the record is written first.
    let obstacle = fixture.sandbox_dir(&spec.id).join("state.json.next");
    std::fs::create_dir(&obstacle).unwrap();
    assert!(fixture.engine().pause(&spec.id).is_err());
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Running));
    assert_eq!(agent.sh("echo alive"), "alive\n<0>");
    std::fs::remove_dir(&obstacle).unwrap();
    fixture.engine().pause(&spec.id).unwrap();
    fixture.engine().resume(&spec.id).unwrap();
    assert_eq!(agent.sh("echo on"), "on\n<0>");
}

#[test]
fn a_sandbox_is_driven_as_it_was_made_whatever_the_next_host_prefers() {
    by_both(|driver| {
        let other = if driver == Driver::Fastest { Driver::CommandLine } else { Driver::Fastest };
        let mut fixture = Fixture::driven(true, driver);
        let (started, agent) = fixture.run();
        let (paused, _) = fixture.run();
        let created = fixture.create();
        drop(agent);
        fixture.engine().pause(&paused.id).unwrap();
        fixture.drive(other);
        assert_eq!(fixture.presence(&created.id), Some(Presence::Created));
        assert_eq!(fixture.presence(&started.id), Some(Presence::Running));
        assert_eq!(fixture.presence(&paused.id), Some(Presence::Paused));
        fixture.engine().start(&created.id).unwrap();
        fixture.engine().pause(&started.id).unwrap();
        fixture.engine().resume(&paused.id).unwrap();
        let image = SandboxId::random();
        assert_eq!(fixture.attach(&created.id).sh("x=kept"), "<0>");
        fixture.engine().pause(&created.id).unwrap();
        fixture.engine().checkpoint(&created.id, &image, Keep::Flushed).unwrap();
        // An image is the same whoever wrote it, and a copy is driven as its own host prefers.
        let copy = spec(created.limits);
        fixture.engine().restore(&copy, &image).unwrap();
        assert_eq!(fixture.attach(&copy.id).sh("echo $x"), "kept\n<0>");
        fixture.engine().pause(&copy.id).unwrap();
        fixture.engine().resume(&copy.id).unwrap();
        assert_eq!(fixture.attach(&copy.id).sh("echo $x"), "kept\n<0>");
        for id in [created.id, started.id, paused.id, copy.id] {
            fixture.engine().destroy(&id).unwrap();
        }
        fixture.assert_nothing_left();
    });
}
