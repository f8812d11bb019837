//! Prints how long the verbs take; asserts only what no loaded machine should miss.

use std::time::{Duration, Instant};

use sandglass_engine::engine::Engine as _;

use crate::fixture::{Fixture, limits, spec};

#[test]
fn verbs_take_milliseconds() {
    let fixture = Fixture::with_network();
    let mut times: [Vec<Duration>; 4] = std::array::from_fn(|_| Vec::new());
    // The first one formats a disk and warms caches.
    for round in 0..12 {
        let spec = spec(limits(2, 1024, 4096, 512));
        let mut at = Instant::now();
        let mut lap = |times: &mut Vec<Duration>| {
            if round > 0 {
                times.push(at.elapsed());
            }
            at = Instant::now();
        };
        fixture.engine().create(&spec).unwrap();
        lap(&mut times[0]);
        fixture.engine().start(&spec.id).unwrap();
        lap(&mut times[1]);
        let mut agent = fixture.attach(&spec.id);
        assert_eq!(agent.sh("echo ready"), "ready\n<0>");
        lap(&mut times[2]);
        fixture.engine().destroy(&spec.id).unwrap();
        lap(&mut times[3]);
    }
    for (verb, mut times) in ["create", "start", "first answer", "destroy"].into_iter().zip(times) {
        times.sort();
        eprintln!(
            "{verb:>12}: p50 {:?}, from {:?} to {:?}",
            times[times.len() / 2],
            times[0],
            times[times.len() - 1]
        );
        assert!(times[times.len() / 2] < Duration::from_secs(5), "{verb}: {times:?}");
    }
}
