//! HTTP methods, and paths in a form that has one reading.

use std::fmt;
use std::str::FromStr;

use super::text_form;

/// Longest path that is read, in bytes.
pub const MAX_PATH: usize = 8192;

/// Longest method, in bytes.
const MAX_METHOD: usize = 32;

/// An HTTP method, in capital letters as all registered ones are; methods that differ in case are different.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Method(Box<str>);

/// A text that is not a [`Method`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a method is written in capital letters, such as GET, and has at most {MAX_METHOD}")]
pub struct InvalidMethod;

impl Method {
    /// The method as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Method {
    type Err = InvalidMethod;

    fn from_str(text: &str) -> Result<Self, InvalidMethod> {
        let bytes = text.as_bytes();
        let known = bytes.iter().all(|byte| byte.is_ascii_uppercase() || matches!(byte, b'-' | b'_'));
        let right = bytes.first().is_some_and(u8::is_ascii_uppercase) && bytes.len() <= MAX_METHOD && known;
        if right { Ok(Self(text.into())) } else { Err(InvalidMethod) }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

text_form!(Method);

/// A path that servers could read as another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AmbiguousPath {
    /// It does not begin with a slash.
    #[error("a path begins with /")]
    Relative,
    /// It is too long.
    #[error("a path has at most {MAX_PATH} bytes")]
    Length,
    /// It has `//`.
    #[error("a path has nothing between two slashes")]
    EmptySegment,
    /// It has `.` or `..` as a segment, however encoded.
    #[error("a path has no part . or ..")]
    Dots,
    /// It has an encoded slash, backslash, percent sign or control character, or bytes that are not UTF-8.
    #[error(
        "a path hides no slash, backslash, percent sign or control character behind a percent sign, and is UTF-8"
    )]
    Encoded,
    /// It has a character that must be encoded.
    #[error("a path has a character that must be percent-encoded")]
    Character,
}

/// The path of a request in its one spelling (RFC 3986, 6.2.2): letters, digits and `-._~` stand for themselves, and
/// all else that is encoded has capital hex digits. The query is not a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestPath {
    /// What stands between the slashes; never empty, and the last one may be.
    segments: Vec<Box<str>>,
}

impl FromStr for RequestPath {
    type Err = AmbiguousPath;

    fn from_str(target: &str) -> Result<Self, AmbiguousPath> {
        if target.len() > MAX_PATH {
            return Err(AmbiguousPath::Length);
        }
        let path = target.split('?').next().unwrap_or_default();
        let rest = path.strip_prefix('/').ok_or(AmbiguousPath::Relative)?;
        let segments: Vec<Box<str>> = rest.split('/').map(normal).collect::<Result<_, _>>()?;
        if segments.iter().rev().skip(1).any(|segment| segment.is_empty()) {
            return Err(AmbiguousPath::EmptySegment);
        }
        Ok(Self { segments })
    }
}

/// One segment in its one spelling.
fn normal(segment: &str) -> Result<Box<str>, AmbiguousPath> {
    let (mut text, mut plain) = (String::with_capacity(segment.len()), Vec::with_capacity(segment.len()));
    let mut bytes = segment.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16));
            let (Some(high), Some(low)) = (digit(), digit()) else { return Err(AmbiguousPath::Encoded) };
            let byte = u8::try_from(high << 4 | low).map_err(|_| AmbiguousPath::Encoded)?;
            if byte.is_ascii_control() || matches!(byte, b'/' | b'\\' | b'%') {
                return Err(AmbiguousPath::Encoded);
            }
            if is_unreserved(byte) {
                text.push(char::from(byte));
            } else {
                text.push_str(&format!("%{byte:02X}"));
            }
            plain.push(byte);
        } else if is_unreserved(byte) || b"!$&'()*+,;=:@".contains(&byte) {
            text.push(char::from(byte));
            plain.push(byte);
        } else {
            return Err(AmbiguousPath::Character);
        }
    }
    let plain = std::str::from_utf8(&plain).map_err(|_| AmbiguousPath::Encoded)?;
    // Some servers cut parameters off a segment before they look at it: "..;x" is ".." to them, and ";x" is nothing.
    match plain.split(';').next() {
        Some("." | "..") => Err(AmbiguousPath::Dots),
        Some("") if !plain.is_empty() => Err(AmbiguousPath::EmptySegment),
        _ => Ok(text.into()),
    }
}

const fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

impl fmt::Display for RequestPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.segments.iter().try_for_each(|segment| write!(f, "/{segment}"))
    }
}

