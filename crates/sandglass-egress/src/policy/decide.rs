//! The decision: a pure function, and the only reader of a policy.

use std::net::{IpAddr, Ipv4Addr};

use sandglass_types::net::{AmbiguousPath, Cidr, Hostname, Method, Port, Ports, RequestPath};

use super::FeatureName;
use super::effective::{Effective, Layer};
use super::rule::{Action, Label, Origin, Rule, Target, Transport};
use super::service::{Own, Service};
use super::special::{Class, Edge, embedded, forbidden};

/// Ports of DNS, plain and over TLS. Names are asked for at the server, and nowhere else.
const DNS_PORTS: [u16; 2] = [53, 853];

/// Names that no resolver is asked for: they mean this machine or its neighbours, or are not for DNS at all (RFC 6761,
/// 6762, 7686). Each stands for itself and all below it.
const SPECIAL_NAMES: [&str; 5] = ["localhost", "local", "invalid", "onion", "arpa"];

/// What is asked about a policy.
#[derive(Debug, Clone, Copy)]
pub enum Question<'a> {
    /// May this be asked of a resolver? Yes, if a connection to the name may be allowed, on whatever port.
    Dns {
        /// The name in question.
        name: &'a Hostname,
        /// The type of the record.
        record: Record,
    },
    /// May the sandbox be told this address of a name that may be asked for?
    Answer {
        /// The name that was asked for.
        name: &'a Hostname,
        /// An address at the end of its chain.
        address: IpAddr,
    },
    /// Can a connection to this name be allowed, once it was resolved? What `explain` asks.
    Reach {
        /// The name.
        name: &'a Hostname,
        /// The port.
        port: Port,
    },
    /// May this connection, or this request on it, go on?
    Connect(Connection<'a>),
}

/// The type of a DNS record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// An IPv4 address.
    A,
    /// An IPv6 address: of an allowed name, there is none.
    Aaaa,
    /// How to reach a service, types HTTPS and SVCB.
    Service,
    /// Anything else, by number: it tells nobody where to connect, so it carries data.
    Other(u16),
}

/// A connection, and what was read of it.
#[derive(Debug, Clone, Copy)]
pub struct Connection<'a> {
    /// What carries it.
    pub transport: Transport,
    /// Where to.
    pub address: IpAddr,
    /// Where to.
    pub port: Port,
    /// Names that the sandbox resolved to that address, from its [`crate::bindings::Bindings`].
    pub bound: &'a [Hostname],
    /// What was read of it. On ports 80 and 443 a rule for a host matches only when this shows the host.
    pub seen: Seen<'a>,
}

/// What the server read of a connection.
#[derive(Debug, Clone, Copy)]
pub enum Seen<'a> {
    /// Nothing: not yet, not on this port, or not in a form that could be read.
    Nothing,
    /// A ClientHello of TLS.
    Tls {
        /// The name that it asks for.
        sni: Option<&'a Hostname>,
        /// It has an encrypted ClientHello: the name that counts may be another one.
        encrypted: bool,
    },
    /// The head of an HTTP request.
    Http {
        /// The host that it names, in Host, its target, or both.
        host: Host<'a>,
        /// The port that it names, 80 if none.
        port: Port,
        /// The method.
        method: &'a Method,
        /// The path.
        path: Result<&'a RequestPath, AmbiguousPath>,
    },
}

/// The host that an HTTP request names.
#[derive(Debug, Clone, Copy)]
pub enum Host<'a> {
    /// By name.
    Name(&'a Hostname),
    /// By address.
    Address(IpAddr),
}

/// The answer to a [`Question`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It may.
    Allow(Grant),
    /// It may not.
    Deny(Denial),
}

impl Verdict {
    /// Whether it may.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allow(_))
    }
}

/// Why something may leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// What allows it.
    pub by: By,
    /// The name that counted, in what its rules decided: the binding that a flow uses.
    pub name: Option<Hostname>,
    /// The server answers for that name itself, and sandboxes are told this address.
    pub own: Option<(Own, Ipv4Addr)>,
}

/// What allows something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum By {
    /// A rule of each side.
    Rules {
        /// The sandbox's.
        request: Label,
        /// The operator's.
        ceiling: Label,
    },
    /// The sandbox was granted this.
    Service(Service),
}

/// Why something may not leave, and what would let it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// Why not.
    pub cause: Cause,
    /// What would let it; empty if nothing would.
    pub remedy: String,
}

