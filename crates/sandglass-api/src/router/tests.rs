use super::*;
use axum::body::Body;
use axum::extract::Request;
use http::Method;
use sandglass_types::{SandboxId, Timestamp};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::fake::{Fake, KEY, OTHER_KEY, PANIC};

mod accounts;
mod credentials;
mod models;
mod templates;

struct Answer {
    status: u16,
    headers: http::HeaderMap,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// Checks that this is an error as clients parse it.
    fn error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.body);
        assert_eq!(self.header("content-type"), Some("application/json"));
        let body = self.json();
        assert_eq!(body["code"], status);
        body["message"].as_str().expect("a message").to_owned()
    }
}

struct Face {
    fake: Arc<Fake>,
    router: Router,
}

impl Face {
    fn new() -> Self {
        let fake = Fake::new();
        let state = ApiState {
            backend: fake.clone(),
            tasks: TaskTracker::new(),
            anonymous: Arc::default(),
            metrics: Arc::new(Metrics::new(None)),
            started: Timestamp::from_millis(1_760_000_000_000),
        };
        Self { fake, router: router(state) }
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.router.clone().oneshot(request.body(body.into()).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
        Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    async fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        self.send(method, path, &[("x-api-key", KEY)], body.to_owned()).await
    }

    /// Creates a sandbox and returns its id.
    async fn create(&self, body: &str) -> String {
        let answer = self.ask("POST", "/v2/sandboxes", body).await;
        assert_eq!(answer.status, 201, "{}", answer.body);
        answer.json()["sandboxID"].as_str().unwrap().to_owned()
    }
}

fn filled(path: &str) -> String {
    path.split('/')
        .map(|part| if part.starts_with('{') { "abcdefghij0123456789" } else { part })
        .collect::<Vec<_>>()
        .join("/")
}

#[tokio::test]
async fn every_route_wants_a_key_except_those_that_say_so() {
    let face = Face::new();
    let mut seen = 0;
    for line in crate::openapi::endpoints().lines() {
        let [path, method, who, built] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let path = filled(path);
        let anonymous = face.send(method, &path, &[], "{}").await;
        let wrong = face.send(method, &path, &[("x-api-key", "e2b_00")], "{}").await;
        if who == "anyone" {
            assert!(anonymous.status < 300, "{line}");
        } else if who == "token" {
            // No key is a token, and what clients of this part parse has a text for its code.
            let path = format!("{path}?path=/");
            let with_key = face.ask(method, &path, "{}").await;
            for answer in [anonymous, wrong, with_key] {
                assert_eq!(
                    (answer.status, answer.json()["code"].as_str()),
                    (401, Some("Unauthorized")),
                    "{line}"
                );
            }
        } else {
            anonymous.error(401);
            wrong.error(401);
            let with_key = face.ask(method, &path, r#"{"templateID":"base","timeout":5}"#).await;
            if built == "unbuilt" {
                assert!(with_key.error(501).starts_with("not supported by this version"), "{line}");
                assert_eq!(with_key.header("should-retry"), None);
            } else {
                assert!(!matches!(with_key.status, 401 | 405 | 501), "{line}: {}", with_key.status);
            }
        }
        seen += 1;
    }
    assert!(seen > 40, "{seen}");
}

#[tokio::test]
async fn calls_that_change_something_are_audited_and_so_are_refused_ones() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base"}"#).await;
    face.ask("GET", &format!("/sandboxes/{id}"), "").await;
    face.send("GET", "/sandboxes", &[], "").await.error(401);
    face.ask("POST", "/v2/sandboxes", r#"{"templateID":"quota"}"#).await.error(429);
    let named = [("x-api-key", OTHER_KEY), ("x-request-id", "mine-1")];
    let answer = face.send("DELETE", &format!("/sandboxes/{id}"), &named, "").await;
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    answer.error(404);
    face.send("POST", "/v2/sandboxes", &[("x-api-key", "e2b_00")], "{}").await.error(401);
    face.ask("POST", "/v2/sandboxes", r#"{"templateID":"panic"}"#).await.error(500);
    face.ask("POST", "/nowhere", "{}").await.error(404);
    face.ask("DELETE", &format!("/sandboxes/{id}"), "").await;
    let audit = face.fake.audit.lock().unwrap();
    let [own, other] = face.fake.identities();
    let rows: Vec<_> = audit
        .iter()
        .map(|row| {
            let who = row.key.map(|key| if key == own.key { "own" } else { "other" });
            assert_eq!(row.team.is_some(), row.key.is_some());
            (who, row.action.as_str(), row.target.as_deref(), row.status, row.detail.as_deref())
        })
        .collect();
    let one = Some(id.as_str());
    assert_eq!(
        rows,
        [
            (Some("own"), "POST /v2/sandboxes", one, 201, None),
            (Some("own"), "POST /v2/sandboxes", None, 429, Some("as the test wanted")),
            (Some("other"), "DELETE /sandboxes/{id}", one, 404, Some("sandbox not found")),
            (None, "POST /v2/sandboxes", None, 401, Some("invalid API key")),
            (Some("own"), "POST /v2/sandboxes", None, 500, Some("internal error")),
            (Some("own"), "DELETE /sandboxes/{id}", one, 204, None),
        ]
    );
    assert_eq!((audit[2].key, audit[2].request.as_str()), (Some(other.key), "mine-1"));
    let secrets = format!("{audit:?}");
    assert!(!secrets.contains(KEY) && !secrets.contains(OTHER_KEY));
}

#[tokio::test]
async fn each_copy_and_each_user_is_in_the_audit() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base"}"#).await;
    face.ask("POST", &format!("/sandboxes/{id}/fork"), r#"{"count":3}"#).await;
    face.ask("PUT", "/v1/assignments/z%C3%B6e", r#"{"templateID":"base"}"#).await;
    face.ask("DELETE", "/v1/assignments/z%C3%B6e", "").await;
    let audit = face.fake.audit.lock().unwrap();
    let copies = || audit.iter().filter(|row| row.action == "POST /sandboxes/{id}/fork");
    // The third of them fails.
    assert_eq!(copies().count(), 2);
    let made =
        |target: &Option<String>| target.as_ref().is_some_and(|target| target.parse::<SandboxId>().is_ok());
    for copy in copies() {
        assert!(made(&copy.target) && copy.target.as_deref() != Some(&*id), "{copy:?}");
        assert_eq!(copy.detail, Some(format!("copied from {id}")));
    }
    let [.., assigned, released] = &audit[..] else { panic!("{audit:?}") };
    assert!(made(&assigned.target), "{assigned:?}");
    assert_eq!(assigned.detail.as_deref(), Some("created for the user z\u{f6}e"));
    assert_eq!(released.target.as_deref(), Some("z\u{f6}e"));
}

#[tokio::test]
async fn operators_and_nobody_else_see_what_is_counted() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base"}"#).await;
    face.ask("GET", &format!("/sandboxes/{id}"), "").await;
    face.ask("GET", "/nowhere", "").await;
    face.send("GET", "/metrics", &[], "").await.error(401);
    let refused = face.send("GET", "/metrics", &[("x-api-key", OTHER_KEY)], "").await.error(403);
    assert!(refused.contains("--operator"), "{refused}");
    let answer = face.ask("GET", "/metrics", "").await;
    assert_eq!(
        answer.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    for line in [
        "the_product_s_own 1",
        "sandglass_api_requests_total{method=\"POST\",route=\"/v2/sandboxes\",status=\"201\"} 1",
        "sandglass_api_requests_total{method=\"GET\",route=\"/sandboxes/{id}\",status=\"200\"} 1",
        "sandglass_api_requests_total{method=\"-\",route=\"-\",status=\"404\"} 1",
        "sandglass_api_request_seconds_count{method=\"GET\",route=\"/metrics\"} 2",
    ] {
        assert!(answer.body.lines().any(|got| got == line), "{line} is not in\n{}", answer.body);
    }
    assert!(answer.body.ends_with("# EOF\n") && answer.body.matches("# EOF").count() == 1);
    assert!(!answer.body.contains(&id));
}

#[tokio::test]
async fn create_answers_as_the_sdk_reads_it() {
    let face = Face::new();
    let body = r#"{"templateID":"base","timeout":60,"metadata":{"a":"b c"},"envVars":{"X":"1"}}"#;
    let answer = face.ask("POST", "/v2/sandboxes", body).await;
    assert_eq!(answer.status, 201);
    let sandbox = answer.json();
    for field in ["templateID", "sandboxID", "clientID", "envdVersion", "envdAccessToken"] {
        assert!(sandbox[field].is_string(), "{field}");
    }
    assert_eq!(sandbox["domain"], "sbx.test");
    assert_eq!(
        answer.header("x-sandglass-warning").unwrap(),
        "the rule internet asks for the open internet, but gets what the operator allows: 1 rules"
    );
    assert!(answer.header("x-request-id").is_some());
    let row = face.fake.row(sandbox["sandboxID"].as_str().unwrap()).unwrap();
    assert_eq!(row.env["X"], "1");
    assert_eq!(row.metadata["a"], "b c");

    let sealed = r#"{"templateID":"base","allow_internet_access":false}"#;
    assert_eq!(face.ask("POST", "/v2/sandboxes", sealed).await.header("x-sandglass-warning"), None);
    let v1 = face.ask("POST", "/sandboxes", r#"{"templateID":"base"}"#).await;
    assert_eq!(v1.status, 201);
    assert_eq!(v1.json()["envdAccessToken"], Value::Null);
    // Bearer works as well as the header of its own.
    let bearer = format!("Bearer {KEY}");
    let answer = face.send("GET", "/sandboxes", &[("authorization", &bearer)], "").await;
    assert_eq!(answer.json().as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn a_sandbox_whose_traffic_is_not_public_has_a_token() {
    let face = Face::new();
    let private = r#"{"templateID":"base","network":{"allowPublicTraffic":false}}"#;
    let made = face.ask("POST", "/v2/sandboxes", private).await.json();
    assert_eq!(made["trafficAccessToken"], "traffic");
    let id = made["sandboxID"].as_str().unwrap();
    let connected = face.ask("POST", &format!("/v2/sandboxes/{id}/connect"), "{}").await;
    assert_eq!(connected.json()["trafficAccessToken"], "traffic");
    let detail = face.ask("GET", &format!("/sandboxes/{id}"), "").await.json();
    assert_eq!(detail["network"]["allowPublicTraffic"], false);
    assert_eq!(detail.get("trafficAccessToken"), None);
    let port = face.ask("GET", &format!("/v1/sandboxes/{id}/ports/3000"), "").await.json();
    let token = sandglass_control::TrafficToken::new("traffic".into());
    assert_eq!(port["traffic_access_token"], token.for_port(3000.try_into().unwrap()));
    assert_eq!(port["host"], format!("3000-{id}.sbx.test"));
    let other = [("x-api-key", OTHER_KEY)];
    face.send("GET", &format!("/v1/sandboxes/{id}/ports/3000"), &other, "").await.error(404);
    // What stays as it is may be said again.
    let path = format!("/sandboxes/{id}/network");
    assert_eq!(face.ask("PUT", &path, r#"{"allowPublicTraffic":false}"#).await.status, 204);
    face.ask("PUT", &path, r#"{"allowPublicTraffic":true}"#).await.error(400);
    for port in ["0", "65536", "http"] {
        face.ask("GET", &format!("/v1/sandboxes/{id}/ports/{port}"), "").await.error(400);
    }
    let open = face.create(r#"{"templateID":"base"}"#).await;
    let port = face.ask("GET", &format!("/v1/sandboxes/{open}/ports/3000"), "").await.json();
    assert_eq!((&port["public"], &port["traffic_access_token"]), (&Value::Bool(true), &Value::Null));
}

#[tokio::test]
async fn the_network_of_a_sandbox_is_replaced_and_explained() {
    let face = Face::new();
    let body = r#"{"templateID":"base","network":{"allowOut":["a.example.com"],"denyOut":["0.0.0.0/0"]}}"#;
    let made = face.ask("POST", "/v2/sandboxes", body).await;
    let id = made.json()["sandboxID"].as_str().unwrap().to_owned();
    let explain =
        async |query: &str| face.ask("GET", &format!("/v1/sandboxes/{id}/egress/explain?{query}"), "").await;
    let allowed = explain("host=a.example.com").await.json();
    assert_eq!((&allowed["allowed"], &allowed["port"]), (&json!(true), &json!(443)));
    assert_eq!(allowed["rule"], "request/allow-out-1 within ceiling/rule-1");
    let denied = explain("host=b.example.com&port=80").await.json();
    assert_eq!((&denied["allowed"], &denied["rule"]), (&json!(false), &json!("request/deny-out-1")));
    assert!(denied["remedy"].as_str().unwrap().contains("deny-out-1"), "{denied}");
    let metadata = explain("host=169.254.169.254&port=80").await.json();
    assert_eq!(metadata["rule"], "always/metadata");
    for query in ["", "host=", "host=0x7f.1%20", "host=a.example&port=0", "host=a.example&port=x"] {
        explain(query).await.error(400);
    }
    let native = face.ask("GET", &format!("/v1/sandboxes/{id}"), "").await.json();
    assert_eq!(native["network"], "policy");
    assert_eq!(native["policy"]["rules"][0]["allow"], "a.example.com");
    assert!(native["warnings"][0].as_str().unwrap().contains("TLS"), "{native}");

    let network = format!("/sandboxes/{id}/network");
    for (body, said) in [
        (r#"{"allowOut":["b.example.com"]}"#, "you must include 'ALL_TRAFFIC'"),
        (r#"{"denyOut":["b.example.com"]}"#, "invalid denied CIDR b.example.com"),
        (r#"{"allowOut":"1.1.1.1"}"#, "allowOut: invalid type: string"),
        (r#"{"allow_internet_access":"no"}"#, "allow_internet_access: invalid type: string"),
        (r#"{"allowPublicTraffic":false}"#, "network.allowPublicTraffic can only be set when"),
        (r#"{"maskRequestHost":"localhost"}"#, "network.maskRequestHost can only be set when"),
        (r#"{"egressProxy":{"address":"p:1"}}"#, "network.egressProxy is not supported"),
        (r#"{"allowOut":"all"}"#, "expected a sequence"),
        ("[]", ""),
    ] {
        let error = face.ask("PUT", &network, body).await.error(400);
        assert!(error.contains(said), "{error}");
    }
    let sealed = face.ask("PUT", &network, r#"{"allow_internet_access":false}"#).await;
    assert_eq!((sealed.status, sealed.header("x-sandglass-warning")), (204, None));
    assert_eq!(explain("host=a.example.com").await.json()["rule"], "request/no-internet");
    assert_eq!(face.ask("GET", &format!("/sandboxes/{id}"), "").await.json()["allowInternetAccess"], false);
    let open = face.ask("PUT", &network, "{}").await;
    assert!(open.header("x-sandglass-warning").unwrap().contains("open internet"));
    assert_eq!(explain("host=a.example.com").await.json()["allowed"], true);

    let receipts = format!("/v1/sandboxes/{id}/egress");
    assert_eq!(face.ask("GET", &receipts, "").await.body, "[{\"number\": 0},\n{\"number\": 1}]");
    assert_eq!(face.ask("GET", &format!("{receipts}?limit=1"), "").await.json(), json!([{"number": 1}]));
    for limit in ["0", "1001", "x", "-1"] {
        face.ask("GET", &format!("{receipts}?limit={limit}"), "").await.error(400);
    }
    for path in [&network, &receipts] {
        let method = if path == &network { "PUT" } else { "GET" };
        let other = face.send(method, path, &[("x-api-key", OTHER_KEY)], "{}").await;
        other.error(404);
    }
}

#[tokio::test]
async fn failures_of_create() {
    let face = Face::new();
    let create = |template: &'static str| {
        let body = json!({"templateID": template}).to_string();
        let face = &face;
        async move { face.ask("POST", "/v2/sandboxes", &body).await }
    };
    let quota = create("quota").await;
    quota.error(429);
    assert_eq!(quota.header("should-retry"), Some("false"));
    let full = create("full").await;
    full.error(503);
    assert_eq!(full.header("should-retry"), Some("false"));
    assert_eq!(full.json()["error_code"], "sandbox_capacity_unavailable");
    create("missing").await.error(404);
    let busy = create("busy").await;
    busy.error(409);
    assert_eq!(busy.header("should-retry"), Some("true"));
    assert_eq!(busy.json()["error_code"], "idempotency_in_progress");
    assert_eq!(create(PANIC).await.error(500), "internal error");
    // The panic hurt nobody else.
    assert_eq!(create("base").await.status, 201);
}

#[tokio::test]
async fn malformed_requests() {
    let face = Face::new();
    for body in ["", "{", "[]", r#"["b"]"#, "null", r#"{"templateID":"b"} x"#, r#"{"templateID":5}"#, "\u{0}"]
    {
        face.ask("POST", "/v2/sandboxes", body).await.error(400);
    }
    for id in ["%ff", "%2e%2e", "%00", "a%2fb"] {
        face.ask("GET", &format!("/sandboxes/{id}"), "").await.error(400);
        face.ask("GET", &format!("/v1/sandboxes/{id}"), "").await.error(400);
    }
    let typed = face.ask("POST", "/v2/sandboxes", r#"{"templateID":"b","timeout":"x"}"#).await.error(400);
    assert!(typed.contains("timeout"), "{typed}");
    let big = format!(r#"{{"templateID":"b","x":"{}"}}"#, "y".repeat(1 << 20));
    face.ask("POST", "/v2/sandboxes", &big).await.error(413);
    assert_eq!(face.ask("GET", "/nope", "").await.error(404), "no such route");
    assert!(face.ask("GET", "/files?path=x&signature=y", "").await.error(404).contains("E2b-Sandbox-Id"));
    face.ask("GET", "/v2/sandboxes/", "").await.error(404);
    let wrong = face.ask("PATCH", "/sandboxes", "").await;
    wrong.error(405);
    assert!(wrong.header("allow").is_some());
    face.ask("GET", "/v2/sandboxes?metadata=%zz", "").await.error(400);
    // Without a key nothing else is looked at.
    face.send("POST", "/v2/sandboxes", &[], "{").await.error(401);
    face.send("GET", "/sandboxes/BAD", &[], "").await.error(401);
}

#[tokio::test(start_paused = true)]
async fn a_body_byte_by_byte_takes_too_long() {
    let face = Face::new();
    let slowly = futures_util::stream::unfold((), async |()| {
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        Some((Ok::<_, std::io::Error>(" "), ()))
    });
    let body = Body::from_stream(slowly);
    let answer = face.send("POST", "/v2/sandboxes", &[("x-api-key", KEY)], body).await;
    assert!(answer.error(408).contains("too long"));
}

#[tokio::test]
async fn idempotency() {
    let face = Face::new();
    let create = |key: &'static str, body: &'static str| {
        let face = &face;
        async move {
            let headers = [("x-api-key", KEY), ("idempotency-key", key)];
            face.send("POST", "/v2/sandboxes", &headers, body).await
        }
    };
    let first = create("k-1", r#"{"templateID":"b","metadata":{}}"#).await;
    let again = create("k-1", r#"{ "templateID": "b", "timeout": 300 }"#).await;
    assert_eq!((first.status, again.status), (201, 201));
    assert_eq!(first.json(), again.json());
    let other = create("k-1", r#"{"templateID":"b","timeout":301}"#).await;
    other.error(422);
    assert_eq!(other.json()["error_code"], "idempotency_request_mismatch");
    create("", r#"{"templateID":"b"}"#).await.error(400);
    create("a b", r#"{"templateID":"b"}"#).await.error(400);
}

#[tokio::test]
async fn verbs_of_one_sandbox() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base","timeout":60}"#).await;
    let end = |face: &Face| face.fake.row(&id).unwrap().end_at.since(Timestamp::from_millis(0)).as_secs();
    let path = format!("/sandboxes/{id}");

    let detail = face.ask("GET", &format!("{path}-6532622b"), "").await.json();
    assert_eq!(detail["sandboxID"], id.as_str());
    assert_eq!(detail["lifecycle"], json!({"autoResume": false, "onTimeout": "kill"}));
    assert_eq!(detail["state"], "running");

    let answer = face.ask("POST", &format!("/v2{path}/connect"), "").await;
    assert_eq!((answer.status, end(&face)), (200, 300));
    assert_eq!(answer.json()["envdAccessToken"], "token");
    assert_eq!(face.ask("POST", &format!("{path}/connect"), r#"{"timeout":5}"#).await.status, 200);
    assert_eq!(end(&face), 300, "connect never shortens");
    face.ask("POST", &format!("{path}/connect"), "{}").await.error(400);
    face.ask("POST", &format!("/v2{path}/connect"), r#"{"timeout":0}"#).await.error(400);

    let answer = face.ask("POST", &format!("{path}/timeout"), r#"{"timeout":10}"#).await;
    assert_eq!((answer.status, answer.body.as_str(), end(&face)), (204, "", 10));
    assert_eq!(face.ask("POST", &format!("{path}/timeout"), r#"{"timeout":0}"#).await.status, 204);
    face.ask("POST", &format!("{path}/timeout"), r#"{"timeout":-1}"#).await.error(400);
    face.ask("POST", &format!("{path}/timeout"), "").await.error(400);

    assert_eq!(face.ask("POST", &format!("{path}/refreshes"), "").await.status, 204);
    assert_eq!(end(&face), 15);
    assert_eq!(face.ask("POST", &format!("{path}/refreshes"), r#"{"duration":3600}"#).await.status, 204);
    assert_eq!(end(&face), 3600);
    face.ask("POST", &format!("{path}/refreshes"), r#"{"duration":3601}"#).await.error(400);

    // Another team sees nothing of it, and can't do anything to it.
    for (method, path) in [
        ("GET", path.clone()),
        ("DELETE", path.clone()),
        ("POST", format!("{path}/timeout")),
        ("POST", format!("{path}/refreshes")),
        ("POST", format!("{path}/connect")),
        ("POST", format!("/v2{path}/connect")),
        ("GET", format!("/v1{path}")),
    ] {
        let answer = face.send(method, &path, &[("x-api-key", OTHER_KEY)], r#"{"timeout":1}"#).await;
        answer.error(404);
    }
    assert_eq!(face.send("GET", "/v2/sandboxes", &[("x-api-key", OTHER_KEY)], "").await.body, "[]");

    assert_eq!(face.ask("DELETE", &path, "").await.status, 204);
    face.ask("DELETE", &path, "").await.error(404);
    face.ask("GET", &path, "").await.error(404);
    face.ask("DELETE", "/sandboxes/non-existing", "").await.error(404);
    assert_eq!(face.ask("DELETE", "/sandboxes/NO", "").await.error(400), "Invalid sandbox ID");
}

#[tokio::test]
async fn lists_page_filter_and_order() {
    let face = Face::new();
    let mut ids = Vec::new();
    for n in 0..5 {
        let body = json!({"templateID": "base", "metadata": {"n": (n % 2).to_string(), "s": "b c"}});
        ids.push(face.create(&body.to_string()).await);
    }
    let listed = |answer: &Answer| {
        let rows = answer.json();
        let ids = rows.as_array().unwrap().iter().map(|row| row["sandboxID"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    for (order, expected) in [("asc", ids.clone()), ("desc", ids.iter().rev().cloned().collect::<Vec<_>>())] {
        let mut got = Vec::new();
        let mut token = String::new();
        loop {
            let path = format!("/v2/sandboxes?limit=2&order={order}&nextToken={token}");
            let answer = face.ask("GET", &path, "").await;
            got.extend(listed(&answer));
            match answer.header("x-next-token") {
                Some(next) => token = next.to_owned(),
                None => break,
            }
        }
        assert_eq!(got, expected, "{order}");
    }
    let odd = face.ask("GET", "/v2/sandboxes?order=asc&metadata=n%3D1%26s%3Db%252520c", "").await;
    assert_eq!(listed(&odd), [ids[1].clone(), ids[3].clone()]);
    let v1 = face.ask("GET", "/sandboxes?metadata=n=1", "").await;
    assert_eq!(listed(&v1), [ids[3].clone(), ids[1].clone()]);
    assert_eq!(face.ask("GET", "/v2/sandboxes?state=paused", "").await.body, "[]");
    assert_eq!(face.ask("GET", "/v2/sandboxes?template=unknown", "").await.body, "[]");
    let late = face.ask("GET", "/v2/sandboxes?startedAfter=1970-01-01T00:00:03Z&order=asc", "").await;
    assert_eq!(listed(&late), ids[3..]);
}

#[tokio::test]
async fn native_answers_say_what_isolates() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base","envVars":{"S":"hunter2"}}"#).await;
    let info = face.ask("GET", "/v1/info", "").await.json();
    assert_eq!(
        info["engine"],
        json!({"name": "fake", "version": "1", "isolation": "none", "refuses": ["checkpoint"]})
    );
    let answer = face.ask("GET", &format!("/v1/sandboxes/{id}"), "").await;
    let sandbox = answer.json();
    assert_eq!(sandbox["engine"], "fake");
    assert_eq!(sandbox["network"], "policy");
    assert_eq!(sandbox["usage"]["cpu_micros"], 7);
    assert_eq!(sandbox["unused_for"], 90);
    assert_eq!(sandbox["events"][0]["at"], "1970-01-01T00:00:00.000Z");
    assert_eq!(sandbox["limits"]["memory_mib"], 1024);
    assert!(!answer.body.contains("hunter2") && !answer.body.contains("token\""), "{}", answer.body);
    let list = face.ask("GET", "/v1/sandboxes", "").await.json();
    assert_eq!(list[0]["id"], id.as_str());
}

#[tokio::test]
async fn browsers_may_call_from_anywhere() {
    let face = Face::new();
    let preflight = [
        ("origin", "https://app.test"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "x-api-key,e2b-sandbox-id"),
    ];
    let answer = face.send(Method::OPTIONS.as_str(), "/v2/sandboxes", &preflight, "").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    let answer =
        face.send("GET", "/v2/sandboxes", &[("origin", "https://app.test"), ("x-api-key", KEY)], "").await;
    assert!(answer.header("access-control-expose-headers").unwrap().contains("x-next-token"));
}

#[tokio::test]
async fn what_sandboxes_used() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base"}"#).await;
    let other = face.create(r#"{"templateID":"base"}"#).await;
    let all = face.ask("GET", &format!("/sandboxes/{id}/metrics"), "").await.json();
    assert_eq!(
        all,
        json!([{
            "timestamp": "1970-01-01T00:00:05.000Z", "timestampUnix": 5, "cpuCount": 2, "cpuUsedPct": 12.5,
            "memUsed": 1_u64 << 30, "memTotal": 1_u64 << 30, "memCache": 0, "diskUsed": 4096, "diskTotal": 4_u64 << 30,
        }])
    );
    for (window, found) in [("start=5", 1), ("start=6", 0), ("end=5", 1), ("end=4", 0), ("start=5&end=5", 1)]
    {
        let told = face.ask("GET", &format!("/sandboxes/{id}/metrics?{window}"), "").await.json();
        assert_eq!(told.as_array().unwrap().len(), found, "{window}");
    }
    for window in ["start=x", "start=-1", "end=1.5", "start=2&end=1", "start=99999999999999999999"] {
        face.ask("GET", &format!("/sandboxes/{id}/metrics?{window}"), "").await.error(400);
    }
    let path = format!("/sandboxes/metrics?sandbox_ids={id},{other}&sandbox_ids=abcdefghij0123456789,x");
    let several = face.ask("GET", &path, "").await.json();
    assert_eq!(several["sandboxes"].as_object().unwrap().len(), 2);
    assert_eq!(several["sandboxes"][&id], all[0]);
    face.ask("GET", "/sandboxes/metrics?sandbox_ids=", "").await.error(400);
}

#[tokio::test]
async fn snapshots_are_made_listed_and_deleted() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base"}"#).await;
    let path = format!("/sandboxes/{id}/snapshots");
    let first = face.ask("POST", &path, "").await;
    assert_eq!((first.status, first.json()["names"].clone()), (201, serde_json::json!([])), "{}", first.body);
    let named = face.ask("POST", &path, r#"{"name":"Nightly:v2"}"#).await;
    assert_eq!(named.json()["names"], serde_json::json!(["default/nightly:v2"]), "{}", named.body);
    let without_memory = face.ask("POST", &path, r#"{"memory":false}"#).await;
    without_memory.error(400);
    assert_eq!(without_memory.json()["error_code"], "snapshot_filesystem_only_disabled");
    for body in [r#"{"name":"a b"}"#, r#"{"name":7}"#, r#"{"name":""}"#, "[]"] {
        face.ask("POST", &path, body).await.error(400);
    }
    face.ask("POST", "/sandboxes/00000000000000000000/snapshots", "").await.error(404);

    let [first, named] =
        [first, named].map(|answer| answer.json()["snapshotID"].as_str().unwrap().to_owned());
    let listed = async |query: &str| {
        let answer = face.ask("GET", &format!("/snapshots{query}"), "").await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let ids: Vec<_> =
            answer.json().as_array().unwrap().iter().map(|row| row["snapshotID"].to_string()).collect();
        (ids, answer.header("x-next-token").map(str::to_owned))
    };
    let quoted = [&named, &first].map(|id| format!("\"{id}\""));
    assert_eq!(listed("").await, (quoted.to_vec(), None));
    assert_eq!(listed(&format!("?sandboxID={id}")).await.0.len(), 2);
    assert_eq!(listed("?sandboxID=00000000000000000000").await.0.len(), 0);
    assert_eq!(listed("?name=nightly").await.0, quoted[..1]);
    let (page, next) = listed("?limit=1").await;
    assert_eq!(page, quoted[..1]);
    assert_eq!(listed(&format!("?limit=1&nextToken={}", next.unwrap())).await, (quoted[1..].to_vec(), None));
    for query in ["limit=0", "limit=x", "nextToken=x", "name=a%20b", "sandboxID=A"] {
        face.ask("GET", &format!("/snapshots?{query}"), "").await.error(400);
    }
    let native = face.ask("GET", "/v1/snapshots?name=nightly", "").await.json();
    assert_eq!(native[0]["name"], "default/nightly:v2");
    assert_eq!(native[0]["sandbox"], *id);
    let use_of =
        async |id: &str| face.ask("GET", &format!("/v1/snapshots/{id}"), "").await.json()["disk"].take();
    let free = json!({ "bytes": 4096, "unique_bytes": 1024, "freed_by_deletion_bytes": 1024,
        "deletion_deferred": null, "exact": true, "compressed": false });
    assert_eq!(native[0]["disk"], free);
    assert_eq!(use_of(&named).await, free);
    let deferred = use_of(&first).await;
    assert_eq!((&deferred["unique_bytes"], &deferred["freed_by_deletion_bytes"]), (&1024.into(), &0.into()));
    assert!(deferred["deletion_deferred"].as_str().unwrap().contains("being made from it"), "{deferred}");
    // It is there, whatever is known of its bytes.
    let third = face.ask("POST", &path, "").await.json()["snapshotID"].as_str().unwrap().to_owned();
    assert_eq!(use_of(&third).await, serde_json::Value::Null);
    // That of any team, for who may do without asking it; and by nothing that may be another team's as well.
    let path = format!("/v1/snapshots/{third}");
    face.send("DELETE", &path, &[("x-api-key", OTHER_KEY)], "").await.error(403);
    assert_eq!(face.ask("DELETE", &path, "").await.status, 204);
    face.ask("DELETE", &path, "").await.error(404);
    face.ask("DELETE", "/v1/snapshots/default%2Fnightly%3Av2", "").await.error(400);
    let sandbox = face.ask("GET", &format!("/v1/sandboxes/{id}"), "").await.json();
    assert_eq!(sandbox["tree_bytes"], 8192);
    face.ask("GET", "/v1/snapshots/absent", "").await.error(404);
    face.ask("GET", "/v1/snapshots/%00", "").await.error(400);

    let delete = async |id: &str| face.ask("DELETE", &format!("/templates/{id}"), "").await;
    assert_eq!(delete("default%2Fnightly%3Av2").await.status, 204);
    delete("default%2Fnightly%3Av2").await.error(404);
    assert_eq!(delete(&first).await.status, 204);
    delete(&first).await.error(404);
    delete("%00").await.error(400);
    assert_eq!(listed("").await.0.len(), 0);
}

#[tokio::test]
async fn a_fork_has_one_answer_for_each_copy() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base"}"#).await;
    let path = format!("/sandboxes/{id}/fork");
    let one = face.ask("POST", &path, "").await;
    assert_eq!(one.status, 201, "{}", one.body);
    let copies = one.json();
    assert_eq!(copies.as_array().unwrap().len(), 1);
    let child = copies[0]["sandbox"]["sandboxID"].as_str().unwrap().to_owned();
    assert_ne!(child, id);
    let detail = face.ask("GET", &format!("/v1/sandboxes/{child}"), "").await.json();
    assert_eq!((&detail["origin"], &detail["made_from"]), (&"fork".into(), &id.clone().into()));
    // Those that fail do so on their own.
    let three = face.ask("POST", &path, r#"{"count":3,"timeout":60}"#).await.json();
    assert_eq!(three[1]["error"], serde_json::Value::Null);
    assert_eq!((&three[2]["error"]["code"], &three[2]["sandbox"]), (&503.into(), &serde_json::Value::Null));
    for body in [r#"{"count":0}"#, r#"{"count":101}"#, r#"{"count":-1}"#, r#"{"timeout":0}"#, "7"] {
        face.ask("POST", &path, body).await.error(400);
    }
    face.ask("POST", "/sandboxes/00000000000000000000/fork", "").await.error(404);
}
