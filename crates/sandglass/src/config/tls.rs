//! How this server speaks TLS, where it has a domain to speak it for.

use std::path::PathBuf;

use anyhow::bail;
use sandglass_api::Plain;
use serde::{Deserialize, Serialize};

/// The table `[tls]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    #[serde(default)]
    plain: Plain,
    acme: Option<AcmeFile>,
}

/// The table `[tls.acme]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AcmeFile {
    directory: String,
    #[serde(default)]
    contact: Vec<String>,
    dns: PathBuf,
    authority: Option<PathBuf>,
    #[serde(default)]
    agree_to_terms: bool,
}

/// An authority that gives certificates by ACME (RFC 8555).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Acme {
    /// Where it says what it offers; an `https` URL.
    pub(crate) directory: String,
    /// Whom it may write to, as URLs (`mailto:`).
    pub(crate) contact: Vec<String>,
    /// The program that puts a record into the zone of the domain, and takes it out again.
    pub(crate) dns: PathBuf,
    /// Who vouches for the authority's own server, in PEM; what this machine trusts if `None`.
    pub(crate) authority: Option<PathBuf>,
}

/// Where the certificate comes from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// An authority of the server's own.
    Own,
    /// Files of the operator's, read again when they change.
    Files { certificate: PathBuf, key: PathBuf },
    /// An authority that others trust as well.
    Acme(Acme),
}

/// What is in force.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tls {
    pub(crate) source: Source,
    /// Who may go without.
    pub(crate) plain: Plain,
}

impl Tls {
    pub(super) fn resolve(file: Option<File>, domain: Option<&str>) -> anyhow::Result<Self> {
        let Some(File { certificate, key, plain, acme }) = file else {
            return Ok(Self { source: Source::Own, plain: Plain::default() });
        };
        if domain.is_none() {
            bail!("[tls] needs a domain that the certificate is for: set `domain`");
        }
        let source = match (certificate, key, acme) {
            (Some(certificate), Some(key), None) => Source::Files { certificate, key },
            (None, None, Some(acme)) => Source::Acme(acme.resolve()?),
            (None, None, None) => Source::Own,
            (_, _, Some(_)) => {
                bail!("[tls.acme] gets a certificate, so tls.certificate and tls.key must not be given")
            }
            _ => bail!("tls.certificate and tls.key must be given together, or neither"),
        };
        Ok(Self { source, plain })
    }
}

impl AcmeFile {
    fn resolve(self) -> anyhow::Result<Acme> {
        let Self { directory, contact, dns, authority, agree_to_terms } = self;
        if !agree_to_terms {
            bail!(
                "an authority asks that you agree to its terms: read them, and set tls.acme.agree_to_terms = true"
            );
        }
        let uri: http::Uri = directory.parse()?;
        if uri.scheme_str() != Some("https") || uri.host().is_none() {
            bail!("tls.acme.directory must be an https URL, not '{directory}'");
        }
        if let Some(contact) = contact.iter().find(|contact| !contact.starts_with("mailto:")) {
            bail!("tls.acme.contact must be a list of mailto: URLs, and '{contact}' is none");
        }
        for path in [Some(&dns), authority.as_ref()].into_iter().flatten() {
            if !path.is_absolute() {
                bail!("tls.acme: {} must be an absolute path", path.display());
            }
        }
        Ok(Acme { directory, contact, dns, authority })
    }
}
