use proptest::prelude::*;

use super::*;

fn class(address: &str) -> Option<Class> {
    let address: IpAddr = address.parse().unwrap();
    forbidden(address.to_canonical(), &Openings::default(), &Surroundings::default())
}

#[test]
fn public_addresses_are_no_special_ones() {
    for address in [
        "1.1.1.1",
        "8.8.8.8",
        "93.184.216.34",
        "11.0.0.1",
        "100.63.255.255",
        "100.128.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "169.253.0.1",
        "192.167.0.1",
        "198.17.255.255",
        "198.20.0.0",
        "223.255.255.255",
        "2606:4700::1111",
        "2a00::1",
        "64:ff9b::808:808",
        "2002:808:808::1",
        "::ffff:8.8.8.8",
        "2001:0:808:808::f7f7:f7f7",
        "2a00::5efe:808:808",
    ] {
        assert_eq!(class(address), None, "{address}");
    }
}

#[test]
fn no_range_of_the_barrier_stands_in_another() {
    let openings =
        Openings::try_from(["10.1.0.0/16", "10.1.2.0/24", "fd00::/8"].map(|t| t.parse().unwrap()).to_vec());
    let Barrier { never, closed, opened } = openings.unwrap().barrier();
    assert_eq!(opened, ["10.1.0.0/16".parse().unwrap()]);
    for list in [&never, &closed] {
        assert!(list.len() > 5);
        for (at, range) in list.iter().enumerate() {
            assert!(!range.is_v6());
            assert!(
                !list.iter().enumerate().any(|(other, wide)| other != at && wide.covers(range)),
                "{range}"
            );
        }
    }
}

proptest! {
    #[test]
    fn the_barrier_holds_up_what_the_policy_always_denies(address: u32, near in 0_usize..SPECIAL.len(), open: bool) {
        let opened = if open { vec!["10.0.0.0/9".parse().unwrap(), "100.64.0.0/10".parse().unwrap()] } else { vec![] };
        let openings = Openings::try_from(opened).unwrap();
        let Barrier { never, closed, opened } = openings.barrier();
        let near = SPECIAL[near].0.to_string();
        let near = near.split_once('/').unwrap().0.parse::<std::net::Ipv4Addr>();
        let both = [address, near.map_or(address, |near| near.to_bits() ^ (address & 1 << (address % 32)))];
        for address in both.map(|bits| IpAddr::V4(bits.into())) {
            let within = |list: &[Cidr]| list.iter().any(|range| range.contains(address));
            let held_up = within(&never) || within(&closed) && !within(&opened);
            let denied = forbidden(address, &openings, &Surroundings::default()).is_some();
            prop_assert_eq!(held_up, denied, "{}", address);
        }
    }
}

#[test]
fn each_special_range_is_known_at_both_ends() {
    for (address, expected) in [
        ("0.0.0.0", Class::Unspecified),
        ("0.255.255.255", Class::Unspecified),
        ("10.0.0.0", Class::Private),
        ("10.255.255.255", Class::Private),
        ("100.64.0.0", Class::Shared),
        ("100.127.255.255", Class::Shared),
        ("127.0.0.1", Class::Loopback),
        ("127.255.255.255", Class::Loopback),
        ("169.254.0.1", Class::LinkLocal),
        ("172.16.0.0", Class::Private),
        ("172.31.255.255", Class::Private),
        ("192.168.255.255", Class::Private),
        ("192.0.0.1", Class::Reserved),
        ("192.0.2.1", Class::Documentation),
        ("198.19.255.255", Class::Benchmark),
        ("224.0.0.251", Class::Multicast),
        ("239.255.255.255", Class::Multicast),
        ("240.0.0.1", Class::Reserved),
        ("255.255.255.255", Class::Broadcast),
        ("::", Class::Unspecified),
        ("::1", Class::Loopback),
        ("fe80::1", Class::LinkLocal),
        ("fdff::1", Class::Private),
        ("ff02::fb", Class::Multicast),
        ("2001:db8::1", Class::Documentation),
        ("3fff::1", Class::Documentation),
        ("fec0::1", Class::Reserved),
        ("4000::1", Class::Reserved),
    ] {
        assert_eq!(class(address), Some(expected), "{address}");
    }
}

#[test]
fn metadata_is_metadata_in_every_form() {
    for address in [
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd20:ce::254",
        "::ffff:169.254.169.254",
        "::ffff:a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "2001:0:a9fe:a9fe::1",
        "2001:0:808:808::5601:5601",
        "2a00::5efe:a9fe:a9fe",
        "2a00::200:5efe:169.254.169.254",
        "2002:808:808::5efe:a9fe:a9fe",
    ] {
        assert_eq!(class(address), Some(Class::Metadata), "{address}");
    }
    // Forms that no network routes are refused for what they are.
    for address in ["::169.254.169.254", "::ffff:0:169.254.169.254", "64:ff9b:1::a9fe:a9fe"] {
        assert_eq!(class(address), Some(Class::Reserved), "{address}");
    }
}

