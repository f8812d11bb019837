//! Hosts that fail.

use rustix::process::Signal;
use sandglass_engine::EngineError;
use sandglass_engine::engine::Lack;
use sandglass_types::{EndReason, ErrorKind, SandboxState};

use crate::fixture::{HOUR, Server, World, eventually, request, runs, signal, written};
use crate::trouble::broken;

/// Creates one that can't be made: how it was refused, and what the record says.
async fn refused(server: &Server) -> (ErrorKind, EndReason, String) {
    let before = server.in_state(SandboxState::Ended).await;
    let error = server.control.create(server.team, request(HOUR)).await.unwrap_err();
    let id = eventually("it has ended", async || {
        server.in_state(SandboxState::Ended).await.into_iter().find(|id| !before.contains(id))
    })
    .await;
    (error.kind(), server.ended(&id).await, server.why(&id).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_cannot_be_made_is_refused_with_its_reason() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let full = EngineError::NoRoom { lack: Lack::Disk, step: "copy", source: "the disk is full".into() };
    world.trouble.fail("create", [full]);
    let (kind, reason, why) = refused(&server).await;
    assert_eq!((kind, reason), (ErrorKind::Capacity, EndReason::CreateFailed));
    assert!(why.contains("the disk is full"), "{why}");
    for verb in ["create", "start", "attach"] {
        world.trouble.fail(verb, [broken()]);
        let (kind, reason, why) = refused(&server).await;
        assert_eq!((kind, reason), (ErrorKind::Internal, EndReason::CreateFailed), "{verb}");
        assert!(why.contains("it was to fail"), "{verb}: {why}");
    }
    world.nothing_left().await;
    // And the next one is made.
    let id = server.create().await;
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_declared_refusal_no_sandbox_runs_without_its_airlock() {
    let world = World::new();
    world.trouble.claim_airlocks();
    let server = world.start().await.unwrap();
    let (_, reason, why) = refused(&server).await;
    assert_eq!(reason, EndReason::CreateFailed);
    assert!(why.contains("airlock"), "{why}");
    assert_eq!(world.trouble.calls("start"), 0, "nothing of it ran");
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_fails_is_tried_until_it_works() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    world.trouble.fail("destroy", (0..4).map(|_| broken()));
    let held = world.trouble.hold("destroy");
    server.kill(&id).await;
    // Who asks again while it hangs is answered all the same.
    server.kill(&id).await;
    assert_eq!(server.row(&id).await.state, SandboxState::Ending);
    drop(held);
    assert_eq!(server.ended(&id).await, EndReason::Killed);
    assert_eq!(world.trouble.calls("destroy"), 5);
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_no_server_finished_is_the_next_one_s() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let (command, _) = world.start_command(&server, &id).await;
    world.trouble.fail("destroy", [broken()]);
    server.kill(&id).await;
    eventually("it was tried", async || (world.trouble.calls("destroy") >= 1).then_some(())).await;
    server.stop().await;
    let server = world.start().await.unwrap();
    assert_eq!(server.ended(&id).await, EndReason::Killed);
    assert!(!runs(command));
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_cannot_say_whether_a_sandbox_runs_does_not_end_it() {
    let world = World::new();
    world.trouble.fail("wait", (0..4).map(|_| broken()));
    let server = world.start().await.unwrap();
    let id = server.create().await;
    eventually("it was asked again", async || (world.trouble.calls("wait") > 4).then_some(())).await;
    let (_, agent) = world.start_command(&server, &id).await;
    assert_eq!(server.row(&id).await.state, SandboxState::Running);
    signal(agent, Signal::KILL);
    assert_eq!(server.ended(&id).await, EndReason::Crashed);
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_look_at_the_machine_does_not_start_and_touches_nothing() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let (command, _) = world.start_command(&server, &id).await;
    server.stop().await;
    world.trouble.fail("list", [broken()]);
    assert!(world.start().await.is_err());
    assert!(runs(command));
    let server = world.start().await.unwrap();
    assert_eq!(server.row(&id).await.state, SandboxState::Running);
    server.run(&id, "echo again >again").await;
    assert_eq!(written(&world.home(&id).join("again")).await, "again\n");
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}
