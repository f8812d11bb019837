use proptest::prelude::*;

use super::*;

fn vector(width: usize, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).unwrap().to_be_bytes();
    [&length[4 - width..], content].concat()
}

fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vector(2, content)].concat()
}

fn names(list: &[(u8, &[u8])]) -> Vec<u8> {
    let entries: Vec<u8> =
        list.iter().flat_map(|(kind, name)| [vec![*kind], vector(2, name)].concat()).collect();
    extension(EXTENSION_SERVER_NAME, &vector(2, &entries))
}

/// The handshake message of a ClientHello.
fn message(extensions: &[Vec<u8>]) -> Vec<u8> {
    let body = [
        &[3, 3][..],
        &[7; 32],
        &vector(1, &[9; 32]),
        // With one of the values that GREASE reserves (RFC 8701).
        &vector(2, &[0x0a, 0x0a, 0x13, 0x01, 0xc0, 0x2f]),
        &vector(1, &[0]),
        &vector(2, &extensions.concat()),
    ]
    .concat();
    [vec![CLIENT_HELLO], vector(3, &body)].concat()
}

fn records(message: &[u8], size: usize) -> Vec<u8> {
    message.chunks(size).flat_map(|piece| [vec![RECORD_HANDSHAKE, 3, 1], vector(2, piece)].concat()).collect()
}

fn read(extensions: &[Vec<u8>]) -> Result<ClientHello, NoHello> {
    match peek(&records(&message(extensions), MAX_RECORD))? {
        Peek::Hello(hello) => Ok(hello),
        Peek::More => panic!("more of what is whole"),
    }
}

fn plain(name: &str) -> Vec<Vec<u8>> {
    vec![
        extension(0x2a2a, &[]),
        names(&[(0, name.as_bytes())]),
        extension(10, &[0, 4, 0x3a, 0x3a, 0, 29]),
        extension(0x3a3a, &[0]),
    ]
}

fn found(name: &str) -> ClientHello {
    ClientHello { sni: Some(name.parse().unwrap()), encrypted: false }
}

#[test]
fn the_name_is_read_however_it_is_cut() {
    let message = message(&plain("Example.com"));
    let smallest = message.len().div_ceil(MAX_RECORDS);
    for size in smallest..=message.len() {
        let bytes = records(&message, size);
        assert_eq!(peek(&bytes), Ok(Peek::Hello(found("example.com"))), "records of {size}");
        for end in 0..bytes.len() {
            assert_eq!(peek(&bytes[..end]), Ok(Peek::More), "{end} bytes of records of {size}");
        }
    }
    assert_eq!(peek(&records(&message, 1)), Err(NoHello::TooManyRecords));
}

/// What OpenSSL 3.0 sends for `www.example.com` when it offers HTTP/2.
#[test]
fn a_client_hello_of_openssl_is_read() {
    let bytes = include_bytes!("../../../../fuzz/seeds/client_hello/openssl");
    assert_eq!(peek(bytes), Ok(Peek::Hello(found("www.example.com"))));
    let message = &bytes[RECORD_HEADER..];
    assert_eq!(peek(&records(message, message.len() / 7)), Ok(Peek::Hello(found("www.example.com"))));
}

#[test]
fn early_data_behind_it_does_not_matter() {
    let mut bytes = records(&message(&plain("a.example")), MAX_RECORD);
    bytes.extend([20, 3, 3, 0, 1, 1, 23, 3, 3, 0xff]);
    assert_eq!(peek(&bytes), Ok(Peek::Hello(found("a.example"))));
}

#[test]
fn without_a_name_there_is_none() {
    assert_eq!(read(&[extension(10, &[])]), Ok(ClientHello { sni: None, encrypted: false }));
    assert_eq!(read(&[]), Ok(ClientHello { sni: None, encrypted: false }));
}

#[test]
fn an_encrypted_hello_is_noticed() {
    for kind in [EXTENSION_ECH, EXTENSION_ESNI] {
        let mut extensions = plain("public.example");
        extensions.push(extension(kind, &[0, 0, 1, 0, 1, 7]));
        assert_eq!(read(&extensions), Ok(ClientHello { encrypted: true, ..found("public.example") }));
    }
}

