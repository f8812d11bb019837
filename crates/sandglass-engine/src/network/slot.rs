//! One slot: made, found again, used, removed.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, SocketFlags, SocketType, bind, ipproto, listen, socket_with, sockopt,
};
use sandglass_egress::filter_log::{GROUP, SNAPLEN};
use sandglass_egress::policy::Openings;
use sandglass_linux::namespace::{Netns, PinFolder};
use sandglass_linux::netlink::{Rtnetlink, VethPeer, packet_log};
use sandglass_linux::{nft, packet};
use sandglass_types::InstanceId;

use super::plan::{AIRLOCK_ADDRESS, AIRLOCK_MAC, GUEST_ADDRESS, GUEST_MAC, INNER_LINK, PREFIX_LEN};
use super::ruleset::{Filter, ruleset};
use super::{DNS_PORT, EGRESS_PORT, NetworkError, SlotName, step};
use crate::engine::AirlockSocket;

/// How many connections may wait to be accepted by the name service.
const DNS_BACKLOG: u16 = 64;

/// The same for all other connections. The rules bound them; the kernel allows no more than this either.
const EGRESS_BACKLOG: u16 = 4096;

/// Buffer of each direction of a packet socket, in bytes: what `runsc` gives the ones that it opens itself.
const LINK_BUFFER: u32 = 4 << 20;

/// How much of what the packet filter logs may wait for the server, in bytes: a few hundred packets.
const LOG_BUFFER: usize = 64 << 10;

/// How many names are tried before it must be something else that makes them look taken.
const NAME_ATTEMPTS: usize = 8;

/// How long a new link may take to carry packets, and how often that is looked at.
const LINK_PATIENCE: Duration = Duration::from_secs(5);
const LINK_INTERVAL: Duration = Duration::from_micros(200);

/// Tries, in a namespace of its own, whether the kernel can log what a packet filter holds up. Where it can't, nothing of
/// that has a receipt.
///
/// # Errors
/// The step that failed.
pub fn try_log() -> Result<(), NetworkError> {
    let netns = Netns::create().map_err(step("make a namespace"))?;
    nft::apply(&netns, &ruleset("eth0", &Filter::new(&Openings::default())))?;
    let opened = netns.run(|| make_socket(AirlockSocket::FilterLog)).flatten();
    opened.map(drop).map_err(step("receive what is logged"))
}

/// Settings of the inner namespace, below `/proc/sys/net`. Those of `all` and `default` are in force before there is
/// an interface, which then starts with them.
const INNER_SETTINGS: &[(&str, &str)] =
    &[("ipv6/conf/all/disable_ipv6", "1"), ("ipv6/conf/default/disable_ipv6", "1")];

