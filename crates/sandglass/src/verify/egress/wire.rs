//! What attackers say: queries of DNS, ClientHellos, requests of HTTP.

/// Types of records that carry data out, or say where to connect.
pub(super) const A: u16 = 1;
pub(super) const TUNNELS: [(&str, u16); 10] = [
    ("A", A),
    ("CNAME", 5),
    ("NULL", 10),
    ("PTR", 12),
    ("MX", 15),
    ("TXT", 16),
    ("AAAA", 28),
    ("SRV", 33),
    ("HTTPS", 65),
    ("ANY", 255),
];

const EXTENSION_SERVER_NAME: u16 = 0;
const EXTENSION_SUPPORTED_GROUPS: u16 = 10;
const EXTENSION_SUPPORTED_VERSIONS: u16 = 43;
const EXTENSION_ECH: u16 = 0xfe0d;

/// A query for labels of any bytes.
pub(super) fn query(labels: &[&[u8]], kind: u16) -> Vec<u8> {
    let mut query = vec![0x5a, 0x5a, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in labels {
        query.extend(vector(1, label));
    }
    query.push(0);
    query.extend(kind.to_be_bytes());
    query.extend([0, 1]);
    query
}

/// A query for a name.
pub(super) fn query_name(name: &str, kind: u16) -> Vec<u8> {
    let labels: Vec<&[u8]> = name.split('.').filter(|label| !label.is_empty()).map(str::as_bytes).collect();
    query(&labels, kind)
}

/// A query as it goes over TCP.
pub(super) fn over_tcp(query: &[u8]) -> Vec<u8> {
    vector(2, query)
}

/// What a ClientHello says. The word is in its random bytes.
#[derive(Debug, Default)]
pub(super) struct Hello<'a> {
    /// The names that it asks for: one, as a rule.
    pub(super) names: &'a [&'a [u8]],
    /// Whether the name that counts is encrypted.
    pub(super) encrypted: bool,
    /// Bytes of it that go in one record; all if 0.
    pub(super) record: usize,
}

impl Hello<'_> {
    pub(super) fn bytes(&self, word: &str) -> Vec<u8> {
        let mut random = word.as_bytes().to_vec();
        random.resize(32, b'.');
        let mut extensions = Vec::new();
        for name in self.names {
            let entry = [vec![0], vector(2, name)].concat();
            extensions.extend(extension(EXTENSION_SERVER_NAME, &vector(2, &entry)));
        }
        extensions.extend(extension(EXTENSION_SUPPORTED_GROUPS, &[0, 2, 0, 29]));
        extensions.extend(extension(EXTENSION_SUPPORTED_VERSIONS, &[2, 3, 4]));
        if self.encrypted {
            // Outer; HKDF-SHA256 with AES-128-GCM; one configuration, a key and a payload that nobody reads here.
            let outer = [&[0, 0, 1, 0, 1, 7][..], &vector(2, &[9; 32]), &vector(2, &[8; 128])].concat();
            extensions.extend(extension(EXTENSION_ECH, &outer));
        }
        let body = [
            &[3, 3][..],
            &random,
            &vector(1, &[7; 32]),
            &vector(2, &[0x13, 0x01, 0xc0, 0x2f]),
            &[1, 0],
            &vector(2, &extensions),
        ]
        .concat();
        let message = [vec![1], vector(3, &body)].concat();
        let size = if self.record == 0 { message.len() } else { self.record };
        message.chunks(size).flat_map(|piece| [vec![22, 3, 1], vector(2, piece)].concat()).collect()
    }
}

/// A ClientHello for one name.
pub(super) fn hello(name: &str, word: &str) -> Vec<u8> {
    Hello { names: &[name.as_bytes()], ..Hello::default() }.bytes(word)
}

/// A request for a path that is the word.
pub(super) fn get(host: &str, word: &str) -> Vec<u8> {
    format!("GET /{word} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: probe\r\n\r\n").into_bytes()
}

fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vector(2, content)].concat()
}

/// Bytes behind their length, which takes `width` bytes.
fn vector(width: usize, content: &[u8]) -> Vec<u8> {
    let len = u32::try_from(content.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&len[4 - width..], content].concat()
}

#[cfg(test)]
mod tests {
    use sandglass_egress::http::{self, BadHead};
    use sandglass_egress::tls::{Peek, peek};

    use super::*;

    #[test]
    fn hellos_are_such() {
        let word = "sgnonceabcdefghijklmnopq";
        let read = |hello: &Hello<'_>| match peek(&hello.bytes(word)).unwrap() {
            Peek::Hello(hello) => hello,
            Peek::More => panic!("more of what is whole"),
        };
        let plain = read(&Hello { names: &[b"a.example"], ..Hello::default() });
        assert_eq!(
            (plain.sni.map(|name| name.to_string()).as_deref(), plain.encrypted),
            (Some("a.example"), false)
        );
        assert!(read(&Hello { names: &[b"a.example"], encrypted: true, record: 0 }).encrypted);
        assert!(read(&Hello { names: &[b"a.example"], encrypted: false, record: 9 }).sni.is_some());
        assert!(read(&Hello::default()).sni.is_none());
        assert!(String::from_utf8_lossy(&hello("a.example", word)).contains(word));
    }

    #[test]
    fn requests_are_such() {
        let read = http::peek(&get("a.example", "word"));
        assert!(matches!(read, Ok(http::Peek::Head(_))), "{read:?}");
        assert!(!matches!(read, Err(BadHead::NotHttp)));
    }

    #[test]
    fn queries_are_such() {
        let query = query_name("a.example.", A);
        assert_eq!(query[12..], *b"\x01a\x07example\0\0\x01\0\x01");
        assert_eq!(over_tcp(&query)[..2], [0, 27]);
    }
}
