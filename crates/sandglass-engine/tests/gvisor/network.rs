//! The engine and the network together; what the network lets through is tested with the network.

use std::net::UdpSocket;
use std::time::Duration;

use sandglass_engine::engine::{AirlockSocket, Engine as _, Keep};
use sandglass_testkit::conformance::LineAgent;
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, by_both, spec};

fn reaches_the_airlock(fixture: &Fixture, id: &SandboxId, agent: &LineAgent) {
    let socket =
        UdpSocket::from(fixture.engine().airlock_sockets(id, &[AirlockSocket::DnsUdp]).unwrap().remove(0));
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    agent.send("busybox timeout 5 busybox nslookup example.com >/dev/null 2>&1 &");
    let mut query = [0; 512];
    let (len, from) = socket.recv_from(&mut query).unwrap();
    assert_eq!(from.ip().to_string(), "10.11.12.2");
    assert!(query[..len].windows(7).any(|name| name == b"example"), "{:?}", &query[..len]);
}

#[test]
fn a_slot_is_removed_even_when_the_folder_of_its_owner_is_lost() {
    let fixture = Fixture::with_network();
    let (spec, _agent) = fixture.run();
    std::fs::remove_dir_all(fixture.sandbox_dir(&spec.id)).unwrap();
    fixture.engine().destroy(&spec.id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn a_restored_copy_has_a_network_of_its_own() {
    by_both(|driver| {
        let fixture = Fixture::driven(true, driver);
        let (parent, agent) = fixture.run();
        reaches_the_airlock(&fixture, &parent.id, &agent);
        let image = SandboxId::random();
        fixture.engine().pause(&parent.id).unwrap();
        fixture.engine().checkpoint(&parent.id, &image, Keep::Flushed).unwrap();
        fixture.engine().resume(&parent.id).unwrap();
        let child = spec(parent.limits);
        fixture.engine().restore(&child, &image).unwrap();
        let other = fixture.attach(&child.id);
        reaches_the_airlock(&fixture, &child.id, &other);
        reaches_the_airlock(&fixture, &parent.id, &agent);
        fixture.engine().destroy(&parent.id).unwrap();
        reaches_the_airlock(&fixture, &child.id, &other);
        fixture.engine().destroy(&child.id).unwrap();
        fixture.assert_nothing_left();
    });
}
