//! One sandbox: its row, its moves and its history.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sandglass_egress::policy::{Policy, RequestHost};
use sandglass_types::limits::Unchecked;
use sandglass_types::{
    EndReason, Generation, Lifetime, Limits, NodeId, OnTimeout, PauseMode, SandboxId, SandboxState as S,
    TeamId,
};
use tokio::task::JoinSet;

use super::{at, digest, end, insert, odd_defaults, run, sandbox_of, step, team};
use crate::{Event, MAX_DETAIL, MadeFrom, NewSandbox, SandboxRow, StartPath, Store, StoreError, Transition};

fn policy(host: &str) -> Policy {
    let rule = serde_json::json!({"allow": host, "ports": [443]});
    serde_json::from_value(serde_json::json!({"rules": [rule]})).unwrap()
}

/// A policy is replaced whole, and only while its sandbox runs.
pub async fn a_policy_is_replaced_while_the_sandbox_runs(store: Arc<dyn Store>) {
    let id = insert(&*store, &sandbox_of(team(&*store).await, 0)).await;
    let policy_of = async || store.sandbox(&id).await.unwrap().unwrap().policy;
    assert!(!store.set_policy(&id, &policy("a.example"), None).await.unwrap(), "not running yet");
    run(&*store, &id).await;
    assert_eq!(policy_of().await, Policy::default());
    assert!(store.set_policy(&id, &policy("a.example"), Some(false)).await.unwrap());
    assert_eq!(policy_of().await, policy("a.example"));
    assert_eq!(store.sandbox(&id).await.unwrap().unwrap().allow_internet_access, Some(false));
    assert!(store.set_policy(&id, &policy("b.example"), None).await.unwrap());
    end(&*store, &id, S::Running, EndReason::Killed).await;
    assert!(!store.set_policy(&id, &policy("c.example"), None).await.unwrap());
    let row = store.sandbox(&id).await.unwrap().unwrap();
    assert_eq!((row.policy, row.allow_internet_access), (policy("b.example"), None));
    assert!(!store.set_policy(&SandboxId::random(), &Policy::default(), None).await.unwrap());
}

/// Nothing is lost or changed between insert and read.
pub async fn a_row_comes_back_as_it_was_stored(store: Arc<dyn Store>) {
    let odd = "'\"\\ \u{1F600}\n\u{7f}".to_owned();
    let mask = RequestHost::try_from("localhost:${PORT}".to_owned()).unwrap();
    let limits = Unchecked { cpus: 64, memory_mib: 262_144, disk_mib: 64, processes: 16 };
    let new = NewSandbox {
        template: odd.clone(),
        limits: Limits::try_from(limits).unwrap(),
        access_token: Some(odd.clone()),
        traffic_token: Some("traffic".into()),
        request_host: Some(mask.clone()),
        metadata: BTreeMap::from([(odd.clone(), String::new()), (String::new(), odd.clone())]),
        env: BTreeMap::from([("PATH".into(), odd.clone())]),
        allow_internet_access: Some(false),
        policy: policy("example.com"),
        lifetime: Lifetime {
            timeout: Duration::from_millis(60_001),
            on_timeout: OnTimeout::Pause { auto_resume: true },
            idle: Some(Duration::from_millis(1)),
        },
        made_from: MadeFrom::Fork(SandboxId::random()),
        start_path: StartPath::Restore,
        defaults: Some(odd_defaults()),
        generation: Generation(3),
        connections: vec!["github".parse().unwrap(), "a-b".parse().unwrap()],
        ..sandbox_of(team(&*store).await, 5)
    };
    let id = insert(&*store, &new).await;
    let row = store.sandbox(&id).await.unwrap().unwrap();
    let expected = SandboxRow {
        id: new.id,
        node: new.node,
        team: new.team,
        template: odd.clone(),
        rootfs: digest(7),
        limits: new.limits,
        access_token: Some(odd),
        metadata: new.metadata,
        env: new.env,
        allow_internet_access: Some(false),
        policy: policy("example.com"),
        traffic_token: Some("traffic".into()),
        request_host: Some(mask),
        lifetime: new.lifetime,
        pause_mode: PauseMode::Full,
        made_from: new.made_from,
        start_path: StartPath::Restore,
        defaults: Some(odd_defaults()),
        volumes: Vec::new(),
        models: None,
        connections: vec!["github".parse().unwrap(), "a-b".parse().unwrap()],
        state: S::Creating,
        generation: Generation(3),
        created_at: at(5),
        end_at: at(60_005),
        max_end_at: at(3_600_005),
        ended_at: None,
        end_reason: None,
    };
    assert!(row == expected, "{row:?}");
    assert_eq!(store.sandbox(&SandboxId::random()).await.unwrap(), None);
    let events = store.events(&id).await.unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].seq, events[0].at, events[0].state), (1, at(5), S::Creating));
}

