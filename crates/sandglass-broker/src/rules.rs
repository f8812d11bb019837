//! Headers that a sandbox's requests to a host get on their way, as E2B's `network.rules` says it: a header's value may name secrets, which
//! are put in outside.

use std::collections::BTreeMap;

use http::HeaderName;
use sandglass_types::net::{HostPattern, Hostname, InvalidHostname};
use serde::Deserialize;
use serde_json::Value as Json;

use crate::attach::carries_the_request;
use crate::placeholder::{InvalidValue, MAX_NAMES, Value};

/// Most hosts.
pub const MAX_HOSTS: usize = 10;

/// Longest host, in bytes.
pub const MAX_HOST: usize = 128;

/// Most headers of a host.
pub const MAX_HEADERS: usize = 20;

/// Longest name of a header, in bytes.
pub const MAX_HEADER: usize = 64;

/// Which headers requests get. A rule allows nothing: whether a host is reached is up to the policy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules(Vec<(HostPattern, Vec<(HeaderName, Value)>)>);

/// Why there are no such rules. Each text is about the field `network.rules`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRules {
    /// It is built otherwise.
    #[error(
        "network.rules: each host has a list of at most one {{\"transform\": {{\"headers\": {{NAME: VALUE}}}}}}"
    )]
    Shape,
    /// There are too many hosts.
    #[error("network.rules: at most {MAX_HOSTS} hosts")]
    Hosts,
    /// A host is none.
    #[error("network.rules: a host has at most {MAX_HOST} bytes: {0}")]
    Host(String),
    /// A host that is no name.
    #[error("network.rules: {0}")]
    Name(#[from] InvalidHostname),
    /// There are too many headers.
    #[error("network.rules: at most {MAX_HEADERS} headers for each host")]
    Headers,
    /// A header that can't be set.
    #[error(
        "network.rules: {0:?} is no header that can be set: 1 to {MAX_HEADER} letters, digits and hyphens, and none that carries the request itself"
    )]
    Header(String),
    /// Its value can't be.
    #[error("network.rules: the header {0}: {1}")]
    Value(HeaderName, InvalidValue),
    /// A rule names too many secrets.
    #[error("network.rules: a host's headers name at most {MAX_NAMES} secrets")]
    Secrets,
}

/// What stands for a host.
#[derive(Deserialize)]
struct Written {
    transform: Option<Transform>,
}

#[derive(Deserialize)]
struct Transform {
    headers: Option<BTreeMap<String, String>>,
}

impl Rules {
    /// Reads what a client sent.
    ///
    /// # Errors
    /// [`InvalidRules`].
    pub fn read(sent: &Json) -> Result<Self, InvalidRules> {
        let sent = match sent {
            Json::Null => return Ok(Self::default()),
            Json::Object(sent) => sent,
            _ => return Err(InvalidRules::Shape),
        };
        if sent.len() > MAX_HOSTS {
            return Err(InvalidRules::Hosts);
        }
        let rule = |(host, written): (&String, &Json)| {
            if host.len() > MAX_HOST {
                return Err(InvalidRules::Host(host.chars().take(32).collect()));
            }
            let written = Vec::<Written>::deserialize(written).map_err(|_| InvalidRules::Shape)?;
            let host: HostPattern = host.parse()?;
            // One for every host would be no rule for a host.
            if host == HostPattern::Any || written.len() > 1 {
                return Err(InvalidRules::Shape);
            }
            let transform = written.into_iter().next().and_then(|written| written.transform);
            let sent = transform.and_then(|transform| transform.headers).unwrap_or_default();
            if sent.len() > MAX_HEADERS {
                return Err(InvalidRules::Headers);
            }
            let headers =
                sent.iter().map(|(name, value)| header(name, value)).collect::<Result<Vec<_>, _>>()?;
            let twice = headers
                .iter()
                .enumerate()
                .any(|(at, (name, _))| headers[..at].iter().any(|(other, _)| other == name));
            if twice {
                return Err(InvalidRules::Shape);
            }
            let secrets = headers.iter().flat_map(|(_, value)| value.names()).count();
            if secrets > MAX_NAMES { Err(InvalidRules::Secrets) } else { Ok((host, headers)) }
        };
        sent.iter().map(rule).collect::<Result<_, _>>().map(Self)
    }