/// Why something may not leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// The address is one that no rule can allow.
    Address(Class),
    /// The name is one that no rule can allow.
    SpecialName,
    /// The record is one that no rule can allow.
    Record(u16),
    /// The port is for DNS.
    DnsPort,
    /// UDP is not carried.
    Udp,
    /// The server answers for names of its own domain over HTTP, and this is something else.
    Edge,
    /// The name is that of a sandbox's guest API, which is for clients alone.
    GuestApi,
    /// The name is that of something that this sandbox was not granted.
    NotGranted(Service),
    /// A rule denies it.
    Rule(Label),
    /// A rule denies some names or requests, and this may be one of them, for all that was seen.
    Unseen(Label),
    /// No rule allows it: not the sandbox's if `request`, else not the operator's.
    NoRule {
        /// Whose rules lack one.
        request: bool,
        /// What kept rules for hosts from matching, if something did.
        doubt: Option<Doubt>,
    },
}

/// Why a connection has no name that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Doubt {
    /// Nothing was read on a port where names are.
    NotSeen,
    /// TLS without a name.
    NoName,
    /// TLS with an encrypted ClientHello.
    Encrypted,
    /// The name that it shows was not resolved to this address.
    Unbound(Hostname),
    /// It names an address or port that it does not go to.
    Disagrees,
    /// No name was resolved to this address.
    NeverResolved,
}

/// What is known of the name of something.
#[derive(Debug)]
enum Name<'a> {
    /// This.
    Is(&'a Hostname),
    /// Any of these, of which one is looked at.
    Among { chosen: &'a Hostname, bound: &'a [Hostname] },
    /// No name was resolved to where it goes.
    None,
    /// Nothing that counts.
    Doubtful { claimed: Option<&'a Hostname>, bound: &'a [Hostname], doubt: Doubt },
}

/// What is known of the requests on a connection.
#[derive(Debug)]
enum Requests<'a> {
    /// The question is whether any would be allowed.
    Any,
    /// There may be any.
    Unseen,
    /// This one.
    One(&'a Method, Result<&'a RequestPath, AmbiguousPath>),
}

/// What rules are matched against, all but the port.
#[derive(Debug)]
struct Subject<'a> {
    name: Name<'a>,
    place: Place,
    requests: Requests<'a>,
}

/// Where something goes.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// The question comes before it is known.
    Unknown,
    /// To this address, in canonical form.
    Address(IpAddr),
    /// To the server itself, under this address. Ranges are about other places, so none allows it.
    Own(Own, Ipv4Addr),
}

/// How a rule fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Yes,
    No,
    /// It can't be told. An allow rule does not match then; a deny rule does.
    Unknown,
}

/// What one list of rules says.
enum Ruling<'a> {
    Allow(&'a Label),
    Deny(&'a Label, Fit),
    Nothing,
}

/// Decides.
///
/// What is always denied comes first: special addresses, names and ports. Then the sandbox's rules and the operator's
/// are asked, and both must allow it.
#[must_use]
pub fn decide(policy: &Effective, question: Question<'_>) -> Verdict {
    let result = match question {
        Question::Dns { name, record } => resolve(policy, name, record),
        Question::Answer { name, address } => tell(policy, name, address.to_canonical()),
        Question::Reach { name, port } => reach(policy, name, port),
        Question::Connect(connection) => connect(policy, &connection),
    };
    match result {
        Ok(grant) => Verdict::Allow(grant),
        Err(cause) => {
            let remedy = super::explain::remedy(policy, &question, &cause);
            Verdict::Deny(Denial { cause, remedy })
        }
    }
}

/// Whether the operator's rules alone would allow a connection to `name`, on a port of `ports`; and by which rule.
pub(super) fn ceiling_for<'a>(policy: &'a Effective, name: &Hostname, ports: &Ports) -> Option<&'a Label> {
    let subject = named(policy, name);
    let port = open_ports(&policy.ceiling, &subject).intersection(ports).first()?;
    match rule_on(&policy.ceiling, &subject, port) {
        Ruling::Allow(label) => Some(label),
        Ruling::Deny(..) | Ruling::Nothing => None,
    }
}

fn resolve(policy: &Effective, name: &Hostname, record: Record) -> Result<Grant, Cause> {
    refuse_name(policy, name)?;
    if let Record::Other(number) = record {
        return Err(Cause::Record(number));
    }
    let subject = named(policy, name);
    match subject.place {
        Place::Own(..) => on_port(policy, &subject, Port::HTTP),
        Place::Unknown | Place::Address(_) => on_some_port(policy, &subject),
    }
}

