//! Two network namespaces that are joined by a link, for what measures or attacks in a network of its own.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;

use sandglass_linux::namespace::Netns;
use sandglass_linux::netlink::{Mac, Rtnetlink, VethPeer};

const NEAR_MAC: Mac = Mac([0x02, 0x0b, 0, 0, 0, 1]);
const FAR_MAC: Mac = Mac([0x02, 0x0b, 0, 0, 0, 2]);

/// One end.
pub(crate) struct End<'a> {
    pub(crate) netns: &'a Netns,
    /// What the interface is called there.
    pub(crate) name: &'a str,
    pub(crate) address: Ipv4Addr,
}

/// Makes the link, and sets up both ends of it and the loopback interface beside each.
///
/// # Errors
/// A name is taken, or there is no privilege.
pub(crate) fn join(near: &End<'_>, far: &End<'_>, prefix_len: u8) -> io::Result<()> {
    near.netns.run(|| {
        let peer = VethPeer { name: far.name, mac: FAR_MAC, netns: far.netns.as_fd() };
        Rtnetlink::open()?.add_veth(near.name, NEAR_MAC, &peer)
    })??;
    [near, far].into_iter().try_for_each(|end| {
        end.netns.run(|| {
            let mut netlink = Rtnetlink::open()?;
            let (loopback, link) = (netlink.index("lo")?, netlink.index(end.name)?);
            netlink.set_up(loopback)?;
            netlink.add_address(link, end.address, prefix_len)?;
            netlink.set_up(link)
        })?
    })
}
