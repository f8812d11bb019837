use super::*;
use std::net::{IpAddr, Ipv4Addr};

use crate::server::Peer;

fn origin(host: Option<&str>, peer: IpAddr) -> Origin {
    Origin { peer: Peer::Client(peer), secure: false, host: host.map(|host| host.parse().unwrap()) }
}

fn map(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
    }
    map
}

fn list(map: &HeaderMap) -> Vec<String> {
    let mut lines: Vec<String> =
        map.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    lines.sort();
    lines
}

#[test]
fn internal_routes_however_spelled() {
    for path in [
        "/init",
        "/init/",
        "//init",
        "/./init",
        "/x/../init",
        "/INIT",
        "/%69nit",
        "/init;x",
        "/init/more",
        "/freeze",
        "/unfreeze",
        "/collapse",
        "/fsfreeze",
        "/fsthaw",
        "/upgrade",
        "/%2e/init",
        "/..//init",
        "/\\init",
    ] {
        assert!(is_internal(path), "{path}");
    }
    for path in ["/", "/health", "/files", "/initial", "/files/init", "/process.Process/Start", "/envs"] {
        assert!(!is_internal(path), "{path}");
    }
}

#[test]
fn keys_of_this_server_stay_outside() {
    let key = "e2b_0123456789abcdefABCDEF0123456789abcdef01";
    let sent = |name: &str, value: &str| {
        let mut headers = map(&[(name, value)]);
        to_sandbox(&mut headers, origin(None, Ipv4Addr::LOCALHOST.into()), Framing::Empty, None);
        headers.contains_key(name)
    };
    assert!(!sent("x-api-key", key));
    assert!(!sent("x-api-key", &format!(" {key}, x")));
    assert!(!sent("authorization", &format!("Bearer {key}")));
    assert!(!sent("authorization", &format!("bearer  {key}")));
    // What belongs to the program inside.
    assert!(sent("x-api-key", "e2b_0123"));
    assert!(sent("x-api-key", "sk-0123456789abcdef0123456789abcdef01234567"));
    assert!(sent("authorization", "Basic dXNlcjo="));
    assert!(sent("authorization", "Bearer eyJhbGciOi"));
    let mut several = map(&[("x-api-key", "other"), ("x-api-key", key)]);
    to_sandbox(&mut several, origin(None, Ipv4Addr::LOCALHOST.into()), Framing::Empty, None);
    assert!(!several.contains_key("x-api-key"));
}

#[test]
fn what_a_sandbox_gets() {
    let mut headers = map(&[
        ("host", "old"),
        ("connection", "keep-alive, X-Hop"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("http2-settings", "AAMAAABkAAQ"),
        ("expect", "100-continue"),
        ("proxy-authorization", "Basic x"),
        ("cookie", "a=1"),
        ("cookie", "b=2"),
        ("x-access-token", "t"),
        ("x-forwarded-for", "1.2.3.4"),
    ]);
    let peer = IpAddr::from(Ipv4Addr::new(10, 0, 0, 9));
    to_sandbox(&mut headers, origin(Some("h:1"), peer), Framing::Length(3), None);
    assert_eq!(
        list(&headers),
        [
            "content-length: 3",
            "cookie: a=1; b=2",
            "host: h:1",
            "x-access-token: t",
            "x-forwarded-for: 1.2.3.4, 10.0.0.9",
            "x-forwarded-host: h:1",
            "x-forwarded-proto: http",
        ]
    );
    let mut secure = HeaderMap::new();
    to_sandbox(&mut secure, Origin { secure: true, ..origin(None, peer) }, Framing::Empty, None);
    assert_eq!(secure["x-forwarded-proto"], "https");
    let mut headers = map(&[("content-length", "5"), ("x-forwarded-proto", "https")]);
    to_sandbox(&mut headers, origin(None, peer), Framing::Chunked, Some("websocket".parse().unwrap()));
    assert_eq!(
        list(&headers),
        [
            "connection: upgrade",
            "transfer-encoding: chunked",
            "upgrade: websocket",
            "x-forwarded-for: 10.0.0.9",
            "x-forwarded-proto: https",
        ]
    );
}

#[test]
fn which_upgrades_pass() {
    let asked = |pairs: &[(&str, &str)]| upgrade(&map(pairs)).map(|v| v.to_str().unwrap().to_owned());
    assert_eq!(asked(&[("connection", "Upgrade"), ("upgrade", "websocket")]).as_deref(), Some("websocket"));
    assert_eq!(asked(&[("connection", "keep-alive, upgrade"), ("upgrade", "tcp")]).as_deref(), Some("tcp"));
    assert_eq!(asked(&[("upgrade", "websocket")]), None);
    assert_eq!(asked(&[("connection", "upgrade")]), None);
    assert_eq!(asked(&[("connection", "upgrade, http2-settings"), ("upgrade", "h2c")]), None);
    assert_eq!(asked(&[("connection", "upgrade"), ("upgrade", "websocket, H2C")]), None);
}

#[test]
fn what_a_client_gets() {
    let mut headers = map(&[
        ("content-length", "5"),
        ("transfer-encoding", "chunked"),
        ("connection", "close, x-private"),
        ("x-private", "1"),
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
    ]);
    to_client(&mut headers);
    assert_eq!(list(&headers), ["set-cookie: a=1", "set-cookie: b=2"]);
}

#[test]
fn origin_form_drops_the_authority() {
    let form = |uri: &str| origin_form(&uri.parse().unwrap()).unwrap().to_string();
    assert_eq!(form("http://a.test/x?y=1"), "/x?y=1");
    assert_eq!(form("/x%2Fy?z"), "/x%2Fy?z");
    assert_eq!(form("http://a.test"), "/");
    assert_eq!(form("*"), "*");
}
