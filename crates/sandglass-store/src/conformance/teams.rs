//! Teams.

use std::sync::Arc;

use super::at;
use crate::{Store, StoreError};
use sandglass_types::TeamId;

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
