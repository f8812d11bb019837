use sandglass_store::SqliteStore;
use serde_json::Value;
use tempfile::TempDir;

use super::*;

const NOW: Timestamp = Timestamp::from_millis(1_760_000_000_000);

async fn open() -> (SqliteStore, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    (SqliteStore::open(&folder.path().join("store.db")).await.unwrap(), folder)
}

fn text(out: Vec<u8>) -> String {
    String::from_utf8(out).unwrap()
}

fn value(out: &[u8]) -> Value {
    serde_json::from_slice(out).unwrap()
}

#[tokio::test]
async fn a_key_works_until_it_is_revoked_and_its_secret_is_shown_once() {
    let (store, _folder) = open().await;
    let mut out = Vec::new();
    team_create(&store, "acme", NOW, Format::Json, &mut out).await.unwrap();
    let team = value(&out);
    assert_eq!(team["name"], "acme");

    let mut out = Vec::new();
    key_create(&store, "acme", "laptop", false, NOW, Format::Text, &mut out).await.unwrap();
    let secret = text(out).trim_end().to_owned();
    let hex = secret.strip_prefix("e2b_").unwrap();
    assert!(hex.len() == 40 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')), "{secret}");
    let found = store.authenticate(&ApiKey::digest_of(&secret), NOW).await.unwrap().unwrap();
    assert_eq!(found.team.to_string(), team["id"]);
    assert!(!found.operator);

    for format in [Format::Text, Format::Json] {
        let mut out = Vec::new();
        key_list(&store, None, format, &mut out).await.unwrap();
        let listed = text(out);
        assert!(listed.contains("laptop") && listed.contains(&secret[40..]), "{listed}");
        assert!(
            !listed.contains(hex) && !listed.contains(&ApiKey::digest_of(&secret).to_string()),
            "{listed}"
        );
    }

    let id = store.keys(None).await.unwrap()[0].id.to_string();
    let mut out = Vec::new();
    key_revoke(&store, &id, false, NOW, Format::Json, &mut out).await.unwrap();
    assert_eq!(value(&out)[0]["revoked_at"], NOW.as_millis());
    assert_eq!(store.authenticate(&ApiKey::digest_of(&secret), NOW).await.unwrap(), None);
    let again = key_revoke(&store, &id, false, NOW, Format::Text, &mut Vec::new()).await.unwrap_err();
    assert!(again.to_string().contains("revoked before"), "{again}");
}

#[tokio::test]
async fn keys_differ_and_json_shows_the_secret_of_a_new_one() {
    let (store, _folder) = open().await;
    team_create(&store, "acme", NOW, Format::Text, &mut Vec::new()).await.unwrap();
    let mut secrets = Vec::new();
    for _ in 0..3 {
        let mut out = Vec::new();
        key_create(&store, "acme", "key", false, NOW, Format::Json, &mut out).await.unwrap();
        let key = value(&out);
        let secret = key["secret"].as_str().unwrap().to_owned();
        assert!(secret.ends_with(key["suffix"].as_str().unwrap()));
        assert!(key.get("digest").is_none(), "{key}");
        secrets.push(secret);
    }
    secrets.dedup();
    assert_eq!(secrets.len(), 3);
}

#[tokio::test]
async fn teams_are_found_by_name_and_id_and_end_with_their_keys() {
    let (store, _folder) = open().await;
    for name in ["acme", "other"] {
        team_create(&store, name, NOW, Format::Text, &mut Vec::new()).await.unwrap();
    }
    let id = store.teams().await.unwrap()[0].id.to_string();
    for team in ["acme", &id] {
        key_create(&store, team, "key", false, NOW, Format::Text, &mut Vec::new()).await.unwrap();
    }
    let mut out = Vec::new();
    key_list(&store, Some("other"), Format::Json, &mut out).await.unwrap();
    assert_eq!(value(&out), serde_json::json!([]));
    team_revoke(&store, &id, NOW, Format::Text, &mut Vec::new()).await.unwrap();
    for (again, said) in [
        (team_revoke(&store, "acme", NOW, Format::Text, &mut Vec::new()).await, "revoked before"),
        (key_create(&store, "acme", "key", false, NOW, Format::Text, &mut Vec::new()).await, "was revoked"),
        (
            key_create(&store, "nobody", "key", false, NOW, Format::Text, &mut Vec::new()).await,
            "no team nobody",
        ),
        (team_create(&store, "other", NOW, Format::Text, &mut Vec::new()).await, "exists already"),
    ] {
        let error = again.unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    let mut out = Vec::new();
    team_list(&store, Format::Text, &mut out).await.unwrap();
    let listed = text(out);
    assert!(listed.contains("acme") && listed.contains("2025-10-09T08:53:20.000Z"), "{listed}");
}

#[tokio::test]
async fn with_a_key_all_end_that_were_made_with_it() {
    let (store, _folder) = open().await;
    let team = store.create_team("acme", NOW).await.unwrap();
    let made = async |by: Option<&ApiKey>| {
        let by = by.map(|key| key.id);
        let NewKey { key, .. } = NewKey::random(team.id, "key".parse().unwrap(), false, by, NOW).unwrap();
        store.create_key(&key).await.unwrap();
        key
    };
    let (first, other) = (made(None).await, made(None).await);
    let child = made(Some(&first)).await;
    let grandchild = made(Some(&child)).await;
    let not_its = made(Some(&other)).await;
    let revoke = async |with_made| {
        let mut out = Vec::new();
        let id = first.id.to_string();
        key_revoke(&store, &id, with_made, NOW, Format::Text, &mut out).await.map(|()| text(out))
    };
    let said = revoke(false).await.unwrap();
    assert!(said.contains("2 keys") && said.contains("--with-made"), "{said}");
    let ended = async || {
        let keys = store.keys(None).await.unwrap();
        keys.into_iter().filter(|key| key.revoked_at.is_some()).map(|key| key.id).collect::<Vec<_>>()
    };
    assert_eq!(ended().await, [first.id]);
    assert_eq!(revoke(true).await.unwrap().lines().count(), 2);
    let mut all = ended().await;
    all.sort();
    let mut expected = [&first, &child, &grandchild].map(|key| key.id);
    expected.sort();
    assert_eq!(all, expected);
    assert!(store.authenticate(&not_its.digest, NOW).await.unwrap().is_some());
    assert!(revoke(true).await.unwrap_err().to_string().contains("revoked before"));
}
