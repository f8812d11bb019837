use std::sync::atomic::Ordering;
use std::time::Duration;

use super::*;
use crate::fixture::{Fixture, TTL, fixture, host, policy, sandbox};
use crate::policy::{Connection, Seen, Transport};

const SITE: &str = "93.184.216.34";

fn site() -> IpAddr {
    SITE.parse().unwrap()
}

fn resolved() -> Resolved {
    Resolved { addresses: vec![SITE.parse().unwrap()], ttl: TTL }
}

fn opened() -> Fixture {
    fixture(r#"[{"allow":"*.example"}]"#, &[])
}

/// Whether TLS for `name` may go to the site by what is bound now.
fn connects(enforcer: &Enforcer, name: &Hostname) -> bool {
    let bound = enforcer.names_of(site());
    let seen = Seen::Tls { sni: Some(name), encrypted: false };
    let port = sandglass_types::net::Port::HTTPS;
    let connection = Connection { transport: Transport::Tcp, address: site(), port, bound: &bound, seen };
    enforcer.decide(Question::Connect(connection)).is_allowed()
}

#[test]
fn a_connection_needs_the_name_that_was_resolved() {
    let Fixture { enforcer, clock, .. } = opened();
    let (name, other) = (host("a.example"), host("b.example"));
    assert!(!connects(&enforcer, &name));
    let (verdict, told) = enforcer.tell(&name, &resolved()).unwrap();
    assert!(verdict.is_allowed());
    assert_eq!(told, resolved().addresses);
    assert!(connects(&enforcer, &name) && !connects(&enforcer, &other));
    clock.advance(TTL);
    assert!(!connects(&enforcer, &name));
}

#[test]
fn a_flow_keeps_its_binding_until_it_ends() {
    let Fixture { enforcer, clock, .. } = opened();
    let name = host("a.example");
    assert!(enforcer.hold(site(), &name).is_none(), "nothing is bound");
    enforcer.tell(&name, &resolved()).unwrap();
    let held = enforcer.hold(site(), &name).unwrap();
    clock.advance(2 * TTL);
    assert!(connects(&enforcer, &name));
    drop(held);
    assert!(!connects(&enforcer, &name));
}

#[test]
fn a_policy_that_tightens_is_seen_by_all() {
    let Fixture { enforcer, .. } = opened();
    let (name, other) = (host("a.example"), host("b.example"));
    let mut watch = enforcer.policy();
    enforcer.tell(&name, &resolved()).unwrap();
    enforcer.tell(&other, &resolved()).unwrap();
    let held = enforcer.hold(site(), &name).unwrap();
    assert!(!watch.has_changed().unwrap());
    enforcer.set_policy(policy(r#"[{"allow":"b.example"}]"#));
    assert!(watch.has_changed().unwrap());
    assert_eq!(**watch.borrow_and_update(), policy(r#"[{"allow":"b.example"}]"#));
    assert!(!connects(&enforcer, &name) && connects(&enforcer, &other));
    assert!(enforcer.hold(site(), &name).is_none());
    assert!(matches!(enforcer.tell(&name, &resolved()), Err(Untold::Denied(_))));
    enforcer.set_policy(policy(r#"[{"allow":"*.example"}]"#));
    assert!(!connects(&enforcer, &name), "what was forgotten must be asked for again");
    drop(held);
    enforcer.tell(&name, &resolved()).unwrap();
    assert!(connects(&enforcer, &name));
    enforcer.set_policy(policy(r#"[{"allow":"93.184.216.0/24"}]"#));
    assert!(enforcer.decide(Question::Answer { name: &name, address: site() }).is_allowed(), "the control");
    assert!(matches!(enforcer.tell(&name, &resolved()), Err(Untold::Denied(_))), "it may not be asked for");
}

#[test]
fn nothing_that_a_policy_denies_stays_bound_however_it_came() {
    let Fixture { enforcer, .. } = opened();
    let (open, closed) = (policy(r#"[{"allow":"*.example"}]"#), policy(r#"[{"allow":"b.example"}]"#));
    for _ in 0..50 {
        enforcer.set_policy(open.clone());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let enforcer = &enforcer;
                scope.spawn(move || {
                    for number in 0..20 {
                        let _told = enforcer.tell(&host(&format!("n{thread}-{number}.example")), &resolved());
                    }
                });
            }
            scope.spawn(|| enforcer.set_policy(closed.clone()));
        });
        assert_eq!(enforcer.names_of(site()), []);
    }
}

#[test]
fn bindings_travel_under_the_policy_of_the_day() {
    let Fixture { enforcer, resolver, ledger, clock } = opened();
    let (name, other) = (host("a.example"), host("b.example"));
    enforcer.tell(&name, &resolved()).unwrap();
    enforcer.tell(&other, &resolved()).unwrap();
    let remembered = enforcer.remembered();
    clock.advance(Duration::from_hours(48));
    let restored = |rules| {
        Enforcer::new(Settings {
            sandbox: sandbox(),
            generation: Generation(2),
            policy: policy(rules),
            remembered: remembered.clone(),
            head: Some(enforcer.head()),
            ledger: Arc::<crate::fixture::Memory>::clone(&ledger),
            resolver: Arc::<crate::fixture::Counted>::clone(&resolver),
            clock: Arc::<sandglass_types::clock::ManualClock>::clone(&clock),
            totals: Arc::default(),
        })
    };
    let same = restored(r#"[{"allow":"*.example"}]"#);
    assert!(connects(&same, &name) && connects(&same, &other));
    let tighter = restored(r#"[{"allow":"b.example"}]"#);
    assert_eq!(tighter.names_of(site()), [other]);
    assert_eq!(tighter.refusal(Kind::Connection, "limit/flows").generation, Generation(2));
}

#[test]
fn there_is_no_answer_without_room_for_its_binding() {
    let Fixture { enforcer, .. } = opened();
    let mut flows = Vec::new();
    for number in 0..crate::bindings::MAX_NAMES {
        let name = host(&format!("n{number}.example"));
        enforcer.tell(&name, &resolved()).unwrap();
        flows.push(enforcer.hold(site(), &name).unwrap());
    }
    assert!(matches!(enforcer.tell(&host("more.example"), &resolved()), Err(Untold::Full)));
    flows.pop();
    assert!(enforcer.tell(&host("more.example"), &resolved()).is_ok());
}

#[test]
fn receipts_that_find_no_room_are_counted_by_the_next() {
    let fixture = opened();
    let write = |rule| fixture.enforcer.record(fixture.enforcer.refusal(Kind::Connection, rule));
    write("always/first");
    fixture.ledger.full.store(true, Ordering::SeqCst);
    for _ in 0..7 {
        write("always/lost");
    }
    let head = fixture.enforcer.head();
    assert_eq!(head.count, 1);
    fixture.ledger.full.store(false, Ordering::SeqCst);
    write("always/next");
    write("always/last");
    let written = fixture.receipts();
    let lost: Vec<_> = written.iter().map(|receipt| (receipt.rule.to_string(), receipt.lost)).collect();
    let expected = [("always/first", 0), ("always/next", 7), ("always/last", 0)];
    assert_eq!(lost, expected.map(|(rule, lost)| (rule.to_owned(), lost)));
}

#[test]
fn receipts_of_many_threads_are_one_chain() {
    let fixture = opened();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    fixture.enforcer.record(fixture.enforcer.refusal(Kind::Dns, "always/name"));
                }
            });
        }
    });
    assert_eq!(fixture.receipts().len(), 400);
}
