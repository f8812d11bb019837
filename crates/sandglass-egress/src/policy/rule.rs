//! Rules, and lists of them.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use sandglass_types::net::{
    Cidr, HostPattern, InvalidCidr, InvalidHostname, Method, PathPrefix, Port, Ports,
};
use serde::{Deserialize, Serialize};

/// Most rules in one list.
pub const MAX_RULES: usize = 256;

/// Most methods, and most path prefixes, in one rule.
pub const MAX_HTTP_TERMS: usize = 32;

/// Longest label of a rule or feature, in bytes.
const MAX_LABEL: usize = 64;

/// A text that can't label a rule or a feature.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a label of a rule or a feature has 1 to {MAX_LABEL} of a-z, 0-9, '.', '_' and '-'")]
pub struct InvalidLabel;

macro_rules! label {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Box<str>);

        impl FromStr for $name {
            type Err = InvalidLabel;

            fn from_str(text: &str) -> Result<Self, InvalidLabel> {
                let known = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
                let right = !text.is_empty() && text.len() <= MAX_LABEL && text.bytes().all(known);
                if right { Ok(Self(text.into())) } else { Err(InvalidLabel) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidLabel;

            fn try_from(text: String) -> Result<Self, InvalidLabel> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(label: $name) -> Self {
                label.0.into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

label!(
    /// Names a rule within its list: in receipts, in explanations and in warnings.
    RuleId
);

label!(
    /// Names a feature of the config.
    FeatureName
);

impl RuleId {
    /// A label that is known to be right.
    pub(super) fn fixed(label: &'static str) -> Self {
        Self(label.into())
    }

    /// The label of the rule at a place, from 1, among those of a kind.
    pub(super) fn numbered(kind: &str, place: usize) -> Self {
        Self(format!("{kind}-{place}").into())
    }

    /// Whether it is a label of [`RuleId::numbered`].
    pub(super) fn is_of(&self, kind: &str) -> bool {
        self.0
            .strip_prefix(kind)
            .and_then(|rest| rest.strip_prefix('-'))
            .is_some_and(|place| place.parse::<u32>().is_ok())
    }
}

/// Whose list a rule stands in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Origin {
    /// The sandbox's own policy.
    Request,
    /// The operator's ceiling.
    Ceiling,
    /// A feature of the config.
    Feature(FeatureName),
}

/// A rule's full name: `request/…`, `ceiling/…` or `feature.NAME/…`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Label {
    /// Whose list it stands in.
    pub origin: Origin,
    /// Its name there.
    pub rule: RuleId,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Request => write!(f, "request/{}", self.rule),
            Origin::Ceiling => write!(f, "ceiling/{}", self.rule),
            Origin::Feature(feature) => write!(f, "feature.{feature}/{}", self.rule),
        }
    }
}

/// What carries a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// TCP.
    #[default]
    Tcp,
    /// UDP, which is never carried; a rule that asks for it gets a warning.
    Udp,
}

/// What a rule does with what it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Allow,
    Deny,
}

/// Whom a rule speaks of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    Host(HostPattern),
    Net(Cidr),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(pattern) => pattern.fmt(f),
            Self::Net(range) => range.fmt(f),
        }
    }
}

/// Which HTTP requests a rule speaks of; an empty list speaks of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Http {
    pub(super) methods: Vec<Method>,
    pub(super) paths: Vec<PathPrefix>,
}

/// One line of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) id: RuleId,
    pub(super) action: Action,
    pub(super) target: Target,
    pub(super) ports: Ports,
    pub(super) transport: Transport,
    /// With it, `ports` is port 80 alone: nowhere else does the server see requests.
    pub(super) http: Option<Http>,
}

/// A list of rules whose first match decides.
///
/// As data each rule is an object: `allow` or `deny` with a host, `*.suffix`, `*`, an address or a CIDR; optionally
/// `id` (by default `rule-1`, `rule-2`, … by place), `ports` (by default 80 and 443 if it allows, all if it denies),
/// `protocol`, and for port 80 `methods` and `paths`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<Unchecked>", into = "Vec<Unchecked>")]
pub struct Rules(pub(super) Vec<Rule>);

/// A [`Rule`] as it is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Unchecked {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<RuleId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    allow: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deny: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ports: Option<Ports>,
    #[serde(default)]
    protocol: Transport,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    methods: Vec<Method>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    paths: Vec<PathPrefix>,
}

