//! Who carries a connection into a sandbox: whoever reads from it, and a task of its own where that is not enough.
//!
//! A short answer is there as soon as its head is, and to carry it from one task to another takes about as long as all the rest
//! that is done for it.

use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// The work on a connection.
type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The work on a connection, which ends with what holds this.
pub(crate) struct Driver {
    place: Place,
    tasks: TaskTracker,
}

enum Place {
    /// Done by whoever polls.
    Here(Work),
    Task {
        _until_dropped: AbortOnDropHandle<()>,
    },
    Done,
}

impl Driver {
    pub(crate) fn new(work: impl Future<Output = ()> + Send + 'static, tasks: TaskTracker) -> Self {
        Self { place: Place::Here(Box::pin(work)), tasks }
    }

    /// What the future comes to, which the work leads to.
    pub(crate) async fn until<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = std::pin::pin!(future);
        std::future::poll_fn(|cx| {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                return Poll::Ready(output);
            }
            self.poll(cx);
            future.as_mut().poll(cx)
        })
        .await
    }

    /// Does what can be done here.
    fn poll(&mut self, cx: &mut Context<'_>) {
        if let Place::Here(work) = &mut self.place
            && work.as_mut().poll(cx).is_ready()
        {
            self.place = Place::Done;
        }
    }

    /// Lets a task go on with it.
    pub(crate) fn leave(&mut self) {
        self.place = match mem::replace(&mut self.place, Place::Done) {
            Place::Here(work) => {
                Place::Task { _until_dropped: AbortOnDropHandle::new(self.tasks.spawn(work)) }
            }
            place => place,
        };
    }
}

/// The body of an answer, with the connection that it comes from.
pub(crate) struct Driven<K> {
    body: Incoming,
    driver: Driver,
    /// What lives as long as the connection.
    _keep: K,
}

impl<K> Driven<K> {
    pub(crate) const fn new(body: Incoming, driver: Driver, keep: K) -> Self {
        Self { body, driver, _keep: keep }
    }
}

impl<K: Unpin> Body for Driven<K> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        let mut frame = Pin::new(&mut this.body).poll_frame(cx);
        if frame.is_pending() {
            this.driver.poll(cx);
            frame = Pin::new(&mut this.body).poll_frame(cx);
        }
        // There is more to come. Nobody may ask for it until the request was taken to its end, which is a part of the work.
        if !this.body.is_end_stream() {
            this.driver.leave();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
