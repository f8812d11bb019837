//! A disposable network around the servers that `verify` attacks, in which every address answers and a witness listens.
//!
//! ```text
//!  home: the server's namespace              world: all the rest
//!  yard0 203.0.113.1/30 ──────────────────── yard1 203.0.113.2/30
//!  and more addresses of the server          every address and every port ─► the witness
//! ```
//!
//! Neither namespace has another link, so nothing that is tried here reaches a network. Both go when this value, the
//! sockets and the processes in them do; no name of them is left anywhere.

mod names;
mod witness;

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use anyhow::{Context as _, bail};
use fs_err as fs;
use rustix::mount::mount_bind;
use sandglass_linux::namespace::Netns;
use sandglass_linux::netlink::Rtnetlink;

use crate::link::{End, join};

pub(super) use names::{ALIAS, ALLOWED, DENIED, REBOUND, SECOND, leading_to};
pub(super) use witness::{Nonce, Post, Sighting, Witness};

/// Where an allowed host is.
pub(super) const UPSTREAM: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);

/// Where a host is that is allowed for nobody.
pub(super) const STRANGER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 66);

/// The server's address on its link; like the others that it has, it is near no sandbox.
const HOME: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
const WORLD: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
const LINK_PREFIX: u8 = 30;

/// More addresses of the server: one that looks public, one of each kind of private range, and one that is link-local.
const MORE: [Ipv4Addr; 5] = [
    Ipv4Addr::new(203, 0, 113, 5),
    Ipv4Addr::new(10, 44, 0, 1),
    Ipv4Addr::new(172, 20, 0, 1),
    Ipv4Addr::new(192, 168, 44, 1),
    Ipv4Addr::new(169, 254, 44, 1),
];

/// Ports on which the server's machine has services, as machines have them.
pub(super) const SERVICES: [u16; 4] = [22, 80, 443, 2375];

/// What says which name servers are asked.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// What the server is configured with: it may allow everything that can be allowed, so that what holds is not the
/// operator's modesty. The addresses of the yard that stand for the internet are for documentation (RFC 5737).
pub(super) const CONFIG: &str = r#"
[egress]
open_private = ["203.0.113.0/24"]

[[egress.ceiling]]
id = "everything"
allow = "0.0.0.0/0"
ports = ["1-65535"]
"#;

/// The network.
pub(super) struct Yard {
    witness: Witness,
    /// What listens, until this goes.
    _posts: Vec<Post>,
}

impl Yard {
    /// Makes it around the calling process, whose namespace must hold nothing yet, with everything in it listening.
    /// The name service of the calling process is the witness from now on, by a file in `folder` that is mounted over
    /// `resolv.conf(5)`.
    pub(super) fn build(folder: &Path) -> anyhow::Result<Self> {
        let resolv_conf = folder.join("resolv.conf");
        fs::write(&resolv_conf, format!("nameserver {WORLD}\n"))?;
        mount_bind(&resolv_conf, RESOLV_CONF).context("the name service could not be replaced")?;
        let (home, world) = (Netns::current()?, Netns::create()?);
        let here = End { netns: &home, name: "yard0", address: HOME };
        let there = End { netns: &world, name: "yard1", address: WORLD };
        join(&here, &there, LINK_PREFIX)?;
        home.run(|| {
            let mut netlink = Rtnetlink::open()?;
            let index = netlink.index("yard0")?;
            netlink.add_default_route(index, WORLD)?;
            MORE.iter().try_for_each(|address| netlink.add_address(index, *address, 32))
        })??;
        let witness = Witness::default();
        let posts = vec![witness.take_all(&world, "yard1")?, witness.serve(&home, &SERVICES)?];
        Ok(Self { witness, _posts: posts })
    }

    /// Who says what arrived.
    pub(super) const fn witness(&self) -> &Witness {
        &self.witness
    }

    /// Every address of the server's machine.
    pub(super) fn server_addresses() -> anyhow::Result<Vec<IpAddr>> {
        let addresses = Rtnetlink::open().and_then(|mut netlink| netlink.addresses())?;
        if addresses.len() <= MORE.len() {
            bail!("the addresses of the yard are not all there: {addresses:?}");
        }
        Ok(addresses)
    }
}
