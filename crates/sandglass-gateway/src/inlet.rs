//! The body of a call, as long as it may be, whatever it is packed in.
//!
//! Memory is taken as bytes arrive, and never ahead of them. Nobody waits for it: what finds none is told to come again. Short bodies have
//! memory of their own, so that long ones, as many as there are, never keep them out.

use std::io::Read as _;
use std::num::NonZero;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use http_body_util::BodyExt as _;
use sandglass_models::request::{MAX_BODY, Unacceptable};
use sandglass_types::TeamId;
use tokio::sync::Semaphore;

use crate::pool::{Part, Pool};
use crate::shape;

/// Bytes of memory that short bodies may take together, and all others.
const SHORT_MEMORY: u64 = 128 << 20;
const LONG_MEMORY: u64 = 512 << 20;

/// What a body may take and still be a short one, in bytes of memory.
const SHORT: u64 = 1 << 20;

/// What a byte of a body takes at most while it arrives or is unpacked: a buffer that grows is twice as long as what is in it.
const ARRIVING: u64 = 2;

/// What a byte takes at most while a body is understood: in its buffer, in the tree of values, and in that which is written of it.
const UNDERSTOOD: u64 = 5;

/// Bytes that are unpacked before there is another look at whether there is room for more.
const STEP: usize = 64 << 10;

/// The largest window of what is packed with zstd, as a power of two: 8 MiB, as its tools have it (RFC 8878, 3.1.1.1.2).
const WINDOW: u32 = 23;

/// Why there is no call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoBody {
    /// It is too long.
    #[error("the body of the request is longer than {MAX_BODY} bytes")]
    TooLong,
    /// It is packed in something else.
    #[error(
        "the body of the request is packed in a way that is not known here: send it as it is, or with gzip or zstd"
    )]
    Packed,
    /// It broke off, or is not what it says.
    #[error("the body of the request can't be read")]
    Broken,
    /// It is made of too much.
    #[error("the body of the request is made of too many values, or they are too deep in each other")]
    TooMuch,
    /// It took too long.
    #[error("the body of the request took too long")]
    Slow,
    /// There is no room for it now.
    #[error("too many long requests at the same time")]
    Full,
    /// It can't go on.
    #[error(transparent)]
    Unacceptable(#[from] Unacceptable),
}

/// Reads bodies, and bounds what they take together.
#[derive(Debug, Clone)]
pub(crate) struct Inlet {
    short: Arc<Pool>,
    long: Arc<Pool>,
    /// Threads that long ones are understood in, so that most are left for all else.
    workers: Arc<Semaphore>,
}

/// What came of a body, and the room that it takes.
#[derive(Debug)]
pub(crate) struct Read<T> {
    pub(crate) what: T,
    /// How long the body was, in bytes.
    pub(crate) length: usize,
    pub(crate) room: Room,
}

/// The right to so much memory.
#[derive(Debug)]
pub(crate) struct Room {
    part: Part,
    is_short: bool,
    long: Arc<Pool>,
}

impl Room {
    fn grow_to(&mut self, bytes: u64) -> Result<(), NoBody> {
        if self.is_short && bytes > SHORT {
            self.part = self.long.take(self.part.team(), bytes).ok_or(NoBody::Full)?;
            self.is_short = false;
            return Ok(());
        }
        if self.part.grow_to(bytes) { Ok(()) } else { Err(NoBody::Full) }
    }

    /// Gives back all but that for so many bytes.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        self.part.shrink_to(size(bytes));
    }
}

impl Inlet {
    pub(crate) fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self {
            short: Pool::new(SHORT_MEMORY),
            long: Pool::new(LONG_MEMORY),
            workers: Arc::new(Semaphore::new((cores / 2).max(1))),
        }
    }

    /// Reads all of a body within that time, and has it understood by `parse`.
    pub(crate) async fn read<B, T>(
        &self,
        team: TeamId,
        headers: &HeaderMap,
        body: B,
        time: Duration,
        parse: impl FnOnce(&[u8]) -> Result<T, Unacceptable> + Send + 'static,
    ) -> Result<Read<T>, NoBody>
    where
        B: http_body::Body<Data = Bytes>,
        T: Send + 'static,
    {
        let packing = Packing::of(headers)?;
        let said = body.size_hint().lower();
        if said > size(MAX_BODY) {
            return Err(NoBody::TooLong);
        }
        let part = self.short.nothing(team);
        let mut room = Room { part, is_short: true, long: Arc::clone(&self.long) };
        let raw = tokio::time::timeout(time, arrive(body, &mut room)).await;
        let raw = raw.map_err(|_| NoBody::Slow)??;
        // What is short is done before another thread would have begun with it.
        if raw.len() <= STEP && matches!(packing, Packing::None) {
            return understand(&raw, room, parse);
        }
        self.work(move || {
            let bytes = packing.unpack(raw, &mut room)?;
            understand(&bytes, room, parse)
        })
        .await
        .unwrap_or(Err(NoBody::Broken))
    }

    /// Does what takes as long as so many bytes are: here, if they are few.
    pub(crate) async fn work_on<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if bytes <= STEP { Some(work()) } else { self.work(work).await }
    }

    /// Does what takes long where it keeps nobody waiting who has something short. `None` if it failed.
    pub(crate) async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        // It goes on where the one that waits for it is gone, and keeps its turn for so long.
        let turn = Arc::clone(&self.workers).acquire_owned().await.ok()?;
        let worked = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(turn);
            done
        });
        worked.await.ok()
    }
}

