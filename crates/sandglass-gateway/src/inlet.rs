//! The body of a call, as long as it may be, whatever it is packed in.

use std::io::Read as _;
use std::sync::Arc;
use std::time::Duration;

use async_compression::tokio::bufread::GzipDecoder;
use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use sandglass_models::request::MAX_BODY;
use tokio::io::AsyncReadExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of memory that all bodies together may take while they are read and understood.
const MEMORY: usize = 512 << 20;

/// What a byte of a body takes at most, once it is a tree of values.
const WEIGHT: usize = 12;

/// A permit is for so many bytes.
const GRAIN: usize = 1024;

/// The largest window of what is packed with zstd, as a power of two: 8 MiB, as its tools have it (RFC 8878, 3.1.1.1.2).
const WINDOW: u32 = 23;

/// Why there is no body.
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
    /// It took too long.
    #[error("the body of the request took too long")]
    Slow,
    /// There is no room for it now.
    #[error("too many long requests at the same time")]
    Full,
}

/// Reads bodies, and bounds what they take together.
#[derive(Debug, Clone)]
pub(crate) struct Inlet(Arc<Semaphore>);

/// A body, and the room that it takes.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) bytes: Bytes,
    pub(crate) room: Room,
}

/// The right to so much memory.
#[derive(Debug)]
pub(crate) struct Room(OwnedSemaphorePermit);

impl Room {
    /// Gives back all but that for so many bytes.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        let spare = self.0.num_permits().checked_sub(bytes.div_ceil(GRAIN).max(1));
        drop(spare.and_then(|spare| self.0.split(spare)));
    }
}

impl Inlet {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(MEMORY / GRAIN)))
    }

    /// Reads all of a body within that time.
    pub(crate) async fn read<B>(&self, headers: &HeaderMap, body: B, time: Duration) -> Result<Read, NoBody>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let packed = headers.get(CONTENT_ENCODING).map(http::HeaderValue::as_bytes);
        let packing = match packed {
            None | Some(b"identity") => Packing::None,
            Some(b"gzip" | b"x-gzip") => Packing::Gzip,
            Some(b"zstd") => Packing::Zstd,
            Some(_) => return Err(NoBody::Packed),
        };
        // What it says it will be, so that a short one never waits for a long one.
        let said = body.size_hint().upper().and_then(|length| usize::try_from(length).ok());
        let most = match packing {
            Packing::None => said.unwrap_or(MAX_BODY).min(MAX_BODY),
            Packing::Gzip | Packing::Zstd => MAX_BODY,
        };
        if said.is_some_and(|said| said > MAX_BODY) {
            return Err(NoBody::TooLong);
        }
        let reading = async {
            let permits = u32::try_from((most * WEIGHT).div_ceil(GRAIN).max(1)).unwrap_or(u32::MAX);
            let room = tokio::time::timeout(time / 10, Arc::clone(&self.0).acquire_many_owned(permits)).await;
            let Ok(Ok(room)) = room else { return Err(NoBody::Full) };
            let mut room = Room(room);
            let raw = match Limited::new(body, MAX_BODY).collect().await {
                Ok(raw) => raw.to_bytes(),
                Err(error) if error.is::<LengthLimitError>() => return Err(NoBody::TooLong),
                Err(_) => return Err(NoBody::Broken),
            };
            let bytes = packing.unpack(raw).await?;
            // What it does not need, others may have.
            room.shrink_to(bytes.len() * WEIGHT);
            Ok(Read { bytes, room })
        };
        tokio::time::timeout(time, reading).await.unwrap_or(Err(NoBody::Slow))
    }
}

/// What a body is packed in.
#[derive(Debug, Clone, Copy)]
enum Packing {
    None,
    Gzip,
    Zstd,
}

impl Packing {
    async fn unpack(self, raw: Bytes) -> Result<Bytes, NoBody> {
        let most = u64::try_from(MAX_BODY).unwrap_or(u64::MAX) + 1;
        let mut bytes = Vec::new();
        match self {
            Self::None => return Ok(raw),
            Self::Gzip => {
                let mut decoder = GzipDecoder::new(&*raw).take(most);
                decoder.read_to_end(&mut bytes).await.map_err(|_| NoBody::Broken)?;
            }
            Self::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(&*raw).map_err(|_| NoBody::Broken)?;
                decoder.window_log_max(WINDOW).map_err(|_| NoBody::Broken)?;
                decoder.take(most).read_to_end(&mut bytes).map_err(|_| NoBody::Broken)?;
            }
        }
        if bytes.len() > MAX_BODY { Err(NoBody::TooLong) } else { Ok(bytes.into()) }
    }
}

#[cfg(test)]
mod tests {
    use async_compression::tokio::bufread::GzipEncoder;
    use http_body_util::Full;

    use super::*;

    const TIME: Duration = Duration::from_secs(20);

    async fn read(packed: Option<&'static str>, body: Vec<u8>) -> Result<Bytes, NoBody> {
        let mut headers = HeaderMap::new();
        if let Some(packed) = packed {
            headers.insert(CONTENT_ENCODING, http::HeaderValue::from_static(packed));
        }
        Inlet::new().read(&headers, Full::new(Bytes::from(body)), TIME).await.map(|read| read.bytes)
    }

    async fn gzip(text: &[u8]) -> Vec<u8> {
        let mut packed = Vec::new();
        GzipEncoder::new(text).read_to_end(&mut packed).await.unwrap();
        packed
    }

    #[tokio::test]
    async fn a_body_is_the_same_whatever_it_is_packed_in() {
        let text = br#"{"model":"m"}"#.to_vec();
        let zstd = zstd::encode_all(&text[..], 1).unwrap();
        for (packed, body) in [
            (None, text.clone()),
            (Some("identity"), text.clone()),
            (Some("gzip"), gzip(&text).await),
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
        let long = vec![b' '; MAX_BODY + 1];
        let zstd = zstd::encode_all(&long[..], 1).unwrap();
        let small = gzip(&long).await;
        assert!(zstd.len() < MAX_BODY / 100 && small.len() < MAX_BODY / 100);
        for (packed, body) in [(Some("zstd"), zstd), (Some("gzip"), small), (None, long)] {
            assert!(matches!(read(packed, body).await, Err(NoBody::TooLong)), "{packed:?}");
        }
    }

    #[tokio::test]
    async fn long_ones_wait_for_each_other_and_short_ones_do_not() {
        let inlet = Inlet::new();
        let headers = HeaderMap::new();
        let long = || Full::new(Bytes::from(vec![b' '; MAX_BODY]));
        let first = inlet.read(&headers, long(), TIME).await.unwrap();
        let refused = inlet.read(&headers, long(), Duration::from_millis(100)).await;
        assert!(matches!(refused, Err(NoBody::Full)), "{refused:?}");
        inlet.read(&headers, Full::new(Bytes::from_static(b"{}")), TIME).await.unwrap();
        drop(first);
        inlet.read(&headers, long(), TIME).await.unwrap();
    }
}
