use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::policy::{Operator, Policy, Surroundings};

const START: Timestamp = Timestamp::from_millis(1_000_000);

fn host(name: &str) -> Hostname {
    name.parse().unwrap()
}

fn address(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(93, 184, 216, last))
}

fn later(span: Duration) -> Timestamp {
    START.plus(span)
}

fn policy(rules: &str) -> Effective {
    let request: Policy = serde_json::from_str(&format!(r#"{{"rules":{rules}}}"#)).unwrap();
    let operator: Operator = serde_json::from_str(r#"{"ceiling":[{"allow":"*"}]}"#).unwrap();
    Effective::new(&request, &operator, Surroundings::default()).unwrap().0
}

#[test]
fn a_binding_lasts_for_its_ttl_and_at_least_five_minutes() {
    let mut bindings = Bindings::default();
    bindings.bind(START, &host("short.example"), [address(1)], Duration::from_secs(1)).unwrap();
    bindings.bind(START, &host("long.example"), [address(1)], Duration::from_mins(10)).unwrap();
    bindings.bind(START, &host("endless.example"), [address(2)], Duration::MAX).unwrap();
    let names = |span| bindings.names(later(span), address(1));
    assert_eq!(names(Duration::ZERO), [host("long.example"), host("short.example")]);
    assert_eq!(names(MIN_SPAN - Duration::from_millis(1)).len(), 2);
    assert_eq!(names(MIN_SPAN), [host("long.example")]);
    assert_eq!(names(Duration::from_mins(10)), []);
    assert_eq!(bindings.names(START, address(3)), [], "an address that nobody resolved");
    assert_eq!(bindings.names(later(MAX_SPAN - MIN_SPAN), address(2)).len(), 1);
    assert_eq!(bindings.names(later(MAX_SPAN), address(2)), []);
}

#[test]
fn an_address_written_as_ipv6_is_the_same() {
    let mut bindings = Bindings::default();
    let mapped = IpAddr::V6(Ipv4Addr::new(93, 184, 216, 1).to_ipv6_mapped());
    bindings.bind(START, &host("a.example"), [mapped], Duration::ZERO).unwrap();
    assert_eq!(bindings.names(START, address(1)), [host("a.example")]);
    assert_eq!(bindings.names(START, mapped), [host("a.example")]);
}

#[test]
fn a_flow_keeps_its_binding() {
    let (mut bindings, name) = (Bindings::default(), host("a.example"));
    bindings.bind(START, &name, [address(1)], Duration::ZERO).unwrap();
    let hold = bindings.hold(START, address(1), &name).unwrap();
    let after = later(MAX_SPAN);
    bindings.sweep(after);
    assert_eq!(bindings.names(after, address(1)), std::slice::from_ref(&name));
    bindings.release(&hold);
    assert_eq!(bindings.names(after, address(1)), []);
    assert_eq!(bindings.hold(after, address(1), &name), None);
    bindings.sweep(after);
    assert_eq!(bindings, Bindings { made: 1, ..Bindings::default() });
}

#[test]
fn bindings_end_when_the_policy_tightens() {
    let (mut bindings, wide) = (Bindings::default(), policy(r#"[{"allow":"*.example"}]"#));
    for name in ["a.example", "b.example"] {
        bindings.bind(START, &host(name), [address(1), address(2)], Duration::ZERO).unwrap();
    }
    assert_eq!(bindings.prune(&wide), [], "the control");
    let hold = bindings.hold(START, address(1), &host("b.example")).unwrap();
    let tight = policy(r#"[{"deny":"93.184.216.2"},{"allow":"a.example"}]"#);
    let removed = bindings.prune(&tight);
    assert_eq!(removed.len(), 3);
    assert_eq!(bindings.names(START, address(1)), [host("a.example")]);
    assert_eq!(bindings.names(START, address(2)), []);
    // What the old flow gives back is not the new flow's.
    bindings.bind(START, &host("b.example"), [address(1)], Duration::ZERO).unwrap();
    let new = bindings.hold(START, address(1), &host("b.example")).unwrap();
    bindings.release(&hold);
    assert!(bindings.names(later(MAX_SPAN), address(1)).contains(&host("b.example")));
    bindings.release(&new);
    assert_eq!(bindings.names(later(MAX_SPAN), address(1)), []);
}

#[test]
fn a_name_that_may_not_be_asked_for_any_more_is_bound_no_more() {
    let mut bindings = Bindings::default();
    bindings.bind(START, &host("a.example"), [address(1)], Duration::ZERO).unwrap();
    // The address stays within reach, but by its range alone.
    let request: Policy = serde_json::from_str(r#"{"rules":[{"allow":"93.184.0.0/16"}]}"#).unwrap();
    let operator: Operator = serde_json::from_str(r#"{"ceiling":[{"allow":"0.0.0.0/0"}]}"#).unwrap();
    let by_range = Effective::new(&request, &operator, Surroundings::default()).unwrap().0;
    assert_eq!(bindings.prune(&by_range), [(host("a.example"), address(1))]);
}

#[test]
fn bindings_travel_with_a_paused_sandbox() {
    let (mut bindings, name) = (Bindings::default(), host("a.example"));
    bindings.bind(START, &name, [address(1)], Duration::ZERO).unwrap();
    bindings.bind(START, &host("b.example"), [address(2)], Duration::ZERO).unwrap();
    let _flow = bindings.hold(START, address(2), &host("b.example")).unwrap();
    let json = serde_json::to_string(&bindings.save(later(Duration::from_mins(2)))).unwrap();
    let days_later = later(Duration::from_hours(72));
    let restored = Bindings::restore(&serde_json::from_str(&json).unwrap(), days_later);
    let left = Duration::from_mins(3);
    let almost = days_later.plus(left - Duration::from_millis(1));
    assert_eq!(restored.names(almost, address(1)), [name]);
    assert_eq!(restored.names(days_later.plus(left), address(1)), []);
    assert_eq!(restored.names(days_later.plus(left), address(2)), [], "no flow came along");
}

#[test]
fn a_saved_text_has_bounds() {
    let one = r#"{"name":"a.example","address":"1.2.3.4","remaining_ms":18446744073709551615}"#;
    let read = |json: &str| serde_json::from_str::<SavedBindings>(json);
    let saved = read(&format!("[{one},{one}]")).unwrap();
    let restored = Bindings::restore(&saved, START);
    assert_eq!(restored.count, 1);
    assert_eq!(
        restored.names(later(MAX_SPAN), "1.2.3.4".parse().unwrap()),
        [],
        "nothing lasts longer than it may"
    );
    let many = |count| format!("[{}]", vec![one; count].join(","));
    assert!(read(&many(MAX_BINDINGS)).is_ok() && read(&many(MAX_BINDINGS + 1)).is_err());
    assert!(read(&format!("[{}]", one.replace("a.example", "a\\u0000.example"))).is_err());
}

#[test]
fn there_is_room_until_flows_use_all_of_it() {
    let mut bindings = Bindings::default();
    let addresses = |range: std::ops::Range<usize>| {
        range
            .map(|n| IpAddr::V4(Ipv4Addr::from_bits(0x5db8_0000 + u32::try_from(n).unwrap())))
            .collect::<Vec<_>>()
    };
    let (all, name) = (addresses(0..MAX_BINDINGS), host("a.example"));
    bindings.bind(START, &name, all.iter().copied(), MAX_SPAN).unwrap();
    let _flows: Vec<_> =
        all[1..].iter().map(|address| bindings.hold(START, *address, &name).unwrap()).collect();
    let more = addresses(MAX_BINDINGS..MAX_BINDINGS + 2);
    bindings.bind(START, &name, [more[0]], Duration::ZERO).unwrap();
    assert_eq!(bindings.names(START, all[0]), [], "the only one that no flow used made room");
    let _flow = bindings.hold(START, more[0], &name).unwrap();
    assert_eq!(bindings.bind(START, &name, [more[1]], Duration::ZERO), Err(Full));
    assert_eq!(bindings.count, MAX_BINDINGS);
    assert!(bindings.bind(START, &name, [all[1]], Duration::ZERO).is_ok(), "renewing needs no room");
}

#[test]
fn an_address_has_room_for_so_many_names() {
    let (mut bindings, names) =
        (Bindings::default(), (0..=MAX_NAMES).map(|n| host(&format!("n{n}.example"))));
    let names: Vec<_> = names.collect();
    for name in &names[..MAX_NAMES] {
        bindings.bind(START, name, [address(1)], MAX_SPAN).unwrap();
    }
    let holds: Vec<_> =
        names[1..MAX_NAMES].iter().map(|name| bindings.hold(START, address(1), name).unwrap()).collect();
    bindings.bind(START, &names[MAX_NAMES], [address(1), address(2)], Duration::ZERO).unwrap();
    let bound = bindings.names(START, address(1));
    assert!(bound.len() == MAX_NAMES && !bound.contains(&names[0]) && bound.contains(&names[MAX_NAMES]));
    let _flow = bindings.hold(START, address(1), &names[MAX_NAMES]).unwrap();
    assert_eq!(bindings.bind(START, &names[0], [address(1)], Duration::ZERO), Err(Full));
    assert!(bindings.bind(START, &names[0], [address(2)], Duration::ZERO).is_ok(), "the control");
    bindings.release(&holds[0]);
    assert!(bindings.bind(START, &names[0], [address(1)], Duration::ZERO).is_ok());
    assert_eq!(Bindings::restore(&bindings.save(START), START).names(START, address(1)).len(), MAX_NAMES);
}

proptest! {
    #[test]
    fn what_is_counted_is_there(steps in proptest::collection::vec((0_u8..6, 0_u8..4, 0_u8..3, 0_u64..900), 0..60)) {
        let (mut bindings, mut now, mut holds) = (Bindings::default(), START, Vec::new());
        for (step, last, name, seconds) in steps {
            let name = host(&format!("n{name}.example"));
            match step {
                0 | 1 => bindings.bind(now, &name, [address(last)], Duration::from_secs(seconds)).unwrap(),
                2 => holds.extend(bindings.hold(now, address(last), &name)),
                3 => { holds.pop().iter().for_each(|hold| bindings.release(hold)); }
                4 => now = now.plus(Duration::from_secs(seconds)),
                _ => bindings.sweep(now),
            }
            let pairs: usize = bindings.by_address.values().map(BTreeMap::len).sum();
            prop_assert_eq!(bindings.count, pairs);
            for hold in &holds {
                prop_assert!(bindings.names(now, hold.address).contains(&hold.name));
            }
            let again = Bindings::restore(&bindings.save(now), now);
            for last in 0..4 {
                let without_flows: Vec<_> = bindings.names(now, address(last)).into_iter()
                    .filter(|name| bindings.by_address[&address(last)][name].until > now).collect();
                prop_assert_eq!(again.names(now, address(last)), without_flows);
            }
        }
    }
}
