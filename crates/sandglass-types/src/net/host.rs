//! Host names, and patterns over them.

use std::fmt;
use std::str::FromStr;

use super::text_form;

/// Longest host name, in bytes (RFC 1035, 2.3.4).
pub const MAX_HOSTNAME: usize = 253;

/// Longest label of one, in bytes.
const MAX_LABEL: usize = 63;

/// A host name in its one spelling: lower case, labels of letters, digits, hyphens and underscores, no dot at the end.
///
/// International names stand in their `xn--` form, as they do on the wire. What some resolver would read as an address
/// is not a name, in whatever base it is written: the last label is never a number (WHATWG URL, "ends in a number").
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hostname(Box<str>);

/// A text that is not a [`Hostname`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHostname {
    /// Empty or too long.
    #[error("a host name has between 1 and {MAX_HOSTNAME} bytes, not {0}")]
    Length(usize),
    /// An empty label or one that is too long.
    #[error("between its dots, a host name has 1 to {MAX_LABEL} bytes, not {0}")]
    Label(usize),
    /// It ends in a dot.
    #[error("write the host name without the dot at its end")]
    TrailingDot,
    /// A byte that no host name has.
    #[error("a host name has letters, digits, '-' and '_' only; write an international one in its xn-- form")]
    Character,
    /// A label that begins or ends with a hyphen.
    #[error("no part of a host name begins or ends with '-'")]
    Hyphen,
    /// Something that is read as an address.
    #[error("this is an address or a number, not a host name")]
    Address,
}

impl Hostname {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A name from the labels of a DNS message, without the root's.
    ///
    /// # Errors
    /// The labels are not a host name, among them labels that hold a dot.
    pub fn from_labels<'a>(labels: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, InvalidHostname> {
        let mut name = String::new();
        for label in labels {
            check_label(label)?;
            if !name.is_empty() {
                name.push('.');
            }
            name.extend(label.iter().map(|byte| char::from(byte.to_ascii_lowercase())));
            if name.len() > MAX_HOSTNAME {
                return Err(InvalidHostname::Length(name.len()));
            }
        }
        Self::checked(name)
    }

    /// Whether it is a true subdomain of `apex`, at any depth.
    #[must_use]
    pub fn is_below(&self, apex: &Self) -> bool {
        self.0.strip_suffix(&*apex.0).is_some_and(|rest| rest.ends_with('.'))
    }

    /// Number of labels; never zero.
    #[must_use]
    pub fn labels(&self) -> usize {
        self.0.split('.').count()
    }

    /// The last check, of a name whose labels are right.
    fn checked(name: String) -> Result<Self, InvalidHostname> {
        if name.is_empty() || name.len() > MAX_HOSTNAME {
            return Err(InvalidHostname::Length(name.len()));
        }
        let last = name.rsplit('.').next().unwrap_or_default();
        let hex = last.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        if hex || last.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(InvalidHostname::Address);
        }
        Ok(Self(name.into()))
    }
}

fn check_label(label: &[u8]) -> Result<(), InvalidHostname> {
    if label.is_empty() || label.len() > MAX_LABEL {
        return Err(InvalidHostname::Label(label.len()));
    }
    if !label.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')) {
        return Err(InvalidHostname::Character);
    }
    if label.starts_with(b"-") || label.ends_with(b"-") {
        return Err(InvalidHostname::Hyphen);
    }
    Ok(())
}

impl FromStr for Hostname {
    type Err = InvalidHostname;

    fn from_str(text: &str) -> Result<Self, InvalidHostname> {
        if text.is_empty() || text.len() > MAX_HOSTNAME + 1 {
            return Err(InvalidHostname::Length(text.len()));
        }
        // First, so that an address in brackets or with colons is called one.
        if text.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok() {
            return Err(InvalidHostname::Address);
        }
        if text.ends_with('.') {
            return Err(InvalidHostname::TrailingDot);
        }
        Self::from_labels(text.split('.').map(str::as_bytes))
    }
}

impl fmt::Display for Hostname {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Hostname {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hostname({self})")
    }
}

text_form!(Hostname);

/// The names that a rule speaks of.
///
/// `*.example.com` is every name below `example.com` at any depth, and **not** `example.com` itself, as in a TLS
/// certificate and in E2B: a rule that means both says both.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum HostPattern {
    /// This name alone.
    Exact(Hostname),
    /// `*.name`: all names below it.
    Below(Hostname),
    /// `*`: every name.
    Any,
}

