//! The messages of DNS: what a query asks, and the bytes of an answer. Pure.

use std::net::Ipv4Addr;

use hickory_proto::op::{Edns, Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{DNSClass, RData, Record as ResourceRecord, RecordType};
use sandglass_types::net::{Hostname, InvalidHostname};

use crate::policy::Record;

/// The longest query that is read, in bytes. One question with the longest name and an OPT record needs 300.
pub(super) const MAX_QUERY: usize = 1232;

/// The longest answer, in bytes: what every client takes over UDP (RFC 1035, 2.3.4). So none is ever cut short.
#[cfg(any(test, fuzzing))]
pub(super) const MAX_ANSWER: usize = 512;

/// Longest time that a guest is told to remember an answer, in seconds. A change of policy is to be seen soon.
const MAX_TTL: u32 = 60;

/// A query that asks one thing.
#[derive(Debug)]
pub(super) struct Asked {
    query: Message,
    question: Query,
}

/// What is answered to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// These addresses, for so many seconds.
    Addresses(Vec<Ipv4Addr>, u32),
    /// The name exists, but not with such a record.
    Nothing,
    /// The name does not exist.
    NoSuchName,
    /// It may not be asked.
    Refused,
    /// Nobody could say.
    Failed,
}

/// What the bytes of a query ask; `Err` is the answer to those that ask nothing. `None` deserves no answer: a response,
/// or too short to have an id.
pub(super) fn read(bytes: &[u8]) -> Option<Result<Asked, Vec<u8>>> {
    let id = u16::from_be_bytes(bytes.first_chunk().copied()?);
    let message = match bytes.first_chunk() {
        Some(header) if is_response(header) => return None,
        // Before anything else is read of it, so that nothing is allocated by counts that lie.
        Some(header) if asks_once(header) => Message::from_vec(bytes).ok(),
        _ => None,
    };
    let malformed = || encode(&Message::error_msg(id, OpCode::Query, ResponseCode::FormErr));
    Some(message.ok_or_else(malformed).and_then(check))
}

const fn is_response(header: &[u8; 12]) -> bool {
    header[2] & 0x80 != 0
}

/// One question, no record but such as go with a query: OPT, and perhaps a signature.
const fn asks_once(header: &[u8; 12]) -> bool {
    matches!(header, [_, _, _, _, 0, 1, 0, 0, 0, 0, 0, 0..=2])
}

fn check(query: Message) -> Result<Asked, Vec<u8>> {
    let error = |code| Err(encode(&answer_to(&query, code)));
    match (query.metadata.op_code, query.queries.as_slice()) {
        (OpCode::Query, _) if query.edns.as_ref().is_some_and(|edns| edns.version() != 0) => {
            error(ResponseCode::BADVERS)
        }
        (OpCode::Query, [question]) => {
            let question = question.clone();
            Ok(Asked { query, question })
        }
        (OpCode::Query, _) => error(ResponseCode::FormErr),
        _ => error(ResponseCode::NotImp),
    }
}

/// The head of an answer: it repeats the question, letter by letter, since some clients check that (0x20).
fn answer_to(query: &Message, code: ResponseCode) -> Message {
    let metadata = query.metadata;
    let mut answer = Message::error_msg(metadata.id, metadata.op_code, code);
    answer.metadata.recursion_desired = metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.queries.clone_from(&query.queries);
    answer.edns = query.edns.as_ref().map(|_| {
        let mut edns = Edns::new();
        edns.set_max_payload(u16::try_from(MAX_QUERY).unwrap_or(u16::MAX));
        edns
    });
    answer
}

/// No message of ours is too long to be written; were one, its client would hear nothing.
fn encode(message: &Message) -> Vec<u8> {
    message.to_vec().unwrap_or_default()
}

impl Asked {
    /// The name in question.
    pub(super) fn name(&self) -> Result<Hostname, InvalidHostname> {
        Hostname::from_labels(self.question.name().iter())
    }

    /// The name in question as it was sent.
    pub(super) fn shown_name(&self) -> Vec<u8> {
        self.question.name().iter().collect::<Vec<_>>().join(&b'.')
    }

    /// The record in question; `None` in another class than the internet's.
    pub(super) fn record(&self) -> Option<Record> {
        let record = match self.question.query_type() {
            RecordType::A => Record::A,
            RecordType::AAAA => Record::Aaaa,
            RecordType::HTTPS | RecordType::SVCB => Record::Service,
            other => Record::Other(other.into()),
        };
        (self.question.query_class() == DNSClass::IN).then_some(record)
    }

    /// The record in question, as people call it.
    pub(super) fn shown_record(&self) -> String {
        self.question.query_type().to_string()
    }

    /// The bytes of an answer.
    pub(super) fn answer(&self, answer: &Answer) -> Vec<u8> {
        let code = match answer {
            Answer::Addresses(..) | Answer::Nothing => ResponseCode::NoError,
            Answer::NoSuchName => ResponseCode::NXDomain,
            Answer::Refused => ResponseCode::Refused,
            Answer::Failed => ResponseCode::ServFail,
        };
        let mut message = answer_to(&self.query, code);
        if let Answer::Addresses(addresses, ttl) = answer {
            let ttl = (*ttl).clamp(1, MAX_TTL);
            let record = |address: &Ipv4Addr| {
                ResourceRecord::from_rdata(self.question.name().clone(), ttl, RData::A(A(*address)))
            };
            message.add_answers(addresses.iter().map(record));
        }
        encode(&message)
    }
}

/// For whatever bytes, an answer has their id, is not longer than every client takes, and is a message.
#[cfg(any(test, fuzzing))]
pub(crate) fn check_query(bytes: &[u8]) {
    let Some(read) = read(bytes.get(..MAX_QUERY).unwrap_or(bytes)) else { return };
    let answers = match read {
        Err(error) => {
            assert!(error.len() <= bytes.len().max(12), "a refusal is longer than the query");
            vec![error]
        }
        Ok(asked) => {
            let _any = (asked.name(), asked.record(), asked.shown_name(), asked.shown_record());
            let addresses = vec![Ipv4Addr::BROADCAST; crate::resolver::MAX_ADDRESSES];
            let all = [
                Answer::Addresses(addresses, u32::MAX),
                Answer::Nothing,
                Answer::NoSuchName,
                Answer::Refused,
                Answer::Failed,
            ];
            all.iter().map(|answer| asked.answer(answer)).collect()
        }
    };
    for answer in answers {
        assert!(answer.len() <= MAX_ANSWER, "an answer of {} bytes", answer.len());
        assert_eq!(answer.get(..2), bytes.get(..2), "the id is another one");
        assert!(Message::from_vec(&answer).is_ok(), "{answer:?}");
    }
}

#[cfg(test)]
pub(super) mod tests;
