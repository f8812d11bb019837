//! Events that wait for a client, within bounds, and what is said in place of those that found no room.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use connectrpc::ConnectError;
use sandglass_proto::services::filesystem::{EntryInfo, EventType, FilesystemEvent};

/// Bytes that may wait for one client.
const MAX_BYTES: usize = 4 << 20;

/// So much of something that all watchers share.
#[derive(Debug)]
pub(crate) struct Quota {
    used: AtomicUsize,
    most: usize,
}

impl Quota {
    /// Nothing of it is used.
    pub(crate) const fn new(most: usize) -> Self {
        Self { used: AtomicUsize::new(0), most }
    }

    /// Takes some; whether there was enough.
    pub(super) fn take(&self, count: usize) -> bool {
        let take = |used: usize| used.checked_add(count).filter(|used| *used <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Gives back what was taken.
    pub(super) fn give(&self, count: usize) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }
}

/// Why a watch can't go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The folder was removed or renamed, which was told.
    Gone,
    /// Something below could not be watched.
    Blind,
}

impl End {
    fn error(self) -> Option<ConnectError> {
        match self {
            Self::Gone => None,
            Self::Blind => Some(ConnectError::resource_exhausted(
                "the watch has ended: there are too many folders, or they are nested too deeply",
            )),
        }
    }
}

fn lost() -> ConnectError {
    ConnectError::data_loss(
        "events were lost: there were more than could wait to be read; list the folder to see what is there now",
    )
}

/// Something that happened. As the protocol has it, it would take many times the memory.
#[derive(Debug)]
pub(super) struct Event {
    /// To what, as clients call it.
    pub name: Box<str>,
    /// What.
    pub kind: EventType,
    /// What is there, if the client wants to know.
    pub entry: Option<Box<EntryInfo>>,
}

impl From<Event> for FilesystemEvent {
    fn from(Event { name, kind, entry }: Event) -> Self {
        Self {
            name: name.into(),
            r#type: kind.into(),
            entry: entry.map(|entry| *entry).into(),
            ..Default::default()
        }
    }
}

/// What a client gets next.
#[derive(Debug)]
pub(super) enum Next {
    /// An event.
    Event(Event),
    /// Nothing yet.
    Wait,
    /// The end, with the reason if it is an error.
    End(Option<ConnectError>),
}

/// Events that wait for one client.
#[derive(Debug)]
pub(super) struct Queue {
    events: VecDeque<Event>,
    bytes: usize,
    /// Whether some were lost after these, which the client does not know yet.
    lost: bool,
    end: Option<End>,
    all: Arc<Quota>,
}

/// What the allocator needs for each piece of memory besides, in bytes, at most.
const PIECE: usize = 24;

/// About what an event takes, in bytes.
fn cost(event: &Event) -> usize {
    let entry = event.entry.as_ref().map_or(0, |entry| {
        size_of::<EntryInfo>()
            + 6 * PIECE
            + entry.name.len()
            + entry.path.len()
            + entry.permissions.len()
            + entry.owner.len()
            + entry.group.len()
            + entry.symlink_target.as_ref().map_or(0, String::len)
            + entry.metadata.iter().map(|(key, value)| key.len() + value.len() + 64).sum::<usize>()
    });
    size_of::<Event>() + event.name.len() + PIECE + entry
}

impl Queue {
    /// An empty one. `all` bounds the bytes that wait for all clients.
    pub(super) const fn new(all: Arc<Quota>) -> Self {
        Self { events: VecDeque::new(), bytes: 0, lost: false, end: None, all }
    }

    /// Whether an event would be kept, as far as can be said before it is made.
    pub(super) const fn is_open(&self) -> bool {
        !self.lost && self.end.is_none()
    }

    /// Adds an event, or notes that it was lost. Writes in a row to the same file are one.
    pub(super) fn push(&mut self, event: Event) {
        if !self.is_open() {
            return;
        }
        let write = EventType::EVENT_TYPE_WRITE;
        let repeated = self
            .events
            .back()
            .is_some_and(|last| last.kind == write && event.kind == write && last.name == event.name);
        if repeated && let Some(last) = self.events.pop_back() {
            self.give(cost(&last));
        }
        let bytes = cost(&event);
        if self.bytes + bytes > MAX_BYTES || !self.all.take(bytes) {
            self.lose();
            return;
        }
        self.bytes += bytes;
        self.events.push_back(event);
    }

