//! From nothing to nothing again, by every way.

use std::time::Duration;

use sandglass_engine::deadline::{self, Deadline, Moment};
use sandglass_engine::engine::{Engine, EngineError, Exit, Feature, Keep, Presence, SandboxSpec};
use sandglass_types::SandboxId;

use super::Fixture;

const STATES: [Presence; 4] = [Presence::Created, Presence::Running, Presence::Paused, Presence::Remains];

/// How long a paused agent is watched for signs of life.
const SILENCE: Duration = Duration::from_millis(100);

pub(super) fn a_sandbox_runs_its_agent_and_leaves_nothing(fixture: &mut Fixture<'_>) {
    let engine = fixture.engine();
    let spec = fixture.create();
    let id = &spec.id;
    assert_eq!(fixture.presence(id), Some(Presence::Created));
    engine.start(id).unwrap();
    assert_eq!(fixture.presence(id), Some(Presence::Running));
    let mut agent = fixture.attach(id);
    assert_eq!(agent.sh("echo hello"), "hello\n<0>");
    assert_ne!(fixture.leftovers(), Vec::<String>::new(), "what runs is not seen");
    // Another session takes up where the first was.
    drop(agent);
    assert_eq!(fixture.attach(id).sh("echo again"), "again\n<0>");

    fixture.destroy(id);
    fixture.assert_nothing_left();
    engine.destroy(id).unwrap();
    for result in [engine.start(id), engine.pause(id), engine.resume(id)] {
        assert!(matches!(result, Err(EngineError::NotFound(_))), "{result:?}");
    }
    assert!(matches!(engine.attach(id), Err(EngineError::NotFound(_))));
    assert!(matches!(engine.wait(id), Err(EngineError::NotFound(_))));
}

type Verb = fn(&dyn Engine, &SandboxId) -> Result<(), EngineError>;

pub(super) fn verbs_are_refused_in_states_where_they_make_no_sense(fixture: &mut Fixture<'_>) {
    let engine = fixture.engine();
    let verbs: [(&str, Verb); 4] = [
        ("start", |engine, id| engine.start(id)),
        ("pause", |engine, id| engine.pause(id)),
        ("resume", |engine, id| engine.resume(id)),
        ("checkpoint", |engine, id| engine.checkpoint(id, &SandboxId::random(), Keep::Flushed).map(drop)),
    ];
    let legal: [&[&str]; 4] = [&["start"], &["pause"], &["resume", "checkpoint"], &[]];
    for ((presence, called), legal) in
        STATES.into_iter().zip(["created", "running", "paused", "ended"]).zip(legal)
    {
        let spec = fixture.brought_to(presence);
        for (verb, call) in verbs.iter().filter(|(verb, _)| !legal.contains(verb)) {
            let result = call(engine, &spec.id);
            if *verb == "checkpoint" && engine.info().refuses(Feature::Checkpoint) {
                assert!(matches!(result, Err(EngineError::Unsupported { .. })), "{result:?}");
                continue;
            }
            let Err(EngineError::WrongState { id, state, verb: refused }) = result else {
                panic!("{verb} of one that is {called}: {result:?}")
            };
            assert_eq!((&id, state, refused), (&spec.id, called, *verb));
        }
        assert!(matches!(engine.create(&spec), Err(EngineError::Exists(_))), "{called}");
        assert_eq!(fixture.presence(&spec.id), Some(presence), "a refused verb changed something");
        fixture.destroy(&spec.id);
    }
}

pub(super) fn a_pause_stops_it_and_a_resume_lets_it_run_on(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run();
    assert_eq!(agent.sh("x=kept"), "<0>");
    for _ in 0..2 {
        fixture.engine().pause(&spec.id).unwrap();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Paused));
        agent.ask("echo $x");
        assert!(!agent.says_something(SILENCE), "it answers while it is paused");
        fixture.engine().resume(&spec.id).unwrap();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Running));
        assert_eq!(agent.answer().as_deref(), Some("kept\n<0>"));
    }
}

pub(super) fn it_is_destroyed_from_every_state(fixture: &mut Fixture<'_>) {
    for presence in STATES {
        let spec = fixture.brought_to(presence);
        fixture.destroy(&spec.id);
        fixture.assert_nothing_left();
        fixture.engine().destroy(&spec.id).unwrap();
    }
}

pub(super) fn whoever_waits_for_its_end_learns_of_it(fixture: &mut Fixture<'_>) {
    let engine = fixture.engine();
    for presence in STATES {
        let spec = fixture.brought_to(presence);
        std::thread::scope(|scope| {
            let waiters = [(); 2].map(|()| scope.spawn(|| engine.wait(&spec.id)));
            engine.destroy(&spec.id).unwrap();
            for waiter in waiters {
                let learnt = waiter.join().unwrap();
                // It may have asked when there was nothing any more.
                assert!(matches!(learnt, Ok(Exit::Ended) | Err(EngineError::NotFound(_))), "{learnt:?}");
            }
        });
    }
}

pub(super) fn the_end_of_the_agent_is_the_end_of_the_sandbox(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = fixture.run();
    agent.ask("exit 7");
    assert_eq!(agent.answer(), None);
    assert_eq!(fixture.wait(&spec.id), Exit::Ended);
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
    let attached = fixture.engine().attach(&spec.id);
    assert!(matches!(attached, Err(EngineError::WrongState { state: "ended", .. })), "{attached:?}");
    fixture.destroy(&spec.id);
}

