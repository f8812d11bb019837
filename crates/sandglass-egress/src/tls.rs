//! Reads the name that a TLS client asks for, and nothing else (RFC 8446, 4.1.2 and 5.1; RFC 6066, 3; RFC 9849).
//!
//! The server never answers: what it read is passed on as it came. So it must read no name that the other end would
//! read differently; whatever has two readings is refused.

use sandglass_types::net::{Hostname, InvalidHostname};

use crate::policy::Seen;

/// Longest ClientHello, in bytes. With keys that resist quantum computers and a resumption ticket one has about 3,000.
pub const MAX_HELLO: usize = 16 << 10;

/// Most records that one may be cut into. Clients that do it at all use a few.
pub const MAX_RECORDS: usize = 64;

/// Most bytes that must be kept until a ClientHello is whole.
pub const MAX_PEEK: usize = MAX_HELLO + HANDSHAKE_HEADER + MAX_RECORDS * RECORD_HEADER;

const RECORD_HEADER: usize = 5;
const HANDSHAKE_HEADER: usize = 4;

/// Longest payload of a record (RFC 8446, 5.1).
const MAX_RECORD: usize = 1 << 14;

const RECORD_HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const EXTENSION_SERVER_NAME: u16 = 0;
/// RFC 9849, 11.1.
const EXTENSION_ECH: u16 = 0xfe0d;
/// Its forerunner, which hid the name alone (draft-ietf-tls-esni-06 and before).
const EXTENSION_ESNI: u16 = 0xffce;
const NAME_TYPE_HOST: u8 = 0;

/// How far the reading came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peek {
    /// Not all of it is there: call again with more.
    More,
    /// All that is to be known.
    Hello(ClientHello),
}

/// What a ClientHello shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello {
    /// The name that it asks for.
    pub sni: Option<Hostname>,
    /// It has an encrypted ClientHello inside, or what looks like one: browsers send such without meaning it, and no
    /// one can tell.
    pub encrypted: bool,
}

impl ClientHello {
    /// The same for [`crate::policy::decide`].
    #[must_use]
    pub const fn seen(&self) -> Seen<'_> {
        Seen::Tls { sni: self.sni.as_ref(), encrypted: self.encrypted }
    }
}

/// Why a connection is not one that TLS could follow on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoHello {
    /// It does not begin with a handshake.
    #[error("this is not TLS")]
    NotTls,
    /// It begins as SSL 2.0 did.
    #[error("this is SSL 2.0")]
    Ssl2,
    /// The first message is another one.
    #[error("TLS begins with a ClientHello")]
    OtherMessage,
    /// It is longer than any.
    #[error("the ClientHello has more than {MAX_HELLO} bytes")]
    TooLong,
    /// It comes in too many pieces.
    #[error("the ClientHello comes in more than {MAX_RECORDS} records")]
    TooManyRecords,
    /// It is not built as it must be.
    #[error("the ClientHello is malformed: {0}")]
    Malformed(&'static str),
    /// It asks for several names.
    #[error("the ClientHello asks for several names")]
    SeveralNames,
    /// It asks for what is not a name.
    #[error("the ClientHello asks for no host name")]
    Name(#[source] InvalidHostname),
}

/// Reads from the first bytes of a connection.
///
/// # Errors
/// More bytes will not make it a ClientHello.
pub fn peek(bytes: &[u8]) -> Result<Peek, NoHello> {
    let (mut rest, mut message, mut announced) = (bytes, Vec::new(), 0);
    for _ in 0..MAX_RECORDS {
        let Some(length) = record_length(rest)? else { return Ok(Peek::More) };
        let payload = rest.get(RECORD_HEADER..).unwrap_or_default();
        announced += length;
        message.extend_from_slice(payload.get(..length).unwrap_or(payload));
        if let Some(whole) = message_length(&message)? {
            if announced > whole {
                return Err(NoHello::Malformed("something follows in its record"));
            }
            if let Some(body) = message.get(HANDSHAKE_HEADER..whole) {
                return hello(Reader(body)).map(Peek::Hello);
            }
        }
        match payload.get(length..) {
            Some(next) => rest = next,
            None => return Ok(Peek::More),
        }
    }
    Err(NoHello::TooManyRecords)
}

/// The payload's length of the record that begins here; `None` if its header is not all there.
fn record_length(bytes: &[u8]) -> Result<Option<usize>, NoHello> {
    match bytes {
        [] => return Ok(None),
        [RECORD_HANDSHAKE, rest @ ..] => match rest {
            [3, minor, ..] if *minor <= 4 => {}
            [] | [3] => {}
            _ => return Err(NoHello::NotTls),
        },
        // A length with its highest bit set, then the type and version of SSL 2.0's CLIENT-HELLO.
        [0x80..=0xff, _, CLIENT_HELLO, 0 | 2 | 3, ..] => return Err(NoHello::Ssl2),
        [0x80..=0xff] | [0x80..=0xff, _] | [0x80..=0xff, _, CLIENT_HELLO] => return Ok(None),
        _ => return Err(NoHello::NotTls),
    }
    let [_, _, _, high, low, ..] = bytes else { return Ok(None) };
    match usize::from(u16::from_be_bytes([*high, *low])) {
        0 => Err(NoHello::Malformed("an empty record")),
        length if length > MAX_RECORD => Err(NoHello::Malformed("a record that is too long")),
        length => Ok(Some(length)),
    }
}

/// The length of the handshake message that begins here, with its header; `None` if that is not all there.
fn message_length(message: &[u8]) -> Result<Option<usize>, NoHello> {
    match message {
        [] | [CLIENT_HELLO] | [CLIENT_HELLO, _] | [CLIENT_HELLO, _, _] => Ok(None),
        [CLIENT_HELLO, a, b, c, ..] => match usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c) {
            length if length > MAX_HELLO => Err(NoHello::TooLong),
            length => Ok(Some(HANDSHAKE_HEADER + length)),
        },
        _ => Err(NoHello::OtherMessage),
    }
}

