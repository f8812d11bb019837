use std::time::Duration;

use sandglass_types::net::Port;
use tokio::time::Instant;

use super::serve::receipt;
use super::*;
use crate::fixture::fixture;
use crate::policy::{Connection, Question, Seen};
use crate::receipt::{Kind, Outcome};

/// Three connections to 127.0.0.1:99 and a datagram there, as a kernel told them.
const FOUR: &[u8] = include_bytes!("../../../../fuzz/seeds/filter_log/four");

/// A connection request with this sequence number.
fn syn(from: u16, to: [u8; 4], port: u16, number: u32) -> Vec<u8> {
    let mut bytes = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 11, 12, 2];
    bytes.extend(to);
    bytes.extend(from.to_be_bytes());
    bytes.extend(port.to_be_bytes());
    bytes.extend(number.to_be_bytes());
    bytes.extend([0, 0, 0, 0, 0x50, 0x02, 0, 0, 0, 0, 0, 0]);
    bytes
}

fn udp(from: u16, to: [u8; 4], port: u16) -> Vec<u8> {
    let mut bytes = syn(from, to, port, 0);
    bytes[9] = 17;
    bytes
}

/// A message of the log.
fn message(number: u32, prefix: &str, packet: &[u8]) -> Vec<u8> {
    let mut attributes = Vec::new();
    let prefix = [prefix.as_bytes(), b"\0"].concat();
    for (kind, value) in
        [(NFULA_PREFIX, prefix.as_slice()), (NFULA_PAYLOAD, packet), (NFULA_SEQ, &number.to_be_bytes())]
    {
        attributes.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
        attributes.extend(kind.to_ne_bytes());
        attributes.extend(value);
        attributes.resize(attributes.len().next_multiple_of(4), 0);
    }
    let length = u32::try_from(NETLINK_HEADER + FIXED + attributes.len()).unwrap();
    let header = [&length.to_ne_bytes()[..], &LOGGED.to_ne_bytes(), &[0; 10], &[0; 4]].concat();
    [header, attributes].concat()
}

fn packet_of(bytes: &[u8]) -> Packet {
    packet(Why::Never, bytes).unwrap()
}

