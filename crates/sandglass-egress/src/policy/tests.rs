use std::net::IpAddr;

use proptest::prelude::*;
use sandglass_types::net::{Hostname, Method, Port, RequestPath};

use super::*;

const SITE: &str = "93.184.216.34";

fn rules(json: &str) -> Rules {
    serde_json::from_str(json).unwrap()
}

fn host(name: &str) -> Hostname {
    name.parse().unwrap()
}

fn port(number: u16) -> Port {
    number.try_into().unwrap()
}

/// A policy under a ceiling that allows what it asks for, so that its own rules alone decide.
fn policy(json: &str) -> Effective {
    let operator = Operator { ceiling: rules(json), ..Operator::default() };
    Effective::new(&Policy::of(rules(json)), &operator, Surroundings::default()).unwrap().0
}

fn dns(policy: &Effective, name: &str) -> bool {
    decide(policy, Question::Dns { name: &host(name), record: Record::A }).is_allowed()
}

fn tcp<'a>(address: &str, number: u16, bound: &'a [Hostname], seen: Seen<'a>) -> Question<'a> {
    let (address, port) = (address.parse().unwrap(), port(number));
    Question::Connect(Connection { transport: Transport::Tcp, address, port, bound, seen })
}

const fn sni(name: &Hostname) -> Seen<'_> {
    Seen::Tls { sni: Some(name), encrypted: false }
}

fn get<'a>(name: &'a Hostname, method: &'a Method, path: &'a RequestPath) -> Seen<'a> {
    Seen::Http { host: Host::Name(name), port: Port::HTTP, method, path: Ok(path) }
}

fn cause(policy: &Effective, question: Question<'_>) -> Cause {
    match decide(policy, question) {
        Verdict::Deny(denial) => denial.cause,
        Verdict::Allow(grant) => panic!("allowed by {grant}"),
    }
}

#[test]
fn nothing_leaves_by_default() {
    let name = host("example.com");
    for policy in [
        Effective::sealed(),
        Effective::new(&Policy::default(), &Operator::default(), Surroundings::default()).unwrap().0,
    ] {
        assert!(!dns(&policy, "example.com"));
        for number in [1, 22, 80, 443, 8080] {
            let bound = [name.clone()];
            assert!(!decide(&policy, tcp(SITE, number, &bound, sni(&name))).is_allowed());
            assert!(!decide(&policy, tcp(SITE, number, &bound, Seen::Nothing)).is_allowed());
        }
    }
}

/// A policy of a server whose own domain is `boxes.example`.
fn with_edge(request: &str, ceiling: &str) -> Effective {
    let operator = Operator { ceiling: rules(ceiling), ..Operator::default() };
    let around = Surroundings {
        sandboxes: vec!["10.11.12.0/30".parse().unwrap()],
        edge: Some(Edge { domain: host("boxes.example"), address: [10, 11, 12, 1].into() }),
        ..Surroundings::default()
    };
    Effective::new(&Policy::of(rules(request)), &operator, around).unwrap().0
}

fn at_edge(policy: &Effective, seen: Seen<'_>) -> Verdict {
    decide(policy, tcp("10.11.12.1", 80, &[], seen))
}

