//! Runs: admitted with their money, moved with their events, and forgotten.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sandglass_types::run::{Agent, Command, Retention, RunSpec, Web};
use sandglass_types::{
    BudgetId, Micros, NodeId, RunId, RunSandbox as B, RunStatus as S, SandboxId, StopReason, TeamId,
};
use serde_json::json;
use tokio::task::JoinSet;

use super::{at, digest, team};
use crate::{
    Artifact, Compute, NewBudget, NewRun, NewRunEvent, RunAdmitted, RunChange, RunFilter, Source, Store,
};

fn event(kind: &str, millis: i64) -> NewRunEvent {
    NewRunEvent { at: at(millis), source: Source::Host, kind: kind.into(), data: json!({"a": [1, "\u{fc}"]}) }
}

pub(crate) fn run_of(team: TeamId, created: i64) -> NewRun {
    NewRun {
        id: RunId::random(),
        node: NodeId::random(),
        team,
        budget: NewBudget {
            id: BudgetId::random(),
            team,
            most: Micros(100),
            prices: digest(3),
            with_sandboxes: false,
            created_at: at(created),
        },
        spec: RunSpec {
            template: "base".into(),
            outputs: vec!["**/*.js".parse().unwrap()],
            web: Web::Only(vec!["example.com".into()]),
            shell: true,
            agent: Agent::Command(Command::words(vec!["ls".into()]).unwrap()),
            model: "large".parse().ok(),
            timeout: Duration::from_secs(60),
            most: Micros(100),
            retention: Retention::Full,
            retention_days: 30,
            metadata: BTreeMap::from([("k".into(), "v".into())]),
            checks: Vec::new(),
            max_repairs: 2,
        },
        prompt: Some("make it".into()),
        prompt_bytes: 7,
        created_at: at(created),
        forget_at: at(created + 1000),
        idempotency: None,
        most_under_way: 10,
        events: vec![event("run.queued", created), event("budget.reserved", created)],
    }
}

fn keyed(team: TeamId, key: &str, request: u8) -> NewRun {
    NewRun { idempotency: Some((key.parse().unwrap(), digest(request))), ..run_of(team, 0) }
}

async fn inserted(store: &dyn Store, new: &NewRun) -> RunId {
    assert_eq!(store.insert_run(new).await.unwrap(), RunAdmitted::Inserted);
    new.id.clone()
}

fn to(from: S, to: S) -> RunChange {
    RunChange::between(from, to, at(5))
}

/// Ends a run that is queued.
pub(crate) async fn ended(store: &dyn Store, id: &RunId) {
    let stop = Some((StopReason::Cancelled, "somebody wanted that".to_owned()));
    let stopping = RunChange { stop, ..to(S::Queued, S::Finalizing) };
    assert!(store.change_run(id, &stopping).await.unwrap());
    assert!(store.change_run(id, &to(S::Finalizing, S::Cancelled)).await.unwrap());
}

