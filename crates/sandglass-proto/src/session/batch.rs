//! Frames on their way into one write.

use std::io::{self, IoSlice, Write};
use std::pin::Pin;

use bytes::Bytes;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};

use super::frame::{Epoch, Frame, HEADER_LEN, Kind, MAX_FRAME};

/// No frame is added to a batch that has reached this size, so that one that comes meanwhile and is urgent does
/// not wait long.
const FULL: usize = 256 * 1024;
/// Payloads up to this size are copied next to their header; longer ones stay where they are.
const COPIED: usize = 4 * 1024;
/// What is kept for the copies of the next batch, in bytes.
const KEPT: usize = 128 * 1024;

/// The payload of an outgoing frame.
#[derive(Debug)]
pub(super) enum Payload {
    None,
    Code(u32),
    Number(u64),
    Bytes(Bytes),
}

impl Payload {
    fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Code(_) => size_of::<u32>(),
            Self::Number(_) => size_of::<u64>(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }
}

#[derive(Debug)]
struct Item {
    kind: Kind,
    flags: u8,
    flow: u32,
    payload: Payload,
}

/// Frames that are written together: some 256 KiB, or what one flow sends at once more.
#[derive(Debug, Default)]
pub struct Batch {
    epoch: Option<Epoch>,
    padding: usize,
    items: Vec<Item>,
    len: usize,
    /// Headers and short payloads.
    copied: Vec<u8>,
    /// Where in `copied` the long payload of an item comes in, and which item.
    cuts: Vec<(usize, usize)>,
}

impl Batch {
    /// Empties the batch.
    pub(super) fn clear(&mut self) {
        self.epoch = None;
        self.padding = 0;
        self.len = 0;
        self.copied.clear();
        self.copied.shrink_to(KEPT);
        self.cuts.clear();
        self.items.clear();
    }

    pub(super) fn begin(&mut self, epoch: Epoch) {
        self.epoch = Some(epoch);
    }

    pub(super) fn push_padding(&mut self) {
        self.padding = MAX_FRAME;
    }

    pub(super) fn push(&mut self, kind: Kind, flags: u8, flow: u32, payload: Payload) {
        self.len += HEADER_LEN + payload.len();
        self.items.push(Item { kind, flags, flow, payload });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.len >= FULL
    }

    /// Makes the bytes. Apart from filling, because checksums need time and no lock.
    pub(super) fn encode(&mut self) {
        let Some(epoch) = self.epoch else { return };
        self.copied.resize(self.padding, 0);
        for (index, item) in self.items.iter().enumerate() {
            let (code, number);
            let payload: &[u8] = match &item.payload {
                Payload::None => &[],
                Payload::Code(value) => {
                    code = value.to_le_bytes();
                    &code
                }
                Payload::Number(value) => {
                    number = value.to_le_bytes();
                    &number
                }
                Payload::Bytes(bytes) => bytes,
            };
            let frame = Frame { epoch, kind: item.kind as u8, flags: item.flags, flow: item.flow, payload };
            if payload.len() <= COPIED {
                frame.encode(&mut self.copied);
            } else {
                self.copied.extend_from_slice(&frame.header());
                self.cuts.push((self.copied.len(), index));
            }
        }
    }

    /// All bytes in their order, after [`Self::encode`].
    fn slices(&self) -> Vec<IoSlice<'_>> {
        let mut slices = Vec::with_capacity(2 * self.cuts.len() + 1);
        let mut from = 0;
        for (cut, item) in &self.cuts {
            slices.push(IoSlice::new(&self.copied[from..*cut]));
            if let Payload::Bytes(bytes) = &self.items[*item].payload {
                slices.push(IoSlice::new(bytes));
            }
            from = *cut;
        }
        slices.push(IoSlice::new(&self.copied[from..]));
        slices
    }

    /// All bytes in one piece.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.slices().iter().flat_map(|slice| slice.iter().copied()).collect()
    }

    /// Writes everything, with one call if the writer takes it.
    ///
    /// # Errors
    /// Whatever the writer fails with.
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        let mut slices = self.slices();
        let mut rest = &mut slices[..];
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            match writer.write_vectored(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => IoSlice::advance_slices(&mut rest, count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        writer.flush()
    }

    /// As [`Self::write_to`].
    ///
    /// # Errors
    /// Whatever the writer fails with.
    pub async fn write_to_async(&self, mut writer: Pin<&mut impl AsyncWrite>) -> io::Result<()> {
        let mut slices = self.slices();
        let mut rest = &mut slices[..];
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            match writer.write_vectored(rest).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => IoSlice::advance_slices(&mut rest, count),
            }
        }
        writer.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a few bytes at a time, from one slice or several.
    struct Trickle(Vec<u8>, usize);

    impl Write for Trickle {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.write_vectored(&[IoSlice::new(bytes)])
        }

        fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
            let before = self.0.len();
            self.0.extend(slices.iter().flat_map(|slice| slice.iter()).take(self.1));
            Ok(self.0.len() - before)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn partial_writes_keep_the_order() {
        let epoch = Epoch::from_random(1);
        let mut batch = Batch::default();
        batch.begin(epoch);
        let payloads: [&[u8]; 8] = [
            b"short",
            &[1; COPIED + 1],
            b"",
            &[2; COPIED],
            &[3; 64_000],
            &[4; 64_000],
            &[5; 64_000],
            &[6; 64_000],
        ];
        let mut expected = Vec::new();
        for (flow, payload) in (0..).zip(payloads) {
            batch.push(Kind::Data, 0, flow, Payload::Bytes(Bytes::copy_from_slice(payload)));
            Frame { epoch, kind: 5, flags: 0, flow, payload }.encode(&mut expected);
        }
        assert!(batch.is_full());
        batch.encode();
        assert_eq!(batch.to_vec(), expected);
        for at_once in [1, 7, 4096, 5000, 1 << 20] {
            let mut trickle = Trickle(Vec::new(), at_once);
            batch.write_to(&mut trickle).unwrap();
            assert_eq!(trickle.0, expected, "{at_once} bytes at once");
        }
    }
}
