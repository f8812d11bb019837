//! Secrets and connections.

use std::collections::BTreeMap;
use std::sync::Arc;

use sandglass_broker::connection::{Limits, Written, WrittenAttach};
use sandglass_types::{SecretId, TeamId};

use super::{at, team};
use crate::{
    ConnectionRow, Kept, MAX_CONNECTIONS, MAX_SECRETS, SecretChange, SecretFilter, SecretKey, SecretRow,
    Store, StoreError,
};

fn secret_of(team: TeamId, name: &str, millis: i64) -> SecretRow {
    SecretRow {
        id: SecretId::random(),
        team,
        name: name.parse().unwrap(),
        version: 1,
        sealed: vec![0, 255, 1],
        metadata: BTreeMap::from([("k\"".into(), "\u{1F600}".into())]),
        created_at: at(millis),
        updated_at: at(millis),
    }
}

fn connection_of(team: TeamId, name: &str, millis: i64) -> ConnectionRow {
    let written = Written {
        name: name.into(),
        target: "https://api.test".into(),
        methods: vec!["GET".into()],
        paths: vec!["/".into()],
        credential: WrittenAttach::Basic { user: "me".into() },
        second_resource: false,
        limits: Limits::default(),
    };
    ConnectionRow {
        team,
        name: name.parse().unwrap(),
        written,
        sealed: vec![1, 0],
        created_at: at(millis),
        updated_at: at(millis),
    }
}

/// Another key is told from the first by what that left.
pub async fn the_first_mark_of_a_key_stays(store: Arc<dyn Store>) {
    assert_eq!(store.mark_key(&[1, 2, 255]).await.unwrap(), [1, 2, 255]);
    assert_eq!(store.mark_key(&[3]).await.unwrap(), [1, 2, 255]);
}

/// Values come and go under one name.
pub async fn a_secret_is_found_by_id_and_name_and_changes_its_value(store: Arc<dyn Store>) {
    let store = &*store;
    let new = secret_of(team(store).await, "a secret", 1);
    assert_eq!(store.insert_secret(&new).await.unwrap(), Kept::Inserted);
    let (id, name) = (SecretKey::Id(new.id), SecretKey::Name(new.name.clone()));
    for key in [&id, &name] {
        assert_eq!(store.secret(new.team, key).await.unwrap().as_ref(), Some(&new));
    }
    let change = SecretChange { sealed: vec![9], metadata: None, at: at(2) };
    let changed = store.update_secret(new.team, &name, &change).await.unwrap().unwrap();
    let expected = SecretRow { version: 2, sealed: vec![9], updated_at: at(2), ..new.clone() };
    assert_eq!(changed, expected);
    let change = SecretChange { metadata: Some(BTreeMap::new()), at: at(3), ..change };
    let changed = store.update_secret(new.team, &id, &change).await.unwrap().unwrap();
    assert_eq!((changed.version, changed.metadata.len()), (3, 0));
    assert_eq!(store.secret(new.team, &id).await.unwrap(), Some(changed));
    assert!(store.delete_secret(new.team, &name).await.unwrap());
    assert!(!store.delete_secret(new.team, &id).await.unwrap());
    assert_eq!(store.secret(new.team, &id).await.unwrap(), None);
    assert_eq!(store.update_secret(new.team, &id, &change).await.unwrap(), None);
}

