//! Keys.

use std::sync::Arc;

use sandglass_types::{Digest, KeyId, TeamId};

use super::{at, digest, key_of, team};
use crate::{ApiKey, Identity, MAX_KEYS, Store, StoreError};

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

/// A use is in the row once it was asked for that, and the latest one stays. Nothing else is written.
pub async fn use_is_written_when_it_is_asked_for(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    store.create_key(&key_of(team, 1)).await.unwrap();
    store.note_uses().await.unwrap();
    let used = async || store.keys(None).await.unwrap().remove(0).last_used_at;
    for (uses, before, after) in [
        (&[1_000, 2_000][..], None, Some(at(2_000))),
        (&[60_000, 59_000], Some(at(2_000)), Some(at(60_000))),
        (&[], Some(at(60_000)), Some(at(60_000))),
        (&[3_000], Some(at(60_000)), Some(at(60_000))),
    ] {
        for time in uses {
            assert!(store.authenticate(&digest(1), at(*time)).await.unwrap().is_some());
        }
        assert_eq!(used().await, before, "{uses:?}");
        store.note_uses().await.unwrap();
        assert_eq!(used().await, after, "{uses:?}");
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

/// Who a key of [`key_of`] acts for.
fn identity(key: &ApiKey) -> Identity {
    Identity { team: key.team, key: key.id, operator: key.operator }
}

/// A key has to do with those of its own team that are no stronger than itself.
pub async fn a_key_ends_and_renames_what_it_may(store: Arc<dyn Store>) {
    let own = team(&*store).await;
    let other = store.create_team("another", at(0)).await.unwrap().id;
    // The second is an operator's.
    let [plain, operator, foreign] = [(own, 1), (own, 2), (other, 3)].map(|(team, byte)| key_of(team, byte));
    let foreign_too = key_of(other, 4);
    for key in [&plain, &operator, &foreign, &foreign_too] {
        store.create_key(key).await.unwrap();
    }
    let name = "called otherwise".parse().unwrap();
    let before = store.keys(None).await.unwrap();
    for key in [operator.id, foreign.id, KeyId::random()] {
        assert!(!store.rename_key(&identity(&plain), key, &name).await.unwrap());
        assert!(!store.retire_key(&identity(&plain), key, at(5)).await.unwrap());
    }
    assert!(
        !store.retire_key(&identity(&operator), foreign.id, at(5)).await.unwrap(),
        "not an operator's either"
    );
    assert_eq!(store.keys(None).await.unwrap(), before);

    assert!(store.rename_key(&identity(&plain), plain.id, &name).await.unwrap());
    assert!(store.rename_key(&identity(&operator), operator.id, &name).await.unwrap());
    assert!(store.keys(Some(own)).await.unwrap().iter().all(|key| key.name == "called otherwise"));
    assert!(store.retire_key(&identity(&operator), plain.id, at(6)).await.unwrap());
    assert_eq!(store.authenticate(&plain.digest, at(6)).await.unwrap(), None);
    assert!(!store.retire_key(&identity(&operator), plain.id, at(7)).await.unwrap(), "it ended before");
    assert!(!store.rename_key(&identity(&operator), plain.id, &name).await.unwrap());
    // The last one, which the command line alone can end.
    assert!(!store.retire_key(&identity(&operator), operator.id, at(8)).await.unwrap());
    assert!(store.authenticate(&operator.digest, at(8)).await.unwrap().is_some());
    assert!(store.revoke_key(operator.id, at(9)).await.unwrap());
}

/// A key makes others until it ends, and who made one is remembered.
pub async fn a_key_makes_others_until_it_ends(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let first = key_of(team, 1);
    store.create_key(&first).await.unwrap();
    let [second, third] = [3, 4].map(|byte| ApiKey { made_by: Some(first.id), ..key_of(team, byte) });
    store.create_key(&second).await.unwrap();
    assert_eq!(store.keys(None).await.unwrap()[1], second);
    assert!(store.revoke_key(first.id, at(5)).await.unwrap());
    let refused = store.create_key(&third).await;
    assert!(matches!(refused, Err(StoreError::Missing { what: "key", .. })), "{refused:?}");
    assert!(store.authenticate(&second.digest, at(6)).await.unwrap().is_some(), "what it made works on");
}

/// However two keys end each other at one time, one is left.
pub async fn of_the_last_two_one_stays(store: Arc<dyn Store>) {
    for round in 0..8 {
        let team = store.create_team(&format!("team {round}"), at(0)).await.unwrap().id;
        let [one, two] = [3 + 2 * round, 4 + 2 * round].map(|byte| key_of(team, byte));
        store.create_key(&one).await.unwrap();
        store.create_key(&two).await.unwrap();
        let by = identity(&one);
        let outcomes =
            tokio::join!(store.retire_key(&by, one.id, at(1)), store.retire_key(&by, two.id, at(1)),);
        assert_eq!([outcomes.0.unwrap(), outcomes.1.unwrap()].iter().filter(|ended| **ended).count(), 1);
    }
}

/// Keys that work are counted, and those of another team are not.
pub async fn a_team_has_so_many_keys(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let key = |n: u32| {
        let mut bytes = [9; 32];
        bytes[..4].copy_from_slice(&n.to_be_bytes());
        ApiKey { digest: Digest::from_bytes(bytes), ..key_of(team, 1) }
    };
    for n in 0..MAX_KEYS {
        store.create_key(&key(n)).await.unwrap();
    }
    let more = store.create_key(&key(MAX_KEYS)).await;
    assert!(matches!(more, Err(StoreError::TooMany { what: "keys", most: MAX_KEYS })), "{more:?}");
    let other = store.create_team("another", at(0)).await.unwrap().id;
    store.create_key(&ApiKey { team: other, ..key(MAX_KEYS) }).await.unwrap();
    let first = store.keys(Some(team)).await.unwrap().remove(0);
    assert!(store.revoke_key(first.id, at(1)).await.unwrap());
    store.create_key(&key(MAX_KEYS + 1)).await.unwrap();
}

/// Of keys that ended, the last thousand are remembered.
pub async fn ended_keys_do_not_pile_up(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let key = |n: i64| {
        let mut bytes = [9; 32];
        bytes[..8].copy_from_slice(&n.to_be_bytes());
        ApiKey { digest: Digest::from_bytes(bytes), revoked_at: Some(at(n)), ..key_of(team, 1) }
    };
    for n in 0..1_003 {
        store.create_key(&key(n)).await.unwrap();
    }
    store.create_key(&key_of(team, 2)).await.unwrap();
    let kept = store.keys(Some(team)).await.unwrap();
    assert_eq!(kept.len(), 1_001);
    let earliest = kept.iter().filter_map(|key| key.revoked_at).min();
    assert_eq!(earliest, Some(at(3)));
}

/// Whoever steals a key can't make so many others that it is forgotten what came of it.
pub async fn a_stolen_key_is_remembered_while_anything_that_came_of_it_works(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let (root, made) = (key_of(team, 1), |by: &ApiKey, n: u16| {
        let mut bytes = [9; 32];
        bytes[..2].copy_from_slice(&n.to_be_bytes());
        ApiKey { made_by: Some(by.id), digest: Digest::from_bytes(bytes), ..key_of(team, 3) }
    });
    let stolen = made(&root, 0);
    let thief = made(&stolen, 1);
    for key in [&root, &stolen, &thief] {
        store.create_key(key).await.unwrap();
    }
    assert!(store.revoke_key(stolen.id, at(0)).await.unwrap());
    for n in 2..1_010 {
        let junk = made(&thief, n);
        store.create_key(&junk).await.unwrap();
        assert!(store.revoke_key(junk.id, at(i64::from(n))).await.unwrap());
    }
    store.create_key(&made(&root, 2000)).await.unwrap();
    let keys = store.keys(Some(team)).await.unwrap();
    assert!(keys.len() <= 1_004, "{}", keys.len());
    assert!(keys.iter().any(|key| key.id == stolen.id), "it is remembered");
    assert_eq!(keys.iter().find(|key| key.id == thief.id).unwrap().made_by, Some(stolen.id));
}

/// A key that was ended meanwhile ends no other and calls none otherwise.
pub async fn a_key_that_has_ended_changes_nothing(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let keys = [key_of(team, 1), key_of(team, 2), key_of(team, 3)];
    for key in &keys {
        store.create_key(key).await.unwrap();
    }
    let by = Identity { team, key: keys[0].id, operator: true };
    let name = "other".parse().unwrap();
    assert!(store.rename_key(&by, keys[1].id, &name).await.unwrap());
    assert!(store.revoke_key(keys[0].id, at(1)).await.unwrap());
    assert!(!store.rename_key(&by, keys[1].id, &name).await.unwrap());
    assert!(!store.retire_key(&by, keys[1].id, at(2)).await.unwrap());
}

/// However many keys are made and ended in between, what came of a key is found by it.
pub async fn what_came_of_a_key_is_found_for_as_long_as_it_is_there(store: Arc<dyn Store>) {
    let team = team(&*store).await;
    let stolen = key_of(team, 1);
    store.create_key(&stolen).await.unwrap();
    let mut last = stolen.clone();
    for n in 0_u16..1_010 {
        let mut bytes = [9; 32];
        bytes[..2].copy_from_slice(&n.to_be_bytes());
        let next = ApiKey { made_by: Some(last.id), digest: Digest::from_bytes(bytes), ..key_of(team, 3) };
        store.create_key(&next).await.unwrap();
        assert!(store.revoke_key(last.id, at(i64::from(n))).await.unwrap());
        last = next;
    }
    let keys = store.keys(Some(team)).await.unwrap();
    assert!(keys.len() <= 1_003, "{}", keys.len());
    // From the last one that works, back to the first.
    let mut made_by = last.made_by;
    let mut steps = 0;
    while let Some(by) = made_by {
        steps += 1;
        let maker = keys.iter().find(|key| key.id == by);
        made_by = maker.expect("who made it is remembered").made_by;
        if made_by.is_none() {
            assert_eq!(by, stolen.id);
        }
    }
    assert!(steps > 900, "{steps}");
}
