use proptest::prelude::*;

use super::*;

fn read(text: &str) -> Result<RequestHead, BadHead> {
    match peek(text.as_bytes())? {
        Peek::Head(head) => Ok(*head),
        Peek::More => panic!("{text:?} is whole"),
    }
}

/// A request with these lines behind the first two.
fn with(lines: &str) -> Result<RequestHead, BadHead> {
    read(&format!("POST /a/b?c HTTP/1.1\r\nHost: Example.com\r\n{lines}\r\n"))
}

fn named(name: &str) -> Authority {
    Authority::Name(name.parse().unwrap())
}

#[test]
fn a_plain_request_is_read_once_it_is_whole() {
    let text = "GET /a/b?c=d HTTP/1.1\r\nHost: Example.com\r\nX-Y:\tz \u{e9}\r\n\r\nbody";
    let head = read(text).unwrap();
    assert_eq!((head.method.as_str(), &head.host, head.port), ("GET", &named("example.com"), Port::HTTP));
    assert_eq!(head.path.as_ref().unwrap().to_string(), "/a/b");
    assert_eq!((head.body, head.tunnel, head.length), (Body::None, false, text.len() - "body".len()));
    for end in 0..head.length {
        assert_eq!(peek(&text.as_bytes()[..end]), Ok(Peek::More), "{end} bytes");
    }
}

#[test]
fn the_forms_of_a_target_agree_with_host() {
    for (text, host, port) in [
        ("GET http://example.com/x HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com", 80),
        ("GET HTTP://EXAMPLE.com:80?x HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com", 80),
        ("GET http://example.com:8080 HTTP/1.1\r\nHost: example.com:8080\r\n\r\n", "example.com", 8080),
        ("CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n", "example.com", 443),
        ("CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com", 443),
        ("OPTIONS * HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com", 80),
        ("GET / HTTP/1.0\r\nHost: example.com:81\r\n\r\n", "example.com", 81),
    ] {
        let head = read(text).unwrap();
        assert_eq!((head.host, head.port.get()), (named(host), port), "{text:?}");
    }
    for text in [
        "GET http://evil.example/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
        "GET http://example.com:81/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
        "GET http://example.com/ HTTP/1.1\r\nHost: example.com:81\r\n\r\n",
        "CONNECT evil.example:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
        "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:80\r\n\r\n",
        "GET http://93.184.216.34/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
    ] {
        assert_eq!(read(text), Err(BadHead::Disagree), "{text:?}");
    }
}

