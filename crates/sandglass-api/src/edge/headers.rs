//! Headers between a client and a sandbox, and the routes of the guest API that are not for clients.

use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
    TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use percent_encoding::percent_decode_str;

use super::Origin;
use crate::auth::API_KEY;

/// What opens the guest API.
pub(super) const ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");

/// Carries what opens the ports of a sandbox.
pub(crate) const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");

/// Routes of the reference daemon that only its own orchestrator may call. Ours has other ways, and an agent
/// that served them to clients would hand over the sandbox.
const INTERNAL: &[&str] = &["init", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw", "upgrade"];

/// Headers that belong to one connection, not to the message (RFC 9110, 7.6.1).
static HOP_BY_HOP: [HeaderName; 10] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("http2-settings"),
];

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Whether a path of the guest API is internal, however it is spelled.
pub(crate) fn is_internal(path: &str) -> bool {
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let mut parts: Vec<&str> = Vec::new();
    for part in decoded.split(['/', '\\']) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.first().is_some_and(|first| {
        let name = first.split(['?', '#', ';']).next().unwrap_or(first);
        INTERNAL.iter().any(|internal| internal.eq_ignore_ascii_case(name))
    })
}

/// Removes what belongs to one connection, also what its `Connection` header names.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Removes API keys of this server: one that a client sends along by habit would be in hostile hands. What only has
/// the same header's name is for the program inside, and stays.
fn strip_keys(headers: &mut HeaderMap) {
    for name in [API_KEY, AUTHORIZATION] {
        if headers.get_all(&name).iter().any(|value| holds_key(value.as_bytes())) {
            headers.remove(&name);
        }
    }
}

/// Whether a value has what every API key has: `e2b_` and 40 hexadecimal digits.
fn holds_key(value: &[u8]) -> bool {
    const PREFIX: &[u8] = b"e2b_";
    const DIGITS: usize = 40;
    value
        .windows(PREFIX.len() + DIGITS)
        .any(|part| part.strip_prefix(PREFIX).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)))
}

/// The protocol that a client wants to switch to, if it may.
pub(crate) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let wanted = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|name| name.trim().eq_ignore_ascii_case("upgrade"));
    let protocol = headers.get(UPGRADE)?;
    // A switch to HTTP/2 would carry requests past this code.
    let http2 = protocol.to_str().map_or(true, |text| {
        text.split(',').any(|one| one.trim().get(..2).is_some_and(|start| start.eq_ignore_ascii_case("h2")))
    });
    (wanted && !http2).then(|| protocol.clone())
}

/// What the request to a sandbox says about its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// None.
    Empty,
    /// Known in advance.
    Length(u64),
    /// Ends when it ends.
    Chunked,
}

/// Turns the headers that a client sent into those that a sandbox gets.
pub(crate) fn to_sandbox(
    headers: &mut HeaderMap,
    origin: Origin,
    framing: Framing,
    upgrade: Option<HeaderValue>,
) {
    strip_hop_by_hop(headers);
    strip_keys(headers);
    // It is for the server here: with it, a program inside could act as its own client.
    headers.remove(TRAFFIC_TOKEN);
    // The server here answers it, when the sandbox begins to read.
    headers.remove(EXPECT);
    headers.remove(CONTENT_LENGTH);
    match framing {
        Framing::Empty => {}
        Framing::Length(length) => {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        Framing::Chunked => {
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
    }
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
    // HTTP/2 may split cookies over several lines, HTTP/1.1 may not.
    let cookies: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if cookies.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
    forwarded(headers, &origin);
    if let Some(host) = origin.host {
        headers.insert(HOST, host);
    }
}

fn forwarded(headers: &mut HeaderMap, origin: &Origin) {
    let peer = origin.peer.address();
    let before = headers
        .get_all(&FORWARDED_FOR)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .map(|value| format!("{value}, "))
        .collect::<String>();
    if let Ok(chain) = HeaderValue::try_from(format!("{before}{peer}")) {
        headers.insert(FORWARDED_FOR, chain);
    }
    if let Some(host) = &origin.host
        && !headers.contains_key(&FORWARDED_HOST)
    {
        headers.insert(FORWARDED_HOST, host.clone());
    }
    if !headers.contains_key(&FORWARDED_PROTO) {
        headers
            .insert(FORWARDED_PROTO, HeaderValue::from_static(if origin.secure { "https" } else { "http" }));
    }
}

/// Turns the headers that a sandbox sent into those that a client gets.
pub(crate) fn to_client(headers: &mut HeaderMap) {
    // With both, the length is a lie that something behind us may believe.
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(headers);
}

/// Bytes that these headers take in HTTP/1.1.
pub(crate) fn length(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len()).sum()
}

/// The path and query as HTTP/1.1 sends them to an origin.
pub(crate) fn origin_form(uri: &Uri) -> Option<Uri> {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    Uri::builder().path_and_query(path).build().ok()
}

#[cfg(test)]
mod tests;
