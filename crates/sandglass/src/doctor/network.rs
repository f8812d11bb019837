//! Network namespaces and the packet filter: the rules of an airlock are applied in a fresh namespace.

use std::io;

use sandglass_egress::policy::Openings;
use sandglass_engine::network::{Filter, NetworkError, ruleset, try_log};
use sandglass_linux::namespace::Netns;
use sandglass_linux::nft::{self, NftError};
use sandglass_types::error::Chain;

use super::check::Check;
use crate::startup::Reason;

const NAMESPACES: &str = "network namespaces";
const FILTER: &str = "packet filter";
const LOG: &str = "packet filter log";

/// The checks that this makes.
pub(super) const NAMES: [&str; 3] = [NAMESPACES, FILTER, LOG];

/// What was found: whether a namespace can be made, and then what of rules in it.
pub(super) type Facts = io::Result<Rules>;

/// Whether rules take effect, and whether what they hold up is logged.
#[derive(Debug)]
pub(super) struct Rules {
    in_force: Result<bool, NftError>,
    log: Result<(), NetworkError>,
}

pub(super) fn look() -> Facts {
    let netns = Netns::create()?;
    let filter = Filter { log: false, ..Filter::new(&Openings::default()) };
    let in_force = nft::apply(&netns, &ruleset("eth0", &filter))
        .and_then(|()| nft::list(&netns))
        .map(|rules| rules.contains("table inet sandglass") && rules.contains("policy drop"));
    Ok(Rules { in_force, log: try_log() })
}

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let Rules { in_force, log } = match facts {
        Err(error) => return vec![Check::bad(NAMESPACES, Reason::NoNamespaces, error.to_string())],
        Ok(rules) => rules,
    };
    let mut checks = vec![Check::good(NAMESPACES, "one was made")];
    checks.push(match in_force {
        Ok(true) => Check::good(FILTER, "the rules of a sandbox were applied"),
        Ok(false) => Check::bad(FILTER, Reason::NoPacketFilter, "rules were accepted, and are not in force"),
        Err(error) => Check::bad(FILTER, Reason::NoPacketFilter, Chain(error).to_string()),
    });
    if let Ok(true) = in_force {
        checks.push(match log {
            Ok(()) => Check::good(LOG, "what the rules hold up can be written down"),
            Err(error) => {
                Check::note(LOG, format!("what the rules hold up gets no receipt: {}", Chain(error)))
                    .with_remedy("`modprobe nfnetlink_log nft_log`, and have it done at boot")
            }
        });
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::{Bad, Good, Note};
    use super::*;

    #[test]
    fn every_outcome_has_its_words() {
        let verdicts = |facts: &Facts| judge(facts).iter().map(Check::verdict).collect::<Vec<_>>();
        let rules = |in_force, log| Ok(Rules { in_force, log });
        assert_eq!(verdicts(&rules(Ok(true), Ok(()))), [Good, Good, Good]);
        assert_eq!(verdicts(&rules(Ok(true), Err(NetworkError::Name))), [Good, Good, Note]);
        assert_eq!(verdicts(&rules(Ok(false), Ok(()))), [Good, Bad]);
        let missing = || rules(Err(NftError::NotInstalled), Err(NftError::NotInstalled.into()));
        assert_eq!(verdicts(&missing()), [Good, Bad]);
        assert_eq!(verdicts(&Err(io::ErrorKind::PermissionDenied.into())), [Bad]);
        let failure = judge(&missing()).remove(1).into_failure().unwrap();
        assert_eq!(failure.reason(), Reason::NoPacketFilter);
        assert!(failure.to_string().contains("apt install nftables"), "{failure}");
    }

    #[test]
    fn the_rules_are_not_applied_to_the_machine() {
        assert_eq!(judge(&look()).iter().map(Check::verdict).collect::<Vec<_>>(), [Good; 3]);
        let ours = nft::list(&Netns::current().unwrap()).unwrap();
        assert!(!ours.contains("table inet sandglass"), "{ours}");
    }
}
