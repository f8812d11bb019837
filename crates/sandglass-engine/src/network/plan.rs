//! Names and addresses, the same for every reader of them.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use rand::RngExt as _;
use sandglass_linux::netlink::Mac;
use sandglass_types::InstanceId;

use super::NetworkError;

/// The guest's address, in every sandbox.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 11, 12, 2);

/// The airlock's address: the guest's only neighbour and its gateway.
pub const AIRLOCK_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 11, 12, 1);

/// The network of the two, in every sandbox.
pub const AIRLOCK_NETWORK: Ipv4Addr = Ipv4Addr::new(10, 11, 12, 0);

/// Length of the prefix that the two share, in bits.
pub const PREFIX_LEN: u8 = 30;

/// The guest's Ethernet address, in every sandbox. Locally administered.
pub const GUEST_MAC: Mac = Mac([0x02, 0x0a, 0x00, 0x0a, 0x00, 0x02]);

/// The airlock's Ethernet address.
pub const AIRLOCK_MAC: Mac = Mac([0x02, 0x0a, 0x00, 0x0a, 0x00, 0x01]);

/// Where the server's name service listens in the airlock, over UDP and TCP.
pub const DNS_PORT: u16 = 53;

/// Where the server listens in the airlock for all other connections of the guest, whatever their port was.
pub const EGRESS_PORT: u16 = 15001;

/// The port of [`AIRLOCK_ADDRESS`] on which names of the server's own domain are asked for.
pub(super) const EDGE_PORT: u16 = 80;

/// The interface in the inner namespace; engines look for it by this name.
pub(super) const INNER_LINK: &str = "eth0";

/// Length of the part of a name that tells slots of an instance apart. With the instance it fills the 15 characters
/// that the name of a link may have.
const SLOT_LEN: usize = 5;

const BASE36: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// Names one slot: `<instance>-<5 characters>`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotName {
    instance: InstanceId,
    slot: Box<str>,
}

impl SlotName {
    /// A fresh random name; whether it is taken shows when the slot is made.
    pub(super) fn random(instance: &InstanceId) -> Self {
        let mut rng = rand::rng();
        let slot: String =
            (0..SLOT_LEN).map(|_| char::from(BASE36[rng.random_range(0..BASE36.len())])).collect();
        Self { instance: instance.clone(), slot: slot.into() }
    }

    /// The instance that the slot belongs to.
    #[must_use]
    pub const fn instance(&self) -> &InstanceId {
        &self.instance
    }

    /// The pin of the inner namespace.
    #[must_use]
    pub fn inner_pin(&self) -> String {
        format!("{self}-in")
    }

    /// The pin of the airlock.
    #[must_use]
    pub fn airlock_pin(&self) -> String {
        format!("{self}-air")
    }

    /// The airlock's link. Instance and slot without what joins them, for lack of space.
    #[must_use]
    pub fn airlock_link(&self) -> String {
        format!("sg{}{}", self.instance, self.slot)
    }

    /// The slot that a pin belongs to.
    pub(super) fn of_pin(pin: &str) -> Option<Self> {
        pin.strip_suffix("-in").or_else(|| pin.strip_suffix("-air"))?.parse().ok()
    }
}

impl fmt::Display for SlotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.instance, self.slot)
    }
}

impl FromStr for SlotName {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let (instance, slot) = text.split_once('-').ok_or(NetworkError::Name)?;
        let instance = instance.parse().map_err(|_| NetworkError::Name)?;
        if slot.len() == SLOT_LEN && slot.bytes().all(|byte| BASE36.contains(&byte)) {
            Ok(Self { instance, slot: slot.into() })
        } else {
            Err(NetworkError::Name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_fit_the_kernel() {
        let instance = InstanceId::random();
        let name = SlotName::random(&instance);
        assert_eq!(name.to_string().parse::<SlotName>().unwrap(), name);
        assert_eq!(SlotName::of_pin(&name.inner_pin()), Some(name.clone()));
        assert_eq!(SlotName::of_pin(&name.airlock_pin()), Some(name.clone()));
        assert_eq!(name.airlock_link().len(), sandglass_linux::netlink::MAX_LINK_NAME_LEN);
        assert!(name.airlock_link().contains(instance.as_str()));
        assert_ne!(SlotName::random(&instance), name);
    }

    #[test]
    fn foreign_names_are_none() {
        for text in ["", "-", "inst0001", "inst0001-", "inst0001-abcd", "inst0001-abcdef", "inst0001-ABCDE"] {
            assert!(text.parse::<SlotName>().is_err(), "{text:?}");
        }
        for pin in ["inst0001-abcde", "inst0001-abcde-out", "inst001-abcde-in", "x-inst0001-abcde-in", "-in"]
        {
            assert_eq!(SlotName::of_pin(pin), None, "{pin:?}");
        }
    }
}
