//! Templates as E2B's clients see them.

use super::*;

#[tokio::test]
async fn all_teams_see_what_sandboxes_are_made_from_and_not_what_is_in_it() {
    let face = Face::new();
    let [own, other] = face.fake.identities();
    let other_key = [("x-api-key", OTHER_KEY)];
    for path in
        ["/templates", "/v2/templates", "/default-templates", "/templates/node", "/templates/node/tags"]
    {
        let told = face.send("GET", path, &other_key, "").await;
        assert_eq!(told.status, 200, "{path}: {}", told.body);
        assert!(!told.body.contains("hunter2") && !told.body.contains("pool"), "{path}: {}", told.body);
    }
    let listed = face.ask("GET", "/templates", "").await.json();
    let names: Vec<_> =
        listed.as_array().unwrap().iter().map(|one| one["templateID"].as_str().unwrap()).collect();
    assert_eq!(names, ["base", "node", "py"]);
    let required = [
        "templateID",
        "buildID",
        "cpuCount",
        "memoryMB",
        "diskSizeMB",
        "public",
        "aliases",
        "names",
        "createdAt",
        "updatedAt",
        "createdBy",
        "lastSpawnedAt",
        "spawnCount",
        "buildCount",
        "envdVersion",
        "buildStatus",
    ];
    for field in required {
        assert!(listed[1].get(field).is_some(), "{field}: {listed}");
    }
    assert_eq!(listed[0]["createdAt"], "2025-10-09T08:53:20.000Z", "the start of the server");
    assert_eq!(listed[1]["createdAt"], "2026-02-02T02:40:00.000Z", "when its image was made");
    assert_eq!((&listed[1]["names"], &listed[1]["public"]), (&json!(["node"]), &json!(true)));

    let one = face.ask("GET", "/templates/base", "").await.json();
    let build = &one["builds"][0];
    assert_eq!((&build["buildID"], &build["status"]), (&one["buildID"], &json!("ready")));
    assert!(one["buildID"].as_str().unwrap().parse::<uuid::Uuid>().is_ok());
    assert_eq!(one["buildID"], listed[0]["buildID"], "it is the same until it is built anew");
    assert_ne!(listed[0]["buildID"], listed[2]["buildID"]);
    let tags = face.ask("GET", "/templates/base:default/tags", "").await.json();
    assert_eq!((&tags[0]["tag"], &tags[0]["buildID"]), (&json!("default"), &one["buildID"]));
    for path in ["/templates/nope", "/templates/base:v1", "/templates/acme%2Fbase", "/templates/nope/tags"] {
        face.ask("GET", path, "").await.error(404);
    }
    face.ask("GET", "/templates/%20", "").await.error(400);
    let asking = async |team: String| face.ask("GET", &format!("/templates?teamID={team}"), "").await;
    assert_eq!(asking(own.team.to_string()).await.status, 200);
    asking(other.team.to_string()).await.error(404);
}

#[tokio::test]
async fn a_list_of_templates_has_pages() {
    let face = Face::new();
    let mut names = Vec::new();
    let mut path = "/v2/templates?limit=2".to_owned();
    loop {
        let page = face.ask("GET", &path, "").await;
        let rows = page.json();
        names.extend(rows.as_array().unwrap().iter().map(|one| one["names"][0].as_str().unwrap().to_owned()));
        let Some(token) = page.header("x-next-token") else { break };
        path = format!("/v2/templates?limit=2&nextToken={token}");
    }
    assert_eq!(names, ["base", "node", "py"]);
    for query in ["limit=0", "limit=101", "nextToken=x", "teamID=x"] {
        let status = if query == "teamID=x" { 404 } else { 400 };
        face.ask("GET", &format!("/v2/templates?{query}"), "").await.error(status);
    }
}

#[tokio::test]
async fn a_name_means_a_template_of_the_server_or_a_snapshot_of_the_team() {
    let face = Face::new();
    let alias = async |name: &str| face.ask("GET", &format!("/templates/aliases/{name}"), "").await;
    assert_eq!(alias("base").await.json(), json!({"templateID": "base", "public": true}));
    let id = face.create(r#"{"templateID":"base"}"#).await;
    let made = face.ask("POST", &format!("/sandboxes/{id}/snapshots"), "").await.json();
    let snapshot = made["snapshotID"].as_str().unwrap().strip_suffix(":default").unwrap().to_owned();
    assert_eq!(alias(&snapshot).await.json(), json!({"templateID": snapshot, "public": false}));
    let path = format!("/templates/aliases/{snapshot}");
    face.send("GET", &path, &[("x-api-key", OTHER_KEY)], "").await.error(404);
    alias("nope").await.error(404);
    alias("%20").await.error(400);
    alias("%ff").await.error(400);
}

#[tokio::test]
async fn a_template_is_public_and_can_not_be_made_otherwise() {
    let face = Face::new();
    for path in ["/templates/node", "/v2/templates/node"] {
        for body in [r#"{"public":true}"#, "{}", r#"{"public":null}"#] {
            assert_eq!(face.ask("PATCH", path, body).await.json(), json!({"names": ["node"]}));
        }
        let refused = face.ask("PATCH", path, r#"{"public":false}"#).await.error(501);
        assert!(refused.contains("for all teams"), "{refused}");
        face.ask("PATCH", path, r#"{"public":"no"}"#).await.error(400);
    }
    face.ask("PATCH", "/v2/templates/nope", r#"{"public":true}"#).await.error(404);
}
