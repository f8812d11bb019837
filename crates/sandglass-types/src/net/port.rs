//! Ports and sets of them.

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use serde::de::{self, SeqAccess, Visitor};
use serde::ser::SerializeSeq as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Most numbers and ranges that one list of ports may have.
pub const MAX_PORT_RANGES: usize = 16;

/// A port, never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct Port(NonZeroU16);

/// What is not a port, or not a list of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPort {
    /// Zero, too large, or not a number.
    #[error("a port is a number from 1 to 65535")]
    Number,
    /// A range that ends before it begins.
    #[error("a range of ports is written \"8000-8999\", the smaller number first")]
    Range,
    /// None or too many.
    #[error("a list of ports has between 1 and {MAX_PORT_RANGES} entries")]
    Count,
}

impl Port {
    /// HTTP, where the server reads each request's head.
    pub const HTTP: Self = Self(NonZeroU16::new(80).expect("not zero"));
    /// HTTPS, where the server reads the name that TLS asks for.
    pub const HTTPS: Self = Self(NonZeroU16::new(443).expect("not zero"));

    /// The number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0.get()
    }
}

impl TryFrom<u16> for Port {
    type Error = InvalidPort;

    fn try_from(number: u16) -> Result<Self, InvalidPort> {
        NonZeroU16::new(number).map(Self).ok_or(InvalidPort::Number)
    }
}

impl From<NonZeroU16> for Port {
    fn from(number: NonZeroU16) -> Self {
        Self(number)
    }
}

impl From<Port> for u16 {
    fn from(port: Port) -> Self {
        port.get()
    }
}

impl FromStr for Port {
    type Err = InvalidPort;

    /// Decimal digits without a sign and without leading zeros.
    fn from_str(text: &str) -> Result<Self, InvalidPort> {
        if text.starts_with('0') || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(InvalidPort::Number);
        }
        text.parse::<u16>().map_err(|_| InvalidPort::Number)?.try_into()
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A set of ports. As data it is a list of numbers and `"first-last"`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Ports {
    /// Sorted, apart from each other by at least one port, each with its first and last.
    ranges: Vec<(u16, u16)>,
}

impl Ports {
    /// Every port.
    #[must_use]
    pub fn all() -> Self {
        Self { ranges: vec![(1, u16::MAX)] }
    }

    /// Whether no port is in it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether `port` is in it.
    #[must_use]
    pub fn contains(&self, port: Port) -> bool {
        self.ranges.iter().any(|(first, last)| (*first..=*last).contains(&port.get()))
    }

    /// The lowest port in it.
    #[must_use]
    pub fn first(&self) -> Option<Port> {
        self.ranges.first().and_then(|(first, _)| Port::try_from(*first).ok())
    }

    /// The ports in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self::merge(self.ranges.iter().chain(&other.ranges).copied().collect())
    }

    /// The ports in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let (mut ranges, mut a, mut b) =
            (Vec::new(), self.ranges.iter().peekable(), other.ranges.iter().peekable());
        while let (Some(&&(a1, a2)), Some(&&(b1, b2))) = (a.peek(), b.peek()) {
            if a1.max(b1) <= a2.min(b2) {
                ranges.push((a1.max(b1), a2.min(b2)));
            }
            if a2 <= b2 {
                a.next()
            } else {
                b.next()
            };
        }
        Self { ranges }
    }

    /// The ports that are in this set and not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut gaps = Vec::new();
        let mut next = Some(1);
        for (first, last) in &other.ranges {
            match next {
                Some(start) if start < *first => gaps.push((start, first - 1)),
                _ => {}
            }
            next = last.checked_add(1);
        }
        gaps.extend(next.map(|start| (start, u16::MAX)));
        self.intersection(&Self { ranges: gaps })
    }

    fn merge(mut ranges: Vec<(u16, u16)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u16, u16)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match merged.last_mut() {
                Some(previous) if first <= previous.1.saturating_add(1) => previous.1 = previous.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        Self { ranges: merged }
    }
}

impl FromIterator<Port> for Ports {
    fn from_iter<I: IntoIterator<Item = Port>>(ports: I) -> Self {
        Self::merge(ports.into_iter().map(|port| (port.get(), port.get())).collect())
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            if first == last { write!(f, "{comma}{first}")? } else { write!(f, "{comma}{first}-{last}")? }
        }
        Ok(())
    }
}