#[test]
fn addresses_are_told_from_names() {
    for (host, address) in [
        ("93.184.216.34", "93.184.216.34"),
        ("[2606:4700::1]:80", "2606:4700::1"),
        ("[::ffff:10.0.0.1]", "10.0.0.1"),
    ] {
        let head = read(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")).unwrap();
        assert_eq!(head.host, Authority::Address(address.parse().unwrap()));
    }
}

#[test]
fn hosts_that_are_none_are_refused() {
    for host in [
        "",
        "a.example, b.example",
        "user@example.com",
        "user:pw@example.com",
        "example.com.",
        "example.com:",
        "example.com:0",
        "example.com:65536",
        "example.com:080",
        "example.com:80:80",
        "127.1",
        "0x7f.1",
        "2130706433",
        "[::1",
        "[::1]x",
        "[fe80::1%25eth0]",
        "bücher.example",
        "example.com/",
        "example.com evil",
        "exa\u{2024}mple.com",
        "*.example.com",
    ] {
        assert_eq!(read(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")), Err(BadHead::Host), "{host:?}");
    }
    assert_eq!(read("GET / HTTP/1.1\r\nX: y\r\n\r\n"), Err(BadHead::Host));
    assert_eq!(read("GET / HTTP/1.0\r\n\r\n"), Err(BadHead::Host));
    assert_eq!(with("Host: example.com\r\n"), Err(BadHead::Host));
    assert_eq!(with("host: evil.example\r\n"), Err(BadHead::Host));
    assert_eq!(with("Connection: close, Host\r\n"), Err(BadHead::Host));
}

#[test]
fn a_body_ends_in_one_way() {
    let body = |lines: &str| with(lines).map(|head| head.body);
    assert_eq!(body("Content-Length: 12\r\n"), Ok(Body::Length(12)));
    assert_eq!(body("Content-Length: 0\r\n"), Ok(Body::None));
    assert_eq!(body("Transfer-Encoding: Chunked\r\n"), Ok(Body::Chunked));
    for lines in [
        "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 1\r\nContent-Length: 1\r\n",
        "Content-Length: 1, 1\r\n",
        "Content-Length: +1\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: 0x1\r\n",
        "Content-Length:\r\n",
        "Content-Length: 1 1\r\n",
        "Content-Length: 18446744073709551617\r\n",
        "Transfer-Encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: \u{b}chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding:\r\n",
        "Connection: transfer-encoding\r\n",
        "Connection: x, Content-Length\r\n",
    ] {
        assert!(matches!(body(lines), Err(BadHead::Framing | BadHead::Control)), "{lines:?}");
    }
    let old = "POST / HTTP/1.0\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(read(old), Err(BadHead::Framing));
    let connect = "CONNECT a.example:80 HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\n\r\n";
    assert_eq!(read(connect), Err(BadHead::Framing));
}

#[test]
fn lines_that_readers_split_differently_are_refused() {
    for (text, error) in [
        ("GET / HTTP/1.1\nHost: example.com\n\n", BadHead::Control),
        ("GET / HTTP/1.1\r\nHost: example.com\r\nA: b\nHost: evil.example\r\n\r\n", BadHead::Control),
        ("GET / HTTP/1.1\r\nHost: example.com\r\nA: b\rHost: evil.example\r\n\r\n", BadHead::Control),
        ("GET / HTTP/1.1\r\nHost: exa\0mple.com\r\n\r\n", BadHead::Control),
        ("GET / HTTP/1.1\r\nHost: example.com\r\nA: \x7f\r\n\r\n", BadHead::Control),
        ("GET / HTTP/1.1\r\nA: b\r\n Host: evil.example\r\nHost: example.com\r\n\r\n", BadHead::HeaderLine),
        ("GET / HTTP/1.1\r\nHost: example.com\r\n\tx: y\r\n\r\n", BadHead::HeaderLine),
        ("GET / HTTP/1.1\r\nHost : example.com\r\n\r\n", BadHead::HeaderLine),
        ("GET / HTTP/1.1\r\n: x\r\nHost: example.com\r\n\r\n", BadHead::HeaderLine),
        ("GET / HTTP/1.1\r\nHost\r\n\r\n", BadHead::HeaderLine),
        ("GET / HTTP/1.1\r\nH\u{f6}st: x\r\nHost: example.com\r\n\r\n", BadHead::HeaderLine),
        ("GET  / HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::RequestLine),
        ("GET / HTTP/1.1 \r\nHost: example.com\r\n\r\n", BadHead::RequestLine),
        ("GET\t/ HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::RequestLine),
        ("GET /\r\n\r\n", BadHead::RequestLine),
        ("GET / HTTP/1.2\r\nHost: example.com\r\n\r\n", BadHead::RequestLine),
        ("GET / HTTP/2.0\r\nHost: example.com\r\n\r\n", BadHead::RequestLine),
        ("Get / HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::RequestLine),
        ("GET x HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("GET https://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("GET http:///x HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("GET http://a@example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("GET http://example.com\\@evil.example/ HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("GET /#x HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("GET /\u{e9} HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("GET * HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("CONNECT example.com HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
        ("CONNECT / HTTP/1.1\r\nHost: example.com\r\n\r\n", BadHead::Target),
    ] {
        assert_eq!(read(text), Err(error), "{text:?}");
    }
}

#[test]
fn upgrades_lead_to_websocket_alone() {
    let upgrade = |lines: &str| with(lines).map(|head| head.tunnel);
    assert_eq!(upgrade("Connection: Upgrade\r\nUpgrade: WebSocket\r\n"), Ok(true));
    for lines in [
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        "Upgrade: h2c\r\n",
        "Upgrade: websocket, h2c\r\n",
        "Upgrade: websocket\r\nUpgrade: h2c\r\n",
        "HTTP2-Settings: x\r\n",
        "Upgrade: TLS/1.0\r\n",
    ] {
        assert_eq!(upgrade(lines), Err(BadHead::Upgrade), "{lines:?}");
    }
    assert_eq!(peek(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Err(BadHead::Http2));
    for bytes in [&b"\x16\x03\x01"[..], b"\r\nGET / HTTP/1.1", b"get / HTTP/1.1", b" GET", b"\0"] {
        assert_eq!(peek(bytes), Err(BadHead::NotHttp));
    }
}

#[test]
fn heads_have_a_longest_form() {
    let lines = |count: usize| "A: b\r\n".repeat(count);
    assert!(with(&lines(MAX_HEADERS - 1)).is_ok());
    assert_eq!(with(&lines(MAX_HEADERS)), Err(BadHead::TooLong));
    let frame = "GET / HTTP/1.1\r\nHost: example.com\r\nA: \r\n\r\n".len();
    let long = |length: usize| {
        format!("GET / HTTP/1.1\r\nHost: example.com\r\nA: {}\r\n\r\n", "x".repeat(length - frame))
    };
    assert!(read(&long(MAX_HEAD)).is_ok());
    assert_eq!(read(&long(MAX_HEAD + 1)), Err(BadHead::TooLong));
    assert_eq!(peek(&[b'A'; MAX_HEAD]), Err(BadHead::TooLong));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _any = peek(&bytes);
        let _head = peek(&[b"GET / HTTP/1.1\r\nHost: ", &bytes[..], b"\r\n\r\n"].concat());
        let _target = peek(&[b"GET ", &bytes[..], b" HTTP/1.1\r\nHost: example.com\r\n\r\n"].concat());
    }

    /// One byte anywhere never leads to another host, and never to another end of the head.
    #[test]
    fn a_byte_put_in_changes_no_meaning(at in 0_usize..100, byte: u8) {
        let text = "POST http://allowed.example/a HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 5\r\nA: b\r\n\r\n";
        let mut bytes = text.as_bytes().to_vec();
        // Else it is as if it had been put in behind that, at the end even behind the head.
        prop_assume!(bytes[at % text.len()] != byte);
        bytes.insert(at % text.len(), byte);
        if let Ok(Peek::Head(head)) = peek(&bytes) {
            prop_assert_eq!(head.length, bytes.len());
            prop_assert_eq!(head.host, named("allowed.example"));
        }
    }

    #[test]
    fn more_bytes_never_change_what_was_said(at in 0_usize..100, byte: u8, more in proptest::collection::vec(any::<u8>(), 0..20)) {
        let text = "GET /a HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 5\r\n\r\n";
        let mut bytes = text.as_bytes().to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        let mut refused = None;
        for end in 0..=bytes.len() {
            if let (None, Err(error)) = (&refused, peek(&bytes[..end])) {
                refused = Some(error);
            }
        }
        let whole = peek(&[&bytes[..], &more].concat());
        match (refused, peek(&bytes)) {
            (Some(_), _) => prop_assert!(whole.is_err(), "{:?}", whole),
            (None, Ok(Peek::Head(head))) => prop_assert_eq!(whole, Ok(Peek::Head(head))),
            (None, _) => {}
        }
    }
}
