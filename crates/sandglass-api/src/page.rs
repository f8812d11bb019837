//! Page tokens: opaque to clients, keyset cursors inside, so pages stay right while sandboxes come and go.

use std::fmt::Display;
use std::str::FromStr;

use axum::response::{IntoResponse as _, Response};
use data_encoding::BASE64URL_NOPAD;
use http::{HeaderName, HeaderValue};
use sandglass_store::{Order, PageCursor};
use sandglass_types::Timestamp;
use serde::Serialize;

use crate::error::ApiError;

/// Where the token of the next page is; absent on the last one.
pub(crate) const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");

/// Longest token that is looked at, in bytes; ours have at most 60.
const MAX_TOKEN_LEN: usize = 128;

const fn suffix(order: Order) -> &'static str {
    match order {
        Order::Ascending => "asc",
        Order::Descending => "desc",
    }
}

/// Writes the token of the page after `cursor`.
pub(crate) fn encode<Id: Display>(cursor: &PageCursor<Id>, order: Order) -> String {
    let text = format!("{}__{}__{}", cursor.created_at.as_millis(), cursor.id, suffix(order));
    BASE64URL_NOPAD.encode(text.as_bytes())
}

/// One page as an answer: the rows, and the token of the page after `next` if there is one.
pub(crate) fn answer<T: Serialize, Id: Display>(
    rows: &[T],
    next: Option<&PageCursor<Id>>,
    order: Order,
) -> Response {
    let mut response = axum::Json(rows).into_response();
    if let Some(cursor) = next
        && let Ok(token) = HeaderValue::try_from(encode(cursor, order))
    {
        response.headers_mut().insert(NEXT_TOKEN, token);
    }
    response
}

/// Reads a token that [`encode`] wrote for the same order.
///
/// # Errors
/// Anything else.
pub(crate) fn decode<Id: FromStr>(token: &str, order: Order) -> Result<PageCursor<Id>, ApiError> {
    let parse = || {
        if token.len() > MAX_TOKEN_LEN {
            return None;
        }
        let bytes = BASE64URL_NOPAD.decode(token.trim_end_matches('=').as_bytes()).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let mut parts = text.split("__");
        let created_at = Timestamp::from_millis(parts.next()?.parse().ok()?);
        let id = parts.next()?.parse().ok()?;
        let same_order = parts.next()? == suffix(order);
        (same_order && parts.next().is_none()).then_some(PageCursor { created_at, id })
    };
    parse().ok_or_else(|| ApiError::invalid("invalid next token"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sandglass_types::SandboxId;

    #[test]
    fn round_trips_in_its_own_order_only() {
        let cursor =
            PageCursor { created_at: Timestamp::from_millis(1_764_424_800_123), id: SandboxId::random() };
        let token = encode(&cursor, Order::Descending);
        assert!(token.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_')), "{token}");
        assert_eq!(decode(&token, Order::Descending).unwrap(), cursor);
        assert!(decode::<SandboxId>(&token, Order::Ascending).is_err());
        assert!(decode::<SandboxId>(&token[1..], Order::Descending).is_err());
    }

    proptest! {
        #[test]
        fn foreign_tokens_are_refused(token in "\\PC{0,200}") {
            prop_assert!(decode::<SandboxId>(&token, Order::Ascending).is_err());
        }
    }
}