#[test]
fn what_a_kernel_tells_is_read() {
    let read: Vec<_> = entries(FOUR).collect();
    assert_eq!(read.iter().map(|entry| entry.number).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let packets: Vec<_> = read.into_iter().map(|entry| entry.packet.unwrap()).collect();
    let is_there = |packet: &Packet| (packet.to, packet.port) == (Ipv4Addr::LOCALHOST, 99);
    assert!(packets.iter().all(|packet| is_there(packet) && packet.why == Why::Never));
    let opens: Vec<_> = packets.iter().map(|packet| (packet.transport, packet.opens.is_some())).collect();
    let tcp = (Transport::Tcp, true);
    assert_eq!(opens, [tcp, tcp, tcp, (Transport::Udp, false)]);
}

#[test]
fn what_is_no_head_of_tcp_or_udp_is_passed_over_and_counts() {
    let good = syn(1000, [169, 254, 169, 254], 80, 7);
    assert!(packet(Why::Never, &good).is_some());
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let mut longest = vec![0x4f; 1];
    longest.extend(&good[1..20]);
    longest.extend([0; 40]);
    longest.extend(&good[20..]);
    assert_eq!(packet(Why::Never, &longest), packet(Why::Never, &good), "options of IPv4");
    assert_eq!(u32::try_from(longest.len()), Ok(SNAPLEN));
    // Version 6, a head too short, a head too long, a later fragment, ICMP, cut off.
    for bad in [
        changed(0, 0x65),
        changed(0, 0x44),
        changed(0, 0x4f),
        changed(7, 1),
        changed(9, 1),
        good[..33].to_vec(),
    ] {
        assert_eq!(packet(Why::Never, &bad), None, "{bad:?}");
        let told = message(5, "never", &bad);
        assert_eq!(entries(&told).collect::<Vec<_>>(), [Entry { number: 5, packet: None }]);
    }
    assert_eq!(entries(&message(5, "other", &good)).next(), Some(Entry { number: 5, packet: None }));
}

#[test]
fn an_attempt_is_new_once_and_another_between_the_same_ports_is_another() {
    let (mut flows, now) = (Flows::default(), Instant::now());
    let to = [10, 0, 0, 1];
    let datagram = [
        message(0, "never", &syn(1000, to, 80, 7)),
        message(1, "never", &syn(1000, to, 80, 7)),
        message(2, "never", &syn(1000, to, 80, 8)),
        message(3, "never", &udp(1000, to, 80)),
        message(4, "never", &udp(1000, to, 80)),
        message(5, "never", &udp(1001, to, 80)),
    ];
    let taken = flows.take(now, &datagram.concat());
    assert_eq!((taken.left_out, taken.new.len()), (2, 4));
    assert_eq!(taken.new[0], packet_of(&syn(1000, to, 80, 7)));
    let later = now + Duration::from_secs(90);
    assert_eq!(flows.take(later, &message(6, "never", &udp(1000, to, 80))).new, []);
    let much_later = later + Duration::from_mins(3);
    assert_eq!(flows.take(much_later, &message(7, "never", &udp(1000, to, 80))).new.len(), 1);
}

#[test]
fn what_does_not_arrive_is_counted() {
    let mut flows = Flows::default();
    let packet = udp(1000, [10, 0, 0, 1], 80);
    let datagram =
        [message(2, "never", &packet), message(3, "never", &packet), message(10, "never", &packet)];
    assert_eq!(flows.take(Instant::now(), &datagram.concat()).left_out, 2 + 6 + 2);
    assert_eq!(flows.take(Instant::now(), &message(11, "never", &packet)).left_out, 1);
    let other = udp(1001, [10, 0, 0, 1], 80);
    assert_eq!(flows.take(Instant::now(), &message(12, "never", &other)).left_out, 0);
    assert_eq!(
        flows.take(Instant::now(), &message(13, "never", &[0; 40])).left_out,
        1,
        "what is no head of a packet"
    );
}

#[test]
fn of_any_number_of_flows_a_bounded_number_is_known() {
    let (mut flows, now) = (Flows::default(), Instant::now());
    let mut number = 0;
    for port in 1..5000 {
        let taken = flows.take(now, &message(number, "never", &udp(port, [10, 0, 0, 1], 80)));
        assert_eq!(taken.new.len(), 1);
        number += 1;
    }
    assert!(flows.known() <= 1024, "{}", flows.known());
    let last = message(number, "never", &udp(4999, [10, 0, 0, 1], 80));
    assert_eq!(flows.take(now, &last).new, [], "and it is of the newest");
}

#[test]
fn a_receipt_says_what_the_policy_says() {
    let enforcer = fixture(r#"[{"allow": "0.0.0.0/0"}]"#, &[]).enforcer;
    for (bytes, rule) in [
        (syn(1000, [169, 254, 169, 254], 80, 7), "always/metadata"),
        (syn(1000, [127, 0, 0, 1], 22, 7), "always/loopback"),
        (syn(1000, [10, 1, 2, 3], 443, 7), "always/private"),
        (udp(1000, [10, 1, 2, 3], 443), "always/private"),
        (udp(1000, [93, 184, 216, 34], 443), "always/udp"),
        (syn(1000, [10, 1, 2, 3], 0, 7), "always/malformed"),
        // Only a rule of an older filter holds this up.
        (syn(1000, [93, 184, 216, 34], 80, 7), "always/filter"),
    ] {
        let packet = packet_of(&bytes);
        let receipt = receipt(&enforcer, packet);
        assert_eq!((receipt.rule.to_string().as_str(), receipt.outcome), (rule, Outcome::Denied));
        assert_eq!((receipt.kind, receipt.transport), (Kind::Connection, Some(packet.transport)));
        assert_eq!(receipt.address, Some(packet.to.into()));
        assert_eq!(receipt.port.map_or(0, Port::get), packet.port);
        if let (Some(port), Why::Never) = (receipt.port, packet.why) {
            let (transport, address) = (packet.transport, packet.to.into());
            let question = Connection { transport, address, port, bound: &[], seen: Seen::Nothing };
            let verdict = enforcer.decide(Question::Connect(question));
            assert!(verdict.is_allowed() || verdict.rule() == rule);
        }
    }
    for (why, rule) in [(Why::Connections, "limit/connections"), (Why::Source, "always/source")] {
        let packet = packet(why, &syn(1000, [93, 184, 216, 34], 80, 7)).unwrap();
        assert_eq!(receipt(&enforcer, packet).rule.to_string(), rule);
    }
}