fn tell(policy: &Effective, name: &Hostname, address: IpAddr) -> Result<Grant, Cause> {
    refuse_name(policy, name)?;
    refuse_address(policy, address)?;
    let subject = named(policy, name);
    match subject.place {
        // There is nothing of it anywhere else.
        Place::Own(..) => Err(Cause::Edge),
        Place::Unknown | Place::Address(_) => {
            on_some_port(policy, &Subject { place: Place::Address(address), ..subject })
        }
    }
}

fn reach(policy: &Effective, name: &Hostname, port: Port) -> Result<Grant, Cause> {
    refuse_name(policy, name)?;
    refuse_port(port)?;
    let subject = named(policy, name);
    if matches!(subject.place, Place::Own(..)) && port != Port::HTTP {
        return Err(Cause::Edge);
    }
    on_port(policy, &subject, port)
}

/// A connection to where the server answers for names itself. What it shows must be one of those.
fn to_own(policy: &Effective, connection: &Connection<'_>) -> Result<Grant, Cause> {
    let Seen::Http { host: Host::Name(name), port: Port::HTTP, method, path } = connection.seen else {
        return Err(Cause::Edge);
    };
    let subject = named(policy, name);
    refuse_name(policy, name)?;
    if connection.port != Port::HTTP || !matches!(subject.place, Place::Own(..)) {
        return Err(Cause::Edge);
    }
    on_port(policy, &Subject { requests: Requests::One(method, path), ..subject }, Port::HTTP)
}

fn connect(policy: &Effective, connection: &Connection<'_>) -> Result<Grant, Cause> {
    let address = connection.address.to_canonical();
    let web = connection.transport == Transport::Tcp && [Port::HTTP, Port::HTTPS].contains(&connection.port);
    let edge = policy.surroundings.edge.as_ref().map(|edge| edge.address);
    let services = policy.services.as_ref().map(|services| services.address);
    if web && [edge, services].into_iter().flatten().any(|own| address == own) {
        return to_own(policy, connection);
    }
    refuse_address(policy, address)?;
    if connection.transport == Transport::Udp {
        return Err(Cause::Udp);
    }
    refuse_port(connection.port)?;
    let requests = match connection.seen {
        Seen::Http { method, path, .. } => Requests::One(method, path),
        Seen::Nothing | Seen::Tls { .. } => Requests::Unseen,
    };
    let mut subject = Subject { name: name_of(connection), place: Place::Address(address), requests };
    let mut result = on_port(policy, &subject, connection.port);
    // Where names are not shown, any that is bound may count; but both sides must allow one and the same.
    if let Name::Among { bound, .. } = subject.name {
        for chosen in bound.iter().skip(1) {
            if result.is_ok() {
                break;
            }
            subject.name = Name::Among { chosen, bound };
            result = on_port(policy, &subject, connection.port).or(result);
        }
    }
    result
}

fn named<'a>(policy: &Effective, name: &'a Hostname) -> Subject<'a> {
    let edge = policy.surroundings.edge.as_ref().filter(|edge| edge.answers(name));
    let place = match (granted(policy, name), edge) {
        (Some((service, address)), _) => Place::Own(Own::Service(service), address),
        (None, Some(edge)) => Place::Own(Own::Edge, edge.address),
        (None, None) => Place::Unknown,
    };
    Subject { name: Name::Is(name), place, requests: Requests::Any }
}

/// The service of that name, if the sandbox was granted it.
fn granted(policy: &Effective, name: &Hostname) -> Option<(Service, Ipv4Addr)> {
    let (service, services) = (Service::of(name)?, policy.services.as_ref()?);
    services.granted.contains(&service).then_some((service, services.address))
}

fn refuse_address(policy: &Effective, address: IpAddr) -> Result<(), Cause> {
    forbidden(address, &policy.openings, &policy.surroundings)
        .map_or(Ok(()), |class| Err(Cause::Address(class)))
}

fn refuse_port(port: Port) -> Result<(), Cause> {
    if DNS_PORTS.contains(&port.get()) { Err(Cause::DnsPort) } else { Ok(()) }
}

