//! Money: what is set aside, charged and never spent twice.

use std::sync::Arc;
use std::time::Duration;

use sandglass_types::{BudgetId, CallId, Micros, TeamId, Timestamp};
use tokio::task::JoinSet;

use super::{at, digest, team};
use crate::{Charge, MAX_CALLS, NewBudget, Reservation, Reserved, SpendCaps, Store};

async fn opened(store: &dyn Store, team: TeamId, most: u64) -> BudgetId {
    let new = NewBudget {
        id: BudgetId::random(),
        team,
        most: Micros(most),
        prices: digest(3),
        with_sandboxes: false,
        created_at: at(0),
    };
    store.open_budget(&new).await.unwrap();
    new.id
}

fn wanted(budget: &BudgetId, amount: u64) -> Reservation {
    Reservation {
        call: CallId::random(),
        budget: budget.clone(),
        model: "large".into(),
        amount: Micros(amount),
        at: at(1),
        caps: SpendCaps::default(),
    }
}

fn cost(call: CallId, cost: u64) -> Charge {
    Charge { call, cost: Micros(cost), estimated: false, usage: Some("{}".into()), at: at(2) }
}

/// What is left, set aside, charged and overrun.
async fn numbers(store: &dyn Store, budget: &BudgetId) -> [u64; 4] {
    let row = store.budget(budget).await.unwrap().unwrap();
    [row.left(), row.reserved, row.charged, row.overrun].map(|micros| micros.0)
}

/// A call is set aside, and charged once.
pub async fn what_is_set_aside_is_charged_once(store: Arc<dyn Store>) {
    let store = &*store;
    let budget = opened(store, team(store).await, 100).await;
    let first = wanted(&budget, 60);
    assert_eq!(store.reserve(&first).await.unwrap(), Reserved::Held);
    assert_eq!(numbers(store, &budget).await, [40, 60, 0, 0]);
    assert_eq!(store.reserve(&wanted(&budget, 41)).await.unwrap(), Reserved::Budget(Micros(40)));
    assert!(store.charge(&cost(first.call, 25)).await.unwrap());
    assert_eq!(numbers(store, &budget).await, [75, 0, 25, 0]);
    assert!(!store.charge(&cost(first.call, 25)).await.unwrap(), "it was");
    assert!(!store.charge(&cost(CallId::random(), 1)).await.unwrap(), "there is none");
    assert_eq!(numbers(store, &budget).await, [75, 0, 25, 0]);
    let calls = store.calls(&budget).await.unwrap();
    assert_eq!(calls.len(), 1);
    let call = &calls[0];
    assert_eq!((call.id, call.model.as_str(), call.reserved), (first.call, "large", Micros(60)));
    assert_eq!(
        (call.charged, call.usage.as_deref(), call.settled_at),
        (Some(Micros(25)), Some("{}"), Some(at(2)))
    );
    // A call that costs nothing, as one that never reached its provider.
    let free = wanted(&budget, 75);
    assert_eq!(store.reserve(&free).await.unwrap(), Reserved::Held);
    assert!(store.charge(&cost(free.call, 0)).await.unwrap());
    assert_eq!(numbers(store, &budget).await, [75, 0, 25, 0]);
}

/// What a provider bills above what was set aside is the operator's.
pub async fn an_overrun_is_not_the_budget_s(store: Arc<dyn Store>) {
    let store = &*store;
    let budget = opened(store, team(store).await, 100).await;
    let call = wanted(&budget, 100);
    assert_eq!(store.reserve(&call).await.unwrap(), Reserved::Held);
    assert!(store.charge(&cost(call.call, u64::MAX)).await.unwrap());
    let row = store.budget(&budget).await.unwrap().unwrap();
    assert_eq!((row.left(), row.reserved, row.charged), (Micros::ZERO, Micros::ZERO, Micros(100)));
    assert!(row.overrun > Micros(1_000_000_000));
}

/// What was billed above what was set aside can't be had again and again: neither from the budget, nor from the day of its team.
pub async fn an_overrun_does_not_come_again(store: Arc<dyn Store>) {
    let store = &*store;
    let mine = team(store).await;
    let (budget, other) = (opened(store, mine, 100).await, opened(store, mine, 100).await);
    let call = wanted(&budget, 10);
    assert_eq!(store.reserve(&call).await.unwrap(), Reserved::Held);
    assert!(store.charge(&cost(call.call, 70)).await.unwrap());
    assert_eq!(numbers(store, &budget).await, [30, 0, 10, 60]);
    assert_eq!(store.reserve(&wanted(&budget, 31)).await.unwrap(), Reserved::Budget(Micros(30)));
    for (caps, refused) in [
        (SpendCaps { day: Some(Micros(100)), month: None }, Reserved::Day),
        (SpendCaps { day: None, month: Some(Micros(100)) }, Reserved::Month),
    ] {
        let more = |amount| Reservation { caps, ..wanted(&other, amount) };
        assert_eq!(store.reserve(&more(31)).await.unwrap(), refused);
        let last = more(30);
        assert_eq!(store.reserve(&last).await.unwrap(), Reserved::Held);
        assert!(store.charge(&cost(last.call, 0)).await.unwrap());
    }
}

