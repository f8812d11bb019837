use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use rustls::ClientConfig;
use sandglass_egress::policy::Own;
use sandglass_egress::proxy::Dial as _;
use sandglass_types::SandboxId;
use tokio_rustls::TlsConnector;

use super::*;
use crate::fake::{Guest, KEY, Served, Wire};
use crate::server::Settings;

const NAMES: [&str; 2] = ["sbx.test", "*.sbx.test"];

/// A certificate that vouches for itself, and its key, in PEM.
fn pem(names: &[&str]) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let certificate = CertificateParams::new(names).unwrap().self_signed(&key).unwrap();
    (certificate.pem(), key.serialize_pem())
}

struct Secured {
    served: Served,
    trusted: CertificateDer<'static>,
}

impl Secured {
    async fn start(plain: Plain, settings: Settings) -> Self {
        let (chain, key) = pem(&NAMES);
        let certificate =
            Certificate::from_pem(chain.as_bytes(), key.as_bytes(), &["api.sbx.test", "sbx.test"]).unwrap();
        let trusted = CertificateDer::from_pem_slice(chain.as_bytes()).unwrap();
        let certificate = tokio::sync::watch::channel(certificate).1;
        Self { served: Served::behind(Some(Tls { certificate, plain }), settings).await, trusted }
    }

    /// Shakes hands over a connection. Returns also what was negotiated.
    async fn shake(&self, stream: Box<dyn Stream>, offered: &[&[u8]]) -> (Wire, Option<Vec<u8>>) {
        let mut roots = RootCertStore::empty();
        roots.add(self.trusted.clone()).unwrap();
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = offered.iter().map(|one| one.to_vec()).collect();
        let name = ServerName::try_from("api.sbx.test").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
        let negotiated = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
        (Wire::over(Box::new(stream)), negotiated)
    }

    async fn connect(&self) -> Wire {
        self.shake(self.served.connect().await.into_stream(), &[b"http/1.1"]).await.0
    }
}

fn info(host: &str) -> String {
    format!("GET /v1/info HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {KEY}\r\n\r\n")
}

async fn status(wire: &mut Wire, request: String) -> String {
    wire.send(request).await;
    wire.head().await[0].split(' ').nth(1).unwrap().to_owned()
}

#[tokio::test]
async fn one_port_speaks_with_and_without_tls() {
    let secured = Secured::start(Plain::Loopback, Settings::default()).await;
    assert_eq!(status(&mut secured.connect().await, info("api.sbx.test")).await, "200");
    assert_eq!(status(&mut secured.served.connect().await, info("localhost")).await, "200");
    let mut refused = secured.connect().await;
    assert_eq!(status(&mut refused, info("api.sbx.test").replace(KEY, "e2b_0")).await, "401");
}

#[tokio::test]
async fn http2_is_negotiated_and_spoken() {
    let secured = Secured::start(Plain::Loopback, Settings::default()).await;
    let offers: [(&[&[u8]], &[u8]); 3] =
        [(&[b"h2", b"http/1.1"], b"h2"), (&[b"http/1.1"], b"http/1.1"), (&[b"h2"], b"h2")];
    for (offered, expected) in offers {
        let stream = secured.served.connect().await.into_stream();
        let (mut wire, negotiated) = secured.shake(stream, offered).await;
        assert_eq!(negotiated.as_deref(), Some(expected));
        if expected == b"h2" {
            // The server's settings come as the first frame, of type 4, on stream 0.
            wire.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
            wire.until("\x04\0\0\0\0\0").await;
        }
    }
}

#[tokio::test]
async fn what_is_inside_hears_how_its_client_came() {
    let secured = Secured::start(Plain::Loopback, Settings::default()).await;
    let (guest, address) = Guest::listen().await;
    let (id, _) = secured.served.fake.run(&[(8000, address)]);
    let request = format!("GET / HTTP/1.1\r\nHost: 8000-{id}.sbx.test\r\n\r\n");
    let mut clients = [secured.connect().await, secured.served.connect().await];
    for (client, expected) in clients.iter_mut().zip(["https", "http"]) {
        client.send(&request).await;
        let head = guest.accept().await.head().await;
        assert!(head.contains(&format!("x-forwarded-proto: {expected}")), "{head:?}");
    }
}

