//! A form's body in portions: its parser would take in whatever there is before it looks at any of it, and look for
//! the end of a part's head for ever.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use axum::BoxError;
use axum::body::Body;
use axum::extract::Request;
use bytes::Bytes;
use futures_util::{Stream, TryStreamExt as _};

/// Bytes that the parser gets at one time, about.
const PORTION: usize = 256 * 1024;

/// Bytes that it may take in without finding the end of a head or some contents, about.
const MAX_UNPARSED: usize = 1024 * 1024;

/// How much the parser has taken in since it last found something.
#[derive(Debug, Clone, Default)]
pub(super) struct Unparsed(Arc<AtomicUsize>);

impl Unparsed {
    /// It found something.
    pub(super) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    fn add(&self, count: usize) -> io::Result<()> {
        let sum = self.0.fetch_add(count, Ordering::Relaxed).saturating_add(count);
        if sum > MAX_UNPARSED { Err(io::Error::other("the head of a part is too long")) } else { Ok(()) }
    }
}

struct Paced<S> {
    contents: S,
    portion: usize,
    unparsed: Unparsed,
}

impl<S, E> Stream for Paced<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
    E: Into<BoxError>,
{
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.portion >= PORTION {
            self.portion = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let piece = ready!(self.contents.try_poll_next_unpin(cx));
        Poll::Ready(piece.map(|piece| {
            let piece = piece.map_err(io::Error::other)?;
            self.portion += piece.len();
            self.unparsed.add(piece.len())?;
            Ok(piece)
        }))
    }
}

/// The request with its body in portions, and what must be told whenever the parser finds something.
pub(super) fn paced(request: Request) -> (Request, Unparsed) {
    let unparsed = Unparsed::default();
    let counted = unparsed.clone();
    let request = request.map(|body| {
        Body::from_stream(Paced { contents: body.into_data_stream(), portion: 0, unparsed: counted })
    });
    (request, unparsed)
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, StreamExt as _, stream};

    use super::*;

    fn endless() -> Paced<impl Stream<Item = Result<Bytes, io::Error>> + Unpin> {
        let piece = Bytes::from_static(&[0; 64 * 1024]);
        Paced {
            contents: stream::repeat_with(move || Ok(piece.clone())),
            portion: 0,
            unparsed: Unparsed::default(),
        }
    }

    /// What it gives before it wants to be asked again.
    fn burst(paced: &mut (impl Stream<Item = io::Result<Bytes>> + Unpin)) -> io::Result<usize> {
        let mut sum = 0;
        while let Some(piece) = paced.next().now_or_never() {
            sum += piece.transpose()?.map_or(0, |piece| piece.len());
        }
        Ok(sum)
    }

    #[test]
    fn it_comes_in_portions() {
        let mut paced = endless();
        let unparsed = paced.unparsed.clone();
        for _ in 0..100 {
            assert_eq!(burst(&mut paced).unwrap(), PORTION);
            unparsed.clear();
        }
    }

    #[test]
    fn nothing_is_looked_for_without_end() {
        let mut paced = endless();
        let mut sum = 0;
        let error = loop {
            match burst(&mut paced) {
                Ok(count) => sum += count,
                Err(error) => break error,
            }
        };
        assert!(sum <= MAX_UNPARSED && error.to_string().contains("head"), "{sum} {error}");
    }
}