/// A list of rules that can't be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRules {
    /// Too many.
    #[error("at most {MAX_RULES} rules, not {0}")]
    Count(usize),
    /// Two rules of one name.
    #[error("two rules are called {0}: give each an id of its own")]
    Duplicate(RuleId),
    /// Neither `allow` nor `deny`, or both.
    #[error("rule {0}: say either allow or deny, with a host, *.suffix, an address or a range")]
    Action(RuleId),
    /// The target is neither a host nor a range.
    #[error("rule {rule}: {source}")]
    Host {
        /// Which rule.
        rule: RuleId,
        /// Why its target is not a host.
        source: InvalidHostname,
    },
    /// The target is a range that can't be right.
    #[error("rule {rule}: {source}")]
    Net {
        /// Which rule.
        rule: RuleId,
        /// Why its target is not a range.
        source: InvalidCidr,
    },
    /// Methods or paths on other ports than 80.
    #[error("rule {0}: methods and paths are seen on port 80 alone: leave ports and protocol out")]
    Unseen(RuleId),
    /// Too many methods or paths.
    #[error("rule {0}: at most {MAX_HTTP_TERMS} methods and as many paths")]
    HttpTerms(RuleId),
    /// A feature that denies.
    #[error("rule {0}: a feature only allows; put the rule into the ceiling")]
    FeatureDenies(RuleId),
}

impl Rules {
    /// The first rule that denies.
    pub(super) fn first_denial(&self) -> Option<&RuleId> {
        self.0.iter().find(|rule| rule.action == Action::Deny).map(|rule| &rule.id)
    }
}

impl TryFrom<Vec<Unchecked>> for Rules {
    type Error = InvalidRules;

    fn try_from(raw: Vec<Unchecked>) -> Result<Self, InvalidRules> {
        if raw.len() > MAX_RULES {
            return Err(InvalidRules::Count(raw.len()));
        }
        let rules: Vec<Rule> =
            raw.into_iter().enumerate().map(|(index, rule)| rule.check(index)).collect::<Result<_, _>>()?;
        let mut seen = BTreeSet::new();
        match rules.iter().find(|rule| !seen.insert(&rule.id)) {
            Some(rule) => Err(InvalidRules::Duplicate(rule.id.clone())),
            None => Ok(Self(rules)),
        }
    }
}

impl Unchecked {
    fn check(self, index: usize) -> Result<Rule, InvalidRules> {
        let id = self.id.unwrap_or_else(|| RuleId::numbered("rule", index + 1));
        let (action, target) = match (self.allow, self.deny) {
            (Some(target), None) => (Action::Allow, target),
            (None, Some(target)) => (Action::Deny, target),
            _ => return Err(InvalidRules::Action(id)),
        };
        let target = parse_target(&target, &id)?;
        let http = match (self.methods, self.paths) {
            (methods, paths) if methods.is_empty() && paths.is_empty() => None,
            (methods, paths) if methods.len().max(paths.len()) > MAX_HTTP_TERMS => {
                return Err(InvalidRules::HttpTerms(id));
            }
            (methods, paths) => Some(Http { methods, paths }),
        };
        let port_80 = Ports::from_iter([Port::HTTP]);
        let ports = match (self.ports, &http, action) {
            (ports, Some(_), _) => {
                if self.protocol != Transport::Tcp || ports.is_some_and(|ports| ports != port_80) {
                    return Err(InvalidRules::Unseen(id));
                }
                port_80
            }
            (Some(ports), None, _) => ports,
            (None, None, Action::Allow) => Ports::from_iter([Port::HTTP, Port::HTTPS]),
            (None, None, Action::Deny) => Ports::all(),
        };
        Ok(Rule { id, action, target, ports, transport: self.protocol, http })
    }
}

fn parse_target(text: &str, rule: &RuleId) -> Result<Target, InvalidRules> {
    // A host name has neither of these, and a range of IPv4 without a slash is an address.
    if text.contains(['/', ':']) || text.parse::<std::net::Ipv4Addr>().is_ok() {
        return text
            .parse()
            .map(Target::Net)
            .map_err(|source| InvalidRules::Net { rule: rule.clone(), source });
    }
    text.parse().map(Target::Host).map_err(|source| InvalidRules::Host { rule: rule.clone(), source })
}

impl From<Rules> for Vec<Unchecked> {
    fn from(rules: Rules) -> Self {
        rules.0.into_iter().map(Unchecked::from).collect()
    }
}

impl From<Rule> for Unchecked {
    fn from(rule: Rule) -> Self {
        let target = Some(rule.target.to_string());
        let (allow, deny) = match rule.action {
            Action::Allow => (target, None),
            Action::Deny => (None, target),
        };
        let Http { methods, paths } = rule.http.unwrap_or(Http { methods: Vec::new(), paths: Vec::new() });
        Self {
            id: Some(rule.id),
            allow,
            deny,
            ports: Some(rule.ports),
            protocol: rule.transport,
            methods,
            paths,
        }
    }
}