fn refuse_name(policy: &Effective, name: &Hostname) -> Result<(), Cause> {
    let top = name.as_str().rsplit('.').next().unwrap_or_default();
    if SPECIAL_NAMES.contains(&top) {
        return Err(Cause::SpecialName);
    }
    match Service::of(name) {
        Some(service) if granted(policy, name).is_none() => Err(Cause::NotGranted(service)),
        _ => Ok(()),
    }
}

/// The name of a connection that counts: what it shows, if the sandbox resolved that to where it goes.
fn name_of<'a>(connection: &Connection<'a>) -> Name<'a> {
    let bound = connection.bound;
    let doubtful = |claimed, doubt| Name::Doubtful { claimed, bound, doubt };
    let shown = |name: &'a Hostname| {
        if bound.contains(name) { Name::Is(name) } else { doubtful(Some(name), Doubt::Unbound(name.clone())) }
    };
    match (connection.port, connection.seen) {
        (Port::HTTPS, Seen::Tls { sni, encrypted: true }) => doubtful(sni, Doubt::Encrypted),
        (Port::HTTPS, Seen::Tls { sni: None, encrypted: false }) => doubtful(None, Doubt::NoName),
        (Port::HTTPS, Seen::Tls { sni: Some(name), encrypted: false }) => shown(name),
        (Port::HTTP, Seen::Http { host: Host::Name(name), port: Port::HTTP, .. }) => shown(name),
        (Port::HTTP, Seen::Http { host, .. }) => {
            let claimed = match host {
                Host::Name(name) => Some(name),
                Host::Address(_) => None,
            };
            doubtful(claimed, Doubt::Disagrees)
        }
        (Port::HTTP | Port::HTTPS, _) => doubtful(None, Doubt::NotSeen),
        (_, _) => bound.first().map_or(Name::None, |chosen| Name::Among { chosen, bound }),
    }
}

/// Both lists must allow the port, unless it is of something that was granted.
fn on_port(policy: &Effective, subject: &Subject<'_>, port: Port) -> Result<Grant, Cause> {
    match (subject.place, &subject.name) {
        (Place::Own(Own::Edge, _), Name::Is(name)) if Edge::is_guest_api(name) => {
            return Err(Cause::GuestApi);
        }
        (Place::Own(own @ Own::Service(service), address), Name::Is(name)) => {
            let (name, own) = (Some((*name).clone()), Some((own, address)));
            return Ok(Grant { by: By::Service(service), name, own });
        }
        _ => {}
    }
    let grant = |layer: &Layer, request| match rule_on(layer, subject, port) {
        Ruling::Allow(label) => Ok(label.clone()),
        Ruling::Deny(label, Fit::Unknown) => Err(Cause::Unseen(label.clone())),
        Ruling::Deny(label, _) => Err(Cause::Rule(label.clone())),
        Ruling::Nothing => Err(Cause::NoRule { request, doubt: doubt(layer, subject, port) }),
    };
    let (request, ceiling) = (grant(&policy.request, true)?, grant(&policy.ceiling, false)?);
    let name = match subject.name {
        Name::Is(name) | Name::Among { chosen: name, .. } => Some(name.clone()),
        Name::None | Name::Doubtful { .. } => None,
    };
    let own = match subject.place {
        Place::Own(own, address) => Some((own, address)),
        Place::Unknown | Place::Address(_) => None,
    };
    Ok(Grant { by: By::Rules { request, ceiling }, name, own })
}

/// Both lists must allow one and the same port.
fn on_some_port(policy: &Effective, subject: &Subject<'_>) -> Result<Grant, Cause> {
    let request = open_ports(&policy.request, subject);
    let ceiling = open_ports(&policy.ceiling, subject);
    // If there is none, any port shows why; the one that is asked for most shows it best.
    let port = request.intersection(&ceiling).first().or_else(|| request.first()).unwrap_or(Port::HTTPS);
    on_port(policy, subject, port)
}

/// The ports on which the first rule that matches allows it.
fn open_ports(layer: &Layer, subject: &Subject<'_>) -> Ports {
    let dns = DNS_PORTS.into_iter().filter_map(|port| Port::try_from(port).ok()).collect();
    let (mut open, mut undecided) = (Ports::default(), Ports::all().difference(&dns));
    for (_, rule) in &layer.rules {
        if undecided.is_empty() {
            break;
        }
        if rule.transport == Transport::Tcp && takes(rule, fit(rule, subject)) {
            if rule.action == Action::Allow {
                open = open.union(&undecided.intersection(&rule.ports));
            }
            undecided = undecided.difference(&rule.ports);
        }
    }
    open
}