    fn give(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.all.give(bytes);
    }

    /// Notes that events were lost.
    pub(super) const fn lose(&mut self) {
        self.lost = true;
    }

    /// Notes that there will be no more events.
    pub(super) fn end(&mut self, end: End) {
        self.end.get_or_insert(end);
    }

    /// What a stream sends next. A loss is its end: nothing else in it would be seen by clients.
    pub(super) fn next(&mut self) -> Next {
        match (self.events.pop_front(), self.lost, self.end) {
            (Some(event), _, _) => {
                self.give(cost(&event));
                Next::Event(event)
            }
            (None, true, _) => Next::End(Some(lost())),
            (None, false, Some(end)) => Next::End(end.error()),
            (None, false, None) => Next::Wait,
        }
    }

    /// All that waits.
    ///
    /// # Errors
    /// `data_loss`, once, where events were lost; `resource_exhausted` from when the watch can't go on. Each comes after
    /// the events before it.
    pub(super) fn take(&mut self) -> Result<Vec<FilesystemEvent>, ConnectError> {
        if self.events.is_empty() {
            if std::mem::take(&mut self.lost) {
                return Err(lost());
            }
            if let Some(error) = self.end.and_then(End::error) {
                return Err(error);
            }
        }
        self.give(self.bytes);
        Ok(std::mem::take(&mut self.events).into_iter().map(Into::into).collect())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.all.give(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use connectrpc::ErrorCode;

    use super::*;

    fn event(name: &str, kind: EventType) -> Event {
        Event { name: name.into(), kind, entry: None }
    }

    const CREATE: EventType = EventType::EVENT_TYPE_CREATE;
    const WRITE: EventType = EventType::EVENT_TYPE_WRITE;

    #[test]
    fn writes_in_a_row_are_one() {
        let all = Arc::new(Quota::new(MAX_BYTES));
        let mut queue = Queue::new(Arc::clone(&all));
        for (name, kind) in
            [("a", CREATE), ("a", WRITE), ("a", WRITE), ("b", WRITE), ("a", WRITE), ("a", CREATE)]
        {
            queue.push(event(name, kind));
        }
        assert_eq!(queue.take().unwrap().len(), 5);
        assert_eq!(all.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_is_lost_is_told_after_what_is_not() {
        let all = Arc::new(Quota::new(1000));
        let mut queue = Queue::new(Arc::clone(&all));
        let mut full = 0;
        while queue.is_open() {
            queue.push(event(&format!("{full}"), CREATE));
            full += 1;
        }
        queue.push(event("late", CREATE));
        assert_eq!(queue.take().unwrap().len(), full - 1);
        assert_eq!(queue.take().unwrap_err().code, ErrorCode::DataLoss);
        queue.push(event("next", CREATE));
        assert_eq!(queue.take().unwrap()[0].name, "next");
        // A stream ends there.
        queue.push(event("last", CREATE));
        queue.lose();
        assert!(matches!(queue.next(), Next::Event(event) if &*event.name == "last"));
        assert!(matches!(queue.next(), Next::End(Some(error)) if error.code == ErrorCode::DataLoss));
        assert_eq!(all.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn all_queues_share_one_bound() {
        let all = Arc::new(Quota::new(1000));
        let mut first = Queue::new(Arc::clone(&all));
        first.push(event(&"x".repeat(800), CREATE));
        let mut second = Queue::new(Arc::clone(&all));
        second.push(event(&"x".repeat(800), CREATE));
        assert!(first.is_open() && !second.is_open());
        drop((first, second));
        assert_eq!(all.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_end_comes_last() {
        let mut queue = Queue::new(Arc::new(Quota::new(1000)));
        queue.push(event(".", EventType::EVENT_TYPE_REMOVE));
        queue.end(End::Gone);
        queue.push(event("never", CREATE));
        assert!(matches!(queue.next(), Next::Event(_)));
        assert!(matches!(queue.next(), Next::End(None)));
        assert!(queue.take().unwrap().is_empty());
        let mut queue = Queue::new(Arc::new(Quota::new(1000)));
        queue.end(End::Blind);
        for _ in 0..2 {
            assert_eq!(queue.take().unwrap_err().code, ErrorCode::ResourceExhausted);
        }
    }
}
