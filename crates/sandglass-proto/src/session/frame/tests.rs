use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn epoch(bits: u64) -> Epoch {
    Epoch::from_random(bits)
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Owned {
    epoch: u64,
    kind: u8,
    flags: u8,
    flow: u32,
    payload: Vec<u8>,
}

impl Owned {
    fn encode(&self, out: &mut Vec<u8>) {
        let Self { epoch, kind, flags, flow, payload } = self;
        Frame { epoch: self::epoch(*epoch), kind: *kind, flags: *flags, flow: *flow, payload }.encode(out);
    }
}

impl From<Frame<'_>> for Owned {
    fn from(frame: Frame<'_>) -> Self {
        Self {
            epoch: frame.epoch.0.get(),
            kind: frame.kind,
            flags: frame.flags,
            flow: frame.flow,
            payload: frame.payload.to_vec(),
        }
    }
}

/// Feeds `bytes` in pieces of the given sizes, over and over; returns all frames.
fn decode(decoder: &mut Decoder, mut bytes: &[u8], pieces: &[usize]) -> Vec<Owned> {
    let capacity = decoder.buffer.len();
    let mut frames = Vec::new();
    let mut pieces = pieces.iter().copied().cycle();
    while !bytes.is_empty() {
        let piece = pieces.next().unwrap_or(bytes.len()).clamp(1, bytes.len());
        let count = decoder.feed(&bytes[..piece]);
        assert!(count > 0, "a drained decoder always has room");
        bytes = &bytes[count..];
        while let Some(frame) = decoder.next_frame() {
            frames.push(frame.into());
        }
        assert_eq!(decoder.buffer.len(), capacity);
    }
    frames
}

fn any_frame() -> impl Strategy<Value = Owned> {
    let length = prop_oneof![8 => 0..300usize, 1 => MAX_PAYLOAD - 2..=MAX_PAYLOAD];
    (1..5u64, any::<u8>(), any::<u8>(), any::<u32>(), length, any::<u8>()).prop_map(
        |(epoch, kind, flags, flow, length, byte)| Owned {
            epoch,
            kind,
            flags,
            flow,
            payload: vec![byte; length],
        },
    )
}

/// Noise that is as close to frames as noise can be.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    vec(prop_oneof![4 => any::<u8>(), 1 => Just(MAGIC[0]), 1 => Just(MAGIC[1]), 3 => Just(0)], 0..600)
}

#[test]
fn the_wire_form_is_stable() {
    let mut bytes = Vec::new();
    Frame { epoch: epoch(0x0102_0304_0506_0708), kind: 5, flags: 1, flow: 7, payload: b"hi" }
        .encode(&mut bytes);
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, "f553471e0807060504030201050100000700000002000000ac2a93d8f4965d706869");
}

#[test]
fn kinds_keep_their_numbers() {
    for byte in 0..=u8::MAX {
        match Kind::from_wire(byte) {
            Some(kind) => assert_eq!(kind as u8, byte),
            None => assert!(byte == 0 || byte > 10),
        }
    }
}

#[test]
fn a_length_beyond_the_bound_is_no_header() {
    let mut header = Frame { epoch: epoch(1), kind: 5, flags: 0, flow: 1, payload: b"" }.header();
    header[20..24].copy_from_slice(&u32::try_from(MAX_PAYLOAD + 1).unwrap().to_le_bytes());
    let checksum = crc32fast::hash(&header[..28]);
    header[28..].copy_from_slice(&checksum.to_le_bytes());
    let mut decoder = Decoder::new(None);
    assert_eq!(decode(&mut decoder, &header, &[]), []);
    assert_eq!(decoder.noise().skipped_bytes, 32);
}

