//! The next computer of a paused sandbox is made ahead, used once, and never left.

use sandglass_engine::Engine as _;
use sandglass_engine::engine::{EngineError, Lack, Presence};
use sandglass_types::budget::Amount;
use sandglass_types::{ErrorKind, PauseMode, ResumeMode, SandboxId, SandboxState};

use crate::fixture::{HOUR, Server, World, eventually};
use crate::scripted::Manner;
use crate::trouble::broken;

/// A world in which so many paused sandboxes have one.
fn world(ahead: usize) -> World {
    let mut world = World::scripted(Manner::Obedient);
    world.budgets.ahead = ahead;
    world
}

async fn pause(server: &Server, id: &SandboxId, mode: PauseMode) {
    server.control.pause(server.team, id, mode).await.unwrap();
}

async fn resume(server: &Server, id: &SandboxId, mode: ResumeMode) {
    server.control.resume(server.team, id, HOUR, mode).await.unwrap();
}

/// What there is of it on the machine.
fn presence(world: &World, id: &SandboxId) -> Option<Presence> {
    world.engine().list().unwrap().into_iter().find(|(found, _)| found == id).map(|(_, presence)| presence)
}

async fn made(world: &World, id: &SandboxId) {
    eventually("it is made", async || (presence(world, id) == Some(Presence::Created)).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_made_after_the_pause_and_taken_by_the_resume() {
    let world = world(1);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    for (generation, mode) in [(2, ResumeMode::Restore), (3, ResumeMode::Reboot), (4, ResumeMode::Restore)] {
        pause(&server, &id, PauseMode::Full).await;
        made(&world, &id).await;
        resume(&server, &id, mode).await;
        assert_eq!(presence(&world, &id), Some(Presence::Running));
        assert_eq!(server.row(&id).await.generation.0, generation);
        assert!(server.control.live(&id).is_some());
    }
    assert_eq!(world.trouble.calls("prepare_restore"), 3);
    // Of its files alone nothing is made: who starts it anew starts from them.
    pause(&server, &id, PauseMode::Filesystem).await;
    resume(&server, &id, ResumeMode::Restore).await;
    assert_eq!(world.trouble.calls("prepare_restore"), 3);
    pause(&server, &id, PauseMode::Full).await;
    made(&world, &id).await;
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_paused_last_has_one() {
    let world = world(2);
    let server = world.start().await.unwrap();
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(server.create().await);
    }
    for id in &ids {
        pause(&server, id, PauseMode::Full).await;
        made(&world, id).await;
    }
    eventually("the others have none", async || {
        let found = |id| presence(&world, id);
        let last = [&ids[2], &ids[3]].map(found) == [Some(Presence::Created); 2];
        (last && [&ids[0], &ids[1]].map(found) == [None; 2]).then_some(())
    })
    .await;
    for id in &ids {
        resume(&server, id, ResumeMode::Restore).await;
        server.kill(id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_it_a_resume_is_as_ever() {
    let world = world(1);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    world.trouble.fail("prepare_restore", [broken()]);
    pause(&server, &id, PauseMode::Full).await;
    eventually("it was tried", async || (world.trouble.calls("prepare_restore") == 1).then_some(())).await;
    resume(&server, &id, ResumeMode::Restore).await;
    // One that fails as it is taken is gone, and the sandbox is paused as before.
    pause(&server, &id, PauseMode::Full).await;
    made(&world, &id).await;
    world.trouble.fail("restore", [broken()]);
    let failed = server.control.resume(server.team, &id, HOUR, ResumeMode::Restore).await;
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Internal);
    eventually("it is paused again", async || {
        (server.row(&id).await.state == SandboxState::Paused).then_some(())
    })
    .await;
    resume(&server, &id, ResumeMode::Restore).await;
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_wants_something_while_it_is_made_waits_for_that_and_no_longer() {
    let world = world(1);
    let server = world.start().await.unwrap();
    let [first, second] = [server.create().await, server.create().await];
    for (id, again) in [(&first, true), (&second, false)] {
        let (held, before) = (world.trouble.hold("prepare_restore"), world.trouble.calls("prepare_restore"));
        pause(&server, id, PauseMode::Full).await;
        eventually("it is being made", async || {
            (world.trouble.calls("prepare_restore") > before).then_some(())
        })
        .await;
        let (control, team, of) = (server.control.clone(), server.team, id.clone());
        let asked = tokio::spawn(async move {
            if again {
                control.resume(team, &of, HOUR, ResumeMode::Restore).await.map(drop)
            } else {
                control.kill(team, &of).await
            }
        });
        drop(held);
        asked.await.unwrap().unwrap();
    }
    assert_eq!(presence(&world, &first), Some(Presence::Running));
    server.kill(&first).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_given_up_where_somebody_else_needs_the_room() {
    let world = world(2);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    pause(&server, &id, PauseMode::Full).await;
    made(&world, &id).await;
    let full = || EngineError::NoRoom { lack: Lack::LoopDevices, step: "attach", source: "none".into() };
    world.trouble.fail("create", [full()]);
    let other = server.create().await;
    eventually("it is given up", async || presence(&world, &id).is_none().then_some(())).await;
    // Where nothing is to be given up, it is as it was.
    world.trouble.fail("create", [full()]);
    let refused = server.control.create(server.team, crate::fixture::request(HOUR)).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Capacity);
    resume(&server, &id, ResumeMode::Restore).await;
    for id in [id, other] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn none_is_made_where_the_machine_lacked_something_just_now() {
    for lacks in [false, true] {
        let world = world(1);
        let server = world.start().await.unwrap();
        let id = server.create().await;
        if lacks {
            let full = EngineError::NoRoom { lack: Lack::Disk, step: "copy", source: "none".into() };
            world.trouble.fail("create", [full]);
            let refused = server.control.create(server.team, crate::fixture::request(HOUR)).await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Capacity);
        }
        pause(&server, &id, PauseMode::Full).await;
        if !lacks {
            made(&world, &id).await;
        }
        resume(&server, &id, ResumeMode::Restore).await;
        assert_eq!(world.trouble.calls("prepare_restore"), usize::from(!lacks));
        server.kill(&id).await;
        world.nothing_left().await;
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_counts_and_gives_way_to_who_is_admitted() {
    for (loop_devices, stays) in [(1, false), (2, true)] {
        let mut world = world(1);
        world.budgets.capacity = Amount { sandboxes: loop_devices, ..Amount::UNBOUNDED };
        let server = world.start().await.unwrap();
        let id = server.create().await;
        pause(&server, &id, PauseMode::Full).await;
        made(&world, &id).await;
        let other = server.create().await;
        assert_eq!(presence(&world, &id).is_some(), stays);
        for id in [id, other] {
            server.kill(&id).await;
        }
        world.nothing_left().await;
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_room_for_it_none_is_made() {
    // An image of one is 5 GiB; what is made ahead may take 256 MiB.
    for (disk_mib, calls) in [((5 << 10) + 255, 0), ((5 << 10) + 256, 1)] {
        let mut world = world(1);
        world.budgets.capacity = Amount { disk_mib, ..Amount::UNBOUNDED };
        let server = world.start().await.unwrap();
        let id = server.create().await;
        pause(&server, &id, PauseMode::Full).await;
        if calls == 1 {
            made(&world, &id).await;
        }
        resume(&server, &id, ResumeMode::Restore).await;
        assert_eq!(world.trouble.calls("prepare_restore"), calls);
        server.kill(&id).await;
        world.nothing_left().await;
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_server_removes_what_it_finds_and_keeps_the_image() {
    let world = world(2);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    pause(&server, &id, PauseMode::Full).await;
    made(&world, &id).await;
    server.stop().await;
    assert_eq!(presence(&world, &id), Some(Presence::Created));
    assert!(world.kept(&id).is_some(), "nothing would end it if no server came");
    let server = world.start().await.unwrap();
    eventually("it is gone", async || presence(&world, &id).is_none().then_some(())).await;
    assert_eq!(world.engine().images().unwrap(), std::slice::from_ref(&id));
    resume(&server, &id, ResumeMode::Restore).await;
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}