/// A restore that fails is followed by a cold start, before it runs and never after.
pub async fn which_way_it_comes_to_run_is_said_until_it_does(store: Arc<dyn Store>) {
    let new = NewSandbox { start_path: StartPath::Restore, ..sandbox_of(team(&*store).await, 0) };
    let id = insert(&*store, &new).await;
    let path = async || store.sandbox(&id).await.unwrap().unwrap().start_path;
    assert_eq!(path().await, StartPath::Restore);
    assert!(store.set_start_path(&id, StartPath::Cold).await.unwrap());
    assert_eq!(path().await, StartPath::Cold);
    run(&*store, &id).await;
    assert!(!store.set_start_path(&id, StartPath::Restore).await.unwrap());
    assert!(!store.set_start_path(&SandboxId::random(), StartPath::Cold).await.unwrap());
    assert_eq!(path().await, StartPath::Cold);
}

/// Ids name one sandbox for ever, and owners must exist.
pub async fn an_id_is_used_once(store: Arc<dyn Store>) {
    let new = sandbox_of(team(&*store).await, 0);
    insert(&*store, &new).await;
    let again = store.insert_sandbox(&new).await;
    assert!(matches!(again, Err(StoreError::Exists { what: "sandbox", .. })), "{again:?}");
    assert_eq!(store.events(&new.id).await.unwrap().len(), 1);

    let orphan = store.insert_sandbox(&sandbox_of(TeamId::random(), 0)).await;
    assert!(matches!(orphan, Err(StoreError::Missing { what: "team", .. })), "{orphan:?}");
    store.revoke_team(new.team, at(1)).await.unwrap();
    let orphan = store.insert_sandbox(&sandbox_of(new.team, 0)).await;
    assert!(matches!(orphan, Err(StoreError::Missing { what: "team", .. })), "{orphan:?}");
}

/// A move from a state that it is not in changes nothing; a move keeps reason and times.
pub async fn moves_compare_the_state(store: Arc<dyn Store>) {
    let id = insert(&*store, &sandbox_of(team(&*store).await, 0)).await;
    assert!(!store.transition(&id, &step(S::Running, S::Ending, 1)).await.unwrap());
    assert!(!store.transition(&SandboxId::random(), &step(S::Creating, S::Running, 1)).await.unwrap());
    assert_eq!(store.events(&id).await.unwrap().len(), 1);

    run(&*store, &id).await;
    assert!(!store.transition(&id, &step(S::Creating, S::Running, 2)).await.unwrap());
    end(&*store, &id, S::Running, EndReason::OutOfMemory).await;
    let row = store.sandbox(&id).await.unwrap().unwrap();
    assert_eq!(
        (row.state, row.ended_at, row.end_reason),
        (S::Ended, Some(at(300)), Some(EndReason::OutOfMemory))
    );
    let expected = [
        (1, at(0), S::Creating, None),
        (2, at(100), S::Running, None),
        (3, at(200), S::Ending, Some(EndReason::OutOfMemory)),
        (4, at(300), S::Ended, None),
    ];
    let events = store.events(&id).await.unwrap();
    assert_eq!(events.iter().map(|e| (e.seq, e.at, e.state, e.end_reason)).collect::<Vec<_>>(), expected);
    assert_eq!(events[1].detail, "Creating to Running");
}

/// Of 64 tasks that make the same move, exactly one does.
pub async fn one_of_many_moves_wins(store: Arc<dyn Store>) {
    let id = insert(&*store, &sandbox_of(team(&*store).await, 0)).await;
    run(&*store, &id).await;
    let mut tasks = JoinSet::new();
    for task in 0..64 {
        let (store, id) = (Arc::clone(&store), id.clone());
        tasks.spawn(async move {
            let change = Transition {
                end_reason: Some(EndReason::Killed),
                detail: task.to_string(),
                ..step(S::Running, S::Ending, 200 + task)
            };
            (task, store.transition(&id, &change).await.unwrap())
        });
    }
    let winners: Vec<i64> =
        tasks.join_all().await.into_iter().filter(|(_, won)| *won).map(|(task, _)| task).collect();
    assert_eq!(winners.len(), 1);
    let events = store.events(&id).await.unwrap();
    assert_eq!(events.len(), 3);
    assert_eq!((events[2].detail.clone(), events[2].at), (winners[0].to_string(), at(200 + winners[0])));
}

