use super::*;
use proptest::prelude::*;

const ID: &str = "abcdefghij0123456789";

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
    }
    map
}

fn to(port: u16) -> Result<Target, Unroutable> {
    Ok(Target::Sandbox { id: ID.parse().unwrap(), port: NonZeroU16::new(port).unwrap() })
}

#[test]
fn by_headers() {
    let both = headers(&[("E2b-Sandbox-Id", ID), ("E2b-Sandbox-Port", "49983")]);
    for host in ["localhost", "127.0.0.1", "::1", "sandbox.e2b.test", "", "buildbox", "my-box.example.com"] {
        assert_eq!(route(host, None, &both), to(49983), "{host}");
    }
    let id = headers(&[("e2b-sandbox-id", ID)]);
    let port = headers(&[("e2b-sandbox-port", "80")]);
    for host in ["localhost", "10.0.0.1", "sandbox.x", "buildbox"] {
        assert_eq!(route(host, None, &id), Err(Unroutable::MissingPort), "{host}");
        assert_eq!(route(host, None, &port), Err(Unroutable::MissingId), "{host}");
    }
}

#[test]
fn without_headers_it_is_the_api() {
    let none = HeaderMap::new();
    for host in ["localhost", "127.0.0.1", "::1", "api.e2b.test", "buildbox", "10-0-0-1.example.com", ""] {
        assert_eq!(route(host, None, &none), Ok(Target::Api), "{host}");
    }
    assert_eq!(route("api.sbx.test", Some("sbx.test:8443"), &none), Ok(Target::Api));
    assert_eq!(route("sbx.test", Some("sbx.test"), &none), Ok(Target::Api));
    assert_eq!(route("sandbox.sbx.test", None, &none), Err(Unroutable::MissingId));
}

#[test]
fn by_host_which_wins_over_headers() {
    let other = headers(&[("e2b-sandbox-id", "zzzzzzzzzzzzzzzzzzzz"), ("e2b-sandbox-port", "1")]);
    for host in [format!("3000-{ID}.sbx.test"), format!("3000-{ID}-6532622b.sbx.test"), format!("3000-{ID}")]
    {
        assert_eq!(route(&host, Some("sbx.test"), &HeaderMap::new()), to(3000), "{host}");
        assert_eq!(route(&host, None, &other), to(3000), "{host}");
    }
}

#[test]
fn bad_hosts_under_our_domain() {
    let none = HeaderMap::new();
    let under = |label: &str| route(&format!("{label}.sbx.test"), Some("sbx.test:443"), &none);
    assert_eq!(under(&format!("x-{ID}")), Err(Unroutable::Port));
    assert_eq!(under(&format!("0-{ID}")), Err(Unroutable::Port));
    assert_eq!(under(&format!("65536-{ID}")), Err(Unroutable::Port));
    assert_eq!(under(&format!("+80-{ID}")), Err(Unroutable::Port));
    assert_eq!(under("80-"), Err(Unroutable::Id));
    assert_eq!(under("80-a_b"), Err(Unroutable::Id));
    assert_eq!(under("80-short"), Ok(Target::Nowhere { id: "short".into() }));
}

#[test]
fn bad_headers() {
    let with = |id: &str, port: &str| {
        route("localhost", None, &headers(&[("e2b-sandbox-id", id), ("e2b-sandbox-port", port)]))
    };
    assert_eq!(with("../../etc", "80"), Err(Unroutable::Id));
    assert_eq!(with("ABC", "80"), Err(Unroutable::Id));
    assert_eq!(with(&"a".repeat(65), "80"), Err(Unroutable::Id));
    for port in ["", "0", "-1", "+80", "65536", "80.5", "http", "0x50"] {
        assert_eq!(with(ID, port), Err(Unroutable::Port), "{port}");
    }
    assert_eq!(with("nonexistent", "80"), Ok(Target::Nowhere { id: "nonexistent".into() }));
    assert_eq!(with(&format!("{ID}-client"), "80"), to(80));
    let twice = headers(&[("e2b-sandbox-id", ID), ("e2b-sandbox-id", ID), ("e2b-sandbox-port", "80")]);
    assert_eq!(route("localhost", None, &twice), Err(Unroutable::Id));
}

#[test]
fn which_host_is_named() {
    let read = |version, uri: &str, pairs: &[(&str, &str)]| {
        host(version, &uri.parse().unwrap(), &headers(pairs)).ok()
    };
    let h11 = Version::HTTP_11;
    assert_eq!(read(h11, "/x", &[("host", "LocalHost:3000")]).as_deref(), Some("localhost"));
    assert_eq!(read(h11, "/x", &[("host", "[::1]:3000")]).as_deref(), Some("::1"));
    assert_eq!(read(h11, "http://a.test:1/x", &[("host", "a.test:1")]).as_deref(), Some("a.test"));
    assert_eq!(read(Version::HTTP_2, "http://a.test/x", &[]).as_deref(), Some("a.test"));
    assert_eq!(read(Version::HTTP_10, "/x", &[]).as_deref(), Some(""));
    assert_eq!(read(h11, "/x", &[]), None);
    assert_eq!(read(h11, "http://a.test/x", &[("host", "b.test")]), None);
    assert_eq!(read(h11, "/x", &[("host", "a.test"), ("host", "a.test")]), None);
    assert_eq!(read(h11, "/x", &[("host", "a@b")]), None);
    assert_eq!(read(h11, "/x", &[("host", "a:80:90")]), None);
}

proptest! {
    #[test]
    fn no_host_or_header_panics(host in "[ -~]{0,40}", id in "[ -~]{0,40}", port in "[ -~]{0,10}") {
        let pairs = headers(&[("e2b-sandbox-id", &id), ("e2b-sandbox-port", &port), ("host", &host)]);
        let _ = route(&host, Some("sbx.test"), &pairs);
        let _ = super::host(Version::HTTP_11, &"/".parse().unwrap(), &pairs);
    }
}
