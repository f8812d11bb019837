//! A connection: a service that sandboxes may use with a credential that is added outside of them.

use std::fmt;
use std::str::FromStr;

use http::HeaderName;
use sandglass_types::net::{Hostname, InvalidHostname, Method, PathPrefix, Port};
use serde::{Deserialize, Serialize};

use crate::attach::Attach;

/// Longest name, in bytes: it is a label of DNS.
pub const MAX_NAME: usize = 63;

/// Most methods, and most path prefixes, of a connection.
pub const MAX_TERMS: usize = 64;

/// The name of a connection, by which sandboxes reach it: small letters, digits, and hyphens between them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ConnectionName(Box<str>);

impl ConnectionName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ConnectionName {
    type Err = InvalidConnection;

    fn from_str(text: &str) -> Result<Self, InvalidConnection> {
        let plain = text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'));
        let ends = text.starts_with('-') || text.ends_with('-');
        if (1..=MAX_NAME).contains(&text.len()) && plain && !ends {
            Ok(Self(text.into()))
        } else {
            Err(InvalidConnection::Name)
        }
    }
}

impl TryFrom<String> for ConnectionName {
    type Error = InvalidConnection;

    fn try_from(text: String) -> Result<Self, InvalidConnection> {
        text.parse()
    }
}

impl From<ConnectionName> for String {
    fn from(name: ConnectionName) -> Self {
        name.0.into()
    }
}

impl fmt::Display for ConnectionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where a connection leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Whether it is spoken to with TLS. Without, only what the operator wrote may be: the credential travels in clear.
    pub tls: bool,
    /// The host.
    pub host: Hostname,
    /// Its port.
    pub port: Port,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.host)?;
        let usual = if self.tls { 443 } else { 80 };
        if self.port.get() == usual { Ok(()) } else { write!(f, ":{}", self.port.get()) }
    }
}

impl FromStr for Target {
    type Err = InvalidConnection;

    fn from_str(text: &str) -> Result<Self, InvalidConnection> {
        let (tls, rest) = match text.split_once("://") {
            Some(("https", rest)) => (true, rest),
            Some(("http", rest)) => (false, rest),
            _ => return Err(InvalidConnection::Target),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match rest.split_once(':') {
            None => (rest, if tls { 443 } else { 80 }),
            Some((host, port)) => (host, port.parse().map_err(|_| InvalidConnection::Target)?),
        };
        let port = Port::try_from(port).map_err(|_| InvalidConnection::Target)?;
        Ok(Self { tls, host: host.parse()?, port })
    }
}

/// What a connection may be used for at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Requests of one sandbox in a minute.
    pub requests_per_minute: u32,
    /// Requests of one sandbox at one time.
    pub concurrent: u32,
    /// Bytes of one request's body.
    pub body_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { requests_per_minute: 600, concurrent: 16, body_bytes: 64 << 20 }
    }
}

/// A connection as it is written down, by an operator or a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Written {
    /// By which sandboxes reach it.
    pub name: String,
    /// Scheme, host, and port if it is not the usual one.
    pub target: String,
    /// Methods that may be used; at least one.
    pub methods: Vec<String>,
    /// Beginnings of paths that may be asked for; at least one, and `/` is all.
    pub paths: Vec<String>,
    /// How the credential is shown.
    pub credential: WrittenAttach,
    /// Whether requests may name a second resource, which nobody looks at.
    #[serde(default)]
    pub second_resource: bool,
    /// What it may be used for at most.
    #[serde(default)]
    pub limits: Limits,
}

/// How a credential is shown, as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum WrittenAttach {
    /// `Authorization: Bearer …`.
    Bearer,
    /// `Authorization: Basic …`, for this user.
    Basic {
        /// The user's name.
        user: String,
    },
    /// A header of this name, whose value may begin with something.
    Header {
        /// The header.
        name: String,
        /// What stands before the credential.
        #[serde(default)]
        prefix: String,
    },
    /// A parameter of the query of this name.
    Query {
        /// The parameter.
        name: String,
    },
}

/// A connection that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// By which sandboxes reach it.
    pub name: ConnectionName,
    /// Where it leads.
    pub target: Target,
    /// How the credential is shown there.
    pub attach: Attach,
    /// What it may be used for at most.
    pub limits: Limits,
    pub(crate) methods: Vec<Method>,
    pub(crate) paths: Vec<PathPrefix>,
    pub(crate) second_resource: bool,
}

/// What is wrong with a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConnection {
    /// Its name.
    #[error("a connection's name has 1 to {MAX_NAME} small letters, digits, and hyphens between them")]
    Name,
    /// Its target.
    #[error("a target is https://HOST, or https://HOST:PORT, and nothing behind it")]
    Target,
    /// Its target's host.
    #[error("the host of a target: {0}")]
    Host(#[from] InvalidHostname),
    /// Its methods.
    #[error("methods: 1 to {MAX_TERMS}, in capital letters; CONNECT and TRACE can't be among them")]
    Methods,
    /// Its paths.
    #[error("paths: 1 to {MAX_TERMS} beginnings such as /v1/repos; {0} is none")]
    Paths(String),
    /// How the credential is shown.
    #[error(
        "credential: a header or parameter that is not one of those that carry a request itself, and printable ASCII beside it"
    )]
    Attach,
    /// A limit of nothing.
    #[error("limits: at least 1 request in a minute and at one time")]
    Limits,
}