async fn arrive<B: http_body::Body<Data = Bytes>>(body: B, room: &mut Room) -> Result<Vec<u8>, NoBody> {
    let (mut body, mut raw) = (pin!(body), Vec::new());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| NoBody::Broken)?.into_data() else { continue };
        let length = raw.len() + data.len();
        if length > MAX_BODY {
            return Err(NoBody::TooLong);
        }
        room.grow_to(size(length) * ARRIVING)?;
        raw.extend_from_slice(&data);
    }
    Ok(raw)
}

fn understand<T>(
    bytes: &[u8],
    mut room: Room,
    parse: impl FnOnce(&[u8]) -> Result<T, Unacceptable>,
) -> Result<Read<T>, NoBody> {
    let tree = shape::tree(bytes).ok_or(NoBody::TooMuch)?;
    room.grow_to(size(bytes.len()) * UNDERSTOOD + tree)?;
    Ok(Read { what: parse(bytes)?, length: bytes.len(), room })
}

fn size(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// What a body is packed in.
#[derive(Debug, Clone, Copy)]
enum Packing {
    None,
    Gzip,
    Zstd,
}

impl Packing {
    fn of(headers: &HeaderMap) -> Result<Self, NoBody> {
        match headers.get(CONTENT_ENCODING).map(http::HeaderValue::as_bytes) {
            None | Some(b"identity") => Ok(Self::None),
            Some(b"gzip" | b"x-gzip") => Ok(Self::Gzip),
            Some(b"zstd") => Ok(Self::Zstd),
            Some(_) => Err(NoBody::Packed),
        }
    }

    fn unpack(self, raw: Vec<u8>, room: &mut Room) -> Result<Vec<u8>, NoBody> {
        match self {
            Self::None => Ok(raw),
            Self::Gzip => all_of(flate2::bufread::GzDecoder::new(&*raw), raw.len(), room),
            Self::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(&*raw).map_err(|_| NoBody::Broken)?;
                decoder.window_log_max(WINDOW).map_err(|_| NoBody::Broken)?;
                // Its window is in memory as well.
                all_of(decoder, raw.len() + (1 << WINDOW), room)
            }
        }
    }
}

