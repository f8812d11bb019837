//! The packet filter of an airlock, as text.

use sandglass_egress::filter_log::{GROUP, SNAPLEN, Why};
use sandglass_egress::policy::{Barrier, Openings};
use sandglass_types::net::Cidr;

use super::plan::{
    AIRLOCK_ADDRESS, AIRLOCK_NETWORK, DNS_PORT, EDGE_PORT, EGRESS_PORT, GUEST_ADDRESS, PREFIX_LEN,
};

/// What the packet filter of an airlock holds up. A slot keeps its own for as long as it exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// Addresses that nobody is to reach.
    pub barrier: Barrier,
    /// Most connections of the guest at a time, those for names not counted.
    pub connections: u32,
    /// Most connections that it may open in a second. After a silence, as many as in five seconds may come at once.
    pub per_second: u32,
    /// Whether what is held up is logged, for its receipts. See [`super::try_log`].
    pub log: bool,
}

impl Filter {
    /// Behind what the operator left closed, with the numbers that are the default.
    #[must_use]
    pub fn new(openings: &Openings) -> Self {
        Self { barrier: openings.barrier(), connections: 1024, per_second: 200, log: true }
    }
}

/// The rules that seal an airlock whose link is `link`.
///
/// `guard` decides before anything else in the kernel looks at where a packet goes: with no route to what the guest
/// wants, later chains would never see most of it. It comes after connection tracking (priority -200), so that
/// answers to the server's own connections are known, and before the redirection (-100), so that it sees what the
/// guest asked for. A packet that it drops is not tracked, so only name queries and connections that are let in can fill
/// the table of connections, and both are limited.
///
/// What the barrier holds up is reset here, whatever the server would say. So are the slot's own addresses, also where
/// the operator opened the range that they are of; but for one port of the airlock's, on which names of the server's own
/// domain are asked for. It leads to the server like every address that is not held up, and the server decides.
///
/// What is refused for good is logged to [`GROUP`], whoever listens there. What comes too fast is not: it is sent again.
///
/// `output` lets the server reach the guest and nothing else, the resets of `guard` included.
#[must_use]
pub fn ruleset(link: &str, filter: &Filter) -> String {
    let Filter { barrier, connections, per_second, log } = filter;
    let log = |why: Why| {
        if *log {
            format!("log prefix \"{}\" group {GROUP} snaplen {SNAPLEN} ", why.prefix())
        } else {
            String::new()
        }
    };
    let (never_log, source_log, connections_log) = (log(Why::Never), log(Why::Source), log(Why::Connections));
    let burst = per_second.saturating_mul(5);
    let never = set(&barrier.never);
    let closed = set(&barrier.closed);
    let except = match barrier.opened.as_slice() {
        [] => String::new(),
        opened => format!(" ip daddr != {}", set(opened)),
    };
    format!(
        r#"table inet sandglass {{
	chain guard {{
		type filter hook prerouting priority -150; policy drop;
		iifname != "{link}" drop
		meta nfproto != ipv4 drop
		ip saddr != {GUEST_ADDRESS} {source_log}drop
		ct direction reply ct state established accept
		udp dport {DNS_PORT} ct state new limit rate over 200/second burst 400 packets drop
		udp dport {DNS_PORT} accept
		tcp dport {DNS_PORT} ct state new limit rate over 50/second burst 100 packets drop
		tcp dport {DNS_PORT} accept
		meta l4proto udp {never_log}drop
		meta l4proto != tcp drop
		ip daddr {AIRLOCK_ADDRESS} tcp dport {EDGE_PORT} goto connections
		ip daddr {AIRLOCK_NETWORK}/{PREFIX_LEN} {never_log}reject with tcp reset
		ip daddr {never} {never_log}reject with tcp reset
		ip daddr {closed}{except} {never_log}reject with tcp reset
		goto connections
	}}

	chain connections {{
		ct state new limit rate over {per_second}/second burst {burst} packets drop
		ct state new ct count over {connections} {connections_log}reject with tcp reset
		accept
	}}

	chain redirection {{
		type nat hook prerouting priority -100; policy accept;
		udp dport {DNS_PORT} redirect to :{DNS_PORT}
		tcp dport {DNS_PORT} redirect to :{DNS_PORT}
		meta l4proto tcp redirect to :{EGRESS_PORT}
	}}

	chain input {{
		type filter hook input priority 0; policy drop;
		iifname != "{link}" drop
		ct direction reply ct state established accept
		ip daddr {AIRLOCK_ADDRESS} udp dport {DNS_PORT} accept
		ip daddr {AIRLOCK_ADDRESS} tcp dport {{ {DNS_PORT}, {EGRESS_PORT} }} accept
	}}

	chain forward {{
		type filter hook forward priority 0; policy drop;
	}}

	chain output {{
		type filter hook output priority 0; policy drop;
		oifname != "{link}" drop
		ip daddr {GUEST_ADDRESS} meta l4proto tcp accept
		ip daddr {GUEST_ADDRESS} udp sport {DNS_PORT} accept
	}}
}}
"#
    )
}