#[test]
fn what_has_two_readings_is_refused() {
    let malformed = |result: Result<ClientHello, NoHello>| matches!(result, Err(NoHello::Malformed(_)));
    assert_eq!(read(&[names(&[(0, b"a.example"), (0, b"b.example")])]), Err(NoHello::SeveralNames));
    assert_eq!(read(&[names(&[(0, b"a.example"), (1, b"b.example")])]), Err(NoHello::SeveralNames));
    assert!(malformed(read(&[names(&[(1, b"a.example")])])));
    assert!(malformed(read(&[names(&[(0, b"a.example")]), names(&[(0, b"b.example")])])));
    assert!(malformed(read(&[names(&[])])));
    assert!(malformed(read(&[extension(EXTENSION_SERVER_NAME, &[])])));
    assert!(malformed(read(&[extension(10, &[]), extension(10, &[])])));
    for name in [
        "",
        "a.example.",
        "127.0.0.1",
        "[::1]",
        "a\0.example",
        "a.example\r\n",
        "bücher.example",
        "*.example",
        "0x7f.1",
    ] {
        assert!(matches!(read(&[names(&[(0, name.as_bytes())])]), Err(NoHello::Name(_))), "{name:?}");
    }
    assert!(matches!(read(&[names(&[(0, b"\xff\xfe")])]), Err(NoHello::Name(_))));
    let mut two = message(&plain("a.example"));
    two.extend(message(&plain("b.example")));
    assert!(
        matches!(peek(&records(&two, MAX_RECORD)), Err(NoHello::Malformed(_))),
        "two messages in a record"
    );
}

#[test]
fn what_is_not_tls_is_told_at_once() {
    for bytes in [
        &b"GET / HTTP/1.1\r\n"[..],
        b"SSH-2.0-x",
        b"\x15\x03\x01\x00\x02",
        b"\x16\x02",
        b"\x16\x03\x05",
        b"\0",
    ] {
        assert_eq!(peek(bytes), Err(NoHello::NotTls), "{bytes:?}");
    }
    assert_eq!(peek(&[0x80, 0x2e, 1, 0, 2, 0, 0x15]), Err(NoHello::Ssl2));
    assert_eq!(peek(&[0x80, 0x2e, 1, 3, 1]), Err(NoHello::Ssl2));
    assert_eq!(peek(&[0x80, 0x2e, 4]), Err(NoHello::NotTls));
    assert_eq!(peek(&[22, 3, 1, 0, 1, 2]), Err(NoHello::OtherMessage));
    assert!(matches!(peek(&[22, 3, 1, 0, 0]), Err(NoHello::Malformed(_))));
    assert!(matches!(peek(&[22, 3, 1, 0x40, 1]), Err(NoHello::Malformed(_))));
}

#[test]
fn it_has_a_longest_form() {
    let base = message(&[extension(21, &[])]).len() - HANDSHAKE_HEADER;
    let padded = |length: usize| message(&[extension(21, &vec![0; length - base])]);
    assert!(matches!(peek(&records(&padded(MAX_HELLO), 1000)), Ok(Peek::Hello(_))));
    assert_eq!(peek(&records(&padded(MAX_HELLO + 1), 1000)), Err(NoHello::TooLong));
    assert_eq!(
        peek(&[22, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff]),
        Err(NoHello::TooLong),
        "before any of it arrived"
    );
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _any = peek(&bytes);
        let _framed = peek(&records(&[vec![CLIENT_HELLO], vector(3, &bytes)].concat(), 64));
    }

    #[test]
    fn changing_a_byte_never_makes_it_wait_for_more_than_it_may(at in 0_usize..200, to: u8, size in 10_usize..300) {
        let mut bytes = records(&message(&plain("example.com")), size);
        let at = at % bytes.len();
        bytes[at] = to;
        // Whatever was changed, the decision falls before the buffer is full.
        bytes.resize(MAX_PEEK, 0);
        prop_assert!(!matches!(peek(&bytes), Ok(Peek::More)));
    }

    #[test]
    fn more_bytes_never_change_what_was_said(bytes in proptest::collection::vec(any::<u8>(), 0..40), at in 0_usize..200, to: u8) {
        let mut hello = records(&message(&plain("example.com")), 50);
        let at = at % hello.len();
        hello[at] = to;
        let mut said = None;
        for end in 0..=hello.len() {
            match (&said, peek(&hello[..end])) {
                (None, Ok(Peek::More)) => {}
                (None, result) => said = Some(result),
                (Some(said), result) => prop_assert_eq!(said, &result),
            }
        }
        if let Some(said) = said {
            prop_assert_eq!(peek(&[&hello[..], &bytes].concat()), said);
        }
    }
}
