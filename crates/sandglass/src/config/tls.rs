//! How this server speaks TLS, where it has a domain to speak it for.

use std::path::PathBuf;

use anyhow::bail;
use sandglass_api::Plain;
use serde::Deserialize;

/// The table `[tls]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    #[serde(default)]
    plain: Plain,
}

/// What is in force.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tls {
    /// A certificate and its key; without, the server makes its own.
    pub(crate) files: Option<(PathBuf, PathBuf)>,
    /// Who may go without.
    pub(crate) plain: Plain,
}

impl Tls {
    pub(super) fn resolve(file: Option<&File>, domain: Option<&str>) -> anyhow::Result<Self> {
        let Some(File { certificate, key, plain }) = file else {
            return Ok(Self { files: None, plain: Plain::default() });
        };
        if domain.is_none() {
            bail!("[tls] needs a domain that the certificate is for: set `domain`");
        }
        let files = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
            (None, None) => None,
            _ => bail!("tls.certificate and tls.key must be given together, or neither"),
        };
        Ok(Self { files, plain: *plain })
    }
}
