//! What the probes of `sandglass verify` try from inside a sandbox to get something out of it.
//!
//! Each says where something is sent and what. Whether it arrived, a witness outside says, and never the guest.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// One attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leak {
    /// Over a connection.
    Tcp {
        /// `ADDRESS:PORT`, with the address in any form that `inet_aton(3)` takes, or IPv6 in brackets.
        to: String,
        /// What is sent.
        send: Vec<u8>,
        /// Each byte in a segment of its own.
        #[serde(default)]
        one_by_one: bool,
    },
    /// As one datagram.
    Udp {
        /// As for TCP.
        to: String,
        /// What is sent.
        send: Vec<u8>,
    },
    /// As an echo request, by a socket that needs no privilege.
    Ping {
        /// Where to.
        to: Ipv4Addr,
        /// Its payload.
        send: Vec<u8>,
    },
    /// As an IP packet of another protocol, by a raw socket.
    Raw {
        /// Where to.
        to: Ipv4Addr,
        /// The number of the protocol.
        protocol: u8,
        /// Its payload.
        send: Vec<u8>,
    },
    /// Again and again, over one connection and another one whenever that ends, for so long.
    Stream {
        /// Where to.
        to: SocketAddr,
        /// What is sent each time.
        send: Vec<u8>,
        /// In milliseconds.
        millis: u32,
    },
    /// Over many connections that stay open until all were tried.
    Flood {
        /// Where to.
        to: SocketAddr,
        /// What is sent on each.
        send: Vec<u8>,
        /// How many.
        count: u32,
    },
}
