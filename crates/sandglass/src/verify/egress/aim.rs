//! What an attack is made of: words to get out, and the ways that are tried, in an order.

use std::net::{IpAddr, Ipv4Addr};

use sandglass_engine::network::{AIRLOCK_ADDRESS, DNS_PORT};
use sandglass_proto::leak::Leak;

use super::super::yard::{Nonce, Witness};
use super::wire::{self, A, query_name};

/// What is tried at once; the next steps follow when all of it was.
#[derive(Debug)]
pub(super) enum Step {
    /// By a program inside, as root.
    Inside(Vec<Leak>),
    /// On the sandbox's own link, as its kernel could.
    OnLink(Vec<Vec<u8>>),
}

/// What attacks know of what is around them, and the words that they are to get out.
#[derive(Debug)]
pub(super) struct Aim<'a> {
    witness: &'a Witness,
    /// Every address of the machine that the server runs on.
    pub(super) server: &'a [IpAddr],
    /// The id of another sandbox.
    pub(super) peer: &'a str,
    words: Vec<(String, Nonce)>,
}

impl<'a> Aim<'a> {
    pub(super) const fn new(witness: &'a Witness, server: &'a [IpAddr], peer: &'a str) -> Self {
        Self { witness, server, peer, words: Vec::new() }
    }

    /// A word for one way, which a person knows by this name.
    pub(super) fn word(&mut self, way: impl Into<String>) -> String {
        let nonce = self.witness.nonce();
        let word = nonce.to_string();
        self.words.push((way.into(), nonce));
        word
    }

    /// The words that were given out, by their ways.
    pub(super) fn into_words(self) -> Vec<(String, Nonce)> {
        self.words
    }

    /// A request of HTTP to an address.
    pub(super) fn get(&mut self, to: &str, host: &str) -> Leak {
        let word = self.word(format!("HTTP to {to} for {}", host.escape_default()));
        tcp(to, wire::get(host, &word))
    }

    /// A ClientHello to an address.
    pub(super) fn hello(&mut self, to: Ipv4Addr, name: &str) -> Leak {
        let word = self.word(format!("TLS to {to} for {}", name.escape_default()));
        tcp(&format!("{to}:443"), wire::hello(name, &word))
    }

    /// Bytes without a meaning, over TCP.
    pub(super) fn bytes(&mut self, to: &str) -> Leak {
        let word = self.word(format!("TCP to {to}"));
        tcp(to, format!("{word}\r\n\r\n").into_bytes())
    }

    /// A datagram without a meaning.
    pub(super) fn datagram(&mut self, to: &str) -> Leak {
        let word = self.word(format!("UDP to {to}"));
        Leak::Udp { to: to.to_owned(), send: word.into_bytes() }
    }
}

/// Bytes over TCP.
pub(super) fn tcp(to: &str, send: Vec<u8>) -> Leak {
    Leak::Tcp { to: to.to_owned(), send, one_by_one: false }
}

/// A query to the sandbox's own name service.
pub(super) fn dns(query: Vec<u8>) -> Leak {
    Leak::Udp { to: format!("{AIRLOCK_ADDRESS}:{DNS_PORT}"), send: query }
}

/// An ordinary question for the address of a name, as the first step of what follows.
pub(super) fn resolve(names: &[&str]) -> Step {
    Step::Inside(names.iter().map(|name| dns(query_name(name, A))).collect())
}
