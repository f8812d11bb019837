use super::*;

fn parse(body: &str) -> NewSandbox {
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{body}: {error}"))
}

async fn refusal(body: &str) -> String {
    use axum::response::IntoResponse as _;
    let response = parse(body).accept(Face::V2).unwrap_err().into_response();
    assert_eq!(response.status(), 400, "{body}");
    String::from_utf8(axum::body::to_bytes(response.into_body(), 4096).await.unwrap().to_vec()).unwrap()
}

#[test]
fn what_the_sdks_send_is_accepted() {
    let python = parse(r#"{"templateID":"base","timeout":60,"metadata":{"a":"b c"},"envVars":{"X":"1"}}"#);
    assert_eq!(
        python.accept(Face::V2).unwrap(),
        Accepted {
            template: "base".into(),
            on_timeout: OnTimeout::Kill,
            idle_timeout: None,
            timeout: Duration::from_secs(60),
            secured: true,
            metadata: BTreeMap::from([("a".into(), "b c".into())]),
            env: BTreeMap::from([("X".into(), "1".into())]),
            allow_internet_access: None,
            policy: from_e2b(&Network::default(), None).unwrap(),
            ingress: Ingress { public: true, request_host: None },
            volumes: Vec::new(),
            connections: Vec::new(),
        }
    );
    let cli = r#"{"templateID":"base","secure":true,"allow_internet_access":true,"timeout":300}"#;
    let cli = parse(cli).accept(Face::V1).unwrap();
    assert!(cli.secured);
    assert_eq!(cli.allow_internet_access, Some(true));
}

#[test]
fn defaults_differ_by_endpoint() {
    let body = r#"{"templateID":"base"}"#;
    let v1 = parse(body).accept(Face::V1).unwrap();
    assert_eq!((v1.timeout.as_secs(), v1.secured), (15, false));
    let v2 = parse(body).accept(Face::V2).unwrap();
    assert_eq!((v2.timeout.as_secs(), v2.secured), (300, true));
    // v2 has no `secure`: it can't be switched off.
    let v2 = parse(r#"{"templateID":"base","secure":false}"#).accept(Face::V2).unwrap();
    assert!(v2.secured);
}

#[test]
fn null_false_and_empty_ask_for_nothing() {
    for body in [
        r#"{"templateID":"b","timeout":null,"secure":null,"metadata":null,"envVars":null,"mcp":null,
            "autoPause":null,"autoPauseMemory":null,"autoResume":null,"network":null,"iam":null,
            "volumeMounts":null,"allow_internet_access":null}"#,
        r#"{"templateID":"b","autoPause":false,"autoPauseMemory":true,"autoResume":{"enabled":false},
            "network":{"allowPublicTraffic":true,"allowOut":[],"denyOut":["0.0.0.0/0"],"dnsServers":[],
            "egressProxy":null,"maskRequestHost":"","httpsPorts":[],"rules":{"a.test":[{}],"*.a.test":[]}},
            "iam":{"tokens":{}},"volumeMounts":[],"somethingNew":{"a":[1]}}"#,
    ] {
        assert_eq!(parse(body).accept(Face::V2).unwrap().template, "b");
    }
}

