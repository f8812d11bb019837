//! Frames: the codec of a session, without I/O.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | [`MAGIC`] |
//! | 4..12 | epoch, not zero |
//! | 12 | kind, see [`Kind`] |
//! | 13 | flags; bits without a meaning are ignored |
//! | 14..16 | zero; ignored |
//! | 16..20 | flow |
//! | 20..24 | length of the payload, at most [`MAX_PAYLOAD`] |
//! | 24..28 | CRC-32 of the payload |
//! | 28..32 | CRC-32 of bytes 0..28 |
//!
//! Numbers are little-endian. The checksums find the next frame after a cut; they protect from nothing else.
//!
//! # Finding the next frame again
//!
//! An attachment may end anywhere, also in the middle of a frame, and the next one gets the same two byte
//! streams. Neither side may then take for a frame what a client or a guest process put *into* a frame:
//!
//! - **Towards the agent.** A server that attaches first writes [`MAX_FRAME`] zero bytes, then `ATTACH`. An agent
//!   that stopped inside a payload swallows zeros as the rest of it, drops the frame because its checksum is wrong,
//!   and sees only zeros until `ATTACH`. One that stopped inside a header fails its checksum, or (if the missing
//!   bytes were zeros) swallows zeros as the payload. A frame with a wrong payload checksum is skipped as a whole,
//!   so bytes of a payload are never looked at as a header.
//! - **Towards the server.** It begins to read in mid-frame, thus among bytes that a guest process may have chosen.
//!   So it takes only frames of *its* epoch, a random number that it made for this attachment and that nobody
//!   could have written before; other headers count as noise, and their lengths are not believed.

use std::fmt;
use std::num::NonZeroU64;

/// How every frame starts. The first byte occurs in no UTF-8 text.
pub const MAGIC: [u8; 4] = [0xF5, b'S', b'G', 0x1E];
/// Length of a header in bytes.
pub const HEADER_LEN: usize = 32;
/// Upper bound for the payload of one frame, in bytes.
pub const MAX_PAYLOAD: usize = 64 * 1024;
/// Upper bound for one frame, in bytes.
pub const MAX_FRAME: usize = HEADER_LEN + MAX_PAYLOAD;
/// What a decoder takes in at one time, in bytes: several frames, because in a sandbox it is dear to wait for each.
const BUFFER: usize = 4 * MAX_FRAME;

/// A frame of a control message has this flag when more of the same message follows.
pub const FLAG_MORE: u8 = 1;

/// Marks the frames of one attachment of a server to an agent. Made from a random number, and kept secret until
/// it is sent: see the module about why.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Epoch(NonZeroU64);

impl Epoch {
    /// From 64 random bits.
    #[must_use]
    pub const fn from_random(bits: u64) -> Self {
        match NonZeroU64::new(bits) {
            Some(bits) => Self(bits),
            None => Self(NonZeroU64::MIN),
        }
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Epoch(..)")
    }
}

/// What a frame is about. A receiver ignores kinds that it does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Server to agent: a new epoch begins and all flows of older ones are gone. No payload yet.
    Attach = 1,
    /// A control message or, with [`FLAG_MORE`], a part of one.
    Control = 2,
    /// Server to agent: opens the flow; the payload is a [`super::Target`].
    Open = 3,
    /// Agent to server: the target of the flow is connected.
    Opened = 4,
    /// Bytes of the flow.
    Data = 5,
    /// The sender sends no more data on the flow.
    Fin = 6,
    /// The flow is gone in both directions; the payload is a [`super::ResetCode`].
    Reset = 7,
    /// The receiver of this frame may send so many bytes more on the flow (u32).
    Window = 8,
    /// Asks for a [`Kind::Pong`] with the same number (u64).
    Ping = 9,
    /// Answers a [`Kind::Ping`].
    Pong = 10,
}

impl Kind {
    /// The kind of this number, if known.
    #[must_use]
    pub const fn from_wire(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Attach,
            2 => Self::Control,
            3 => Self::Open,
            4 => Self::Opened,
            5 => Self::Data,
            6 => Self::Fin,
            7 => Self::Reset,
            8 => Self::Window,
            9 => Self::Ping,
            10 => Self::Pong,
            _ => return None,
        })
    }
}

/// One frame with an intact header and payload. The payload borrows the buffer of the [`Decoder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The attachment it belongs to.
    pub epoch: Epoch,
    /// As on the wire; see [`Kind::from_wire`].
    pub kind: u8,
    /// As on the wire.
    pub flags: u8,
    /// The flow it belongs to; without meaning for kinds that concern no flow.
    pub flow: u32,
    /// At most [`MAX_PAYLOAD`] bytes.
    pub payload: &'a [u8],
}

