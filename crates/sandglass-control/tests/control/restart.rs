//! Servers come and go, and agents are killed behind their back.

use std::time::Duration;

use rustix::process::Signal;
use sandglass_control::{CreateSandbox, Patience};
use sandglass_egress::policy::Policy;
use sandglass_types::{EndReason, ErrorKind, SandboxState};

use crate::fixture::{HOUR, Server, World, eventually, request, runs, signal, written};

#[tokio::test(flavor = "multi_thread")]
async fn commands_run_on_and_are_found_again() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let ids = [server.create().await, server.create().await];
    let (command, agent) = world.start_command(&server, &ids[0]).await;
    server.stop().await;
    assert!(runs(command) && runs(agent));

    let server = world.start().await.unwrap();
    for id in &ids {
        assert_eq!(server.row(id).await.state, SandboxState::Running);
        server.run(id, "echo again >again").await;
        assert_eq!(written(&world.home(id).join("again")).await, "again\n");
    }
    assert!(runs(command) && runs(agent));
    for id in &ids {
        server.kill(id).await;
        assert_eq!(server.ended(id).await, EndReason::Killed);
    }
    assert!(!runs(command) && !runs(agent));
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_killed_ends_its_sandbox_and_the_record_says_so() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let (id, other) = (server.create().await, server.create().await);
    let (command, agent) = world.start_command(&server, &id).await;
    signal(agent, Signal::KILL);
    assert_eq!(server.ended(&id).await, EndReason::Crashed);
    assert_eq!(server.why(&id).await, "its processes are gone: Ended");
    assert!(!runs(command), "what it ran has gone with it");
    assert_eq!(server.row(&other).await.state, SandboxState::Running);

    // The same while nobody looks.
    let (command, agent) = world.start_command(&server, &other).await;
    server.stop().await;
    signal(agent, Signal::KILL);
    eventually("the agent is gone", async || (!runs(agent)).then_some(())).await;
    let server = world.start().await.unwrap();
    assert_eq!(server.ended(&other).await, EndReason::Lost);
    assert!(!runs(command));
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_stands_still_is_noticed_by_its_silence() {
    let mut world = World::new();
    let (heartbeat, silence) = (Duration::from_millis(200), Duration::from_secs(3));
    world.patience = Patience { heartbeat, silence, ..world.patience };
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let (_, agent) = world.start_command(&server, &id).await;
    signal(agent, Signal::STOP);
    assert_eq!(server.ended(&id).await, EndReason::Crashed);
    let why = server.why(&id).await;
    assert!(why.contains("no sign of life for 3s"), "{why}");
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_host_a_server_fails_every_verb_and_loses_nothing() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let (command, _) = world.start_command(&server, &id).await;
    server.lose_host();
    let refused = server.control.create(server.team, crate::fixture::request(crate::fixture::HOUR)).await;
    assert!(refused.is_err());
    assert_eq!(server.row(&id).await.state, SandboxState::Running);
    server.stop().await;
    assert!(runs(command));

    let server = world.start().await.unwrap();
    server.run(&id, "echo again >again").await;
    server.kill(&id).await;
    assert_eq!(server.ended(&id).await, EndReason::Killed);
    // The one that could not be made is at its end as well.
    eventually("all have ended", async || {
        let states = [SandboxState::Creating, SandboxState::Running, SandboxState::Ending];
        for state in states {
            if !server.in_state(state).await.is_empty() {
                return None;
            }
        }
        Some(())
    })
    .await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_checked_before_anything_is_made_and_kept_over_a_restart() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let policy = |text| serde_json::from_str::<Policy>(text).unwrap();
    let unknown = policy(r#"{"features": ["models"]}"#);
    let asked = CreateSandbox { policy: unknown.clone(), ..request(HOUR) };
    let error = server.control.create(server.team, asked).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("no feature models"), "{error}");
    assert!(server.in_state(SandboxState::Ended).await.is_empty());

    let id = server.create().await;
    let wanted = policy(r#"{"rules": [{"allow": "example.com"}]}"#);
    let replace = async |server: &Server, policy: &Policy| {
        server.control.set_policy(server.team, &id, policy.clone(), Some(true)).await
    };
    replace(&server, &wanted).await.unwrap();
    assert_eq!(replace(&server, &unknown).await.unwrap_err().kind(), ErrorKind::Invalid);
    server.stop().await;
    let server = world.start().await.unwrap();
    let row = server.row(&id).await;
    assert_eq!((&row.policy, row.allow_internet_access), (&wanted, Some(true)));
    // Its operator allows nothing.
    assert!(server.control.effective(&row).unwrap().0.is_sealed());
    server.kill(&id).await;
    assert_eq!(replace(&server, &wanted).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert!(server.control.receipts(server.team, &id, 10).await.unwrap().is_empty());
    world.nothing_left().await;
    server.stop().await;
}
