//! What teams had.

use std::sync::Arc;
use std::time::Duration;

use sandglass_types::{EndReason, NodeId, SandboxState, TeamId};

use super::{at, end, sandbox_of, team};
use crate::{NewSandbox, Store, TeamSample};

fn sample(millis: i64, concurrent: u32, made: u32, span: u64) -> TeamSample {
    TeamSample { at: at(millis), concurrent, made, span: Duration::from_millis(span) }
}

/// What is there at the time of the look, and what came since the one before; of a team that has nothing, one more look.
pub async fn what_a_team_had_is_counted_until_it_has_nothing(store: Arc<dyn Store>) {
    let own = team(&*store).await;
    let other = store.create_team("another", at(0)).await.unwrap().id;
    let node = NodeId::random();
    let made_at = |team: TeamId, millis| NewSandbox { node, ..sandbox_of(team, millis) };
    let (one, two) = (made_at(own, 1_000), made_at(own, 60_000));
    for new in [&one, &two, &made_at(other, 61_000)] {
        store.insert_sandbox(new).await.unwrap();
    }
    // Of another machine.
    store.insert_sandbox(&sandbox_of(own, 2_000)).await.unwrap();
    store.sample_teams(node, at(0), at(60_000)).await.unwrap();
    // The same time says nothing new, and neither does a clock that stands still or goes back.
    store.sample_teams(node, at(0), at(60_000)).await.unwrap();
    store.sample_teams(node, at(60_000), at(60_000)).await.unwrap();
    store.sample_teams(node, at(60_000), at(50_000)).await.unwrap();
    end(&*store, &one.id, SandboxState::Creating, EndReason::Killed).await;
    store.sample_teams(node, at(60_000), at(120_000)).await.unwrap();
    end(&*store, &two.id, SandboxState::Creating, EndReason::Killed).await;
    for minute in 2..5 {
        store.sample_teams(node, at(minute * 60_000), at((minute + 1) * 60_000)).await.unwrap();
    }
    let all = store.team_samples(own, None, None).await.unwrap();
    assert_eq!(
        all,
        [sample(60_000, 2, 2, 60_000), sample(120_000, 1, 0, 60_000), sample(180_000, 0, 0, 60_000)]
    );
    let window = store.team_samples(own, Some(at(120_000)), Some(at(120_000))).await.unwrap();
    assert_eq!(window, all[1..2]);
    let theirs = store.team_samples(other, None, None).await.unwrap();
    assert_eq!(theirs[..2], [sample(60_000, 1, 0, 60_000), sample(120_000, 1, 1, 60_000)]);
    assert_eq!(store.team_samples(TeamId::random(), None, None).await.unwrap(), []);
}

/// They are kept for a time.
pub async fn old_ones_are_forgotten(store: Arc<dyn Store>) {
    let own = team(&*store).await;
    let node = NodeId::random();
    store.insert_sandbox(&NewSandbox { node, ..sandbox_of(own, 1) }).await.unwrap();
    for minute in 0..3 {
        store.sample_teams(node, at(minute * 60_000), at((minute + 1) * 60_000)).await.unwrap();
    }
    assert_eq!(store.purge_team_samples(at(120_000)).await.unwrap(), 1);
    let left = store.team_samples(own, None, None).await.unwrap();
    assert_eq!(left.iter().map(|sample| sample.at).collect::<Vec<_>>(), [at(120_000), at(180_000)]);
}
