//! What a person or a program is told about a verdict.

use std::fmt;

use sandglass_types::net::{Port, Ports};
use serde::Serialize;

use super::decide::{
    By, Cause, Connection, Denial, Doubt, Grant, Question, Verdict, ceiling_for, feature_of,
};
use super::effective::Effective;
use super::rule::Origin;
use super::service::Service;

impl Verdict {
    /// What decided, in one word: for receipts.
    #[must_use]
    pub fn rule(&self) -> String {
        match self {
            Self::Allow(grant) => grant.to_string(),
            Self::Deny(denial) => denial.cause.rule(),
        }
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.by {
            By::Rules { request, ceiling } => write!(f, "{request} within {ceiling}"),
            By::Service(service) => write!(f, "grant/{service}"),
        }
    }
}

impl Cause {
    /// What decided, in one word.
    fn rule(&self) -> String {
        match self {
            Self::Address(class) => format!("always/{class}"),
            Self::SpecialName => "always/special-name".to_owned(),
            Self::Record(_) => "always/record".to_owned(),
            Self::DnsPort => "always/dns-port".to_owned(),
            Self::Udp => "always/udp".to_owned(),
            Self::Edge => "always/edge".to_owned(),
            Self::GuestApi => "always/guest-api".to_owned(),
            Self::NotGranted(_) => "always/not-granted".to_owned(),
            Self::Rule(label) | Self::Unseen(label) => label.to_string(),
            Self::NoRule { request: true, .. } => "request/default".to_owned(),
            Self::NoRule { request: false, .. } => "ceiling/default".to_owned(),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(class) => write!(f, "the address is a {class} one, which no rule can allow"),
            Self::SpecialName => {
                f.write_str("the name is for this machine or its neighbours, or not for DNS")
            }
            Self::Record(number) => write!(f, "records of type {number} are not answered"),
            Self::DnsPort => {
                f.write_str("names are asked for at the sandbox's own resolver and nowhere else")
            }
            Self::Udp => f.write_str("UDP is not carried"),
            Self::Edge => f.write_str(
                "names that are the server's own are answered by the server itself, over HTTP on port 80 alone",
            ),
            Self::GuestApi => f.write_str("no sandbox reaches the guest API of one, whatever token it has"),
            Self::NotGranted(service) => {
                write!(f, "{} exists only in a sandbox that was granted {service}", service.name())
            }
            Self::Rule(label) => write!(f, "the rule {label} denies it"),
            Self::Unseen(label) => {
                write!(f, "the rule {label} denies some of it, and whether this is of that can't be seen")
            }
            Self::NoRule { request, doubt } => {
                let whose = if *request { "of the sandbox's policy" } else { "of the operator's ceiling" };
                write!(f, "no rule {whose} allows it")?;
                doubt.iter().try_for_each(|doubt| write!(f, ": {doubt}"))
            }
        }
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSeen => {
                f.write_str("it did not show which host it is for, in TLS on port 443 or HTTP on port 80")
            }
            Self::NoName => f.write_str("its TLS names no host"),
            Self::Encrypted => f.write_str("its TLS hides the host behind an encrypted ClientHello"),
            Self::Unbound(name) => {
                write!(f, "it names {name}, which this sandbox did not resolve to that address")
            }
            Self::Disagrees => {
                f.write_str("it names an address or a port instead of the host that it goes to")
            }
            Self::NeverResolved => f.write_str("this sandbox resolved no name to that address"),
        }
    }
}

/// The body of an HTTP answer, and of `explain`: the same words everywhere.
#[derive(Debug, Serialize)]
struct Body<'a> {
    error: &'static str,
    rule: String,
    reason: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    remedy: &'a str,
}

impl Serialize for Denial {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (rule, reason) = (self.cause.rule(), self.cause.to_string());
        Body { error: "egress_denied", rule, reason, remedy: &self.remedy }.serialize(serializer)
    }
}

/// What would let it through.
pub(super) fn remedy(policy: &Effective, question: &Question<'_>, cause: &Cause) -> String {
    match cause {
        Cause::Address(class) if class.can_be_opened() => {
            "the operator can open single private ranges with egress.open_private; rules must allow it as well"
                .to_owned()
        }
        Cause::Address(_) | Cause::SpecialName | Cause::Record(_) => String::new(),
        Cause::DnsPort => "use the resolver that /etc/resolv.conf names".to_owned(),
        Cause::Edge => "ask for the name with http://, on port 80".to_owned(),
        Cause::GuestApi => "reach a program inside by the name of its own port".to_owned(),
        Cause::NotGranted(Service::Models) => {
            "grant it with POST /v1/sandboxes/{id}/models, if this server has models".to_owned()
        }
        Cause::NotGranted(Service::Connections) => {
            "make the sandbox with `connections`, a list of those that it may use".to_owned()
        }
        Cause::Udp => "use TCP; of HTTP, that is version 1 or 2".to_owned(),
        Cause::Rule(label) | Cause::Unseen(label) => match label.origin {
            Origin::Request => format!("remove or narrow the rule {label}"),
            Origin::Ceiling | Origin::Feature(_) => format!("the operator can remove or narrow the rule {label}"),
        },
        Cause::NoRule { doubt: Some(doubt), .. } => for_doubt(doubt).to_owned(),
        Cause::NoRule { request: true, doubt: None } => for_request(policy, question),
        Cause::NoRule { request: false, doubt: None } => format!(
            "the operator can allow {} in egress.ceiling, or in a feature of the config",
            subject(question)
        ),
    }
}

const fn for_doubt(doubt: &Doubt) -> &'static str {
    match doubt {
        Doubt::NotSeen => {
            "speak TLS with SNI on port 443, HTTP/1.1 with Host on port 80, or allow the address by range"
        }
        Doubt::NoName => "connect by host name, so that TLS names it, or allow the address by range",
        Doubt::Encrypted => "turn Encrypted Client Hello off in the client, or allow the address by range",
        Doubt::Unbound(_) | Doubt::NeverResolved => {
            "resolve the name inside the sandbox before connecting, or allow the address by range"
        }
        Doubt::Disagrees => "name the host that the connection goes to, without a port",
    }
}

fn for_request(policy: &Effective, question: &Question<'_>) -> String {
    let subject = subject(question);
    let (name, ports) = match question {
        Question::Dns { name, .. } | Question::Answer { name, .. } => (*name, Ports::all()),
        Question::Reach { name, port } => (*name, Ports::from_iter([*port])),
        Question::Connect(_) => return format!("allow {subject} in the sandbox's policy"),
    };
    match ceiling_for(policy, name, &ports) {
        None => {
            format!("allow {subject} in the sandbox's policy; the operator's ceiling must allow it as well")
        }
        Some(label) => match feature_of(label) {
            Some(feature) => {
                format!("ask for the feature {feature}, or allow {subject} in the sandbox's policy")
            }
            None => format!("allow {subject} in the sandbox's policy"),
        },
    }
}

/// What a rule would have to speak of.
fn subject(question: &Question<'_>) -> String {
    let on = |port: &Port| format!("on port {port}");
    match question {
        Question::Dns { name, .. } | Question::Answer { name, .. } => format!("the host {name}"),
        Question::Reach { name, port } => format!("the host {name} {}", on(port)),
        Question::Connect(Connection { address, port, bound, .. }) => match bound {
            [] => format!("the address {address} {}", on(port)),
            [name, ..] => format!("the host {name} {}", on(port)),
        },
    }
}
