//! What the next server must know of a sandbox that this one enforces: kept in its folder, for as long as it runs.
//!
//! The file is not synced: it is for the end of a server, and no sandbox outlives the end of its machine.

use std::io::{self, Read as _, Write as _};
use std::path::Path;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use serde::{Deserialize, Serialize};

use crate::bindings::SavedBindings;

/// The file's name.
pub const FILE: &str = "egress.json";

/// Where it is written before it takes the place of the one before.
const UNFINISHED: &str = "egress.json.new";

/// Longest file that is read, in bytes: with the most bindings of the longest names there is room to spare.
const MAX_FILE: u64 = 2 << 20;

/// Bytes that the connections of a sandbox carried, since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Carried {
    /// That left it.
    pub sent: u64,
    /// That came in.
    pub received: u64,
}

/// What is kept.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remembered {
    /// The names that it resolved. They are checked against the policy of the day when they are taken up.
    pub bindings: SavedBindings,
    /// What it used of its caps.
    pub carried: Carried,
}

impl Remembered {
    /// Reads what is in a sandbox's folder; `None` if nothing is. It blocks.
    ///
    /// # Errors
    /// There is something that can't be read, or that no server of this version wrote.
    pub fn read(folder: &Path) -> io::Result<Option<Self>> {
        let mut bytes = Vec::new();
        match fs::File::open(folder.join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => _ = file?.take(MAX_FILE + 1).read_to_end(&mut bytes)?,
        }
        if bytes.len() as u64 > MAX_FILE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "longer than any file of bindings"));
        }
        serde_json::from_slice(&bytes).map(Some).map_err(Into::into)
    }

    /// Puts it into a sandbox's folder, in the place of what was there. It blocks.
    ///
    /// # Errors
    /// It can't be written; what was there still is.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let unfinished = folder.join(UNFINISHED);
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        fs::rename(unfinished, folder.join(FILE))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::Duration;

    use sandglass_types::Timestamp;
    use sandglass_types::net::Hostname;

    use super::*;
    use crate::bindings::{Bindings, MAX_BINDINGS};

    #[test]
    fn it_comes_back_as_it_was_and_what_is_damaged_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Remembered::read(folder.path()).unwrap(), None);
        let mut bindings = Bindings::default();
        let now = Timestamp::from_millis(0);
        let long: Hostname = format!("{0}.{0}.{0}.{1}", "x".repeat(63), "y".repeat(61)).parse().unwrap();
        for number in 0..MAX_BINDINGS {
            let address = IpAddr::V4(Ipv4Addr::from_bits(u32::MAX - u32::try_from(number).unwrap()));
            bindings.bind(now, &long, [address], Duration::from_hours(9)).unwrap();
        }
        let most = Remembered {
            bindings: bindings.save(now),
            carried: Carried { sent: u64::MAX, received: u64::MAX },
        };
        for remembered in [Remembered::default(), most] {
            remembered.write(folder.path()).unwrap();
            assert_eq!(Remembered::read(folder.path()).unwrap(), Some(remembered));
        }
        for damaged in ["", "{}", "[]", r#"{"bindings":[{}],"carried":{"sent":0,"received":0}}"#] {
            std::fs::write(folder.path().join(FILE), damaged).unwrap();
            assert!(Remembered::read(folder.path()).is_err(), "{damaged}");
        }
        std::fs::write(folder.path().join(FILE), " ".repeat(3 << 20)).unwrap();
        assert!(Remembered::read(folder.path()).unwrap_err().to_string().contains("longer than any"));
    }
}
