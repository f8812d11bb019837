use proptest::prelude::*;

use super::*;

fn sandbox() -> SandboxId {
    "abcdefghij0123456789".parse().unwrap()
}

fn receipt(name: &[u8], sent: u64) -> Receipt {
    Receipt {
        time: Timestamp::from_millis(1_764_424_800_123),
        generation: Generation::FIRST,
        kind: Kind::Connection,
        name: Some(Text::new(name)),
        record: None,
        answer: Vec::new(),
        address: Some("93.184.216.34".parse().unwrap()),
        port: Some(Port::HTTPS),
        transport: Some(Transport::Tcp),
        shown: None,
        method: None,
        status: None,
        rule: Text::new(b"request/rule-1 within ceiling/rule-1"),
        outcome: Outcome::Allowed,
        sent,
        received: 7,
        lost: 0,
    }
}

fn chain(count: u64) -> (Vec<String>, Head) {
    let mut chain = Chain::begin(sandbox());
    let lines = (0..count).map(|sent| chain.append(receipt(b"example.com", sent)).unwrap()).collect();
    (lines, chain.head)
}

fn check(lines: &[String], end: Option<&Head>) -> Result<Head, Broken> {
    verify(&sandbox(), None, lines.iter().map(String::as_str), end)
}

#[test]
fn a_whole_chain_is_whole() {
    let (lines, head) = chain(3);
    assert_eq!(check(&lines, Some(&head)), Ok(head.clone()));
    assert_eq!(check(&[], Some(Chain::begin(sandbox()).head())), Ok(chain(0).1));
    let value: serde_json::Value = serde_json::from_str(&lines[1]).unwrap();
    assert_eq!(value["number"], 1);
    assert_eq!(value["receipt"]["name"], "example.com");
    assert_eq!(value["digest"], serde_json::from_str::<serde_json::Value>(&lines[2]).unwrap()["previous"]);
}

#[test]
fn a_chain_goes_on_after_a_restart() {
    let (mut lines, head) = chain(2);
    let stored = serde_json::to_string(&head).unwrap();
    let mut resumed = Chain::resume(sandbox(), serde_json::from_str(&stored).unwrap());
    lines.push(resumed.append(receipt(b"later.example", 1)).unwrap());
    assert_eq!(check(&lines, Some(resumed.head())).map(|head| head.count), Ok(3));
}

#[test]
fn what_is_left_of_a_chain_is_checked_from_where_it_begins() {
    let (lines, head) = chain(5);
    let start = Head::before(&lines[2]).unwrap();
    assert_eq!(start, chain(2).1);
    let left = || lines[2..].iter().map(String::as_str);
    assert_eq!(verify(&sandbox(), Some(start), left(), Some(&head)), Ok(head.clone()));
    assert_eq!(verify(&sandbox(), Some(chain(1).1), left(), None), Err(Broken::Order(2)));
    assert_eq!(Head::after(&sandbox(), &lines[4]), Ok(head));
    assert_eq!(Head::after(&SandboxId::random(), &lines[4]), Err(Broken::Changed(5)));
    assert_eq!(Head::after(&sandbox(), "{}"), Err(Broken::Malformed(1)));
    assert_eq!(Head::before(""), None);
}

#[test]
fn lines_left_out_put_in_or_swapped_are_noticed() {
    let (lines, head) = chain(4);
    let pick = |places: &[usize]| places.iter().map(|place| lines[*place].clone()).collect::<Vec<_>>();
    assert_eq!(check(&pick(&[1, 2, 3]), None), Err(Broken::Order(1)));
    assert_eq!(check(&pick(&[0, 2, 3]), None), Err(Broken::Order(2)));
    assert_eq!(check(&pick(&[0, 2, 1, 3]), None), Err(Broken::Order(2)));
    assert_eq!(check(&pick(&[0, 1, 1, 2, 3]), None), Err(Broken::Order(3)));
    assert!(check(&pick(&[0, 1, 2]), None).is_ok(), "of its end a chain alone does not know");
    assert_eq!(check(&pick(&[0, 1, 2]), Some(&head)), Err(Broken::End(3)));
    let mut other = Chain::begin(SandboxId::random());
    let foreign = other.append(receipt(b"example.com", 0)).unwrap();
    assert_eq!(check(&[foreign], None), Err(Broken::Changed(1)));
}

#[test]
fn a_digest_made_anew_does_not_hide_a_change() {
    let (mut lines, _) = chain(3);
    let mut forged = Chain::resume(sandbox(), chain(1).1);
    lines[1] = forged.append(receipt(b"harmless.example", 1)).unwrap();
    assert_eq!(check(&lines, None), Err(Broken::Order(3)));
    let mut miscounted = Chain::resume(sandbox(), Head { count: 7, ..chain(1).1 });
    lines[1] = miscounted.append(receipt(b"example.com", 1)).unwrap();
    assert_eq!(check(&lines, None), Err(Broken::Order(2)));
}

#[test]
fn hostile_texts_stay_in_their_line() {
    let mut chain = Chain::begin(sandbox());
    let name = b"a\",\"digest\":\"0\"}\n{\"number\":1,\xff\0\x1b[31m";
    let line = chain.append(receipt(name, 0)).unwrap();
    assert!(line.bytes().all(|byte| matches!(byte, b' '..=b'~')), "{line}");
    assert!(check(&[line], Some(chain.head())).is_ok());
    let text = Text::new(&[0; 4096]);
    assert!(text.to_string().len() <= MAX_TEXT);
    let longest = Receipt {
        name: Some(Text::new(&[b'"'; 4096])),
        shown: Some(Text::new(&[b'\\'; 4096])),
        rule: Text::new(&[b'"'; 4096]),
        record: Some(Text::new(&[b'"'; 4096])),
        answer: vec!["255.255.255.255".parse().unwrap(); 12],
        lost: u64::MAX,
        ..receipt(b"", u64::MAX)
    };
    let line = chain.append(longest).unwrap();
    assert!(line.len() <= MAX_LINE, "{}", line.len());
    assert!(serde_json::from_str::<Text>(r#""a\nb""#).is_err());
}

proptest! {
    #[test]
    fn any_change_is_noticed(line in 0_usize..3, at in 0_usize..600, to in 0x20_u8..0x7f) {
        let (mut lines, head) = chain(3);
        let mut bytes = lines[line].clone().into_bytes();
        let at = at % bytes.len();
        prop_assume!(bytes[at] != to);
        bytes[at] = to;
        lines[line] = String::from_utf8(bytes).unwrap();
        prop_assert!(check(&lines, Some(&head)).is_err());
        prop_assert!(check(&lines, None).is_err());
    }

    #[test]
    fn no_line_makes_it_panic(text in "\\PC{0,200}") {
        prop_assert!(check(std::slice::from_ref(&text), None).is_err());
        let framed = format!("{{{text}{DIGEST_FIELD}{}{END}", "0".repeat(64));
        prop_assert!(check(&[framed], None).is_err());
    }

    #[test]
    fn what_is_written_is_read(name in proptest::collection::vec(any::<u8>(), 0..300), sent: u64) {
        let mut chain = Chain::begin(sandbox());
        let line = chain.append(receipt(&name, sent)).unwrap();
        prop_assert!(check(&[line], Some(chain.head())).is_ok());
    }
}
