//! Where the body of a request ends (RFC 9112, 6 and 7.1), read as strictly as its head.
//!
//! What follows the body would be another request, of which nobody decided. So of chunked bodies only the form is read
//! that all readers agree on: without extensions, and without trailers.

use crate::http::Body;

/// Most digits of a chunk's length: with more it would not fit in 64 bits everywhere.
const MAX_DIGITS: u32 = 15;

/// The length of a chunk is malformed, or something else stands where a line must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a chunk of the body is malformed, or has extensions or trailers")]
pub(super) struct BadChunk;

/// What of a body has not passed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// So many bytes.
    Length(u64),
    /// Chunks, in the midst of which this comes next.
    Chunked(Next),
}

/// What comes next in a chunked body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Digits of a length, of which this was read, in so many digits.
    Size { value: u64, digits: u32 },
    /// The line feed behind a length.
    SizeEnd { value: u64 },
    /// So many bytes of a chunk.
    Data(u64),
    /// The end of line behind a chunk, or behind the last one's length; so many bytes of its two are there.
    End { last: bool, bytes: u8 },
    /// Nothing more.
    Nothing,
}

impl Rest {
    pub(super) const fn of(body: Body) -> Self {
        match body {
            Body::None => Self::Length(0),
            Body::Length(length) => Self::Length(length),
            Body::Chunked => Self::Chunked(Next::Size { value: 0, digits: 0 }),
        }
    }

    /// Whether all of it has passed.
    pub(super) const fn is_over(self) -> bool {
        matches!(self, Self::Length(0) | Self::Chunked(Next::Nothing))
    }

    /// How many of these bytes, which come next, are of the body.
    ///
    /// # Errors
    /// It can't be told where the body ends.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<usize, BadChunk> {
        let mut taken = 0;
        while let Some(rest) = bytes.get(taken..).filter(|rest| !rest.is_empty()) {
            let step = match self {
                Self::Length(left) | Self::Chunked(Next::Data(left)) => {
                    let step = usize::try_from(*left).map_or(rest.len(), |left| left.min(rest.len()));
                    *left -= u64::try_from(step).unwrap_or(*left);
                    step
                }
                Self::Chunked(next) => usize::from(next.step(rest[0])?),
            };
            if let Self::Chunked(next @ Next::Data(0)) = self {
                *next = Next::End { last: false, bytes: 0 };
            }
            if step == 0 {
                break;
            }
            taken += step;
        }
        Ok(taken)
    }
}

impl Next {
    /// Goes on by one byte that is not of a chunk's data; whether it is of the body.
    fn step(&mut self, byte: u8) -> Result<bool, BadChunk> {
        *self = match (*self, byte) {
            (Self::Nothing, _) => return Ok(false),
            (Self::Size { value, digits: 1.. }, b'\r') => Self::SizeEnd { value },
            (Self::Size { value, digits }, byte) if digits < MAX_DIGITS => {
                let digit = char::from(byte).to_digit(16).ok_or(BadChunk)?;
                Self::Size { value: value << 4 | u64::from(digit), digits: digits + 1 }
            }
            (Self::SizeEnd { value: 0 }, b'\n') => Self::End { last: true, bytes: 0 },
            (Self::SizeEnd { value }, b'\n') => Self::Data(value),
            (Self::End { last, bytes: 0 }, b'\r') => Self::End { last, bytes: 1 },
            (Self::End { last: true, bytes: 1 }, b'\n') => Self::Nothing,
            (Self::End { last: false, bytes: 1 }, b'\n') => Self::Size { value: 0, digits: 0 },
            _ => return Err(BadChunk),
        };
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// How many bytes are of the body when they come in pieces of this size, and whether it is over.
    fn read(body: Body, bytes: &[u8], size: usize) -> Result<(usize, bool), BadChunk> {
        let (mut rest, mut taken) = (Rest::of(body), 0);
        for piece in bytes.chunks(size) {
            let step = rest.take(piece)?;
            taken += step;
            if step < piece.len() {
                assert!(rest.is_over());
                break;
            }
        }
        Ok((taken, rest.is_over()))
    }

    const NEXT: &[u8] = b"GET /evil HTTP/1.1\r\n";

    #[test]
    fn what_follows_is_not_of_the_body() {
        for (body, bytes) in [
            (Body::None, &b""[..]),
            (Body::Length(5), b"12345"),
            (Body::Chunked, b"0\r\n\r\n"),
            (Body::Chunked, b"5\r\n12345\r\n0\r\n\r\n"),
            (Body::Chunked, b"00A\r\n0123456789\r\n1\r\n\r\r\n000\r\n\r\n"),
        ] {
            let both = [bytes, NEXT].concat();
            for size in 1..both.len() {
                assert_eq!(read(body, &both, size), Ok((bytes.len(), true)), "{bytes:?} by {size}");
            }
            for end in 0..bytes.len() {
                assert_eq!(read(body, &bytes[..end], 3), Ok((end, false)), "{end} of {bytes:?}");
            }
        }
    }

    #[test]
    fn chunks_that_readers_end_differently_are_refused() {
        for bytes in [
            &b"\r\n"[..],
            b"g\r\n",
            b"0x5\r\n",
            b"-5\r\n",
            b"+5\r\n",
            b" 5\r\n",
            b"5 \r\n",
            b"5;a=b\r\n",
            b"5;\n",
            b"5\n",
            b"5\rx",
            b"5\r\n12345x",
            b"5\r\n12345\n",
            b"5\r\n123456\r\n",
            b"0\r\nX: y\r\n\r\n",
            b"0\r\n\n",
            b"1000000000000000\r\n",
            b"ffffffffffffffff5\r\n",
        ] {
            assert_eq!(read(Body::Chunked, bytes, bytes.len()), Err(BadChunk), "{bytes:?}");
        }
        assert_eq!(read(Body::Chunked, b"fffffffffffffff\r\n12", 4), Ok((19, false)), "the longest");
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(bytes in "[0-9a-f]{0,2}(\r\n)?[0-9a-z\r\n]{0,40}", size in 1_usize..8, length in 0_u64..50) {
            for body in [Body::Chunked, Body::Length(length), Body::None] {
                prop_assert_eq!(read(body, bytes.as_bytes(), size), read(body, bytes.as_bytes(), bytes.len().max(1)));
            }
        }

        #[test]
        fn a_body_of_chunks_ends_where_it_was_made_to(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..6),
            behind in proptest::collection::vec(any::<u8>(), 0..20),
            size in 1_usize..30,
        ) {
            let mut body: Vec<u8> =
                chunks.iter().flat_map(|chunk| [format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat()).collect();
            body.extend(b"0\r\n\r\n");
            prop_assert_eq!(read(Body::Chunked, &[&body[..], &behind].concat(), size), Ok((body.len(), true)));
        }
    }
}
