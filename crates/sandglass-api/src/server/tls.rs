//! TLS, as this server speaks it: with one certificate for all of its names.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::ring;
use rustls::pki_types::pem::{Error as PemError, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{RootCertStore, ServerConfig};
use serde::Deserialize;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::backend::Stream;

/// What may be negotiated (RFC 7301), the better one first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The certificate of this server, with its key.
#[derive(Clone)]
pub struct Certificate {
    acceptor: TlsAcceptor,
    chain: Vec<CertificateDer<'static>>,
    begins: Timestamp,
    expires: Timestamp,
}

/// A certificate that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// There is no certificate in the text, or something that is none.
    #[error("it holds no certificate in PEM")]
    Chain(#[source] Option<PemError>),
    /// There is no key in the text.
    #[error("it holds no private key in PEM")]
    Key(#[source] PemError),
    /// They do not belong together, or one of them is of a kind that is not known.
    #[error("they can't be used together")]
    Pair(#[source] rustls::Error),
    /// Its fields can't be read.
    #[error("it can't be read")]
    Unreadable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// It is for other names.
    #[error("it is not for {0}")]
    Name(String),
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("expires", &self.expires).finish_non_exhaustive()
    }
}

impl Certificate {
    /// Reads a certificate, followed by those between it and what clients trust, and its key.
    ///
    /// # Errors
    /// [`CertificateError`], where it is not one for each of `names` as well.
    pub fn from_pem(chain: &[u8], key: &[u8], names: &[&str]) -> Result<Self, CertificateError> {
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<_, _>>()
            .map_err(|error| CertificateError::Chain(Some(error)))?;
        let own = chain.first().ok_or(CertificateError::Chain(None))?;
        let (_, fields) = x509_parser::parse_x509_certificate(own)
            .map_err(|error| CertificateError::Unreadable(error.to_string().into()))?;
        let time = |time: x509_parser::time::ASN1Time| {
            Timestamp::from_second(time.timestamp())
                .map_err(|error| CertificateError::Unreadable(error.into()))
        };
        let validity = fields.validity();
        let (begins, expires) = (time(validity.not_before)?, time(validity.not_after)?);
        let parsed = ParsedCertificate::try_from(own).map_err(CertificateError::Pair)?;
        for name in names {
            let refused = || CertificateError::Name((*name).to_owned());
            let subject = ServerName::try_from(*name).map_err(|_| refused())?;
            verify_server_name(&parsed, &subject).map_err(|_| refused())?;
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(CertificateError::Key)?;
        let shown = chain.clone();
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(CertificateError::Pair)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(CertificateError::Pair)?;
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).into();
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)), chain: shown, begins, expires })
    }

    /// Whether clients that trust this authority alone believe that it is for `name`.
    #[must_use]
    pub fn is_vouched_for(&self, authority: &[u8], name: &str) -> bool {
        let mut trusted = RootCertStore::empty();
        let Ok(authority) = CertificateDer::from_pem_slice(authority) else { return false };
        let (Ok(()), Ok(name)) = (trusted.add(authority), ServerName::try_from(name)) else { return false };
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(trusted), provider).build();
        let (Ok(verifier), Some((own, between))) = (verifier, self.chain.split_first()) else { return false };
        verifier.verify_server_cert(own, between, &name, &[], UnixTime::now()).is_ok()
    }

    /// When clients begin to trust it.
    #[must_use]
    pub const fn begins(&self) -> Timestamp {
        self.begins
    }

    /// When clients stop to trust it.
    #[must_use]
    pub const fn expires(&self) -> Timestamp {
        self.expires
    }

    /// Shakes hands with a client.
    pub(super) async fn accept<S: Stream>(&self, stream: S) -> std::io::Result<TlsStream<S>> {
        self.acceptor.accept(stream).await
    }
}

/// Who may go without TLS where there is TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plain {
    /// Clients on this machine: what they send is on no network.
    #[default]
    Loopback,
    /// Everybody. A proxy on another machine does it for this server, or nobody.
    Everybody,
    /// Nobody.
    Nobody,
}

/// TLS, where there is any.
#[derive(Debug, Clone)]
pub struct Tls {
    /// What this server shows, from the moment on in which it is there.
    pub certificate: watch::Receiver<Certificate>,
    /// Who may go without.
    pub plain: Plain,
}

#[cfg(test)]
mod tests;
