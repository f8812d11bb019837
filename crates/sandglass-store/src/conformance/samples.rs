//! What sandboxes used.

use std::sync::Arc;

use sandglass_types::{EndReason, SandboxId, SandboxState};

use super::{at, end, insert, run, sandbox_of, step, team};
use crate::{Sample, Store};

fn sample(sandbox: &SandboxId, millis: i64) -> Sample {
    Sample {
        sandbox: sandbox.clone(),
        at: at(millis),
        cpu_per_mille: 500,
        memory_bytes: 1 << 40,
        disk_bytes: 7,
    }
}

/// A window has both of its ends, and one sandbox's samples are not another's.
pub async fn a_window_of_one_sandbox(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let one = insert(&*store, &sandbox_of(team, 0)).await;
    let other = insert(&*store, &sandbox_of(team, 0)).await;
    let times = [10_000, 15_000, 20_000];
    for time in times {
        store.record_samples(&[sample(&one, time), sample(&other, time + 1)]).await.unwrap();
    }
    let all = store.samples(&one, None, None).await.unwrap();
    assert_eq!(all, times.map(|time| sample(&one, time)));
    let window = store.samples(&one, Some(at(15_000)), Some(at(20_000))).await.unwrap();
    assert_eq!(window, all[1..]);
    assert_eq!(store.samples(&one, Some(at(20_001)), None).await.unwrap(), []);
    // A time that is there already, and a sandbox that is not.
    let again = Sample { cpu_per_mille: 1, ..sample(&one, 10_000) };
    store.record_samples(&[again, sample(&SandboxId::random(), 1)]).await.unwrap();
    assert_eq!(store.samples(&one, None, None).await.unwrap(), all);
}

/// Those that are asked for, of those that are the team's and there.
pub async fn the_last_of_many_are_a_team_s_own(store: Arc<dyn Store>) {
    let own = team(&*store).await;
    let other = store.create_team("another", at(0)).await.unwrap().id;
    let made = [own, own, own, own, other].map(|team| sandbox_of(team, 0));
    for new in &made {
        insert(&*store, new).await;
        run(&*store, &new.id).await;
    }
    let [seen, paused, ended, unseen, foreign] = made.each_ref().map(|new| new.id.clone());
    for time in [5_000, 10_000] {
        let samples = [&seen, &paused, &ended, &foreign].map(|id| sample(id, time));
        store.record_samples(&samples).await.unwrap();
    }
    assert!(
        store.transition(&paused, &step(SandboxState::Running, SandboxState::Paused, 200)).await.unwrap()
    );
    end(&*store, &ended, SandboxState::Running, EndReason::Killed).await;
    let asked = [seen.clone(), paused.clone(), ended, unseen, foreign, SandboxId::random()];
    let mut found = store.last_samples(own, &asked).await.unwrap();
    found.sort_by_key(|(_, sample)| asked.iter().position(|id| *id == sample.sandbox));
    assert_eq!(found, [&seen, &paused].map(|id| (made[0].limits, sample(id, 10_000))));
    assert_eq!(store.last_samples(own, &asked[..1]).await.unwrap().len(), 1);
    assert_eq!(store.last_samples(own, &[]).await.unwrap(), []);
}

/// Of what is not new the first of each minute stays, for a time.
pub async fn older_samples_are_thinned_out(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let one = insert(&*store, &sandbox_of(team, 0)).await;
    let other = insert(&*store, &sandbox_of(team, 0)).await;
    // Minutes begin at 40 seconds here.
    let samples: Vec<_> = [39_000, 41_000, 45_000, 99_000, 101_000, 105_000, 160_000, 165_000]
        .into_iter()
        .map(|time| sample(&one, time))
        .chain([sample(&other, 65_000)])
        .collect();
    store.record_samples(&samples).await.unwrap();
    store.thin_samples(at(160_000), at(40_000)).await.unwrap();
    let kept = |samples: Vec<Sample>| samples.iter().map(|sample| sample.at).collect::<Vec<_>>();
    let left = kept(store.samples(&one, None, None).await.unwrap());
    assert_eq!(left, [41_000, 101_000, 160_000, 165_000].map(at));
    assert_eq!(kept(store.samples(&other, None, None).await.unwrap()), [at(65_000)]);
    // Nothing more the next time.
    assert_eq!(store.thin_samples(at(160_000), at(40_000)).await.unwrap(), 0);
}
