//! Images: what is paused, what is copied, and what is left when it fails.

use std::time::Duration;

use sandglass_control::{CreateSandbox, ListSnapshots};
use sandglass_engine::engine::{Feature, Presence};
use sandglass_engine::{Engine as _, EngineError};
use sandglass_store::{MadeFrom, SnapshotRow, Store as _};
use sandglass_types::{
    Clock as _, Digest, EndReason, Error, ErrorKind, PauseMode, Reference, ResumeMode, SandboxId,
    SandboxState, SnapshotId, TeamId,
};

use crate::fixture::{HOUR, KEPT, Server, World, eventually, request, written};
use crate::scripted::Manner;
use crate::trouble::broken;

async fn snapshot(server: &Server, id: &SandboxId) -> Result<SnapshotRow, Error> {
    server.control.snapshot(server.team, id, None).await
}

async fn create_of(server: &Server, snapshot: &SnapshotRow) -> Result<SandboxId, Error> {
    let request = sandglass_control::CreateSandbox {
        template: snapshot.id.to_string(),
        ..request(Duration::from_secs(60))
    };
    server.control.create(server.team, request).await.map(|row| row.id)
}

async fn delete(server: &Server, snapshot: &SnapshotRow) -> Result<(), Error> {
    let reference: Reference = snapshot.id.as_str().parse().unwrap();
    server.control.delete_snapshot(server.team, &reference).await
}

/// Who a sandbox was told to be.
async fn identity(world: &World, id: &SandboxId) -> String {
    written(&world.home(id).join("identity")).await
}

async fn no_image_left(world: &World, server: &Server) {
    let engine = world.engine();
    eventually("no image is left", async || {
        let node = server.store.node().await.unwrap();
        let rows = server.store.snapshots_on_node(node).await.unwrap();
        (engine.images().unwrap().is_empty() && rows.is_empty()).then_some(())
    })
    .await;
}

