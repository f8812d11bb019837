//! Server-sent events: the data of each, as it becomes whole.

/// Longest line, in bytes: an event at the end of an answer has all of it once more.
const MAX_LINE: usize = 8 << 20;

/// What has come of the event that is not whole yet.
#[derive(Debug, Default)]
pub(super) struct Events {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    returned: bool,
}

/// A line is longer than any that makes sense.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

impl Events {
    /// Takes the next bytes: the data of all events that are whole by now.
    ///
    /// # Errors
    /// A line never ends.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, TooLong> {
        let mut whole = Vec::new();
        for &byte in bytes {
            let follows = std::mem::replace(&mut self.returned, byte == b'\r');
            match byte {
                b'\n' if follows => {}
                b'\n' | b'\r' => whole.extend(self.end_line()),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.data.len() > MAX_LINE {
                return Err(TooLong);
            }
        }
        Ok(whole)
    }

    fn end_line(&mut self) -> Option<Vec<u8>> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            return std::mem::take(&mut self.has_data).then(|| std::mem::take(&mut self.data));
        }
        let data = line.strip_prefix(b"data").filter(|rest| rest.is_empty() || rest[0] == b':')?;
        let data = data.strip_prefix(b":").unwrap_or(data);
        if self.has_data {
            self.data.push(b'\n');
        }
        self.has_data = true;
        self.data.extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let stream = b"event: a\r\ndata: one\r\n\r\n: no\ndatas: x\ndata:two\ndata\ndata:  three\n\n\nid: 3\n\ndata: cut";
        for size in 1..stream.len() {
            let mut events = Events::default();
            let whole: Vec<_> = stream.chunks(size).flat_map(|piece| events.feed(piece).unwrap()).collect();
            assert_eq!(whole, [b"one".to_vec(), b"two\n\n three".to_vec()], "{size}");
        }
    }

    #[test]
    fn a_line_without_end_is_given_up() {
        let piece = vec![b'x'; 1 << 20];
        let mut events = Events::default();
        let given_up = (0..20).position(|_| events.feed(&piece).is_err());
        assert_eq!(given_up, Some(8));
    }
}
