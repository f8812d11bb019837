//! What clients call templates and snapshots: `[namespace/]name[:tag]`.

use std::fmt;
use std::str::FromStr;

/// The tag of a reference that has none.
pub const DEFAULT_TAG: &str = "default";

/// Longest part of a reference, in characters.
pub const MAX_PART: usize = 64;

/// A well-formed reference, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    namespace: Option<String>,
    name: String,
    tag: Option<String>,
}

/// Not a [`Reference`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected a name of a-z, 0-9, - and _, perhaps with a namespace/ before it and a :tag after it")]
pub struct InvalidReference;

impl Reference {
    /// Whose it is, if it says so.
    #[must_use]
    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// The name alone.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name, if that says all: without a namespace, and with no other tag than the one that is meant without. So a
    /// server's templates are called.
    #[must_use]
    pub fn bare_name(&self) -> Option<&str> {
        let bare = self.namespace.is_none() && self.tag_or_default() == DEFAULT_TAG;
        bare.then_some(&*self.name)
    }

    /// Its tag, if it has one.
    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Its tag, or the one that is meant without.
    #[must_use]
    pub fn tag_or_default(&self) -> &str {
        self.tag().unwrap_or(DEFAULT_TAG)
    }
}

impl FromStr for Reference {
    type Err = InvalidReference;

    fn from_str(text: &str) -> Result<Self, InvalidReference> {
        let text = text.to_ascii_lowercase();
        let (path, tag) = match text.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (text.as_str(), None),
        };
        let (namespace, name) = match path.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, path),
        };
        let fits = |part: &str, more: &[u8]| {
            (1..=MAX_PART).contains(&part.len())
                && part
                    .bytes()
                    .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_') || more.contains(&b))
        };
        let valid = fits(name, b"")
            && namespace.is_none_or(|part| fits(part, b""))
            && tag.is_none_or(|part| fits(part, b"."));
        if !valid {
            return Err(InvalidReference);
        }
        Ok(Self {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            tag: tag.map(str::to_owned),
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        f.write_str(&self.name)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        Ok(())
    }
}

/// The namespace of a team: its name, with what a reference can't hold replaced by `-`.
#[must_use]
pub fn namespace_of(team: &str) -> String {
    let part: String = team
        .chars()
        .take(MAX_PART)
        .map(|c| c.to_ascii_lowercase())
        .map(|c| if matches!(c, 'a'..='z' | '0'..='9' | '-' | '_') { c } else { '-' })
        .collect();
    if part.is_empty() { "-".into() } else { part }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn references_are_read_as_e2b_clients_write_them() {
        let read: Reference = "Acme/Base_1:v1.0".parse().unwrap();
        assert_eq!((read.namespace(), read.name(), read.tag()), (Some("acme"), "base_1", Some("v1.0")));
        assert_eq!(read.to_string(), "acme/base_1:v1.0");
        assert_eq!(read.bare_name(), None);
        for (text, bare) in
            [("base", Some("base")), ("base:default", Some("base")), ("base:v1", None), ("a/base", None)]
        {
            assert_eq!(text.parse::<Reference>().unwrap().bare_name(), bare, "{text}");
        }
        let read: Reference = "base".parse().unwrap();
        assert_eq!((read.namespace(), read.tag(), read.tag_or_default()), (None, None, "default"));
        for text in ["", ":", "/", "a/", "/a", "a:", "a b", "a.b", "a/b/c", "a:b:c", "é", &"a".repeat(65)] {
            assert!(text.parse::<Reference>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn every_team_has_a_namespace(team in "\\PC{0,100}") {
            let namespace = namespace_of(&team);
            let read: Reference = format!("{namespace}/name").parse().unwrap();
            prop_assert_eq!(read.namespace(), Some(namespace.as_str()));
        }

        #[test]
        fn what_is_written_reads_the_same(text in "\\PC{0,40}") {
            if let Ok(read) = text.parse::<Reference>() {
                prop_assert_eq!(read.to_string().parse(), Ok(read));
            }
        }
    }
}
