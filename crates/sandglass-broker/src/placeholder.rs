//! Values of headers that name secrets: `Bearer ${e2b.secrets.NAME}`.
//!
//! They are read where a client sets them and filled where a request goes out. A sandbox has neither.

use std::str::FromStr;

use crate::secret::{MAX_SECRET_NAME, SecretName};

/// Most secrets that one value names.
pub const MAX_NAMES: usize = 32;

/// Longest value, in bytes, before it is filled.
pub const MAX_VALUE: usize = 2048;

const BEGIN: &str = "${e2b.";
const SECRETS: &str = "secrets.";

/// A value with its secrets still to be put in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Secret(SecretName),
}

/// Why a text is no [`Value`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// It can't be in a header.
    #[error("a header's value has at most {MAX_VALUE} bytes of printable ASCII")]
    Unprintable,
    /// It begins as a placeholder and is none.
    #[error(
        "a placeholder is ${{e2b.secrets.NAME}}, where NAME has 1 to {MAX_SECRET_NAME} bytes and no brace"
    )]
    Malformed,
    /// It asks for a token of the sandbox's identity.
    #[error("this server has no identity tokens: use a secret, ${{e2b.secrets.NAME}}")]
    Identity,
    /// It names too many.
    #[error("a value names at most {MAX_NAMES} secrets")]
    TooMany,
}

impl FromStr for Value {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        if text.len() > MAX_VALUE || !text.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\t')) {
            return Err(InvalidValue::Unprintable);
        }
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, after)) = rest.split_once(BEGIN) {
            let (inside, behind) = after.split_once('}').ok_or(InvalidValue::Malformed)?;
            if inside.starts_with("identity.") {
                return Err(InvalidValue::Identity);
            }
            let name = inside.strip_prefix(SECRETS).ok_or(InvalidValue::Malformed)?;
            let name = name.parse().map_err(|_| InvalidValue::Malformed)?;
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            parts.push(Part::Secret(name));
            rest = behind;
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        let value = Self(parts);
        if value.names().count() > MAX_NAMES { Err(InvalidValue::TooMany) } else { Ok(value) }
    }
}

impl Value {
    /// The secrets that it names, in their order.
    pub fn names(&self) -> impl Iterator<Item = &SecretName> {
        self.0.iter().filter_map(|part| if let Part::Secret(name) = part { Some(name) } else { None })
    }

    /// The value with each secret put in. What is put in is not read again: a secret that looks like a placeholder stays as it is. `None`
    /// if one is missing.
    pub fn filled<'a>(&self, secret: impl Fn(&SecretName) -> Option<&'a str>) -> Option<String> {
        let mut filled = String::new();
        for part in &self.0 {
            filled.push_str(match part {
                Part::Text(text) => text,
                Part::Secret(name) => secret(name)?,
            });
        }
        Some(filled)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn secrets_are_named_and_put_in() {
        let value: Value = "Bearer ${e2b.secrets.a}/${e2b.secrets.b c} $ {} ${x}".parse().unwrap();
        assert_eq!(value.names().map(SecretName::as_str).collect::<Vec<_>>(), ["a", "b c"]);
        let secret = |name: &SecretName| Some(if name.as_str() == "a" { "${e2b.secrets.b c}" } else { "2" });
        assert_eq!(value.filled(secret).unwrap(), "Bearer ${e2b.secrets.b c}/2 $ {} ${x}");
        assert_eq!(value.filled(|name| (name.as_str() == "a").then_some("1")), None);
        let plain: Value = "text/plain".parse().unwrap();
        assert_eq!(plain.filled(|_| None).unwrap(), "text/plain");
    }

    #[test]
    fn what_begins_as_a_placeholder_and_is_none_is_refused() {
        for (text, error) in [
            ("${e2b.secrets.a", InvalidValue::Malformed),
            ("${e2b.secrets.}", InvalidValue::Malformed),
            ("${e2b.secrets.a{b}", InvalidValue::Malformed),
            ("${e2b.secret.a}", InvalidValue::Malformed),
            ("${e2b.${e2b.secrets.a}", InvalidValue::Malformed),
            ("${e2b.identity.tokens.a}", InvalidValue::Identity),
            ("a\r\nb", InvalidValue::Unprintable),
            ("ä", InvalidValue::Unprintable),
            (&"x".repeat(2049), InvalidValue::Unprintable),
            (&"${e2b.secrets.a}".repeat(33), InvalidValue::TooMany),
        ] {
            assert_eq!(text.parse::<Value>(), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_read_is_filled_without_loss(text in "([ -~]{0,8}|\\$\\{e2b\\.secrets\\.[a-z]\\}){0,6}") {
            if let Ok(value) = text.parse::<Value>() {
                let names: Vec<_> = value.names().cloned().collect();
                let back: Vec<_> = names.iter().map(|name| format!("${{e2b.secrets.{name}}}")).collect();
                let find = |name: &SecretName| {
                    names.iter().position(|known| known == name).map(|at| back[at].as_str())
                };
                prop_assert_eq!(value.filled(find).unwrap(), text);
            }
        }
    }
}
