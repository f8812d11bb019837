//! Budgets and grants of models.

use super::*;

#[tokio::test]
async fn a_sandbox_is_granted_models_and_its_budget_is_its_team_s() {
    let face = Face::new();
    let id = face.create(r#"{"templateID":"base"}"#).await;
    let path = format!("/v1/sandboxes/{id}/models");
    let body = r#"{"max_cost_micros":40000,"models":["large"],"dialects":["messages"],"timeout_seconds":60}"#;
    let granted = face.ask("POST", &path, body).await;
    assert_eq!(granted.status, 201, "{}", granted.body);
    let granted = granted.json();
    assert_eq!(
        (&granted["base_url"], &granted["token"]),
        (&json!("http://models.internal"), &json!("sgm_secret"))
    );
    let budget = format!("/v1/budgets/{}", granted["budget"].as_str().unwrap());
    let told = face.ask("GET", &budget, "").await.json();
    assert_eq!((&told["max_cost_micros"], &told["left_micros"]), (&json!(40000), &json!(39997)));
    assert_eq!(told["calls"][0]["usage"], json!({"input": 1}));
    assert_eq!(told["calls"][1]["charged_micros"], json!(null));
    // What is written down says whose budget, and never the token.
    let audit = face.fake.audit.lock().unwrap().clone();
    let row = format!("{:?}", audit.last().unwrap());
    assert!(row.contains(granted["budget"].as_str().unwrap()) && !row.contains("sgm_"), "{row}");
    for method in ["GET", "DELETE"] {
        face.send(method, &budget, &[("x-api-key", OTHER_KEY)], "").await.error(404);
        face.send(method, "/v1/budgets/x", &[("x-api-key", KEY)], "").await.error(400);
    }
    let closed = face.ask("DELETE", &budget, "").await.json();
    assert!(closed["closed_at"].is_string() && closed["left_micros"] == 0, "{closed}");
    face.send("POST", &path, &[("x-api-key", OTHER_KEY)], body).await.error(404);
    for (wrong, status) in [
        (r"{}", 400),
        (r#"{"max_cost_micros":-1}"#, 400),
        (r#"{"max_cost_micros":1.5}"#, 400),
        (r#"{"max_cost_micros":1,"dialects":["smoke_signals"]}"#, 400),
        (r#"{"max_cost_micros":1,"budget":"x"}"#, 400),
        (r#"{"max_cost_micros":1,"models":["unheard of"]}"#, 404),
    ] {
        face.ask("POST", &path, wrong).await.error(status);
    }
}
