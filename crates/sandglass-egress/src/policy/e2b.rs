//! E2B's `network` object, with its meaning.
//!
//! There, what `allowOut` names wins over what `denyOut` names, and what neither names is allowed. As a list whose
//! first match decides: the allowed, then the denied, then everything.

use sandglass_types::net::{Cidr, Port, Ports};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Policy;
use super::rule::{Action, MAX_RULES, Rule, RuleId, Rules, Target, Transport};

/// How E2B's SDKs write the range of everything. It counts as this text only.
const ALL_TRAFFIC: &str = "0.0.0.0/0";

/// What the rules of `allowOut` and `denyOut` are called, each with its place.
const ALLOWED: &str = "allow-out";
const DENIED: &str = "deny-out";

/// The only error of E2B's server whose text its users know.
const DOMAINS_NEED_ALL_TRAFFIC: &str = "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' \
                                        in deny out to block all other traffic.";

/// Longest text of a client that a message repeats, in characters.
const MAX_QUOTED: usize = 80;

/// Longest `maskRequestHost`, in bytes.
const MAX_MASK: usize = 300;

/// The object `network` of a create request, and with its egress fields alone the body of an update.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Network {
    /// Addresses, CIDRs and domains that are allowed.
    pub allow_out: Option<Vec<String>>,
    /// Addresses and CIDRs that are denied unless `allowOut` names them.
    pub deny_out: Option<Vec<String>>,
    /// Whether ports of the sandbox are open to everybody; `true` unless given.
    pub allow_public_traffic: Option<bool>,
    /// The Host header that programs inside see.
    pub mask_request_host: Option<String>,
    /// Not supported yet.
    pub dns_servers: Option<Value>,
    /// Not supported yet.
    pub egress_proxy: Option<Value>,
    /// Not supported yet.
    pub https_ports: Option<Value>,
    /// Headers that requests get. They allow nothing, so this is no part of a policy.
    pub rules: Option<Value>,
}

/// Why a `network` object is refused. Each is a 400 with this text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum E2bError {
    /// An entry of `denyOut` is no IPv4 address or range.
    #[error("invalid denied CIDR {0}")]
    Denied(String),
    /// An entry of `allowOut` is nothing that can be there.
    #[error("invalid allowed address {0}")]
    Allowed(String),
    /// Domains are allowed beside everything.
    #[error("{DOMAINS_NEED_ALL_TRAFFIC}")]
    DomainsNeedAllTraffic,
    /// More entries than a policy holds.
    #[error("network.allowOut and network.denyOut have together at most {} entries", MAX_RULES - 2)]
    Count,
    /// A field of a later version.
    #[error("network.{0} is not supported by this version of sandglass: leave it out")]
    Unsupported(&'static str),
    /// The mask is no host.
    #[error("network.maskRequestHost must be a host with an optional port, such as localhost:${{PORT}}")]
    Mask,
}

/// How ports of a sandbox are reached from outside, as a client asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ingress {
    /// Whether everybody may; if not, only who has the traffic token.
    pub public: bool,
    /// What replaces the Host header.
    pub request_host: Option<RequestHost>,
}

impl Default for Ingress {
    /// Open to everybody who can reach the server, as E2B's clients expect.
    fn default() -> Self {
        Self { public: true, request_host: None }
    }
}

/// A Host header with the sandbox's port to be put in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RequestHost(String);

impl RequestHost {
    /// The text with its placeholder, as the client wrote it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The header for a request to `port`.
    #[must_use]
    pub fn for_port(&self, port: Port) -> String {
        self.0.replace("${PORT}", &port.to_string())
    }
}

impl TryFrom<String> for RequestHost {
    type Error = E2bError;

    fn try_from(text: String) -> Result<Self, E2bError> {
        if text.len() > MAX_MASK {
            return Err(E2bError::Mask);
        }
        let sample = text.replace("${PORT}", "65535");
        let (host, port) = match sample.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((address, port)) if address.parse::<std::net::Ipv6Addr>().is_ok() => {
                ("", if port.is_empty() { None } else { Some(port.strip_prefix(':').ok_or(E2bError::Mask)?) })
            }
            _ => sample.split_once(':').map_or((sample.as_str(), None), |(host, port)| (host, Some(port))),
        };
        let named = sample.starts_with('[') && host.is_empty()
            || host.parse::<sandglass_types::net::Hostname>().is_ok()
            || host.parse::<std::net::Ipv4Addr>().is_ok();
        let right = named && port.is_none_or(|port| port.parse::<Port>().is_ok());
        if right { Ok(Self(text)) } else { Err(E2bError::Mask) }
    }
}

impl From<RequestHost> for String {
    fn from(host: RequestHost) -> Self {
        host.0
    }
}