/// Of another team's secrets nobody sees or changes anything.
pub async fn secrets_of_a_team_are_bounded_and_its_own(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("another", at(0)).await.unwrap().id);
    let first = secret_of(one, "0", 0);
    assert_eq!(store.insert_secret(&first).await.unwrap(), Kept::Inserted);
    assert_eq!(store.insert_secret(&secret_of(one, "0", 1)).await.unwrap(), Kept::NameTaken);
    assert_eq!(store.insert_secret(&secret_of(other, "0", 1)).await.unwrap(), Kept::Inserted);
    let change = SecretChange { sealed: vec![9], metadata: None, at: at(2) };
    let key = SecretKey::Id(first.id);
    assert_eq!(store.secret(other, &key).await.unwrap(), None);
    assert_eq!(store.update_secret(other, &key, &change).await.unwrap(), None);
    assert!(!store.delete_secret(other, &key).await.unwrap());
    assert_eq!(store.secret(one, &key).await.unwrap(), Some(first));
    for number in 1..MAX_SECRETS {
        let new = secret_of(one, &number.to_string(), i64::from(number));
        assert_eq!(store.insert_secret(&new).await.unwrap(), Kept::Inserted);
    }
    let most = MAX_SECRETS;
    assert_eq!(store.insert_secret(&secret_of(one, "more", 0)).await.unwrap(), Kept::TooMany { most });
    assert_eq!(store.insert_secret(&secret_of(other, "more", 0)).await.unwrap(), Kept::Inserted);
    store.revoke_team(other, at(5)).await.unwrap();
    let revoked = store.insert_secret(&secret_of(other, "late", 0)).await;
    assert!(matches!(revoked, Err(StoreError::Missing { .. })), "{revoked:?}");
}

/// No secret comes twice or is left out, whatever happens between two pages.
pub async fn pages_of_secrets_are_stable(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    for (name, millis) in [("a", 1), ("b", 2), ("c", 2), ("d", 3), ("e", 4)] {
        store.insert_secret(&secret_of(team, name, millis)).await.unwrap();
    }
    let (mut after, mut names) = (None, Vec::new());
    loop {
        let page = store.list_secrets(&SecretFilter { team, after, limit: 2 }).await.unwrap();
        names.extend(page.rows.iter().map(|row| row.name.to_string()));
        after = page.next;
        if after.is_none() {
            break;
        }
        store.insert_secret(&secret_of(team, &format!("new {}", names.len()), 9)).await.unwrap();
    }
    assert_eq!((names[0].as_str(), names[1].as_str(), names[4].as_str()), ("e", "d", "a"));
    names.sort();
    assert_eq!(names, ["a", "b", "c", "d", "e"]);
}

/// A connection is what was written last.
pub async fn a_connection_is_replaced_by_the_next_of_its_name(store: Arc<dyn Store>) {
    let store = &*store;
    let first = connection_of(team(store).await, "github", 1);
    let (team, name) = (first.team, &first.name);
    assert_eq!(store.connection(team, name).await.unwrap(), None);
    assert_eq!(store.put_connection(&first).await.unwrap(), Kept::Inserted);
    assert_eq!(store.connection(team, name).await.unwrap().as_ref(), Some(&first));
    let mut second = ConnectionRow { sealed: vec![7], ..connection_of(team, "github", 2) };
    second.written.paths = vec!["/a".into(), "/b".into()];
    assert_eq!(store.put_connection(&second).await.unwrap(), Kept::Replaced);
    let expected = ConnectionRow { created_at: at(1), ..second };
    assert_eq!(store.connection(team, name).await.unwrap().as_ref(), Some(&expected));
    assert_eq!(store.connections(team).await.unwrap(), [expected]);
    assert!(store.delete_connection(team, name).await.unwrap());
    assert!(!store.delete_connection(team, name).await.unwrap());
    assert_eq!(store.connections(team).await.unwrap(), []);
}

/// Of another team's connections nobody sees or changes anything.
pub async fn connections_of_a_team_are_bounded_and_its_own(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("another", at(0)).await.unwrap().id);
    for number in 0..MAX_CONNECTIONS {
        let new = connection_of(one, &number.to_string(), 0);
        assert_eq!(store.put_connection(&new).await.unwrap(), Kept::Inserted);
    }
    let most = MAX_CONNECTIONS;
    assert_eq!(store.put_connection(&connection_of(one, "more", 0)).await.unwrap(), Kept::TooMany { most });
    assert_eq!(store.put_connection(&connection_of(one, "0", 0)).await.unwrap(), Kept::Replaced);
    let name = "1".parse().unwrap();
    assert_eq!(store.connection(other, &name).await.unwrap(), None);
    assert!(!store.delete_connection(other, &name).await.unwrap());
    assert_eq!(store.put_connection(&connection_of(other, "1", 0)).await.unwrap(), Kept::Inserted);
    assert!(store.delete_connection(other, &name).await.unwrap());
    assert!(store.connection(one, &name).await.unwrap().is_some());
}