/// It runs, and its processes do.
async fn runs_on(world: &World, server: &Server, id: &SandboxId) {
    let engine = world.engine();
    eventually("it runs on", async || {
        let running = engine.list().unwrap().contains(&(id.clone(), Presence::Running));
        (running && server.row(id).await.state == SandboxState::Running).then_some(())
    })
    .await;
    // Its agent speaks again: a pause has to ask it.
    server.control.pause(server.team, id, PauseMode::Full).await.unwrap();
    server.control.resume(server.team, id, HOUR, ResumeMode::Restore).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn of_snapshots_without_a_name_the_last_ones_are_kept_and_what_is_made_of_others_goes_on() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let [id, other] = [server.create().await, server.create().await];
    let name: Reference = "mine".parse().unwrap();
    let named = server.control.snapshot(server.team, &id, Some(&name)).await.unwrap();
    // They are told apart by the moment at which they were made.
    let moment = Duration::from_millis(1);
    world.clock.advance(moment);
    let mut expected = vec![named.id, snapshot(&server, &other).await.unwrap().id];
    let mut made = Vec::new();
    for _ in 0..KEPT.get() + 2 {
        world.clock.advance(moment);
        made.push(snapshot(&server, &id).await.unwrap());
    }
    let copy = create_of(&server, &made[2]).await.unwrap();
    expected.extend(made[2..].iter().map(|row| row.id.clone()));
    let node = server.store.node().await.unwrap();
    eventually("what is surplus is gone", async || {
        let rows = server.store.snapshots_on_node(node).await.unwrap();
        (rows.iter().map(|row| row.id.clone()).collect::<Vec<_>>() == expected).then_some(())
    })
    .await;
    assert_eq!(world.engine().images().unwrap().len(), expected.len());
    assert!(create_of(&server, &made[1]).await.is_err());

    // What loses its name is one of the others from then on, and the oldest of them.
    world.clock.advance(moment);
    let newer = server.control.snapshot(server.team, &id, Some(&name)).await.unwrap();
    expected[0] = newer.id;
    expected.rotate_left(1);
    eventually("the one that has lost its name is gone", async || {
        let rows = server.store.snapshots_on_node(node).await.unwrap();
        (rows.iter().map(|row| row.id.clone()).collect::<Vec<_>>() == expected).then_some(())
    })
    .await;
    for id in [id, other, copy] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_sandbox_comes_back_in_its_next_generation() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    assert!(!server.control.engine().refuses(Feature::Checkpoint));
    let id = server.create().await;
    for generation in 2..5 {
        server.control.pause(server.team, &id, PauseMode::Full).await.unwrap();
        assert_eq!(server.row(&id).await.state, SandboxState::Paused);
        assert_eq!(world.engine().images().unwrap(), std::slice::from_ref(&id));
        server.control.resume(server.team, &id, HOUR, ResumeMode::Restore).await.unwrap();
        assert_eq!(identity(&world, &id).await, format!("{id} {generation} None\n"));
    }
    no_image_left(&world, &server).await;
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_sent_again_has_its_answer_without_what_that_was_made_of() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let kept = snapshot(&server, &id).await.unwrap();
    let with = |key: &str| CreateSandbox {
        template: kept.id.to_string(),
        idempotency: Some((key.parse().unwrap(), Digest::from_bytes([1; 32]))),
        ..request(HOUR)
    };
    let first = server.control.create(server.team, with("key")).await.unwrap().id;
    delete(&server, &kept).await.unwrap();
    assert_eq!(server.control.create(server.team, with("key")).await.unwrap().id, first);
    let other = server.control.create(server.team, with("other")).await.unwrap_err();
    assert_eq!(other.kind(), ErrorKind::NotFound);
    for id in [id, first] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_of_another_version_is_refused_with_that_and_the_files_are_there() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let kept = snapshot(&server, &id).await.unwrap();
    server.control.pause(server.team, &id, PauseMode::Full).await.unwrap();
    let other = || EngineError::Mismatch { what: "runsc", had: "one".into(), has: "two".into() };
    world.trouble.fail("restore", [other(), other()]);
    let resumed = server.control.resume(server.team, &id, HOUR, ResumeMode::Restore).await.map(drop);
    for error in [resumed.unwrap_err(), create_of(&server, &kept).await.map(drop).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Conflict);
        let text = error.to_string();
        assert!(
            ["runsc one", "has two", "\"memory\": false"].iter().all(|word| text.contains(word)),
            "{text}"
        );
    }
    eventually("it is paused again", async || {
        (server.row(&id).await.state == SandboxState::Paused).then_some(())
    })
    .await;
    server.control.resume(server.team, &id, HOUR, ResumeMode::Reboot).await.unwrap();
    delete(&server, &kept).await.unwrap();
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_is_told_who_it_is_whatever_it_says_that_it_is() {
    for manner in [Manner::Obedient, Manner::Liar] {
        let world = World::scripted(manner);
        let server = world.start().await.unwrap();
        let source = server.control.create(server.team, request(HOUR)).await.unwrap();
        let made = snapshot(&server, &source.id).await.unwrap();
        assert_eq!((&made.source, made.generation.0), (&source.id, 1));
        let measured = server.control.disk_use(&[made.id.clone(), SnapshotId::random()]).await.unwrap();
        let [(of, found)] = Vec::from_iter(measured).try_into().unwrap();
        assert_eq!(of, made.id);
        assert!(
            found.freed_by_deletion() > 0 && found.freed_by_deletion() == found.footprint.bytes,
            "{found:?}"
        );
        for tree in [
            server.control.tree_of_sandbox(server.team, &source.id).await,
            server.control.tree_of_template("base").await,
        ] {
            assert_eq!(tree.unwrap(), found.footprint.bytes);
        }
        assert_eq!(server.control.tree_of_template("other").await.unwrap(), 0);
        assert!(server.control.tree_of_sandbox(TeamId::random(), &source.id).await.is_err());
        let child = create_of(&server, &made).await.unwrap();
        assert_eq!(identity(&world, &child).await, format!("{child} 2 None\n"), "{manner:?}");
        assert_eq!(identity(&world, &source.id).await, format!("{} 1 None\n", source.id));
        let row = server.row(&child).await;
        assert_eq!((row.made_from, row.generation.0), (MadeFrom::Snapshot(made.id.clone()), 2));
        // Its source is as it was, and goes on.
        let row = server.row(&source.id).await;
        assert_eq!((row.end_at, row.generation), (source.end_at, source.generation));
        delete(&server, &made).await.unwrap();
        assert_eq!(delete(&server, &made).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(create_of(&server, &made).await.unwrap_err().kind(), ErrorKind::NotFound);
        no_image_left(&world, &server).await;
        for id in [&source.id, &child] {
            server.kill(id).await;
        }
        world.nothing_left().await;
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_does_not_become_who_it_is_told_to_be_never_runs() {
    let world = World::scripted(Manner::Stubborn);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let made = snapshot(&server, &id).await.unwrap();
    assert_eq!(create_of(&server, &made).await.unwrap_err().kind(), ErrorKind::Conflict);
    let outcomes = server.control.fork(server.team, &id, 2, HOUR).await.unwrap();
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    let ended = eventually("they have ended", async || {
        Some(server.in_state(SandboxState::Ended).await).filter(|ended| ended.len() == 3)
    });
    for child in ended.await {
        assert_eq!(server.ended(&child).await, EndReason::CreateFailed);
        assert!(server.why(&child).await.contains("likes itself"));
    }
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_runs_on_at_whatever_step_its_copy_fails_and_nothing_is_left() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    for verb in ["pause", "checkpoint"] {
        world.trouble.fail(verb, [broken()]);
        assert_eq!(snapshot(&server, &id).await.unwrap_err().kind(), ErrorKind::Internal, "{verb}");
        runs_on(&world, &server, &id).await;
        world.trouble.fail(verb, [broken()]);
        let error = server.control.fork(server.team, &id, 3, HOUR).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal, "{verb}");
        runs_on(&world, &server, &id).await;
        no_image_left(&world, &server).await;
    }
    let ended = eventually("they have ended", async || {
        Some(server.in_state(SandboxState::Ended).await).filter(|ended| ended.len() == 6)
    });
    for child in ended.await {
        assert_eq!(server.ended(&child).await, EndReason::CreateFailed);
        assert!(server.why(&child).await.contains("its source could not be copied"));
    }
    // One that can't be made to go on at once is made to go on later.
    world.trouble.fail("resume", (0..3).map(|_| broken()));
    let made = snapshot(&server, &id).await.unwrap();
    runs_on(&world, &server, &id).await;
    // An image that can't be removed at once is not found any more, and is removed in the end.
    delete(&server, &made).await.unwrap();
    no_image_left(&world, &server).await;
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_ends_a_source_need_not_wait_for_its_image_and_the_snapshot_is_whole() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let held = world.trouble.hold("checkpoint");
    let (control, team, of) = (server.control.clone(), server.team, id.clone());
    let copying = tokio::spawn(async move { control.snapshot(team, &of, None).await });
    eventually("it is written", async || (world.trouble.calls("checkpoint") == 1).then_some(())).await;
    // Who wants something else of it waits, and hears that it is gone.
    let (control, of) = (server.control.clone(), id.clone());
    let extending = tokio::spawn(async move { control.set_timeout(team, &of, HOUR).await });
    server.kill(&id).await;
    assert_eq!(server.row(&id).await.state, SandboxState::Ending);
    let error = server.control.snapshot(team, &id, None).await.unwrap_err();
    assert_eq!((error.kind(), error.to_string()), (ErrorKind::Conflict, "the sandbox is being ended".into()));
    drop(held);
    let made = copying.await.unwrap().unwrap();
    assert_eq!(server.ended(&id).await, EndReason::Killed);
    let _either = extending.await.unwrap();
    let child = create_of(&server, &made).await.unwrap();
    assert_eq!(identity(&world, &child).await, format!("{child} 2 None\n"));
    delete(&server, &made).await.unwrap();
    no_image_left(&world, &server).await;
    server.kill(&child).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_children_each_is_made_or_fails_by_itself() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    world.trouble.fail("restore", [broken(), broken()]);
    let before = world.clock.now();
    let outcomes = server.control.fork(server.team, &id, 7, HOUR).await.unwrap();
    let (made, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!((made.len(), failed.len()), (5, 2));
    let mut text = String::new();
    server.control.metrics(&mut text).await.unwrap();
    assert!(text.lines().any(|line| line == "sandglass_sandbox_starts_total{path=\"restore\"} 5"), "{text}");
    for row in made {
        let row = row.unwrap();
        assert_eq!((row.made_from, row.generation.0), (MadeFrom::Fork(id.clone()), 2));
        assert_eq!(row.end_at, before.plus(HOUR));
        assert_eq!(identity(&world, &row.id).await, format!("{} 2 None\n", row.id));
        server.kill(&row.id).await;
    }
    no_image_left(&world, &server).await;
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_has_all_of_its_time_from_when_it_runs() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let (held, before) = (world.trouble.hold("restore"), world.trouble.calls("restore"));
    let (control, team, source) = (server.control.clone(), server.team, id.clone());
    let minute = Duration::from_secs(60);
    let forking = tokio::spawn(async move { control.fork(team, &source, 1, minute).await });
    eventually("it is being made", async || (world.trouble.calls("restore") > before).then_some(())).await;
    world.clock.advance(minute * 3);
    drop(held);
    let child = forking.await.unwrap().unwrap().remove(0).unwrap();
    assert_eq!(child.end_at, world.clock.now().plus(minute));
    runs_on(&world, &server, &child.id).await;
    server.kill(&child.id).await;
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_time_that_is_asked_for_while_an_image_is_written_is_given() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let (held, before) = (world.trouble.hold("checkpoint"), world.trouble.calls("checkpoint"));
    let (control, team, source) = (server.control.clone(), server.team, id.clone());
    let capturing = tokio::spawn(async move { control.snapshot(team, &source, None).await });
    let writing = async || (world.trouble.calls("checkpoint") > before).then_some(());
    eventually("its image is being written", writing).await;
    let left = server.row(&id).await.end_at.since(world.clock.now());
    let (control, source) = (server.control.clone(), id.clone());
    let asking = tokio::spawn(async move { control.set_timeout(team, &source, HOUR * 2).await });
    // It is not answered before the image is there, so there is nothing to wait for but that it was asked.
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.clock.advance(left + Duration::from_secs(60));
    drop(held);
    let snapshot = capturing.await.unwrap().unwrap();
    asking.await.unwrap().unwrap();
    runs_on(&world, &server, &id).await;
    delete(&server, &snapshot).await.unwrap();
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_is_deleted_stays_for_as_long_as_somebody_is_made_of_it() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let made = snapshot(&server, &id).await.unwrap();
    let (held, before) = (world.trouble.hold("restore"), world.trouble.calls("restore"));
    let (control, team) = (server.control.clone(), server.team);
    let of = sandglass_control::CreateSandbox { template: made.id.to_string(), ..request(HOUR) };
    let creating = tokio::spawn(async move { control.create(team, of).await });
    eventually("it is being made", async || (world.trouble.calls("restore") > before).then_some(())).await;
    delete(&server, &made).await.unwrap();
    let listed =
        server.control.snapshots(team, ListSnapshots { limit: 100, ..Default::default() }).await.unwrap();
    assert_eq!(listed.rows, []);
    assert_eq!(create_of(&server, &made).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(world.engine().images().unwrap(), [made.id.image()]);
    drop(held);
    let child = creating.await.unwrap().unwrap().id;
    assert_eq!(identity(&world, &child).await, format!("{child} 2 None\n"));
    no_image_left(&world, &server).await;
    for id in [id, child] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_left_half_copied_its_next_one_clears_and_the_source_runs_on() {
    let world = World::scripted(Manner::Obedient);
    let mut server = world.start().await.unwrap();
    let id = server.create().await;
    let kept = snapshot(&server, &id).await.unwrap();
    for copies in [0, 3] {
        let (held, before) = (world.trouble.hold("checkpoint"), world.trouble.calls("checkpoint"));
        let (control, team, of) = (server.control.clone(), server.team, id.clone());
        let copying = tokio::spawn(async move {
            match copies {
                0 => control.snapshot(team, &of, None).await.map(drop),
                copies => control.fork(team, &of, copies, HOUR).await.map(drop),
            }
        });
        eventually("it is written", async || (world.trouble.calls("checkpoint") > before).then_some(()))
            .await;
        // As a crash would, it leaves the source stopped, the rows where they are, and the image for the host to finish.
        copying.abort();
        let stopping = tokio::spawn(server.stop());
        drop(held);
        stopping.await.unwrap();
        server = world.start().await.unwrap();
        runs_on(&world, &server, &id).await;
        let engine = world.engine();
        eventually("the image that is wanted is left alone", async || {
            let node = server.store.node().await.unwrap();
            let rows = server.store.snapshots_on_node(node).await.unwrap();
            (engine.images().unwrap() == [kept.id.image()] && rows.len() == 1).then_some(())
        })
        .await;
        eventually("no child is left", async || {
            server.in_state(SandboxState::Creating).await.is_empty().then_some(())
        })
        .await;
    }
    // In generation 1 then, and what is made of it in the next.
    let child = create_of(&server, &kept).await.unwrap();
    assert_eq!(server.row(&child).await.generation.0, 2);
    delete(&server, &kept).await.unwrap();
    no_image_left(&world, &server).await;
    for id in [id, child] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_images_refuses_copies_and_the_source_runs_on() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    assert_eq!(snapshot(&server, &id).await.unwrap_err().kind(), ErrorKind::Unsupported);
    let error = server.control.fork(server.team, &id, 1, HOUR).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(server.in_state(SandboxState::Running).await, std::slice::from_ref(&id));
    assert_eq!(server.in_state(SandboxState::Ended).await, []);
    for wrong in ["no-such", "elsewhere/base", "base:v2"] {
        let of = sandglass_control::CreateSandbox { template: wrong.into(), ..request(HOUR) };
        let error = server.control.create(server.team, of).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{wrong}");
    }
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}
