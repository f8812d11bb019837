//! Server-sent events, as they come: in pieces of any size, with ends of lines of any kind.

/// Longest event that is understood, in bytes. A longer one is passed on unheard.
const MAX_EVENT: usize = 4 << 20;

/// What has come of the event that is not whole yet.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// All of it, as it came.
    raw: Vec<u8>,
    /// Where its last line begins.
    line: usize,
    /// Whether there is something in that line.
    begun: bool,
    data: String,
    /// Whether it has a line of data.
    has_data: bool,
    /// Whether the last byte was a carriage return: a line feed after it ends no other line.
    returned: bool,
    /// Whether it is longer than is understood.
    too_long: bool,
}

impl Events {
    /// Takes the next bytes, and calls `each` for every event that is whole by now, with all of its bytes and its data.
    pub(super) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8], &str)) {
        for &byte in bytes {
            let follows = byte == b'\n' && std::mem::take(&mut self.returned);
            self.raw.push(byte);
            if follows {
                // It belongs to the end of the line before, which may have been the end of an event.
                self.line = self.raw.len();
                if self.raw == b"\n" {
                    each(b"\n", "");
                    self.clear();
                }
                continue;
            }
            self.returned = byte == b'\r';
            if byte == b'\n' || byte == b'\r' {
                self.end_line(&mut each);
            } else {
                self.begun = true;
            }
            if self.raw.len() > MAX_EVENT {
                self.pass_on(&mut each);
            }
        }
    }

    /// What is left of an event that never became whole.
    pub(super) fn rest(self) -> Vec<u8> {
        self.raw
    }

    fn end_line(&mut self, each: &mut impl FnMut(&[u8], &str)) {
        let line = &self.raw[self.line..self.raw.len() - 1];
        let empty = !std::mem::take(&mut self.begun);
        if let Some(data) = line.strip_prefix(b"data").filter(|_| !self.too_long) {
            let data = data.strip_prefix(b":").unwrap_or(data);
            let data = data.strip_prefix(b" ").unwrap_or(data);
            if self.has_data {
                self.data.push('\n');
            }
            self.has_data = true;
            self.data.push_str(&String::from_utf8_lossy(data));
        }
        self.line = self.raw.len();
        if empty {
            each(&self.raw, &self.data);
            self.clear();
        }
    }

    /// Lets go of what is too long to wait for its end.
    fn pass_on(&mut self, each: &mut impl FnMut(&[u8], &str)) {
        each(&self.raw, "");
        self.clear();
        self.too_long = true;
    }

    fn clear(&mut self) {
        self.raw.clear();
        self.data.clear();
        (self.line, self.has_data, self.too_long) = (0, false, false);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn heard(pieces: &[&[u8]]) -> (Vec<u8>, Vec<String>) {
        let (mut events, mut raw, mut data) = (Events::default(), Vec::new(), Vec::new());
        for piece in pieces {
            events.feed(piece, |bytes, said| {
                raw.extend(bytes);
                data.extend((!said.is_empty()).then(|| said.to_owned()));
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
    fn what_is_too_long_is_passed_on_and_the_next_one_is_heard() {
        let long = format!("data: {}\n", "x".repeat(MAX_EVENT));
        let (raw, data) = heard(&[long.as_bytes(), b"data: more\n\ndata: next\n\n"]);
        assert_eq!(data, ["next"]);
        assert_eq!(raw.len(), long.len() + 24);
        // Without any end of a line there is no more of it in memory than that.
        let mut events = Events::default();
        let mut passed = 0;
        events.feed(&vec![b'x'; 3 * MAX_EVENT], |raw, data| {
            assert!(raw.len() <= MAX_EVENT + 1 && data.is_empty());
            passed += raw.len();
        });
        assert_eq!(passed + events.raw.len(), 3 * MAX_EVENT);
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
