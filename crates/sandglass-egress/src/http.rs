//! Reads the head of an HTTP/1 request, as strictly as no server would (RFC 9112).
//!
//! The server decides by what it reads here and passes the bytes on; so a head that another reader could take for
//! something else, in its host, its end, or the length of its body, is refused.

use std::net::IpAddr;

use sandglass_types::net::{AmbiguousPath, Hostname, Method, Port, RequestPath};

use crate::policy::{Host, Seen};

/// Longest head, in bytes.
pub const MAX_HEAD: usize = 16 << 10;

/// Most header lines.
pub const MAX_HEADERS: usize = 100;

/// How far the reading came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peek {
    /// Not all of it is there: call again with more.
    More,
    /// The head, boxed because it is large.
    Head(Box<RequestHead>),
}

/// What the head of a request says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestHead {
    /// The method.
    pub method: Method,
    /// The host that Host and the target agree on.
    pub host: Authority,
    /// The port that goes with it; 80 if none.
    pub port: Port,
    /// The path; for a CONNECT and for `OPTIONS *` there is none.
    pub path: Result<RequestPath, AmbiguousPath>,
    /// How the body ends.
    pub body: Body,
    /// What follows the answer may be something else than HTTP: a CONNECT, or an upgrade to WebSocket.
    pub tunnel: bool,
    /// Bytes of the head, its empty line included.
    pub length: usize,
}

/// A host as an HTTP authority names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authority {
    /// By name.
    Name(Hostname),
    /// By address, in canonical form.
    Address(IpAddr),
}

/// How the body of a request ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    /// There is none.
    None,
    /// After so many bytes.
    Length(u64),
    /// With its last chunk.
    Chunked,
}

impl RequestHead {
    /// The same for [`crate::policy::decide`].
    #[must_use]
    pub fn seen(&self) -> Seen<'_> {
        let host = match &self.host {
            Authority::Name(name) => Host::Name(name),
            Authority::Address(address) => Host::Address(*address),
        };
        let path = self.path.as_ref().map_err(|ambiguous| *ambiguous);
        Seen::Http { host, port: self.port, method: &self.method, path }
    }
}

/// Why bytes are not a request that can be passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadHead {
    /// It does not begin with a method.
    #[error("this is not HTTP/1")]
    NotHttp,
    /// It is HTTP/2 without an upgrade.
    #[error("HTTP/2 without TLS is not carried")]
    Http2,
    /// It is too long, or has too many lines.
    #[error("the head has more than {MAX_HEAD} bytes or {MAX_HEADERS} lines")]
    TooLong,
    /// A CR or LF alone, a NUL, or another control character.
    #[error("the head has a control character, or a line that does not end in CR LF")]
    Control,
    /// The first line is not one of HTTP/1.0 or HTTP/1.1.
    #[error("the request line is malformed")]
    RequestLine,
    /// A header line has no name, a space before its colon, or goes on from the line before.
    #[error("a header line is malformed or folded")]
    HeaderLine,
    /// No Host, several, or one that is no host.
    #[error("the request must have one Host, a name or an address with an optional port")]
    Host,
    /// Host and target name different hosts.
    #[error("Host and the request's target must agree")]
    Disagree,
    /// The target is in no form that the method can have.
    #[error("the request's target is malformed")]
    Target,
    /// The length of the body can be read in two ways.
    #[error("the body must have either one Content-Length or Transfer-Encoding: chunked")]
    Framing,
    /// An upgrade to something else than WebSocket.
    #[error("the connection can be upgraded to WebSocket alone")]
    Upgrade,
}

/// Reads from the first bytes of a request.
///
/// # Errors
/// More bytes will not make it one.
pub fn peek(bytes: &[u8]) -> Result<Peek, BadHead> {
    match bytes.first() {
        None => return Ok(Peek::More),
        Some(first) if !first.is_ascii_uppercase() => return Err(BadHead::NotHttp),
        Some(_) => {}
    }
    if bytes.starts_with(b"PRI ") {
        return Err(BadHead::Http2);
    }
    let head = bytes.get(..MAX_HEAD).unwrap_or(bytes);
    let end = head.windows(4).position(|window| window == b"\r\n\r\n");
    let text = head.get(..end.map_or(head.len(), |end| end + 4)).unwrap_or(head);
    check_bytes(text)?;
    match end {
        Some(end) => {
            parse(text.get(..end).unwrap_or_default(), end + 4).map(|head| Peek::Head(Box::new(head)))
        }
        None if bytes.len() >= MAX_HEAD => Err(BadHead::TooLong),
        None => Ok(Peek::More),
    }
}

/// Control characters stand nowhere but at the ends of lines, in pairs; a tab may stand in a value.
fn check_bytes(text: &[u8]) -> Result<(), BadHead> {
    let mut rest = text;
    loop {
        rest = match rest {
            [] | [b'\r'] => return Ok(()),
            [b'\r', b'\n', rest @ ..] | [b'\t', rest @ ..] => rest,
            [byte, rest @ ..] if !byte.is_ascii_control() => rest,
            _ => return Err(BadHead::Control),
        };
    }
}

/// The headers that matter here, each at most once.
#[derive(Debug, Default)]
struct Headers<'a> {
    host: Option<&'a str>,
    content_length: Option<&'a str>,
    transfer_encoding: Option<&'a str>,
    upgrade: Option<&'a str>,
}