pub(super) fn a_sandbox_outlives_its_host_and_is_found_again(fixture: &mut Fixture<'_>) {
    let created = fixture.create();
    let (running, mut agent) = fixture.run();
    assert_eq!(agent.sh("x=kept"), "<0>");
    let (paused, mut other) = fixture.run();
    assert_eq!(other.sh("x=also"), "<0>");
    fixture.engine().pause(&paused.id).unwrap();
    let ended = fixture.brought_to(Presence::Remains);
    drop((agent, other));
    fixture.reopen();
    for (spec, presence) in [&created, &running, &paused, &ended].into_iter().zip(STATES) {
        assert_eq!(fixture.presence(&spec.id), Some(presence));
    }
    assert_eq!(fixture.attach(&running.id).sh("echo $x"), "kept\n<0>");
    fixture.engine().resume(&paused.id).unwrap();
    assert_eq!(fixture.attach(&paused.id).sh("echo $x"), "also\n<0>");
    fixture.engine().start(&created.id).unwrap();
    assert_eq!(fixture.attach(&created.id).sh("echo new"), "new\n<0>");
    // The end of one that another host started is seen as well.
    fixture.attach(&running.id).send("exit");
    assert_eq!(fixture.wait(&running.id), Exit::Ended);
}

pub(super) fn a_deadline_is_kept_beside_the_sandbox(fixture: &mut Fixture<'_>) {
    let sandboxes = fixture.path().join("data/sandboxes");
    let left = |id: &SandboxId| {
        let all = deadline::all(&sandboxes).unwrap();
        let kept = all.into_iter().find(|(found, _)| found == id);
        kept.map(|(_, kept)| kept.left(Moment::now()).as_secs_f64().round() / 100.0)
    };
    let within = |seconds: u64| {
        let after = Duration::from_secs(seconds);
        Some(Deadline { at: Moment::now().wall.plus(after), after_millis: seconds * 1000 })
    };
    let spec = SandboxSpec { deadline: within(3600), ..fixture.spec() };
    fixture.engine().create(&spec).unwrap();
    let without = fixture.create();
    assert_eq!((left(&spec.id).map(f64::round), left(&without.id)), (Some(36.0), None));
    fixture.engine().start(&spec.id).unwrap();
    fixture.engine().set_deadline(&spec.id, within(7200)).unwrap();
    // By whoever looks, also when no host is there.
    fixture.reopen();
    assert_eq!(left(&spec.id).map(f64::round), Some(72.0));
    fixture.engine().set_deadline(&spec.id, None).unwrap();
    assert_eq!(left(&spec.id), None);
    // It has long passed, and the engine itself ends nothing.
    fixture.engine().set_deadline(&spec.id, within(0)).unwrap();
    assert_eq!(left(&spec.id), Some(0.0));
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Running));
    fixture.destroy(&spec.id);
    fixture.destroy(&without.id);
    let unknown = fixture.engine().set_deadline(&spec.id, within(3600));
    assert!(matches!(unknown, Err(EngineError::NotFound(_))), "{unknown:?}");
    fixture.assert_nothing_left();
}

pub(super) fn a_damaged_record_costs_the_sandbox_but_leaves_nothing(fixture: &mut Fixture<'_>) {
    for garbage in ["", "{\"version\":1}", "\0\0\0\0"] {
        let (spec, _agent) = fixture.run();
        std::fs::write(fixture.sandbox_dir(&spec.id).join("state.json"), garbage).unwrap();
        fixture.reopen();
        assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
        assert!(matches!(fixture.engine().pause(&spec.id), Err(EngineError::NotFound(_))));
        fixture.destroy(&spec.id);
        fixture.assert_nothing_left();
    }
}

pub(super) fn half_made_sandboxes_of_every_kind_are_removed(fixture: &mut Fixture<'_>) {
    // Only a folder.
    let id = SandboxId::random();
    std::fs::create_dir(fixture.sandbox_dir(&id)).unwrap();
    assert_eq!(fixture.presence(&id), Some(Presence::Remains));
    fixture.destroy(&id);
    fixture.assert_nothing_left();
    // All but the folder.
    let (spec, _agent) = fixture.run();
    std::fs::remove_dir_all(fixture.sandbox_dir(&spec.id)).unwrap();
    assert_eq!(fixture.presence(&spec.id), Some(Presence::Remains));
    assert!(matches!(fixture.engine().create(&spec), Err(EngineError::Exists(_))));
    fixture.destroy(&spec.id);
    fixture.assert_nothing_left();
}

pub(super) fn many_at_once_do_not_touch_each_other(fixture: &mut Fixture<'_>) {
    let fixture = &*fixture;
    std::thread::scope(|scope| {
        for n in 0..8 {
            scope.spawn(move || {
                let (spec, mut agent) = fixture.run();
                let said = agent.sh(&format!("echo {n} > number; busybox cat number"));
                assert_eq!(said, format!("{n}\n<0>"));
                fixture.engine().pause(&spec.id).unwrap();
                fixture.engine().resume(&spec.id).unwrap();
                assert_eq!(agent.sh("busybox cat number"), format!("{n}\n<0>"));
                fixture.engine().destroy(&spec.id).unwrap();
            });
        }
    });
    fixture.assert_nothing_left();
}

pub(super) fn two_instances_on_one_machine_see_only_their_own(one: &mut Fixture<'_>) {
    let two = Fixture::new(one.subject);
    let (spec, mut agent) = one.run();
    assert_eq!(two.presence(&spec.id), None);
    assert!(matches!(two.engine().pause(&spec.id), Err(EngineError::NotFound(_))));
    two.engine().destroy(&spec.id).unwrap();
    assert_eq!(agent.sh("echo alive"), "alive\n<0>");
}
