//! The packet filter of an airlock, as text.

use super::plan::{AIRLOCK_ADDRESS, DNS_PORT, GUEST_ADDRESS};

/// The rules that seal an airlock whose link is `link`.
///
/// `guard` decides before anything else in the kernel looks at where a packet goes: with no route to what the guest
/// wants, later chains would never see most of it. It comes after connection tracking (priority -200), so that
/// answers to the server's own connections are known, and before the redirection (-100), so that it sees what the
/// guest asked for. A packet that it drops is not tracked, so only name queries can fill the table of connections,
/// and those are limited.
///
/// `output` lets the server reach the guest and nothing else, the resets of `guard` included.
#[must_use]
pub fn ruleset(link: &str) -> String {
    format!(
        r#"table inet sandglass {{
	chain guard {{
		type filter hook prerouting priority -150; policy drop;
		iifname != "{link}" drop
		meta nfproto != ipv4 drop
		ip saddr != {GUEST_ADDRESS} drop
		ct direction reply ct state established accept
		udp dport {DNS_PORT} ct state new limit rate over 200/second burst 400 packets drop
		udp dport {DNS_PORT} accept
		tcp dport {DNS_PORT} ct state new limit rate over 50/second burst 100 packets drop
		tcp dport {DNS_PORT} accept
		meta l4proto tcp reject with tcp reset
	}}

	chain redirection {{
		type nat hook prerouting priority -100; policy accept;
		udp dport {DNS_PORT} redirect to :{DNS_PORT}
		tcp dport {DNS_PORT} redirect to :{DNS_PORT}
	}}

	chain input {{
		type filter hook input priority 0; policy drop;
		iifname != "{link}" drop
		ct direction reply ct state established accept
		ip daddr {AIRLOCK_ADDRESS} udp dport {DNS_PORT} accept
		ip daddr {AIRLOCK_ADDRESS} tcp dport {DNS_PORT} accept
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_reviewed() {
        insta::assert_snapshot!(ruleset("sginst0001abcde"), @r#"
table inet sandglass {
	chain guard {
		type filter hook prerouting priority -150; policy drop;
		iifname != "sginst0001abcde" drop
		meta nfproto != ipv4 drop
		ip saddr != 10.11.12.2 drop
		ct direction reply ct state established accept
		udp dport 53 ct state new limit rate over 200/second burst 400 packets drop
		udp dport 53 accept
		tcp dport 53 ct state new limit rate over 50/second burst 100 packets drop
		tcp dport 53 accept
		meta l4proto tcp reject with tcp reset
	}

	chain redirection {
		type nat hook prerouting priority -100; policy accept;
		udp dport 53 redirect to :53
		tcp dport 53 redirect to :53
	}

	chain input {
		type filter hook input priority 0; policy drop;
		iifname != "sginst0001abcde" drop
		ct direction reply ct state established accept
		ip daddr 10.11.12.1 udp dport 53 accept
		ip daddr 10.11.12.1 tcp dport 53 accept
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
}
