//! The way to the server itself: streams that never were on a network. Each has a place, and there are so few that sandboxes,
//! one or all together, keep no client out of any sandbox.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandglass_types::SandboxId;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// Of all connections into sandboxes, those that come from sandboxes may be one in so many. Of these, those of one sandbox
/// may be one in as many.
const SHARE: usize = 4;

/// Most places of one sandbox, however many there are.
const MAX_EACH: usize = 32;

/// One connection of a sandbox to the server itself.
#[derive(Debug)]
pub struct Caller {
    /// The sandbox that it comes from.
    pub sandbox: SandboxId,
    /// What it sends and is answered.
    pub stream: TcpStream,
    /// To be kept for as long as it costs anything.
    pub place: Place,
}

/// The right of a sandbox to one connection; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "the place is free again when this is dropped"]
pub struct Place {
    places: Arc<Places>,
    sandbox: SandboxId,
}

#[derive(Debug)]
struct Places {
    all: usize,
    each: usize,
    /// Of each sandbox that has any, how many.
    taken: Mutex<HashMap<SandboxId, usize>>,
}

impl Places {
    fn taken(&self) -> MutexGuard<'_, HashMap<SandboxId, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>, sandbox: &SandboxId) -> Option<Place> {
        let mut taken = self.taken();
        let own = taken.get(sandbox).copied().unwrap_or_default();
        if own >= self.each || taken.values().sum::<usize>() >= self.all {
            return None;
        }
        taken.insert(sandbox.clone(), own + 1);
        Some(Place { places: Arc::clone(self), sandbox: sandbox.clone() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        if let Some(own) = taken.get_mut(&self.sandbox) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.sandbox);
            }
        }
    }
}

/// The sandboxes' end of it.
#[derive(Debug)]
pub(super) struct Door {
    places: Arc<Places>,
    callers: mpsc::Sender<Caller>,
}

impl Door {
    /// To the edge of a server that has so many connections into sandboxes. Callers come out at the other end.
    pub(super) fn of_share(connections: usize) -> (Self, mpsc::Receiver<Caller>) {
        Self::new(connections / SHARE)
    }

    /// One with so many places.
    pub(super) fn new(places: usize) -> (Self, mpsc::Receiver<Caller>) {
        let all = places.max(1);
        let each = (all / SHARE).clamp(1, MAX_EACH);
        // Whoever waits has a place, so there is room for all.
        let (callers, received) = mpsc::channel(all);
        (Self { places: Arc::new(Places { all, each, taken: Mutex::default() }), callers }, received)
    }

    pub(super) fn enter(&self, sandbox: &SandboxId) -> io::Result<TcpStream> {
        let place = self.places.take(sandbox).ok_or(io::ErrorKind::QuotaExceeded)?;
        let (ours, theirs) = UnixStream::pair()?;
        // Once there are two ends, the runtime makes no difference between one kind of stream and another.
        let stream = |end: UnixStream| {
            end.set_nonblocking(true)?;
            TcpStream::from_std(OwnedFd::from(end).into())
        };
        let (ours, stream) = (stream(ours)?, stream(theirs)?);
        let caller = Caller { sandbox: sandbox.clone(), stream, place };
        self.callers.try_send(caller).map_err(|_gone| io::ErrorKind::ConnectionRefused)?;
        Ok(ours)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn neither_one_sandbox_nor_all_of_them_have_more_than_their_share() {
        let (door, mut callers) = Door::of_share(800);
        let one = SandboxId::random();
        let streams: Vec<_> = (0..32).map(|_| door.enter(&one).unwrap()).collect();
        assert_eq!(door.enter(&one).unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
        for _ in 32..200 {
            door.enter(&SandboxId::random()).unwrap();
        }
        assert_eq!(door.enter(&SandboxId::random()).unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
        // The server's end counts, not the sandbox's.
        drop(streams);
        assert!(door.enter(&one).is_err());
        let first = callers.recv().await.unwrap();
        assert_eq!(first.sandbox, one);
        drop(first);
        door.enter(&one).unwrap();
        while callers.try_recv().is_ok() {}
        assert!(door.places.taken().is_empty(), "nothing is left behind");
        drop(callers);
        assert!(door.enter(&one).is_err());
        assert!(door.places.taken().is_empty());
    }

    #[test]
    fn also_of_few_one_sandbox_has_a_part() {
        let shares = [1, 5, 64, 800, 100_000].map(|connections| {
            let places = Door::of_share(connections).0.places;
            (places.all, places.each)
        });
        assert_eq!(shares, [(1, 1), (1, 1), (16, 4), (200, 32), (25_000, 32)]);
    }
}
