//! Which sandbox is whose.

use std::sync::Arc;

use sandglass_types::budget::Amount;
use sandglass_types::{EndReason, SandboxId, SandboxState, TeamId, UserName};

use super::{at, end, run, sandbox_of, team};
use crate::{Assignment, Created, NewSandbox, Store};

fn user(name: &str) -> UserName {
    name.parse().unwrap()
}

fn for_user(team: TeamId, name: &str, created: i64) -> NewSandbox {
    NewSandbox { assign_to: Some(user(name)), ..sandbox_of(team, created) }
}

/// A user has one sandbox until its end begins, whoever asks for another; the users of two teams are two.
pub async fn a_user_has_one_at_a_time(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let other = store.create_team("other", at(0)).await.unwrap().id;
    let first = for_user(team, "zoe", 1);
    assert_eq!(store.insert_sandbox(&first).await.unwrap(), Created::Inserted);
    let again = for_user(team, "zoe", 2);
    assert_eq!(store.insert_sandbox(&again).await.unwrap(), Created::Assigned(first.id.clone()));
    assert_eq!(store.sandbox(&again.id).await.unwrap(), None);
    // Even where there would be no room for it.
    let full = NewSandbox { quota: Amount::default(), ..for_user(team, "zoe", 2) };
    assert_eq!(store.insert_sandbox(&full).await.unwrap(), Created::Assigned(first.id.clone()));
    for new in [for_user(team, "bob", 3), for_user(other, "zoe", 3), sandbox_of(team, 3)] {
        assert_eq!(store.insert_sandbox(&new).await.unwrap(), Created::Inserted);
    }
    run(&*store, &first.id).await;
    end(&*store, &first.id, SandboxState::Running, EndReason::Killed).await;
    let next = for_user(team, "zoe", 500);
    assert_eq!(store.insert_sandbox(&next).await.unwrap(), Created::Inserted);
    let history = store.assignments(team, &user("zoe")).await.unwrap();
    assert_eq!(
        history,
        [
            Assignment { sandbox: next.id, since: at(500), until: None },
            Assignment { sandbox: first.id, since: at(1), until: Some(at(500)) },
        ]
    );
    assert_eq!(store.assignments(team, &user("nobody")).await.unwrap(), []);
}

/// Of many requests at once for one user, one makes a sandbox.
pub async fn of_many_at_once_one_is_assigned(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let asking = (0..16).map(|_| {
        let store = Arc::clone(&store);
        async move {
            let new = for_user(team, "zoe", 1);
            (new.id.clone(), store.insert_sandbox(&new).await.unwrap())
        }
    });
    let mut answers: Vec<(SandboxId, Created)> = Vec::new();
    let mut tasks = tokio::task::JoinSet::new();
    for ask in asking {
        tasks.spawn(ask);
    }
    while let Some(answer) = tasks.join_next().await {
        answers.push(answer.unwrap());
    }
    let made: Vec<_> = answers.iter().filter(|(_, created)| *created == Created::Inserted).collect();
    let [(id, _)] = made[..] else { panic!("{answers:?}") };
    let assigned = Created::Assigned(id.clone());
    assert_eq!(answers.iter().filter(|(_, created)| *created == assigned).count(), 15, "{answers:?}");
}

/// What was released is free, and history; and of that only so much is kept.
pub async fn a_release_ends_it_and_history_is_bounded(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let zoe = user("zoe");
    assert!(!store.release(team, &zoe, at(1)).await.unwrap());
    for n in 0..105 {
        let new = for_user(team, "zoe", n);
        assert_eq!(store.insert_sandbox(&new).await.unwrap(), Created::Inserted);
        assert!(store.release(team, &zoe, at(n)).await.unwrap());
        assert!(!store.release(team, &zoe, at(n)).await.unwrap());
    }
    let history = store.assignments(team, &zoe).await.unwrap();
    assert_eq!(history.len(), 100);
    assert_eq!((history[0].since, history[0].until), (at(104), Some(at(104))));
}
