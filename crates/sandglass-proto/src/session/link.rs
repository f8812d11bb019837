//! Between a session and its byte streams: what a driver calls, and two drivers.

use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle, Thread};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};

use super::batch::Batch;
use super::error::Closed;
use super::frame::{Decoder, Epoch};
use super::state::Shared;

/// Enough for the drivers' loops; the buffers are on the heap.
const STACK_SIZE: usize = 128 * 1024;

/// Reads after which the asynchronous driver lets others go first, its own writing half above all: both share the
/// budget of one task. Each read takes a few frames at most.
const READS_AT_ONCE: usize = 2;

/// The side of a session that belongs to its byte streams. Give it to a driver: [`Self::run`],
/// [`Self::spawn_threads`], or one of your own. The session ends when either half is dropped.
#[derive(Debug)]
pub struct Link {
    /// What arrives.
    pub inbound: Inbound,
    /// What leaves.
    pub outbound: Outbound,
}

impl Link {
    pub(super) fn new(shared: &Arc<Shared>, only: Option<Epoch>) -> Self {
        Self {
            inbound: Inbound { shared: Arc::clone(shared), decoder: Decoder::new(only) },
            outbound: Outbound { shared: Arc::clone(shared), batch: Batch::default() },
        }
    }

    /// Drives the session over two asynchronous byte streams until it ends. Dropping the future ends it too, maybe
    /// in the middle of a frame, which the next attachment copes with.
    pub async fn run(self, reader: impl AsyncRead + Send, writer: impl AsyncWrite + Send) -> Closed {
        let shared = Arc::clone(&self.inbound.shared);
        let mut read = pin!(self.inbound.read_all(reader));
        let mut write = pin!(self.outbound.write_all(writer));
        // Whatever the reason for one half to end: the other has no purpose without it.
        poll_fn(|cx| match read.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => write.as_mut().poll(cx),
        })
        .await;
        shared.with(|state| state.closed()).unwrap_or(Closed::Local)
    }

    /// Drives the session with two threads that do blocking I/O, so that it stays alive however busy an
    /// asynchronous runtime is. A thread ends when the session has ended and its call returns: the reader stays
    /// in its read for as long as the peer keeps the stream open.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn spawn_threads(
        self,
        reader: impl Read + Send + 'static,
        writer: impl Write + Send + 'static,
    ) -> io::Result<[JoinHandle<()>; 2]> {
        let Self { inbound, outbound } = self;
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.to_owned()).stack_size(STACK_SIZE).spawn(work)
        };
        Ok([
            spawn("session-read", Box::new(move || inbound.read_all_blocking(reader)))?,
            spawn("session-write", Box::new(move || outbound.write_all_blocking(writer)))?,
        ])
    }
}

/// Takes what arrives from the peer. It never waits for those who read flows.
#[derive(Debug)]
pub struct Inbound {
    shared: Arc<Shared>,
    decoder: Decoder,
}

impl Inbound {
    /// Applies received bytes, in pieces of any size.
    pub fn on_bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let count = self.decoder.feed(bytes);
            bytes = &bytes[count..];
            self.apply();
        }
    }

    /// Where to put received bytes without a copy in between; tell [`Self::received`] how many there are. Never
    /// empty.
    pub fn space(&mut self) -> &mut [u8] {
        self.decoder.space()
    }

    /// Applies the first `count` bytes of [`Self::space`].
    pub fn received(&mut self, count: usize) {
        self.decoder.received(count);
        self.apply();
    }

    /// The stream ended.
    pub fn end(&mut self, why: Closed) {
        self.shared.close(why);
    }

    /// Whether the session has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.with(|state| state.closed().is_some())
    }

    fn apply(&mut self) {
        while let Some(frame) = self.decoder.next_frame() {
            self.shared.quietly(|state| state.on_frame(&frame));
        }
        // Whoever waits is woken for all frames at once.
        let noise = self.decoder.noise();
        self.shared.with(|state| state.set_noise(noise));
    }

    async fn read_all(mut self, reader: impl AsyncRead + Send) {
        let mut reader = pin!(reader);
        let mut reads: usize = 0;
        let why = loop {
            // A peer that never stops talking must not keep the task from everything else.
            reads = reads.wrapping_add(1);
            if reads.is_multiple_of(READS_AT_ONCE) {
                tokio::task::yield_now().await;
            }
            match reader.read(self.space()).await {
                Ok(0) => break Closed::Eof,
                Ok(count) => self.received(count),
                Err(error) => break Closed::Io(error.kind()),
            }
        };
        self.end(why);
    }

    fn read_all_blocking(mut self, mut reader: impl Read) {
        let why = loop {
            if self.is_closed() {
                return;
            }
            match reader.read(self.space()) {
                Ok(0) => break Closed::Eof,
                Ok(count) => self.received(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Closed::Io(error.kind()),
            }
        };
        self.end(why);
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        self.shared.close(Closed::Local);
    }
}

/// Gives what is to be sent to the peer.
#[derive(Debug)]
pub struct Outbound {
    shared: Arc<Shared>,
    batch: Batch,
}

impl Outbound {
    /// Waits for something to send; `None` when the session has ended. Asking for the next batch says that the
    /// last one was written whole. Cancel safe.
    pub async fn next(&mut self) -> Option<&Batch> {
        let more = poll_fn(|cx| self.poll_fill(cx)).await;
        self.encoded(more)
    }

    /// As [`Self::next`], blocking the thread.
    pub fn next_blocking(&mut self) -> Option<&Batch> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let cx = Context::from_waker(&waker);
        let more = loop {
            match self.poll_fill(&cx) {
                Poll::Ready(more) => break more,
                Poll::Pending => thread::park(),
            }
        };
        self.encoded(more)
    }

    /// What is to be sent now, if anything; does not wait.
    pub fn try_next(&mut self) -> Option<&Batch> {
        let more = self.poll_fill(&Context::from_waker(Waker::noop())) == Poll::Ready(true);
        self.encoded(more)
    }

    fn poll_fill(&mut self, cx: &Context<'_>) -> Poll<bool> {
        self.shared.with(|state| state.poll_batch(cx, &mut self.batch))
    }

    fn encoded(&mut self, more: bool) -> Option<&Batch> {
        more.then(|| {
            self.batch.encode();
            &self.batch
        })
    }

    async fn write_all(mut self, writer: impl AsyncWrite + Send) {
        let mut writer = pin!(writer);
        while let Some(batch) = self.next().await {
            if let Err(error) = batch.write_to_async(Pin::as_mut(&mut writer)).await {
                self.shared.close(Closed::Io(error.kind()));
                return;
            }
            tokio::task::consume_budget().await;
        }
    }

    fn write_all_blocking(mut self, mut writer: impl Write) {
        while let Some(batch) = self.next_blocking() {
            if let Err(error) = batch.write_to(&mut writer) {
                self.shared.close(Closed::Io(error.kind()));
                return;
            }
        }
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        self.shared.close(Closed::Local);
    }
}

/// Wakes a thread that waits for something to send.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
