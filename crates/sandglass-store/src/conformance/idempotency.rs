//! Create requests that come more than once.

use std::sync::Arc;

use sandglass_types::{EndReason, SandboxState as S, TeamId};
use tokio::task::JoinSet;

use super::{at, digest, end, insert, run, sandbox_of, team};
use crate::{Created, NewSandbox, Store};

fn keyed(team: TeamId, key: &str, request: u8, created: i64) -> NewSandbox {
    let idempotency = Some((key.parse().unwrap(), digest(request)));
    NewSandbox { idempotency, ..sandbox_of(team, created) }
}

/// While the first is being made, the second is told to wait; afterwards it gets the first one's sandbox, whatever
/// became of that since.
pub async fn same_request_is_replayed(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let first = insert(&*store, &keyed(team, "k", 1, 0)).await;
    let again = |created| {
        let store = Arc::clone(&store);
        async move { store.insert_sandbox(&keyed(team, "k", 1, created)).await.unwrap() }
    };
    let asked = ("k".parse().unwrap(), digest(1));
    let earlier = async || store.earlier(team, &asked).await.unwrap();
    assert_eq!((again(1).await, earlier().await), (Created::InProgress, Some(Created::InProgress)));
    run(&*store, &first).await;
    assert_eq!(again(2).await, Created::Replay(first.clone()));
    assert_eq!(earlier().await, Some(Created::Replay(first.clone())));
    let other = ("k".parse().unwrap(), digest(2));
    assert_eq!(store.earlier(team, &other).await.unwrap(), Some(Created::Mismatch));
    assert_eq!(store.earlier(team, &("free".parse().unwrap(), digest(1))).await.unwrap(), None);
    end(&*store, &first, S::Running, EndReason::Killed).await;
    assert_eq!(again(3).await, Created::Replay(first.clone()));
    let rows = store.list(&super::all_of(team)).await.unwrap().rows;
    assert_eq!(rows.len(), 1);
}

/// A key is never used for two different requests.
pub async fn other_request_is_a_mismatch(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let first = insert(&*store, &keyed(team, "k", 1, 0)).await;
    assert_eq!(store.insert_sandbox(&keyed(team, "k", 2, 1)).await.unwrap(), Created::Mismatch);
    run(&*store, &first).await;
    assert_eq!(store.insert_sandbox(&keyed(team, "k", 2, 2)).await.unwrap(), Created::Mismatch);
    assert_eq!(store.insert_sandbox(&keyed(team, "K", 2, 3)).await.unwrap(), Created::Inserted);
}

/// Teams choose their keys without knowing of each other.
pub async fn keys_belong_to_one_team(store: Arc<dyn Store>) {
    let first = team(&*store).await;
    let second = store.create_team("second", at(0)).await.unwrap().id;
    insert(&*store, &keyed(first, "k", 1, 0)).await;
    insert(&*store, &keyed(second, "k", 2, 0)).await;
    insert(&*store, &sandbox_of(first, 0)).await;
    insert(&*store, &sandbox_of(first, 0)).await;
}

/// A request whose sandbox never ran may be sent again, and then is the one that counts.
pub async fn a_failed_attempt_frees_the_key(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let first = insert(&*store, &keyed(team, "k", 1, 0)).await;
    end(&*store, &first, S::Creating, EndReason::CreateFailed).await;
    let second = insert(&*store, &keyed(team, "k", 1, 1)).await;
    end(&*store, &second, S::Creating, EndReason::Lost).await;
    let third = insert(&*store, &keyed(team, "k", 2, 2)).await;
    run(&*store, &third).await;
    assert_eq!(store.insert_sandbox(&keyed(team, "k", 2, 3)).await.unwrap(), Created::Replay(third));
    assert_eq!(store.insert_sandbox(&keyed(team, "k", 1, 3)).await.unwrap(), Created::Mismatch);
}

/// Keys older than a moment are forgotten, their sandboxes are not.
pub async fn old_keys_are_forgotten(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let old = insert(&*store, &keyed(team, "old", 1, 10)).await;
    insert(&*store, &keyed(team, "new", 1, 20)).await;
    assert_eq!(store.purge_idempotency(at(20)).await.unwrap(), 1);
    assert_eq!(store.purge_idempotency(at(20)).await.unwrap(), 0);
    assert!(store.sandbox(&old).await.unwrap().is_some());
    insert(&*store, &keyed(team, "old", 2, 30)).await;
    assert_eq!(store.insert_sandbox(&keyed(team, "new", 1, 30)).await.unwrap(), Created::InProgress);
}

/// Of many equal requests at the same time one makes a sandbox.
pub async fn one_of_many_requests_inserts(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let mut tasks = JoinSet::new();
    for task in 0..32 {
        let store = Arc::clone(&store);
        tasks.spawn(async move { store.insert_sandbox(&keyed(team, "k", 1, task)).await.unwrap() });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Created::Inserted).count(), 1);
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Created::InProgress).count(), 31);
}
