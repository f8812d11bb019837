//! Grants of models: who has one, for how long, and what becomes of the money.

use std::time::Duration;

use sandglass_control::{GrantRequest, GrantedModels, Purse};
use sandglass_egress::policy::{Question, Record, decide};
use sandglass_models::Dialect;
use sandglass_models::token::{Signer, TokenError};
use sandglass_store::{CallRow, Reservation, Reserved, SpendCaps, Store as _};
use sandglass_types::clock::Clock as _;
use sandglass_types::{CallId, Error, ErrorKind, Micros, SandboxId};

use crate::fixture::{HOUR, SIGNING, Server, World, eventually, request};
use crate::scripted::Manner;

async fn grant(
    world: &World,
    server: &Server,
    id: &SandboxId,
    purse: Purse,
    lives: Duration,
) -> Result<GrantedModels, Error> {
    let expires = world.clock.now().plus(lives);
    let request = GrantRequest { purse, models: Vec::new(), dialects: vec![Dialect::Chat], expires };
    server.control.grant_models(server.team, id, request).await
}

/// Whether the name of the models is there for a sandbox.
async fn finds_models(server: &Server, id: &SandboxId) -> bool {
    let (policy, _) = server.control.effective(&server.row(id).await).unwrap();
    let name = "models.internal".parse().unwrap();
    decide(&policy, Question::Dns { name: &name, record: Record::A }).is_allowed()
}

fn kind<T: std::fmt::Debug>(outcome: Result<T, Error>) -> ErrorKind {
    outcome.unwrap_err().kind()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_is_for_one_sandbox_and_ends_with_it() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.control.create(server.team, request(HOUR)).await.unwrap().id;
    let other = server.control.create(server.team, request(HOUR)).await.unwrap().id;
    assert!(!finds_models(&server, &id).await);
    let granted = grant(&world, &server, &id, Purse::New(Micros(500)), HOUR).await.unwrap();
    assert_eq!(granted.base_url, "http://models.internal");
    assert!(finds_models(&server, &id).await && !finds_models(&server, &other).await);
    let signer = Signer::new(SIGNING);
    let now = world.clock.now();
    let claims = signer.open(&granted.token, now).unwrap().of(&id).unwrap();
    assert_eq!((&claims.budget, claims.allow(Dialect::Chat, "large")), (&granted.budget, Ok(())));
    assert_eq!(claims.allow(Dialect::Messages, "large"), Err(TokenError::Dialect));
    assert_eq!(signer.open(&granted.token, now).unwrap().of(&other), Err(TokenError::Elsewhere));
    // One open budget at a time.
    assert_eq!(kind(grant(&world, &server, &id, Purse::New(Micros(1)), HOUR).await), ErrorKind::Conflict);
    // What makes no sense makes no budget.
    for (purse, lives, expected) in [
        (Purse::New(Micros(0)), HOUR, ErrorKind::Invalid),
        (Purse::New(Micros(1_000_001)), HOUR, ErrorKind::Invalid),
        (Purse::New(Micros(1)), Duration::ZERO, ErrorKind::Invalid),
        (Purse::New(Micros(1)), HOUR * 1000, ErrorKind::Invalid),
        (Purse::Open(sandglass_types::BudgetId::random()), HOUR, ErrorKind::NotFound),
    ] {
        assert_eq!(kind(grant(&world, &server, &other, purse, lives).await), expected);
    }
    assert!(!finds_models(&server, &other).await);
    server.kill(&id).await;
    eventually("its budget is closed", async || {
        let (row, _) = server.control.budget(server.team, &granted.budget).await.unwrap();
        row.closed_at.map(drop)
    })
    .await;
    // One that somebody opened is theirs to close, and pays for whom they say.
    let opened = server.control.open_budget(server.team, Micros(9)).await.unwrap();
    let of_run = grant(&world, &server, &other, Purse::Open(opened.clone()), HOUR).await.unwrap();
    assert_eq!(of_run.budget, opened);
    server.kill(&other).await;
    server.control.close_budget(server.team, &opened).await.unwrap();
    let late = server.control.create(server.team, request(HOUR)).await.unwrap().id;
    assert_eq!(
        kind(grant(&world, &server, &late, Purse::Open(opened.clone()), HOUR).await),
        ErrorKind::Conflict
    );
    let stranger = server.store.create_team("strangers", now).await.unwrap().id;
    assert_eq!(kind(server.control.budget(stranger, &opened).await), ErrorKind::NotFound);
    assert_eq!(kind(server.control.close_budget(stranger, &opened).await), ErrorKind::NotFound);
    server.kill(&late).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_spends_its_source_s_money_and_a_snapshot_has_none() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.control.create(server.team, request(HOUR)).await.unwrap().id;
    let granted = grant(&world, &server, &id, Purse::New(Micros(500)), HOUR).await.unwrap();
    let fork = server.control.fork(server.team, &id, 1, HOUR).await.unwrap().remove(0).unwrap().id;
    let snapshot = server.control.snapshot(server.team, &id, None).await.unwrap();
    let of_snapshot = sandglass_control::CreateSandbox { template: snapshot.id.to_string(), ..request(HOUR) };
    let copy = server.control.create(server.team, of_snapshot).await.unwrap().id;
    assert!(finds_models(&server, &fork).await && !finds_models(&server, &copy).await);
    let (grant, _) = server.store.spender(&fork).await.unwrap().unwrap();
    assert_eq!((&grant.budget, &grant.origin), (&granted.budget, &id));
    let open = async || server.store.budget(&granted.budget).await.unwrap().unwrap().closed_at.is_none();
    server.kill(&id).await;
    eventually("the source is gone", async || server.row(&id).await.ended_at).await;
    assert!(open().await, "a fork is left");
    server.kill(&fork).await;
    eventually("the budget is closed", async || (!open().await).then_some(())).await;
    server.kill(&copy).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_starts_charges_what_its_predecessor_had_under_way() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let id = server.control.create(server.team, request(HOUR)).await.unwrap().id;
    let granted = grant(&world, &server, &id, Purse::New(Micros(500)), HOUR).await.unwrap();
    let call = Reservation {
        call: CallId::random(),
        budget: granted.budget.clone(),
        model: "large".into(),
        amount: Micros(60),
        at: world.clock.now(),
        caps: SpendCaps::default(),
    };
    assert_eq!(server.store.reserve(&call).await.unwrap(), Reserved::Held);
    server.stop().await;
    let server = world.start().await.unwrap();
    let (row, calls) = server.control.budget(server.team, &granted.budget).await.unwrap();
    assert_eq!((row.charged, row.reserved, row.closed_at), (Micros(60), Micros::ZERO, None));
    assert!(matches!(&calls[..], [CallRow { estimated: true, charged: Some(Micros(60)), .. }]));
    assert!(finds_models(&server, &id).await, "it is taken up with its grant");
    server.kill(&id).await;
    server.stop().await;
}
