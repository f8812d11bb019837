//! The way to a server, by http or https, for the REST face and for Connect alike.

use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::{ClientConfig, RootCertStore};

use super::trust;

/// Connects to whatever a URL names: in the clear for `http`, and with TLS for `https`.
pub(crate) type Connector = HttpsConnector<HttpConnector>;

/// With what it takes to speak TLS; without, no https server is believed.
///
/// # Errors
/// The provider of cryptography has no version of TLS.
pub(crate) fn connector(tls: Option<ClientConfig>) -> anyhow::Result<Connector> {
    let tls = match tls {
        Some(tls) => tls,
        None => trust::believing(RootCertStore::empty())?,
    };
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    // What a terminal sends is small, and waits for an answer.
    tcp.set_nodelay(true);
    Ok(HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().wrap_connector(tcp))
}
