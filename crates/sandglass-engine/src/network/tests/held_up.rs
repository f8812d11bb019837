//! What the packet filter holds up, as it is logged.

use super::*;

/// What was logged, until all of `wanted` is in it: why, and the address and port it was for.
pub(super) fn logged(log: &OwnedFd, wanted: &[(&str, &str)]) -> Vec<u8> {
    let (mut found, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    loop {
        let mut datagram = [0; 8192];
        match rustix::net::recv(log, &mut datagram[..], RecvFlags::empty()) {
            Ok((_, length)) => found.extend(&datagram[..length]),
            Err(rustix::io::Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
        let missing = wanted.iter().find(|(why, to)| {
            let to: SocketAddrV4 = to.parse().unwrap();
            // Two octets are left open: the port that it is from.
            let head = to.ip().octets();
            let port = to.port().to_be_bytes();
            let is_it = |window: &[u8]| window[..4] == head && window[6..] == port;
            !has(&found, format!("{why}\0").as_bytes()) || !found.windows(8).any(is_it)
        });
        match missing {
            None => return found,
            Some(missing) => assert!(Instant::now() < deadline, "{missing:?} was not logged"),
        }
    }
}

fn has(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

#[test]
fn what_the_filter_holds_up_is_logged_and_the_rest_is_not() {
    try_log().unwrap();
    let bench = Bench::new();
    let slot = bench.slot();
    let names = udp(airlock_socket(&slot, AirlockSocket::DnsUdp).unwrap());
    let _egress = egress(&slot);
    let log = airlock_socket(&slot, AirlockSocket::FilterLog).unwrap();
    airlock_socket(&slot, AirlockSocket::FilterLog).unwrap_err();
    let guest = guest_udp(&slot, &bench);
    connect_from_guest(&bench, &slot, "93.184.216.34:443", PATIENCE).0.unwrap();
    fence(&guest, &names);
    connect_from_guest(&bench, &slot, "169.254.169.254:80", PATIENCE).0.unwrap_err();
    guest.send_to(b"x", "8.8.4.4:123").unwrap();
    let found = logged(&log, &[("never", "169.254.169.254:80"), ("never", "8.8.4.4:123")]);
    assert!(!has(&found, &[93, 184, 216, 34]) && !has(&found, &[8, 8, 8, 8]));
    assert!(!has(&found, b"connections\0") && !has(&found, b"source\0"));

    // The next server's, once that of the one before is closed.
    drop(log);
    let log = airlock_socket(&slot, AirlockSocket::FilterLog).unwrap();
    connect_from_guest(&bench, &slot, "10.11.12.1:22", PATIENCE).0.unwrap_err();
    logged(&log, &[("never", "10.11.12.1:22")]);
}

#[test]
fn a_slot_without_a_log_holds_up_the_same() {
    let bench = Bench::new();
    let filter = Filter { log: false, ..filter(&[]) };
    let slot = Slot::create(&bench.pins, &bench.instance, &filter).unwrap();
    let _egress = egress(&slot);
    let (result, took) = connect_from_guest(&bench, &slot, "169.254.169.254:80", PATIENCE);
    assert_eq!(result.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert!(took < AT_ONCE, "{took:?}");
    connect_from_guest(&bench, &slot, "93.184.216.34:443", PATIENCE).0.unwrap();
}
