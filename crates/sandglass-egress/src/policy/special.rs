//! Addresses that no rule can allow, and the few that an operator can open.
//!
//! Ranges: the IANA registries of special-purpose addresses (RFC 6890 and its updates). Metadata endpoints: the
//! documentation of the clouds named beside each.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sandglass_types::net::{Cidr, Hostname};
use serde::{Deserialize, Serialize};

/// Most private ranges that an operator can open.
pub const MAX_OPENINGS: usize = 64;

/// Why an address is never reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// A metadata endpoint of a cloud: it hands out the machine's credentials.
    Metadata,
    /// The machine itself.
    Loopback,
    /// "This host on this network", 0.0.0.0/8 and `::`: for Linux, the machine itself.
    Unspecified,
    /// The link that the machine is on.
    LinkLocal,
    /// A private network.
    Private,
    /// Shared between a provider and its customers (100.64.0.0/10).
    Shared,
    /// For documentation.
    Documentation,
    /// For benchmarks.
    Benchmark,
    /// Many receivers.
    Multicast,
    /// All receivers.
    Broadcast,
    /// Not in use, or with a meaning of its own.
    Reserved,
    /// An address of the server.
    Server,
    /// An address of a sandbox.
    Sandbox,
}

impl Class {
    /// Whether an operator can open single ranges of it.
    pub(super) const fn can_be_opened(self) -> bool {
        matches!(self, Self::Private | Self::Shared | Self::Documentation | Self::Benchmark)
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Metadata => "metadata",
            Self::Loopback => "loopback",
            Self::Unspecified => "unspecified",
            Self::LinkLocal => "link-local",
            Self::Private => "private",
            Self::Shared => "shared",
            Self::Documentation => "documentation",
            Self::Benchmark => "benchmark",
            Self::Multicast => "multicast",
            Self::Broadcast => "broadcast",
            Self::Reserved => "reserved",
            Self::Server => "server",
            Self::Sandbox => "sandbox",
        })
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, length: u8) -> Cidr {
    Cidr::v4(Ipv4Addr::new(a, b, c, d), length)
}

const fn v6(segments: [u16; 8], length: u8) -> Cidr {
    let [a, b, c, d, e, f, g, h] = segments;
    Cidr::v6(Ipv6Addr::new(a, b, c, d, e, f, g, h), length)
}

/// The special ranges; the first that holds an address says what it is.
const SPECIAL: [(Cidr, Class); 42] = [
    // Before the wider ranges that hold some of them, so that no opening of those reaches them.
    (v4(169, 254, 169, 254, 32), Class::Metadata), // most clouds
    (v4(169, 254, 170, 2, 32), Class::Metadata),   // AWS: credentials of containers
    (v4(100, 100, 100, 200, 32), Class::Metadata), // Alibaba
    (v4(168, 63, 129, 16, 32), Class::Metadata),   // Azure
    (v4(192, 0, 0, 192, 32), Class::Metadata),     // Oracle
    (v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0], 32), Class::Metadata), // AWS
    (v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128), Class::Metadata), // Google
    (v6([0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42], 128), Class::Metadata), // Scaleway
    (v6([0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe], 128), Class::Metadata), // Oracle
    (v4(0, 0, 0, 0, 8), Class::Unspecified),
    (v4(10, 0, 0, 0, 8), Class::Private),
    (v4(100, 64, 0, 0, 10), Class::Shared),
    (v4(127, 0, 0, 0, 8), Class::Loopback),
    (v4(169, 254, 0, 0, 16), Class::LinkLocal),
    (v4(172, 16, 0, 0, 12), Class::Private),
    (v4(192, 0, 0, 0, 24), Class::Reserved),
    (v4(192, 0, 2, 0, 24), Class::Documentation),
    (v4(192, 31, 196, 0, 24), Class::Reserved),
    (v4(192, 52, 193, 0, 24), Class::Reserved),
    (v4(192, 88, 99, 0, 24), Class::Reserved),
    (v4(192, 168, 0, 0, 16), Class::Private),
    (v4(192, 175, 48, 0, 24), Class::Reserved),
    (v4(198, 18, 0, 0, 15), Class::Benchmark),
    (v4(198, 51, 100, 0, 24), Class::Documentation),
    (v4(203, 0, 113, 0, 24), Class::Documentation),
    (v4(224, 0, 0, 0, 4), Class::Multicast),
    (v4(255, 255, 255, 255, 32), Class::Broadcast),
    (v4(240, 0, 0, 0, 4), Class::Reserved),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 128), Class::Unspecified),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), Class::Loopback),
    (v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), Class::Reserved),
    (v6([0x100, 0, 0, 0, 0, 0, 0, 0], 64), Class::Reserved),
    (v6([0x2001, 2, 0, 0, 0, 0, 0, 0], 48), Class::Benchmark),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), Class::Documentation),
    // What is left of the IETF's protocol assignments behind Teredo (2001::/32), which is judged by what it embeds.
    (v6([0x2001, 0x10, 0, 0, 0, 0, 0, 0], 28), Class::Reserved),
    (v6([0x2001, 0x20, 0, 0, 0, 0, 0, 0], 28), Class::Reserved),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), Class::Documentation),
    (v6([0x5f00, 0, 0, 0, 0, 0, 0, 0], 16), Class::Reserved),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), Class::Private),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), Class::LinkLocal),
    (v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10), Class::Reserved),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), Class::Multicast),
];

