//! What all parts of the agent share.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Signal;
use tokio_util::task::TaskTracker;

use crate::blocking::Blocking;
use crate::clock::ActiveClock;
use crate::filesystem::Watchers;
use crate::job::Jobs;
use crate::journal::Journal;
use crate::memory::Borrowers;
use crate::metadata::Labels;
use crate::process::Registry;
use crate::reaper::{Child, Reaper};
use crate::settings::Current;
use crate::users::{User, Users};

/// How long a program may take to start, most of which is waiting for the disk.
const START_TIME: Duration = Duration::from_secs(10);

/// The agent.
#[derive(Debug)]
pub(crate) struct Agent {
    /// What the server configured.
    pub settings: Current,
    /// What clients started.
    pub processes: Registry,
    /// Starts and collects processes.
    pub reaper: Reaper,
    /// Groups of processes.
    pub jobs: Jobs,
    /// What there is to tell of commands.
    pub journal: Journal,
    /// Time in which the sandbox ran.
    pub clock: ActiveClock,
    /// For work that waits.
    pub blocking: Blocking,
    /// Those who transfer files, perhaps.
    pub borrowers: Borrowers,
    /// What clients attached to files.
    pub labels: Arc<Labels>,
    /// Those who watch folders.
    pub watchers: Watchers,
    /// All tasks that outlive a request.
    pub tasks: TaskTracker,
    /// The file system that is served.
    pub root: PathBuf,
    /// The only user there is, whatever name a client uses: set if the machine is not the sandbox's own, and the agent
    /// one of its ordinary processes.
    pub sole_user: Option<User>,
    cpu_times: Mutex<(u64, u64)>,
}

impl Agent {
    /// An agent that is not configured yet.
    ///
    /// # Errors
    /// Its thread could not be started.
    pub(crate) fn new(jobs: Jobs, sole_user: Option<User>) -> std::io::Result<Self> {
        Ok(Self {
            settings: Current::default(),
            processes: Registry::new(),
            reaper: Reaper::start()?,
            jobs,
            journal: Journal::default(),
            clock: ActiveClock::default(),
            blocking: Blocking::default(),
            borrowers: Borrowers::default(),
            labels: Arc::default(),
            watchers: Watchers::default(),
            tasks: TaskTracker::new(),
            root: PathBuf::from("/"),
            sole_user,
            cpu_times: Mutex::default(),
        })
    }

    /// Remembers the processor times of a look at the metrics, and returns those of the look before.
    pub(crate) fn last_cpu_times(&self, now: (u64, u64)) -> (u64, u64) {
        std::mem::replace(&mut self.cpu_times.lock().unwrap_or_else(PoisonError::into_inner), now)
    }

    /// Starts a program by `work`, which calls [`Reaper::spawn`] with the child that it is given, on a thread that
    /// may wait. A new process that its own user stops before it has executed the program would keep that thread
    /// for ever, so it is killed after a while.
    pub(crate) async fn start<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self, &Arc<Child>) -> T + Send + 'static,
    ) -> (T, Arc<Child>) {
        let (agent, child) = (Arc::clone(self), Child::new());
        let given = Arc::clone(&child);
        let mut started = pin!(self.blocking.run(move || work(&agent, &given)));
        let result = tokio::select! {
            result = &mut started => result,
            () = tokio::time::sleep(START_TIME) => {
                self.reaper.signal(&child, Signal::KILL, false);
                started.await
            }
        };
        (result, child)
    }

    /// The users of the sandbox as they are now.
    ///
    /// # Errors
    /// The files could not be read.
    pub(crate) fn users(&self) -> std::io::Result<Users> {
        Users::read(&self.root)
    }
}

/// The runtime of the agent: one thread that answers, and a few that may wait.
///
/// # Errors
/// No descriptors or threads are left.
pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(crate::blocking::THREADS)
        .thread_stack_size(512 * 1024)
        .build()
}