/// The policy that E2B's options ask for. `internet` is `allow_internet_access`; not given, it is `true`, and a `false`
/// denies everything that `allowOut` does not name.
///
/// # Errors
/// As E2B's server, a 400; and for each field that is not supported, one that names it.
pub fn from_e2b(network: &Network, internet: Option<bool>) -> Result<Policy, E2bError> {
    refuse_unsupported(network)?;
    let (allowed, denied) = (entries(&network.allow_out), entries(&network.deny_out));
    if allowed.len() + denied.len() > MAX_RULES - 2 {
        return Err(E2bError::Count);
    }
    let denied_ranges: Vec<Target> = denied
        .iter()
        .map(|text| range(text).map(Target::Net).ok_or_else(|| E2bError::Denied(quoted(text))))
        .collect::<Result<_, _>>()?;
    let allowed_targets: Vec<Target> = allowed
        .iter()
        .map(|text| {
            let target = range(text).map(Target::Net);
            target
                .or_else(|| text.parse().map(Target::Host).ok())
                .ok_or_else(|| E2bError::Allowed(quoted(text)))
        })
        .collect::<Result<_, _>>()?;
    let domains = allowed_targets.iter().any(|target| matches!(target, Target::Host(_)));
    if domains && !denied.iter().any(|text| text == ALL_TRAFFIC) {
        return Err(E2bError::DomainsNeedAllTraffic);
    }
    let everything = || Target::Net(Cidr::ALL_V4);
    let mut rules = numbered(ALLOWED, Action::Allow, allowed_targets);
    rules.extend(numbered(DENIED, Action::Deny, denied_ranges));
    if internet == Some(false) {
        rules.push(rule(RuleId::fixed("no-internet"), Action::Deny, everything()));
    }
    if !rules.iter().any(|rule| rule.action == Action::Deny && rule.target == everything()) {
        rules.push(rule(RuleId::fixed("internet"), Action::Allow, everything()));
    }
    Ok(Policy::of(Rules(rules)))
}

/// The lists `allowOut` and `denyOut` that a policy of [`from_e2b`] was made of, in canonical form; empty for another
/// policy.
#[must_use]
pub fn lists_of(policy: &Policy) -> (Vec<String>, Vec<String>) {
    let of = |kind: &str, action: Action| {
        let named = policy.rules.0.iter().filter(|rule| rule.action == action && rule.id.is_of(kind));
        named.map(|rule| written(&rule.target)).collect()
    };
    (of(ALLOWED, Action::Allow), of(DENIED, Action::Deny))
}

/// A target as clients write it: an address without the length of its prefix.
fn written(target: &Target) -> String {
    let text = target.to_string();
    text.strip_suffix("/32").map(ToOwned::to_owned).unwrap_or(text)
}

/// How ports of the sandbox are reached, by the same object.
///
/// # Errors
/// A `maskRequestHost` that is no host.
pub fn ingress_from_e2b(network: &Network) -> Result<Ingress, E2bError> {
    let mask = network.mask_request_host.as_deref().filter(|mask| !mask.is_empty());
    Ok(Ingress {
        public: network.allow_public_traffic.unwrap_or(true),
        request_host: mask.map(|mask| RequestHost::try_from(mask.to_owned())).transpose()?,
    })
}

fn refuse_unsupported(network: &Network) -> Result<(), E2bError> {
    let given = |value: &Option<Value>| match value {
        None | Some(Value::Null) => false,
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(_) => true,
    };
    let fields = [
        ("egressProxy", network.egress_proxy.as_ref().is_some_and(|proxy| !proxy.is_null())),
        ("dnsServers", given(&network.dns_servers)),
        ("httpsPorts", given(&network.https_ports)),
    ];
    match fields.into_iter().find(|(_, given)| *given) {
        Some((field, _)) => Err(E2bError::Unsupported(field)),
        None => Ok(()),
    }
}

fn entries(list: &Option<Vec<String>>) -> &[String] {
    list.as_deref().unwrap_or_default()
}

/// An IPv4 address or range; E2B's server takes no IPv6.
fn range(text: &str) -> Option<Cidr> {
    Cidr::parse_masked(text).ok().filter(|range| !range.is_v6())
}

fn quoted(text: &str) -> String {
    text.chars().take(MAX_QUOTED).flat_map(char::escape_default).collect()
}

fn numbered(kind: &str, action: Action, targets: Vec<Target>) -> Vec<Rule> {
    let rules = targets.into_iter().enumerate();
    rules.map(|(index, target)| rule(RuleId::numbered(kind, index + 1), action, target)).collect()
}

/// A rule as E2B means it: domains on the ports where names are seen, addresses on all.
fn rule(id: RuleId, action: Action, target: Target) -> Rule {
    let ports = match target {
        Target::Host(_) => Ports::from_iter([Port::HTTP, Port::HTTPS]),
        Target::Net(_) => Ports::all(),
    };
    Rule { id, action, target, ports, transport: Transport::Tcp, http: None }
}

#[cfg(test)]
mod tests;