/// However much a provider says, however often: every call is settled.
pub async fn no_overrun_is_too_much_to_be_written_down(store: Arc<dyn Store>) {
    let store = &*store;
    let mine = team(store).await;
    let [small, large] = [opened(store, mine, 100).await, opened(store, mine, 1000).await];
    let mut calls = Vec::new();
    for _ in 0..20 {
        let call = wanted(&small, 5);
        assert_eq!(store.reserve(&call).await.unwrap(), Reserved::Held);
        calls.push(call.call);
    }
    for call in calls {
        assert!(store.charge(&cost(call, u64::MAX)).await.unwrap());
    }
    assert_eq!(numbers(store, &small).await[..3], [0, 0, 100]);
    for (caps, refused) in [
        (SpendCaps { day: Some(Micros(1000)), month: None }, Reserved::Day),
        (SpendCaps { day: None, month: Some(Micros(u64::MAX)) }, Reserved::Month),
    ] {
        assert_eq!(store.reserve(&Reservation { caps, ..wanted(&large, 1) }).await.unwrap(), refused);
    }
    assert_eq!(store.reserve(&wanted(&large, 1)).await.unwrap(), Reserved::Held);
}

/// What a team opened while it was there pays for nothing once it is gone.
pub async fn a_team_that_is_gone_spends_nothing(store: Arc<dyn Store>) {
    let store = &*store;
    let mine = team(store).await;
    let budget = opened(store, mine, 100).await;
    assert_eq!(store.reserve(&wanted(&budget, 1)).await.unwrap(), Reserved::Held);
    assert!(store.revoke_team(mine, at(1)).await.unwrap());
    assert_eq!(store.reserve(&wanted(&budget, 1)).await.unwrap(), Reserved::Closed);
}

/// A budget that is closed pays for nothing more, and what was under way is charged as it was set aside.
pub async fn a_closed_budget_pays_for_nothing(store: Arc<dyn Store>) {
    let store = &*store;
    let budget = opened(store, team(store).await, 100).await;
    let (settled, held) = (wanted(&budget, 30), wanted(&budget, 50));
    for call in [&settled, &held] {
        assert_eq!(store.reserve(call).await.unwrap(), Reserved::Held);
    }
    assert!(store.charge(&cost(settled.call, 1)).await.unwrap());
    let closed = store.close_budget(&budget, at(5)).await.unwrap().unwrap();
    assert_eq!((closed.reserved, closed.charged, closed.closed_at), (Micros::ZERO, Micros(51), Some(at(5))));
    assert_eq!(closed.left(), Micros::ZERO);
    assert_eq!(store.reserve(&wanted(&budget, 1)).await.unwrap(), Reserved::Closed);
    assert!(!store.charge(&cost(held.call, 1)).await.unwrap(), "it was charged as a whole");
    assert!(store.calls(&budget).await.unwrap().iter().any(|call| call.estimated));
    // Once more changes nothing.
    assert_eq!(store.close_budget(&budget, at(6)).await.unwrap(), Some(closed));
    assert_eq!(store.close_budget(&BudgetId::random(), at(6)).await.unwrap(), None);
    assert_eq!(store.reserve(&wanted(&BudgetId::random(), 1)).await.unwrap(), Reserved::Closed);
}

/// Who revokes a team closes its budgets, which nobody else could, and those of no other.
pub async fn a_revoked_team_spends_nothing(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("other", at(0)).await.unwrap().id);
    let (budget, theirs) = (opened(store, one, 100).await, opened(store, other, 100).await);
    let call = wanted(&budget, 60);
    assert_eq!(store.reserve(&call).await.unwrap(), Reserved::Held);
    assert!(store.revoke_team(one, at(5)).await.unwrap());
    assert_eq!(store.reserve(&wanted(&budget, 1)).await.unwrap(), Reserved::Closed);
    let row = store.budget(&budget).await.unwrap().unwrap();
    assert_eq!((row.closed_at, row.reserved, row.charged), (Some(at(5)), Micros::ZERO, Micros(60)));
    assert!(!store.charge(&cost(call.call, 1)).await.unwrap());
    assert_eq!(store.reserve(&wanted(&theirs, 1)).await.unwrap(), Reserved::Held);
}

/// However many calls there are, no more are told than the last of them.
pub async fn the_last_calls_are_told(store: Arc<dyn Store>) {
    let store = &*store;
    let budget = opened(store, team(store).await, 1).await;
    let mut last = None;
    for second in 0..=i64::from(MAX_CALLS) {
        let call = Reservation { at: at(second), ..wanted(&budget, 1) };
        assert_eq!(store.reserve(&call).await.unwrap(), Reserved::Held);
        assert!(store.charge(&cost(call.call, 0)).await.unwrap());
        last = Some(call.call);
    }
    let told = store.calls(&budget).await.unwrap();
    assert_eq!(told.len(), usize::try_from(MAX_CALLS).unwrap());
    assert_eq!((told[0].asked_at, told.last().map(|call| call.id)), (at(1), last));
}

