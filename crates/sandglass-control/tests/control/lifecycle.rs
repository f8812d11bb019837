//! A sandbox from its creation to its end.

use std::num::NonZeroU16;
use std::time::Duration;

use sandglass_engine::engine::{Feature, Isolation};
use sandglass_types::{Clock as _, Digest, EndReason, ErrorKind, PauseMode, ResumeMode, SandboxState};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::fixture::{DAY, HOUR, World, eventually, request, runs, written};

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_runs_commands_until_it_is_killed_and_nothing_is_left() {
    let world = World::new();
    let server = world.start().await.unwrap();
    assert_eq!(server.control.engine().isolation, Isolation::None);
    assert!(server.control.engine().refuses(Feature::Airlock));
    let id = server.create().await;
    server.run(&id, "echo $HOME $PWD $E2B_SANDBOX_ID >said").await;
    let home = std::fs::canonicalize(world.home(&id)).unwrap().display().to_string();
    assert_eq!(written(&world.home(&id).join("said")).await, format!("{home} {home} {id}\n"));
    let (command, agent) = world.start_command(&server, &id).await;

    server.kill(&id).await;
    assert!(server.control.live(&id).is_none(), "it can't be reached from here on");
    assert_eq!(server.ended(&id).await, EndReason::Killed);
    assert!(!runs(command) && !runs(agent));
    world.nothing_left().await;
    let events = server.control.events(server.team, &id).await.unwrap();
    let states: Vec<_> = events.into_iter().map(|event| event.state).collect();
    let [creating, running] = [SandboxState::Creating, SandboxState::Running];
    assert_eq!(states, [creating, running, SandboxState::Ending, SandboxState::Ended]);
    let error = server.control.kill(server.team, &id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_are_reached_through_the_agent() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let live = server.control.live(&id).unwrap();
    // Nothing separates the sandbox's loopback from the machine's.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = NonZeroU16::new(listener.local_addr().unwrap().port()).unwrap();
    let (mut dialled, (mut accepted, _)) =
        tokio::try_join!(async { live.dial(port).await.map_err(std::io::Error::other) }, listener.accept())
            .unwrap();
    dialled.write_all(b"ping").await.unwrap();
    let mut heard = [0; 4];
    accepted.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"ping");
    assert_eq!(world.trouble.calls("airlock_sockets"), 0, "there is none to ask for");
    server.kill(&id).await;
    assert!(live.dial(port).await.is_err());
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn time_runs_out_when_it_was_said_last() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.control.create(server.team, request(HOUR)).await.unwrap().id;
    let now = world.clock.now();
    let (team, control) = (server.team, &server.control);
    // Longer and shorter by the one, only longer by the other, and never beyond the longest life.
    assert_eq!(control.set_timeout(team, &id, HOUR * 2).await.unwrap(), now.plus(HOUR * 2));
    assert_eq!(control.extend(team, &id, HOUR).await.unwrap().end_at, now.plus(HOUR * 2));
    assert_eq!(control.extend(team, &id, HOUR * 3).await.unwrap().end_at, now.plus(HOUR * 3));
    world.clock.advance(HOUR * 2);
    assert_eq!(control.set_timeout(team, &id, DAY).await.unwrap(), now.plus(DAY));
    let too_long = control.set_timeout(team, &id, DAY + HOUR).await.unwrap_err();
    assert_eq!(too_long.kind(), ErrorKind::Invalid);

    control.set_timeout(team, &id, Duration::from_millis(1)).await.unwrap();
    assert_eq!(server.ended(&id).await, EndReason::Timeout);
    assert_eq!(server.why(&id).await, "its time is up");
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_come_and_go_at_once() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..24 {
        let (control, team) = (server.control.clone(), server.team);
        tasks.spawn(async move {
            let id = control.create(team, request(HOUR)).await.unwrap().id;
            let mut kills = JoinSet::new();
            for _ in 0..2 {
                let (control, id) = (control.clone(), id.clone());
                kills.spawn(async move { control.kill(team, &id).await });
            }
            let killed = kills.join_all().await;
            assert!(killed.iter().any(Result::is_ok), "{killed:?}");
            id
        });
    }
    for id in tasks.join_all().await {
        assert_eq!(server.ended(&id).await, EndReason::Killed);
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_being_made_can_be_killed() {
    let world = World::new();
    let server = world.start().await.unwrap();
    for verb in ["create", "start", "attach"] {
        let (held, before) = (world.trouble.hold(verb), world.trouble.calls(verb));
        let (control, team) = (server.control.clone(), server.team);
        let creating = tokio::spawn(async move { control.create(team, request(HOUR)).await });
        let id = eventually("it is being made", async || {
            server.in_state(SandboxState::Creating).await.first().cloned()
        })
        .await;
        eventually("the verb hangs", async || (world.trouble.calls(verb) > before).then_some(())).await;
        // Whoever waits learns of it at once, although the verb still hangs.
        server.kill(&id).await;
        assert_eq!(creating.await.unwrap().unwrap_err().kind(), ErrorKind::Conflict, "{verb}");
        assert_eq!(server.row(&id).await.end_reason, Some(EndReason::Killed));
        drop(held);
        assert_eq!(server.ended(&id).await, EndReason::Killed, "{verb}");
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_sent_again_makes_nothing_more() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let with = |digest: u8| {
        let mut request = request(HOUR);
        request.idempotency = Some(("key".parse().unwrap(), Digest::from_bytes([digest; 32])));
        request
    };
    let held = world.trouble.hold("create");
    let (control, team) = (server.control.clone(), server.team);
    let first = tokio::spawn({
        let (control, request) = (control.clone(), with(1));
        async move { control.create(team, request).await }
    });
    eventually("it is being made", async || (world.trouble.calls("create") == 1).then_some(())).await;
    let kind = async |digest| control.create(team, with(digest)).await.unwrap_err().kind();
    assert_eq!(kind(1).await, ErrorKind::IdempotencyInProgress);
    assert_eq!(kind(2).await, ErrorKind::IdempotencyMismatch);
    drop(held);
    let id = first.await.unwrap().unwrap().id;
    assert_eq!(control.create(team, with(1)).await.unwrap().id, id);
    assert_eq!(world.trouble.calls("create"), 1);
    server.kill(&id).await;
    assert_eq!(kind(1).await, ErrorKind::Conflict, "it has ended, and is not made again");
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_its_engine_can_not_pause_runs_on() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    for _ in 0..2 {
        let error = server.control.pause(server.team, &id, PauseMode::Full).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert_eq!(server.in_state(SandboxState::Running).await, std::slice::from_ref(&id));
    }
    let error = server.control.resume(server.team, &id, HOUR, ResumeMode::Restore).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
    let (row, resumed) = server.control.connect(server.team, &id, HOUR, ResumeMode::Restore).await.unwrap();
    assert_eq!((row.id, resumed), (id.clone(), false));
    server.kill(&id).await;
    let error = server.control.pause(server.team, &id, PauseMode::Full).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error:?}");
    world.nothing_left().await;
    server.stop().await;
}