/// Only a running sandbox whose time is not up has an end to move, and never past its latest.
pub async fn ends_move_only_while_running(store: Arc<dyn Store>) {
    let id = insert(&*store, &sandbox_of(team(&*store).await, 0)).await;
    let set = |end, only_later, now| {
        let (store, id) = (Arc::clone(&store), id.clone());
        async move { store.set_end(&id, at(end), only_later, at(now)).await.unwrap() }
    };
    assert_eq!(set(90_000, false, 1).await, None);
    run(&*store, &id).await;
    assert_eq!(set(90_000, false, 1).await, Some(at(90_000)));
    assert_eq!(set(80_000, true, 1).await, Some(at(90_000)));
    assert_eq!(set(95_000, true, 1).await, Some(at(95_000)));
    assert_eq!(set(9_999_999, true, 1).await, Some(at(3_600_000)));
    assert_eq!(set(70_000, false, 1).await, Some(at(70_000)));
    assert_eq!(store.sandbox(&id).await.unwrap().unwrap().end_at, at(70_000));
    assert_eq!(set(80_000, false, 70_000).await, None);
    assert_eq!(store.sandbox(&id).await.unwrap().unwrap().end_at, at(70_000));
    assert_eq!(store.set_end(&SandboxId::random(), at(5), false, at(1)).await.unwrap(), None);
    end(&*store, &id, S::Running, EndReason::Timeout).await;
    assert_eq!(set(80_000, false, 2).await, None);
}

/// A detail of any length is stored, up to the bound, at a character's boundary.
pub async fn long_details_are_cut(store: Arc<dyn Store>) {
    let id = insert(&*store, &sandbox_of(team(&*store).await, 0)).await;
    let detail = format!("a{}", "\u{e9}".repeat(MAX_DETAIL));
    let change = Transition { detail, ..step(S::Creating, S::Running, 1) };
    assert!(store.transition(&id, &change).await.unwrap());
    let kept = store.events(&id).await.unwrap().remove(1).detail;
    assert_eq!(kept.len(), MAX_DETAIL - 1);
    assert!(change.detail.starts_with(&kept));
}

/// However moves race, the history of a sandbox is numbered without gaps and agrees with its state.
pub async fn events_have_no_gaps(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let mut ids = Vec::new();
    for created in 0..4 {
        ids.push(insert(&*store, &sandbox_of(team, created)).await);
    }
    let mut tasks = JoinSet::new();
    for task in 0..8_i64 {
        for id in &ids {
            let (store, id) = (Arc::clone(&store), id.clone());
            tasks.spawn(async move {
                // Round and round: what is legal is not the store's business.
                for (from, to) in
                    [(S::Creating, S::Running), (S::Running, S::Ending), (S::Ending, S::Creating)]
                {
                    store.transition(&id, &step(from, to, task)).await.unwrap();
                }
            });
        }
    }
    tasks.join_all().await;
    for id in &ids {
        let events: Vec<Event> = store.events(id).await.unwrap();
        assert!(events.len() >= 4, "{events:?}");
        assert!(events.iter().zip(1..).all(|(event, seq)| event.seq == seq), "{events:?}");
        assert_eq!(events.last().unwrap().state, store.sandbox(id).await.unwrap().unwrap().state);
    }
}

/// A node's reconciler sees its own sandboxes alone, of all teams.
pub async fn a_node_finds_its_own(store: Arc<dyn Store>) {
    let node = NodeId::random();
    let first = team(&*store).await;
    let second = store.create_team("second", at(0)).await.unwrap().id;
    let a = insert(&*store, &NewSandbox { node, ..sandbox_of(first, 1) }).await;
    let b = insert(&*store, &NewSandbox { node, ..sandbox_of(second, 2) }).await;
    let c = insert(&*store, &NewSandbox { node, ..sandbox_of(first, 3) }).await;
    insert(&*store, &sandbox_of(first, 4)).await;
    run(&*store, &b).await;
    end(&*store, &c, S::Creating, EndReason::CreateFailed).await;
    let mut counts = store.count_on_node(node).await.unwrap();
    counts.sort_by_key(|(state, _)| *state == S::Running);
    assert_eq!(counts, [(S::Creating, 1), (S::Running, 1)]);
    assert_eq!(store.count_on_node(NodeId::random()).await.unwrap(), []);
    let ids = |rows: Vec<SandboxRow>| rows.into_iter().map(|row| row.id).collect::<Vec<_>>();
    let on = |states: &'static [S]| {
        let store = Arc::clone(&store);
        async move { store.on_node(node, states).await.unwrap() }
    };
    assert_eq!(ids(on(&[S::Creating, S::Running, S::Ending]).await), [a.clone(), b.clone()]);
    assert_eq!(ids(on(&[S::Ended]).await), [c]);
    assert_eq!(ids(on(&[S::Running]).await), [b]);
    assert_eq!(ids(on(&[]).await), []);
}
