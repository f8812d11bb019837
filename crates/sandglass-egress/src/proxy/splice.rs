//! Carries bytes from one socket to the other.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::AsyncWriteExt as _;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::task::coop::consume_budget;

use super::body::BadChunk;
use super::caps::{Meter, Way};

/// How much is carried at once, in bytes. A flow has room for it, in each direction, only while there is something to
/// carry.
const CHUNK: usize = 32 << 10;

/// Why a flow ended before its streams did.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// A socket failed, or one side went away.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// Bytes that may not be carried, by this rule.
    #[error("not allowed by {0}")]
    Rule(&'static str),
}

impl From<BadChunk> for Broken {
    fn from(_: BadChunk) -> Self {
        Self::Rule("always/framing")
    }
}

/// One direction of a flow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lane<'a> {
    pub(super) meter: &'a Meter,
    pub(super) way: Way,
    /// Bytes of this flow that went.
    pub(super) count: &'a AtomicU64,
}

impl Lane<'_> {
    /// Carries these bytes.
    pub(super) async fn write(&self, to: &mut WriteHalf<'_>, mut bytes: &[u8]) -> Result<(), Broken> {
        self.meter.pass(self.way, bytes.len()).await.map_err(Broken::Rule)?;
        while !bytes.is_empty() {
            let written = to.write(bytes).await?;
            self.count.fetch_add(u64::try_from(written).unwrap_or(u64::MAX), Ordering::Relaxed);
            bytes = bytes.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// Carries all that comes, and then the end of the stream. What comes first is shown to `first`.
    pub(super) async fn carry(
        &self,
        from: &ReadHalf<'_>,
        to: &mut WriteHalf<'_>,
        first: impl FnOnce(&[u8]),
    ) -> Result<(), Broken> {
        let mut first = Some(first);
        while let Some(mut chunk) = read(from).await? {
            // As long as there is more at once, the room is kept.
            loop {
                if let Some(first) = first.take() {
                    first(&chunk);
                }
                self.write(to, &chunk).await?;
                chunk.clear();
                // Both sides may always be ready.
                consume_budget().await;
                match from.try_read_buf(&mut chunk) {
                    Ok(0) => return Ok(to.shutdown().await?),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(to.shutdown().await?)
    }
}

/// Waits for bytes and reads what there is, but not more than [`CHUNK`]; `None` at the end of the stream.
pub(super) async fn read(from: &ReadHalf<'_>) -> io::Result<Option<Vec<u8>>> {
    loop {
        from.readable().await?;
        let mut chunk = Vec::with_capacity(CHUNK);
        match from.try_read_buf(&mut chunk) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(Some(chunk)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Reads to the end of the stream, and throws it away.
pub(super) async fn drain(from: &ReadHalf<'_>) -> io::Result<()> {
    while read(from).await?.is_some() {
        consume_budget().await;
    }
    Ok(())
}
