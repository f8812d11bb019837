//! Prints how long the verbs take; asserts only what no loaded machine should miss.

use std::time::{Duration, Instant};

use sandglass_engine::engine::{Engine as _, Keep};
use sandglass_engine::gvisor::Driver;
use sandglass_testkit::conformance::limits;
use sandglass_types::SandboxId;

use crate::fixture::{Fixture, spec};

const VERBS: [&str; 6] = ["create", "start", "first answer", "pause", "resume", "destroy"];

#[test]
fn verbs_take_milliseconds() {
    let drivers = [Driver::Fastest, Driver::CommandLine];
    let fixtures = drivers.map(|driver| Fixture::driven(true, driver));
    let mut times: [[Vec<Duration>; VERBS.len()]; 2] = Default::default();
    // The first one formats a disk and warms caches. In turns, so that both see the same machine.
    for round in 0..12 {
        for (fixture, times) in fixtures.iter().zip(&mut times) {
            let life = one_life(fixture);
            if round > 0 {
                times.iter_mut().zip(life).for_each(|(times, time)| times.push(time));
            }
        }
    }
    for (driver, times) in drivers.into_iter().zip(times) {
        eprintln!("{driver:?}");
        for (verb, mut times) in VERBS.into_iter().zip(times) {
            times.sort();
            let (median, least, most) = (times[times.len() / 2], times[0], times[times.len() - 1]);
            eprintln!("{verb:>12}: p50 {median:?}, from {least:?} to {most:?}");
            assert!(median < Duration::from_secs(5), "{verb}: {times:?}");
        }
    }
}

const RESTORES: [&str; 3] = ["control socket", "command line", "prepared"];

#[test]
fn restores_take_milliseconds() {
    let drivers = [Driver::Fastest, Driver::CommandLine];
    let sources = drivers.map(|driver| {
        let fixture = Fixture::driven(true, driver);
        let (parent, image) = (spec(limits(2, 1024, 4096, 512)), SandboxId::random());
        let engine = fixture.engine();
        engine.create(&parent).unwrap();
        engine.start(&parent.id).unwrap();
        assert_eq!(fixture.attach(&parent.id).sh("echo ready"), "ready\n<0>");
        engine.pause(&parent.id).unwrap();
        engine.checkpoint(&parent.id, &image, Keep::Flushed).unwrap();
        engine.destroy(&parent.id).unwrap();
        (fixture, image)
    });
    let mut times: [Vec<Duration>; RESTORES.len()] = Default::default();
    for round in 0..12 {
        for (way, times) in times.iter_mut().enumerate() {
            let (fixture, image) = &sources[way % 2];
            let (engine, child) = (fixture.engine(), spec(limits(2, 1024, 4096, 512)));
            if way == 2 {
                engine.prepare_restore(&child, image).unwrap();
            }
            let started = Instant::now();
            engine.restore(&child, image).unwrap();
            let took = started.elapsed();
            assert_eq!(fixture.attach(&child.id).sh("echo ready"), "ready\n<0>");
            engine.destroy(&child.id).unwrap();
            if round > 0 {
                times.push(took);
            }
        }
    }
    for (way, mut times) in RESTORES.into_iter().zip(times) {
        times.sort();
        let (median, least, most) = (times[times.len() / 2], times[0], times[times.len() - 1]);
        eprintln!("{way:>15}: p50 {median:?}, from {least:?} to {most:?}");
        assert!(median < Duration::from_secs(5), "{way}: {times:?}");
    }
}

fn one_life(fixture: &Fixture) -> [Duration; VERBS.len()] {
    let (engine, spec) = (fixture.engine(), spec(limits(2, 1024, 4096, 512)));
    let mut at = Instant::now();
    let mut lap = || {
        let taken = at.elapsed();
        at = Instant::now();
        taken
    };
    engine.create(&spec).unwrap();
    let created = lap();
    engine.start(&spec.id).unwrap();
    let started = lap();
    assert_eq!(fixture.attach(&spec.id).sh("echo ready"), "ready\n<0>");
    let answered = lap();
    engine.pause(&spec.id).unwrap();
    let paused = lap();
    engine.resume(&spec.id).unwrap();
    let resumed = lap();
    engine.destroy(&spec.id).unwrap();
    [created, started, answered, paused, resumed, lap()]
}
