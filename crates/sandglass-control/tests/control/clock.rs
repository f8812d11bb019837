//! Clocks jump.

use std::time::Duration;

use sandglass_engine::Engine as _;
use sandglass_types::{Clock as _, EndReason, SandboxState};
use tokio::time::timeout;

use crate::fixture::{DAY, HOUR, World, request};
use crate::trouble::broken;

/// Short enough to wait for, long enough to be alive when the clock jumps.
const SHORT: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread")]
async fn a_jump_forward_ends_what_is_due_and_nothing_else() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let (short, long) =
        (server.create().await, server.control.create(server.team, request(DAY)).await.unwrap().id);
    world.clock.advance(HOUR * 2);
    assert_eq!(server.ended(&short).await, EndReason::Timeout);
    assert_eq!(server.row(&long).await.state, SandboxState::Running);
    world.clock.advance(DAY);
    assert_eq!(server.ended(&long).await, EndReason::Timeout);
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_is_set_back_gives_no_more_time() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let (short, long) = (server.create().await, server.create().await);
    server.control.set_timeout(server.team, &short, SHORT).await.unwrap();
    world.clock.set_back(DAY);
    assert_eq!(server.ended(&short).await, EndReason::Timeout);
    // What a client says now counts from now, by the new time.
    let end = server.control.set_timeout(server.team, &long, HOUR).await.unwrap();
    assert_eq!(end, world.clock.now().plus(HOUR));
    assert_eq!(server.row(&long).await.state, SandboxState::Running);
    server.control.set_timeout(server.team, &long, SHORT).await.unwrap();
    world.clock.set_back(DAY);
    assert_eq!(server.ended(&long).await, EndReason::Timeout);
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jump_while_no_server_runs() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let ahead = server.create().await;
    server.stop().await;
    world.clock.advance(DAY);
    let server = world.start().await.unwrap();
    // Its time is up, and it was not lost.
    assert_eq!(server.ended(&ahead).await, EndReason::Timeout);

    let behind = server.create().await;
    server.control.set_timeout(server.team, &behind, SHORT).await.unwrap();
    server.stop().await;
    world.clock.set_back(DAY);
    let server = world.start().await.unwrap();
    // All of its time again, but no more.
    assert_eq!(server.ended(&behind).await, EndReason::Timeout);
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_host_s_deadline_is_the_store_s_or_later() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    assert_eq!(world.kept(&id), Some(3600));
    let set = async |span| server.control.set_timeout(server.team, &id, span).await;
    set(HOUR * 2).await.unwrap();
    assert_eq!(world.kept(&id), Some(7200));
    set(HOUR / 2).await.unwrap();
    assert_eq!(world.kept(&id), Some(1800));
    server.control.extend(server.team, &id, HOUR / 4).await.unwrap();
    assert_eq!(world.kept(&id), Some(1800));
    // Cut at the longest life.
    world.clock.advance(HOUR / 4);
    set(DAY).await.unwrap();
    assert_eq!(world.kept(&id), Some(24 * 3600 - 900));
    set(HOUR).await.unwrap();

    // A later end that the host does not keep is not promised; an earlier one is in force all the same.
    let end = server.row(&id).await.end_at;
    world.trouble.fail("set_deadline", [broken(), broken()]);
    set(HOUR * 2).await.unwrap_err();
    assert_eq!((server.row(&id).await.end_at, world.kept(&id)), (end, Some(3600)));
    set(HOUR / 2).await.unwrap();
    assert_eq!(server.row(&id).await.end_at, world.clock.now().plus(HOUR / 2));
    assert_eq!(world.kept(&id), Some(3600));

    // The next server puts right what the last one could not.
    server.stop().await;
    let server = world.start().await.unwrap();
    assert_eq!(world.kept(&id), Some(1800));
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deadline_of_a_found_sandbox_is_kept_before_its_end_moves() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    server.stop().await;
    let before = world.trouble.calls("set_deadline");
    let held = world.trouble.hold("set_deadline");
    // Answers although it has not taken up all.
    let server = world.start().await.unwrap();
    let mut extending = Box::pin(server.control.set_timeout(server.team, &id, HOUR * 2));
    // However long that were: the host is told nothing else before it has answered.
    timeout(Duration::from_secs(1), &mut extending).await.unwrap_err();
    assert_eq!(world.trouble.calls("set_deadline"), before + 1);
    drop(held);
    extending.await.unwrap();
    assert_eq!(world.kept(&id), Some(7200));
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_gone_when_its_time_is_up_was_ended_by_that() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let (due, lost) = (server.create().await, server.create().await);
    server.control.set_timeout(server.team, &lost, HOUR * 2).await.unwrap();
    server.stop().await;
    // As the watchdog of the dead host does, and as it never would.
    for id in [&due, &lost] {
        world.engine().destroy(id).unwrap();
    }
    world.clock.advance(HOUR);
    let server = world.start().await.unwrap();
    assert_eq!(server.ended(&due).await, EndReason::Timeout);
    assert_eq!(server.why(&due).await, "its time was up while no server ran");
    assert_eq!(server.ended(&lost).await, EndReason::Lost);
    world.nothing_left().await;
    server.stop().await;
}
