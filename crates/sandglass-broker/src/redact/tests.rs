use std::fmt::Write as _;

use data_encoding::{BASE64, BASE64URL_NOPAD};
use proptest::prelude::*;

use super::*;

const SECRET: &str = "s3cr\"t/va\\lue+100%~with blank?>";

fn search() -> Search {
    Search::of([&SECRET.parse().unwrap()])
}

/// What comes out if it comes in such pieces.
fn in_pieces(search: &Search, text: &[u8], piece: usize) -> Vec<u8> {
    let mut stream = Redactor::new(search);
    let mut out = Vec::new();
    for piece in text.chunks(piece.max(1)) {
        out.extend(stream.feed(piece));
    }
    out.extend(stream.finish());
    out
}

fn percent(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "%{byte:02x}");
        out
    })
}

fn json(text: &str) -> String {
    let quoted = serde_json::to_string(text).unwrap();
    quoted[1..quoted.len() - 1].to_owned()
}

#[test]
fn it_is_found_in_every_form_and_cut_at_every_byte() {
    let forms = [
        SECRET.to_owned(),
        percent(SECRET),
        percent(SECRET).to_uppercase(),
        json(SECRET),
        json(SECRET).replace('/', "\\/"),
        SECRET.replace(' ', "+"),
        SECRET.bytes().fold(String::new(), |out, byte| out + &format!("\\u{byte:04X}")),
        // Some of it escaped, some not.
        SECRET.replace('%', "%25").replace('+', "%2B").replace('"', "%22"),
        json(&SECRET.replace('%', "%25")),
    ];
    for form in forms {
        for piece in 1..=form.len() + 9 {
            let out = in_pieces(&search(), format!("before {form} after").as_bytes(), piece);
            let out = String::from_utf8(out).unwrap();
            assert_eq!(
                out,
                format!("before {} after", "*".repeat(form.len())),
                "{form} in pieces of {piece}"
            );
        }
    }
}

#[test]
fn it_is_found_in_base64_wherever_it_begins_there() {
    for before in 0..7 {
        for after in 0..4 {
            let whole = format!("{}{SECRET}{}", "user:xy".split_at(before).0, "more".split_at(after).0);
            for text in [
                BASE64.encode(whole.as_bytes()),
                BASE64URL_NOPAD.encode(whole.as_bytes()),
                percent(&BASE64.encode(whole.as_bytes())),
            ] {
                for piece in [1, 2, 7, 1000] {
                    let out = in_pieces(&search(), format!("Basic {text}\n").as_bytes(), piece);
                    let out = String::from_utf8(out).unwrap();
                    assert_eq!(out.len(), text.len() + 7, "{out}");
                    let left =
                        out.trim_start_matches("Basic ").trim_end().replace("%3d", "=").replace('*', "A");
                    let left = left.split('%').next().unwrap().trim_end_matches('=').to_owned();
                    let left = left.get(..left.len() / 4 * 4).unwrap();
                    let bytes =
                        BASE64URL_NOPAD.decode(left.replace('+', "-").replace('/', "_").as_bytes()).unwrap();
                    let known = SECRET.as_bytes().windows(2).any(|pair| {
                        !whole.replace(SECRET, "").as_bytes().windows(2).any(|other| other == pair)
                            && bytes.windows(2).any(|other| other == pair)
                    });
                    assert!(!known, "{text}: {out}");
                }
            }
        }
    }
}

#[test]
fn what_is_no_credential_passes_at_once() {
    let search = search();
    let mut stream = Redactor::new(&search);
    assert_eq!(stream.feed(b"event: message\ndata: {\"a\": 1}\n\n"), b"event: message\ndata: {\"a\": 1}\n\n");
    assert_eq!(stream.feed(b"ends with s3cr"), b"ends with ", "it may become one");
    assert_eq!(stream.feed(b"et\n"), b"s3cret\n");
    assert_eq!(stream.feed(b"s3cr"), b"");
    assert_eq!(stream.finish(), b"s3cr", "an answer that ends");
    assert_eq!(stream.taken(), 0);
}

#[test]
fn one_in_another_and_one_behind_another_are_all_taken_out() {
    let (short, long) = ("abcdefgh".parse().unwrap(), "abcdefghabcdefghij".parse().unwrap());
    let search = Search::of([&short, &long]);
    for piece in 1..20 {
        let out = in_pieces(&search, b"-abcdefgh-abcdefghabcdefghij-abcdefghabcdefgh-abcdefghabcd", piece);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "-********-******************-****************-********abcd"
        );
    }
    let same = "aaaaaaaaaa".parse().unwrap();
    assert_eq!(Search::of([&same]).text(&[b'a'; 25]), (vec![b'*'; 25], true), "they overlap");
}

#[test]
fn one_that_ends_as_an_escape_begins_is_found_where_all_ends() {
    for secret in ["12345678%", "12345678\\", "12345678%2"] {
        let search = Search::of([&secret.parse().unwrap()]);
        for piece in 1..12 {
            let out = in_pieces(&search, format!("-{secret}").as_bytes(), piece);
            assert_eq!(
                out,
                [b"-".as_slice(), &vec![b'*'; secret.len()]].concat(),
                "{secret} in pieces of {piece}"
            );
        }
    }
}

proptest! {
    /// However it is escaped and cut, no eight bytes of it come through, and all else does.
    #[test]
    fn nothing_of_it_comes_through(
        before in "[ -~]{0,20}", after in "[ -~]{0,20}", escapes in prop::collection::vec(0..4_u8, SECRET.len()), piece in 1..50_usize,
    ) {
        let mut form = String::new();
        for (byte, escape) in SECRET.bytes().zip(escapes) {
            let _ = match escape {
                0 => write!(form, "{}", char::from(byte)),
                1 => write!(form, "%{byte:02X}"),
                2 => write!(form, "\\u{byte:04x}"),
                _ => write!(form, "{}", json(&char::from(byte).to_string())),
            };
        }
        let out = in_pieces(&search(), format!("{before}{form}{after}").as_bytes(), piece);
        prop_assert_eq!(String::from_utf8(out).unwrap(), format!("{before}{}{after}", "*".repeat(form.len())));
    }

    /// What is not there is not found, and the cuts do not matter.
    #[test]
    fn cuts_change_nothing(text in prop::collection::vec(any::<u8>(), 0..300), piece in 1..40_usize) {
        prop_assert_eq!(in_pieces(&search(), &text, piece), text);
    }
}