/// Settings of the airlock. A new namespace inherits those of IPv4 from the machine's own, which may route.
const AIRLOCK_SETTINGS: &[(&str, &str)] = &[
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
    ("ipv6/conf/all/forwarding", "0"),
    ("ipv4/ip_forward", "0"),
    ("ipv4/icmp_echo_ignore_all", "1"),
    ("ipv4/conf/all/rp_filter", "1"),
    ("ipv4/conf/default/rp_filter", "1"),
    ("ipv4/conf/all/accept_redirects", "0"),
    ("ipv4/conf/default/accept_redirects", "0"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
    ("ipv4/conf/all/accept_source_route", "0"),
    ("ipv4/conf/default/accept_source_route", "0"),
    ("ipv4/conf/all/accept_local", "0"),
    ("ipv4/conf/default/accept_local", "0"),
    ("ipv4/conf/all/route_localnet", "0"),
    ("ipv4/conf/default/route_localnet", "0"),
    ("ipv4/conf/all/proxy_arp", "0"),
    ("ipv4/conf/default/proxy_arp", "0"),
];

/// Settings of connection tracking, which exists only once the rules ask for it: a name query is over in seconds, and
/// what is remembered of it costs the machine memory.
const TRACKING_SETTINGS: &[(&str, &str)] =
    &[("netfilter/nf_conntrack_udp_timeout", "10"), ("netfilter/nf_conntrack_udp_timeout_stream", "10")];

/// The network of one sandbox. Holding one keeps no namespace alive: the pins do, until [`Slot::destroy`].
#[derive(Debug)]
pub struct Slot {
    pins: Arc<PinFolder>,
    name: SlotName,
}

impl Slot {
    /// Makes a slot that no sandbox has used. `filter` stays what it is for as long as the slot exists.
    ///
    /// # Errors
    /// The step that failed; nothing is left of it.
    pub fn create(
        pins: &Arc<PinFolder>,
        instance: &InstanceId,
        filter: &Filter,
    ) -> Result<Self, NetworkError> {
        let inner = Netns::create().map_err(step("make the inner namespace"))?;
        let airlock = Netns::create().map_err(step("make the airlock"))?;
        sandglass_failpoint::hit("network.slot.pin").map_err(step("pin the inner namespace"))?;
        let slot = Self::pin(pins, instance, &inner, &airlock)?;
        match slot.set_up(&inner, &airlock, filter) {
            Ok(()) => Ok(slot),
            Err(error) => {
                if let Err(error) = slot.destroy() {
                    tracing::warn!(slot = %slot.name, %error, "a slot that was half made is left");
                }
                Err(error)
            }
        }
    }

    /// Finds a slot again by its name.
    ///
    /// # Errors
    /// One of its namespaces is not pinned: destroy it.
    pub fn reopen(pins: &Arc<PinFolder>, name: &SlotName) -> Result<Self, NetworkError> {
        for pin in [name.inner_pin(), name.airlock_pin()] {
            pins.netns(&pin).map_err(step("open a namespace of the slot"))?;
        }
        Ok(Self::named(pins, name.clone()))
    }

    /// The slot of that name, whatever is left of it: for [`Slot::destroy`].
    #[must_use]
    pub fn named(pins: &Arc<PinFolder>, name: SlotName) -> Self {
        Self { pins: Arc::clone(pins), name }
    }

    /// Every slot of an instance of which something is left, by the pins.
    ///
    /// # Errors
    /// The folder of pins can't be read.
    pub fn list(pins: &PinFolder, instance: &InstanceId) -> Result<Vec<SlotName>, NetworkError> {
        let pins = pins.names().map_err(step("list the pinned namespaces"))?;
        let mut names: Vec<_> = pins
            .iter()
            .filter_map(|pin| SlotName::of_pin(pin))
            .filter(|name| name.instance() == instance)
            .collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Its name: all that must be remembered to find it again.
    #[must_use]
    pub const fn name(&self) -> &SlotName {
        &self.name
    }

    /// Where the inner namespace is pinned, for an OCI spec.
    ///
    /// # Errors
    /// None: the name was checked.
    pub fn inner_path(&self) -> Result<PathBuf, NetworkError> {
        self.pins.path(&self.name.inner_pin()).map_err(step("name the inner namespace"))
    }

    /// Numbers of the two namespaces in `/proc`, inner and airlock, for an audit.
    ///
    /// # Errors
    /// One of them is not pinned.
    pub fn inodes(&self) -> Result<(u64, u64), NetworkError> {
        let inode = |pin: String| self.pins.netns(&pin)?.inode();
        let both =
            inode(self.name.inner_pin()).and_then(|inner| Ok((inner, inode(self.name.airlock_pin())?)));
        both.map_err(step("open a namespace of the slot"))
    }

    /// Makes sockets inside the airlock, all or none: close-on-exec, not blocking. They keep the airlock alive, so they must
    /// be closed for the slot to be gone.
    ///
    /// # Errors
    /// There is no such slot, or the port of one is taken by an earlier socket.
    pub fn airlock_sockets(&self, sockets: &[AirlockSocket]) -> Result<Vec<OwnedFd>, NetworkError> {
        let airlock = self.airlock().map_err(step("open the airlock"))?;
        // To enter it takes a thread, so all are made at once.
        let made = airlock.run(|| sockets.iter().map(|socket| make_socket(*socket)).collect());
        made.flatten().map_err(step("make sockets in the airlock"))
    }

    /// Hands the guest's interface to a network stack outside the kernel, which then has its address to itself: the
    /// kernel would answer in its place. May be repeated. The socket keeps the inner namespace alive.
    ///
    /// # Errors
    /// There is no such slot, or the kernel refused.
    pub fn guest_link(&self) -> Result<OwnedFd, NetworkError> {
        let inner = self.pins.netns(&self.name.inner_pin()).map_err(step("open the inner namespace"))?;
        let opened = inner.run(|| {
            let mut netlink = Rtnetlink::open()?;
            let index = netlink.index(INNER_LINK)?;
            delete_address(&mut netlink, index, GUEST_ADDRESS)?;
            packet::open(INNER_LINK, LINK_BUFFER)
        });
        opened.flatten().map_err(step("open the guest's interface"))
    }

    /// Removes all that is left of the slot. The kernel ends each namespace once the last process and the last socket
    /// in it are gone; the guest is cut off at once.
    ///
    /// # Errors
    /// The step that failed; call again.
    pub fn destroy(&self) -> Result<(), NetworkError> {
        sandglass_failpoint::hit("network.release.cut").map_err(step("cut the guest off"))?;
        match self.airlock() {
            Ok(airlock) => self.cut(&airlock).map_err(step("cut the guest off"))?,
            // Not pinned, or never mounted.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {}
            Err(error) => return Err(step("open the airlock")(error)),
        }
        sandglass_failpoint::hit("network.release.unpin").map_err(step("unpin a namespace"))?;
        for pin in [self.name.inner_pin(), self.name.airlock_pin()] {
            self.pins.unpin(&pin).map_err(step("unpin a namespace"))?;
        }
        Ok(())
    }

    fn pin(
        pins: &Arc<PinFolder>,
        instance: &InstanceId,
        inner: &Netns,
        airlock: &Netns,
    ) -> Result<Self, NetworkError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let name = SlotName::random(instance);
            match pins.pin(inner, &name.inner_pin()) {
                Ok(()) => {
                    let slot = Self::named(pins, name);
                    let pinned = sandglass_failpoint::hit("network.slot.pin_airlock").map_err(Into::into);
                    let pinned = pinned.and_then(|()| pins.pin(airlock, &slot.name.airlock_pin()));
                    if let Err(error) = pinned {
                        // Only the pin that was made here, in case the other one is somebody's.
                        let _ = pins.unpin(&slot.name.inner_pin());
                        return Err(step("pin the airlock")(error));
                    }
                    return Ok(slot);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempts < NAME_ATTEMPTS => {}
                Err(error) => return Err(step("pin the inner namespace")(error)),
            }
        }
    }

    /// Seals the airlock before a link in it is up, so no packet ever passes unfiltered.
    fn set_up(&self, inner: &Netns, airlock: &Netns, filter: &Filter) -> Result<(), NetworkError> {
        let link = self.name.airlock_link();
        airlock.run(|| write_settings(AIRLOCK_SETTINGS)).flatten().map_err(step("configure the airlock"))?;
        sandglass_failpoint::hit("network.slot.seal").map_err(step("seal the airlock"))?;
        nft::apply(airlock, &ruleset(&link, filter))?;
        sandglass_failpoint::hit("network.slot.inside").map_err(step("set up the guest's interface"))?;
        let inside = inner.run(|| {
            write_settings(INNER_SETTINGS)?;
            let mut netlink = Rtnetlink::open()?;
            let peer = VethPeer { name: &link, mac: AIRLOCK_MAC, netns: airlock.as_fd() };
            netlink.add_veth(INNER_LINK, GUEST_MAC, &peer)?;
            let index = netlink.index(INNER_LINK)?;
            netlink.add_address(index, GUEST_ADDRESS, PREFIX_LEN)?;
            netlink.set_up(netlink.index("lo")?)?;
            netlink.set_up(index)?;
            netlink.add_permanent_neighbour(index, AIRLOCK_ADDRESS, AIRLOCK_MAC)?;
            netlink.add_default_route(index, AIRLOCK_ADDRESS)
        });
        inside.flatten().map_err(step("set up the guest's interface"))?;
        sandglass_failpoint::hit("network.slot.outside").map_err(step("set up the airlock's interface"))?;
        let outside = airlock.run(|| {
            write_settings(TRACKING_SETTINGS)?;
            let mut netlink = Rtnetlink::open()?;
            let index = netlink.index(&link)?;
            netlink.add_address(index, AIRLOCK_ADDRESS, PREFIX_LEN)?;
            netlink.set_up(index)?;
            netlink.add_permanent_neighbour(index, GUEST_ADDRESS, GUEST_MAC)
        });
        outside.flatten().map_err(step("set up the airlock's interface"))?;
        sandglass_failpoint::hit("network.slot.ready").map_err(step("bring the link up"))?;
        // The end that was set up second carries packets at once, although the kernel says so only a second later.
        inner.run(|| wait_until_operational(INNER_LINK)).flatten().map_err(step("bring the link up"))
    }

    fn airlock(&self) -> io::Result<Netns> {
        self.pins.netns(&self.name.airlock_pin())
    }

    /// Without its address the airlock takes nothing from the guest and reaches it no more. The link itself goes with
    /// the namespaces: to remove it here would take the kernel some 30 ms.
    fn cut(&self, airlock: &Netns) -> io::Result<()> {
        let link = self.name.airlock_link();
        airlock.run(|| {
            let mut netlink = Rtnetlink::open()?;
            let index = match netlink.index(&link) {
                Err(error) if is(&error, Errno::NODEV) => return Ok(()),
                index => index?,
            };
            delete_address(&mut netlink, index, AIRLOCK_ADDRESS)
        })?
    }
}

/// Takes an address off an interface; `Ok` if it is not there, or the interface has just gone with its other end.
fn delete_address(netlink: &mut Rtnetlink, index: u32, address: Ipv4Addr) -> io::Result<()> {
    match netlink.delete_address(index, address, PREFIX_LEN) {
        Err(error) if is(&error, Errno::ADDRNOTAVAIL) || is(&error, Errno::NODEV) => Ok(()),
        result => result,
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Writes settings of the calling thread's namespace. One that does not exist belongs to a part of the kernel that
/// does not run here.
fn write_settings(settings: &[(&str, &str)]) -> io::Result<()> {
    for (name, value) in settings {
        match fs_err::write(format!("/proc/sys/net/{name}"), value) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
    }
    Ok(())
}

/// Waits until packets pass: before that they are lost, which a fresh sandbox's first query would be.
fn wait_until_operational(name: &str) -> io::Result<()> {
    let mut netlink = Rtnetlink::open()?;
    let deadline = Instant::now() + LINK_PATIENCE;
    loop {
        if netlink.links()?.iter().any(|link| link.name == name && link.operational) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(LINK_INTERVAL);
    }
}

fn make_socket(socket: AirlockSocket) -> io::Result<OwnedFd> {
    match socket {
        AirlockSocket::DnsUdp => {
            let fd = open(SocketType::DGRAM, ipproto::UDP)?;
            bind(&fd, &SocketAddrV4::new(AIRLOCK_ADDRESS, DNS_PORT))?;
            Ok(fd)
        }
        AirlockSocket::DnsTcp => listening(DNS_PORT, DNS_BACKLOG),
        AirlockSocket::TcpEgress => listening(EGRESS_PORT, EGRESS_BACKLOG),
        AirlockSocket::FilterLog => packet_log(GROUP, SNAPLEN, LOG_BUFFER),
        AirlockSocket::TcpToGuest => open(SocketType::STREAM, ipproto::TCP),
    }
}

fn listening(port: u16, backlog: u16) -> io::Result<OwnedFd> {
    let fd = open(SocketType::STREAM, ipproto::TCP)?;
    // Connections of a server that died may linger.
    sockopt::set_socket_reuseaddr(&fd, true)?;
    bind(&fd, &SocketAddrV4::new(AIRLOCK_ADDRESS, port))?;
    listen(&fd, backlog.into())?;
    Ok(fd)
}

fn open(kind: SocketType, protocol: Protocol) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::INET, kind, flags, Some(protocol))?)
}
