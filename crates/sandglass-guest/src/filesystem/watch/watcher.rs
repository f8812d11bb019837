//! A watch that runs: whenever the kernel has events they are read, whether the client asks or not.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use connectrpc::ConnectError;
use sandglass_proto::services::filesystem::{EntryInfo, EventType, FilesystemEvent};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio_util::task::AbortOnDropHandle;

use super::queue::{End, Event, Next, Queue};
use super::tree::{Drained, Sink, Tree};
use crate::agent::Agent;
use crate::blocking::Blocking;
use crate::filesystem::{Describer, Found, describe};
use crate::metadata::Labels;
use crate::path::{self, Walk, borrow, resolve};
use crate::users::Users;

/// How long an event may be late that belongs to what was found, or is the second half of a move.
const SETTLE: Duration = Duration::from_millis(10);

/// How often a client's request looks, at most, while a program makes events faster than they are read.
const LOOKS: usize = 8;

/// How long the next look waits: a look costs more than an event, and a program that writes much would pay for one each time.
const REST: Duration = Duration::from_millis(3);

#[derive(Debug)]
struct Shared {
    tree: Mutex<Tree>,
    queue: Mutex<Queue>,
    /// Says that there is something in the queue.
    filled: Notify,
    /// Says that the task is to look, also if there are no events.
    unsettled: Notify,
    /// What events with entries need.
    entries: Option<Entries>,
}

/// Describes what events are about.
#[derive(Debug)]
struct Entries {
    /// The root of what the client sees.
    root: PathBuf,
    /// The watched folder, as the client calls it.
    path: String,
    labels: Arc<Labels>,
}

impl Entries {
    /// What has this name now, if it is still there.
    fn describe(&self, name: &str, users: &mut Option<Users>) -> Option<EntryInfo> {
        let path = path::clean(&format!("{}/{name}", self.path)).ok()?;
        let root = path::open_root(&self.root).ok()?;
        let place = resolve(borrow(&root), &path, Walk::NO_FOLLOW).ok()?;
        let users = users.get_or_insert_with(|| Users::read(&self.root).unwrap_or_default());
        let with = Describer { root: &root, users, labels: &self.labels };
        let stat = place.stat.as_ref()?;
        Some(describe(with, Found { path: &path, dir: &place.dir, name: place.name(), stat }))
    }
}

/// Puts into the queue what a tree tells.
struct Report<'a> {
    shared: &'a Shared,
    users: Option<Users>,
    ended: bool,
}

impl Sink for Report<'_> {
    fn tell(&mut self, name: &[u8], kind: EventType) -> bool {
        if !self.shared.queue().is_open() {
            return false;
        }
        // Names are any bytes, and texts of the protocol are UTF-8.
        let name = String::from_utf8_lossy(name).into_owned();
        let entries = self.shared.entries.as_ref().filter(|_| {
            matches!(
                kind,
                EventType::EVENT_TYPE_CREATE | EventType::EVENT_TYPE_WRITE | EventType::EVENT_TYPE_CHMOD
            )
        });
        let entry = entries.and_then(|entries| entries.describe(&name, &mut self.users));
        let mut queue = self.shared.queue();
        queue.push(Event { name: name.into(), kind, entry: entry.map(Box::new) });
        queue.is_open()
    }

    fn lose(&mut self) {
        self.shared.queue().lose();
    }

    fn end(&mut self, end: End) {
        self.ended = true;
        self.shared.queue().end(end);
    }

    fn has_ended(&self) -> bool {
        self.ended
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the kernel's events into the queue. Blocks.
    fn drain(&self, settle: bool) -> Drained {
        let mut report = Report { shared: self, users: None, ended: false };
        let drained = self.tree.lock().unwrap_or_else(PoisonError::into_inner).drain(&mut report, settle);
        self.filled.notify_one();
        drained
    }
}

/// Reads the kernel's events into the queue, on a thread that may wait.
async fn drain(shared: &Arc<Shared>, blocking: &Blocking, settle: bool) -> Drained {
    let shared = Arc::clone(shared);
    blocking.run(move || shared.drain(settle)).await
}

/// Reads the kernel's events whenever there are some.
async fn run(shared: Arc<Shared>, blocking: Blocking, ready: AsyncFd<Arc<OwnedFd>>) {
    loop {
        let readable = tokio::select! {
            readable = ready.readable() => match readable {
                Ok(readable) => Some(readable),
                Err(_) => return,
            },
            () = shared.unsettled.notified() => None,
        };
        let mut settle = false;
        loop {
            match drain(&shared, &blocking, settle).await {
                Drained::All => break,
                Drained::More => settle = false,
                Drained::Unsettled => {
                    tokio::time::sleep(SETTLE).await;
                    settle = true;
                }
            }
        }
        // What came meanwhile makes it ready again.
        if let Some(mut readable) = readable {
            readable.clear_ready();
        }
        tokio::time::sleep(REST).await;
    }
}

/// A watch that runs. It ends with this.
#[derive(Debug)]
pub(crate) struct Watcher {
    shared: Arc<Shared>,
    blocking: Blocking,
    _task: AbortOnDropHandle<()>,
    _place: OwnedSemaphorePermit,
}

impl Watcher {
    /// Lets it run. `path` is the watched folder, as the client calls it.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(super) fn start(
        agent: &Agent,
        tree: Tree,
        queue: Queue,
        entries_of: Option<String>,
        place: OwnedSemaphorePermit,
    ) -> std::io::Result<Self> {
        // SAFETY: the descriptor is the same, and open, as long as there is one of its owners, and this is one.
        let ready = unsafe { AsyncFd::register_with_interest(tree.inotify(), Interest::READABLE)? };
        let shared = Arc::new(Shared {
            tree: Mutex::new(tree),
            queue: Mutex::new(queue),
            filled: Notify::new(),
            unsettled: Notify::new(),
            entries: entries_of.map(|path| Entries {
                root: agent.root.clone(),
                path,
                labels: Arc::clone(&agent.labels),
            }),
        });
        let (reader, blocking) = (Arc::clone(&shared), agent.blocking.clone());
        let task = agent.tasks.spawn(run(reader, blocking, ready));
        Ok(Self {
            shared,
            blocking: agent.blocking.clone(),
            _task: AbortOnDropHandle::new(task),
            _place: place,
        })
    }

    /// The next event, when there is one.
    ///
    /// # Errors
    /// The stream is over: with an error, or without.
    pub(crate) async fn next(&self) -> Result<FilesystemEvent, Option<ConnectError>> {
        loop {
            match self.shared.queue().next() {
                Next::Event(event) => return Ok(event.into()),
                Next::End(end) => return Err(end),
                Next::Wait => {}
            }
            self.shared.filled.notified().await;
        }
    }

    /// All events of what was done before this is called.
    ///
    /// # Errors
    /// As [`Queue::take`].
    pub(crate) async fn take(&self) -> Result<Vec<FilesystemEvent>, ConnectError> {
        for _ in 0..LOOKS {
            match drain(&self.shared, &self.blocking, false).await {
                Drained::All => break,
                Drained::More => {}
                Drained::Unsettled => {
                    self.shared.unsettled.notify_one();
                    break;
                }
            }
        }
        self.shared.queue().take()
    }
}