/// A set of ranges, of which there is at least one.
fn set(ranges: &[Cidr]) -> String {
    let ranges: Vec<_> = ranges.iter().map(Cidr::to_string).collect();
    format!("{{ {} }}", ranges.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_reviewed() {
        let filter = Filter::new(&Openings::default());
        insta::assert_snapshot!(ruleset("sginst0001abcde", &filter), @r#"
table inet sandglass {
	chain guard {
		type filter hook prerouting priority -150; policy drop;
		iifname != "sginst0001abcde" drop
		meta nfproto != ipv4 drop
		ip saddr != 10.11.12.2 log prefix "source" group 1 snaplen 80 drop
		ct direction reply ct state established accept
		udp dport 53 ct state new limit rate over 200/second burst 400 packets drop
		udp dport 53 accept
		tcp dport 53 ct state new limit rate over 50/second burst 100 packets drop
		tcp dport 53 accept
		meta l4proto udp log prefix "never" group 1 snaplen 80 drop
		meta l4proto != tcp drop
		ip daddr 10.11.12.1 tcp dport 80 goto connections
		ip daddr 10.11.12.0/30 log prefix "never" group 1 snaplen 80 reject with tcp reset
		ip daddr { 0.0.0.0/8, 100.100.100.200/32, 127.0.0.0/8, 168.63.129.16/32, 169.254.0.0/16, 192.0.0.0/24, 192.31.196.0/24, 192.52.193.0/24, 192.88.99.0/24, 192.175.48.0/24, 224.0.0.0/4, 240.0.0.0/4 } log prefix "never" group 1 snaplen 80 reject with tcp reset
		ip daddr { 10.0.0.0/8, 100.64.0.0/10, 172.16.0.0/12, 192.0.2.0/24, 192.168.0.0/16, 198.18.0.0/15, 198.51.100.0/24, 203.0.113.0/24 } log prefix "never" group 1 snaplen 80 reject with tcp reset
		goto connections
	}

	chain connections {
		ct state new limit rate over 200/second burst 1000 packets drop
		ct state new ct count over 1024 log prefix "connections" group 1 snaplen 80 reject with tcp reset
		accept
	}

	chain redirection {
		type nat hook prerouting priority -100; policy accept;
		udp dport 53 redirect to :53
		tcp dport 53 redirect to :53
		meta l4proto tcp redirect to :15001
	}

	chain input {
		type filter hook input priority 0; policy drop;
		iifname != "sginst0001abcde" drop
		ct direction reply ct state established accept
		ip daddr 10.11.12.1 udp dport 53 accept
		ip daddr 10.11.12.1 tcp dport { 53, 15001 } accept
	}

	chain forward {
		type filter hook forward priority 0; policy drop;
	}

	chain output {
		type filter hook output priority 0; policy drop;
		oifname != "sginst0001abcde" drop
		ip daddr 10.11.12.2 meta l4proto tcp accept
		ip daddr 10.11.12.2 udp sport 53 accept
	}
}
"#);
    }

    #[test]
    fn an_opened_range_is_an_exception_to_the_closed_ones_alone() {
        let opened: Vec<Cidr> = vec!["10.1.0.0/16".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let (with, without) = (Openings::try_from(opened).unwrap(), Openings::default());
        let text = |openings: &Openings| ruleset("x", &Filter::new(openings));
        let added = text(&with).replace(" ip daddr != { 10.1.0.0/16 } log", " log");
        assert_ne!(text(&with), text(&without));
        assert_eq!(added, text(&without));
    }

    #[test]
    fn without_a_log_all_is_held_up_the_same() {
        let logged = Filter::new(&Openings::default());
        let silent = Filter { log: false, ..logged.clone() };
        let mut text = ruleset("x", &logged);
        for why in Why::ALL {
            let log = format!("log prefix \"{}\" group 1 snaplen 80 ", why.prefix());
            assert!(text.contains(&log));
            text = text.replace(&log, "");
        }
        assert_eq!(ruleset("x", &silent), text);
    }

    #[test]
    fn an_operator_can_allow_more_connections() {
        let filter = Filter { connections: 4096, per_second: 300, ..Filter::new(&Openings::default()) };
        let text = ruleset("x", &filter);
        assert!(
            text.contains("limit rate over 300/second burst 1500 packets")
                && text.contains("ct count over 4096 ")
        );
    }
}
