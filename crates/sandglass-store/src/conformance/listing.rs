//! Lists: filters and pages.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use sandglass_types::{EndReason, SandboxId, SandboxState as S, TeamId};

use super::{all_of, at, end, insert, run, sandbox_of, team};
use crate::{ListFilter, NewSandbox, Order, Store};

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

async fn ids(store: &dyn Store, filter: &ListFilter) -> Vec<SandboxId> {
    store.list(filter).await.unwrap().rows.into_iter().map(|row| row.id).collect()
}

/// Every part of a filter narrows the list, and no team sees another's.
pub async fn filters_apply_together(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let other = store.create_team("other", at(0)).await.unwrap().id;
    insert(store, &sandbox_of(other, 0)).await;
    let a = insert(store, &NewSandbox { metadata: labels(&[("x", "1"), ("y", "2")]), ..sandbox_of(team, 1) })
        .await;
    let b = insert(store, &NewSandbox { metadata: labels(&[("x", "1")]), ..sandbox_of(team, 2) }).await;
    let c = insert(store, &NewSandbox { template: "python".into(), ..sandbox_of(team, 3) }).await;
    run(store, &b).await;
    end(store, &c, S::Creating, EndReason::CreateFailed).await;

    let all = all_of(team);
    assert_eq!(ids(store, &all).await, [c.clone(), b.clone(), a.clone()]);
    let up = ListFilter { order: Order::Ascending, ..all.clone() };
    assert_eq!(ids(store, &up).await, [a.clone(), b.clone(), c.clone()]);
    assert_eq!(ids(store, &ListFilter { states: vec![], ..all.clone() }).await, []);
    assert_eq!(
        ids(store, &ListFilter { states: vec![S::Running], ..all.clone() }).await,
        std::slice::from_ref(&b)
    );
    let live = ListFilter { states: vec![S::Creating, S::Running], ..all.clone() };
    assert_eq!(ids(store, &live).await, [b.clone(), a.clone()]);
    assert_eq!(
        ids(store, &ListFilter { template: Some("python".into()), ..all.clone() }).await,
        std::slice::from_ref(&c)
    );
    assert_eq!(
        ids(store, &ListFilter { created_from: Some(at(2)), ..all.clone() }).await,
        [c.clone(), b.clone()]
    );
    let x = ListFilter { metadata: labels(&[("x", "1")]), ..all.clone() };
    assert_eq!(ids(store, &x).await, [b.clone(), a.clone()]);
    assert_eq!(
        ids(store, &ListFilter { states: vec![S::Creating], ..x.clone() }).await,
        std::slice::from_ref(&a)
    );
    let both = ListFilter { metadata: labels(&[("x", "1"), ("y", "2")]), ..all.clone() };
    assert_eq!(ids(store, &both).await, [a]);
    let crossed = ListFilter { metadata: labels(&[("x", "2")]), ..all.clone() };
    assert_eq!(ids(store, &crossed).await, []);
    assert_eq!(ids(store, &ListFilter { team: TeamId::random(), ..all }).await, []);
}

/// A label's text means nothing to the store.
pub async fn labels_are_any_text(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let odd = [
        "",
        "'",
        "\"",
        "\\",
        "$.x[0]",
        "%",
        "_",
        "a",
        "A",
        "\u{e9}",
        "e\u{301}",
        "\u{1F600}",
        "' OR 1=1 --",
        "1",
    ];
    let mut of = BTreeMap::new();
    for text in odd {
        for metadata in [labels(&[(text, "v")]), labels(&[("k", text)])] {
            let id = insert(store, &NewSandbox { metadata: metadata.clone(), ..sandbox_of(team, 0) }).await;
            of.insert(metadata, id);
        }
    }
    for (metadata, id) in of {
        let filter = ListFilter { metadata: metadata.clone(), ..all_of(team) };
        assert_eq!(ids(store, &filter).await, [id], "{metadata:?}");
    }
    // More pairs than any sandbox has are no error either.
    let many = (0..2_000).map(|n| (n.to_string(), String::new())).collect();
    assert_eq!(ids(store, &ListFilter { metadata: many, ..all_of(team) }).await, []);
}

