//! What may leave a sandbox, as data, and the one function that reads it.
//!
//! A [`Policy`] is what a sandbox asked for; an [`Operator`]'s ceiling and features bound what any sandbox gets. Both
//! are lists of rules ([`Rules`]): **the first rule that matches decides, and what no rule matches is denied.** A connection
//! must be allowed by both lists, so their intersection is exact without any algebra over rules; the [`Effective`]
//! policy is nothing but the two side by side.
//!
//! All fields are private to this module. DNS, the proxy, `explain` and `verify` ask [`decide`], and nobody can read
//! a policy in another way.

mod decide;
mod e2b;
mod effective;
mod explain;
mod rule;
mod service;
mod special;

pub use decide::{
    By, Cause, Connection, Denial, Doubt, Grant, Host, Question, Record, Seen, Verdict, decide,
};
pub use e2b::{E2bError, Ingress, Network, RequestHost, from_e2b, ingress_from_e2b, lists_of};
pub use effective::{Effective, UnknownFeature, Warning};
pub use rule::{
    FeatureName, InvalidLabel, InvalidRules, Label, MAX_HTTP_TERMS, MAX_RULES, Origin, RuleId, Rules,
    Transport,
};
pub use service::{Own, Service, Services};
pub use special::{
    Barrier, Class, Edge, GUEST_API_PORT, InvalidOpening, MAX_OPENINGS, Openings, Surroundings,
};

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Most features that a request can name, and that a config can have.
pub const MAX_FEATURES: usize = 32;

/// What one sandbox asked for. Empty, the default, it asks for nothing.
///
/// It is stored and travels with the sandbox; the [`Operator`]'s side is put in front of it anew at each start, so that
/// a paused sandbox comes back under the ceiling of that day.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The rules, in their order.
    #[serde(default)]
    rules: Rules,
    /// Features whose rules follow those of `rules`.
    #[serde(default, deserialize_with = "bounded_features", skip_serializing_if = "BTreeSet::is_empty")]
    features: BTreeSet<FeatureName>,
}

impl Policy {
    /// A policy of these rules and no feature.
    #[must_use]
    pub const fn of(rules: Rules) -> Self {
        Self { rules, features: BTreeSet::new() }
    }
}

/// What the operator of a server lets any sandbox have. Empty, the default, it lets none have anything.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operator {
    /// The ceiling, apart from the features.
    #[serde(default)]
    ceiling: Rules,
    /// Private ranges that rules may speak of at all. Opening one allows nothing by itself.
    #[serde(default)]
    open_private: Openings,
    /// Features by name. What a feature allows is a part of the ceiling, behind the rules of `ceiling`.
    #[serde(default)]
    features: Features,
}

impl Operator {
    /// Puts its parts together.
    #[must_use]
    pub const fn new(ceiling: Rules, open_private: Openings, features: Features) -> Self {
        Self { ceiling, open_private, features }
    }

    /// The private ranges that were opened: for the barrier that stands behind the policy.
    #[must_use]
    pub const fn openings(&self) -> &Openings {
        &self.open_private
    }
}

/// Features by name, not more than [`MAX_FEATURES`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<FeatureName, Feature>")]
pub struct Features(BTreeMap<FeatureName, Feature>);

/// More features than there can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("features: at most {MAX_FEATURES}")]
pub struct TooManyFeatures;

impl TryFrom<BTreeMap<FeatureName, Feature>> for Features {
    type Error = TooManyFeatures;

    fn try_from(features: BTreeMap<FeatureName, Feature>) -> Result<Self, TooManyFeatures> {
        if features.len() > MAX_FEATURES { Err(TooManyFeatures) } else { Ok(Self(features)) }
    }
}

/// Hosts that belong together, allowed by one act. It only allows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedFeature")]
pub struct Feature {
    rules: Rules,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UncheckedFeature {
    rules: Rules,
}

impl TryFrom<UncheckedFeature> for Feature {
    type Error = InvalidRules;

    fn try_from(raw: UncheckedFeature) -> Result<Self, InvalidRules> {
        match raw.rules.first_denial() {
            Some(rule) => Err(InvalidRules::FeatureDenies(rule.clone())),
            None => Ok(Self { rules: raw.rules }),
        }
    }
}

fn bounded_features<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeSet<FeatureName>, D::Error> {
    let names = BTreeSet::<FeatureName>::deserialize(deserializer)?;
    if names.len() > MAX_FEATURES { Err(serde::de::Error::custom(TooManyFeatures)) } else { Ok(names) }
}

#[cfg(test)]
mod tests;
