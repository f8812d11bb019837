//! Who may spend which budget.

use std::sync::Arc;

use sandglass_types::{BudgetId, CallId, EndReason, Micros, SandboxId, SandboxState as S, TeamId};

use super::{at, digest, end, insert, run, sandbox_of, team};
use crate::{
    Charge, Granted, ModelGrant, Money, NewBudget, NewSandbox, Reservation, Reserved, SpendCaps, Store,
};

fn budget(team: TeamId, with_sandboxes: bool) -> NewBudget {
    NewBudget {
        id: BudgetId::random(),
        team,
        most: Micros(100),
        prices: digest(3),
        with_sandboxes,
        created_at: at(0),
    }
}

async fn running(store: &dyn Store, team: TeamId) -> SandboxId {
    let id = insert(store, &sandbox_of(team, 0)).await;
    run(store, &id).await;
    id
}

/// A grant is for a running sandbox, of its team's money, and of one open budget at a time.
pub async fn a_sandbox_spends_one_open_budget_of_its_team(store: Arc<dyn Store>) {
    let store = &*store;
    let mine = team(store).await;
    let new = budget(mine, true);
    let starting = insert(store, &sandbox_of(mine, 0)).await;
    let grant = async |id: &SandboxId, money: Money| store.grant_models(id, &money).await.unwrap();
    assert_eq!(grant(&starting, Money::New(new.clone())).await, Granted::NotRunning);
    assert_eq!(store.budget(&new.id).await.unwrap(), None, "both or nothing");
    let id = running(store, mine).await;
    assert_eq!(store.spender(&id).await.unwrap(), None);
    let done = ModelGrant { budget: new.id.clone(), origin: id.clone() };
    assert_eq!(grant(&id, Money::New(new.clone())).await, Granted::Done(done.clone()));
    let (granted, row) = store.spender(&id).await.unwrap().unwrap();
    assert_eq!((&granted, row.left()), (&done, Micros(100)));
    assert_eq!(store.sandbox(&id).await.unwrap().unwrap().models, Some(done.clone()));
    // Once more is the same; another one is none.
    assert_eq!(grant(&id, Money::Of(new.id.clone())).await, Granted::Done(done));
    let other = budget(mine, false);
    assert_eq!(grant(&id, Money::New(other.clone())).await, Granted::Has(new.id.clone()));
    assert_eq!(store.budget(&other.id).await.unwrap(), None);
    store.close_budget(&new.id, at(5)).await.unwrap();
    assert_eq!(grant(&id, Money::Of(new.id.clone())).await, Granted::NoBudget, "it is closed");
    assert!(matches!(grant(&id, Money::New(other)).await, Granted::Done(_)));
    assert_eq!(grant(&id, Money::Of(BudgetId::random())).await, Granted::NoBudget);
    // Nobody spends the money of others.
    let others = store.create_team("others", at(0)).await.unwrap().id;
    let theirs = budget(others, false);
    store.open_budget(&theirs).await.unwrap();
    let fresh = running(store, mine).await;
    assert_eq!(grant(&fresh, Money::Of(theirs.id)).await, Granted::NoBudget);
    end(store, &id, S::Running, EndReason::Killed).await;
    assert_eq!(store.spender(&id).await.unwrap(), None);
}

/// A budget that is its sandboxes' is closed with the last of them, once no call is under way.
pub async fn a_budget_ends_with_the_last_who_may_spend_it(store: Arc<dyn Store>) {
    let store = &*store;
    let mine = team(store).await;
    let (own, lasting) = (budget(mine, true), budget(mine, false));
    let (first, other) = (running(store, mine).await, running(store, mine).await);
    store.grant_models(&first, &Money::New(own.clone())).await.unwrap();
    store.grant_models(&other, &Money::New(lasting.clone())).await.unwrap();
    let models = store.sandbox(&first).await.unwrap().unwrap().models;
    let fork = insert(store, &NewSandbox { models: models.clone(), ..sandbox_of(mine, 0) }).await;
    run(store, &fork).await;
    let (grant, _) = store.spender(&fork).await.unwrap().unwrap();
    assert_eq!(Some(&grant), models.as_ref());
    // A fork that is granted what it has keeps it as it is, with the tokens of its source.
    let again = store.grant_models(&fork, &Money::Of(own.id.clone())).await.unwrap();
    assert_eq!(again, Granted::Done(ModelGrant { budget: own.id.clone(), origin: first.clone() }));
    assert_eq!(store.close_unheld_budgets(at(5)).await.unwrap(), 0);
    let call = Reservation {
        call: CallId::random(),
        budget: own.id.clone(),
        model: "large".into(),
        amount: Micros(60),
        at: at(1),
        caps: SpendCaps::default(),
    };
    assert_eq!(store.reserve(&call).await.unwrap(), Reserved::Held);
    for id in [&first, &other] {
        end(store, id, S::Running, EndReason::Killed).await;
        assert_eq!(store.close_unheld_budgets(at(6)).await.unwrap(), 0);
    }
    end(store, &fork, S::Running, EndReason::Killed).await;
    assert_eq!(store.close_unheld_budgets(at(7)).await.unwrap(), 0, "a call is under way");
    let charge = Charge { call: call.call, cost: Micros(1), estimated: false, usage: None, at: at(8) };
    assert!(store.charge(&charge).await.unwrap());
    assert_eq!(store.close_unheld_budgets(at(9)).await.unwrap(), 1);
    let closed = store.budget(&own.id).await.unwrap().unwrap();
    assert_eq!((closed.closed_at, closed.charged), (Some(at(9)), Micros(1)));
    assert_eq!(store.budget(&lasting.id).await.unwrap().unwrap().closed_at, None, "its owner closes it");
    assert_eq!(store.close_unheld_budgets(at(10)).await.unwrap(), 0);
}

/// A table of prices never changes.
pub async fn prices_are_kept_as_they_were(store: Arc<dyn Store>) {
    assert_eq!(store.prices(digest(3)).await.unwrap(), None);
    for text in ["{\"a\":1}", "{}"] {
        store.keep_prices(digest(3), text).await.unwrap();
        assert_eq!(store.prices(digest(3)).await.unwrap().as_deref(), Some("{\"a\":1}"));
    }
}