#[tokio::test]
async fn what_is_not_built_is_refused_by_name() {
    for (field, value) in [("mcp", "{}"), ("iam", r#"{"tokens":{"t":{"audience":"a","tokenType":"x"}}}"#)] {
        let message = refusal(&format!(r#"{{"templateID":"b","{field}":{value}}}"#)).await;
        assert!(message.contains(&format!("\"{field} is not supported")), "{message}");
    }
    for (field, value) in [
        ("dnsServers", r#"["1.1.1.1"]"#),
        ("egressProxy", r#"{"address":"p:1"}"#),
        ("httpsPorts", "[443]"),
        ("rules", r#"{"a.test":[{"transform":{"headers":{"X-A":"${e2b.secrets.a}"}}}]}"#),
        ("rules", r#"{"a.test":[{"transform":{"headers":{"X-A":"${e2b.secrets.a"}}}]}"#),
        ("rules", r#"{"a.test":[{},{}]}"#),
    ] {
        let message = refusal(&format!(r#"{{"templateID":"b","network":{{"{field}":{value}}}}}"#)).await;
        assert!(message.contains(&format!("\"network.{field}")), "{message}");
    }
    let said = refusal(r#"{"templateID":"b","network":{"maskRequestHost":"a b"}}"#).await;
    assert!(said.contains("network.maskRequestHost must be a host"), "{said}");
    let said = refusal(r#"{"templateID":"b","network":{"denyOut":["example.com"]}}"#).await;
    assert!(said.contains("\"invalid denied CIDR example.com\""), "{said}");
    let said = refusal(r#"{"templateID":"b","network":{"allowOut":["example.com"]}}"#).await;
    assert!(said.contains("you must include 'ALL_TRAFFIC' in deny out"), "{said}");
    for body in [
        r#"{"templateID":"b","timeout":0}"#,
        r#"{"templateID":"b","timeout":-5}"#,
        r#"{"templateID":"b","idleTimeout":-1}"#,
        r#"{"templateID":"b","timeout":-9223372036854775808}"#,
        r#"{"templateID":"b","autoPauseMemory":false}"#,
        r#"{"templateID":"b","autoPauseMemory":false,"autoResume":{"enabled":true}}"#,
        r#"{"templateID":"b","autoResume":{"enabled":true}}"#,
        r#"{"templateID":"b","autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}}"#,
    ] {
        refusal(body).await;
    }
}

#[tokio::test]
async fn volumes_have_names_and_are_where_they_cover_nothing() {
    let body = |mount: &str| format!(r#"{{"templateID":"b","volumeMounts":[{mount}]}}"#);
    let good = parse(&body(r#"{"name":"v","path":"/mnt/v/"}"#)).accept(Face::V2).unwrap();
    assert_eq!((good.volumes[0].name.as_str(), good.volumes[0].path.as_str()), ("v", "/mnt/v"));
    let without = parse(r#"{"templateID":"b"}"#).accept(Face::V2).unwrap();
    assert_ne!(good.digest(), without.digest());
    for (mount, words) in [
        (r#"{"name":"a b","path":"/mnt/v"}"#, "the name of a volume must be 1 to 128 characters"),
        (r#"{"name":"v","path":"mnt"}"#, "must be an absolute path"),
        (r#"{"name":"v","path":"/mnt/../etc"}"#, "must be an absolute path"),
        (r#"{"name":"v","path":"/"}"#, "is reserved"),
        (r#"{"name":"v","path":"/proc/x"}"#, "is reserved"),
        (r#"{"name":"v","path":"/tmp"}"#, "is reserved"),
    ] {
        let message = refusal(&body(mount)).await;
        assert!(message.contains("volumeMounts: the ") && message.contains(words), "{message}");
    }
}

#[test]
fn wrong_types_do_not_parse() {
    for body in [
        "{}",
        r#"{"templateID":null}"#,
        r#"{"templateID":"b","timeout":"60"}"#,
        r#"{"templateID":"b","timeout":1.5}"#,
        r#"{"templateID":"b","metadata":{"a":1}}"#,
        r#"{"templateID":"b","envVars":[]}"#,
        r#"{"templateID":"b","volumeMounts":{}}"#,
        r#"{"templateID":"b","volumeMounts":[{"name":"v"}]}"#,
        r#"{"templateID":"b","volumeMounts":[["v","/v"]]}"#,
        r#"{"templateID":"b","autoResume":[false]}"#,
        r#"{"templateID":"b","network":[]}"#,
        r#"{"templateID":"b","iam":[null]}"#,
        r#"{"templateID":"b","templateID":"b"}"#,
    ] {
        assert!(serde_json::from_str::<NewSandbox>(body).is_err(), "{body}");
    }
}

#[test]
fn the_digest_follows_meaning_not_spelling() {
    let digest = |body: &str| parse(body).accept(Face::V2).unwrap().digest();
    let one = digest(r#"{"templateID":"b","metadata":{"a":"1","b":"2"},"envVars":{}}"#);
    let same = digest(r#"{"metadata":{"b":"2","a":"1"}, "timeout":300, "templateID":"b"}"#);
    assert_eq!(one, same);
    for other in [
        r#"{"templateID":"c","metadata":{"a":"1","b":"2"}}"#,
        r#"{"templateID":"b","metadata":{"a":"1"},"envVars":{"b":"2"}}"#,
        r#"{"templateID":"b","metadata":{"a":"1","b":"2"},"timeout":301}"#,
        r#"{"templateID":"b","metadata":{"a":"1","b":"2"},"allow_internet_access":false}"#,
        r#"{"templateID":"b","metadata":{"a":"1","b":"2"},"network":{"denyOut":["1.2.3.4"]}}"#,
    ] {
        assert_ne!(one, digest(other), "{other}");
    }
}

#[test]
fn what_shall_happen_at_the_timeout() {
    for (asked, expected) in [
        ("", OnTimeout::Kill),
        (r#","autoPause":true"#, OnTimeout::Pause { auto_resume: false }),
        (r#","autoPause":true,"autoPauseMemory":true"#, OnTimeout::Pause { auto_resume: false }),
        (r#","autoPause":true,"autoResume":{"enabled":true}"#, OnTimeout::Pause { auto_resume: true }),
        (r#","autoPause":true,"autoPauseMemory":false"#, OnTimeout::PauseFilesystem),
    ] {
        let accepted = parse(&format!(r#"{{"templateID":"b"{asked}}}"#)).accept(Face::V2).unwrap();
        assert_eq!(accepted.on_timeout, expected, "{asked}");
    }
}