impl Serialize for Ports {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.ranges.len()))?;
        for (first, last) in &self.ranges {
            if first == last {
                list.serialize_element(first)?;
            } else {
                list.serialize_element(&format!("{first}-{last}"))?;
            }
        }
        list.end()
    }
}

/// One entry of a list of ports.
struct Entry(u16, u16);

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntryVisitor;
        impl Visitor<'_> for EntryVisitor {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port or \"first-last\"")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Entry, E> {
                let port = u16::try_from(number).map_err(|_| InvalidPort::Number).and_then(Port::try_from);
                port.map(|port| Entry(port.get(), port.get())).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Entry, E> {
                self.visit_u64(u64::try_from(number).map_err(|_| E::custom(InvalidPort::Number))?)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Entry, E> {
                let (first, last) = text.split_once('-').unwrap_or((text, text));
                let port = |text: &str| text.parse::<Port>().map(Port::get).map_err(E::custom);
                let (first, last) = (port(first)?, port(last)?);
                if first <= last { Ok(Entry(first, last)) } else { Err(E::custom(InvalidPort::Range)) }
            }
        }
        deserializer.deserialize_any(EntryVisitor)
    }
}

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor;
        impl<'de> Visitor<'de> for ListVisitor {
            type Value = Ports;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of ports")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Ports, A::Error> {
                let mut ranges = Vec::new();
                while let Some(Entry(first, last)) = list.next_element()? {
                    if ranges.len() == MAX_PORT_RANGES {
                        return Err(de::Error::custom(InvalidPort::Count));
                    }
                    ranges.push((first, last));
                }
                if ranges.is_empty() {
                    return Err(de::Error::custom(InvalidPort::Count));
                }
                Ok(Ports::merge(ranges))
            }
        }
        deserializer.deserialize_seq(ListVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ports(ranges: Vec<(u16, u16)>) -> Ports {
        Ports::merge(ranges.into_iter().map(|(a, b)| (a.min(b).max(1), a.max(b).max(1))).collect())
    }

    #[test]
    fn lists_are_read_and_bounded() {
        let read = |text: &str| serde_json::from_str::<Ports>(text);
        let set = read(r#"[443, "8000-8002", "80", 8003]"#).unwrap();
        assert_eq!(set.to_string(), "80, 443, 8000-8003");
        assert_eq!(serde_json::to_string(&set).unwrap(), r#"[80,443,"8000-8003"]"#);
        for text in [
            "[]",
            "[0]",
            "[65536]",
            "[-1]",
            r#"["0080"]"#,
            r#"["9-8"]"#,
            r#"["1-"]"#,
            r#"["+1"]"#,
            "[1.5]",
            "80",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        assert!(read(&format!("{:?}", (1..=MAX_PORT_RANGES).collect::<Vec<_>>())).is_ok());
        assert!(read(&format!("{:?}", (1..=MAX_PORT_RANGES + 1).collect::<Vec<_>>())).is_err());
    }

    proptest! {
        #[test]
        fn sets_are_sets(a in proptest::collection::vec(any::<(u16, u16)>(), 0..6),
                         b in proptest::collection::vec(any::<(u16, u16)>(), 0..6), near in any::<u16>()) {
            let (a, b) = (ports(a), ports(b));
            let edges = a.ranges.iter().chain(&b.ranges).flat_map(|(x, y)| [x.wrapping_sub(1), *x, *y, y.wrapping_add(1)]);
            for port in edges.chain([near, 1, u16::MAX]).filter_map(|port| Port::try_from(port).ok()) {
                let (in_a, in_b) = (a.contains(port), b.contains(port));
                prop_assert_eq!(a.union(&b).contains(port), in_a || in_b);
                prop_assert_eq!(a.intersection(&b).contains(port), in_a && in_b);
                prop_assert_eq!(a.difference(&b).contains(port), in_a && !in_b);
                prop_assert!(Ports::all().contains(port));
            }
            prop_assert_eq!(a.union(&b), b.union(&a));
            prop_assert!(a.difference(&a).is_empty());
        }
    }
}
