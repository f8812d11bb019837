//! The guest binary that this program carries, and where it is put.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use sandglass_engine::gvisor::cache;
use sandglass_types::Digest;
use sha2::{Digest as _, Sha256};

use crate::startup::{Folder, Reason, StartupError};

#[cfg(embedded_guest)]
const EMBEDDED: Option<&[u8]> = Some(include_bytes!(env!("SANDGLASS_GUEST")));
#[cfg(not(embedded_guest))]
const EMBEDDED: Option<&[u8]> = None;

/// Puts the guest binary into the cache folder, under its digest, and returns its path. It stays there for a day at least.
pub(crate) fn install(cache_dir: &Path, instead: Option<&Path>) -> Result<PathBuf, StartupError> {
    let read;
    let bytes = match (instead, EMBEDDED) {
        (Some(path), _) => {
            read = fs::read(path).map_err(|error| {
                StartupError::new(Reason::NoGuest, format!("the guest binary can't be read: {error}"))
            })?;
            &read
        }
        (None, Some(bytes)) => bytes,
        (None, None) => {
            return Err(StartupError::new(Reason::NoGuest, "this program was built without its guest"));
        }
    };
    put(cache_dir, bytes).map_err(|error| StartupError::folder(Folder::Cache, cache_dir, &error))
}

fn put(cache_dir: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let digest = Digest::from_bytes(Sha256::digest(bytes).into());
    let folder = cache_dir.join("agents").join(digest.to_string());
    let path = folder.join("guest");
    if !(cache::touch(cache_dir, &folder)? && path.try_exists()?) {
        fs::create_dir_all(&folder)?;
        let temporary = folder.join(format!(".guest.{}", std::process::id()));
        let placed = fs::write(&temporary, bytes)
            .and_then(|()| fs::set_permissions(&temporary, Permissions::from_mode(0o755)))
            .and_then(|()| fs::rename(&temporary, &path));
        if let Err(error) = placed {
            // What fitted of it would only take room.
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_says_what_is_in_it() {
        let cache = tempfile::tempdir().unwrap();
        let source = cache.path().join("source");
        std::fs::write(&source, "abc").unwrap();
        let path = install(cache.path(), Some(&source)).unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert!(path.ends_with(format!("agents/{abc}/guest")), "{}", path.display());
        assert_eq!(install(cache.path(), Some(&source)).unwrap(), path);
    }
}
