use hickory_proto::op::{MessageType, Metadata};
use hickory_proto::rr::Name;
use proptest::prelude::*;

use super::*;

/// The bytes of a query, as a client writes them.
pub(in crate::dns) fn query(name: &str, record: RecordType) -> Vec<u8> {
    message(name, record).to_vec().unwrap()
}

pub(in crate::dns) fn message(name: &str, record: RecordType) -> Message {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), record));
    message
}

fn asked(bytes: &[u8]) -> Asked {
    read(bytes).unwrap().unwrap()
}

fn error(bytes: &[u8]) -> Message {
    Message::from_vec(&read(bytes).unwrap().unwrap_err()).unwrap()
}

fn answered(bytes: &[u8], answer: &Answer) -> Message {
    Message::from_vec(&asked(bytes).answer(answer)).unwrap()
}

fn addresses(count: u8) -> Vec<Ipv4Addr> {
    (0..count).map(|last| Ipv4Addr::new(93, 184, 216, last)).collect()
}

#[test]
fn an_answer_repeats_the_question_letter_by_letter() {
    let bytes = query("eXamPLE.CoM.", RecordType::A);
    assert_eq!(asked(&bytes).name().unwrap().as_str(), "example.com");
    let raw = asked(&bytes).answer(&Answer::Addresses(addresses(2), 30));
    assert_eq!(&raw[..2], &bytes[..2]);
    assert_eq!(raw[12..bytes.len()], bytes[12..], "the question");
    let message = Message::from_vec(&raw).unwrap();
    let Metadata { message_type, recursion_desired, recursion_available, authoritative, .. } =
        message.metadata;
    assert_eq!(message_type, MessageType::Response);
    assert!(recursion_desired && recursion_available && !authoritative);
    assert_eq!(message.answers.len(), 2);
    for (record, address) in message.answers.iter().zip(addresses(2)) {
        assert_eq!(record.name.to_ascii(), "eXamPLE.CoM.");
        assert_eq!((&record.data, record.ttl), (&RData::A(A(address)), 30));
    }
}

#[test]
fn every_answer_has_its_code() {
    let bytes = query("example.com.", RecordType::AAAA);
    for (answer, code) in [
        (Answer::Nothing, ResponseCode::NoError),
        (Answer::NoSuchName, ResponseCode::NXDomain),
        (Answer::Refused, ResponseCode::Refused),
        (Answer::Failed, ResponseCode::ServFail),
    ] {
        let message = answered(&bytes, &answer);
        assert_eq!(message.metadata.response_code, code);
        assert!(message.answers.is_empty() && message.edns.is_none());
    }
}

#[test]
fn a_guest_remembers_an_answer_for_a_minute_at_most() {
    let bytes = query("example.com.", RecordType::A);
    for (ttl, told) in [(0, 1), (1, 1), (59, 59), (61, 60), (u32::MAX, 60)] {
        let message = answered(&bytes, &Answer::Addresses(addresses(1), ttl));
        assert_eq!(message.answers[0].ttl, told);
    }
}

#[test]
fn the_longest_answer_fits_where_every_client_has_room() {
    let label = "a".repeat(63);
    let name = format!("{label}.{label}.{label}.{}.", "a".repeat(61));
    let mut longest = message(&name, RecordType::A);
    longest.set_edns(Edns::new());
    let bytes = longest.to_vec().unwrap();
    assert!(asked(&bytes).name().is_ok());
    let most = u8::try_from(crate::resolver::MAX_ADDRESSES).unwrap();
    let raw = asked(&bytes).answer(&Answer::Addresses(addresses(most), 60));
    assert!(raw.len() <= MAX_ANSWER, "{}", raw.len());
    let message = Message::from_vec(&raw).unwrap();
    assert_eq!(message.answers.len(), usize::from(most));
    assert!(!message.metadata.truncation);
}

#[test]
fn extensions_are_answered_with_none() {
    let mut message = message("example.com.", RecordType::A);
    let mut edns = Edns::new();
    edns.set_max_payload(4096).set_dnssec_ok(true);
    message.set_edns(edns.clone());
    let answer = answered(&message.to_vec().unwrap(), &Answer::Nothing);
    let theirs = answer.edns.unwrap();
    assert_eq!((theirs.version(), theirs.flags().dnssec_ok), (0, false));
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
    edns.set_version(1);
    message.set_edns(edns);
    let answer = error(&message.to_vec().unwrap());
    assert_eq!(u16::from(answer.metadata.response_code), 16, "BADVERS");
    assert_eq!(answer.edns.unwrap().version(), 0);
}

