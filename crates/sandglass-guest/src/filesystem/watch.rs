//! Watching folders: as a stream, or as a watcher that a client asks from time to time.
//!
//! Each watch has an inotify and a task of its own, and all of them share bounds. Events wait in the agent and not in the
//! kernel, which in a sandbox would keep any number of them.

mod names;
mod queue;
mod tree;
mod watcher;

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use connectrpc::{ConnectError, RequestContext};
use futures_util::{Stream, stream};
use sandglass_proto::services::filesystem::WatchDirResponse;
use sandglass_proto::services::filesystem::watch_dir_response::{Event, KeepAlive, StartEvent};
use tokio::sync::Semaphore;

use super::{FilesystemService, code};
use queue::{Queue, Quota};
use tree::{Refusal, Tree, Wish};
use watcher::Watcher;

/// Watches at one time.
const MAX_WATCHERS: usize = 128;

/// Folders that all of them watch together.
const MAX_FOLDERS: usize = 16_384;

/// Bytes of events that wait for all clients together.
const MAX_WAITING: usize = 16 << 20;

/// What all watches share, and those that clients ask from time to time.
#[derive(Debug)]
pub(crate) struct Watchers {
    places: Arc<Semaphore>,
    folders: Arc<Quota>,
    waiting: Arc<Quota>,
    polled: Mutex<Polled>,
}

#[derive(Debug, Default)]
struct Polled {
    by_id: HashMap<String, Arc<Watcher>>,
    made: u64,
    random: RandomState,
}

impl Default for Watchers {
    fn default() -> Self {
        Self {
            places: Arc::new(Semaphore::new(MAX_WATCHERS)),
            folders: Arc::new(Quota::new(MAX_FOLDERS)),
            waiting: Arc::new(Quota::new(MAX_WAITING)),
            polled: Mutex::default(),
        }
    }
}

impl Watchers {
    fn polled(&self) -> MutexGuard<'_, Polled> {
        self.polled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a watcher under an id that nobody guesses.
    pub(super) fn keep(&self, watcher: Watcher) -> String {
        let mut polled = self.polled();
        polled.made += 1;
        let id = format!("w{}-{:016x}", polled.made, polled.random.hash_one(polled.made));
        polled.by_id.insert(id.clone(), Arc::new(watcher));
        id
    }

    /// The watcher of this id.
    ///
    /// # Errors
    /// `not_found`.
    pub(super) fn find(&self, id: &str) -> Result<Arc<Watcher>, ConnectError> {
        self.polled().by_id.get(id).cloned().ok_or_else(|| not_found(id))
    }

    /// Ends the watcher of this id.
    ///
    /// # Errors
    /// `not_found`.
    pub(super) fn remove(&self, id: &str) -> Result<(), ConnectError> {
        let removed = self.polled().by_id.remove(id);
        removed.map(drop).ok_or_else(|| not_found(id))
    }
}

fn not_found(id: &str) -> ConnectError {
    ConnectError::not_found(format!("watcher with id {id:?} not found"))
}

impl From<Refusal> for ConnectError {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.to_string();
        match refusal {
            Refusal::Path(error) => error.into(),
            Refusal::NotADirectory(_) | Refusal::Network(_) => Self::invalid_argument(text),
            Refusal::TooMuch(_) => Self::resource_exhausted(text),
            Refusal::Kernel(_, errno) => Self::new(code(errno), text),
        }
    }
}

/// What both kinds of watch ask for.
pub(super) struct Request {
    /// The folder, as the client wrote it.
    pub path: String,
    /// Whether the folders below are watched as well.
    pub recursive: bool,
    /// Whether events say what they are about.
    pub include_entry: bool,
    /// Whether it may be on another machine.
    pub allow_network_mounts: bool,
}

impl FilesystemService {
    /// Begins to watch.
    ///
    /// # Errors
    /// There are too many watches, or this one is not possible.
    pub(super) async fn watch(
        &self,
        ctx: &RequestContext,
        request: Request,
    ) -> Result<Watcher, ConnectError> {
        let agent = &self.0;
        let watchers = &agent.watchers;
        let place = Arc::clone(&watchers.places).try_acquire_owned().map_err(|_| {
            ConnectError::resource_exhausted(format!(
                "there are {MAX_WATCHERS} watchers in this sandbox already: stop some of them first"
            ))
        })?;
        let Request { path, recursive, include_entry, allow_network_mounts: networks } = request;
        let (root, folders) = (agent.root.clone(), Arc::clone(&watchers.folders));
        let (tree, path) = self
            .run(ctx, [path], move |_, [path]| {
                let wish = Wish { root, path: path.clone(), recursive, networks };
                Ok((Tree::open(wish, &folders)?, path))
            })
            .await?;
        let queue = Queue::new(Arc::clone(&watchers.waiting));
        Watcher::start(agent, tree, queue, include_entry.then_some(path), place)
            .map_err(|error| ConnectError::resource_exhausted(format!("watching failed: {error}")))
    }
}

/// All messages of a stream, the first included.
pub(super) fn events(
    watcher: Watcher,
    keepalive: Duration,
) -> impl Stream<Item = Result<WatchDirResponse, ConnectError>> + Send {
    let response = |event| Ok(WatchDirResponse { event: Some(event), ..Default::default() });
    let start = Event::Start(Box::<StartEvent>::default());
    stream::unfold((Some(start), Some(watcher)), move |(start, watcher)| async move {
        let watcher = watcher?;
        if let Some(start) = start {
            return Some((response(start), (None, Some(watcher))));
        }
        match tokio::time::timeout(keepalive, watcher.next()).await {
            Ok(Ok(event)) => Some((response(Event::Filesystem(Box::new(event))), (None, Some(watcher)))),
            Err(_elapsed) => {
                Some((response(Event::Keepalive(Box::<KeepAlive>::default())), (None, Some(watcher))))
            }
            Ok(Err(Some(error))) => Some((Err(error), (None, None))),
            Ok(Err(None)) => None,
        }
    })
}
