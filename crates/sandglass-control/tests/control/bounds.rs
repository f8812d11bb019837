//! What teams and the machine may have together.

use sandglass_control::{Budgets, DialError};
use sandglass_types::budget::Amount;
use sandglass_types::{Error, ErrorKind, SandboxState};
use tokio::task::JoinSet;

use crate::fixture::{HOUR, Server, World, eventually, request};

fn bounded(change: impl FnOnce(&mut Budgets)) -> World {
    let mut world = World::new();
    change(&mut world.budgets);
    world
}

async fn refused(server: &Server) -> Error {
    server.control.create(server.team, request(HOUR)).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_creates_at_once_a_team_gets_exactly_its_quota() {
    let world = bounded(|budgets| budgets.quota = Amount { cpus: 6, ..Amount::UNBOUNDED });
    let server = world.start().await.unwrap();
    let mut creates = JoinSet::new();
    for _ in 0..30 {
        let (control, team) = (server.control.clone(), server.team);
        creates.spawn(async move { control.create(team, request(HOUR)).await });
    }
    let (made, failed): (Vec<_>, Vec<_>) = creates.join_all().await.into_iter().partition(Result::is_ok);
    assert_eq!(made.len(), 3, "each has two cores");
    for error in failed.into_iter().map(Result::unwrap_err) {
        assert_eq!(error.kind(), ErrorKind::Quota);
        assert!(error.to_string().contains("quota.cpus"), "{error}");
    }
    let running = server.in_state(SandboxState::Running).await;
    assert_eq!(running.len(), 3);
    // Another team has its own.
    let other = sandglass_store::Store::create_team(
        &*server.store,
        "other",
        sandglass_types::Timestamp::from_millis(0),
    );
    let theirs = server.control.create(other.await.unwrap().id, request(HOUR)).await.unwrap();
    // What was killed does not count from the moment at which the client knows.
    server.kill(&running[0]).await;
    server.create().await;
    assert_eq!(refused(&server).await.kind(), ErrorKind::Quota);
    server.control.kill(theirs.team, &theirs.id).await.unwrap();
    for id in server.in_state(SandboxState::Running).await {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_machine_says_so_until_something_is_gone() {
    let world = bounded(|budgets| budgets.capacity = Amount { memory_mib: 2047, ..Amount::UNBOUNDED });
    let server = world.start().await.unwrap();
    let first = server.create().await;
    let error = refused(&server).await;
    assert_eq!(error.kind(), ErrorKind::Capacity);
    assert!(error.to_string().contains("1024 of 2047"), "{error}");
    // A client need not wait until all is removed: the next one waits for it.
    server.kill(&first).await;
    let second = server.create().await;
    // The next server knows what runs.
    server.stop().await;
    let server = world.start().await.unwrap();
    assert_eq!(refused(&server).await.kind(), ErrorKind::Capacity);
    server.kill(&second).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_into_sandboxes_are_bounded_over_all_of_them() {
    let world = bounded(|budgets| budgets.connections = 2);
    let server = world.start().await.unwrap();
    let (one, other) = (server.create().await, server.create().await);
    let live = |id| server.control.live(id).unwrap();
    let first = live(&one).guest_api().await.unwrap();
    let second = live(&other).guest_api().await.unwrap();
    assert!(matches!(live(&one).guest_api().await, Err(DialError::Full)));
    assert!(matches!(live(&one).dial(std::num::NonZeroU16::MIN).await, Err(DialError::Full)));
    let error = refused(&server).await;
    assert_eq!(error.kind(), ErrorKind::Capacity);
    assert!(error.to_string().contains("all 2 connections"), "{error}");
    drop(first);
    let third = live(&other).guest_api().await.unwrap();
    drop((second, third));
    // A try that fails takes no place.
    assert!(matches!(live(&one).dial(std::num::NonZeroU16::MIN).await, Err(DialError::Refused)));
    let both = (live(&one).guest_api().await.unwrap(), live(&one).guest_api().await.unwrap());
    drop(both);
    for id in [&one, &other] {
        server.kill(id).await;
    }
    eventually("both are gone", async || server.in_state(SandboxState::Ended).await.get(1).map(|_| ())).await;
    world.nothing_left().await;
    server.stop().await;
}
