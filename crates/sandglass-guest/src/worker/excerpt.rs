//! The beginning and the end of what may be without end.

use std::collections::VecDeque;

/// What is kept of something long. In the middle of an output is what a model needs least.
#[derive(Debug)]
pub(super) struct Excerpt {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    most: (usize, usize),
    /// All bytes that came.
    pub(super) total: u64,
}

impl Excerpt {
    /// One that keeps so many bytes of the beginning, and so many of the end.
    pub(super) const fn new(head: usize, tail: usize) -> Self {
        Self { head: Vec::new(), tail: VecDeque::new(), most: (head, tail), total: 0 }
    }

    /// Takes what comes next.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.total = self.total.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        let room = (self.most.0 - self.head.len()).min(bytes.len());
        let (head, rest) = bytes.split_at(room);
        self.head.extend_from_slice(head);
        let rest = &rest[rest.len().saturating_sub(self.most.1)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(self.most.1);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// Bytes that are not kept.
    pub(super) fn left_out(&self) -> u64 {
        let kept = self.head.len() + self.tail.len();
        self.total - u64::try_from(kept).unwrap_or(self.total).min(self.total)
    }

    /// As a text, which says what it lacks.
    pub(super) fn text(mut self) -> String {
        let left_out = self.left_out();
        if left_out == 0 {
            self.head.extend(self.tail);
            return String::from_utf8_lossy(&self.head).into_owned();
        }
        let (head, tail) = (String::from_utf8_lossy(&self.head), Vec::from(self.tail));
        format!("{head}\n[… {left_out} bytes are left out here …]\n{}", String::from_utf8_lossy(&tail))
    }
}

/// An excerpt of a text that is there as a whole.
pub(super) fn of(text: &str, head: usize, tail: usize) -> String {
    let mut excerpt = Excerpt::new(head, tail);
    excerpt.add(text.as_bytes());
    excerpt.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_short_is_whole_and_what_is_long_has_its_ends() {
        for size in [1, 2, 3, 7, 100] {
            let mut excerpt = Excerpt::new(4, 5);
            for piece in b"012345678".chunks(size) {
                excerpt.add(piece);
            }
            assert_eq!((excerpt.left_out(), excerpt.text()), (0, "012345678".into()), "{size}");
            let mut excerpt = Excerpt::new(4, 5);
            for piece in b"0123__________56789".chunks(size) {
                excerpt.add(piece);
            }
            assert_eq!(excerpt.left_out(), 10);
            assert_eq!(excerpt.text(), "0123\n[… 10 bytes are left out here …]\n56789");
        }
    }
}
