//! The policy in force: what a sandbox asked for, next to what its operator lets it have.

use std::fmt;

use sandglass_types::net::{Cidr, HostPattern, Port};

use super::decide::ceiling_for;
use super::rule::{Action, FeatureName, Label, Origin, Rule, RuleId, Target, Transport};
use super::service::Services;
use super::special::{Openings, Surroundings, never};
use super::{Operator, Policy};

/// What [`super::decide`] decides by.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Effective {
    pub(super) request: Layer,
    pub(super) ceiling: Layer,
    pub(super) openings: Openings,
    pub(super) surroundings: Surroundings,
    pub(super) services: Option<Services>,
}

/// One list of rules with their full names. The first match decides.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Layer {
    pub(super) rules: Vec<(Label, Rule)>,
}

impl Layer {
    fn push(&mut self, origin: &Origin, rules: &[Rule]) {
        let named = |rule: &Rule| (Label { origin: origin.clone(), rule: rule.id.clone() }, rule.clone());
        self.rules.extend(rules.iter().map(named));
    }
}

/// A request for a feature that the config does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("features: this server has no feature {0}; leave it out, or ask the operator to configure it")]
pub struct UnknownFeature(pub FeatureName);

/// What somebody should know about a policy that is in force all the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Warning {
    /// The sandbox asked for everything, and gets the ceiling.
    OpenInternet {
        /// Its rule.
        rule: RuleId,
        /// How many rules of the operator's allow something.
        allowed: usize,
    },
    /// The sandbox asked for a host that the ceiling does not allow.
    BeyondCeiling {
        /// Its rule.
        rule: RuleId,
    },
    /// A rule asks for UDP.
    Udp {
        /// Which.
        rule: Label,
    },
    /// A rule allows only addresses that are always denied.
    NeverReached {
        /// Which.
        rule: Label,
    },
    /// A rule allows IPv6, which nothing inside routes.
    Ipv6 {
        /// Which.
        rule: Label,
    },
    /// A rule allows TLS to a host. Inside it, requests for other hosts of the same provider can't be seen.
    Fronting {
        /// Which.
        rule: Label,
    },
    /// A rule allows every host, or every host of a top-level domain.
    Wide {
        /// Which.
        rule: Label,
    },
    /// A rule denies a host and a later one allows addresses: where no name is known, the denial counts.
    UnnamedDenied {
        /// The one that denies.
        rule: Label,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OpenInternet { rule, allowed: 0 } => write!(
                f,
                "the rule {rule} asks for the open internet, but the operator of this server allows nothing"
            ),
            Self::OpenInternet { rule, allowed } => write!(
                f,
                "the rule {rule} asks for the open internet, but gets what the operator allows: {allowed} rules"
            ),
            Self::BeyondCeiling { rule } => {
                write!(f, "the rule {rule} has no effect: the operator's ceiling does not allow it")
            }
            Self::Udp { rule } => write!(f, "the rule {rule} has no effect: UDP is not carried"),
            Self::NeverReached { rule } => {
                write!(f, "the rule {rule} has no effect: its addresses are always denied")
            }
            Self::Ipv6 { rule } => write!(f, "the rule {rule} has no effect: sandboxes have no IPv6"),
            Self::Fronting { rule } => write!(
                f,
                "the rule {rule} allows TLS: other hosts that the same servers answer for can't be told apart inside it"
            ),
            Self::Wide { rule } => write!(f, "the rule {rule} allows hosts that anybody can make"),
            Self::UnnamedDenied { rule } => write!(
                f,
                "the rule {rule} denies a host, so connections whose host is not known are denied as well"
            ),
        }
    }
}

impl Effective {
    /// A policy under which nothing leaves.
    #[must_use]
    pub fn sealed() -> Self {
        Self::default()
    }

    /// What `request` comes to under `operator`, and what its author should know about it.
    ///
    /// # Errors
    /// The request names a feature that the operator does not have.
    pub fn new(
        request: &Policy,
        operator: &Operator,
        surroundings: Surroundings,
    ) -> Result<(Self, Vec<Warning>), UnknownFeature> {
        let mut asked = Layer::default();
        asked.push(&Origin::Request, &request.rules.0);
        for name in &request.features {
            let feature = operator.features.0.get(name).ok_or_else(|| UnknownFeature(name.clone()))?;
            asked.push(&Origin::Feature(name.clone()), &feature.rules.0);
        }
        let ceiling = operator.layer();
        let effective = Self {
            request: asked,
            ceiling,
            openings: operator.open_private.clone(),
            surroundings,
            services: None,
        };
        let warnings = effective.warnings();
        Ok((effective, warnings))
    }