impl Frame<'_> {
    /// The bytes that go before the payload.
    ///
    /// # Panics
    /// In debug builds if the payload is longer than [`MAX_PAYLOAD`]; a release build makes a header that no
    /// decoder accepts.
    #[must_use]
    pub fn header(&self) -> [u8; HEADER_LEN] {
        debug_assert!(self.payload.len() <= MAX_PAYLOAD, "payload too long for one frame");
        let length = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        let mut header = [0; HEADER_LEN];
        header[0..4].copy_from_slice(&MAGIC);
        header[4..12].copy_from_slice(&self.epoch.0.get().to_le_bytes());
        header[12] = self.kind;
        header[13] = self.flags;
        header[16..20].copy_from_slice(&self.flow.to_le_bytes());
        header[20..24].copy_from_slice(&length.to_le_bytes());
        header[24..28].copy_from_slice(&crc32fast::hash(self.payload).to_le_bytes());
        let checksum = crc32fast::hash(&header[..28]);
        header[28..32].copy_from_slice(&checksum.to_le_bytes());
        header
    }

    /// Appends the whole frame to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.header());
        out.extend_from_slice(self.payload);
    }
}

/// A header whose checksum was right and whose length is within bounds.
#[derive(Debug, Clone, Copy)]
struct Header {
    epoch: Epoch,
    kind: u8,
    flags: u8,
    flow: u32,
    payload_len: usize,
    payload_crc: u32,
}

impl Header {
    fn parse(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if bytes[..4] != MAGIC || crc32fast::hash(&bytes[..28]) != word(28) {
            return None;
        }
        let payload_len = usize::try_from(word(20)).ok().filter(|len| *len <= MAX_PAYLOAD)?;
        let epoch = NonZeroU64::new(u64::from(word(4)) | u64::from(word(8)) << 32)?;
        Some(Self {
            epoch: Epoch(epoch),
            kind: bytes[12],
            flags: bytes[13],
            flow: word(16),
            payload_len,
            payload_crc: word(24),
        })
    }

    fn frame_len(&self) -> usize {
        HEADER_LEN + self.payload_len
    }
}

/// What a [`Decoder`] threw away.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    /// Bytes that belonged to no header.
    pub skipped_bytes: u64,
    /// Frames with an intact header and a wrong payload.
    pub broken_frames: u64,
}

/// Cuts a byte stream into frames. Its buffer has one fixed size, that of a few frames; it accepts every input.
#[derive(Debug)]
pub struct Decoder {
    buffer: Box<[u8]>,
    /// `buffer[start..end]` was received and is not used up.
    start: usize,
    end: usize,
    /// The header at `start`, once it is complete and accepted.
    header: Option<Header>,
    only: Option<Epoch>,
    noise: Noise,
}

impl Decoder {
    /// Accepts frames of every epoch, or only those of one.
    #[must_use]
    pub fn new(only: Option<Epoch>) -> Self {
        Self {
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            header: None,
            only,
            noise: Noise::default(),
        }
    }

    /// Where to put what was received; tell [`Self::received`] how much it was. It is empty only if
    /// [`Self::next_frame`] has frames to give.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.buffer[self.end..]
    }

    /// The first `count` bytes of [`Self::space`] are filled.
    pub fn received(&mut self, count: usize) {
        self.end = self.buffer.len().min(self.end + count);
    }

    /// Takes as many bytes as there is room for, and says how many. It is zero only if [`Self::next_frame`] has
    /// frames to give.
    pub fn feed(&mut self, bytes: &[u8]) -> usize {
        let space = self.space();
        let count = space.len().min(bytes.len());
        space[..count].copy_from_slice(&bytes[..count]);
        self.received(count);
        count
    }

    /// The next whole frame, or `None` until more was received.
    pub fn next_frame(&mut self) -> Option<Frame<'_>> {
        loop {
            let header = self.find_header()?;
            if self.end - self.start < header.frame_len() {
                return None;
            }
            let payload = self.start + HEADER_LEN..self.start + header.frame_len();
            self.start = payload.end;
            self.header = None;
            if crc32fast::hash(&self.buffer[payload.clone()]) == header.payload_crc {
                return Some(Frame {
                    epoch: header.epoch,
                    kind: header.kind,
                    flags: header.flags,
                    flow: header.flow,
                    payload: &self.buffer[payload],
                });
            }
            self.noise.broken_frames += 1;
        }
    }

    /// What was thrown away so far.
    #[must_use]
    pub fn noise(&self) -> Noise {
        self.noise
    }

    /// Skips to the next acceptable header, if one is complete.
    fn find_header(&mut self) -> Option<Header> {
        if self.header.is_some() {
            return self.header;
        }
        loop {
            let received = &self.buffer[self.start..self.end];
            let candidate = received.first_chunk()?;
            let accepted =
                Header::parse(candidate).filter(|header| self.only.is_none_or(|only| only == header.epoch));
            if accepted.is_some() {
                self.header = accepted;
                return accepted;
            }
            let skip = received[1..].iter().position(|byte| *byte == MAGIC[0]);
            let skip = 1 + skip.unwrap_or(received.len() - 1);
            self.start += skip;
            self.noise.skipped_bytes += skip as u64;
        }
    }
}

#[cfg(test)]
mod tests;
