//! How the threads that stand for sandboxes are stopped and let go on.

use std::os::fd::AsFd;

use sandglass_testkit::conformance::{Fixture, limits, spec};
use sandglass_types::Digest;

use crate::subjects::Scripted;

#[test]
fn a_pause_is_granted_wherever_in_a_turn_it_falls() {
    let fixture = Fixture::new(&Scripted);
    let spec = spec(Digest::from_bytes([0; 32]), limits(1, 128, 64, 16));
    fixture.engine().create(&spec).unwrap();
    fixture.engine().start(&spec.id).unwrap();
    let session = fixture.engine().attach(&spec.id).unwrap();
    // Each byte is a turn; what falls between two of them is met by chance, in a hundred or so.
    for _ in 0..5_000 {
        rustix::io::write(session.to_agent.as_fd(), b" ").unwrap();
        fixture.engine().pause(&spec.id).unwrap();
        fixture.engine().resume(&spec.id).unwrap();
    }
}
