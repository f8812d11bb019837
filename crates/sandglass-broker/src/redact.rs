//! Takes credentials out of answers: services echo what they were sent, in errors, in pages for developers, in redirects.
//!
//! A credential is found as it is, and with any of its bytes written as `%2B`, as `\u002b` or as another escape of JSON, and in base64
//! wherever it begins there. Each byte of it becomes a star, so an answer keeps its length and its framing, and a stream its pace: what is
//! held back is no more than what may still become a credential. What a service makes of one in another way, reversed or hashed or twice
//! encoded, is not found.

use std::borrow::Borrow;

use crate::Secret;

mod pattern;

use pattern::Pattern;

/// What stands for each byte that was taken out.
const STAR: u8 = b'*';

/// What is looked for.
#[derive(Debug, Clone)]
pub struct Search {
    patterns: Vec<Pattern>,
    /// Whether something that is looked for may begin with this byte.
    begins: Box<[bool; 256]>,
}

impl Search {
    /// A search for these.
    #[must_use]
    pub fn of<'a>(secrets: impl IntoIterator<Item = &'a Secret>) -> Self {
        let patterns: Vec<_> =
            secrets.into_iter().flat_map(|secret| Pattern::all_of(secret.expose())).collect();
        let mut begins = Box::new([false; 256]);
        for (byte, begin) in begins.iter_mut().enumerate() {
            let byte = u8::try_from(byte).unwrap_or_default();
            *begin = patterns.iter().any(|pattern| pattern.may_begin_with(byte));
        }
        Self { patterns, begins }
    }

    /// What is left of a text, such as a header's value, and whether something was taken out.
    #[must_use]
    pub fn text(&self, text: &[u8]) -> (Vec<u8>, bool) {
        let mut stream = Redactor::new(self);
        let mut out = stream.feed(text);
        out.extend(stream.finish());
        (out, stream.taken > 0)
    }
}

/// Reads an answer as it comes. `S` is a [`Search`], or something that has one.
#[derive(Debug)]
pub struct Redactor<S> {
    search: S,
    /// What came and was not passed on, because it may become a credential.
    held: Vec<u8>,
    /// How many of the bytes of `held`, from its beginning, are of one that was found.
    starred: usize,
    /// How many credentials were found.
    taken: u64,
}

impl<S: Borrow<Search>> Redactor<S> {
    /// One that looks for these.
    #[must_use]
    pub const fn new(search: S) -> Self {
        Self { search, held: Vec::new(), starred: 0, taken: 0 }
    }

    /// What can be passed on, now that this came.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(bytes);
        self.pass(false)
    }

    /// What was held back, now that nothing more comes.
    pub fn finish(&mut self) -> Vec<u8> {
        self.pass(true)
    }

    /// How many credentials were taken out.
    #[must_use]
    pub const fn taken(&self) -> u64 {
        self.taken
    }

    fn pass(&mut self, last: bool) -> Vec<u8> {
        let search = self.search.borrow();
        let mut out = Vec::with_capacity(self.held.len());
        while let Some(&byte) = self.held.get(out.len()) {
            let at = out.len();
            if search.begins[usize::from(byte)] {
                let (mut longest, mut more) = (0, false);
                for pattern in &search.patterns {
                    let found = pattern.find(&self.held[at..]);
                    more |= found.more;
                    longest = longest.max(found.length.unwrap_or(0));
                }
                if more && !last {
                    break;
                }
                if longest > 0 {
                    self.taken += u64::from(self.starred <= at);
                    self.starred = self.starred.max(at + longest);
                }
            }
            out.push(if at < self.starred { STAR } else { byte });
        }
        self.held.drain(..out.len());
        self.starred = self.starred.saturating_sub(out.len());
        out
    }
}

#[cfg(test)]
mod tests;
