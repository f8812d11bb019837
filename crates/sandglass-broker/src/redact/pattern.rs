//! One form of a credential, and whether bytes begin with it, however they are escaped.

use data_encoding::BASE64;

/// A form of a credential.
#[derive(Debug, Clone)]
pub(super) struct Pattern(Vec<Class>);

/// What a byte of it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// This one.
    Byte(u8),
    /// Any of base64's: it carries bits of the credential and of what is beside it.
    Base64,
    /// One of two: the alphabets of base64 differ in two places.
    Either(u8, u8),
}

impl Class {
    const fn has(self, byte: u8) -> bool {
        match self {
            Self::Byte(one) => one == byte,
            Self::Either(one, other) => one == byte || other == byte,
            Self::Base64 => byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_'),
        }
    }
}

/// What became of a look for a pattern at the beginning of some bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// Of how many bytes it is, where they begin with it.
    pub(super) length: Option<usize>,
    /// Whether more bytes may make one of it, or a longer one.
    pub(super) more: bool,
}

/// A byte that may be meant, and of how many bytes it was read. `None` where they end too early to tell.
type Reading = Option<(u8, usize)>;

impl Pattern {
    /// All forms in which a credential is looked for.
    pub(super) fn all_of(secret: &str) -> Vec<Self> {
        let mut all = vec![Self(secret.bytes().map(Class::Byte).collect())];
        all.extend((0..3).map(|before| Self::base64(secret.as_bytes(), before)));
        all
    }

    /// How it looks in base64 with `before` bytes before it, counted within a group of three.
    fn base64(secret: &[u8], before: usize) -> Self {
        let text = BASE64.encode(&[&vec![0; before], secret].concat());
        let bits = (before + secret.len()) * 8;
        // Characters of six bits: those that what is before fills, and those that some of the secret is in.
        let (first, last) = (before * 8 / 6, bits.div_ceil(6));
        let mixed = |at: usize| at * 6 < before * 8 || (at + 1) * 6 > bits;
        let class = |(at, byte): (usize, u8)| match byte {
            _ if mixed(at) => Class::Base64,
            b'+' => Class::Either(b'+', b'-'),
            b'/' => Class::Either(b'/', b'_'),
            byte => Class::Byte(byte),
        };
        Self(text.bytes().enumerate().take(last).skip(first).map(class).collect())
    }

    pub(super) fn may_begin_with(&self, byte: u8) -> bool {
        matches!(byte, b'%' | b'\\') || self.0.first().is_some_and(|class| class.has(byte))
    }

    /// Whether `bytes` begin with it. They may do so in more than one way, since what is no escape to one reader is one to another: then
    /// the longest counts.
    pub(super) fn find(&self, bytes: &[u8]) -> Found {
        // Where one could be after each class; there are hardly ever two such places.
        let (mut here, mut next, mut more) = (vec![0], Vec::new(), false);
        for class in &self.0 {
            for &at in &here {
                for reading in readings(&bytes[at..]) {
                    match reading {
                        None => more = true,
                        Some((byte, length)) if class.has(byte) && !next.contains(&(at + length)) => {
                            next.push(at + length);
                        }
                        Some(_) => {}
                    }
                }
            }
            std::mem::swap(&mut here, &mut next);
            next.clear();
            if here.is_empty() {
                break;
            }
        }
        Found { length: here.into_iter().max(), more }
    }
}

/// In which ways the next byte can be read. Nothing at all is the end.
fn readings(bytes: &[u8]) -> impl Iterator<Item = Reading> {
    let plain = bytes.first().map(|byte| (*byte, 1));
    let escaped = match bytes {
        [] => None,
        [b'%', rest @ ..] => hex(rest, 2).map(|read| read.map(|byte| (byte, 3))),
        [b'\\'] => Some(None),
        [b'\\', b'u', rest @ ..] => hex(rest, 4).map(|read| read.map(|byte| (byte, 6))),
        // Printable bytes alone are looked for, so escapes such as \n are none of them.
        [b'\\', byte @ (b'"' | b'\\' | b'/'), ..] => Some(Some((*byte, 2))),
        // In a query.
        [b'+', ..] => Some(Some((b' ', 1))),
        _ => None,
    };
    std::iter::once(plain).chain(escaped)
}

/// A byte of so many hex digits: `None` if they are none, `Some(None)` if they end before it is certain.
fn hex(bytes: &[u8], digits: usize) -> Option<Option<u8>> {
    let mut value = 0_u32;
    for at in 0..digits {
        let Some(byte) = bytes.get(at) else { return Some(None) };
        value = value << 4 | char::from(*byte).to_digit(16)?;
    }
    u8::try_from(value).ok().map(Some)
}
