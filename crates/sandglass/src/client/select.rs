//! Which sandboxes to list: by their labels, which the server compares, by their age, and by when they were used last.

use std::time::Duration;

use sandglass_types::Timestamp;
use serde_json::Value;

/// What the sandboxes have in common that are wanted.
#[derive(Debug, Default)]
pub(crate) struct Selection {
    /// All these labels.
    pub(crate) metadata: Vec<(String, String)>,
    /// Made so long ago, or earlier.
    pub(crate) older: Option<Duration>,
    /// Used by nobody for so long, or longer.
    pub(crate) idle: Option<Duration>,
}

impl Selection {
    /// What is added to the query, beginning with `&`. The server wants labels escaped each, and then all of them together.
    pub(crate) fn query(&self) -> String {
        if self.metadata.is_empty() {
            return String::new();
        }
        let pairs: Vec<_> =
            self.metadata.iter().map(|(key, value)| format!("{}={}", escape(key), escape(value))).collect();
        format!("&metadata={}", escape(&escape(&pairs.join("&"))))
    }

    /// Whether a sandbox that the server lists is old enough. One of which that can't be said is shown.
    pub(crate) fn has_age(&self, listed: &Value, now: Timestamp) -> bool {
        let Some(older) = self.older else { return true };
        let made = listed["startedAt"].as_str().and_then(|text| text.parse::<Timestamp>().ok());
        made.is_none_or(|made| now.since(made) >= older)
    }

    /// Whether nobody has used a sandbox for long enough of which this is told. One of which that can't be said is not shown:
    /// somebody may be about to end what is listed.
    pub(crate) fn is_idle(&self, info: &Value) -> bool {
        let Some(idle) = self.idle else { return true };
        info["unused_for"].as_u64().is_some_and(|unused| unused >= idle.as_secs())
    }
}

/// Every byte that is no letter and no digit as `%xx`.
fn escape(text: &str) -> String {
    let one = |byte: u8| {
        if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    text.bytes().map(one).collect()
}

/// Reads `KEY=VALUE`.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Reads a whole number with its unit: `90s`, `15m`, `1h`, `2d`.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    let unknown = || "expected a whole number with its unit, such as 90s, 15m, 1h or 2d".to_owned();
    let (number, unit) = text.split_at(text.len() - text.chars().next_back().map_or(0, char::len_utf8));
    let seconds: u64 = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return Err(unknown()),
    };
    let number: u64 = number.parse().map_err(|_| unknown())?;
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_a_unit() {
        for (text, seconds) in [("90s", 90), ("15m", 900), ("1h", 3600), ("2d", 172_800), ("0s", 0)] {
            assert_eq!(span(text), Ok(Duration::from_secs(seconds)));
        }
        for text in [
            "",
            "1",
            "h",
            "-1h",
            "1.5h",
            "1 h",
            "1w",
            "1\u{fc}",
            "99999999999999999999s",
            "9999999999999999999d",
        ] {
            assert!(span(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn labels_are_escaped_as_the_server_reads_them() {
        let of = |text| Selection { metadata: vec![label(text).unwrap()], ..Selection::default() }.query();
        assert_eq!(of("a=b c"), "&metadata=a%253Db%252520c");
        assert_eq!(of("a=b=c"), "&metadata=a%253Db%25253Dc");
        assert_eq!(Selection::default().query(), "");
        assert!(label("a").is_err());
    }

    #[test]
    fn only_what_is_known_to_be_unused_is_idle() {
        let told = |unused: Value| serde_json::json!({ "unused_for": unused });
        let idle = Selection { idle: Some(Duration::from_secs(60)), ..Selection::default() };
        assert!(idle.is_idle(&told(60.into())));
        assert!(!idle.is_idle(&told(59.into())));
        assert!(!idle.is_idle(&told(Value::Null)) && !idle.is_idle(&Value::Null));
        assert!(Selection::default().is_idle(&told(Value::Null)));
    }

    #[test]
    fn age_is_counted_to_the_moment() {
        let made = Timestamp::from_millis(1_764_424_800_000);
        let listed = serde_json::json!({ "startedAt": made.to_string() });
        let hour = Duration::from_secs(3600);
        let older = Selection { older: Some(hour), ..Selection::default() };
        assert!(older.has_age(&listed, made.plus(hour)));
        assert!(!older.has_age(&listed, made.plus(hour - Duration::from_millis(1))));
        assert!(Selection::default().has_age(&listed, made));
    }
}
