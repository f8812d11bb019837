//! The layer that puts our files into every root file system, made once per content.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use sandglass_types::Digest;
use sha2::{Digest as _, Sha256};

use super::cache;
use super::oci::GUEST_PATH;
use super::paths::HostPaths;
use crate::engine::EngineError;
use crate::network::AIRLOCK_ADDRESS;

/// The guest's resolver is the one address that every airlock answers on. Short times, because an answer that does not
/// come from next door does not come.
fn resolv_conf() -> String {
    format!("nameserver {AIRLOCK_ADDRESS}\noptions timeout:2 attempts:2\n")
}

/// Without it, `localhost` is a question to the network. No line for `::1`: a sandbox has no IPv6.
const HOSTS: &str = "127.0.0.1\tlocalhost\n";

/// A guest binary is a few MiB; whatever is much larger is not one.
const MAX_GUEST_LEN: u64 = 64 << 20;

/// A layer in the cache.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    /// Names everything that is in it.
    pub(super) digest: Digest,
    /// Its root.
    pub(super) path: PathBuf,
}

/// The root of the layer of this name.
pub(super) fn path(paths: &HostPaths, layer: &Digest) -> PathBuf {
    paths.agents().join(layer.to_string()).join("layer")
}

/// Makes sure that the layer with this guest binary exists.
pub(super) fn ensure(paths: &HostPaths, guest: &Path) -> Result<Layer, EngineError> {
    build(paths, guest)
        .map_err(|error| EngineError::Step { step: "prepare the agent's layer", source: error.into() })
}

fn build(paths: &HostPaths, guest: &Path) -> io::Result<Layer> {
    let len = fs_err::metadata(guest)?.len();
    if !(1..=MAX_GUEST_LEN).contains(&len) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} is no guest binary", guest.display()),
        ));
    }
    let binary = fs_err::read(guest)?;
    let resolv_conf = resolv_conf();
    let files: [(&str, &[u8], u32); 4] = [
        (GUEST_PATH, &binary, 0o755),
        // The agent is also the client of its own `sudo` service, told apart by its name.
        ("/usr/bin/sudo", &binary, 0o755),
        ("/etc/resolv.conf", resolv_conf.as_bytes(), 0o644),
        ("/etc/hosts", HOSTS.as_bytes(), 0o644),
    ];
    let digest = digest(&files);
    let path = path(paths, &digest);
    let home = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let _nobody_sweeps = cache::share(&paths.cache)?;
    if cache::touch(&paths.cache, home)? && path.exists() {
        return Ok(Layer { digest, path });
    }
    fs_err::create_dir_all(home)?;
    let aside = tempfile::Builder::new().prefix(cache::MAKING).tempdir_in(home)?;
    let root = aside.path().join("layer");
    for (name, content, mode) in files {
        let file = root.join(name.trim_start_matches('/'));
        let parent = file.parent().ok_or(io::ErrorKind::InvalidInput)?;
        fs_err::create_dir_all(parent)?;
        fs_err::write(&file, content)?;
        fs_err::set_permissions(&file, std::fs::Permissions::from_mode(mode))?;
        fs_err::File::open(&file)?.sync_all()?;
    }
    set_folder_modes(&root)?;
    match fs_err::rename(&root, &path) {
        Ok(()) => {}
        // Somebody else was quicker, with the same content.
        Err(_) if path.exists() => {}
        Err(error) => return Err(error),
    }
    Ok(Layer { digest, path })
}

/// The folders are merged with those of the root file system and lend them their mode, whatever our umask is.
fn set_folder_modes(folder: &Path) -> io::Result<()> {
    fs_err::set_permissions(folder, std::fs::Permissions::from_mode(0o755))?;
    for entry in fs_err::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            set_folder_modes(&entry.path())?;
        }
    }
    Ok(())
}

fn digest(files: &[(&str, &[u8], u32)]) -> Digest {
    let mut hash = Sha256::new();
    for (name, content, mode) in files {
        hash.update(format!("{name}\0{mode:o}\0{}\0", content.len()));
        hash.update(content);
    }
    Digest::from_bytes(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_made_once_and_named_by_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let paths = HostPaths { data: dir.path().join("d"), cache: dir.path().join("c") };
        let guest = dir.path().join("guest");
        std::fs::write(&guest, b"#!one").unwrap();
        let one = ensure(&paths, &guest).unwrap();
        let file = one.path.join("usr/bin/sudo");
        assert_eq!(std::fs::read(&file).unwrap(), b"#!one");
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o755);
        assert_eq!(std::fs::metadata(one.path.join("usr")).unwrap().permissions().mode() & 0o7777, 0o755);
        assert_eq!(ensure(&paths, &guest).unwrap().digest, one.digest);
        std::fs::write(&guest, b"#!two").unwrap();
        let two = ensure(&paths, &guest).unwrap();
        assert_ne!(two.digest, one.digest);
        assert_eq!(std::fs::read(file).unwrap(), b"#!one");
        // Nothing half made is left beside it.
        assert_eq!(std::fs::read_dir(two.path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_no_binary_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let paths = HostPaths { data: dir.path().join("d"), cache: dir.path().join("c") };
        let guest = dir.path().join("guest");
        std::fs::write(&guest, b"").unwrap();
        assert!(ensure(&paths, &guest).is_err());
        assert!(ensure(&paths, &dir.path().join("absent")).is_err());
    }
}
