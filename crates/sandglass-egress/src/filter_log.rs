//! What the packet filter of an airlock held up by itself, as the kernel logs it: datagrams of netlink messages, with the
//! first bytes of one packet in each (`linux/netfilter/nfnetlink_log.h`).
//!
//! Those bytes are the guest's. They are read without a copy, and what is no TCP or UDP over IPv4 is passed over.

mod flows;
mod serve;

use std::net::Ipv4Addr;

use flows::{Flows, READS, RECEIPTS};
pub(crate) use serve::serve;

use crate::policy::Transport;

/// The group to which the rules of an airlock log.
pub const GROUP: u16 = 1;

/// How much of each packet they log, in bytes: the longest head of IPv4, and that of TCP without options.
pub const SNAPLEN: u32 = 80;

/// Longest datagram, in bytes: what the kernel puts together is below a page.
pub(crate) const MAX_DATAGRAM: usize = 8 << 10;

/// Why a rule holds something up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// No policy could allow it: what [`crate::policy::decide`] says too.
    Never,
    /// The guest has as many connections as it may have.
    Connections,
    /// Its source is not the guest's address.
    Source,
}

impl Why {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Never, Self::Connections, Self::Source];

    /// What the rule puts before what it logs.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Connections => "connections",
            Self::Source => "source",
        }
    }
}

/// One packet that was logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its number. They have no gaps but for those that did not arrive.
    pub(crate) number: u32,
    /// What it was, if that is of interest.
    pub(crate) packet: Option<Packet>,
}

/// The head of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Packet {
    pub(crate) why: Why,
    pub(crate) transport: Transport,
    /// The port that it comes from.
    from: u16,
    pub(crate) to: Ipv4Addr,
    pub(crate) port: u16,
    /// The first sequence number of a connection that it opens: the same when it is sent again, and another one for the
    /// next connection between the same ports.
    opens: Option<u32>,
}

/// `NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_PACKET`.
const LOGGED: u16 = 4 << 8;

const NETLINK_HEADER: usize = 16;
/// `struct nfgenmsg`.
const FIXED: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;

/// `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`, in the kind of an attribute.
const FLAGS: u16 = 0xc000;

const NFULA_PAYLOAD: u16 = 9;
const NFULA_PREFIX: u16 = 10;
const NFULA_SEQ: u16 = 12;

/// The packets of a datagram, up to the first message that does not fit in it.
pub(crate) fn entries(mut rest: &[u8]) -> impl Iterator<Item = Entry> {
    std::iter::from_fn(move || {
        loop {
            let length = usize::try_from(u32::from_ne_bytes(at(rest, 0)?)).ok()?;
            let (kind, body) = (u16::from_ne_bytes(at(rest, 4)?), rest.get(NETLINK_HEADER..length)?);
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            if kind == LOGGED
                && let Some(entry) = body.get(FIXED..).and_then(entry)
            {
                return Some(entry);
            }
        }
    })
}

fn entry(mut attributes: &[u8]) -> Option<Entry> {
    let (mut number, mut why, mut bytes) = (None, None, None);
    while let Some((kind, value, rest)) = attribute(attributes) {
        attributes = rest;
        match kind {
            NFULA_SEQ => number = at(value, 0).map(u32::from_be_bytes),
            NFULA_PREFIX => {
                let prefix = value.strip_suffix(b"\0").unwrap_or(value);
                why = Why::ALL.into_iter().find(|why| why.prefix().as_bytes() == prefix);
            }
            NFULA_PAYLOAD => bytes = Some(value),
            _ => {}
        }
    }
    let packet = why.zip(bytes).and_then(|(why, bytes)| packet(why, bytes));
    Some(Entry { number: number?, packet })
}

/// Kind and value of the first attribute, and what follows it.
fn attribute(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = usize::from(u16::from_ne_bytes(at(bytes, 0)?));
    let kind = u16::from_ne_bytes(at(bytes, 2)?) & !FLAGS;
    let value = bytes.get(ATTRIBUTE_HEADER..length)?;
    Some((kind, value, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Reads the head of a packet (RFC 791, RFC 9293, RFC 768).
fn packet(why: Why, bytes: &[u8]) -> Option<Packet> {
    const SYN: u8 = 0x02;
    const ACK: u8 = 0x10;
    let [first] = at(bytes, 0)?;
    let [protocol] = at(bytes, 9)?;
    let offset = u16::from_be_bytes(at(bytes, 6)?) & 0x1fff;
    let head = usize::from(first & 0x0f) * 4;
    // In a later fragment stands no head of what it carries.
    if first >> 4 != 4 || head < 20 || offset != 0 {
        return None;
    }
    let inner = bytes.get(head..)?;
    let (transport, opens) = match protocol {
        6 => {
            let [flags] = at(inner, 13)?;
            let number = u32::from_be_bytes(at(inner, 4)?);
            (Transport::Tcp, (flags & (SYN | ACK) == SYN).then_some(number))
        }
        17 => (Transport::Udp, None),
        _ => return None,
    };
    let (from, port) = (u16::from_be_bytes(at(inner, 0)?), u16::from_be_bytes(at(inner, 2)?));
    Some(Packet { why, transport, from, to: Ipv4Addr::from(at(bytes, 16)?), port, opens })
}

/// So many bytes at a place, if they are there.
fn at<const N: usize>(bytes: &[u8], start: usize) -> Option<[u8; N]> {
    bytes.get(start..)?.first_chunk().copied()
}

/// What holds for any datagram.
#[cfg(any(test, fuzzing))]
pub(crate) fn check_datagram(bytes: &[u8]) {
    let read: Vec<_> = entries(bytes).collect();
    assert!(read.len() <= bytes.len() / NETLINK_HEADER, "{} entries", read.len());
    let mut flows = Flows::default();
    let now = tokio::time::Instant::now();
    let taken = flows.take(now, bytes);
    assert!(taken.new.len() <= read.len());
    assert!(read.iter().all(|entry| entry.packet.is_none_or(|packet| !flows.is_new(now, packet))));
    let more = [bytes, b"\0"].concat();
    assert!(entries(&more).zip(&read).all(|(entry, same)| entry == *same), "what follows changes nothing");
}

#[cfg(test)]
mod tests;