#[test]
fn private_ranges_can_be_opened_and_nothing_else() {
    let open =
        |texts: &[&str]| Openings::try_from(texts.iter().map(|t| t.parse().unwrap()).collect::<Vec<_>>());
    let openings = open(&["10.20.30.0/24", "fd12::/16", "100.64.0.0/10", "198.18.0.0/15"]).unwrap();
    let class = |address: &str| forbidden(address.parse().unwrap(), &openings, &Surroundings::default());
    for address in ["10.20.30.1", "fd12::1", "100.64.0.1", "198.18.0.1"] {
        assert_eq!(class(address), None, "{address}");
    }
    assert_eq!(class("10.20.31.1"), Some(Class::Private));
    assert_eq!(class("100.100.100.200"), Some(Class::Metadata), "an opening does not reach metadata in it");
    assert_eq!(class("64:ff9b::a14:1e01"), Some(Class::Private), "nor an address by a detour");
    for range in [
        "127.0.0.1/32",
        "169.254.0.0/16",
        "169.254.169.254/32",
        "0.0.0.0/0",
        "8.0.0.0/8",
        "8.8.8.8/32",
        "100.100.100.200/32",
        "fd00:ec2::254/128",
        "fe80::/10",
        "::/0",
        "224.0.0.0/4",
        "10.0.0.0/7",
        "192.0.0.0/24",
        "168.63.129.16/32",
    ] {
        assert!(open(&[range]).is_err(), "{range}");
    }
    assert!(open(&["10.0.0.0/8"; MAX_OPENINGS + 1]).is_err());
    assert!(open(&["10.0.0.0/8"; MAX_OPENINGS]).is_ok());
}

#[test]
fn the_server_and_other_sandboxes_can_not_be_opened() {
    let openings = Openings::try_from(vec!["10.0.0.0/8".parse().unwrap()]).unwrap();
    let around = Surroundings {
        server: vec!["10.0.0.5/32".parse().unwrap(), "93.184.216.34/32".parse().unwrap()],
        sandboxes: vec!["10.9.0.0/16".parse().unwrap()],
        edge: None,
    };
    let class = |address: &str| forbidden(address.parse().unwrap(), &openings, &around);
    assert_eq!(class("10.0.0.6"), None);
    assert_eq!(class("10.0.0.5"), Some(Class::Server));
    assert_eq!(class("93.184.216.34"), Some(Class::Server));
    assert_eq!(class("64:ff9b::5db8:d822"), Some(Class::Server));
    assert_eq!(class("10.9.3.2"), Some(Class::Sandbox));
}

proptest! {
    #[test]
    fn what_embeds_a_forbidden_address_is_forbidden(v4: u32, low: u64) {
        let v4 = Ipv4Addr::from_bits(v4);
        let [a, b] = [(v4.to_bits() >> 16), v4.to_bits() & 0xffff].map(|half| u16::try_from(half).unwrap());
        let inner = forbidden(v4.into(), &Openings::default(), &Surroundings::default());
        let low = low.to_be_bytes();
        let seg = |i: usize| u16::from_be_bytes([low[i], low[i + 1]]);
        for address in [
            Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, a, b),
            Ipv6Addr::new(0x2002, a, b, seg(0), 1, seg(2), seg(4), seg(6)),
            Ipv6Addr::new(0x2001, 0, 0x808, 0x808, seg(0), seg(2), !a, !b),
            Ipv6Addr::new(0x2a00, seg(0), seg(2), seg(4), 0, 0x5efe, a, b),
        ] {
            let outer = forbidden(address.into(), &Openings::default(), &Surroundings::default());
            prop_assert!(inner.is_none() || outer.is_some(), "{} in {}", v4, address);
        }
        prop_assert_eq!(IpAddr::V6(v4.to_ipv6_mapped()).to_canonical(), IpAddr::V4(v4));
    }

    #[test]
    fn the_standard_library_agrees(v4: u32) {
        let address = Ipv4Addr::from_bits(v4);
        let special = address.is_private() || address.is_loopback() || address.is_link_local() || address.is_broadcast()
            || address.is_multicast() || address.is_documentation() || address.octets()[0] == 0;
        let class = forbidden(address.into(), &Openings::default(), &Surroundings::default());
        prop_assert!(!special || class.is_some());
    }
}
