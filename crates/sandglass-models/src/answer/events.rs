//! Server-sent events, as they come: in pieces of any size, with ends of lines of any kind.

use std::borrow::Cow;

/// What has come of the event that is not whole yet.
#[derive(Debug)]
pub(super) struct Events {
    /// All of it, as it came.
    raw: Vec<u8>,
    /// The longest one that is understood, in bytes. A longer one is passed on unheard.
    longest: usize,
    /// Whether there is something in its last line.
    begun: bool,
    /// Whether the last byte was a carriage return: a line feed after it ends no other line.
    returned: bool,
    /// Whether it is longer than is understood.
    too_long: bool,
}

impl Events {
    pub(super) const fn new(longest: usize) -> Self {
        Self { raw: Vec::new(), longest, begun: false, returned: false, too_long: false }
    }

    /// Takes the next bytes, and calls `each` for every event that is whole by now, with all of its bytes and its data.
    pub(super) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8], &[u8])) {
        for &byte in bytes {
            let follows = byte == b'\n' && std::mem::take(&mut self.returned);
            self.raw.push(byte);
            if follows {
                // It belongs to the end of the line before, which may have been the end of an event.
                if self.raw == b"\n" {
                    each(b"\n", b"");
                    self.raw.clear();
                }
                continue;
            }
            self.returned = byte == b'\r';
            if byte == b'\n' || byte == b'\r' {
                if !std::mem::take(&mut self.begun) {
                    let data = if self.too_long { Cow::default() } else { data(&self.raw) };
                    each(&self.raw, &data);
                    self.raw.clear();
                    self.too_long = false;
                }
            } else {
                self.begun = true;
            }
            if self.raw.len() > self.longest {
                each(&self.raw, b"");
                self.raw.clear();
                self.too_long = true;
            }
        }
    }

    /// What is left of an event that never became whole.
    pub(super) fn rest(self) -> Vec<u8> {
        self.raw
    }
}

/// The data of an event: its own bytes where it is one line of it, as always with models.
fn data(event: &[u8]) -> Cow<'_, [u8]> {
    let lines = event.split(|byte| matches!(byte, b'\n' | b'\r'));
    let mut data = lines.filter_map(|line| {
        let (name, value) = line.split_at(line.iter().position(|byte| *byte == b':').unwrap_or(line.len()));
        let value = value.strip_prefix(b":").unwrap_or_default();
        (name == b"data").then(|| value.strip_prefix(b" ").unwrap_or(value))
    });
    let first = Cow::Borrowed(data.next().unwrap_or_default());
    data.fold(first, |so_far, line| {
        let mut all = so_far.into_owned();
        all.push(b'\n');
        all.extend_from_slice(line);
        Cow::Owned(all)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONGEST: usize = 4096;

    fn heard(pieces: &[&[u8]]) -> (Vec<u8>, Vec<String>) {
        let (mut events, mut raw, mut data) = (Events::new(LONGEST), Vec::new(), Vec::new());
        for piece in pieces {
            events.feed(piece, |bytes, said| {
                raw.extend(bytes);
                data.extend((!said.is_empty()).then(|| String::from_utf8(said.to_owned()).unwrap()));
            });
        }
        raw.extend(events.rest());
        (raw, data)
    }

    #[test]
    fn events_end_with_an_empty_line_of_any_kind() {
        for end in ["\n", "\r\n", "\r"] {
            let text = ["event: a", "data: one", "data:two", ": comment", "", "data: three", "", "data: cut"]
                .join(end);
            let (raw, data) = heard(&[text.as_bytes()]);
            assert_eq!(
                (raw.as_slice(), data),
                (text.as_bytes(), vec!["one\ntwo".to_owned(), "three".to_owned()]),
                "{end:?}"
            );
        }
    }

    #[test]
    fn a_field_is_called_by_its_whole_name() {
        let text = b"database: no\ndata_x: no\n data: no\nData: no\ndata: yes: it is\ndata\ndata:\n\n";
        assert_eq!(heard(&[text]).1, ["yes: it is\n\n"]);
    }

    #[test]
    fn what_is_too_long_is_passed_on_and_the_next_one_is_heard() {
        let long = format!("data: {}\n", "x".repeat(LONGEST));
        let (raw, data) = heard(&[long.as_bytes(), b"data: more\n\ndata: next\n\n"]);
        assert_eq!(data, ["next"]);
        assert_eq!(raw.len(), long.len() + 24);
        // Without any end of a line there is no more of it in memory than that.
        let mut events = Events::new(LONGEST);
        let mut passed = 0;
        events.feed(&vec![b'x'; 3 * LONGEST], |raw, data| {
            assert!(raw.len() <= LONGEST + 1 && data.is_empty());
            passed += raw.len();
        });
        assert_eq!(passed + events.raw.len(), 3 * LONGEST);
    }
    proptest! {
        #[test]
        fn how_it_is_cut_makes_no_difference(cuts in proptest::collection::vec(0..60_usize, 0..20)) {
            let text = b"event: x\r\ndata: {\"a\":1}\r\n\r\ndata: b\n\ndata: c\rdata: d\r\r: e\n\n";
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(heard(&pieces), heard(&[text]));
            prop_assert_eq!(heard(&pieces).0, text.to_vec());
        }
    }
}