    /// The same for a sandbox that was granted these.
    #[must_use]
    pub fn granting(self, services: Services) -> Self {
        Self { services: Some(services), ..self }
    }

    /// Whether nothing at all leaves, because one side allows nothing. What was granted is the server's own, and no way out.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        let allows = |layer: &Layer| layer.rules.iter().any(|(_, rule)| rule.action == Action::Allow);
        !(allows(&self.request) && allows(&self.ceiling))
    }

    fn warnings(&self) -> Vec<Warning> {
        let mut warnings = Vec::new();
        let everything = |layer: &Layer| layer.rules.iter().any(|(_, rule)| allows_everything(rule));
        if let Some((label, _)) = self.request.rules.iter().find(|(_, rule)| allows_everything(rule))
            && !everything(&self.ceiling)
        {
            let allows = |(_, rule): &&(Label, Rule)| rule.action == Action::Allow;
            let allowed = self.ceiling.rules.iter().filter(allows).count();
            warnings.push(Warning::OpenInternet { rule: label.rule.clone(), allowed });
        }
        for (index, (label, rule)) in self.request.rules.iter().enumerate() {
            if label.origin == Origin::Request {
                let later = self.request.rules.get(index + 1..).unwrap_or_default();
                warnings.extend(warning(label, rule, later, &self.openings));
            }
            if let (Action::Allow, Transport::Tcp, Target::Host(HostPattern::Exact(name))) =
                (rule.action, rule.transport, &rule.target)
                && ceiling_for(self, name, &rule.ports).is_none()
            {
                warnings.push(Warning::BeyondCeiling { rule: rule.id.clone() });
            }
        }
        warnings
    }
}

impl Operator {
    /// The ceiling and all that features allow.
    fn layer(&self) -> Layer {
        let mut layer = Layer::default();
        layer.push(&Origin::Ceiling, &self.ceiling.0);
        for (name, feature) in &self.features.0 {
            layer.push(&Origin::Feature(name.clone()), &feature.rules.0);
        }
        layer
    }

    /// What the operator should know about the config: for the log, once.
    #[must_use]
    pub fn warnings(&self) -> Vec<Warning> {
        let layer = self.layer();
        let rules = layer.rules.iter().enumerate();
        let about = rules.filter_map(|(index, (label, rule))| {
            warning(label, rule, layer.rules.get(index + 1..).unwrap_or_default(), &self.open_private)
        });
        about.collect()
    }
}

/// What is to be said about one rule, before the later ones of its list.
fn warning(label: &Label, rule: &Rule, later: &[(Label, Rule)], openings: &Openings) -> Option<Warning> {
    let rule_name = label.clone();
    if rule.transport == Transport::Udp {
        return Some(Warning::Udp { rule: rule_name });
    }
    match (rule.action, &rule.target) {
        (Action::Allow, Target::Net(range)) if never(range, openings) => {
            Some(Warning::NeverReached { rule: rule_name })
        }
        (Action::Allow, Target::Net(range)) if range.is_v6() => Some(Warning::Ipv6 { rule: rule_name }),
        (Action::Allow, Target::Host(pattern)) => match pattern {
            HostPattern::Any => Some(Warning::Wide { rule: rule_name }),
            HostPattern::Below(apex) if apex.labels() == 1 => Some(Warning::Wide { rule: rule_name }),
            _ if rule.ports.contains(Port::HTTPS) => Some(Warning::Fronting { rule: rule_name }),
            _ => None,
        },
        (Action::Deny, Target::Host(_)) => {
            let allows_addresses = |(_, later): &(Label, Rule)| {
                later.action == Action::Allow && matches!(later.target, Target::Net(_))
            };
            later.iter().any(allows_addresses).then_some(Warning::UnnamedDenied { rule: rule_name })
        }
        (_, Target::Net(_)) => None,
    }
}

fn allows_everything(rule: &Rule) -> bool {
    let all = matches!(&rule.target, Target::Net(range) if *range == Cidr::ALL_V4)
        || rule.target == Target::Host(HostPattern::Any);
    rule.action == Action::Allow && rule.transport == Transport::Tcp && all
}
