use std::net::IpAddr;

use proptest::prelude::*;
use sandglass_types::net::Hostname;

use super::*;
use crate::policy::{Connection, Effective, Operator, Question, Record, Seen, Surroundings, Verdict, decide};

fn network(json: &str) -> Network {
    serde_json::from_str(json).unwrap()
}

fn refused(json: &str) -> String {
    let network = network(json);
    from_e2b(&network, None)
        .map(drop)
        .and_then(|()| ingress_from_e2b(&network).map(drop))
        .unwrap_err()
        .to_string()
}

/// Under an operator who allows all, so that E2B's rules alone decide.
fn open(policy: &Policy) -> Effective {
    let operator: Operator =
        serde_json::from_str(r#"{"ceiling":[{"allow":"0.0.0.0/0","ports":["1-65535"]}]}"#).unwrap();
    Effective::new(policy, &operator, Surroundings::default()).unwrap().0
}

fn connects(
    policy: &Effective,
    address: &str,
    number: u16,
    bound: &[Hostname],
    name: Option<&Hostname>,
) -> bool {
    let seen = name.map_or(Seen::Nothing, |name| Seen::Tls { sni: Some(name), encrypted: false });
    let (address, port) = (address.parse().unwrap(), number.try_into().unwrap());
    decide(policy, Question::Connect(Connection { transport: Transport::Tcp, address, port, bound, seen }))
        .is_allowed()
}

#[test]
fn what_is_not_said_is_open() {
    for (json, internet) in [("{}", None), ("{}", Some(true)), (r#"{"allowOut":null,"denyOut":[]}"#, None)] {
        let policy = open(&from_e2b(&network(json), internet).unwrap());
        assert!(connects(&policy, "8.8.8.8", 22, &[], None));
        assert!(!connects(&policy, "10.0.0.1", 22, &[], None), "private ranges are never open");
    }
    let warns = |json: &str, internet| {
        let policy = from_e2b(&network(json), internet).unwrap();
        !Effective::new(&policy, &Operator::default(), Surroundings::default()).unwrap().1.is_empty()
    };
    assert!(warns("{}", None), "who asks for all is told what it gets");
    assert!(!warns("{}", Some(false)) && !warns(r#"{"denyOut":["0.0.0.0/0"]}"#, None));
    let sealed = open(&from_e2b(&network("{}"), Some(false)).unwrap());
    assert!(!connects(&sealed, "8.8.8.8", 22, &[], None));
}

#[test]
fn allowed_wins_over_denied() {
    let json = r#"{"allowOut":["8.8.8.8","1.1.1.9/24","*.example.com"],"denyOut":["0.0.0.0/0"]}"#;
    let name: Hostname = "a.example.com".parse().unwrap();
    for internet in [None, Some(false)] {
        let policy = open(&from_e2b(&network(json), internet).unwrap());
        assert!(connects(&policy, "8.8.8.8", 22, &[], None) && connects(&policy, "1.1.1.200", 22, &[], None));
        assert!(!connects(&policy, "8.8.4.4", 22, &[], None));
        let bound = [name.clone()];
        assert!(connects(&policy, "93.184.216.34", 443, &bound, Some(&name)));
        assert!(!connects(&policy, "93.184.216.34", 22, &bound, None), "other ports can't use domains");
        let apex: Hostname = "example.com".parse().unwrap();
        for (name, resolves) in [(&name, true), (&apex, false)] {
            let verdict = decide(&policy, Question::Dns { name, record: Record::A });
            assert_eq!(verdict.is_allowed(), resolves, "{name}");
        }
    }
}

#[test]
fn errors_are_those_of_e2b() {
    for (json, text) in [
        (r#"{"denyOut":["not-a-cidr"]}"#, "invalid denied CIDR not-a-cidr"),
        (r#"{"denyOut":["example.com"]}"#, "invalid denied CIDR example.com"),
        (r#"{"denyOut":["::/0"]}"#, "invalid denied CIDR ::/0"),
        (r#"{"denyOut":["ALL_TRAFFIC"]}"#, "invalid denied CIDR ALL_TRAFFIC"),
        (r#"{"allowOut":["exa mple.com"],"denyOut":["0.0.0.0/0"]}"#, "invalid allowed address exa mple.com"),
        (r#"{"allowOut":["127.1"],"denyOut":["0.0.0.0/0"]}"#, "invalid allowed address 127.1"),
        (r#"{"allowOut":["8.8.8.8/33"]}"#, "invalid allowed address 8.8.8.8/33"),
        (
            r#"{"allowOut":["a\u0000.example.com"],"denyOut":["0.0.0.0/0"]}"#,
            r"invalid allowed address a\u{0}.example.com",
        ),
    ] {
        assert_eq!(refused(json), text);
    }
    for json in [
        r#"{"allowOut":["example.com"]}"#,
        r#"{"allowOut":["*"],"denyOut":["10.0.0.0/8"]}"#,
        r#"{"allowOut":["*.example.com"],"denyOut":["0.0.0.0/1","128.0.0.0/1"]}"#,
    ] {
        assert!(
            refused(json)
                .starts_with("When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC'")
        );
    }
    assert!(refused(&format!(r#"{{"denyOut":["{}"]}}"#, "x".repeat(10_000))).len() < 200);
    let many = format!(r#"{{"denyOut":{:?}}}"#, vec!["10.0.0.0/8"; MAX_RULES]);
    assert!(refused(&many).contains("at most 254 entries"));
}

#[test]
fn fields_of_later_versions_are_refused_by_name() {
    for (field, value, empty) in [
        ("egressProxy", r#"{"address":"a:1"}"#, "null"),
        ("egressProxy", "{}", "null"),
        ("dnsServers", r#"["1.1.1.1"]"#, "[]"),
        ("httpsPorts", "[8443]", "[]"),
    ] {
        let text = refused(&format!(r#"{{"{field}":{value}}}"#));
        assert!(text.starts_with(&format!("network.{field} is not supported")), "{text}");
        assert!(from_e2b(&network(&format!(r#"{{"{field}":{empty}}}"#)), None).is_ok(), "{field}: {empty}");
    }
}

#[test]
fn ingress_is_public_unless_said_and_masks_are_hosts() {
    let ingress = |json: &str| ingress_from_e2b(&network(json));
    assert_eq!(ingress("{}"), Ok(Ingress { public: true, request_host: None }));
    assert!(!ingress(r#"{"allowPublicTraffic":false}"#).unwrap().public);
    for (mask, header) in [
        ("localhost:${PORT}", "localhost:3000"),
        ("app.example", "app.example"),
        ("[::1]:${PORT}", "[::1]:3000"),
        ("127.0.0.1:80", "127.0.0.1:80"),
    ] {
        let host = ingress(&format!(r#"{{"maskRequestHost":"{mask}"}}"#)).unwrap().request_host.unwrap();
        assert_eq!(host.for_port(3000.try_into().unwrap()), header);
    }
    for mask in [
        "a b",
        "a\\r\\nX: y",
        "a/b",
        "user@a",
        "bücher.example",
        "a:b",
        "a:",
        ":80",
        "[::1",
        "[::1]80",
        "a:70000",
        "${PORT",
    ] {
        assert_eq!(ingress(&format!(r#"{{"maskRequestHost":"{mask}"}}"#)), Err(E2bError::Mask), "{mask}");
    }
}

proptest! {
    #[test]
    fn the_policy_does_what_e2b_s_documentation_says(
        allow in proptest::collection::vec((any::<u8>(), 0_u8..=32), 0..4),
        deny in proptest::collection::vec((any::<u8>(), 0_u8..=32), 0..4),
        internet: Option<bool>, first in 1_u8..=9, number in 1_u16..,
    ) {
        prop_assume!(![53, 853].contains(&number));
        let list = |list: &[(u8, u8)]| -> Vec<String> { list.iter().map(|(a, len)| format!("{}.1.1.1/{len}", a % 12)).collect() };
        let (allow, deny) = (list(&allow), list(&deny));
        let request = Network { allow_out: Some(allow.clone()), deny_out: Some(deny.clone()), ..Network::default() };
        let address: IpAddr = format!("{first}.1.1.1").parse().unwrap();
        let among = |list: &[String]| list.iter().any(|text| Cidr::parse_masked(text).unwrap().contains(address));
        let expected = among(&allow) || (!among(&deny) && internet != Some(false));
        let policy = open(&from_e2b(&request, internet).unwrap());
        let seen = Seen::Nothing;
        let question = Connection { transport: Transport::Tcp, address, port: number.try_into().unwrap(), bound: &[], seen };
        let verdict = decide(&policy, Question::Connect(question));
        prop_assert_eq!(matches!(verdict, Verdict::Allow(_)), expected, "{:?}", verdict);
    }
}