/// A page has at least one row and at most a hundred, whatever is asked for.
pub async fn limits_are_clamped(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    for created in 0..101 {
        insert(&*store, &sandbox_of(team, created)).await;
    }
    for (limit, rows) in [(0, 1), (1, 1), (100, 100), (101, 100), (u32::MAX, 100)] {
        let page = store.list(&ListFilter { limit, ..all_of(team) }).await.unwrap();
        assert_eq!(page.rows.len(), rows, "limit {limit}");
        assert!(page.next.is_some(), "limit {limit}");
    }
    let rest = ListFilter { created_from: Some(at(1)), ..all_of(team) };
    assert_eq!(store.list(&rest).await.unwrap().next, None, "exactly a page is the last page");
}

/// Sandboxes of one millisecond have an order too.
pub async fn ties_are_ordered_by_id(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let mut expected = BTreeSet::new();
    for _ in 0..9 {
        expected.insert(insert(&*store, &sandbox_of(team, 0)).await);
    }
    let mut filter = ListFilter { order: Order::Ascending, limit: 2, ..all_of(team) };
    let mut seen = Vec::new();
    loop {
        let page = store.list(&filter).await.unwrap();
        seen.extend(page.rows.into_iter().map(|row| row.id));
        filter.after = page.next;
        if filter.after.is_none() {
            break;
        }
    }
    assert_eq!(seen, expected.into_iter().collect::<Vec<_>>());
}

/// What happens between two pages.
#[derive(Debug, Clone)]
enum Between {
    /// A sandbox is created; only a few milliseconds are possible, so that ties are common.
    Insert(i64),
    /// One leaves the listed states.
    End(usize),
}

/// A walk over all pages sees every sandbox that was there all the time exactly once, in order, and none twice.
pub async fn pages_are_stable_while_sandboxes_come_and_go(store: Arc<dyn Store>) {
    let between = prop_oneof![(0..6_i64).prop_map(Between::Insert), (0..30_usize).prop_map(Between::End)];
    let walk = (vec(0..6_i64, 0..14), 1..4_u32, any::<bool>(), vec(vec(between, 0..4), 12));
    let mut runner = TestRunner::default();
    for case in 0..24 {
        let (start, limit, up, steps) = walk.new_tree(&mut runner).unwrap().current();
        let team = store.create_team(&format!("team {case}"), at(0)).await.unwrap().id;
        let walked = (start.clone(), limit, up, steps.clone());
        let order = if up { Order::Ascending } else { Order::Descending };
        pages_of_one_walk(&*store, team, &start, limit, order, steps).await.unwrap_or_else(|why| {
            panic!("{why} in {walked:?}");
        });
    }
}

async fn pages_of_one_walk(
    store: &dyn Store,
    team: TeamId,
    start: &[i64],
    limit: u32,
    order: Order,
    steps: Vec<Vec<Between>>,
) -> Result<(), String> {
    let mut known = Vec::new();
    for created in start {
        known.push(insert(store, &sandbox_of(team, *created)).await);
    }
    let mut stayed: BTreeSet<SandboxId> = known.iter().cloned().collect();
    let mut steps = steps.into_iter();
    let mut filter = ListFilter { states: vec![S::Creating], order, limit, ..all_of(team) };
    let mut seen = Vec::new();
    loop {
        let page = store.list(&filter).await.unwrap();
        seen.extend(page.rows.into_iter().map(|row| (row.created_at, row.id)));
        let Some(next) = page.next else { break };
        filter.after = Some(next);
        for step in steps.next().unwrap_or_default() {
            match step {
                Between::Insert(created) => known.push(insert(store, &sandbox_of(team, created)).await),
                Between::End(which) if !known.is_empty() => {
                    let id = known.swap_remove(which % known.len());
                    end(store, &id, S::Creating, EndReason::Killed).await;
                    stayed.remove(&id);
                }
                Between::End(_) => {}
            }
        }
    }
    let sorted = match order {
        Order::Ascending => seen.is_sorted_by(|a, b| a < b),
        Order::Descending => seen.is_sorted_by(|a, b| a > b),
    };
    let listed: BTreeSet<SandboxId> = seen.iter().map(|(_, id)| id.clone()).collect();
    if !sorted {
        return Err(format!("not in strict order: {seen:?}"));
    }
    if !stayed.is_subset(&listed) {
        return Err(format!("missed {:?}", stayed.difference(&listed)));
    }
    Ok(())
}
