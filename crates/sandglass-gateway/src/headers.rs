//! Which headers go on: those that are listed here, and no other, in either direction. What a client sends may be its token; what a
//! provider sends may be about the operator's account.

use http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue};
use sandglass_models::betas;
use sandglass_models::price::Price;

/// Where clients put what they take for a key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const API_KEY: HeaderName = HeaderName::from_static("api-key");

const BETAS: HeaderName = HeaderName::from_static("anthropic-beta");

/// To the provider: what changes the meaning of a body.
const OUT: [HeaderName; 3] =
    [HeaderName::from_static("anthropic-version"), BETAS, HeaderName::from_static("openai-beta")];

/// To the client: what it reads the body by, whether to ask again, and what to tell the provider's support.
const IN: [HeaderName; 8] = [
    CONTENT_TYPE,
    CACHE_CONTROL,
    RETRY_AFTER,
    HeaderName::from_static("retry-after-ms"),
    HeaderName::from_static("x-should-retry"),
    HeaderName::from_static("request-id"),
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("openai-processing-ms"),
];

/// The token of a request. Of several that are not the same, none counts.
pub(crate) fn token(headers: &HeaderMap) -> Option<&str> {
    let bare = headers.get_all(X_API_KEY).iter().chain(headers.get_all(API_KEY));
    let bearer = headers.get_all(AUTHORIZATION).iter().map(HeaderValue::to_str);
    let bearer = bearer.map(|value| {
        let (scheme, token) = value.ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    let mut all = bare.map(|value| value.to_str().ok()).chain(bearer);
    let first = all.next()??;
    all.all(|other| other == Some(first)).then_some(first)
}

/// What goes on to the provider.
pub(crate) fn out(headers: &HeaderMap) -> HeaderMap {
    pick(headers, &OUT)
}

/// Takes out what would change the price of a call.
pub(crate) fn keep_price(headers: &mut HeaderMap, price: &Price) {
    let http::header::Entry::Occupied(said) = headers.entry(BETAS) else { return };
    let (name, said) = said.remove_entry_mult();
    let said: Vec<_> = said.collect();
    let passed = said.iter().filter_map(|value| betas::passed(value.to_str().ok()?, price));
    for value in passed.filter_map(|value| HeaderValue::try_from(value).ok()) {
        headers.append(name.clone(), value);
    }
}

/// What goes on to the client.
pub(crate) fn into(headers: &HeaderMap) -> HeaderMap {
    pick(headers, &IN)
}

fn pick(headers: &HeaderMap, names: &[HeaderName]) -> HeaderMap {
    let mut picked = HeaderMap::new();
    for name in names {
        for value in headers.get_all(name) {
            picked.append(name, value.clone());
        }
    }
    picked
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(*name, value.parse().unwrap());
        }
        map
    }

    #[test]
    fn a_token_is_found_where_clients_put_it() {
        for lines in [
            &[("x-api-key", "sgm_a")][..],
            &[("api-key", "sgm_a")],
            &[("authorization", "Bearer sgm_a")],
            &[("authorization", "bearer sgm_a"), ("x-api-key", "sgm_a")],
        ] {
            assert_eq!(token(&map(lines)), Some("sgm_a"), "{lines:?}");
        }
        for lines in [
            &[][..],
            &[("authorization", "Basic sgm_a")],
            &[("authorization", "sgm_a")],
            &[("authorization", "Bearer sgm_a"), ("x-api-key", "sgm_b")],
            &[("x-api-key", "sgm_a"), ("x-api-key", "sgm_b")],
            &[("x-api-key", "sgm_a"), ("authorization", "Basic x")],
        ] {
            assert_eq!(token(&map(lines)), None, "{lines:?}");
        }
    }

    #[test]
    fn no_beta_goes_on_that_changes_the_price() {
        let table = "[m]\nprovider = \"p\"\nprice = { input = 1, output = 1, max_input = 9, max_output = 9 }";
        let table = sandglass_models::price::Prices::parse(table).unwrap();
        let price = &table.model("m").unwrap().1.price;
        let mut sent = map(&[
            ("anthropic-beta", "a,compact-2026-01-12"),
            ("anthropic-beta", "context-1m-2025-08-07"),
            ("anthropic-beta", "b"),
            ("anthropic-version", "2023-06-01"),
        ]);
        keep_price(&mut sent, price);
        let kept = [("anthropic-beta", "a"), ("anthropic-beta", "b"), ("anthropic-version", "2023-06-01")];
        assert_eq!(sent, map(&kept));
    }

    #[test]
    fn neither_tokens_nor_accounts_go_on() {
        let sent = map(&[
            ("authorization", "Bearer sgm_a"),
            ("x-api-key", "sgm_a"),
            ("anthropic-beta", "a"),
            ("anthropic-beta", "b"),
            ("accept-encoding", "gzip"),
            ("cookie", "c"),
            ("x-codex-turn-metadata", "{}"),
        ]);
        assert_eq!(out(&sent), map(&[("anthropic-beta", "a"), ("anthropic-beta", "b")]));
        let answered = map(&[
            ("content-type", "text/event-stream"),
            ("set-cookie", "s"),
            ("openai-organization", "acme"),
            ("anthropic-organization-id", "1"),
            ("x-ratelimit-remaining-requests", "1"),
            ("anthropic-ratelimit-tokens-limit", "1"),
            ("transfer-encoding", "chunked"),
            ("request-id", "req_1"),
        ]);
        assert_eq!(into(&answered), map(&[("content-type", "text/event-stream"), ("request-id", "req_1")]));
    }
}
