//! The same policy is in force however a sandbox came to run.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use sandglass_control::CreateSandbox;
use sandglass_egress::policy::{Effective, Network, Policy, from_e2b};

use crate::fixture::{HOUR, World, request};

/// What clients ask for: lists of E2B's, and rules of the native form.
fn policies() -> impl Strategy<Value = Policy> {
    let host = || prop_oneof!["[a-z]{1,8}\\.example", "\\*\\.[a-z]{1,8}\\.example"];
    let range =
        || (any::<[u8; 4]>(), 0_u8..=32).prop_map(|([a, b, c, d], len)| format!("{a}.{b}.{c}.{d}/{len}"));
    let e2b = (vec(prop_oneof![host(), range()], 0..6), vec(range(), 0..4), any::<Option<bool>>()).prop_map(
        |(allow, mut deny, internet)| {
            deny.push("0.0.0.0/0".into());
            let network = Network { allow_out: Some(allow), deny_out: Some(deny), ..Network::default() };
            from_e2b(&network, internet).unwrap()
        },
    );
    let rule = (host(), any::<bool>(), 1_u16..).prop_map(|(host, allow, port)| {
        let action = if allow { "allow" } else { "deny" };
        serde_json::json!({ action: host, "ports": [port] })
    });
    let native = vec(rule, 0..6)
        .prop_map(|rules| serde_json::from_value(serde_json::json!({ "rules": rules })).unwrap());
    prop_oneof![e2b, native]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_the_same_whether_created_replaced_or_taken_up_again() {
    let ceiling =
        serde_json::json!({ "ceiling": [{"deny": "a.example"}, {"allow": "*.example", "ports": [443]}] });
    let mut world = World::new();
    world.operator = serde_json::from_value(ceiling).unwrap();
    let mut runner = TestRunner::deterministic();
    let mut server = world.start().await.unwrap();
    for _ in 0..6 {
        let mut draw = || policies().new_tree(&mut runner).unwrap().current();
        let (asked, replaced) = (draw(), draw());
        let create = CreateSandbox { policy: asked.clone(), ..request(HOUR) };
        let id = server.control.create(server.team, create).await.unwrap().id;
        let effective = |server: &crate::fixture::Server, row| server.control.effective(&row).unwrap().0;
        let created = effective(&server, server.row(&id).await);
        server.control.set_policy(server.team, &id, replaced.clone(), None).await.unwrap();
        let put = effective(&server, server.row(&id).await);
        server.control.set_policy(server.team, &id, asked.clone(), None).await.unwrap();
        assert_eq!(effective(&server, server.row(&id).await), created, "{asked:?}");
        server.stop().await;
        server = world.start().await.unwrap();
        assert_eq!(effective(&server, server.row(&id).await), created, "{asked:?}");
        // And so is that of another sandbox that asks for the same.
        let create = CreateSandbox { policy: replaced.clone(), ..request(HOUR) };
        let twin = server.control.create(server.team, create).await.unwrap().id;
        assert_eq!(effective(&server, server.row(&twin).await), put, "{replaced:?}");
        assert_ne!(created, Effective::sealed(), "the ceiling is part of it");
        for id in [id, twin] {
            server.kill(&id).await;
        }
    }
    world.nothing_left().await;
    server.stop().await;
}
