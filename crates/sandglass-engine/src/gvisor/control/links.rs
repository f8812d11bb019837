//! The interfaces that a guest is started with, in the words of `runsc`'s control socket.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

use crate::network::{AIRLOCK_ADDRESS, AIRLOCK_MAC, GUEST_ADDRESS, GUEST_MAC, PREFIX_LEN};

/// Bytes of a packet on the link, as the kernel sets it for such pairs of links.
const MTU: u32 = 1500;

/// Longest segment that is passed whole, in bytes. It needs the header that [`sandglass_linux::packet`] asks for;
/// one without the other passes nothing.
const MAX_SEGMENT: u32 = 65_536;

/// `config.QDiscFIFO`, which `runsc` has as its default.
const FIFO: u8 = 1;

/// The argument of `Network.CreateLinksAndRoutes`: loopback, and `eth0` on the packet socket that goes with the call
/// if there is a network. Nothing of IPv6, which the airlock does not carry.
///
/// Byte arrays are written as arrays of numbers, which Go's decoder takes as well as base64.
pub(super) fn arguments(network: bool) -> Value {
    let loopback = json!({
        "Name": "lo",
        "Addresses": [{"Address": "127.0.0.1", "PrefixLen": 8}],
        "Routes": [route(Ipv4Addr::new(127, 0, 0, 0), 8, None)],
        "GVisorGRO": false,
    });
    let link = json!({
        "Name": "eth0",
        "InterfaceIndex": 0,
        "MTU": MTU,
        "Addresses": [{"Address": GUEST_ADDRESS, "PrefixLen": PREFIX_LEN}],
        "Routes": [route(network_of(GUEST_ADDRESS, PREFIX_LEN), PREFIX_LEN, None)],
        "GSOMaxSize": MAX_SEGMENT,
        "GVisorGSOEnabled": false,
        "GVisorGRO": false,
        "TXChecksumOffload": false,
        "RXChecksumOffload": true,
        "LinkAddress": GUEST_MAC.0,
        "QDisc": FIFO,
        "Neighbors": [{"IP": AIRLOCK_ADDRESS, "HardwareAddr": AIRLOCK_MAC.0}],
        "NumChannels": 1,
        "ProcessorsPerChannel": 0,
    });
    let nowhere = json!({"Route": {"Destination": {"IP": "", "Mask": null}, "Gateway": ""}, "Name": ""});
    let gateway = json!({"Route": route(Ipv4Addr::UNSPECIFIED, 0, Some(AIRLOCK_ADDRESS)), "Name": "eth0"});
    json!({
        "LoopbackLinks": [loopback],
        "FDBasedLinks": if network { json!([link]) } else { Value::Null },
        "XDPLinks": null,
        "Defaultv4Gateway": if network { gateway } else { nowhere.clone() },
        "Defaultv6Gateway": nowhere,
        "PCAP": false,
        "LogPackets": false,
        "NATBlob": false,
        // Connections do not survive a checkpoint; without this, one open connection makes it fail.
        "DisconnectOk": true,
    })
}

fn route(destination: Ipv4Addr, prefix_len: u8, gateway: Option<Ipv4Addr>) -> Value {
    let gateway = gateway.map_or_else(String::new, |address| address.to_string());
    json!({
        "Destination": {"IP": destination, "Mask": mask(prefix_len).octets()},
        "Gateway": gateway,
    })
}

fn mask(prefix_len: u8) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::MAX.checked_shl(32 - u32::from(prefix_len)).unwrap_or(0))
}

fn network_of(address: Ipv4Addr, prefix_len: u8) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits() & mask(prefix_len).to_bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_networks_fit_their_lengths() {
        let masks = [(0, [0, 0, 0, 0]), (8, [255, 0, 0, 0]), (30, [255, 255, 255, 252]), (32, [255; 4])];
        for (len, octets) in masks {
            assert_eq!(mask(len).octets(), octets);
        }
        assert_eq!(network_of(Ipv4Addr::new(10, 11, 12, 2), 30), Ipv4Addr::new(10, 11, 12, 0));
    }

    #[test]
    fn without_a_network_there_is_loopback_and_no_way_out() {
        let alone = arguments(false);
        assert_eq!(alone["LoopbackLinks"].as_array().unwrap().len(), 1);
        assert_eq!(alone["FDBasedLinks"], Value::Null);
        assert_eq!(alone["Defaultv4Gateway"]["Name"], "");
    }

    #[test]
    fn the_only_way_out_is_the_airlock() {
        let joined = arguments(true);
        assert_eq!(joined["FDBasedLinks"].as_array().unwrap().len(), 1);
        let link = &joined["FDBasedLinks"][0];
        assert_eq!(link["Addresses"], json!([{"Address": "10.11.12.2", "PrefixLen": 30}]));
        let only =
            json!([{"Destination": {"IP": "10.11.12.0", "Mask": [255, 255, 255, 252]}, "Gateway": ""}]);
        assert_eq!(link["Routes"], only);
        assert_eq!(link["Neighbors"], json!([{"IP": "10.11.12.1", "HardwareAddr": [2, 10, 0, 10, 0, 1]}]));
        assert_eq!(joined["Defaultv4Gateway"]["Route"]["Gateway"], "10.11.12.1");
        assert_eq!(joined["Defaultv6Gateway"]["Name"], "");
    }
}