/// What IANA gives out as global unicast addresses.
const GLOBAL_V6: Cidr = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

/// The well-known prefix of NAT64 (RFC 6052).
const NAT64: Cidr = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);

fn classify(address: IpAddr) -> Option<Class> {
    let special = SPECIAL.iter().find(|(range, _)| range.contains(address)).map(|(_, class)| *class);
    special.or_else(|| {
        // IPv4-compatible and IPv4-translated addresses end here, among all else that no network routes.
        let routed = address.is_ipv4() || GLOBAL_V6.contains(address) || NAT64.contains(address);
        (!routed).then_some(Class::Reserved)
    })
}

/// IPv4 addresses that a network may read out of one of IPv6: NAT64, 6to4 (RFC 3056), both of Teredo's (RFC 4380) and
/// ISATAP's (RFC 5214). An IPv4-mapped one is not among them: it is that IPv4 address.
pub(super) fn embedded(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let found = match address {
        IpAddr::V4(_) => [None; 3],
        IpAddr::V6(v6) => {
            let octets = v6.octets();
            let at = |start: usize| octets.get(start..).and_then(|rest| rest.first_chunk::<4>()).copied();
            let by_interface = matches!(v6.segments(), [.., 0 | 0x200, 0x5efe, _, _]);
            let isatap = by_interface.then(|| at(12)).flatten();
            match v6.segments() {
                _ if NAT64.contains(address) => [at(12), None, None],
                [0x2002, ..] => [at(2), isatap, None],
                [0x2001, 0, ..] => [at(4), at(12).map(|client| client.map(|byte| !byte)), isatap],
                _ => [isatap, None, None],
            }
        }
    };
    found.into_iter().flatten().map(|octets| IpAddr::V4(octets.into()))
}

/// Addresses that are near a sandbox for reasons that no table knows. None of them can be opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Surroundings {
    /// Every address of the machine that the server runs on.
    pub server: Vec<Cidr>,
    /// Where sandboxes are.
    pub sandboxes: Vec<Cidr>,
    /// Where names of the server's own domain are answered, if it has one.
    pub edge: Option<Edge>,
}

/// What is below the server's own domain, ports of sandboxes by their names: no address leads there, but the server answers
/// itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edge {
    /// The domain.
    pub domain: Hostname,
    /// What sandboxes are told as the address of each name below it, for them to connect to on port 80.
    pub address: Ipv4Addr,
}

/// The port on which every sandbox's guest API seems to listen.
pub const GUEST_API_PORT: u16 = 49983;

impl Edge {
    /// Whether it is the name of a sandbox's guest API. Where that wants no token, whoever reaches it is root in there.
    pub(super) fn is_guest_api(name: &Hostname) -> bool {
        let port = name.as_str().split(['-', '.']).next();
        port.is_some_and(|port| port.parse() == Ok(GUEST_API_PORT))
    }

