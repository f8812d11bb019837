//! The way to a provider: one request, with the key that is its own, over a connection to where the operator said.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use sandglass_broker::Secret;
use sandglass_broker::redact::Search;
use sandglass_egress::resolver::Resolve;
use sandglass_models::Dialect;
use sandglass_types::net::Hostname;
use secrecy::ExposeSecret as _;

use crate::config::{Config, Provider};

/// Connections that are kept to a provider while nobody uses them, and for how long.
const IDLE: (usize, Duration) = (32, Duration::from_secs(30));

/// What providers know this server by, beside its key.
const AGENT: HeaderValue = HeaderValue::from_static(concat!("sandglass/", env!("CARGO_PKG_VERSION")));

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// A provider that can't be called as it is configured.
#[derive(Debug, thiserror::Error)]
pub enum BadProvider {
    /// Its base is no address of a server.
    #[error(
        "models.providers.{0}: base_url must be http://HOST or https://HOST, perhaps with a path, and nothing behind it"
    )]
    Base(String),
    /// Its key would be read by whoever is on the way.
    #[error(
        "models.providers.{0}: a key may go over http:// only to this machine or a private address: use https://"
    )]
    Plain(String),
    /// Its key can't be sent.
    #[error("models.providers.{0}: the key holds something that no header may")]
    Key(String),
}

/// The ways to all providers.
pub(crate) struct Upstream {
    client: Client<HttpsConnector<HttpConnector<Names>>, Full<Bytes>>,
    ways: BTreeMap<String, Way>,
    /// Finds nothing.
    nothing: Search,
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream").field("providers", &self.ways.keys()).finish_non_exhaustive()
    }
}

/// The way to one of them.
struct Way {
    base: String,
    dialects: Vec<Dialect>,
    headers: HeaderMap,
    /// The header that carries the key if it is not that of the protocol, and the key.
    key: Option<(Option<HeaderName>, String)>,
    /// Finds the key, unless it is so short that it would be found by accident.
    search: Search,
}

/// What is sent.
pub(crate) struct Sent<'a> {
    pub(crate) provider: &'a str,
    pub(crate) dialect: Dialect,
    /// Below the base.
    pub(crate) path: &'a str,
    /// What the client sent and may go on.
    pub(crate) headers: HeaderMap,
    pub(crate) streamed: bool,
    pub(crate) body: Vec<u8>,
}

impl Config {
    /// Whether all providers can be called as they are configured.
    ///
    /// # Errors
    /// [`BadProvider`].
    pub fn check(&self) -> Result<(), BadProvider> {
        self.providers.iter().try_for_each(|(name, provider)| Way::new(name, provider).map(drop))
    }
}

impl Upstream {
    pub(crate) fn new(config: &Config) -> Result<Self, BadProvider> {
        let mut http = HttpConnector::new_with_resolver(Names(Arc::clone(&config.resolver)));
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(config.waits.connect));
        let https = HttpsConnectorBuilder::new()
            .with_tls_config(config.tls.clone())
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE.0)
            .pool_idle_timeout(IDLE.1)
            .pool_timer(TokioTimer::new())
            .build(https);
        let ways =
            config.providers.iter().map(|(name, provider)| Ok((name.clone(), Way::new(name, provider)?)));
        Ok(Self { client, ways: ways.collect::<Result<_, BadProvider>>()?, nothing: Search::of([]) })
    }

    /// Whether a provider speaks a protocol; `None` if there is no such provider.
    pub(crate) fn speaks(&self, provider: &str, dialect: Dialect) -> Option<bool> {
        Some(self.ways.get(provider)?.dialects.contains(&dialect))
    }

    /// Sends one request. No redirect is followed, and nothing is sent twice.
    ///
    /// # Errors
    /// There is no answer. `None` if there is no such provider, or the request can't be made of this.
    pub(crate) async fn send(&self, sent: Sent<'_>) -> Result<Response<Incoming>, Option<Error>> {
        let request = self.ways.get(sent.provider).and_then(|way| way.request(sent)).ok_or(None)?;
        self.client.request(request).await.map_err(Some)
    }

    /// Finds the key of a provider in what it sends.
    pub(crate) fn search(&self, provider: &str) -> &Search {
        self.ways.get(provider).map_or(&self.nothing, |way| &way.search)
    }
}

