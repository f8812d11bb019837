//! Secrets and connections: what comes in and never goes out.

use super::*;

const VALUE: &str = "hunter22-and-more";

/// Checks that nothing of a value is in an answer or in the audit.
fn kept_to_itself(face: &Face, answer: &Answer) {
    assert!(!answer.body.contains("hunter"), "{}", answer.body);
    let audit = format!("{:?}", face.fake.audit.lock().unwrap());
    assert!(!audit.contains("hunter"), "{audit}");
}

#[tokio::test]
async fn a_secret_is_told_of_without_its_value() {
    let face = Face::new();
    let body = json!({"name": "a key", "value": VALUE, "metadata": {"for": "tests"}}).to_string();
    let made = face.ask("POST", "/secrets", &body).await;
    assert_eq!(made.status, 201, "{}", made.body);
    kept_to_itself(&face, &made);
    let id = made.json()["secretID"].as_str().unwrap().to_owned();
    assert_eq!(face.fake.audit.lock().unwrap().last().unwrap().target.as_deref(), Some(id.as_str()));
    for path in [format!("/secrets/{id}"), "/secrets/a%20key".into()] {
        let shown = face.ask("GET", &path, "").await;
        assert_eq!((shown.status, shown.json()), (200, made.json()));
        let other = face.send("GET", &path, &[("x-api-key", OTHER_KEY)], "").await;
        other.error(404);
    }
    let body = json!({ "value": VALUE }).to_string();
    let changed = face.ask("POST", &format!("/secrets/{id}"), &body).await;
    kept_to_itself(&face, &changed);
    assert_eq!(changed.json()["currentVersion"], 2);
    assert_eq!(changed.json()["metadata"], json!({"for": "tests"}));
    assert_eq!(face.ask("DELETE", "/secrets/a%20key", "").await.status, 204);
    face.ask("DELETE", "/secrets/a%20key", "").await.error(404);
    face.ask("GET", "/secrets/%FF", "").await.error(404);
}

#[tokio::test]
async fn what_is_wrong_with_a_value_is_said_without_it() {
    let face = Face::new();
    let wrong = [
        json!({"name": "a", "value": "hunter\n22-and-more"}),
        json!({"name": "a", "value": {"hunter22": 1}}),
        json!({"name": "a", "value": "hunter"}),
        json!({"name": "a"}),
        json!({"name": "a{b}", "value": VALUE}),
    ];
    for body in wrong {
        let answer = face.ask("POST", "/secrets", &body.to_string()).await;
        answer.error(400);
        kept_to_itself(&face, &answer);
    }
    let body = |change: Value| {
        let mut body = json!({"target": "https://api.test", "methods": ["GET"], "paths": ["/"],
            "credential": "bearer", "value": VALUE});
        for (key, value) in change.as_object().unwrap() {
            body[key] = value.clone();
        }
        body.to_string()
    };
    for (change, said) in [
        (json!({"value": 12}), "value"),
        (json!({"value": "hunter"}), "value"),
        (json!({"credential": VALUE}), "belongs in value"),
        (json!({"credential": {"hunter22": {}}}), "belongs in value"),
    ] {
        let answer = face.ask("PUT", "/v1/connections/github", &body(change)).await;
        let message = answer.error(400);
        assert!(message.contains(said), "{message}");
        kept_to_itself(&face, &answer);
    }
}

#[tokio::test]
async fn secrets_come_in_pages_and_in_bounds() {
    let face = Face::new();
    let make = async |name: &str| {
        face.ask("POST", "/secrets", &json!({"name": name, "value": VALUE}).to_string()).await
    };
    make("first").await;
    make("second").await;
    let refused = make("third").await;
    refused.error(429);
    assert_eq!(refused.json()["error_code"], "secret_limit_reached");
    let page = face.ask("GET", "/secrets?limit=1", "").await;
    assert_eq!(page.json()[0]["name"], "second");
    let token = page.header("x-next-token").unwrap();
    let page = face.ask("GET", &format!("/secrets?limit=1&nextToken={token}"), "").await;
    assert_eq!((page.json()[0]["name"].clone(), page.header("x-next-token")), (json!("first"), None));
    face.ask("GET", "/secrets?nextToken=x", "").await.error(400);
    face.ask("GET", "/secrets?limit=0", "").await.error(400);
}

#[tokio::test]
async fn a_connection_is_made_replaced_and_deleted() {
    let face = Face::new();
    let path = "/v1/connections/github";
    let mut body = json!({"target": "https://api.test", "methods": ["GET"], "paths": ["/"],
        "credential": {"header": {"name": "x-key"}}, "limits": {"concurrent": 2}, "value": VALUE});
    let made = face.ask("PUT", path, &body.to_string()).await;
    assert_eq!(made.status, 201, "{}", made.body);
    kept_to_itself(&face, &made);
    let shown = made.json();
    assert_eq!((&shown["by"], &shown["target"]), (&json!("team"), &json!("https://api.test")));
    assert_eq!(shown["limits"], json!({"requests_per_minute": 600, "concurrent": 2, "body_bytes": 64 << 20}));
    body.as_object_mut().unwrap().remove("value");
    assert_eq!(face.ask("PUT", path, &body.to_string()).await.status, 200);
    assert_eq!(face.ask("GET", path, "").await.json(), shown);
    assert_eq!(face.ask("GET", "/v1/connections", "").await.json(), json!([shown]));
    assert_eq!(face.fake.audit.lock().unwrap().last().unwrap().target.as_deref(), Some("github"));
    let other = |method: &'static str| face.send(method, path, &[("x-api-key", OTHER_KEY)], "");
    other("GET").await.error(404);
    other("DELETE").await.error(404);
    assert_eq!(face.ask("DELETE", path, "").await.status, 204);
    face.ask("GET", path, "").await.error(404);
    face.ask("GET", "/v1/connections/Git", "").await.error(400);
}

#[tokio::test]
async fn a_sandbox_is_granted_connections_by_their_names() {
    let face = Face::new();
    face.create(r#"{"templateID":"base","connections":["github","a-b"]}"#).await;
    face.create(r#"{"templateID":"base","connections":null}"#).await;
    let wrong = face.ask("POST", "/v2/sandboxes", r#"{"templateID":"base","connections":["Git Hub"]}"#).await;
    assert!(wrong.error(400).starts_with("connections: "), "{}", wrong.body);
}