    /// Whether it answers for a name.
    pub(super) fn answers(&self, name: &Hostname) -> bool {
        name.is_below(&self.domain)
    }
}

/// Private ranges that the operator opened.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<Cidr>", into = "Vec<Cidr>")]
pub struct Openings(Vec<Cidr>);

/// A list of openings that can't be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidOpening {
    /// Too many.
    #[error("at most {MAX_OPENINGS} private ranges can be opened, not {0}")]
    Count(usize),
    /// The range is not within one that can be opened.
    #[error(
        "{0} can't be opened: only ranges within private (10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, fc00::/7), shared \
         (100.64.0.0/10), documentation and benchmark ranges can"
    )]
    Range(Cidr),
}

impl TryFrom<Vec<Cidr>> for Openings {
    type Error = InvalidOpening;

    fn try_from(ranges: Vec<Cidr>) -> Result<Self, InvalidOpening> {
        if ranges.len() > MAX_OPENINGS {
            return Err(InvalidOpening::Count(ranges.len()));
        }
        let openable = |range: &Cidr| {
            SPECIAL.iter().any(|(special, class)| class.can_be_opened() && special.covers(range))
                && !SPECIAL.iter().any(|(special, class)| !class.can_be_opened() && special.covers(range))
        };
        match ranges.iter().find(|range| !openable(range)) {
            Some(range) => Err(InvalidOpening::Range(*range)),
            None => Ok(Self(ranges)),
        }
    }
}

impl From<Openings> for Vec<Cidr> {
    fn from(openings: Openings) -> Self {
        openings.0
    }
}

/// The ranges of IPv4 that are held up whatever rules say, for a packet filter: a second barrier behind
/// [`decide`](super::decide).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Barrier {
    /// Nothing passes.
    pub never: Vec<Cidr>,
    /// Nothing passes but what is for [`Self::opened`].
    pub closed: Vec<Cidr>,
    /// What the operator opened.
    pub opened: Vec<Cidr>,
}

impl Openings {
    /// The barrier with these openings in it. No range of a list covers another one of that list.
    #[must_use]
    pub fn barrier(&self) -> Barrier {
        let special = |can_be_opened: bool| {
            let of_kind = SPECIAL.iter().filter(move |(_, class)| class.can_be_opened() == can_be_opened);
            outermost(of_kind.map(|(range, _)| *range))
        };
        Barrier { never: special(false), closed: special(true), opened: outermost(self.0.iter().copied()) }
    }
}

/// The ranges of IPv4 that no other one covers, in order.
fn outermost(ranges: impl Iterator<Item = Cidr>) -> Vec<Cidr> {
    let ranges: BTreeSet<Cidr> = ranges.filter(|range| !range.is_v6()).collect();
    let covered = |range: &Cidr| ranges.iter().any(|other| other != range && other.covers(range));
    ranges.iter().filter(|range| !covered(range)).copied().collect()
}

/// Why `address`, in canonical form, is never reached, whatever rules say.
///
/// An opening holds for the address itself only: a private address inside an IPv6 one is a detour that nobody opened.
pub(super) fn forbidden(address: IpAddr, openings: &Openings, around: &Surroundings) -> Option<Class> {
    let within = |ranges: &[Cidr], address| ranges.iter().any(|range| range.contains(address));
    let judge = |address: IpAddr, opened: bool| {
        if within(&around.server, address) {
            return Some(Class::Server);
        }
        if within(&around.sandboxes, address) {
            return Some(Class::Sandbox);
        }
        classify(address).filter(|class| !(opened && class.can_be_opened()))
    };
    judge(address, within(&openings.0, address))
        .or_else(|| embedded(address).find_map(|address| judge(address, false)))
}

/// Whether every address of `range` is one that no rule can allow.
pub(super) fn never(range: &Cidr, openings: &Openings) -> bool {
    SPECIAL.iter().any(|(special, class)| {
        special.covers(range)
            && !(class.can_be_opened()
                && openings.0.iter().any(|open| open.covers(range) || range.covers(open)))
    })
}

#[cfg(test)]
mod tests;
