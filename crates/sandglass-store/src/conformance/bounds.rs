//! What a team and a machine may have together.

use std::sync::Arc;

use sandglass_types::budget::{Amount, Excess, Resource};
use sandglass_types::limits::Unchecked;
use sandglass_types::{EndReason, Limits, NodeId, SandboxId, SandboxState as S, TeamId};
use tokio::task::JoinSet;

use super::{at, digest, end, insert, run, sandbox_of, step, team};
use crate::{Created, NewSandbox, Resume, Resumed, Store};

fn bounded(team: TeamId, quota: Amount) -> NewSandbox {
    NewSandbox { quota, ..sandbox_of(team, 0) }
}

fn sandboxes(sandboxes: u64) -> Amount {
    Amount { sandboxes, ..Amount::UNBOUNDED }
}

/// Every resource of a quota counts for itself, and says what is in use of it.
pub async fn a_quota_is_filled_to_the_last_and_not_beyond(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let other = store.create_team("other", at(0)).await.unwrap().id;
    let small = Unchecked { cpus: 3, memory_mib: 512, disk_mib: 100, processes: 16 };
    let small = Limits::try_from(small).unwrap();
    insert(&*store, &NewSandbox { limits: small, ..sandbox_of(team, 0) }).await;
    insert(&*store, &sandbox_of(other, 0)).await;
    let with = async |quota| store.insert_sandbox(&bounded(team, quota)).await.unwrap();
    let excess =
        |resource, budget, in_use, asked| Created::OverQuota(Excess { resource, budget, in_use, asked });
    let unbounded = Amount::UNBOUNDED;
    assert_eq!(with(sandboxes(1)).await, excess(Resource::Sandboxes, 1, 1, 1));
    assert_eq!(with(Amount { cpus: 4, ..unbounded }).await, excess(Resource::Cpus, 4, 3, 2));
    assert_eq!(
        with(Amount { memory_mib: 1535, ..unbounded }).await,
        excess(Resource::Memory, 1535, 512, 1024)
    );
    assert_eq!(with(Amount { disk_mib: 4195, ..unbounded }).await, excess(Resource::Disk, 4195, 100, 4096));
    let exact = Amount { sandboxes: 2, cpus: 5, memory_mib: 1536, disk_mib: 4196 };
    assert_eq!(with(exact).await, Created::Inserted);
    assert!(matches!(with(exact).await, Created::OverQuota(_)));
    let rows = store.list(&super::all_of(team)).await.unwrap().rows;
    assert_eq!(rows.len(), 2, "what was refused left a row");
}

/// Of 200 requests at the same time exactly as many get a sandbox as there may be.
pub async fn of_many_at_once_as_many_fit_as_fit(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let mut tasks = JoinSet::new();
    for _ in 0..200 {
        let store = Arc::clone(&store);
        tasks.spawn(async move { store.insert_sandbox(&bounded(team, sandboxes(17))).await.unwrap() });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Created::Inserted).count(), 17);
    let full = Excess { resource: Resource::Sandboxes, budget: 17, in_use: 17, asked: 1 };
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Created::OverQuota(full)).count(), 183);
}

/// A team has room again as soon as an end has begun, the machine when nothing of the sandbox is left.
pub async fn what_ends_makes_room(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let node = NodeId::random();
    let new = |quota, capacity| NewSandbox { node, quota, capacity, ..sandbox_of(team, 0) };
    let first = insert(&*store, &new(sandboxes(1), sandboxes(1))).await;
    run(&*store, &first).await;
    let again = async |quota, capacity| store.insert_sandbox(&new(quota, capacity)).await.unwrap();
    assert!(matches!(again(sandboxes(1), sandboxes(1)).await, Created::OverQuota(_)));
    let full = Excess { resource: Resource::Sandboxes, budget: 1, in_use: 1, asked: 1 };
    let outcome = again(sandboxes(2), sandboxes(1)).await;
    assert_eq!(outcome, Created::OverCapacity { excess: full, soon: false });
    store.transition(&first, &step(S::Running, S::Ending, 1)).await.unwrap();
    let outcome = again(sandboxes(1), sandboxes(1)).await;
    assert_eq!(outcome, Created::OverCapacity { excess: full, soon: true });
    store.transition(&first, &step(S::Ending, S::Ended, 2)).await.unwrap();
    assert_eq!(again(sandboxes(1), sandboxes(1)).await, Created::Inserted);
}

