//! Secrets and connections: who has which, and what they are sealed for.

use std::collections::BTreeMap;

use sandglass_broker::Secret;
use sandglass_broker::connection::Written;
use sandglass_control::{CreateSandbox, KnownConnection};
use sandglass_store::{SecretKey, Store as _};
use sandglass_types::{Error, ErrorKind, TeamId};
use serde_json::json;

use crate::fixture::{HOUR, Server, World, broker, request};
use crate::scripted::Manner;

fn written(name: &str, target: &str) -> Written {
    let written =
        json!({"name": name, "target": target, "methods": ["GET"], "paths": ["/"], "credential": "bearer"});
    serde_json::from_value(written).unwrap()
}

fn value() -> Secret {
    "the value of a team".parse().unwrap()
}

fn refused<T: std::fmt::Debug>(outcome: Result<T, Error>) -> (ErrorKind, String) {
    let error = outcome.unwrap_err();
    (error.kind(), error.to_string())
}

async fn put(
    server: &Server,
    team: TeamId,
    written: Written,
    value: Option<&Secret>,
) -> Result<(KnownConnection, bool), Error> {
    server.control.put_connection(team, written, value).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_has_one_name_and_another_value_each_time() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let (control, team) = (&server.control, server.team);
    let create = async |name: &str| {
        control.create_secret(team, name.parse().unwrap(), &value(), BTreeMap::new()).await
    };
    let made = create("a key").await.unwrap();
    assert!(!String::from_utf8_lossy(&made.sealed).contains("value"));
    assert_eq!(refused(create("a key").await).0, ErrorKind::Conflict);
    let key = SecretKey::Name("a key".parse().unwrap());
    let changed = control.update_secret(team, &key, &value(), None).await.unwrap();
    assert_eq!((changed.id, changed.version), (made.id, 2));
    assert_ne!(changed.sealed, made.sealed);
    let other = TeamId::random();
    assert_eq!(refused(control.secret(other, &key).await).0, ErrorKind::NotFound);
    assert_eq!(refused(control.delete_secret(other, &key).await).0, ErrorKind::NotFound);
    control.delete_secret(team, &key).await.unwrap();
    assert_eq!(refused(control.update_secret(team, &key, &value(), None).await).0, ErrorKind::NotFound);
    let many = (0..300).map(|n| (n.to_string(), String::new())).collect();
    let labels = control.create_secret(team, "b".parse().unwrap(), &value(), many).await;
    assert_eq!(refused(labels).0, ErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credential_is_wanted_again_where_it_would_go_elsewhere() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let team = server.team;
    let there = written("github", "https://api.test");
    let (kind, message) = refused(put(&server, team, there.clone(), None).await);
    assert_eq!((kind, message.starts_with("value: ")), (ErrorKind::Invalid, true), "{message}");
    assert!(put(&server, team, there.clone(), Some(&value())).await.unwrap().1);
    let less = Written { paths: vec!["/a".into()], ..there.clone() };
    assert!(!put(&server, team, less.clone(), None).await.unwrap().1);
    let name = "github".parse().unwrap();
    assert_eq!(server.control.connection(team, &name).await.unwrap().written, less);
    for target in ["https://evil.test", "https://api.test:444"] {
        let moved = written("github", target);
        assert!(refused(put(&server, team, moved.clone(), None).await).1.contains("wanted again"));
        assert_eq!(server.control.connection(team, &name).await.unwrap().written, less);
    }
    let clear = put(&server, team, written("github", "http://api.test"), Some(&value())).await;
    assert!(refused(clear).1.contains("https://"));
    assert!(!put(&server, team, written("github", "https://other.test"), Some(&value())).await.unwrap().1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_team_s_own_connection_comes_before_the_operator_s() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let (control, team, name) = (&server.control, server.team, "operators".parse().unwrap());
    let known = control.connection(team, &name).await.unwrap();
    assert_eq!((known.of_team, known.written.target.as_str()), (None, "http://api.test"));
    let (kind, message) = refused(control.delete_connection(team, &name).await);
    assert_eq!((kind, message.contains("operator's")), (ErrorKind::Forbidden, true));
    put(&server, team, written("operators", "https://own.test"), Some(&value())).await.unwrap();
    put(&server, team, written("github", "https://api.test"), Some(&value())).await.unwrap();
    let targets = async |team| {
        let all = control.connections(team).await.unwrap();
        all.into_iter().map(|known| known.written.target).collect::<Vec<_>>()
    };
    assert_eq!(targets(team).await, ["https://api.test", "https://own.test"]);
    assert_eq!(targets(TeamId::random()).await, ["http://api.test"]);
    control.delete_connection(team, &name).await.unwrap();
    assert_eq!(targets(team).await, ["https://api.test", "http://api.test"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_granted_what_there_is_and_its_forks_have_it_too() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let (control, team) = (&server.control, server.team);
    put(&server, team, written("github", "https://api.test"), Some(&value())).await.unwrap();
    let asked = |names: &[&str]| CreateSandbox {
        connections: names.iter().map(|name| name.parse().unwrap()).collect(),
        ..request(HOUR)
    };
    for (names, said) in [
        (&["github", "gitlab"][..], "PUT /v1/connections/gitlab"),
        (&["github", "github"], "twice"),
        (&["github"; 17], "at most 16"),
    ] {
        let (kind, message) = refused(control.create(team, asked(names)).await.map(drop));
        assert_eq!((kind, message.contains(said)), (ErrorKind::Invalid, true), "{message}");
    }
    let row = control.create(team, asked(&["github", "operators"])).await.unwrap();
    assert_eq!(row.connections, asked(&["github", "operators"]).connections);
    assert!(control.create(team, request(HOUR)).await.unwrap().connections.is_empty());
    let forks = control.fork(team, &row.id, 1, HOUR).await.unwrap();
    assert_eq!(forks[0].as_ref().unwrap().connections, row.connections);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_key_is_told_by_its_mark() {
    let world = World::new();
    let server = world.start().await.unwrap();
    let mark = broker().mark().unwrap();
    let kept = server.store.mark_key(&mark).await.unwrap();
    assert!(broker().made(&kept));
    assert!(!sandglass_control::Broker::new(&[1; 32], []).made(&kept));
}