    /// What requests to this host get: by the rule of exactly this host, else by that of the longest end of its name, and never by two.
    #[must_use]
    pub fn of(&self, host: &Hostname) -> &[(HeaderName, Value)] {
        let speaking = self.0.iter().filter(|(pattern, _)| pattern.matches(host));
        let nearest = speaking.max_by_key(|(pattern, _)| match pattern {
            HostPattern::Exact(_) => usize::MAX,
            pattern => pattern.to_string().len(),
        });
        nearest.map_or(&[], |(_, headers)| headers)
    }

    /// Whether some request gets a header.
    #[must_use]
    pub fn change_anything(&self) -> bool {
        self.0.iter().any(|(_, headers)| !headers.is_empty())
    }
}

fn header(name: &str, value: &str) -> Result<(HeaderName, Value), InvalidRules> {
    let wrong = || InvalidRules::Header(name.chars().take(MAX_HEADER).collect());
    if name.len() > MAX_HEADER {
        return Err(wrong());
    }
    let parsed = HeaderName::try_from(name).map_err(|_| wrong())?;
    if carries_the_request(&parsed) {
        return Err(wrong());
    }
    let value = value.parse().map_err(|error| InvalidRules::Value(parsed.clone(), error))?;
    Ok((parsed, value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(name: &str, value: &str) -> Json {
        json!([{"transform": {"headers": {name: value}}}])
    }

    #[test]
    fn the_nearest_rule_counts_and_no_other() {
        let rules = Rules::read(&json!({
            "api.example.com": one("X-Exact", "1"),
            "*.example.com": one("X-Below", "Bearer ${e2b.secrets.a}"),
            "*.api.example.com": one("x-deeper", "1"),
            "none.example.com": [{}],
        }))
        .unwrap();
        let names = |host: &str| {
            let host: Hostname = host.parse().unwrap();
            rules.of(&host).iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names("api.example.com"), ["x-exact"]);
        assert_eq!(names("b.example.com"), ["x-below"]);
        assert_eq!(names("b.api.example.com"), ["x-deeper"]);
        assert_eq!(names("example.com"), [""; 0], "the apex is not below itself");
        assert_eq!(names("none.example.com"), [""; 0], "nothing is merged");
        assert_eq!(names("example.org"), [""; 0]);
        assert!(rules.change_anything());
    }

    #[test]
    fn what_changes_nothing_is_no_rule() {
        for nothing in [
            json!(null),
            json!({}),
            json!({"a.test": []}),
            json!({"a.test": [{}]}),
            json!({"a.test": [{"transform": {}}]}),
            json!({"a.test": [{"transform": {"headers": {}}}]}),
        ] {
            assert!(!Rules::read(&nothing).unwrap().change_anything(), "{nothing}");
        }
    }

    #[test]
    fn what_can_not_be_is_refused_by_name() {
        let hosts: serde_json::Map<_, _> =
            (0..=MAX_HOSTS).map(|n| (format!("h{n}.test"), json!([{}]))).collect();
        let headers: BTreeMap<_, _> = (0..=MAX_HEADERS).map(|n| (format!("x-{n}"), "v")).collect();
        let secrets: BTreeMap<_, _> =
            (0..3).map(|n| (format!("x-{n}"), "${e2b.secrets.a}".repeat(11))).collect();
        let of = |headers: Json| json!({"a.test": [{"transform": {"headers": headers}}]});
        for (sent, said) in [
            (json!([]), "each host has a list"),
            (json!({"a.test": {}}), "each host has a list"),
            (json!({"a.test": [{}, {}]}), "at most one"),
            (json!({"*": [{}]}), "each host has a list"),
            (json!({"a b": [{}]}), "network.rules: "),
            (json!({format!("{}.test", "a".repeat(130)): [{}]}), "at most 128"),
            (Json::Object(hosts), "at most 10 hosts"),
            (of(json!(headers)), "at most 20 headers"),
            (of(json!(secrets)), "at most 32 secrets"),
            (of(json!({"a b": "v"})), "no header"),
            (of(json!({"x".repeat(65): "v"})), "no header"),
            (of(json!({"Host": "v"})), "no header"),
            (of(json!({"Content-Length": "1"})), "no header"),
            (of(json!({"X-A": "a\r\nb"})), "x-a: "),
            (of(json!({"X-A": "${e2b.secrets.a"})), "placeholder"),
            (of(json!({"X-A": "${e2b.identity.tokens.a}"})), "identity"),
            (of(json!({"X-A": "1", "x-a": "2"})), "each host has a list"),
            (of(json!({"X-A": 1})), "each host has a list"),
        ] {
            let error = Rules::read(&sent).unwrap_err().to_string();
            assert!(error.starts_with("network.rules: ") && error.contains(said), "{sent}: {error}");
        }
    }
}
