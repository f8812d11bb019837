//! The form of netlink messages (`man 7 netlink`): a header, a fixed part, and attributes, all padded to four bytes
//! and in the byte order of the machine.

use std::io;
use std::net::IpAddr;

use super::{Link, Mac};

const HEADER_LEN: usize = 16;
const ATTRIBUTE_HEADER_LEN: usize = 4;

/// `NLA_F_NESTED`, `NLA_F_NET_BYTEORDER`: flags in the kind of an attribute.
const ATTRIBUTE_FLAGS: u16 = 0xc000;

/// A request that is being written.
#[derive(Debug)]
pub(super) struct Message {
    bytes: Vec<u8>,
    overflow: bool,
}

impl Message {
    /// A request that the kernel acknowledges.
    pub(super) fn new(kind: u16, flags: libc::c_int, fixed: &[u8]) -> Self {
        let flags = u16::try_from(flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK).unwrap_or(0);
        let mut message = Self { bytes: vec![0; HEADER_LEN], overflow: flags == 0 };
        message.bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        message.bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        message.raw(fixed);
        message
    }

    /// Adds a fixed part.
    pub(super) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    /// Adds an attribute.
    pub(super) fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let start = self.open_attribute(kind);
        self.bytes.extend_from_slice(value);
        self.close_attribute(start);
        self
    }

    /// Adds an attribute that holds others.
    pub(super) fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.open_attribute(kind);
        fill(self);
        self.close_attribute(start);
    }

    fn open_attribute(&mut self, kind: u16) -> usize {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0, 0]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        start
    }

    /// The length of an attribute does not count its padding.
    fn close_attribute(&mut self, start: usize) {
        match u16::try_from(self.bytes.len() - start) {
            Ok(len) => self.bytes[start..start + 2].copy_from_slice(&len.to_ne_bytes()),
            Err(_) => self.overflow = true,
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// The finished bytes.
    pub(super) fn finish(mut self, sequence: u32) -> io::Result<Vec<u8>> {
        let len = u32::try_from(self.bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        if self.overflow {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.bytes[0..4].copy_from_slice(&len.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        Ok(self.bytes)
    }
}

/// One message of an answer.
#[derive(Debug)]
pub(super) enum Reply<'a> {
    /// Something that was asked for.
    Data {
        /// `RTM_*`.
        kind: u16,
        /// All after the header.
        body: &'a [u8],
    },
    /// The acknowledgement, the error, or the end of a dump.
    End(io::Result<()>),
}

pub(super) fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "malformed netlink message")
}

/// The messages of a datagram that answer the request of that sequence number.
pub(super) fn replies(mut rest: &[u8], wanted: u32) -> impl Iterator<Item = io::Result<Reply<'_>>> {
    std::iter::from_fn(move || {
        loop {
            if rest.is_empty() {
                return None;
            }
            let Some((kind, sequence, body, after)) = split_message(rest) else {
                rest = &[];
                return Some(Err(malformed()));
            };
            rest = after;
            if sequence == wanted {
                return Some(reply(kind, body));
            }
        }
    })
}

fn reply(kind: u16, body: &[u8]) -> io::Result<Reply<'_>> {
    match libc::c_int::from(kind) {
        libc::NLMSG_ERROR | libc::NLMSG_DONE => {
            let code = read_i32(body, 0).ok_or_else(malformed)?;
            let failed = || io::Error::from_raw_os_error(code.saturating_neg());
            Ok(Reply::End(if code == 0 { Ok(()) } else { Err(failed()) }))
        }
        _ => Ok(Reply::Data { kind, body }),
    }
}

/// Kind, sequence number and body of the first message, and what comes after it.
fn split_message(bytes: &[u8]) -> Option<(u16, u32, &[u8], &[u8])> {
    let len = usize::try_from(read_u32(bytes, 0)?).ok()?;
    let body = bytes.get(HEADER_LEN..len)?;
    let after = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((read_u16(bytes, 4)?, read_u32(bytes, 8)?, body, after))
}

/// Kind and value of each attribute; stops at one that does not fit.
fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(read_u16(rest, 0)?);
        let kind = read_u16(rest, 2)? & !ATTRIBUTE_FLAGS;
        let value = rest.get(ATTRIBUTE_HEADER_LEN..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Reads the body of `RTM_NEWLINK`.
pub(super) fn link(body: &[u8]) -> Option<Link> {
    const UP: u32 = 1;
    /// `IF_OPER_UP` of RFC 2863.
    const OPERATIONAL: &[u8] = &[6];
    let mut link = Link {
        index: read_u32(body, 4)?,
        name: String::new(),
        up: read_u32(body, 8)? & UP != 0,
        operational: false,
        mac: None,
    };
    for (kind, value) in attributes(body.get(16..)?) {
        match kind {
            libc::IFLA_IFNAME => {
                let name = value.split(|&byte| byte == 0).next()?;
                link.name = String::from_utf8_lossy(name).into_owned();
            }
            libc::IFLA_OPERSTATE => link.operational = value == OPERATIONAL,
            libc::IFLA_ADDRESS => link.mac = value.try_into().ok().map(Mac),
            _ => {}
        }
    }
    Some(link)
}

/// Reads the body of `RTM_NEWADDR`.
pub(super) fn address(body: &[u8]) -> Option<IpAddr> {
    // On a link with two ends, `IFA_ADDRESS` is the other end's.
    let of_kind =
        |wanted: u16| attributes(body.get(8..)?).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    let value = of_kind(libc::IFA_LOCAL).or_else(|| of_kind(libc::IFA_ADDRESS))?;
    let v4 = || <[u8; 4]>::try_from(value).map(IpAddr::from);
    v4().or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from)).ok()
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn read_i32(bytes: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}