/// Nothing is lost or changed on the way, and every step is one way.
pub async fn a_run_goes_its_way_with_its_events(store: Arc<dyn Store>) {
    let store = &*store;
    let new = run_of(team(store).await, 1);
    let id = inserted(store, &new).await;
    let row = store.run(&id).await.unwrap().unwrap();
    assert_eq!((row.node, row.team, row.status, row.sandbox), (new.node, new.team, S::Queued, B::None));
    assert_eq!((&row.spec, row.prompt.as_deref(), row.prompt_bytes), (&new.spec, Some("make it"), 7));
    assert_eq!((row.created_at, row.started_at, row.ended_at, row.last_seq), (at(1), None, None, 2));
    assert_eq!(store.budget(&row.budget).await.unwrap().unwrap().most, Micros(100));
    assert_eq!(store.runs_under_way(new.node).await.unwrap(), [row]);

    let (sandbox, other) = (SandboxId::random(), RunId::random());
    let booting = RunChange { sandbox: Some(B::Booting), ..to(S::Queued, S::Provisioning) };
    assert!(store.change_run(&id, &booting).await.unwrap());
    assert!(!store.change_run(&id, &booting).await.unwrap(), "it is not there any more");
    assert!(!store.change_run(&other, &booting).await.unwrap(), "there is none");
    let ready = RunChange {
        sandbox: Some(B::Ready),
        sandbox_id: Some(sandbox.clone()),
        begins: true,
        events: vec![event("sandbox.ready", 6), event("turn.started", 7)],
        ..to(S::Provisioning, S::Running)
    };
    assert!(store.change_run(&id, &ready).await.unwrap());
    let row = store.run_of_sandbox(&sandbox).await.unwrap().unwrap();
    assert_eq!((row.id.clone(), row.turns, row.started_at, row.last_seq), (id.clone(), 1, Some(at(5)), 4));
    assert!(store.note_run(&id, &[event("shell.output", 8)]).await.unwrap());
    let back = RunChange { sandbox: Some(B::Booting), ..to(S::Running, S::Running) };
    assert!(!store.change_run(&id, &back).await.unwrap(), "a sandbox goes one way");
    let stop = |reason, text: &str| Some((reason, text.to_owned()));
    let stopping = RunChange {
        stop: stop(StopReason::Timeout, "its time was up"),
        sandbox: Some(B::Destroying),
        ..to(S::Running, S::Finalizing)
    };
    assert!(store.change_run(&id, &stopping).await.unwrap());
    assert!(!store.change_run(&id, &to(S::Finalizing, S::Failed)).await.unwrap(), "its sandbox is there");
    let compute = Compute { cpu_millis: 1, gib_millis: 2, charged: Micros(3) };
    let destroyed = RunChange {
        sandbox: Some(B::Destroyed),
        compute: Some(compute),
        collected: true,
        stop: stop(StopReason::Cancelled, "too late"),
        ..to(S::Finalizing, S::Finalizing)
    };
    assert!(store.change_run(&id, &destroyed).await.unwrap());
    let last = RunChange { events: vec![event("run.failed", 9)], ..to(S::Finalizing, S::Failed) };
    assert!(store.change_run(&id, &last).await.unwrap());
    let row = store.run(&id).await.unwrap().unwrap();
    assert_eq!(
        (row.stop_reason, row.detail.as_deref()),
        (Some(StopReason::Timeout), Some("its time was up"))
    );
    assert_eq!((row.ended_at, row.compute, row.turns), (Some(at(5)), Some(compute), 1));
    assert_eq!(row.collected_at, Some(at(5)));
    assert!(!store.note_run(&id, &[event("shell.output", 8)]).await.unwrap(), "nothing follows its end");
    assert!(store.runs_under_way(new.node).await.unwrap().is_empty());

    let events = store.run_events(&id, 0, 100).await.unwrap();
    let kinds: Vec<_> = events.iter().map(|row| (row.seq, row.event.kind.as_str())).collect();
    let expected =
        ["run.queued", "budget.reserved", "sandbox.ready", "turn.started", "shell.output", "run.failed"];
    assert_eq!(kinds, (1..).zip(expected).collect::<Vec<_>>());
    assert_eq!(events[4].event, event("shell.output", 8));
    let some = store.run_events(&id, 2, 2).await.unwrap();
    assert_eq!(some.iter().map(|row| row.seq).collect::<Vec<_>>(), [3, 4]);
}

/// However many write at once, numbers have no gaps.
pub async fn events_of_many_writers_have_no_gaps(store: Arc<dyn Store>) {
    let id = inserted(&*store, &run_of(team(&*store).await, 1)).await;
    let mut tasks = JoinSet::new();
    for _ in 0..16 {
        let (store, id) = (Arc::clone(&store), id.clone());
        let events = [event("a", 1), event("b", 1), event("c", 1)];
        tasks.spawn(async move { store.note_run(&id, &events).await.unwrap() });
    }
    assert!(tasks.join_all().await.into_iter().all(|noted| noted));
    let events = store.run_events(&id, 0, 100).await.unwrap();
    assert_eq!(events.iter().map(|row| row.seq).collect::<Vec<_>>(), (1..=50).collect::<Vec<_>>());
    assert!(events[2..].chunks(3).all(|three| three.iter().map(|row| &*row.event.kind).eq(["a", "b", "c"])));
}

/// A request that comes twice makes one run, and another one under its key makes none.
pub async fn a_request_makes_one_run(store: Arc<dyn Store>) {
    let one = team(&*store).await;
    let other = store.create_team("another", at(0)).await.unwrap().id;
    let mut tasks = JoinSet::new();
    for _ in 0..16 {
        let store = Arc::clone(&store);
        tasks.spawn(async move { store.insert_run(&keyed(one, "k", 1)).await.unwrap() });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == RunAdmitted::Inserted).count(), 1);
    let filter = RunFilter { team: one, statuses: Vec::new(), after: None, limit: 100 };
    let [row] = &*store.runs(&filter).await.unwrap().rows else { panic!("one run") };
    let replay = RunAdmitted::Replay(row.id.clone());
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == replay).count(), 15);
    assert_eq!(store.insert_run(&keyed(one, "k", 2)).await.unwrap(), RunAdmitted::Mismatch);
    inserted(&*store, &keyed(other, "k", 2)).await;
    ended(&*store, &row.id).await;
    assert_eq!(store.insert_run(&keyed(one, "k", 1)).await.unwrap(), replay, "whatever became of it");
    assert_eq!(store.purge_idempotency(at(1)).await.unwrap(), 2);
    inserted(&*store, &keyed(one, "k", 2)).await;
}

/// Up to the bound and not beyond, and a refused run has no budget.
pub async fn a_team_has_so_many_runs_under_way(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("another", at(0)).await.unwrap().id);
    let of = |team| NewRun { most_under_way: 2, ..run_of(team, 0) };
    let first = inserted(store, &of(one)).await;
    inserted(store, &of(one)).await;
    let refused = of(one);
    assert_eq!(store.insert_run(&refused).await.unwrap(), RunAdmitted::TooMany(2));
    assert_eq!(store.budget(&refused.budget.id).await.unwrap(), None);
    inserted(store, &of(other)).await;
    ended(store, &first).await;
    inserted(store, &of(one)).await;
}