/// A machine's sandboxes count together, whosever they are, and those of another machine do not.
pub async fn the_machine_is_shared_by_all_teams_and_no_other_machine(store: Arc<dyn Store>) {
    let first = team(&*store).await;
    let second = store.create_team("second", at(0)).await.unwrap().id;
    let (here, there) = (NodeId::random(), NodeId::random());
    let new = |team, node| NewSandbox { node, capacity: sandboxes(2), ..sandbox_of(team, 0) };
    insert(&*store, &new(first, here)).await;
    insert(&*store, &new(second, here)).await;
    let outcome = store.insert_sandbox(&new(first, here)).await.unwrap();
    assert!(matches!(outcome, Created::OverCapacity { soon: false, .. }), "{outcome:?}");
    insert(&*store, &new(first, there)).await;
}

/// A client that asks again, because it did not hear the answer, gets its sandbox although there is no room for another.
pub async fn a_repeated_request_is_answered_at_the_bound_too(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let new = || NewSandbox {
        idempotency: Some(("k".parse().unwrap(), digest(1))),
        capacity: sandboxes(1),
        ..bounded(team, sandboxes(1))
    };
    let first = insert(&*store, &new()).await;
    run(&*store, &first).await;
    assert_eq!(store.insert_sandbox(&new()).await.unwrap(), Created::Replay(first.clone()));
    end(&*store, &first, S::Running, EndReason::Killed).await;
}

/// A paused sandbox holds room on the disk and nothing else; it runs again in its next generation, if there is room for it.
pub async fn a_paused_sandbox_runs_again_where_there_is_room(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let node = NodeId::random();
    let new = || NewSandbox { node, ..bounded(team, sandboxes(1)) };
    let first = insert(&*store, &new()).await;
    let resume = |quota, capacity| Resume {
        at: at(9),
        end_at: at(90),
        max_end_at: at(80),
        quota,
        capacity,
        detail: "why".into(),
    };
    let again = async |quota, capacity| store.resume(&first, &resume(quota, capacity)).await.unwrap();
    run(&*store, &first).await;
    assert_eq!(again(sandboxes(1), sandboxes(1)).await, Resumed::NotPaused);
    for (from, to) in [(S::Running, S::Pausing), (S::Pausing, S::Paused)] {
        assert!(store.transition(&first, &step(from, to, 1)).await.unwrap());
    }
    let moved = store.set_end(&first, at(50), false, at(2)).await.unwrap();
    assert_eq!(moved, None, "nothing ends it while it is paused");
    let held = Amount { disk_mib: 5120, ..Amount::default() };
    assert_eq!(store.in_use(node).await.unwrap(), held);
    let disk = Amount { disk_mib: 4096, ..Amount::UNBOUNDED };
    let full = store.insert_sandbox(&NewSandbox { capacity: disk, ..new() }).await.unwrap();
    let excess = Excess { resource: Resource::Disk, budget: 4096, in_use: 5120, asked: 4096 };
    assert_eq!(full, Created::OverCapacity { excess, soon: false }, "its image is held");
    let second = insert(&*store, &NewSandbox { capacity: sandboxes(1), ..new() }).await;
    let excess = Excess { resource: Resource::Sandboxes, budget: 1, in_use: 1, asked: 1 };
    assert_eq!(again(sandboxes(1), sandboxes(2)).await, Resumed::OverQuota(excess));
    let outcome = again(sandboxes(2), sandboxes(1)).await;
    assert_eq!(outcome, Resumed::OverCapacity { excess, soon: false });
    run(&*store, &second).await;
    store.transition(&second, &step(S::Running, S::Ending, 1)).await.unwrap();
    let outcome = again(sandboxes(1), sandboxes(1)).await;
    assert_eq!(outcome, Resumed::OverCapacity { excess, soon: true });
    // The disk is its own already.
    let Resumed::Begun(row) = again(sandboxes(1), Amount { disk_mib: 0, ..Amount::UNBOUNDED }).await else {
        panic!("it is not resumed");
    };
    assert_eq!(store.sandbox(&first).await.unwrap().as_ref(), Some(&*row));
    assert_eq!((row.state, row.generation.0), (S::Resuming, 2));
    assert_eq!((row.end_at, row.max_end_at), (at(80), at(80)));
    let last = store.events(&first).await.unwrap().pop().unwrap();
    assert_eq!((last.seq, last.at, last.state), (5, at(9), S::Resuming));
    assert_eq!(again(sandboxes(1), sandboxes(1)).await, Resumed::NotPaused);
    assert_eq!(store.resume(&SandboxId::random(), &resume(disk, disk)).await.unwrap(), Resumed::NotPaused);
}