#[test]
fn malformed_queries_get_an_error_and_responses_get_silence() {
    let whole = query("example.com.", RecordType::A);
    for len in 2..whole.len() {
        assert_eq!(error(&whole[..len]).metadata.response_code, ResponseCode::FormErr, "{len} bytes");
    }
    assert!(read(&[7]).is_none() && read(&[]).is_none());
    let response = Message::error_msg(1, OpCode::Query, ResponseCode::NoError).to_vec().unwrap();
    assert!(read(&response).is_none(), "answering responses would let two servers talk for ever");
    let mut two = message("example.com.", RecordType::A);
    two.add_query(Query::query(Name::from_ascii("example.org.").unwrap(), RecordType::A));
    assert_eq!(error(&two.to_vec().unwrap()).metadata.response_code, ResponseCode::FormErr);
    let mut notify = message("example.com.", RecordType::A);
    notify.metadata.op_code = OpCode::Notify;
    assert_eq!(error(&notify.to_vec().unwrap()).metadata.response_code, ResponseCode::NotImp);
    let mut answering = message("example.com.", RecordType::A);
    let record = ResourceRecord::from_rdata(Name::root(), 1, RData::A(A(Ipv4Addr::LOCALHOST)));
    answering.add_answer(record);
    assert_eq!(error(&answering.to_vec().unwrap()).metadata.response_code, ResponseCode::FormErr);
    for counts in [4, 6, 8, 10] {
        let mut lying = whole.clone();
        lying[counts..counts + 2].fill(0xff);
        assert_eq!(error(&lying).metadata.response_code, ResponseCode::FormErr);
    }
    let mut none = whole;
    none[5] = 0;
    assert_eq!(error(&none).metadata.response_code, ResponseCode::FormErr);
}

#[test]
fn what_is_no_host_name_is_shown_as_it_came() {
    let label = |bytes: &[u8]| Name::from_labels([bytes, b"example"]).unwrap();
    for bytes in [&b"a.b"[..], b"a\0", b"\xff\n", b"a b", b"-a"] {
        let mut message = Message::query();
        message.add_query(Query::query(label(bytes), RecordType::A));
        let asked = asked(&message.to_vec().unwrap());
        assert!(asked.name().is_err(), "{bytes:?}");
        assert_eq!(asked.shown_name(), [bytes, b".example"].concat());
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic_or_amplify(bytes in proptest::collection::vec(any::<u8>(), 0..MAX_QUERY)) {
        if let Some(Err(error)) = read(&bytes) {
            prop_assert!(error.len() <= bytes.len().max(12));
            prop_assert_eq!(&error[..2], &bytes[..2]);
        }
    }

    #[test]
    fn no_bytes_behind_a_right_header_make_it_panic(
        bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xc0), Just(12), Just(0)], 0..200),
        records in 0_u8..3,
    ) {
        let raw = [&[7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, records], &bytes[..]].concat();
        let written = match read(&raw).unwrap() {
            Ok(asked) => asked.answer(&Answer::Addresses(addresses(12), 7)),
            Err(error) => error,
        };
        prop_assert!(written.len() <= MAX_ANSWER && written.starts_with(&[7, 7]));
        prop_assert!(Message::from_vec(&written).is_ok());
    }

    #[test]
    fn no_change_of_a_query_makes_it_panic(
        at in 0_usize..40, to: u8, edns: bool, answer in 0_usize..5, record in any::<u16>(),
    ) {
        let mut message = message("Example.com.", RecordType::from(record));
        if edns {
            message.set_edns(Edns::new());
        }
        let mut bytes = message.to_vec().unwrap();
        let at = at % bytes.len();
        bytes[at] = to;
        let answers = [
            Answer::Addresses(addresses(12), 7), Answer::Nothing, Answer::NoSuchName, Answer::Refused, Answer::Failed,
        ];
        if let Some(Ok(asked)) = read(&bytes) {
            let raw = asked.answer(&answers[answer]);
            prop_assert!(raw.len() <= MAX_ANSWER);
            prop_assert_eq!(&raw[..2], &bytes[..2]);
            prop_assert!(Message::from_vec(&raw).is_ok());
            let _ = (asked.name(), asked.record(), asked.shown_name(), asked.shown_record());
        }
    }
}