#[tokio::test]
async fn who_may_go_without_is_decided_once() {
    for (plain, expected) in [(Plain::Loopback, "200"), (Plain::Everybody, "200"), (Plain::Nobody, "400")] {
        let secured = Secured::start(plain, Settings::default()).await;
        assert_eq!(
            status(&mut secured.served.connect().await, info("localhost")).await,
            expected,
            "{plain:?}"
        );
        assert_eq!(status(&mut secured.connect().await, info("sbx.test")).await, "200");
        // A sandbox has no reason to trust the certificate, and is on this machine.
        let caller = SandboxId::random();
        let mut sandbox = Wire::new(secured.served.dial.enter(Own::Edge, &caller).unwrap());
        let nobody = format!("GET / HTTP/1.1\r\nHost: 8000-{caller}.sbx.test\r\n\r\n");
        assert_eq!(status(&mut sandbox, nobody).await, "502");
    }
}

#[tokio::test]
async fn the_server_is_a_way_to_its_own_names_alone() {
    let secured = Secured::start(Plain::Nobody, Settings::default()).await;
    let connect = |place: &str| format!("CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n");
    for place in ["api.sbx.test:443", "sbx.test:443", "8000-x.SBX.test:3000"] {
        let mut wire = secured.served.connect().await;
        assert_eq!(status(&mut wire, connect(place)).await, "200", "{place}");
        let (mut inner, _) = secured.shake(wire.into_stream(), &[b"http/1.1"]).await;
        assert_eq!(status(&mut inner, info("api.sbx.test")).await, "200");
        // And no further.
        assert_eq!(status(&mut inner, connect("api.sbx.test:443")).await, "403");
    }
    // Without TLS it is what it is without the tunnel.
    let mut wire = secured.served.connect().await;
    assert_eq!(status(&mut wire, connect("api.sbx.test:80")).await, "200");
    assert_eq!(status(&mut wire, info("api.sbx.test")).await, "400");
    for place in ["example.com:443", "127.0.0.1:22", "a.b.sbx.test:443", "xsbx.test:443", "localhost:80"] {
        let mut wire = secured.served.connect().await;
        assert_eq!(status(&mut wire, connect(place)).await, "403", "{place}");
    }
    let mut sandbox = Wire::new(secured.served.dial.enter(Own::Edge, &SandboxId::random()).unwrap());
    assert_eq!(status(&mut sandbox, connect("api.sbx.test:443")).await, "403");
    // Nor is one that is asked for a page as proxies are.
    let secured = Secured::start(Plain::Loopback, Settings::default()).await;
    for (place, expected) in
        [("evil.test", "403"), ("xsbx.test", "403"), ("api.sbx.test", "200"), ("127.0.0.1:3000", "200")]
    {
        let whole = info(place).replace("GET /", &format!("GET http://{place}/"));
        assert_eq!(status(&mut secured.served.connect().await, whole).await, expected, "{place}");
    }
}

#[tokio::test]
async fn who_does_not_shake_hands_in_time_is_dropped() {
    let settings = Settings { head_timeout: Duration::from_millis(150), ..Settings::default() };
    let secured = Secured::start(Plain::Loopback, settings).await;
    // The beginning of a handshake, and nothing more.
    for said in [&b"\x16"[..], b"\x16\x03\x01\x02\x00\x01"] {
        let mut wire = secured.served.connect().await;
        wire.send(said).await;
        wire.rest().await;
    }
    assert_eq!(status(&mut secured.connect().await, info("sbx.test")).await, "200");
}

#[test]
fn only_a_certificate_for_the_names_is_taken() {
    let (chain, key) = pem(&NAMES);
    let of = |chain: &str, key: &str, names: &[&str]| {
        Certificate::from_pem(chain.as_bytes(), key.as_bytes(), names).map(|_| ())
    };
    of(&chain, &key, &["sbx.test", "api.sbx.test"]).unwrap();
    assert!(
        matches!(of(&chain, &key, &["other.test"]), Err(CertificateError::Name(name)) if name == "other.test")
    );
    assert!(matches!(of(&chain, &key, &["a.b.sbx.test"]), Err(CertificateError::Name(_))));
    let (one_name, its_key) = pem(&["sbx.test"]);
    assert!(matches!(of(&one_name, &its_key, &["api.sbx.test"]), Err(CertificateError::Name(_))));
    assert!(matches!(of(&chain, &its_key, &[]), Err(CertificateError::Pair(_))));
    assert!(matches!(of("", &key, &[]), Err(CertificateError::Chain(None))));
    assert!(matches!(of(&key, &key, &[]), Err(CertificateError::Chain(None))));
    assert!(matches!(of(&chain, &chain, &[]), Err(CertificateError::Key(_))));
    let broken = chain.replace('A', "B");
    assert!(of(&broken, &key, &["sbx.test"]).is_err());
}