/// What a dead server had under way is charged.
pub async fn what_nobody_answers_for_is_charged(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let budgets = [opened(store, team, 100).await, opened(store, team, 100).await];
    for budget in &budgets {
        assert_eq!(store.reserve(&wanted(budget, 10)).await.unwrap(), Reserved::Held);
    }
    assert_eq!(store.forfeit_calls(at(9)).await.unwrap(), 2);
    for budget in &budgets {
        assert_eq!(numbers(store, budget).await, [90, 0, 10, 0]);
    }
    assert_eq!(store.forfeit_calls(at(9)).await.unwrap(), 0);
}

/// All budgets of a team together spend no more on a day, and in a month, than it may.
pub async fn a_team_spends_so_much_in_a_day_and_a_month(store: Arc<dyn Store>) {
    let store = &*store;
    let mine = team(store).await;
    let (one, other) = (opened(store, mine, 1000).await, opened(store, mine, 1000).await);
    let noon = Timestamp::from_millis(jiff_millis("2026-11-29T12:00:00Z"));
    let caps = SpendCaps { day: Some(Micros(100)), month: Some(Micros(250)) };
    let day = Duration::from_secs(24 * 3600);
    let reserve = async |budget: &BudgetId, amount: u64, at: Timestamp| {
        let call = Reservation { at, caps, ..wanted(budget, amount) };
        (store.reserve(&call).await.unwrap(), call.call)
    };
    assert_eq!(reserve(&one, 60, noon).await.0, Reserved::Held);
    assert_eq!(reserve(&other, 41, noon).await.0, Reserved::Day);
    let (held, call) = reserve(&other, 40, noon).await;
    assert_eq!(held, Reserved::Held);
    assert_eq!(reserve(&one, 1, noon).await.0, Reserved::Day);
    // What was not used can be spent by others.
    assert!(store.charge(&cost(call, 10)).await.unwrap());
    assert_eq!(reserve(&one, 30, noon).await.0, Reserved::Held);
    assert_eq!(reserve(&one, 100, noon.plus(day)).await.0, Reserved::Held);
    // The first day of another month.
    let december = noon.plus(day * 2);
    assert_eq!(reserve(&one, 100, december).await.0, Reserved::Held);
    assert_eq!(reserve(&one, 100, december.plus(day)).await.0, Reserved::Held);
    assert_eq!(reserve(&one, 51, december.plus(day * 2)).await.0, Reserved::Month);
    assert_eq!(reserve(&one, 50, december.plus(day * 2)).await.0, Reserved::Held);
    // Another team's money is another team's.
    let others = store.create_team("others", at(0)).await.unwrap().id;
    let theirs = opened(store, others, 1000).await;
    assert_eq!(reserve(&theirs, 100, noon).await.0, Reserved::Held);
}

fn jiff_millis(text: &str) -> i64 {
    text.parse::<jiff::Timestamp>().unwrap().as_millisecond()
}

/// However calls, ends and the close of a budget fall between each other, it never pays more than it has.
pub async fn of_many_at_once_no_cent_is_spent_twice(store: Arc<dyn Store>) {
    const MOST: u64 = 1000;
    let budget = opened(&*store, team(&*store).await, MOST).await;
    let mut calls = JoinSet::new();
    for number in 0..64_u64 {
        let (store, budget) = (Arc::clone(&store), budget.clone());
        calls.spawn(async move {
            let amount = 20 + number * 7 % 50;
            let call = wanted(&budget, amount);
            let outcome = store.reserve(&call).await.unwrap();
            let row = store.budget(&budget).await.unwrap().unwrap();
            assert!(row.reserved.and(row.charged) <= Micros(MOST));
            if outcome != Reserved::Held {
                return (0, 0);
            }
            match number % 4 {
                // Its client and its server are gone.
                0 => (amount, amount),
                1 => {
                    assert!(store.charge(&cost(call.call, amount * 2)).await.unwrap());
                    (amount, amount)
                }
                _ => {
                    assert!(store.charge(&cost(call.call, amount / 2)).await.unwrap());
                    (amount, amount / 2)
                }
            }
        });
    }
    let spent = calls.join_all().await;
    let closed = store.close_budget(&budget, at(9)).await.unwrap().unwrap();
    let charged: u64 = spent.iter().map(|(_, charged)| charged).sum();
    assert_eq!((closed.reserved, closed.charged), (Micros::ZERO, Micros(charged)));
    assert!(closed.charged <= Micros(MOST));
    let set_aside: u64 = spent.iter().map(|(held, _)| held).sum();
    assert!(
        set_aside + closed.overrun.0 + 70 > MOST,
        "no call was refused that there was money for: {set_aside}"
    );
}
