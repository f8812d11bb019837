//! Network namespaces and the packet filter: the rules of an airlock are applied in a fresh namespace.

use std::io;

use sandglass_egress::policy::Openings;
use sandglass_engine::network::{Filter, ruleset};
use sandglass_linux::namespace::Netns;
use sandglass_linux::nft::{self, NftError};
use sandglass_types::error::Chain;

use super::check::Check;
use crate::startup::Reason;

const NAMESPACES: &str = "network namespaces";
const FILTER: &str = "packet filter";

/// The checks that this makes.
pub(super) const NAMES: [&str; 2] = [NAMESPACES, FILTER];

/// What was found: whether a namespace can be made, and then whether rules take effect in it.
pub(super) type Facts = io::Result<Result<bool, NftError>>;

pub(super) fn look() -> Facts {
    let netns = Netns::create()?;
    Ok(nft::apply(&netns, &ruleset("eth0", &Filter::new(&Openings::default())))
        .and_then(|()| nft::list(&netns))
        .map(|rules| rules.contains("table inet sandglass") && rules.contains("policy drop")))
}

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let filter = match facts {
        Err(error) => return vec![Check::bad(NAMESPACES, Reason::NoNamespaces, error.to_string())],
        Ok(Ok(true)) => Check::good(FILTER, "the rules of a sandbox were applied"),
        Ok(Ok(false)) => {
            Check::bad(FILTER, Reason::NoPacketFilter, "rules were accepted, and are not in force")
        }
        Ok(Err(error)) => Check::bad(FILTER, Reason::NoPacketFilter, Chain(error).to_string()),
    };
    vec![Check::good(NAMESPACES, "one was made"), filter]
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::{Bad, Good};
    use super::*;

    #[test]
    fn every_outcome_has_its_words() {
        let verdicts = |facts: &Facts| judge(facts).iter().map(Check::verdict).collect::<Vec<_>>();
        assert_eq!(verdicts(&Ok(Ok(true))), [Good, Good]);
        assert_eq!(verdicts(&Ok(Ok(false))), [Good, Bad]);
        assert_eq!(verdicts(&Ok(Err(NftError::NotInstalled))), [Good, Bad]);
        assert_eq!(verdicts(&Err(io::ErrorKind::PermissionDenied.into())), [Bad]);
        let failure = judge(&Ok(Err(NftError::NotInstalled))).remove(1).into_failure().unwrap();
        assert_eq!(failure.reason(), Reason::NoPacketFilter);
        assert!(failure.to_string().contains("apt install nftables"), "{failure}");
    }

    #[test]
    fn the_rules_are_not_applied_to_the_machine() {
        assert_eq!(judge(&look()).iter().map(Check::verdict).collect::<Vec<_>>(), [Good, Good]);
        let ours = nft::list(&Netns::current().unwrap()).unwrap();
        assert!(!ours.contains("table inet sandglass"), "{ours}");
    }
}
