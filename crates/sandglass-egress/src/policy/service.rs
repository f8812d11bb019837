//! What the server does itself for single sandboxes, under names that exist nowhere else.

use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;

use sandglass_types::net::Hostname;

/// Something that the server does for sandboxes that were granted it. No rule speaks of it: the grant alone decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Service {
    /// Calls of models, which the server pays for.
    Models,
    /// Requests to services, with credentials that the server adds.
    Connections,
}

impl Service {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Models, Self::Connections];

    /// The name under which sandboxes reach it, over HTTP on port 80; each connection has one below that. `internal` is for names that no server on the internet
    /// has (ICANN, resolution 2024.07.29.06).
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Models => "models.internal",
            Self::Connections => "broker.internal",
        }
    }

    /// The one of that name. It is never asked for anywhere else, whether it was granted or not.
    #[must_use]
    pub fn of(name: &Hostname) -> Option<Self> {
        Self::ALL.into_iter().find(|service| match name.as_str().strip_suffix(service.name()) {
            Some(before) => before.is_empty() || *service == Self::Connections && before.ends_with('.'),
            None => false,
        })
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Models => "models",
            Self::Connections => "connections",
        })
    }
}

/// What a sandbox was granted, and where it finds that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Services {
    /// What sandboxes are told as the address of each name, for them to connect to on port 80.
    pub address: Ipv4Addr,
    /// What was granted.
    pub granted: BTreeSet<Service>,
}

/// What the server answers for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Own {
    /// Names of its own domain: ports of sandboxes.
    Edge,
    /// This.
    Service(Service),
}

#[cfg(test)]
mod tests {
    use sandglass_types::net::Port;

    use super::*;
    use crate::fixture::{host, policy};
    use crate::policy::{Cause, Question, Record, Verdict, decide};

    #[test]
    fn a_service_is_there_for_whoever_was_granted_it_and_nobody_else() {
        let name = host("models.internal");
        let address = Ipv4Addr::new(10, 11, 12, 1);
        // A rule for everything is none for this, on whatever side.
        let open = policy(r#"[{"allow":"*"},{"allow":"0.0.0.0/0","ports":["1-65535"]}]"#);
        let asked = |record| Question::Dns { name: &name, record };
        let reached = |port| Question::Reach { name: &name, port };
        for question in [asked(Record::A), asked(Record::Aaaa), reached(Port::HTTP), reached(Port::HTTPS)] {
            let Verdict::Deny(denial) = decide(&open, question) else { panic!("{question:?}") };
            assert_eq!(denial.cause, Cause::NotGranted(Service::Models));
        }
        let services = Services { address, granted: Service::ALL.into() };
        for granted in [open.clone().granting(services.clone()), policy("[]").granting(services.clone())] {
            let Verdict::Allow(grant) = decide(&granted, asked(Record::A)) else { panic!("{granted:?}") };
            assert_eq!(grant.own, Some((Own::Service(Service::Models), address)));
            assert_eq!(grant.to_string(), "grant/models");
            assert!(decide(&granted, reached(Port::HTTP)).is_allowed());
            assert!(!decide(&granted, reached(Port::HTTPS)).is_allowed());
            assert!(
                !decide(&granted, Question::Answer { name: &name, address: [93, 184, 216, 34].into() })
                    .is_allowed()
            );
        }
        let connection = host("github.broker.internal");
        let asked = |policy: &_| decide(policy, Question::Dns { name: &connection, record: Record::A });
        let Verdict::Deny(denial) = asked(&open) else { panic!("{open:?}") };
        assert_eq!(denial.cause, Cause::NotGranted(Service::Connections));
        assert_eq!(asked(&open.granting(services.clone())).rule(), "grant/connections");
        for (name, service) in [
            ("broker.internal", Some(Service::Connections)),
            ("a.b.broker.internal", Some(Service::Connections)),
            ("xbroker.internal", None),
            ("broker.internal.test", None),
            ("x.models.internal", None),
        ] {
            assert_eq!(Service::of(&host(name)), service, "{name}");
        }
        let asked = |record| Question::Dns { name: &name, record };
        // A grant of something else is none of this.
        let none = policy("[]").granting(Services { granted: BTreeSet::new(), ..services });
        assert!(!decide(&none, asked(Record::A)).is_allowed());
        assert!(
            decide(
                &policy(r#"[{"allow":"*"}]"#),
                Question::Dns { name: &host("x.models.internal"), record: Record::A }
            )
            .is_allowed()
        );
    }
}
