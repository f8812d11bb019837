//! The certificate of a server: what the operator has, what an authority on the internet gives it, or one of an authority of
//! the server's own.
//!
//! What may change while the server runs is kept by a process of its own (see [`keeper`]), since the server gives up all privilege
//! and sees no file of the machine any more.

mod acme;
mod authority;
mod feed;
mod keeper;

use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use sandglass_api::Certificate;
use sandglass_types::error::Chain;

pub(crate) use self::acme::run as acme;
pub(crate) use self::authority::{AUTHORITY_FILE, TRUSTED, certify};
use self::feed::Feed;
pub(crate) use self::feed::{Shown, follow};
pub(crate) use self::keeper::run as keep;
use self::keeper::{Kept, Task};
use crate::config::tls::Source;
use crate::data_dir::DataDir;
use crate::startup::{Reason, StartupError};

/// The largest file that is read, in bytes: all that a machine trusts is a small part of it.
const MAX_FILE: u64 = 8 << 20;

/// The name of a domain that may carry a port.
fn name_of(domain: &str) -> String {
    domain.split(':').next().unwrap_or(domain).to_ascii_lowercase()
}

/// The names that a certificate must be for: the API has one below the domain, as every port of a sandbox has.
fn needed(domain: &str) -> [String; 2] {
    let name = name_of(domain);
    [format!("api.{name}"), name]
}

/// The folder of a server for what it has for this domain, which may carry a port.
fn folder(data: &Path, domain: &str) -> PathBuf {
    data.join("tls").join(name_of(domain))
}

/// A certificate that can't be had, or used.
fn unusable(error: &anyhow::Error) -> StartupError {
    StartupError::new(Reason::Certificate, format!("{error:#}"))
}

/// What a server shows that has a domain, as long as it may read files. Nothing can be shown for one of a single label, or for a
/// number: clients believe no certificate for whatever is below it.
pub(crate) fn arrange(source: &Source, domain: &str, data: &DataDir) -> Result<Option<Shown>, StartupError> {
    if !has_names_below(&name_of(domain)) {
        tracing::warn!(domain, "no certificate can be for what is below this domain, so there is no https");
        return Ok(None);
    }
    let kept = match source {
        Source::Own => {
            let files = authority::certify_apart(data, domain).map_err(|error| unusable(&error))?;
            let own = read(&files.server(), &files.server_key(), domain);
            return own
                .map(|certificate| Some(Shown::Own(certificate, files.bundle())))
                .map_err(|error| unusable(&error));
        }
        Source::Files { certificate, key } => {
            Kept::Files { certificate: certificate.clone(), key: key.clone() }
        }
        Source::Acme(acme) => {
            let root = rustix::process::geteuid().is_root();
            Kept::Acme {
                acme: acme.clone(),
                folder: data.path().join("tls/acme").join(name_of(domain)),
                user: root.then(|| data.identity().into()),
            }
        }
    };
    let feed = Feed::start(&Task { domain: domain.to_owned(), kept }).map_err(|error| unusable(&error))?;
    Ok(Some(Shown::Kept(feed)))
}

/// Whether there can be a certificate for all names below this one.
fn has_names_below(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    name.contains('.') && !last.bytes().all(|byte| byte.is_ascii_digit())
}

/// Reads a certificate for a domain, and its key.
fn read(chain: &Path, key: &Path, domain: &str) -> anyhow::Result<Certificate> {
    let (chain_text, key_text) = (contents(chain)?, contents(key)?);
    parse(&chain_text, &key_text, domain).map_err(|error| {
        anyhow::anyhow!("the certificate {} with the key {}: {error:#}", chain.display(), key.display())
    })
}

/// A certificate for a domain, and its key.
fn parse(chain: &[u8], key: &[u8], domain: &str) -> anyhow::Result<Certificate> {
    let names = needed(domain);
    Certificate::from_pem(chain, key, &names.each_ref().map(String::as_str))
        .map_err(|error| anyhow::anyhow!("{}", Chain(&error)))
}

/// What a file holds, if that is not too much.
pub(crate) fn contents(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut contents = Vec::new();
    let read = std::io::Read::read_to_end(
        &mut std::io::Read::take(fs::File::open(path)?, MAX_FILE + 1),
        &mut contents,
    )?;
    if u64::try_from(read)? > MAX_FILE {
        bail!("{} is larger than {MAX_FILE} bytes", path.display());
    }
    Ok(contents)
}

/// Writes a file as a whole, or not at all.
pub(crate) fn replace(path: &Path, contents: &[u8], mode: u32) -> anyhow::Result<()> {
    let aside = path.with_extension("new");
    match fs::remove_file(&aside) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(contents)?;
    file.sync_all()?;
    fs::rename(&aside, path)?;
    // So that it is there after a loss of power as well.
    let folder = path.parent().context("the file has no folder")?;
    Ok(fs::File::open(folder)?.sync_all()?)
}

#[cfg(test)]
mod tests;
