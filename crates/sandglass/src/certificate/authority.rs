//! An authority of the server's own, and the certificate that it gives to the server.
//!
//! ```text
//! DIR/tls/DOMAIN/ca.pem        what clients have to trust
//! DIR/tls/DOMAIN/bundle.pem    that, and all that this machine trusts besides
//! DIR/tls/DOMAIN/ca.key        for root alone
//! DIR/tls/DOMAIN/server.pem    what the server shows
//! DIR/tls/DOMAIN/server.key    for root alone
//! ```
//!
//! The authority can vouch for nothing but the domain and this machine, so whoever trusts it trusts it with no more. Its key
//! is read by a process that ends before the server hears from anybody.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use fs_err as fs;
use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints,
};
use sandglass_api::Certificate;

use super::{contents, name_of, read, replace};
use crate::data_dir::DataDir;

/// How long an authority lasts.
const AUTHORITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long one of its certificates does. Some systems take none that lasts longer (Apple, "Requirements for trusted
/// certificates in iOS 13 and macOS 10.15").
const SERVER: Duration = Duration::from_secs(820 * 24 * 3600);

/// A start replaces one that lasts no longer than this.
const RENEW: Duration = Duration::from_secs(365 * 24 * 3600);

/// For the clock of a client that is behind.
const BEFORE: Duration = Duration::from_secs(24 * 3600);

/// Where systems keep all that they trust.
pub(crate) const TRUSTED: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// What clients have to trust, in the folder of an authority.
pub(crate) const AUTHORITY_FILE: &str = "ca.pem";

/// The files of one authority.
#[derive(Debug)]
pub(super) struct Files(PathBuf);

impl Files {
    /// Those for this domain, which may carry a port.
    fn of(data: &Path, domain: &str) -> Self {
        Self(super::folder(data, domain))
    }

    fn authority(&self) -> PathBuf {
        self.0.join(AUTHORITY_FILE)
    }

    fn authority_key(&self) -> PathBuf {
        self.0.join("ca.key")
    }

    pub(super) fn server(&self) -> PathBuf {
        self.0.join("server.pem")
    }

    pub(super) fn server_key(&self) -> PathBuf {
        self.0.join("server.key")
    }

    /// What a client is told to trust that has to trust others as well.
    pub(super) fn bundle(&self) -> PathBuf {
        self.0.join("bundle.pem")
    }
}

/// Has [`certify`] done by a process of its own.
pub(super) fn certify_apart(data: &DataDir, domain: &str) -> anyhow::Result<Files> {
    let output = Command::new("/proc/self/exe")
        .arg("certify")
        .arg(data.path())
        .arg(domain)
        .stdin(Stdio::null())
        .output()
        .context("the process that makes certificates can't be started")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("no certificate could be made: {}", said.trim());
    }
    Ok(Files::of(data.path(), domain))
}

/// Makes what is missing of an authority and its certificate for a domain, and replaces what expires before long.
pub(crate) fn certify(data: &Path, domain: &str) -> anyhow::Result<()> {
    let files = Files::of(data, domain);
    if !files.0.try_exists()? {
        begin(&files, domain)?;
    }
    let authority = contents(&files.authority())?;
    let vouched_for = || {
        let found = read(&files.server(), &files.server_key(), domain);
        found.ok().filter(|found| found.is_vouched_for(&authority, &name_of(domain)))
    };
    let lasts = |certificate: &Certificate| {
        let left = certificate.expires().as_second() - Timestamp::now().as_second();
        u64::try_from(left).is_ok_and(|left| left > RENEW.as_secs())
    };
    if !vouched_for().is_some_and(|found| lasts(&found)) {
        sign(&files, domain)?;
        if vouched_for().is_none() {
            let folder = files.0.display();
            bail!(
                "the authority in {folder} has ended or is another one's: remove the folder, and have clients trust the next"
            );
        }
    }
    let trusted = TRUSTED.iter().map(Path::new).find(|path| path.exists()).map(contents).transpose()?;
    let both = [trusted.unwrap_or_default(), b"\n".to_vec(), authority].concat();
    replace(&files.bundle(), &both, 0o644)
}

/// Makes an authority. Its folder has both of its files, or does not exist.
fn begin(files: &Files, domain: &str) -> anyhow::Result<()> {
    let name = name_of(domain);
    let mut params = CertificateParams::default();
    params.distinguished_name = called(&format!("Sandglass authority for {name}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    // The constraints below are about names of hosts. Without this it could vouch for people.
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: vec![
            GeneralSubtree::DnsName(name),
            GeneralSubtree::DnsName("localhost".into()),
            GeneralSubtree::IpAddress(CidrSubnet::V4([127, 0, 0, 0], [255, 0, 0, 0])),
            GeneralSubtree::IpAddress(CidrSubnet::V6(std::net::Ipv6Addr::LOCALHOST.octets(), [0xff; 16])),
        ],
        excluded_subtrees: Vec::new(),
    });
    last(&mut params, AUTHORITY);
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    let all = files.0.parent().context("the folder has none above it")?;
    fs::create_dir_all(all)?;
    readable(all)?;
    let folder = tempfile::Builder::new().prefix(".making-").tempdir_in(all)?;
    let made = Files(folder.path().to_owned());
    replace(&made.authority_key(), key.serialize_pem().as_bytes(), 0o600)?;
    replace(&made.authority(), certificate.pem().as_bytes(), 0o644)?;
    readable(&made.0)?;
    fs::rename(&made.0, &files.0)?;
    // It has another name by now.
    let _renamed = folder.keep();
    Ok(fs::File::open(all)?.sync_all()?)
}

/// Lets everybody see what is in a folder, whatever the umask is.
fn readable(folder: &Path) -> std::io::Result<()> {
    fs::set_permissions(folder, Permissions::from_mode(0o755))
}

/// Makes a certificate for the names of a domain, and for this machine's own.
fn sign(files: &Files, domain: &str) -> anyhow::Result<()> {
    let [authority, key] = [contents(&files.authority())?, contents(&files.authority_key())?];
    let key = KeyPair::from_pem(std::str::from_utf8(&key)?)?;
    let issuer = Issuer::from_ca_cert_pem(std::str::from_utf8(&authority)?, key)?;
    let name = name_of(domain);
    let names = [name.clone(), format!("*.{name}"), "localhost".into(), "127.0.0.1".into(), "::1".into()];
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = called(&name);
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    last(&mut params, SERVER);
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    // The key first: a certificate that does not go with its key is made again.
    replace(&files.server_key(), key.serialize_pem().as_bytes(), 0o600)?;
    replace(&files.server(), certificate.pem().as_bytes(), 0o644)
}

fn called(name: &str) -> DistinguishedName {
    let mut called = DistinguishedName::new();
    // No more than 64 characters are allowed (RFC 5280, appendix A.1).
    called.push(DnType::CommonName, name.chars().take(64).collect::<String>());
    called
}

fn last(params: &mut CertificateParams, time: Duration) {
    let now = SystemTime::now();
    (params.not_before, params.not_after) = ((now - BEFORE).into(), (now + time).into());
}

#[cfg(test)]
mod tests;
