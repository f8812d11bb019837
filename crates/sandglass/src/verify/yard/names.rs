//! Names in the yard: those that a policy allows, and every other name there is, which leads to a stranger.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{STRANGER, UPSTREAM};

/// What sandboxes with a narrow policy may reach.
pub(crate) const ALLOWED: &str = "allowed.verify.example";

/// Allowed as well, and at the same address.
pub(crate) const SECOND: &str = "second.verify.example";

/// Allowed as well: its address changes with every question, and is believed for no time.
pub(crate) const REBOUND: &str = "rebound.verify.example";

/// Allowed as well: another name for [`DENIED`].
pub(crate) const ALIAS: &str = "alias.verify.example";

/// Allowed for nobody who has a narrow policy.
pub(crate) const DENIED: &str = "denied.verify.example";

/// Where [`REBOUND`] leads, one after the other.
const REBOUNDS: [Ipv4Addr; 6] = [
    UPSTREAM,
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(127, 0, 0, 1),
    Ipv4Addr::new(10, 0, 0, 1),
    Ipv4Addr::new(192, 168, 0, 1),
    Ipv4Addr::new(203, 0, 113, 1),
];

const HEADER: usize = 12;
const TYPE_A: u16 = 1;
const TYPE_CNAME: u16 = 5;
const CLASS_IN: [u8; 2] = [0, 1];
/// The name of the question, as a pointer to it (RFC 1035, 4.1.4).
const ASKED: [u8; 2] = [0xc0, 0x0c];

/// A name that leads to an address.
pub(crate) fn leading_to(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    format!("to-{a}-{b}-{c}-{d}.verify.example")
}

/// The answer to a query, if it is one. `turns` counts those for [`REBOUND`].
pub(super) fn answer(query: &[u8], turns: &AtomicUsize) -> Option<Vec<u8>> {
    let (name, end) = question(query)?;
    let kind = u16::from_be_bytes(query.get(end..end + 2)?.try_into().ok()?);
    let mut records = Vec::new();
    let mut record = |name: &[u8], kind: u16, ttl: u32, data: &[u8]| -> Option<()> {
        records.push(
            [
                name,
                &kind.to_be_bytes(),
                &CLASS_IN,
                &ttl.to_be_bytes(),
                &u16::try_from(data.len()).ok()?.to_be_bytes(),
                data,
            ]
            .concat(),
        );
        Some(())
    };
    if kind == TYPE_A {
        match name.as_str() {
            ALLOWED | SECOND => record(&ASKED, TYPE_A, 60, &UPSTREAM.octets())?,
            REBOUND => {
                let turn = turns.fetch_add(1, Ordering::Relaxed) % REBOUNDS.len();
                record(&ASKED, TYPE_A, 0, &REBOUNDS[turn].octets())?;
            }
            ALIAS => {
                record(&ASKED, TYPE_CNAME, 60, &wire_name(DENIED))?;
                record(&wire_name(DENIED), TYPE_A, 60, &STRANGER.octets())?;
            }
            other => record(&ASKED, TYPE_A, 60, &spelled(other).unwrap_or(STRANGER).octets())?,
        }
    }
    let count = u16::try_from(records.len()).ok()?.to_be_bytes();
    // An answer, to a question that wanted one, from a server that asks on.
    let header = [query.get(..2)?, &[0x81, 0x80, 0, 1], &count, &[0; 4]].concat();
    Some([header, query.get(HEADER..end + 4)?.to_vec(), records.concat()].concat())
}

/// The name of the question in lower case, and where it ends.
fn question(query: &[u8]) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    let mut at = HEADER;
    loop {
        let len = usize::from(*query.get(at)?);
        at += 1;
        match len {
            0 => break,
            1..=63 => labels.push(String::from_utf8_lossy(query.get(at..at + len)?).to_lowercase()),
            _ => return None,
        }
        at += len;
    }
    query.get(..at + 4)?;
    Some((labels.join("."), at))
}

/// The address that a name spells, in the way of [`leading_to`] or as a resolver that is too kind reads numbers.
fn spelled(name: &str) -> Option<Ipv4Addr> {
    if name.starts_with("metadata") || name == "instance-data" {
        return Some(Ipv4Addr::new(169, 254, 169, 254));
    }
    if let Some(rest) = name.strip_prefix("to-") {
        return rest.split('.').next()?.replace('-', ".").parse().ok();
    }
    let number = match name.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => name.parse(),
    };
    number.map(Ipv4Addr::from_bits).ok().or_else(|| name.parse().ok())
}

/// A name as it stands in a message.
pub(crate) fn wire_name(name: &str) -> Vec<u8> {
    let labels = name.split('.').filter(|label| !label.is_empty());
    let mut wire: Vec<u8> = labels
        .flat_map(|label| {
            let len = u8::try_from(label.len()).unwrap_or(u8::MAX);
            [&[len], label.as_bytes()].concat()
        })
        .collect();
    wire.push(0);
    wire
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(name: &str, kind: u16, turn: usize) -> Vec<u8> {
        let header = [0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        let query = [&header[..], &wire_name(name), &kind.to_be_bytes(), &CLASS_IN].concat();
        let answer = answer(&query, &AtomicUsize::new(turn)).unwrap();
        assert_eq!(answer[..4], [0xab, 0xcd, 0x81, 0x80]);
        assert_eq!(answer[HEADER..query.len()], query[HEADER..]);
        answer[query.len()..].to_vec()
    }

    #[test]
    fn every_name_leads_somewhere() {
        for (name, address) in [
            (ALLOWED, UPSTREAM),
            ("ALLOWED.verify.example", UPSTREAM),
            (DENIED, STRANGER),
            ("anything.at.all", STRANGER),
            (&leading_to(Ipv4Addr::new(10, 1, 2, 3)), Ipv4Addr::new(10, 1, 2, 3)),
            ("2852039166", Ipv4Addr::new(169, 254, 169, 254)),
            ("0xa9fea9fe", Ipv4Addr::new(169, 254, 169, 254)),
            ("metadata.google.internal", Ipv4Addr::new(169, 254, 169, 254)),
        ] {
            assert!(asked(name, TYPE_A, 0).ends_with(&address.octets()), "{name}");
        }
        assert!(asked(REBOUND, TYPE_A, 0).ends_with(&UPSTREAM.octets()));
        assert!(asked(REBOUND, TYPE_A, 3).ends_with(&[10, 0, 0, 1]));
        assert!(asked(ALIAS, TYPE_A, 0).ends_with(&STRANGER.octets()));
        assert!(asked(ALLOWED, 16, 0).is_empty());
    }

    #[test]
    fn what_is_no_query_gets_no_answer() {
        for bytes in [&b""[..], &[0; 11], &[0; 12], &[0; 15], &[0xff; 40]] {
            assert_eq!(answer(bytes, &AtomicUsize::new(0)), None);
        }
    }
}