#[test]
fn padding_completes_any_cut_frame_and_hides_its_payload() {
    // The payload is full of whole frames; none of them may be seen wherever the outer frame is cut.
    let mut inner = Vec::new();
    while inner.len() + 100 < MAX_PAYLOAD {
        Frame { epoch: epoch(9), kind: 1, flags: 0, flow: 0, payload: b"evil" }.encode(&mut inner);
    }
    let mut outer = Vec::new();
    Frame { epoch: epoch(1), kind: 5, flags: 0, flow: 1, payload: &inner }.encode(&mut outer);
    let attach = Owned { epoch: 2, kind: 1, flags: 0, flow: 0, payload: vec![] };
    for cut in (0..HEADER_LEN + 80).chain([outer.len() / 2, outer.len() - 1]) {
        let mut bytes = outer[..cut].to_vec();
        bytes.resize(cut + MAX_FRAME, 0);
        attach.encode(&mut bytes);
        assert_eq!(
            decode(&mut Decoder::new(None), &bytes, &[4096]),
            std::slice::from_ref(&attach),
            "cut {cut}"
        );
    }
}

#[test]
fn a_filter_does_not_believe_the_length_of_foreign_headers() {
    // A forged header that announces 64 KiB must not swallow the real frame behind it.
    let forged = Frame { epoch: epoch(3), kind: 5, flags: 0, flow: 1, payload: &[7; MAX_PAYLOAD] }.header();
    let real = Owned { epoch: 4, kind: 5, flags: 0, flow: 1, payload: b"real".to_vec() };
    let mut bytes = forged.to_vec();
    real.encode(&mut bytes);
    assert_eq!(decode(&mut Decoder::new(Some(epoch(4))), &bytes, &[]), [real]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn frames_come_back_however_the_stream_is_split(
        frames in vec(any_frame(), 0..6),
        pieces in vec(1..70_000usize, 1..8),
    ) {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.encode(&mut bytes));
        let mut decoder = Decoder::new(None);
        prop_assert_eq!(decode(&mut decoder, &bytes, &pieces), frames);
        prop_assert_eq!(decoder.noise(), Noise::default());
    }

    #[test]
    fn frames_are_found_again_after_noise(
        noise in garbage(),
        frames in vec(any_frame(), 1..4),
        pieces in vec(1..2_000usize, 1..8),
    ) {
        let mut bytes = noise.clone();
        frames.iter().for_each(|frame| frame.encode(&mut bytes));
        let mut decoder = Decoder::new(None);
        prop_assert_eq!(decode(&mut decoder, &bytes, &pieces), frames);
        prop_assert_eq!(decoder.noise().skipped_bytes, noise.len() as u64);
    }

    #[test]
    fn a_reader_that_joins_in_mid_frame_finds_its_epoch(
        old in vec(any_frame(), 1..4),
        cut in any::<prop::sample::Index>(),
        new in vec(any_frame(), 1..4),
        pieces in vec(1..70_000usize, 1..8),
    ) {
        let mut bytes = Vec::new();
        old.iter().for_each(|frame| frame.encode(&mut bytes));
        bytes.drain(..cut.index(bytes.len()));
        let new: Vec<Owned> = new.into_iter().map(|frame| Owned { epoch: 77, ..frame }).collect();
        new.iter().for_each(|frame| frame.encode(&mut bytes));
        prop_assert_eq!(decode(&mut Decoder::new(Some(epoch(77))), &bytes, &pieces), new);
    }

    #[test]
    fn a_damaged_byte_costs_one_frame_at_most_or_is_noticed(
        frames in vec(any_frame(), 2..5),
        at in any::<prop::sample::Index>(),
        bit in 0..8u8,
    ) {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.encode(&mut bytes));
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let mut decoder = Decoder::new(None);
        let decoded = decode(&mut decoder, &bytes, &[10_000]);
        prop_assert_eq!(decoded.len(), frames.len() - 1);
        prop_assert!(decoded.iter().all(|frame| frames.contains(frame)));
        prop_assert_ne!(decoder.noise(), Noise::default());
    }

    #[test]
    fn any_bytes_are_survived(bytes in vec(garbage(), 0..8), pieces in vec(1..500usize, 1..8)) {
        let bytes = bytes.concat();
        decode(&mut Decoder::new(None), &bytes, &pieces);
        decode(&mut Decoder::new(Some(epoch(1))), &bytes, &pieces);
    }
}
