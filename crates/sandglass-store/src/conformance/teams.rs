//! Teams and keys.

use std::sync::Arc;

use super::{at, digest, key_of, team};
use crate::{Identity, Store, StoreError};
use sandglass_types::{KeyId, TeamId};

/// Two teams never share a name, and what was ended stays ended since then.
pub async fn names_are_unique_and_ends_are_final(store: Arc<dyn Store>) {
    let first = store.create_team("first", at(1)).await.unwrap();
    let second = store.create_team("second", at(2)).await.unwrap();
    let again = store.create_team("first", at(3)).await;
    assert!(
        matches!(again, Err(StoreError::Exists { what: "team", ref name }) if name == "first"),
        "{again:?}"
    );
    assert_eq!(store.teams().await.unwrap(), [first.clone(), second.clone()]);

    assert!(store.revoke_team(first.id, at(10)).await.unwrap());
    assert!(!store.revoke_team(first.id, at(20)).await.unwrap());
    assert!(!store.revoke_team(TeamId::random(), at(20)).await.unwrap());
    let teams = store.teams().await.unwrap();
    assert_eq!(teams[0].revoked_at, Some(at(10)));
    assert_eq!(teams[1], second);
    assert_eq!(store.node().await.unwrap(), store.node().await.unwrap());
}

/// A key works from its making to its end or that of its team, and for its own digest alone.
pub async fn keys_authenticate_until_they_or_their_team_end(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let (one, two) = (key_of(team, 1), key_of(team, 2));
    store.create_key(&one).await.unwrap();
    store.create_key(&two).await.unwrap();
    let doubled = store.create_key(&crate::ApiKey { id: KeyId::random(), ..one.clone() }).await;
    assert!(matches!(doubled, Err(StoreError::Exists { what: "key", .. })), "{doubled:?}");
    assert_eq!(store.keys(Some(team)).await.unwrap(), [one.clone(), two.clone()]);
    assert_eq!(store.keys(Some(TeamId::random())).await.unwrap(), []);

    for (key, operator) in [(&one, false), (&two, true)] {
        let found = store.authenticate(&key.digest, at(5)).await.unwrap();
        assert_eq!(found, Some(Identity { team, key: key.id, operator }));
    }
    assert_eq!(store.authenticate(&digest(9), at(5)).await.unwrap(), None);

    assert!(store.revoke_key(one.id, at(6)).await.unwrap());
    assert!(!store.revoke_key(one.id, at(7)).await.unwrap());
    assert!(!store.revoke_key(KeyId::random(), at(7)).await.unwrap());
    assert_eq!(store.authenticate(&digest(1), at(8)).await.unwrap(), None);
    assert!(store.authenticate(&digest(2), at(8)).await.unwrap().is_some());
    assert_eq!(store.keys(None).await.unwrap()[0].revoked_at, Some(at(6)));

    assert!(store.revoke_team(team, at(9)).await.unwrap());
    assert_eq!(store.authenticate(&digest(2), at(10)).await.unwrap(), None);
}

/// The use of a key is kept, to the minute.
pub async fn use_is_noted_once_a_minute(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    store.create_key(&key_of(team, 1)).await.unwrap();
    for (used, noted) in [(0, 0), (59_999, 0), (60_000, 60_000), (60_001, 60_000), (1_000, 60_000)] {
        assert!(store.authenticate(&digest(1), at(used)).await.unwrap().is_some());
        let key = store.keys(None).await.unwrap().remove(0);
        assert_eq!(key.last_used_at, Some(at(noted)), "used at {used}");
    }
}

/// No key is made for a team that is not there or was ended.
pub async fn keys_of_nobody_are_refused(store: Arc<dyn Store>) {
    let refused = store.create_key(&key_of(TeamId::random(), 1)).await;
    assert!(matches!(refused, Err(StoreError::Missing { what: "team", .. })), "{refused:?}");
    let team = team(&*store).await;
    store.revoke_team(team, at(1)).await.unwrap();
    let refused = store.create_key(&key_of(team, 1)).await;
    assert!(matches!(refused, Err(StoreError::Missing { what: "team", .. })), "{refused:?}");
    assert_eq!(store.keys(None).await.unwrap(), []);
}
