//! Query strings, decoded by hand: clients repeat keys and encode twice.

use std::borrow::Cow;
use std::collections::BTreeMap;

use percent_encoding::percent_decode_str;

use crate::error::ApiError;

/// Most pairs of one query string, and most labels of one metadata filter.
const MAX_PAIRS: usize = 64;

/// Decodes one component: `+` is a space, a malformed escape or invalid UTF-8 is an error.
fn unescape(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let well_formed = bytes.iter().enumerate().filter(|(_, b)| **b == b'%').all(|(at, _)| {
        bytes.get(at + 1..at + 3).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    });
    if !well_formed {
        return None;
    }
    let spaced: Cow<'_, str> = if text.contains('+') { text.replace('+', " ").into() } else { text.into() };
    percent_decode_str(&spaced).decode_utf8().ok().map(Cow::into_owned)
}

fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let parts: Vec<&str> = text.split('&').filter(|part| !part.is_empty()).collect();
    if parts.len() > MAX_PAIRS {
        return None;
    }
    parts
        .into_iter()
        .map(|part| {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            Some((unescape(key)?, unescape(value)?))
        })
        .collect()
}

/// A decoded query string.
#[derive(Debug)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    /// # Errors
    /// A malformed escape, text that is not UTF-8, or more than [`MAX_PAIRS`] pairs.
    pub(crate) fn parse(raw: Option<&str>) -> Result<Self, ApiError> {
        pairs(raw.unwrap_or("")).map(Self).ok_or_else(|| ApiError::invalid("malformed query string"))
    }

    /// The last value under `key`; an empty one counts as absent.
    pub(crate) fn one(&self, key: &str) -> Option<&str> {
        self.0.iter().rev().find(|(k, v)| k == key && !v.is_empty()).map(|(_, v)| v.as_str())
    }

    /// The number under `key`, 0 or more; `what` says what else it must be, to who wrote something else.
    ///
    /// # Errors
    /// It is none.
    pub(crate) fn number(&self, key: &str, what: &str) -> Result<Option<i64>, ApiError> {
        let wrong = || ApiError::invalid(format!("{key} must be {what}"));
        self.one(key).map(|text| text.parse().ok().filter(|n: &i64| *n >= 0).ok_or_else(wrong)).transpose()
    }

    /// All values under `key`, each as it is.
    pub(crate) fn each<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(k, v)| k == key && !v.is_empty()).map(|(_, v)| v.as_str())
    }

    /// All values under `key`, whether they were joined by commas or came in repeated keys.
    pub(crate) fn many<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0
            .iter()
            .filter(move |(k, _)| k == key)
            .flat_map(|(_, v)| v.split(','))
            .filter(|value| !value.is_empty())
    }
}

/// Decodes the `metadata` filter as the SDKs encode it: keys and values escaped, joined with `=` and `&`, and the
/// whole escaped once more before it becomes a query value. Text written by hand survives the same chain.
///
/// # Errors
/// A malformed escape, a pair without `=`, or more than [`MAX_PAIRS`] pairs.
pub(crate) fn metadata_filter(value: Option<&str>) -> Result<BTreeMap<String, String>, ApiError> {
    let decode = |text: &str| {
        let text = unescape(text)?;
        let complete = text.split('&').filter(|part| !part.is_empty()).all(|part| part.contains('='));
        if complete { Some(pairs(&text)?.into_iter().collect()) } else { None }
    };
    value.map_or(Some(BTreeMap::new()), decode).ok_or_else(|| {
        ApiError::invalid("invalid metadata filter: expected key=value pairs joined by '&', URL-encoded")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filter(raw_query: &str) -> Option<Vec<(String, String)>> {
        let query = Query::parse(Some(raw_query)).ok()?;
        metadata_filter(query.one("metadata")).ok().map(|map| map.into_iter().collect())
    }

    #[test]
    fn the_wire_forms_of_both_sdks_decode() {
        let pair = |k: &str, v: &str| Some(vec![(k.to_owned(), v.to_owned())]);
        assert_eq!(filter("metadata=a%3Db%252520c"), pair("a", "b c"));
        assert_eq!(filter("metadata=k%25253D%3Dv%252526"), pair("k=", "v&"));
        assert_eq!(filter("metadata=a=b"), pair("a", "b"));
        assert_eq!(filter("metadata=a%3Da%25252Bb"), pair("a", "a+b"));
        assert_eq!(filter("metadata=a=b=c"), pair("a", "b=c"));
        assert_eq!(filter("limit=3"), Some(vec![]));
        assert_eq!(filter("metadata="), Some(vec![]));
        assert_eq!(
            filter("metadata=a%3D1%26b%3D2"),
            Some(vec![("a".into(), "1".into()), ("b".into(), "2".into())])
        );
    }

    #[test]
    fn malformed_filters_are_refused() {
        for raw in ["metadata=a", "metadata=a%3D%2525zz", "metadata=%zz", "metadata=a%3D%25ff", "metadata=%f"]
        {
            assert_eq!(filter(raw), None, "{raw}");
        }
        let many = (0..65).map(|n| format!("k{n}%3D1")).collect::<Vec<_>>().join("%26");
        assert_eq!(filter(&format!("metadata={many}")), None);
    }

    #[test]
    fn lists_come_joined_or_repeated() {
        let query = Query::parse(Some("state=running,paused&state=x&a=1&a=2&b=")).unwrap();
        assert_eq!(query.many("state").collect::<Vec<_>>(), ["running", "paused", "x"]);
        assert_eq!(query.one("a"), Some("2"));
        assert_eq!(query.one("b"), None);
    }

    fn quoted(text: &str) -> String {
        percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
    }

    proptest! {
        #[test]
        fn any_labels_survive_the_encoding_of_the_sdks(
            labels in proptest::collection::btree_map("\\PC{1,8}", "\\PC{0,8}", 1..5)
        ) {
            let joined = labels
                .iter()
                .map(|(k, v)| format!("{}={}", quoted(&quoted(k)), quoted(&quoted(v))))
                .collect::<Vec<_>>()
                .join("&");
            let decoded = filter(&format!("metadata={}", quoted(&joined)));
            prop_assert_eq!(decoded, Some(labels.into_iter().collect::<Vec<_>>()));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = Query::parse(Some(&text));
            let _ = metadata_filter(Some(&text));
        }
    }
}