/// Takes bytes off the front, and refuses when there are not enough.
#[derive(Debug, Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], NoHello> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(NoHello::Malformed("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// A number of `width` bytes, at most 2.
    fn number(&mut self, width: usize) -> Result<u16, NoHello> {
        Ok(self.take(width)?.iter().fold(0, |number, byte| number << 8 | u16::from(*byte)))
    }

    /// What a length of `width` bytes stands before.
    fn vector(&mut self, width: usize) -> Result<Self, NoHello> {
        let length = usize::from(self.number(width)?);
        self.take(length).map(Self)
    }

    fn end(self) -> Result<(), NoHello> {
        if self.0.is_empty() { Ok(()) } else { Err(NoHello::Malformed("a length is wrong")) }
    }
}

fn hello(mut body: Reader<'_>) -> Result<ClientHello, NoHello> {
    let _version_and_random = body.take(2 + 32)?;
    if body.vector(1)?.0.len() > 32 {
        return Err(NoHello::Malformed("its session id is too long"));
    }
    let suites = body.vector(2)?.0.len();
    if suites == 0 || !suites.is_multiple_of(2) || body.vector(1)?.0.is_empty() {
        return Err(NoHello::Malformed("it offers nothing"));
    }
    let mut found = ClientHello { sni: None, encrypted: false };
    if body.0.is_empty() {
        // As before TLS 1.2.
        return Ok(found);
    }
    let mut extensions = body.vector(2)?;
    body.end()?;
    let mut kinds = Vec::new();
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)?;
        let content = extensions.vector(2)?;
        kinds.push(kind);
        match kind {
            EXTENSION_SERVER_NAME => found.sni = Some(server_name(content)?),
            EXTENSION_ECH | EXTENSION_ESNI => found.encrypted = true,
            _ => {}
        }
    }
    kinds.sort_unstable();
    if kinds.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(NoHello::Malformed("an extension comes twice"));
    }
    Ok(found)
}

fn server_name(mut content: Reader<'_>) -> Result<Hostname, NoHello> {
    let mut list = content.vector(2)?;
    content.end()?;
    let kind = list.number(1)?;
    let name = list.vector(2)?;
    if !list.0.is_empty() {
        return Err(NoHello::SeveralNames);
    }
    if kind != u16::from(NAME_TYPE_HOST) {
        return Err(NoHello::Malformed("its name is of an unknown kind"));
    }
    let text = std::str::from_utf8(name.0).map_err(|_| NoHello::Name(InvalidHostname::Character))?;
    text.parse().map_err(NoHello::Name)
}

#[cfg(test)]
mod tests;