impl Way {
    fn new(name: &str, provider: &Provider) -> Result<Self, BadProvider> {
        let base = || BadProvider::Base(name.to_owned());
        let Provider { base: uri, dialects, key, headers } = provider;
        let host = uri.host().ok_or_else(base)?;
        let plain = match uri.scheme_str() {
            Some("http") => true,
            Some("https") => false,
            _ => return Err(base()),
        };
        if uri.query().is_some() || uri.authority().is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err(base());
        }
        if plain && key.is_some() && !is_near(host) {
            return Err(BadProvider::Plain(name.to_owned()));
        }
        let key = key.as_ref().map(|key| (key.header.clone(), key.secret.expose_secret().to_owned()));
        if let Some((_, key)) = &key
            && (key.is_empty() || HeaderValue::from_str(&format!("Bearer {key}")).is_err())
        {
            return Err(BadProvider::Key(name.to_owned()));
        }
        let secret = key.as_ref().and_then(|(_, key)| key.parse::<Secret>().ok());
        Ok(Self {
            search: Search::of(&secret),
            base: uri.to_string().trim_end_matches('/').to_owned(),
            dialects: dialects.clone(),
            headers: headers.iter().cloned().collect(),
            key,
        })
    }

    fn request(&self, sent: Sent<'_>) -> Option<Request<Full<Bytes>>> {
        let uri: Uri = format!("{}{}", self.base, sent.path).parse().ok()?;
        let mut request = Request::new(Full::new(Bytes::from(sent.body)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri;
        let headers = request.headers_mut();
        *headers = sent.headers;
        let accept = if sent.streamed { "text/event-stream" } else { "application/json" };
        headers.insert(ACCEPT, HeaderValue::from_static(accept));
        // What is packed could not be heard.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, AGENT);
        headers.extend(self.headers.clone());
        if let Some((header, key)) = &self.key {
            let (header, value) = match (header, sent.dialect) {
                (Some(header), _) => (header.clone(), key.clone()),
                (None, Dialect::Messages) => (X_API_KEY, key.clone()),
                (None, _) => (AUTHORIZATION, format!("Bearer {key}")),
            };
            let mut value = HeaderValue::from_str(&value).ok()?;
            value.set_sensitive(true);
            headers.insert(header, value);
        }
        Some(request)
    }
}

/// Whether nobody else is on the way to a host.
fn is_near(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match host.parse() {
        Ok(std::net::IpAddr::V4(address)) => address.is_loopback() || address.is_private(),
        Ok(std::net::IpAddr::V6(address)) => address.is_loopback() || address.is_unique_local(),
        Err(_) => host == "localhost",
    }
}

/// Resolves names as the server does for its sandboxes: it sees no file of the machine.
#[derive(Debug, Clone)]
struct Names(Arc<dyn Resolve>);

type Addresses = std::vec::IntoIter<SocketAddr>;

impl tower::Service<Name> for Names {
    type Response = Addresses;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Addresses, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = Arc::clone(&self.0);
        Box::pin(async move {
            if name.as_str() == "localhost" {
                return Ok(vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))].into_iter());
            }
            let name: Hostname = name.as_str().parse()?;
            let found = resolver.resolve(&name).await?;
            let addresses: Vec<_> = found.addresses.into_iter().map(|address| (address, 0).into()).collect();
            Ok(addresses.into_iter())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Key;

    fn way(base: &str, key: Option<&str>) -> Result<Way, BadProvider> {
        let key = key.map(|key| Key { secret: key.to_owned().into(), header: None });
        let headers = vec![(HeaderName::from_static("x-team"), HeaderValue::from_static("ops"))];
        Way::new(
            "one",
            &Provider { base: base.parse().unwrap(), dialects: Dialect::ALL.into(), key, headers },
        )
    }

    #[test]
    fn a_key_goes_over_no_wire_that_others_read() {
        for base in [
            "https://api.example",
            "http://127.0.0.1:8000",
            "http://10.1.2.3/v",
            "http://localhost",
            "http://[::1]:1",
        ] {
            way(base, Some("sk")).unwrap_or_else(|error| panic!("{base}: {error}"));
        }
        for base in ["http://api.example", "http://93.184.216.34", "http://localhost.example"] {
            assert!(matches!(way(base, Some("sk")), Err(BadProvider::Plain(_))), "{base}");
            way(base, None).unwrap();
        }
        for base in ["ftp://a.example", "/v1", "https://a.example/?x=1", "https://me@a.example"] {
            assert!(matches!(way(base, None), Err(BadProvider::Base(_))), "{base}");
        }
        for key in ["", "a\nb"] {
            assert!(matches!(way("https://a.example", Some(key)), Err(BadProvider::Key(_))));
        }
    }

    #[test]
    fn a_key_is_sent_as_the_protocol_has_it() {
        let way = way("https://api.example/base/", Some("sk-1")).unwrap();
        for dialect in Dialect::ALL {
            let path = dialect.path();
            let sent = Sent {
                provider: "one",
                dialect,
                path,
                headers: HeaderMap::new(),
                streamed: true,
                body: Vec::new(),
            };
            let request = way.request(sent).unwrap();
            assert_eq!(request.uri().to_string(), format!("https://api.example/base{path}"));
            let headers = request.headers();
            let of = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
            let (key, bearer) = (of("x-api-key"), of("authorization"));
            if dialect == Dialect::Messages {
                assert_eq!((key.as_deref(), bearer), (Some("sk-1"), None));
            } else {
                assert_eq!((key, bearer.as_deref()), (None, Some("Bearer sk-1")));
            }
            assert_eq!(of("accept-encoding").as_deref(), Some("identity"));
            assert_eq!(of("x-team").as_deref(), Some("ops"));
            assert!(!format!("{headers:?}").contains("sk-1"), "it is in no log");
        }
    }
}