fn parse(head: &[u8], length: usize) -> Result<RequestHead, BadHead> {
    // What is not ASCII can stand in values alone, and in none that is read here.
    let text = String::from_utf8_lossy(head);
    let mut lines = text.split("\r\n");
    let request_line: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version @ ("HTTP/1.1" | "HTTP/1.0")] = request_line[..] else {
        return Err(BadHead::RequestLine);
    };
    let method: Method = method.parse().map_err(|_| BadHead::RequestLine)?;
    if target.is_empty() || !target.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#') {
        return Err(BadHead::Target);
    }
    let headers = headers(lines)?;
    let host = authority(headers.host.ok_or(BadHead::Host)?).ok_or(BadHead::Host)?;
    let modern = version == "HTTP/1.1";
    let body = body(&headers, modern)?;
    let websocket = match headers.upgrade {
        None => false,
        Some(protocol) if protocol.eq_ignore_ascii_case("websocket") && modern => true,
        Some(_) => return Err(BadHead::Upgrade),
    };
    let connect = method.as_str() == "CONNECT";
    if (connect || websocket) && body != Body::None {
        return Err(BadHead::Framing);
    }
    let (named, path) = target_of(method.as_str(), target)?;
    let (host, port) = agree(host, named, connect)?;
    Ok(RequestHead { method, host, port, path, body, tunnel: connect || websocket, length })
}

fn headers<'a>(lines: impl Iterator<Item = &'a str>) -> Result<Headers<'a>, BadHead> {
    let mut headers = Headers::default();
    for (index, line) in lines.enumerate() {
        if index == MAX_HEADERS {
            return Err(BadHead::TooLong);
        }
        let (name, value) = line.split_once(':').ok_or(BadHead::HeaderLine)?;
        if name.is_empty() || !name.bytes().all(is_token) {
            return Err(BadHead::HeaderLine);
        }
        let value = value.trim_matches([' ', '\t']);
        let (slot, twice) = match name.to_ascii_lowercase().as_str() {
            "host" => (&mut headers.host, BadHead::Host),
            "content-length" => (&mut headers.content_length, BadHead::Framing),
            "transfer-encoding" => (&mut headers.transfer_encoding, BadHead::Framing),
            "upgrade" => (&mut headers.upgrade, BadHead::Upgrade),
            "http2-settings" => return Err(BadHead::Upgrade),
            "connection" => {
                check_connection(value)?;
                continue;
            }
            _ => continue,
        };
        if slot.replace(value).is_some() {
            return Err(twice);
        }
    }
    Ok(headers)
}

/// A proxy on the way drops the headers that Connection names; without these, the request would be another one.
fn check_connection(value: &str) -> Result<(), BadHead> {
    let drops = |name: &str| value.split(',').any(|option| option.trim().eq_ignore_ascii_case(name));
    if drops("host") {
        return Err(BadHead::Host);
    }
    if drops("content-length") || drops("transfer-encoding") {
        return Err(BadHead::Framing);
    }
    Ok(())
}

/// RFC 9110, 5.6.2.
const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}

fn body(headers: &Headers<'_>, modern: bool) -> Result<Body, BadHead> {
    match (headers.content_length, headers.transfer_encoding) {
        (None, None) => Ok(Body::None),
        (Some(length), None) => {
            let digits = (1..=18).contains(&length.len()) && length.bytes().all(|byte| byte.is_ascii_digit());
            match length.parse() {
                Ok(0) if digits => Ok(Body::None),
                Ok(length) if digits => Ok(Body::Length(length)),
                _ => Err(BadHead::Framing),
            }
        }
        (None, Some(coding)) if modern && coding.eq_ignore_ascii_case("chunked") => Ok(Body::Chunked),
        _ => Err(BadHead::Framing),
    }
}

type Named = (Authority, Option<Port>);

/// `host`, `host:port`, `address`, `[address]` or `[address]:port`, without a user.
fn authority(text: &str) -> Option<Named> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            let address: std::net::Ipv6Addr = address.parse().ok()?;
            let port = if port.is_empty() { None } else { Some(port.strip_prefix(':')?) };
            (Authority::Address(IpAddr::V6(address).to_canonical()), port)
        }
        None => {
            let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            let address =
                host.parse::<std::net::Ipv4Addr>().map(|address| Authority::Address(address.into()));
            (address.or_else(|_| host.parse().map(Authority::Name)).ok()?, port)
        }
    };
    let port = match port {
        Some(port) => Some(port.parse().ok()?),
        None => None,
    };
    Some((host, port))
}

type Path = Result<RequestPath, AmbiguousPath>;

/// The host and path that a target names (RFC 9112, 3.2).
fn target_of(method: &str, target: &str) -> Result<(Option<Named>, Path), BadHead> {
    if method == "CONNECT" {
        let named = authority(target).filter(|(_, port)| port.is_some()).ok_or(BadHead::Target)?;
        return Ok((Some(named), Err(AmbiguousPath::Relative)));
    }
    if target.starts_with('/') {
        return Ok((None, target.parse()));
    }
    if target == "*" && method == "OPTIONS" {
        return Ok((None, Err(AmbiguousPath::Relative)));
    }
    let scheme = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"));
    let rest = scheme.and_then(|scheme| target.get(scheme.len()..)).ok_or(BadHead::Target)?;
    let (named, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let named = authority(named).ok_or(BadHead::Target)?;
    let path = if path.starts_with('/') { path.parse() } else { "/".parse() };
    Ok((Some(named), path))
}

/// The one host and port that Host and target name.
fn agree(host: Named, target: Option<Named>, connect: bool) -> Result<(Authority, Port), BadHead> {
    let (host, host_port) = host;
    let Some((named, named_port)) = target else { return Ok((host, host_port.unwrap_or(Port::HTTP))) };
    let port = named_port.unwrap_or(Port::HTTP);
    // The Host of a CONNECT often leaves the port out, whatever it is.
    let same_port = host_port.map_or(connect || port == Port::HTTP, |host_port| host_port == port);
    if host == named && same_port { Ok((named, port)) } else { Err(BadHead::Disagree) }
}

#[cfg(test)]
mod tests;
