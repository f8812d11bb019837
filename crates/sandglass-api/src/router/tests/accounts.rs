//! Teams and keys.

use super::*;

#[tokio::test]
async fn a_team_is_told_to_its_own_keys_however_they_come() {
    let face = Face::new();
    let [own, other] = face.fake.identities();
    let bearer = format!("Bearer {KEY}");
    for headers in [[("x-api-key", KEY)], [("authorization", bearer.as_str())]] {
        let told = face.send("GET", "/teams", &headers, "").await.json();
        let team = own.team.to_string();
        assert_eq!(told, json!([{"teamID": team, "name": "acme", "apiKey": KEY, "isDefault": true}]));
    }
    let answer = face.ask("GET", "/teams", "").await;
    assert_eq!(answer.header("cache-control"), Some("no-store"), "it has the key in it");
    for wrong in ["Bearer sk_e2b_00", "Bearer e2b_00", "Basic e2b_00", "Bearer"] {
        face.send("GET", "/teams", &[("authorization", wrong)], "").await.error(401);
    }
    face.create(r#"{"templateID":"base"}"#).await;
    let metrics = face.ask("GET", &format!("/teams/{}/metrics?start=61", own.team), "").await.json();
    let rate = metrics[0]["sandboxStartRate"].as_f64().unwrap();
    assert!((rate - 0.05).abs() < 1e-6, "{metrics}");
    assert_eq!((&metrics[0]["concurrentSandboxes"], &metrics[0]["timestampUnix"]), (&json!(1), &json!(61)));
    let most = format!("/teams/{}/metrics/max?metric=concurrent_sandboxes", own.team);
    assert_eq!(face.ask("GET", &most, "").await.json()["value"], 1.0);
    let unknown = sandglass_types::TeamId::random();
    for team in [other.team.to_string(), unknown.to_string(), "acme".into(), "%ff".into()] {
        for path in [format!("/teams/{team}/metrics"), format!("/teams/{team}/metrics/max?metric=x")] {
            let status = if team == "%ff" { 400 } else { 404 };
            face.ask("GET", &path, "").await.error(status);
        }
    }
    for query in ["start=x", "start=2&end=1", "end=-1"] {
        face.ask("GET", &format!("/teams/{}/metrics?{query}", own.team), "").await.error(400);
    }
    face.ask("GET", &format!("/teams/{}/metrics/max?metric=cpu", own.team), "").await.error(400);
}

#[tokio::test]
async fn a_key_is_made_shown_once_renamed_and_ended() {
    let face = Face::new();
    let [own, _] = face.fake.identities();
    let made = face.ask("POST", "/api-keys", r#"{"name":"ci"}"#).await;
    assert_eq!(made.status, 201, "{}", made.body);
    let made = made.json();
    let secret = made["key"].as_str().unwrap().to_owned();
    let value = secret.strip_prefix("e2b_").unwrap();
    assert_eq!(
        made["mask"],
        json!({"prefix": "e2b_", "valueLength": 40, "maskedValuePrefix": "", "maskedValueSuffix": value[36..]})
    );
    assert_eq!(made["createdBy"], json!({"id": own.key.to_string(), "email": null}));
    let id = made["id"].as_str().unwrap().to_owned();
    let listed = face.ask("GET", "/api-keys", "").await;
    assert!(!listed.body.contains(value));
    let mut shown = made.clone();
    shown.as_object_mut().unwrap().remove("key");
    assert_eq!(listed.json(), json!([shown]));

    let path = format!("/api-keys/{id}");
    let renamed = face.ask("PATCH", &path, r#"{"name":"laptop"}"#).await;
    assert_eq!((renamed.status, &renamed.json()["name"]), (200, &json!("laptop")));
    let other = [("x-api-key", OTHER_KEY)];
    assert_eq!(face.send("GET", "/api-keys", &other, "").await.json(), json!([]));
    face.send("PATCH", &path, &other, r#"{"name":"theirs"}"#).await.error(404);
    face.send("DELETE", &path, &other, "").await.error(404);
    for body in ["{}", r#"{"name":""}"#, r#"{"name":"a\n"}"#, r#"{"name":7}"#, r#"{"name":null}"#] {
        face.ask("POST", "/api-keys", body).await.error(400);
        face.ask("PATCH", &path, body).await.error(400);
    }
    let long = json!({ "name": "x".repeat(65) }).to_string();
    assert!(face.ask("POST", "/api-keys", &long).await.error(400).contains("64 bytes"));
    for id in ["x", "e2b_00", "%ff"] {
        face.ask("DELETE", &format!("/api-keys/{id}"), "").await.error(400);
    }
    assert_eq!(face.ask("DELETE", &path, "").await.status, 204);
    face.ask("DELETE", &path, "").await.error(404);

    let audit = face.fake.audit.lock().unwrap();
    let of = |action: &str, status| {
        let row = audit.iter().find(|row| row.action == action && row.status == status);
        row.unwrap_or_else(|| panic!("{action} {status}: {audit:?}")).target.clone()
    };
    for (action, status) in
        [("POST /api-keys", 201), ("PATCH /api-keys/{id}", 200), ("DELETE /api-keys/{id}", 204)]
    {
        assert_eq!(of(action, status).as_deref(), Some(&*id));
    }
    assert!(!format!("{audit:?}").contains(value));
}
