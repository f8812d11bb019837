//! Where a request goes, decided from its host and headers alone.

use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU16;

use http::header::HOST;
use http::{HeaderMap, HeaderName, Uri, Version};
use sandglass_egress::policy::GUEST_API_PORT;
use sandglass_types::SandboxId;

const SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
const SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// To the REST faces.
    Api,
    /// To a port of a sandbox.
    Sandbox {
        /// Which one.
        id: SandboxId,
        /// Which port in it.
        port: NonZeroU16,
    },
    /// To a sandbox of an id that no sandbox of this server can have, or to what is not there for who asks.
    Nowhere {
        /// What the client wrote: `[a-z0-9]{1,64}`.
        id: String,
    },
}

/// A request that can't be routed: always 400.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unroutable {
    #[error("Missing header: E2b-Sandbox-Id")]
    MissingId,
    #[error("Missing header: E2b-Sandbox-Port")]
    MissingPort,
    #[error("Invalid host")]
    Host,
    #[error("Invalid sandbox ID")]
    Id,
    #[error("Invalid sandbox port")]
    Port,
}

/// The host that a request names, without its port, in lower case.
///
/// # Errors
/// [`Unroutable::Host`] if it names none, several, or different ones.
pub(crate) fn host(version: Version, uri: &Uri, headers: &HeaderMap) -> Result<String, Unroutable> {
    let mut values = headers.get_all(HOST).iter();
    let header = match (values.next(), values.next()) {
        (None, _) => None,
        (Some(value), None) => Some(value.to_str().map_err(|_| Unroutable::Host)?),
        (Some(_), Some(_)) => return Err(Unroutable::Host),
    };
    let named = match (uri.authority(), header) {
        // A host in two places must be the same, or what is behind us may believe the other one.
        (Some(authority), Some(header)) if !authority.as_str().eq_ignore_ascii_case(header) => {
            return Err(Unroutable::Host);
        }
        (Some(authority), _) => authority.as_str(),
        (None, Some(header)) => header,
        (None, None) if version == Version::HTTP_10 => "",
        (None, None) => return Err(Unroutable::Host),
    };
    if named.contains('@') {
        return Err(Unroutable::Host);
    }
    Ok(without_port(named).ok_or(Unroutable::Host)?.to_ascii_lowercase())
}

fn without_port(authority: &str) -> Option<&str> {
    if let Some(rest) = authority.strip_prefix('[') {
        return rest.split_once(']').map(|(address, _)| address);
    }
    let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
    port.bytes().all(|b| b.is_ascii_digit()).then_some(host)
}

/// Whether a host names the server and no sandbox.
pub(crate) fn is_shared(host: &str) -> bool {
    host.is_empty()
        || host == "localhost"
        || host.starts_with("sandbox.")
        || host.parse::<IpAddr>().is_ok()
        || host.parse::<Ipv6Addr>().is_ok()
}

fn sandbox(id: &str, port: &str) -> Result<Target, Unroutable> {
    // Old clients append a dash and the id of a node.
    let id = id.split('-').next().unwrap_or("");
    let plausible =
        (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if !plausible {
        return Err(Unroutable::Id);
    }
    let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    let port: NonZeroU16 = if digits { port.parse().ok() } else { None }.ok_or(Unroutable::Port)?;
    Ok(match id.parse() {
        Ok(id) => Target::Sandbox { id, port },
        Err(_) => Target::Nowhere { id: id.to_owned() },
    })
}

/// `{port}-{id}` and what follows it, taken apart; `None` if the label has another shape.
fn split_label(label: &str) -> Option<(&str, &str)> {
    let mut parts = label.split('-');
    Some((parts.next()?, parts.next()?))
}

/// Decides where a request goes. `host` comes from [`host`]; `domain` is the one under which ports of sandboxes
/// have names, if there is one.
///
/// # Errors
/// [`Unroutable`].
pub(crate) fn route(host: &str, domain: Option<&str>, headers: &HeaderMap) -> Result<Target, Unroutable> {
    if !is_shared(host) {
        let (label, parent) = host.split_once('.').unwrap_or((host, ""));
        let split = split_label(label);
        if let Some((port, id)) = split {
            // Under our own domain a label with a dash can be nothing but a sandbox. Elsewhere it can be the
            // server's own name, so it must look like one of our ids.
            let ours = domain.is_some_and(|domain| host_of(domain).eq_ignore_ascii_case(parent));
            if ours || id.parse::<SandboxId>().is_ok() {
                return sandbox(id, port);
            }
        }
    }
    let value = |name: &HeaderName| headers.get_all(name).iter().collect::<Vec<_>>();
    match (value(&SANDBOX_ID).as_slice(), value(&SANDBOX_PORT).as_slice()) {
        ([], []) if host.starts_with("sandbox.") => Err(Unroutable::MissingId),
        ([], []) => Ok(Target::Api),
        ([], _) => Err(Unroutable::MissingId),
        (_, []) => Err(Unroutable::MissingPort),
        ([id], [port]) => sandbox(
            id.to_str().map_err(|_| Unroutable::Id)?.trim(),
            port.to_str().map_err(|_| Unroutable::Port)?.trim(),
        ),
        ([_], _) => Err(Unroutable::Port),
        _ => Err(Unroutable::Id),
    }
}

/// The same for a request that comes from a sandbox: its host alone says where it goes, which is to a port of a sandbox or
/// nowhere, whatever else is in it. A port of a sandbox has one name here, which is the one that rules speak of. The guest
/// API is not there: it may want no token, and whoever reaches it is root in the sandbox.
///
/// # Errors
/// [`Unroutable`].
pub(crate) fn route_from_sandbox(host: &str, domain: Option<&str>) -> Result<Target, Unroutable> {
    let (label, parent) = host.split_once('.').unwrap_or((host, ""));
    let ours = domain.is_some_and(|domain| host_of(domain).eq_ignore_ascii_case(parent));
    let (port, id) = split_label(label).filter(|_| ours).ok_or(Unroutable::Host)?;
    match sandbox(id, port)? {
        Target::Sandbox { id, port } if label != format!("{port}-{id}") => Err(Unroutable::Host),
        Target::Sandbox { id, port } if port.get() == GUEST_API_PORT => {
            Ok(Target::Nowhere { id: id.to_string() })
        }
        target => Ok(target),
    }
}

/// Removes what names a sandbox beside the host.
pub(crate) fn strip_routing(headers: &mut HeaderMap) {
    headers.remove(SANDBOX_ID);
    headers.remove(SANDBOX_PORT);
}

/// Whether a host, written however a client does, is the domain or a name right below it.
pub(crate) fn is_own(host: &str, domain: Option<&str>) -> bool {
    let Some(domain) = domain.map(host_of) else { return false };
    let parent = host.split_once('.').map_or("", |(_, parent)| parent);
    [host, parent].iter().any(|name| name.eq_ignore_ascii_case(domain))
}

/// A domain may carry a port.
fn host_of(domain: &str) -> &str {
    domain.split(':').next().unwrap_or(domain)
}

#[cfg(test)]
mod tests;