/// All that comes out of a decoder, which takes so many bytes for itself.
fn all_of(mut decoder: impl std::io::Read, itself: usize, room: &mut Room) -> Result<Vec<u8>, NoBody> {
    let mut bytes = Vec::new();
    loop {
        room.grow_to(size(itself) + size(bytes.len() + STEP) * ARRIVING)?;
        let step = decoder.by_ref().take(size(STEP)).read_to_end(&mut bytes).map_err(|_| NoBody::Broken)?;
        if bytes.len() > MAX_BODY {
            return Err(NoBody::TooLong);
        }
        if step == 0 {
            return Ok(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::time::Instant;

    use http_body_util::{Full, StreamBody};
    use tokio::sync::mpsc;

    use super::*;

    const TIME: Duration = Duration::from_secs(20);

    fn pass(bytes: &[u8]) -> Result<Bytes, Unacceptable> {
        Ok(Bytes::copy_from_slice(bytes))
    }

    async fn read(packed: Option<&'static str>, body: Vec<u8>) -> Result<Bytes, NoBody> {
        let mut headers = HeaderMap::new();
        if let Some(packed) = packed {
            headers.insert(CONTENT_ENCODING, http::HeaderValue::from_static(packed));
        }
        let body = Full::new(Bytes::from(body));
        Inlet::new().read(TeamId::random(), &headers, body, TIME, pass).await.map(|read| read.what)
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[tokio::test]
    async fn a_body_is_the_same_whatever_it_is_packed_in() {
        let text = br#"{"model":"m"}"#.to_vec();
        let zstd = zstd::encode_all(&text[..], 1).unwrap();
        for (packed, body) in [
            (None, text.clone()),
            (Some("identity"), text.clone()),
            (Some("gzip"), gzip(&text)),
            (Some("zstd"), zstd.clone()),
        ] {
            assert_eq!(read(packed, body).await.unwrap(), text, "{packed:?}");
        }
        assert!(matches!(read(Some("br"), text.clone()).await, Err(NoBody::Packed)));
        assert!(matches!(read(Some("gzip, gzip"), text.clone()).await, Err(NoBody::Packed)));
        assert!(matches!(read(Some("gzip"), text).await, Err(NoBody::Broken)));
        assert!(matches!(read(Some("zstd"), zstd[..zstd.len() - 3].to_vec()).await, Err(NoBody::Broken)));
    }

    #[tokio::test]
    async fn nothing_becomes_longer_than_it_may_be() {
        let most = vec![b' '; MAX_BODY];
        assert_eq!(read(Some("gzip"), gzip(&most)).await.unwrap().len(), MAX_BODY);
        let long = vec![b' '; MAX_BODY + 1];
        let zstd = zstd::encode_all(&long[..], 1).unwrap();
        let small = gzip(&long);
        assert!(zstd.len() < MAX_BODY / 100 && small.len() < MAX_BODY / 100);
        for (packed, body) in [(Some("zstd"), zstd), (Some("gzip"), small), (None, long)] {
            assert!(matches!(read(packed, body).await, Err(NoBody::TooLong)), "{packed:?}");
        }
    }

    #[tokio::test]
    async fn what_would_be_a_huge_tree_is_never_made_one() {
        let many = zstd::encode_all("[],".repeat(4_000_000).as_bytes(), 1).unwrap();
        assert!(many.len() < 10_000);
        let parsed = Inlet::new()
            .read::<_, ()>(
                TeamId::random(),
                &HeaderMap::new(),
                Full::new(Bytes::from("[],".repeat(4_000_000))),
                TIME,
                |_| panic!("nobody may try"),
            )
            .await;
        assert!(matches!(parsed, Err(NoBody::TooMuch)), "{parsed:?}");
        assert!(matches!(read(Some("zstd"), many).await, Err(NoBody::TooMuch)));
    }

    /// Long bodies that never end, of one team and of another, hold what they sent and nothing ahead of it, and keep no others waiting.
    #[tokio::test]
    async fn whoever_sends_slowly_keeps_nobody_out() {
        let (inlet, headers) = (Inlet::new(), HeaderMap::new());
        let slow: Vec<_> = (0..64)
            .map(|_| {
                let (sender, pieces) = mpsc::channel(1);
                sender.try_send(Ok::<_, NoBody>(http_body::Frame::data(Bytes::from_static(b"{")))).unwrap();
                let (inlet, headers) = (inlet.clone(), headers.clone());
                let body = StreamBody::new(tokio_stream(pieces));
                let reading =
                    async move { inlet.read(TeamId::random(), &headers, body, TIME, pass).await.map(drop) };
                (sender, Box::pin(reading))
            })
            .collect();
        let mut senders = Vec::new();
        for (sender, mut reading) in slow {
            assert!(futures_util::poll!(&mut reading).is_pending());
            senders.push((sender, reading));
        }
        let before = Instant::now();
        let honest = inlet.read(TeamId::random(), &headers, Full::new(Bytes::from_static(b"{}")), TIME, pass);
        assert_eq!(honest.await.unwrap().length, 2);
        let long = Full::new(Bytes::from(vec![b' '; MAX_BODY]));
        inlet.read(TeamId::random(), &headers, long, TIME, pass).await.unwrap();
        assert!(before.elapsed() < Duration::from_secs(3), "nobody waited");
    }

    fn tokio_stream<T>(mut pieces: mpsc::Receiver<T>) -> impl futures_util::Stream<Item = T> {
        futures_util::stream::poll_fn(move |context| pieces.poll_recv(context))
    }

    #[tokio::test]
    async fn long_ones_of_a_team_find_no_room_and_short_ones_and_others_do() {
        let (inlet, headers) = (Inlet::new(), HeaderMap::new());
        let (team, other) = (TeamId::random(), TeamId::random());
        let read = |team: TeamId, length: usize| {
            let (inlet, headers) = (inlet.clone(), headers.clone());
            async move { inlet.read(team, &headers, Full::new(Bytes::from(vec![b' '; length])), TIME, pass).await }
        };
        let first = read(team, MAX_BODY).await.unwrap();
        let refused = read(team, MAX_BODY).await;
        assert!(matches!(refused, Err(NoBody::Full)), "{refused:?}");
        read(team, 1000).await.unwrap();
        read(other, MAX_BODY).await.unwrap();
        drop(first);
        let mut again = read(team, MAX_BODY).await.unwrap();
        again.room.shrink_to(1000);
        read(team, MAX_BODY).await.unwrap();
    }
}