/// The beginning of a path, by whole segments: `/v1/repos` and `/v1/repos/` are the same, and cover `/v1/repos` and all
/// below it, but not `/v1/reposx`. `/` covers every path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PathPrefix(RequestPath);

impl PathPrefix {
    /// Whether `path` is the prefix or below it.
    #[must_use]
    pub fn covers(&self, path: &RequestPath) -> bool {
        self.starts(path, |prefix, segment| prefix == segment)
    }

    /// The same for servers that take capital and small letters as one: what a rule that denies must assume.
    #[must_use]
    pub fn covers_in_any_case(&self, path: &RequestPath) -> bool {
        self.starts(path, str::eq_ignore_ascii_case)
    }

    fn starts(&self, path: &RequestPath, same: impl Fn(&str, &str) -> bool) -> bool {
        let prefix = &self.0.segments;
        prefix.len() <= path.segments.len() && prefix.iter().zip(&path.segments).all(|(a, b)| same(a, b))
    }
}

impl FromStr for PathPrefix {
    type Err = AmbiguousPath;

    fn from_str(text: &str) -> Result<Self, AmbiguousPath> {
        if text.contains('?') {
            return Err(AmbiguousPath::Character);
        }
        let mut path: RequestPath = text.parse()?;
        path.segments.pop_if(|last| last.is_empty());
        Ok(Self(path))
    }
}

impl fmt::Display for PathPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.segments.is_empty() { f.write_str("/") } else { self.0.fmt(f) }
    }
}

text_form!(PathPrefix);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn covers(prefix: &str, path: &str) -> bool {
        path.parse().is_ok_and(|path| prefix.parse::<PathPrefix>().unwrap().covers(&path))
    }

    #[test]
    fn a_prefix_ends_at_a_slash() {
        for path in ["/a/b", "/a/b/", "/a/b/c", "/a/b?c=/../x", "/%61/b", "/a/b/c%2B", "/a/b/..."] {
            assert!(covers("/a/b", path) && covers("/a/b/", path), "{path}");
        }
        for path in ["/", "/a", "/a/bc", "/A/b", "/a/b%20", "/x/a/b"] {
            assert!(!covers("/a/b", path), "{path}");
            assert!(covers("/", path), "{path}");
        }
    }

    #[test]
    fn nothing_slips_out_of_a_prefix() {
        for path in [
            "/a/b/../c",
            "/a/b/..",
            "/a/b/.",
            "/a/b/%2e%2e/c",
            "/a/b/.%2E/c",
            "/a/b/..;/c",
            "/a/b/..;x=y/c",
            "/a/b/%2e%2e%3b/c",
            "/a/b/..%2fc",
            "/a/b%2f..%2fc",
            "/a/b/..%5cc",
            "/a/b/..\\c",
            "/a/b/%00",
            "/a/b/%0d%0a",
            "/a/b/%252e%252e/c",
            "/a/b/%c0%ae%c0%ae/c",
            "/a/b/%e0%80%ae",
            "//a/b",
            "/a//b",
            "/a/b//c",
            "/a/b/;x/c",
            "/a/b/%",
            "/a/b/%2",
            "/a/b/%zz",
            "a/b",
            "",
            "*",
            "/a/b/\0",
            "/a/b/é",
            "/a/b/#x",
            "/a/b/ c",
        ] {
            assert!(path.parse::<RequestPath>().is_err(), "{path:?}");
        }
        assert!(format!("/{}", "a".repeat(MAX_PATH)).parse::<RequestPath>().is_err());
        assert!("/a?b".parse::<PathPrefix>().is_err() && "/a/../b".parse::<PathPrefix>().is_err());
    }

    #[test]
    fn methods_are_capital() {
        for text in ["GET", "M-SEARCH", "VERSION_X"] {
            assert_eq!(text.parse::<Method>().unwrap().as_str(), text);
        }
        for text in ["", "get", "Get", "GE T", "GET\r", "-", &"A".repeat(33)] {
            assert!(text.parse::<Method>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_parses_has_one_spelling(text in "/[a-c./%;\\\\?25fEe]{0,24}|/\\PC{0,24}") {
            if let Ok(path) = text.parse::<RequestPath>() {
                let shown = path.to_string();
                prop_assert_eq!(shown.parse::<RequestPath>().unwrap(), path);
                let decoded: Vec<&str> = shown.split('/').skip(1).collect();
                prop_assert!(!decoded.iter().any(|part| [".", ".."].contains(part)), "{}", shown);
                prop_assert!(!shown.contains("//") && !shown.contains('\\') && !shown.contains("%2F"));
            }
        }
    }
}
