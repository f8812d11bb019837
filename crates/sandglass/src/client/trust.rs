//! Whose certificates the command line believes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use fs_err as fs;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};

use crate::certificate::{self, TRUSTED};
use crate::cli::DATA_DIR;

/// Most authorities of servers on this machine that are looked for.
const MAX_OWN: usize = 64;

/// What it takes to speak TLS. With `ca`, the authorities in that file alone are believed; with `system`, which is
/// `SSL_CERT_FILE`, those in that one; otherwise all that this machine trusts, and the authorities that its servers made for
/// themselves, as far as their files can be read. Those can vouch for nothing but their own domain and this machine.
///
/// # Errors
/// A file can't be read, or has no authority in it.
pub(crate) fn config(ca: Option<&Path>, system: Option<PathBuf>) -> anyhow::Result<ClientConfig> {
    let roots = match (ca, system) {
        (Some(file), _) => only(file)?,
        (None, Some(file)) => only(&file).context("SSL_CERT_FILE")?,
        (None, None) => machine(&TRUSTED.map(Path::new), Path::new(DATA_DIR)),
    };
    if roots.is_empty() {
        bail!(
            "this machine trusts nobody that certificates are from: name the authority of the server with --ca FILE"
        );
    }
    believing(roots)
}

/// What it takes to speak TLS with whom this machine trusts, or the file of `SSL_CERT_FILE` says. It may be nobody.
///
/// # Errors
/// That file can't be read, or has no authority in it.
pub(crate) fn of_machine(system: Option<PathBuf>) -> anyhow::Result<ClientConfig> {
    let roots = match system {
        Some(file) => only(&file).context("SSL_CERT_FILE")?,
        None => {
            let found = TRUSTED.map(Path::new).into_iter().find(|file| file.exists());
            found.and_then(|file| only(file).ok()).unwrap_or_else(RootCertStore::empty)
        }
    };
    believing(roots)
}

/// What it takes to speak TLS with whom these vouch for.
///
/// # Errors
/// The provider of cryptography has no version of TLS.
pub(super) fn believing(roots: RootCertStore) -> anyhow::Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(versions.with_root_certificates(roots).with_no_client_auth())
}

/// The authorities in one file.
fn only(file: &Path) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let found = CertificateDer::pem_slice_iter(&certificate::contents(file)?).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| anyhow::anyhow!("{} is not in PEM: {error}", file.display()))?;
    let (added, _) = roots.add_parsable_certificates(found);
    if added == 0 {
        bail!("{} has no authority in it that can be read", file.display());
    }
    Ok(roots)
}

/// What a machine trusts, by the first of these files that there is, and the authorities below the folder of its servers.
fn machine(trusted: &[&Path], data: &Path) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let system = trusted.iter().find(|file| file.exists()).and_then(|file| only(file).ok());
    roots.extend(system.into_iter().flat_map(|found| found.roots));
    let folders = fs::read_dir(data.join("tls")).into_iter().flatten().flatten();
    for folder in folders.take(MAX_OWN) {
        // One that can't be read is not this user's to trust.
        let own = only(&folder.path().join(certificate::AUTHORITY_FILE)).ok();
        roots.extend(own.into_iter().flat_map(|found| found.roots));
    }
    roots
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authority(name: &str) -> String {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.self_signed(&key).unwrap().pem()
    }

    #[test]
    fn a_file_that_is_named_is_believed_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("one.pem"), authority("a.test")).unwrap();
        fs::write(path("two.pem"), authority("a.test") + &authority("b.test")).unwrap();
        assert_eq!(only(&path("one.pem")).unwrap().len(), 1);
        assert_eq!(only(&path("two.pem")).unwrap().len(), 2);
        config(Some(&path("one.pem")), None).unwrap();
        config(None, Some(path("one.pem"))).unwrap();
        fs::write(path("none.pem"), "no certificate").unwrap();
        fs::write(path("torn.pem"), &authority("a.test")[..100]).unwrap();
        for wrong in ["none.pem", "torn.pem", "absent.pem"] {
            let error = format!("{:#}", config(Some(&path(wrong)), Some(path("one.pem"))).unwrap_err());
            assert!(error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn a_machine_s_own_servers_are_believed_beside_all_that_it_trusts() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("system.pem"), authority("a.test") + &authority("b.test")).unwrap();
        let system = path("system.pem");
        let absent = path("absent.pem");
        let trusted = [&*absent, &*system];
        assert_eq!(machine(&trusted, &path("data")).len(), 2, "there is no server");
        for name in ["one.test", "two.test"] {
            fs::create_dir_all(path("data/tls").join(name)).unwrap();
        }
        fs::write(path("data/tls/one.test/ca.pem"), authority("one.test")).unwrap();
        fs::write(path("data/tls/two.test/ca.pem"), "being written").unwrap();
        assert_eq!(machine(&trusted, &path("data")).len(), 3);
        assert_eq!(machine(&[], &path("data")).len(), 1);
    }
}
