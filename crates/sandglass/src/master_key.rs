//! The key that what teams keep is sealed with. It is beside none of that: the store belongs to the half without privilege, and this file
//! to root alone.

use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use rand::RngExt as _;
use sandglass_broker::vault::KEY;

use crate::certificate;
use crate::startup::{Reason, StartupError};

/// Its name in the data folder, where the operator says of no other place.
const NAME: &str = "master.key";

fn failed(path: &Path, what: impl std::fmt::Display) -> StartupError {
    StartupError::new(Reason::MasterKey, format!("the master key {}: {what}", path.display()))
}

/// The key in this file, or in the data folder, where it is made if there is none.
pub(crate) fn read_or_make(file: Option<&Path>, data: &Path) -> Result<[u8; KEY], StartupError> {
    if let Some(file) = file {
        return read(file).map_err(|error| failed(file, error));
    }
    let own = data.join(NAME);
    match read(&own) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key: [u8; KEY] = rand::rng().random();
            certificate::replace(&own, &key, 0o600)
                .map_err(|error| failed(&own, format_args!("{error:#}")))?;
            Ok(key)
        }
        read => read.map_err(|error| failed(&own, error)),
    }
}

/// Reads a key that nobody but its owner can.
fn read(path: &Path) -> io::Result<[u8; KEY]> {
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    // One that was made a pipe must not keep the server waiting.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let mut file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    if !about.is_file() || about.mode() & 0o077 != 0 {
        return wrong("it must be a file that its owner alone can read (`chmod 0600`)".into());
    }
    let mut contents = Vec::new();
    file.by_ref().take(KEY as u64 + 1).read_to_end(&mut contents)?;
    match contents.try_into() {
        Ok(key) => Ok(key),
        Err(contents) => wrong(format!("it must have {KEY} bytes, not {} or more", contents.len())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_key_is_made_once_and_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let made = read_or_make(None, folder.path()).unwrap();
        assert_eq!(read_or_make(None, folder.path()).unwrap(), made);
        let path = folder.path().join(NAME);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let own = folder.path().join("own");
        assert!(read_or_make(Some(&own), folder.path()).is_err(), "it is made nowhere else");
        for (contents, mode, said) in [
            (&[7; KEY][..], 0o640, "chmod"),
            (&[7; KEY - 1], 0o600, "not 31"),
            (&[7; KEY + 1], 0o600, "not 33"),
            (&[], 0o600, "not 0"),
        ] {
            fs::write(&own, contents).unwrap();
            fs::set_permissions(&own, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = read_or_make(Some(&own), folder.path()).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(error.reason(), Reason::MasterKey);
        }
        fs::write(&own, [7; KEY]).unwrap();
        assert_eq!(read_or_make(Some(&own), folder.path()).unwrap(), [7; KEY]);
    }
}