fn rule_on<'a>(layer: &'a Layer, subject: &Subject<'_>, port: Port) -> Ruling<'a> {
    for (label, rule) in &layer.rules {
        if rule.transport == Transport::Tcp && rule.ports.contains(port) {
            let fit = fit(rule, subject);
            match rule.action {
                _ if !takes(rule, fit) => {}
                Action::Allow => return Ruling::Allow(label),
                Action::Deny => return Ruling::Deny(label, fit),
            }
        }
    }
    Ruling::Nothing
}

fn takes(rule: &Rule, fit: Fit) -> bool {
    fit == Fit::Yes || (fit == Fit::Unknown && rule.action == Action::Deny)
}

/// How a rule fits, its ports aside.
fn fit(rule: &Rule, subject: &Subject<'_>) -> Fit {
    match (fit_target(rule, subject), fit_requests(rule, subject)) {
        (Fit::No, _) | (_, Fit::No) => Fit::No,
        (Fit::Yes, Fit::Yes) => Fit::Yes,
        _ => Fit::Unknown,
    }
}

fn fit_target(rule: &Rule, subject: &Subject<'_>) -> Fit {
    let yes = |matches| if matches { Fit::Yes } else { Fit::No };
    match (&rule.target, subject.place) {
        // Before there is an address, a range says something only if it is everything.
        (Target::Net(range), Place::Unknown) => yes(*range == Cidr::ALL_V4),
        (Target::Net(range), Place::Own(..)) => yes(*range == Cidr::ALL_V4 && rule.action == Action::Deny),
        (Target::Net(range), Place::Address(address)) => {
            let hidden = rule.action == Action::Deny && embedded(address).any(|inner| range.contains(inner));
            yes(range.contains(address) || hidden)
        }
        (Target::Host(pattern), _) => match &subject.name {
            Name::Is(name) => yes(pattern.matches(name)),
            Name::None => Fit::Unknown,
            Name::Among { bound, .. } if rule.action == Action::Deny => {
                yes(bound.iter().any(|name| pattern.matches(name)))
            }
            Name::Among { chosen, .. } => yes(pattern.matches(chosen)),
            Name::Doubtful { claimed, bound, .. } => {
                let some = claimed.iter().copied().chain(bound.iter()).any(|name| pattern.matches(name));
                if some && rule.action == Action::Deny { Fit::Yes } else { Fit::Unknown }
            }
        },
    }
}

fn fit_requests(rule: &Rule, subject: &Subject<'_>) -> Fit {
    let Some(http) = &rule.http else { return Fit::Yes };
    match &subject.requests {
        Requests::Any if rule.action == Action::Allow => Fit::Yes,
        Requests::Any => Fit::No,
        Requests::Unseen => Fit::Unknown,
        Requests::One(method, path) => {
            if !http.methods.is_empty() && !http.methods.contains(method) {
                return Fit::No;
            }
            match path {
                _ if http.paths.is_empty() => Fit::Yes,
                Err(_ambiguous) => Fit::Unknown,
                Ok(path) => {
                    let covered = http.paths.iter().any(|prefix| match rule.action {
                        Action::Allow => prefix.covers(path),
                        Action::Deny => prefix.covers_in_any_case(path),
                    });
                    if covered { Fit::Yes } else { Fit::No }
                }
            }
        }
    }
}

/// What kept an allow rule for hosts of this port from matching.
fn doubt(layer: &Layer, subject: &Subject<'_>, port: Port) -> Option<Doubt> {
    let hosts = |rule: &Rule| {
        rule.action == Action::Allow
            && rule.transport == Transport::Tcp
            && rule.ports.contains(port)
            && matches!(rule.target, Target::Host(_))
            && fit_target(rule, subject) == Fit::Unknown
    };
    if !layer.rules.iter().any(|(_, rule)| hosts(rule)) {
        return None;
    }
    match &subject.name {
        Name::Is(_) | Name::Among { .. } => None,
        Name::None => Some(Doubt::NeverResolved),
        Name::Doubtful { doubt, .. } => Some(doubt.clone()),
    }
}

/// The feature whose rules hold `label`.
pub(super) const fn feature_of(label: &Label) -> Option<&FeatureName> {
    match &label.origin {
        Origin::Feature(name) => Some(name),
        Origin::Request | Origin::Ceiling => None,
    }
}
