//! What only those know who were outside: who can say one was there.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use rand::RngExt as _;

/// A fresh one: 128 random bits, so that nobody has it by chance.
pub(super) fn fresh() -> String {
    HEXLOWER.encode(&rand::rng().random::<[u8; 16]>())
}

/// One for each place that holds one.
#[derive(Debug)]
pub(super) struct Secrets(BTreeMap<Place, String>);

/// Where in the stage a secret lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// In a file of the machine.
    File,
    /// In the environment of a process of the machine.
    Environment,
    /// Among the arguments of one.
    Arguments,
    /// In the memory of one, and nowhere else.
    Memory,
    /// In a file that only the mount namespace of one has.
    Mounts,
    /// In a segment of System V shared memory.
    SharedMemory,
    /// In a message queue of System V.
    Queue,
    /// Told by an abstract socket.
    AbstractSocket,
    /// Told by a socket in the file system.
    Socket,
    /// In the name of the folder that the servers' data folders are in.
    Folder,
    /// In the environment of the server: a provider's key, as it were.
    ServerEnvironment,
    /// In another sandbox's environment, which the server stores.
    Store,
    /// In a block device, outside of its file system.
    Device,
    /// In the file system on it.
    DeviceFile,
}

impl Place {
    const ALL: [Self; 14] = [
        Self::File,
        Self::Environment,
        Self::Arguments,
        Self::Memory,
        Self::Mounts,
        Self::SharedMemory,
        Self::Queue,
        Self::AbstractSocket,
        Self::Socket,
        Self::Folder,
        Self::ServerEnvironment,
        Self::Store,
        Self::Device,
        Self::DeviceFile,
    ];
}

impl Secrets {
    pub(super) fn new() -> Self {
        Self(Place::ALL.into_iter().map(|place| (place, fresh())).collect())
    }

    /// What lies there.
    pub(super) fn at(&self, place: Place) -> &str {
        self.0.get(&place).map_or("", String::as_str)
    }
}

/// Whether some output holds a secret.
pub(super) fn holds(output: &[u8], secret: &str) -> bool {
    !secret.is_empty() && output.windows(secret.len()).any(|window| window == secret.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_has_a_secret_of_its_own() {
        let secrets = Secrets::new();
        let all: std::collections::BTreeSet<_> = Place::ALL.iter().map(|place| secrets.at(*place)).collect();
        assert_eq!(all.len(), Place::ALL.len());
        assert!(all.iter().all(|secret| secret.len() == 32));
    }

    #[test]
    fn only_the_whole_secret_counts() {
        let secret = fresh();
        assert!(holds(format!("x{secret}y").as_bytes(), &secret));
        assert!(!holds(&secret.as_bytes()[1..], &secret) && !holds(b"", &secret) && !holds(b"x", ""));
    }
}
