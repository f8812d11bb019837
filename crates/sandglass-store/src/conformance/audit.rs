//! Who changed what.

use std::sync::Arc;

use sandglass_types::{KeyId, TeamId};

use super::at;
use crate::{AuditEntry, MAX_DETAIL, Store};

fn entry(millis: i64) -> AuditEntry {
    AuditEntry {
        at: at(millis),
        team: Some(TeamId::random()),
        key: Some(KeyId::random()),
        request: "0198".into(),
        action: "POST /v2/sandboxes".into(),
        target: Some("abcdefghij0123456789".into()),
        status: 201,
        detail: None,
    }
}

/// Rows come back as they were written, in that order, and end by their age.
pub async fn rows_are_kept_in_their_order_until_they_are_old(store: Arc<dyn Store>) {
    let refused = AuditEntry {
        team: None,
        key: None,
        target: None,
        status: 401,
        detail: Some("invalid API key".into()),
        ..entry(2)
    };
    // A clock that was set back does not change what came first.
    let all = [entry(5), refused, entry(3)];
    for entry in &all {
        store.audit(entry).await.unwrap();
    }
    assert_eq!(store.audited(None, 10).await.unwrap(), all);
    assert_eq!(store.audited(None, 2).await.unwrap(), all[1..]);
    assert_eq!(store.audited(Some(at(3)), 10).await.unwrap(), [all[0].clone(), all[2].clone()]);
    assert_eq!(store.purge_audit(at(3)).await.unwrap(), 1);
    assert_eq!(store.audited(None, 10).await.unwrap(), [all[0].clone(), all[2].clone()]);
}

/// What is too long for people to read is cut.
pub async fn long_reasons_are_cut(store: Arc<dyn Store>) {
    let long = AuditEntry { detail: Some("\u{fc}".repeat(MAX_DETAIL)), ..entry(0) };
    store.audit(&long).await.unwrap();
    let kept = store.audited(None, 1).await.unwrap().remove(0).detail.unwrap();
    assert_eq!(kept, "\u{fc}".repeat(MAX_DETAIL / 2));
}
