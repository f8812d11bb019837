//! The guest binary that this program carries, and where it is put.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use fs_err as fs;
use sandglass_types::Digest;
use sha2::{Digest as _, Sha256};

#[cfg(embedded_guest)]
const EMBEDDED: Option<&[u8]> = Some(include_bytes!(env!("SANDGLASS_GUEST")));
#[cfg(not(embedded_guest))]
const EMBEDDED: Option<&[u8]> = None;

/// Puts the guest binary into the cache folder, under its digest, and returns its path.
pub(crate) fn install(cache_dir: &Path, instead: Option<&Path>) -> anyhow::Result<PathBuf> {
    let read;
    let bytes = match (instead, EMBEDDED) {
        (Some(path), _) => {
            read = fs::read(path)?;
            &read
        }
        (None, Some(bytes)) => bytes,
        (None, None) => anyhow::bail!("this program was built without its guest; build it with `make build`"),
    };
    let digest = Digest::from_bytes(Sha256::digest(bytes).into());
    let folder = cache_dir.join("agents").join(digest.to_string());
    let path = folder.join("guest");
    if !path.try_exists()? {
        fs::create_dir_all(&folder)?;
        let temporary = folder.join(format!(".guest.{}", std::process::id()));
        fs::write(&temporary, bytes).context("the guest binary could not be put into the cache folder")?;
        fs::set_permissions(&temporary, Permissions::from_mode(0o755))?;
        fs::rename(&temporary, &path)?;
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