#[test]
fn names_of_the_server_s_own_domain_are_answered_by_the_server_where_a_rule_for_hosts_allows_it() {
    let (own, apex) = (host("8000-a.boxes.example"), host("boxes.example"));
    let foreign = host("a.other.example");
    let (method, path): (Method, RequestPath) = ("GET".parse().unwrap(), "/a".parse().unwrap());
    let ask = |policy: &Effective, name: &Hostname| decide(policy, Question::Dns { name, record: Record::A });
    let edge = |verdict: Verdict| match verdict {
        Verdict::Allow(grant) => grant.own.map(|(_, address)| address),
        Verdict::Deny(_) => None,
    };
    let address = Some([10, 11, 12, 1].into());
    for rule in [r#"[{"allow":"8000-a.boxes.example"}]"#, r#"[{"allow":"*.boxes.example"}]"#] {
        let effective = with_edge(rule, rule);
        assert_eq!(edge(ask(&effective, &own)), address);
        assert_eq!(edge(at_edge(&effective, get(&own, &method, &path))), address);
        // Not what is beside it, however it is asked for.
        for seen in [Seen::Nothing, get(&apex, &method, &path), get(&foreign, &method, &path)] {
            assert_eq!(edge(at_edge(&effective, seen)), None);
        }
        let by_address = Host::Address("10.11.12.1".parse().unwrap());
        let seen = Seen::Http { host: by_address, port: Port::HTTP, method: &method, path: Ok(&path) };
        assert_eq!(edge(at_edge(&effective, seen)), None);
        assert_eq!(cause(&effective, tcp("10.11.12.1", 443, &[], sni(&own))), Cause::Edge);
        assert_eq!(cause(&effective, Question::Reach { name: &own, port: Port::HTTPS }), Cause::Edge);
        assert_eq!(
            cause(&effective, tcp("10.11.12.1", 22, &[], Seen::Nothing)),
            Cause::Address(Class::Sandbox)
        );
        assert_eq!(
            cause(&effective, tcp("10.11.12.2", 80, &[], Seen::Nothing)),
            Cause::Address(Class::Sandbox)
        );
        let elsewhere = Question::Answer { name: &own, address: SITE.parse().unwrap() };
        assert_eq!(cause(&effective, elsewhere), Cause::Edge, "nothing of it is anywhere else");
        assert!(!ask(&effective, &apex).is_allowed());
    }
    // A range is no way to other sandboxes, on either side.
    let (all, hosts) = (r#"[{"allow":"0.0.0.0/0"}]"#, r#"[{"allow":"*.boxes.example"}]"#);
    for (request, ceiling) in [(all, all), (all, hosts), (hosts, all), ("[]", hosts), (hosts, "[]")] {
        let effective = with_edge(request, ceiling);
        assert!(!ask(&effective, &own).is_allowed(), "{request} under {ceiling}");
        assert!(!at_edge(&effective, get(&own, &method, &path)).is_allowed());
    }
    let narrow = r#"[{"allow":"*.boxes.example","ports":[80],"methods":["GET"],"paths":["/a"]}]"#;
    let effective = with_edge(narrow, hosts);
    assert!(at_edge(&effective, get(&own, &method, &path)).is_allowed());
    assert!(!at_edge(&effective, get(&own, &method, &"/b".parse().unwrap())).is_allowed());
    assert!(!at_edge(&effective, get(&own, &"POST".parse().unwrap(), &path)).is_allowed());
    // The guest API of a sandbox is for clients, whatever a rule says.
    for name in ["49983-a.boxes.example", "49983-a-x.boxes.example", "049983-a.boxes.example"].map(host) {
        let rule = format!(r#"[{{"allow":"{name}"}},{{"allow":"*.boxes.example"}}]"#);
        let effective = with_edge(&rule, &rule);
        let asked = Question::Dns { name: &name, record: Record::A };
        let reached = Question::Reach { name: &name, port: Port::HTTP };
        let connected = tcp("10.11.12.1", 80, &[], get(&name, &method, &path));
        for question in [asked, reached, connected] {
            assert_eq!(cause(&effective, question), Cause::GuestApi);
        }
    }
    // Without a domain of its own, a server has nothing there.
    let without = policy(hosts);
    assert_eq!(edge(ask(&without, &own)), None);
    assert!(!at_edge(&without, get(&own, &method, &path)).is_allowed());
}

#[test]
fn name_address_and_sni_must_agree() {
    let policy = policy(r#"[{"allow":"example.com"},{"allow":"other.example"}]"#);
    let (name, other, foreign) = (host("example.com"), host("other.example"), host("evil.example"));
    let bound = [name.clone()];
    assert!(dns(&policy, "example.com") && dns(&policy, "EXAMPLE.com"));
    assert!(decide(&policy, tcp(SITE, 443, &bound, sni(&name))).is_allowed(), "the control");
    let doubt = |question| match cause(&policy, question) {
        Cause::NoRule { request: true, doubt } => doubt,
        other => panic!("{other:?}"),
    };
    assert_eq!(doubt(tcp(SITE, 443, &[], sni(&name))), Some(Doubt::Unbound(name.clone())));
    assert_eq!(doubt(tcp(SITE, 443, &bound, sni(&other))), Some(Doubt::Unbound(other.clone())));
    assert_eq!(doubt(tcp(SITE, 443, &bound, sni(&foreign))), Some(Doubt::Unbound(foreign.clone())));
    assert_eq!(doubt(tcp(SITE, 443, &bound, Seen::Nothing)), Some(Doubt::NotSeen));
    assert_eq!(doubt(tcp(SITE, 443, &bound, Seen::Tls { sni: None, encrypted: false })), Some(Doubt::NoName));
    let hidden = Seen::Tls { sni: Some(&name), encrypted: true };
    assert_eq!(doubt(tcp(SITE, 443, &bound, hidden)), Some(Doubt::Encrypted));
    let foreign_bound = [foreign.clone()];
    assert_eq!(doubt(tcp(SITE, 443, &foreign_bound, sni(&foreign))), None, "no rule speaks of it");
    assert!(!decide(&policy, tcp(SITE, 8443, &bound, Seen::Nothing)).is_allowed(), "a port without a rule");
    assert!(!decide(&policy, tcp(SITE, 80, &bound, sni(&name))).is_allowed(), "TLS on port 80");
}

#[test]
fn host_and_port_of_a_request_must_agree() {
    let policy = policy(r#"[{"allow":"example.com"}]"#);
    let (name, other) = (host("example.com"), host("other.example"));
    let (method, path) = ("GET".parse().unwrap(), "/".parse().unwrap());
    let bound = [name.clone()];
    let ask = |host, number| {
        let seen = Seen::Http { host, port: port(number), method: &method, path: Ok(&path) };
        decide(&policy, tcp(SITE, 80, &bound, seen)).is_allowed()
    };
    assert!(ask(Host::Name(&name), 80), "the control");
    assert!(!ask(Host::Name(&other), 80));
    assert!(!ask(Host::Name(&name), 443), "a CONNECT to elsewhere");
    assert!(!ask(Host::Address(SITE.parse().unwrap()), 80));
    assert!(
        !decide(&policy, tcp(SITE, 443, &bound, get(&name, &method, &path))).is_allowed(),
        "HTTP on port 443"
    );
}

#[test]
fn methods_and_paths_count_where_they_are_seen() {
    let policy = policy(
        r#"[{"deny":"example.com","paths":["/api/private"]},
            {"allow":"example.com","methods":["GET"],"paths":["/api"]}]"#,
    );
    let name = host("example.com");
    let bound = [name.clone()];
    let ask = |method: &str, path: &str| {
        let (method, path) = (method.parse().unwrap(), path.parse::<RequestPath>());
        let path = path.as_ref().map_err(|error| *error);
        let seen = Seen::Http { host: Host::Name(&name), port: Port::HTTP, method: &method, path };
        decide(&policy, tcp(SITE, 80, &bound, seen)).is_allowed()
    };
    assert!(ask("GET", "/api/x") && ask("GET", "/api"), "the control");
    assert!(!ask("POST", "/api/x") && !ask("GET", "/other") && !ask("GET", "/apix"));
    assert!(!ask("GET", "/api/private/x") && !ask("GET", "/api/Private") && !ask("GET", "/api/%70rivate"));
    assert!(!ask("GET", "/api/x/../private") && !ask("GET", "/api/%2e%2e/other"));
    assert!(!decide(&policy, tcp(SITE, 80, &bound, Seen::Nothing)).is_allowed());
    assert!(!decide(&policy, tcp(SITE, 443, &bound, sni(&name))).is_allowed(), "no request is seen there");
    assert!(dns(&policy, "example.com"), "some request may be allowed");
}

#[test]
fn an_ambiguous_path_does_not_matter_to_rules_without_paths() {
    let policy = policy(r#"[{"allow":"example.com"}]"#);
    let name = host("example.com");
    let (bound, method) = ([name.clone()], "GET".parse().unwrap());
    let path = "//".parse::<RequestPath>();
    let seen = Seen::Http {
        host: Host::Name(&name),
        port: Port::HTTP,
        method: &method,
        path: path.as_ref().map_err(|e| *e),
    };
    assert!(decide(&policy, tcp(SITE, 80, &bound, seen)).is_allowed());
}

#[test]
fn the_first_rule_that_matches_decides() {
    let narrow_first = policy(r#"[{"deny":"evil.example.com"},{"allow":"*.example.com"}]"#);
    assert!(dns(&narrow_first, "good.example.com") && !dns(&narrow_first, "evil.example.com"));
    assert!(!dns(&narrow_first, "example.com"), "the apex is not meant");
    let wide_first = policy(r#"[{"allow":"*.example.com"},{"deny":"evil.example.com"}]"#);
    assert!(dns(&wide_first, "evil.example.com"));
}

#[test]
fn a_denied_host_is_denied_where_no_name_is_known() {
    let policy = policy(r#"[{"id":"no","deny":"evil.example"},{"allow":"0.0.0.0/0","ports":["1-65535"]}]"#);
    let (good, evil) = (host("good.example"), host("evil.example"));
    let bound = [good.clone()];
    assert!(decide(&policy, tcp(SITE, 443, &bound, sni(&good))).is_allowed(), "the control");
    assert!(decide(&policy, tcp(SITE, 22, &bound, Seen::Nothing)).is_allowed(), "the control by binding");
    for question in [
        tcp(SITE, 443, &bound, sni(&evil)),
        tcp(SITE, 443, &bound, Seen::Nothing),
        tcp(SITE, 443, &bound, Seen::Tls { sni: Some(&good), encrypted: true }),
        tcp(SITE, 22, &[], Seen::Nothing),
        tcp(SITE, 443, &[], sni(&good)),
    ] {
        assert!(matches!(cause(&policy, question), Cause::Rule(_) | Cause::Unseen(_)));
    }
}

#[test]
fn ranges_need_no_name_and_give_none() {
    let policy = policy(r#"[{"allow":"93.184.0.0/16","ports":[443,5432]}]"#);
    let name = host("example.com");
    for seen in [Seen::Nothing, sni(&name), Seen::Tls { sni: None, encrypted: true }] {
        assert!(decide(&policy, tcp(SITE, 443, &[], seen)).is_allowed());
    }
    assert!(decide(&policy, tcp(SITE, 5432, &[], Seen::Nothing)).is_allowed());
    assert!(decide(&policy, tcp("::ffff:93.184.216.34", 443, &[], Seen::Nothing)).is_allowed());
    assert!(!decide(&policy, tcp("64:ff9b::5db8:d822", 443, &[], Seen::Nothing)).is_allowed());
    assert!(!decide(&policy, tcp(SITE, 80, &[], Seen::Nothing)).is_allowed());
    assert!(!decide(&policy, tcp("93.185.0.1", 443, &[], Seen::Nothing)).is_allowed());
    assert!(!dns(&policy, "example.com"), "a name that no rule speaks of carries data to its resolver");
}

#[test]
fn a_denied_range_is_denied_inside_ipv6_too() {
    let policy = policy(r#"[{"deny":"93.184.0.0/16"},{"allow":"64:ff9b::/96"},{"allow":"2002::/16"}]"#);
    let ask = |address| decide(&policy, tcp(address, 443, &[], Seen::Nothing)).is_allowed();
    assert!(ask("64:ff9b::808:808") && ask("2002:808:808::1"), "the control");
    assert!(!ask("64:ff9b::5db8:d822") && !ask("2002:5db8:d822::1"));
}

#[test]
fn answers_are_checked_after_resolution() {
    let policy = policy(r#"[{"deny":"93.184.216.35"},{"allow":"*"},{"deny":"0.0.0.0/0"}]"#);
    let name = host("rebind.example");
    let answer = |address: &str| {
        decide(&policy, Question::Answer { name: &name, address: address.parse().unwrap() }).is_allowed()
    };
    assert!(dns(&policy, "rebind.example") && answer(SITE), "the control");
    for address in [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "fd00::1",
        "::ffff:10.0.0.1",
        "0.0.0.0",
        "64:ff9b::7f00:1",
        "93.184.216.35",
    ] {
        assert!(!answer(address), "{address}");
    }
}

#[test]
fn some_questions_are_always_denied() {
    let policy = policy(r#"[{"allow":"*","ports":["1-65535"]},{"allow":"0.0.0.0/0","ports":["1-65535"]}]"#);
    for name in
        ["localhost", "a.localhost", "printer.local", "x.onion", "1.0.0.127.in-addr.arpa", "a.invalid"]
    {
        assert!(!dns(&policy, name), "{name}");
    }
    let name = host("example.com");
    for (record, allowed) in [
        (Record::A, true),
        (Record::Aaaa, true),
        (Record::Service, true),
        (Record::Other(16), false),
        (Record::Other(10), false),
        (Record::Other(255), false),
    ] {
        assert_eq!(
            decide(&policy, Question::Dns { name: &name, record }).is_allowed(),
            allowed,
            "{record:?}"
        );
    }
    assert!(decide(&policy, tcp("8.8.8.8", 4430, &[], Seen::Nothing)).is_allowed(), "the control");
    for number in [53, 853] {
        assert_eq!(cause(&policy, tcp("8.8.8.8", number, &[], Seen::Nothing)), Cause::DnsPort);
    }
    let udp = Connection {
        transport: Transport::Udp,
        address: "8.8.8.8".parse().unwrap(),
        port: Port::HTTPS,
        bound: &[],
        seen: Seen::Nothing,
    };
    assert_eq!(cause(&policy, Question::Connect(udp)), Cause::Udp);
}

#[test]
fn a_rule_for_udp_allows_no_tcp() {
    let policy = policy(r#"[{"allow":"example.com","protocol":"udp"}]"#);
    assert!(!dns(&policy, "example.com"));
}

#[test]
fn both_sides_must_allow_the_same_port() {
    let request = Policy::of(rules(r#"[{"allow":"example.com","ports":[22]}]"#));
    let with = |ports: &str| {
        let ceiling = rules(&format!(r#"[{{"allow":"example.com","ports":[{ports}]}}]"#));
        let operator = Operator { ceiling, ..Operator::default() };
        Effective::new(&request, &operator, Surroundings::default()).unwrap().0
    };
    assert!(dns(&with("22"), "example.com") && dns(&with("443, \"20-30\""), "example.com"));
    let (policy, name) = (with("443"), host("example.com"));
    let question = Question::Dns { name: &name, record: Record::A };
    assert!(!decide(&policy, question).is_allowed(), "a name without a port to connect to");
    assert_eq!(decide(&policy, question).rule(), "ceiling/default", "the sandbox asked for what it needs");
}

#[test]
fn both_sides_must_allow_the_same_name() {
    let request =
        Policy::of(rules(r#"[{"allow":"a.example","ports":[22]},{"allow":"b.example","ports":[443]}]"#));
    let operator = |ports: [u16; 2]| Operator {
        ceiling: rules(&format!(
            r#"[{{"allow":"a.example","ports":[{}]}},{{"allow":"b.example","ports":[{}]}}]"#,
            ports[0], ports[1]
        )),
        ..Operator::default()
    };
    let bound = [host("b.example"), host("a.example")];
    let ask = |ports| {
        let policy = Effective::new(&request, &operator(ports), Surroundings::default()).unwrap().0;
        decide(&policy, tcp(SITE, 22, &bound, Seen::Nothing))
    };
    let Verdict::Allow(grant) = ask([22, 443]) else { panic!("the control") };
    assert_eq!(grant.name, Some(host("a.example")));
    assert!(
        !ask([443, 22]).is_allowed(),
        "a.example may be reached there says one side, b.example the other"
    );
}

#[test]
fn an_address_of_a_denied_name_is_denied_under_any_other() {
    let rules = |denial: &str| {
        policy(&format!(
            r#"[{denial}{{"allow":"*.example","ports":["1-65535"]}},{{"allow":"93.184.0.0/16","ports":[22]}}]"#
        ))
    };
    let (good, evil) = (host("good.example"), host("evil.example"));
    for bound in [[good.clone(), evil.clone()], [evil, good]] {
        let question = tcp(SITE, 22, &bound, Seen::Nothing);
        assert!(decide(&rules(""), question).is_allowed(), "the control");
        assert!(!decide(&rules(r#"{"deny":"evil.example"},"#), question).is_allowed());
    }
}

#[test]
fn the_open_internet_is_the_ceiling_and_no_more() {
    let open = Policy::of(rules(r#"[{"allow":"0.0.0.0/0","ports":["1-65535"]}]"#));
    let operator = Operator { ceiling: rules(r#"[{"allow":"example.com"}]"#), ..Operator::default() };
    let policy = Effective::new(&open, &operator, Surroundings::default()).unwrap().0;
    let (name, other) = (host("example.com"), host("other.example"));
    let bound = [name.clone()];
    assert!(dns(&policy, "example.com") && !dns(&policy, "other.example"));
    assert!(decide(&policy, tcp(SITE, 443, &bound, sni(&name))).is_allowed());
    for question in [
        tcp(SITE, 443, &bound, sni(&other)),
        tcp(SITE, 443, &bound, Seen::Nothing),
        tcp(SITE, 443, &[], sni(&name)),
        tcp(SITE, 22, &bound, Seen::Nothing),
    ] {
        assert!(!decide(&policy, question).is_allowed(), "{question:?}");
    }
}

#[test]
fn features_carry_their_hosts() {
    let operator: Operator = serde_json::from_str(
        r#"{"ceiling":[{"deny":"bad.index.example"}],
            "features":{"packages":{"rules":[{"id":"index","allow":"index.example"},{"allow":"*.index.example"}]}}}"#,
    )
    .unwrap();
    let with = |json: &str| {
        Effective::new(&serde_json::from_str(json).unwrap(), &operator, Surroundings::default())
            .map(|(policy, _)| policy)
    };
    let (enabled, open, none) = (
        with(r#"{"features":["packages"]}"#).unwrap(),
        with(r#"{"rules":[{"allow":"0.0.0.0/0"},{"allow":"*"}]}"#).unwrap(),
        with("{}").unwrap(),
    );
    for policy in [&enabled, &open] {
        assert!(dns(policy, "index.example") && dns(policy, "files.index.example"));
        assert!(!dns(policy, "bad.index.example") && !dns(policy, "example.com"));
    }
    assert!(!dns(&none, "index.example"));
    assert_eq!(with(r#"{"features":["models"]}"#), Err(UnknownFeature("models".parse().unwrap())));
    let name = host("index.example");
    let Verdict::Deny(denial) = decide(&none, Question::Reach { name: &name, port: Port::HTTPS }) else {
        panic!()
    };
    assert_eq!(
        denial.remedy,
        "ask for the feature packages, or allow the host index.example on port 443 in the sandbox's policy"
    );
    let Verdict::Allow(grant) = decide(&enabled, Question::Reach { name: &name, port: Port::HTTPS }) else {
        panic!()
    };
    assert_eq!(grant.to_string(), "feature.packages/index within feature.packages/index");
    let denying = r#"{"features":{"x":{"rules":[{"deny":"a.example"}]}}}"#;
    assert!(
        serde_json::from_str::<Operator>(denying).unwrap_err().to_string().contains("a feature only allows")
    );
}

#[test]
fn a_denial_says_who_decided_and_what_would_help() {
    let name = host("example.com");
    let reach = Question::Reach { name: &name, port: Port::HTTPS };
    let Verdict::Deny(denial) = decide(&Effective::sealed(), reach) else { panic!() };
    let body = serde_json::to_string(&denial).unwrap();
    assert_eq!(
        body,
        concat!(
            r#"{"error":"egress_denied","rule":"request/default","#,
            r#""reason":"no rule of the sandbox's policy allows it","#,
            r#""remedy":"allow the host example.com on port 443 in the sandbox's policy; "#,
            r#"the operator's ceiling must allow it as well"}"#
        )
    );
    let open = Policy::of(rules(r#"[{"id":"all","allow":"0.0.0.0/0"}]"#));
    let (policy, warnings) = Effective::new(&open, &Operator::default(), Surroundings::default()).unwrap();
    assert_eq!(warnings, [Warning::OpenInternet { rule: "all".parse().unwrap(), allowed: 0 }]);
    let Verdict::Deny(denial) = decide(&policy, reach) else { panic!() };
    assert_eq!(Verdict::Deny(denial.clone()).rule(), "ceiling/default");
    assert!(
        denial.remedy.starts_with("the operator can allow the host example.com on port 443"),
        "{}",
        denial.remedy
    );
}

#[test]
fn warnings_name_the_rules_that_they_are_about() {
    let request = Policy::of(rules(
        r#"[{"id":"u","allow":"example.com","protocol":"udp"},{"id":"meta","allow":"169.254.169.254"},
            {"id":"six","allow":"2606:4700::/32"},{"id":"tls","allow":"example.com"},{"id":"tld","allow":"*.com"},
            {"id":"no","deny":"x.example"},{"id":"net","allow":"93.0.0.0/8"},{"id":"plain","allow":"example.com","ports":[80]}]"#,
    ));
    let operator = Operator { ceiling: rules(r#"[{"allow":"*"}]"#), ..Operator::default() };
    let ceiling = Label { origin: Origin::Ceiling, rule: "rule-1".parse().unwrap() };
    assert_eq!(operator.warnings(), [Warning::Wide { rule: ceiling }]);
    let (_, warnings) = Effective::new(&request, &operator, Surroundings::default()).unwrap();
    let texts: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    for start in [
        "the rule request/u has no effect: UDP",
        "the rule request/meta has no effect",
        "the rule request/six has no effect",
        "the rule request/tls allows TLS",
        "the rule request/tld allows hosts",
        "the rule request/no denies a host",
    ] {
        assert!(texts.iter().any(|text| text.starts_with(start)), "{start}: {texts:#?}");
    }
    assert_eq!(texts.len(), 6, "{texts:#?}");
    let (_, warnings) = Effective::new(&request, &Operator::default(), Surroundings::default()).unwrap();
    assert!(warnings.contains(&Warning::BeyondCeiling { rule: "tls".parse().unwrap() }));
}

#[test]
fn what_can_not_be_right_does_not_parse() {
    let read = |json: &str| serde_json::from_str::<Policy>(json);
    for (json, says) in [
        (r#"{"rule":[]}"#, "unknown field `rule`"),
        (r#"{"rules":[{"allow":"a.example","port":[1]}]}"#, "unknown field `port`"),
        (r#"{"rules":[{"id":"x"}]}"#, "rule x: say either allow or deny"),
        (r#"{"rules":[{"allow":"a.example","deny":"a.example"}]}"#, "rule rule-1: say either allow or deny"),
        (
            r#"{"rules":[{"allow":"a.example"},{"id":"rule-1","allow":"b.example"}]}"#,
            "two rules are called rule-1",
        ),
        (r#"{"rules":[{"allow":"127.1"}]}"#, "rule rule-1: this is an address or a number"),
        (r#"{"rules":[{"allow":"10.0.0.1/8"}]}"#, "write 10.0.0.0/8"),
        (r#"{"rules":[{"allow":"a.example.\u0000b"}]}"#, "a host name has letters"),
        (r#"{"rules":[{"allow":"a.example","ports":[0]}]}"#, "a port is a number from 1 to 65535"),
        (r#"{"rules":[{"allow":"a.example","ports":[443],"paths":["/x"]}]}"#, "are seen on port 80 alone"),
        (r#"{"rules":[{"allow":"a.example","methods":["get"]}]}"#, "capital letters"),
        (r#"{"rules":[{"allow":"a.example","paths":["/a/../b"]}]}"#, "no part . or .."),
        (r#"{"rules":[{"id":"A b","allow":"a.example"}]}"#, "a label of a rule"),
        (r#"{"rules":[{"allow":"a.example","protocol":"icmp"}]}"#, "unknown variant `icmp`"),
    ] {
        let error = read(json).unwrap_err().to_string();
        assert!(error.contains(says), "{json}: {error}");
    }
    let many =
        |count: usize| format!(r#"{{"rules":[{}]}}"#, vec![r#"{"allow":"a.example"}"#; count].join(","));
    assert!(read(&many(MAX_RULES)).is_ok() && read(&many(MAX_RULES + 1)).is_err());
    let features: Vec<_> = (0..=MAX_FEATURES).map(|n| format!("f{n}")).collect();
    assert!(read(&format!(r#"{{"features":{:?}}}"#, &features[1..])).is_ok());
    assert!(read(&format!(r#"{{"features":{features:?}}}"#)).is_err());
}

#[test]
fn a_policy_survives_being_stored() {
    let policy: Policy = serde_json::from_str(
        r#"{"rules":[{"deny":"10.0.0.0/8"},{"id":"a","allow":"*.example.com","ports":[443,"8000-8100"]},
            {"allow":"x.example","methods":["GET"],"paths":["/a/%20b/"]},{"allow":"*","protocol":"udp"}],"features":["models"]}"#,
    )
    .unwrap();
    let stored = serde_json::to_string(&policy).unwrap();
    assert_eq!(serde_json::from_str::<Policy>(&stored).unwrap(), policy);
}

const NAMES: [&str; 5] = ["example.com", "a.example.com", "b.a.example.com", "evil.example", "localhost"];
const ADDRESSES: [&str; 8] = [
    SITE,
    "8.8.8.8",
    "10.1.2.3",
    "169.254.169.254",
    "127.0.0.1",
    "::ffff:10.1.2.3",
    "64:ff9b::a9fe:a9fe",
    "198.18.0.1",
];

fn any_rules() -> impl Strategy<Value = Rules> {
    let target = prop::sample::select(vec![
        "example.com",
        "*.example.com",
        "a.example.com",
        "*",
        "evil.example",
        "0.0.0.0/0",
        "93.184.0.0/16",
        "8.8.8.8",
        "10.0.0.0/8",
        "169.254.169.254",
        "::/0",
        "*.com",
    ]);
    let ports = prop::sample::select(vec![
        "",
        r#","ports":[80]"#,
        r#","ports":[443,22]"#,
        r#","ports":["1-65535"]"#,
        r#","protocol":"udp""#,
        r#","methods":["GET"],"paths":["/a"]"#,
    ]);
    let rule = (any::<bool>(), target, ports).prop_map(|(allow, target, rest)| {
        format!(r#"{{"{}":"{target}"{rest}}}"#, if allow { "allow" } else { "deny" })
    });
    proptest::collection::vec(rule, 0..6).prop_map(|list| rules(&format!("[{}]", list.join(","))))
}

/// Every question over a small world.
fn questions(check: &mut dyn FnMut(Question<'_>)) {
    let names: Vec<Hostname> = NAMES.into_iter().map(host).collect();
    let (method, path) = ("GET".parse::<Method>().unwrap(), "/a/b".parse::<RequestPath>().unwrap());
    for name in &names {
        check(Question::Dns { name, record: Record::A });
        for number in [22, 80, 443] {
            check(Question::Reach { name, port: port(number) });
        }
    }
    for address in ADDRESSES {
        for name in &names {
            check(Question::Answer { name, address: address.parse().unwrap() });
        }
        for number in [22, 53, 80, 443] {
            for bound in [&names[..0], &names[..1], &names[1..3]] {
                check(tcp(address, number, bound, Seen::Nothing));
                for name in &names {
                    check(tcp(address, number, bound, sni(name)));
                    check(tcp(address, number, bound, get(name, &method, &path)));
                }
            }
        }
    }
}

fn under(request: &Rules, ceiling: &Rules) -> Effective {
    let operator = Operator { ceiling: ceiling.clone(), ..Operator::default() };
    Effective::new(&Policy::of(request.clone()), &operator, Surroundings::default()).unwrap().0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn both_sides_bound_what_leaves(request in any_rules(), ceiling in any_rules()) {
        let (both, request_alone, ceiling_alone) =
            (under(&request, &ceiling), under(&request, &request), under(&ceiling, &ceiling));
        let mut failed = None;
        questions(&mut |question| {
            let connection = matches!(question, Question::Connect(_) | Question::Reach { .. });
            let alone = decide(&request_alone, question).is_allowed() && decide(&ceiling_alone, question).is_allowed();
            let allowed = decide(&both, question).is_allowed();
            // Of a name it is not enough that both allow it: they must on one port.
            if (allowed && !alone) || (connection && alone && !allowed) {
                failed = Some(format!("{question:?}"));
            }
        });
        prop_assert_eq!(failed, None);
    }

    #[test]
    fn nothing_special_leaves_whatever_the_rules(request in any_rules(), ceiling in any_rules()) {
        let policy = under(&request, &ceiling);
        let mut failed = None;
        questions(&mut |question| {
            let address = match question {
                Question::Connect(Connection { address, .. }) | Question::Answer { address, .. } => Some(address),
                Question::Dns { .. } | Question::Reach { .. } => None,
            };
            let public = |address: IpAddr| [SITE, "8.8.8.8"].contains(&address.to_string().as_str());
            if decide(&policy, question).is_allowed() && address.is_some_and(|address| !public(address)) {
                failed = Some(format!("{question:?}"));
            }
        });
        prop_assert_eq!(failed, None);
    }

    #[test]
    fn a_denial_in_front_opens_nothing(request in any_rules(), target in prop::sample::select(vec!["*", "example.com", "8.8.8.8"])) {
        let before = under(&request, &request);
        let mut tighter = rules(&format!(r#"[{{"id":"new","deny":"{target}"}}]"#));
        tighter.0.extend(request.0.iter().cloned());
        let after = under(&tighter, &request);
        let mut failed = None;
        questions(&mut |question| {
            if decide(&after, question).is_allowed() && !decide(&before, question).is_allowed() {
                failed = Some(format!("{question:?}"));
            }
        });
        prop_assert_eq!(failed, None);
    }

    #[test]
    fn a_name_that_no_port_is_open_for_is_not_resolved(request in any_rules(), ceiling in any_rules()) {
        let policy = under(&request, &ceiling);
        for name in NAMES.into_iter().map(host) {
            let reachable = (1..1024).any(|number| {
                decide(&policy, Question::Reach { name: &name, port: port(number) }).is_allowed()
            });
            let resolved = decide(&policy, Question::Dns { name: &name, record: Record::A }).is_allowed();
            prop_assert_eq!(resolved, reachable);
        }
    }

    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,60}|[a-z0-9.*:/-]{0,60}", key in "allow|deny|id|ports|paths|methods") {
        let value = serde_json::to_string(&text).unwrap();
        for json in [&text, &format!(r#"{{"rules":[{{"allow":"a.example","{key}":{value}}}]}}"#),
            &format!(r#"{{"rules":[{{"allow":"a.example","{key}":[{value}]}}]}}"#), &format!(r#"{{"rules":[{{"{key}":{value}}}]}}"#)] {
            if let Ok(policy) = serde_json::from_str::<Policy>(json) {
                let stored = serde_json::to_string(&policy).unwrap();
                prop_assert_eq!(serde_json::from_str::<Policy>(&stored).unwrap(), policy);
            }
        }
    }
}