/// Somebody wants it once, and what has ended is as it was.
pub async fn a_run_is_cancelled_once(store: Arc<dyn Store>) {
    let store = &*store;
    let new = run_of(team(store).await, 1);
    let id = inserted(store, &new).await;
    let wanted = event("run.cancel_requested", 3);
    assert!(store.cancel_run(&id, &wanted).await.unwrap());
    assert!(!store.cancel_run(&id, &event("run.cancel_requested", 4)).await.unwrap());
    let row = store.run(&id).await.unwrap().unwrap();
    assert_eq!((row.cancelled_at, row.last_seq, row.status), (Some(at(3)), 3, S::Queued));
    let other = inserted(store, &run_of(new.team, 1)).await;
    ended(store, &other).await;
    assert!(!store.cancel_run(&other, &wanted).await.unwrap());
    assert!(!store.cancel_run(&RunId::random(), &wanted).await.unwrap());
}

/// Pages are a team's own, newest first, and of the statuses that are asked for.
pub async fn runs_are_listed_in_pages(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("another", at(0)).await.unwrap().id);
    let mut all = Vec::new();
    for created in 0..5 {
        all.push(inserted(store, &run_of(one, created)).await);
    }
    inserted(store, &run_of(other, 9)).await;
    ended(store, &all[1]).await;
    let mut filter = RunFilter { team: one, statuses: Vec::new(), after: None, limit: 2 };
    let mut seen = Vec::new();
    loop {
        let page = store.runs(&filter).await.unwrap();
        seen.extend(page.rows.into_iter().map(|row| row.id));
        filter.after = page.next;
        if filter.after.is_none() {
            break;
        }
    }
    assert!(seen.iter().eq(all.iter().rev()));
    filter.statuses = vec![S::Cancelled, S::Failed];
    let rows = store.runs(&filter).await.unwrap().rows;
    assert_eq!(rows.into_iter().map(|row| row.id).collect::<Vec<_>>(), [all[1].clone()]);
}

/// What a run left comes back, piece by piece, or without what must not be kept.
pub async fn artifacts_come_back_as_they_were(store: Arc<dyn Store>) {
    let store = &*store;
    let id = inserted(store, &run_of(team(store).await, 1)).await;
    let content: Vec<u8> = (0..crate::model::PIECE + 7).map(|n| u8::try_from(n % 251).unwrap()).collect();
    let size = content.len() as u64;
    let file = Artifact {
        number: 1,
        path: Some("a/\u{fc} b.js".into()),
        mode: 0o755,
        size,
        sha256: Some(digest(4)),
    };
    store.keep_artifact(&id, &file, &content).await.unwrap();
    let bare = Artifact { number: 2, path: None, mode: 0o644, size: 9, sha256: None };
    store.keep_artifact(&id, &bare, &[]).await.unwrap();
    let again = Artifact { number: 3, ..file.clone() };
    assert!(store.keep_artifact(&id, &again, &[]).await.is_err(), "a path is one file's");
    assert_eq!(store.artifacts(&id).await.unwrap(), [file.clone(), bare]);
    let piece = async |piece| store.artifact_piece(&id, 1, piece).await.unwrap();
    let both = [piece(0).await.unwrap(), piece(1).await.unwrap()].concat();
    assert!(both == content && piece(2).await.is_none());
    store.drop_artifacts(&id).await.unwrap();
    assert!(store.artifacts(&id).await.unwrap().is_empty() && piece(0).await.is_none());
    store.keep_artifact(&id, &file, &content).await.unwrap();
}

/// Nothing is left of a run whose time has come but its money.
pub async fn old_runs_are_forgotten_and_their_money_is_not(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let [old, young, under_way] = [run_of(team, 0), run_of(team, 1), run_of(team, 0)];
    for new in [&old, &young, &under_way] {
        inserted(store, new).await;
    }
    let file = Artifact { number: 1, path: Some("a".into()), mode: 0o644, size: 1, sha256: None };
    store.keep_artifact(&old.id, &file, b"x").await.unwrap();
    for id in [&old.id, &young.id] {
        ended(store, id).await;
    }
    assert_eq!(store.forget_runs(at(1000)).await.unwrap(), 1);
    assert_eq!(store.forget_runs(at(1000)).await.unwrap(), 0);
    assert_eq!(store.run(&old.id).await.unwrap(), None);
    assert!(store.run_events(&old.id, 0, 9).await.unwrap().is_empty());
    assert!(store.artifacts(&old.id).await.unwrap().is_empty());
    assert_eq!(store.artifact_piece(&old.id, 1, 0).await.unwrap(), None);
    assert!(store.budget(&old.budget.id).await.unwrap().is_some());
    assert!(
        store.run(&young.id).await.unwrap().is_some() && store.run(&under_way.id).await.unwrap().is_some()
    );
}
