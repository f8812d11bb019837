//! What holds for any bytes that a guest or a client sends. Fuzzers look for bytes of which it does not, and the tests
//! below try some on every run.

use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::dns::check_query;
use crate::filter_log::check_datagram;
use crate::policy::{
    Connection, Effective, Network, Operator, Policy, Question, Seen, Surroundings, Transport, decide,
    from_e2b,
};
use crate::{http, tls};

/// A reading that came to its end is the same with whatever follows, and comes to an end in bounded room.
fn ends_once<T: PartialEq + Debug>(
    bytes: &[u8],
    most: usize,
    peek: impl Fn(&[u8]) -> T,
    is_over: impl Fn(&T) -> bool,
) {
    let said = peek(bytes);
    if is_over(&said) {
        assert_eq!(peek(&[bytes, b"\0"].concat()), said);
        assert_eq!(peek(&[bytes, b"GET / HTTP/1.1\r\n\r\n"].concat()), said);
    } else {
        assert!(bytes.len() < most, "{} bytes are not enough", bytes.len());
    }
}

/// For the first bytes of a TLS connection.
pub fn client_hello(bytes: &[u8]) {
    ends_once(bytes, tls::MAX_PEEK, tls::peek, |said| *said != Ok(tls::Peek::More));
}

/// For the first bytes of an HTTP connection.
pub fn http_head(bytes: &[u8]) {
    ends_once(bytes, http::MAX_HEAD, http::peek, |said| *said != Ok(http::Peek::More));
    if let Ok(http::Peek::Head(head)) = http::peek(bytes) {
        assert!(head.length <= bytes.len());
        let (own, _) = bytes.split_at(head.length);
        assert_eq!(http::peek(own), Ok(http::Peek::Head(head)), "what follows a head is no part of it");
        let (_, short) = own.split_last().expect("a head is not empty");
        assert_eq!(http::peek(short), Ok(http::Peek::More), "a head ends where it says");
    }
}

/// For a query to the name server.
pub fn dns_query(bytes: &[u8]) {
    check_query(bytes);
}

/// For a datagram of the packet filter's log.
pub fn filter_log(bytes: &[u8]) {
    check_datagram(bytes);
}

/// For a client's policy, an operator's, and an address, with lines between them: three of JSON, then the address and
/// the port as bytes.
pub fn policy(bytes: &[u8]) {
    let mut parts = bytes.splitn(4, |byte| *byte == b'\n');
    let (Some(e2b), Some(native), Some(operator), Some(to)) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return;
    };
    let operator: Operator = serde_json::from_slice(operator).unwrap_or_default();
    let e2b = serde_json::from_slice::<Network>(e2b).ok().and_then(|network| from_e2b(&network, None).ok());
    let native = serde_json::from_slice::<Policy>(native).ok();
    for policy in e2b.into_iter().chain(native) {
        let written = serde_json::to_vec(&policy).expect("a policy can be written");
        let read: Policy = serde_json::from_slice(&written).expect("what was written can be read");
        assert_eq!(read, policy);
        if let Ok((effective, _)) = Effective::new(&policy, &operator, Surroundings::default()) {
            never_reached(&effective, to);
        }
    }
}

/// No policy and no ceiling opens what must never be reached, in whatever form the address comes.
fn never_reached(effective: &Effective, to: &[u8]) {
    const NEVER: [Ipv4Addr; 6] = [
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::UNSPECIFIED,
        Ipv4Addr::BROADCAST,
        Ipv4Addr::new(169, 254, 169, 254),
        Ipv4Addr::new(169, 254, 170, 2),
        Ipv4Addr::new(100, 100, 100, 200),
    ];
    let &[first, second, third, fourth, high, low] = to.first_chunk().unwrap_or(&[0; 6]);
    let port = u16::from_be_bytes([high, low]).max(1).try_into().expect("it is not zero");
    let loopback = Ipv4Addr::new(127, first, second, third);
    let link_local = Ipv4Addr::new(169, 254, first, second);
    let multicast = Ipv4Addr::new(224 | (first & 15), second, third, fourth);
    for address in NEVER.into_iter().chain([loopback, link_local, multicast]) {
        let [a, b, c, d] = address.octets();
        let nat64 = Ipv6Addr::from([0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d]);
        for address in [IpAddr::V4(address), IpAddr::V6(address.to_ipv6_mapped()), IpAddr::V6(nat64)] {
            let connection =
                Connection { transport: Transport::Tcp, address, port, bound: &[], seen: Seen::Nothing };
            let verdict = decide(effective, Question::Connect(connection));
            assert!(!verdict.is_allowed(), "{address}: {verdict:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    const HELLO: &[u8] = include_bytes!("../../../fuzz/seeds/client_hello/openssl");
    const HEAD: &[u8] = include_bytes!("../../../fuzz/seeds/http_head/post");
    const QUERY: &[u8] = include_bytes!("../../../fuzz/seeds/dns_query/a");
    const LOGGED: &[u8] = include_bytes!("../../../fuzz/seeds/filter_log/four");
    const POLICY: &[u8] = include_bytes!("../../../fuzz/seeds/policy/all");

    /// A good example with some bytes written over, put in or taken out; or any bytes.
    fn near(seed: &'static [u8]) -> impl Strategy<Value = Vec<u8>> {
        let change = (any::<prop::sample::Index>(), 0..3_u8, prop_oneof![any::<u8>(), select(seed)]);
        let changed = vec(change, 0..6).prop_map(move |changes| {
            let mut bytes = seed.to_vec();
            for (at, how, byte) in changes {
                let at = at.index(bytes.len());
                match how {
                    0 => bytes[at] = byte,
                    1 => bytes.insert(at, byte),
                    _ => drop(bytes.remove(at)),
                }
            }
            bytes
        });
        prop_oneof![9 => changed, 1 => vec(any::<u8>(), 0..300)]
    }

    fn parsed<T: serde::de::DeserializeOwned>(json: &[u8]) -> T {
        serde_json::from_slice(json).unwrap()
    }

    #[test]
    fn the_examples_are_good() {
        assert!(matches!(tls::peek(HELLO), Ok(tls::Peek::Hello(hello)) if hello.sni.is_some()));
        assert!(matches!(http::peek(HEAD), Ok(http::Peek::Head(_))));
        let parts: Vec<_> = POLICY.splitn(4, |byte| *byte == b'\n').collect();
        let operator = parsed(parts[2]);
        for policy in [from_e2b(&parsed(parts[0]), None).unwrap(), parsed(parts[1])] {
            let (effective, _) = Effective::new(&policy, &operator, Surroundings::default()).unwrap();
            let connection = Connection {
                transport: Transport::Tcp,
                address: "93.184.216.34".parse().unwrap(),
                port: 443.try_into().unwrap(),
                bound: &[],
                seen: Seen::Nothing,
            };
            assert!(decide(&effective, Question::Connect(connection)).is_allowed(), "{policy:?}");
        }
    }

    proptest! {
        #[test]
        fn of_any_client_hello(bytes in near(HELLO)) {
            client_hello(&bytes);
        }

        #[test]
        fn of_any_http_head(bytes in near(HEAD)) {
            http_head(&bytes);
        }

        #[test]
        fn of_any_dns_query(bytes in near(QUERY)) {
            dns_query(&bytes);
        }

        #[test]
        fn of_any_datagram_of_the_log(bytes in near(LOGGED)) {
            filter_log(&bytes);
        }

        #[test]
        fn of_any_policy(bytes in near(POLICY)) {
            policy(&bytes);
        }
    }
}