impl TryFrom<Written> for Connection {
    type Error = InvalidConnection;

    fn try_from(written: Written) -> Result<Self, InvalidConnection> {
        let bounded = |terms: &[String]| (1..=MAX_TERMS).contains(&terms.len());
        // The one makes a tunnel, the other has the request sent back with the credential in it.
        let never = |method: &String| matches!(method.as_str(), "CONNECT" | "TRACE");
        if !bounded(&written.methods) || written.methods.iter().any(never) {
            return Err(InvalidConnection::Methods);
        }
        if !bounded(&written.paths) {
            return Err(InvalidConnection::Paths(format!("a list of {}", written.paths.len())));
        }
        if written.limits.requests_per_minute == 0 || written.limits.concurrent == 0 {
            return Err(InvalidConnection::Limits);
        }
        let methods = written.methods.iter().map(|method| method.parse()).collect::<Result<_, _>>();
        let path = |path: &String| path.parse().map_err(|_| InvalidConnection::Paths(path.clone()));
        Ok(Self {
            name: written.name.parse()?,
            target: written.target.parse()?,
            attach: written.credential.try_into()?,
            limits: written.limits,
            methods: methods.map_err(|_| InvalidConnection::Methods)?,
            paths: written.paths.iter().map(path).collect::<Result<_, _>>()?,
            second_resource: written.second_resource,
        })
    }
}

impl TryFrom<WrittenAttach> for Attach {
    type Error = InvalidConnection;

    fn try_from(written: WrittenAttach) -> Result<Self, InvalidConnection> {
        let printable =
            |text: &str| text.len() <= 256 && text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        match written {
            WrittenAttach::Bearer => Ok(Self::Bearer),
            WrittenAttach::Basic { user } if printable(&user) && !user.contains(':') => {
                Ok(Self::Basic { user })
            }
            WrittenAttach::Header { name, prefix } if printable(&prefix) => {
                let name = HeaderName::try_from(name).map_err(|_| InvalidConnection::Attach)?;
                if crate::attach::carries_the_request(&name) {
                    return Err(InvalidConnection::Attach);
                }
                Ok(Self::Header { name, prefix })
            }
            WrittenAttach::Query { name }
                if !name.is_empty() && printable(&name) && !name.contains(['[', ']', ' ']) =>
            {
                Ok(Self::Query { name })
            }
            _ => Err(InvalidConnection::Attach),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    /// A connection like this one, with something of it written differently.
    pub(crate) fn connection(change: &serde_json::Value) -> Result<Connection, String> {
        let mut written = json!({
            "name": "github", "target": "https://api.test", "methods": ["GET", "POST"],
            "paths": ["/repos/a", "/user"], "credential": "bearer",
        });
        for (key, value) in change.as_object().unwrap() {
            written[key] = value.clone();
        }
        let written: Written = serde_json::from_value(written).map_err(|error| error.to_string())?;
        Connection::try_from(written).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_written_is_read_or_refused_with_what_to_do() {
        let read = connection(&json!({})).unwrap();
        assert_eq!(read.target.to_string(), "https://api.test");
        assert_eq!(read.limits, Limits::default());
        let other =
            connection(&json!({"target": "http://api.test:8080/", "credential": {"basic": {"user": "me"}}}));
        assert_eq!(other.unwrap().target.to_string(), "http://api.test:8080");
        for (change, said) in [
            (json!({"name": "Git"}), "name"),
            (json!({"name": "-a"}), "name"),
            (json!({"name": "a.b"}), "name"),
            (json!({"target": "api.test"}), "target"),
            (json!({"target": "https://api.test/v1"}), "host"),
            (json!({"target": "https://user@api.test"}), "host"),
            (json!({"target": "https://api.test:0"}), "target"),
            (json!({"methods": []}), "methods"),
            (json!({"methods": ["get"]}), "methods"),
            (json!({"methods": ["TRACE"]}), "methods"),
            (json!({"methods": ["CONNECT"]}), "methods"),
            (json!({"paths": []}), "paths"),
            (json!({"paths": ["/a/../b"]}), "paths"),
            (json!({"paths": ["repos"]}), "paths"),
            (json!({"credential": {"header": {"name": "content-length"}}}), "credential"),
            (json!({"credential": {"header": {"name": "x y"}}}), "credential"),
            (json!({"credential": {"header": {"name": "x-key", "prefix": "a\r\nb"}}}), "credential"),
            (json!({"credential": {"basic": {"user": "a:b"}}}), "credential"),
            (json!({"credential": {"query": {"name": ""}}}), "credential"),
            (json!({"limits": {"concurrent": 0}}), "limits"),
            (json!({"limits": {"more": 1}}), "unknown field"),
            (json!({"secret": "x"}), "unknown field"),
        ] {
            let error = connection(&change).unwrap_err();
            assert!(error.contains(said), "{change}: {error}");
        }
    }
}
