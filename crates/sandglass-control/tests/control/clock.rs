//! Clocks jump.

use std::time::Duration;

use sandglass_types::{Clock as _, EndReason, SandboxState};

use crate::fixture::{DAY, HOUR, World, request};

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