impl HostPattern {
    /// Whether the pattern speaks of `name`.
    #[must_use]
    pub fn matches(&self, name: &Hostname) -> bool {
        match self {
            Self::Exact(exact) => name == exact,
            Self::Below(apex) => name.is_below(apex),
            Self::Any => true,
        }
    }
}

impl FromStr for HostPattern {
    type Err = InvalidHostname;

    fn from_str(text: &str) -> Result<Self, InvalidHostname> {
        match text.strip_prefix("*.") {
            _ if text == "*" => Ok(Self::Any),
            Some(apex) => apex.parse().map(Self::Below),
            None => text.parse().map(Self::Exact),
        }
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => name.fmt(f),
            Self::Below(apex) => write!(f, "*.{apex}"),
            Self::Any => f.write_str("*"),
        }
    }
}

text_form!(HostPattern);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_name_has_one_spelling() {
        let long = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "a".repeat(61));
        for text in
            ["example.com", "EXAMPLE.com", "a", "xn--bcher-kva.example", "_sip._tcp.x", "1.2.3.4a", &long]
        {
            let name: Hostname = text.parse().unwrap();
            assert_eq!(name.as_str(), text.to_ascii_lowercase());
        }
    }

    #[test]
    fn addresses_in_any_spelling_are_no_names() {
        for text in [
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7f.0.0.1",
            "0X7F.1",
            "0177.0.0.1",
            "1",
            "0",
            "0x",
            "a.0x",
            "example.1",
            "::1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "::ffff:169.254.169.254",
            "[fe80::1]",
        ] {
            assert_eq!(text.parse::<Hostname>(), Err(InvalidHostname::Address), "{text}");
        }
    }

    #[test]
    fn what_readers_could_understand_differently_is_refused() {
        let long = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "a".repeat(62));
        for text in [
            "",
            ".",
            "a.",
            "a..b",
            ".a",
            "-a.b",
            "a-.b",
            "a.b-",
            "a b",
            "a\0.allowed.com",
            "evil\r\n.com",
            "a%00.b",
            "a/b",
            "user@host",
            "host:80",
            "bücher.example",
            "аllowed.com",
            "a\u{3002}com",
            "a\\b",
            "*",
            "*.a",
            "[::1",
            "fe80::1%1",
            &"a".repeat(64),
            &long,
        ] {
            assert!(text.parse::<Hostname>().is_err(), "{text:?}");
        }
        assert!(Hostname::from_labels([&b"a.b"[..], b"com"]).is_err(), "a dot inside a label");
        assert!(Hostname::from_labels([&b"a\0"[..], b"com"]).is_err());
        assert!(Hostname::from_labels([]).is_err(), "the root");
    }

    #[test]
    fn a_suffix_is_not_its_apex_and_ends_at_a_dot() {
        let pattern: HostPattern = "*.Example.com".parse().unwrap();
        let matches = |name: &str| pattern.matches(&name.parse().unwrap());
        assert!(matches("a.example.com") && matches("a.b.example.com"));
        assert!(!matches("example.com") && !matches("evilexample.com") && !matches("example.com.evil"));
        for text in ["*a.com", "a.*.com", "**.com", "*.", "*.*", "*.127.0.0.1", "*com"] {
            assert!(text.parse::<HostPattern>().is_err(), "{text}");
        }
        assert_eq!(serde_json::to_string(&pattern).unwrap(), r#""*.example.com""#);
    }

    proptest! {
        #[test]
        fn what_parses_is_canonical(text in "\\PC{0,80}|[a-zA-Z0-9._-]{0,260}|(0x)?[0-9a-f.]{1,12}") {
            if let Ok(name) = text.parse::<Hostname>() {
                prop_assert_eq!(name.as_str(), text.to_ascii_lowercase());
                prop_assert!(name.as_str().len() <= MAX_HOSTNAME && name.as_str().is_ascii());
                prop_assert_eq!(&Hostname::from_labels(text.split('.').map(str::as_bytes)).unwrap(), &name);
                prop_assert!(name.as_str().parse::<std::net::IpAddr>().is_err());
            }
        }

        #[test]
        fn labels_never_make_what_text_does_not(labels in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..5), 0..4)) {
            if let Ok(name) = Hostname::from_labels(labels.iter().map(Vec::as_slice)) {
                prop_assert_eq!(name.as_str().parse::<Hostname>().unwrap(), name.clone());
                prop_assert_eq!(name.labels(), labels.len());
            }
        }
    }
}
