//! What all tasks of the control share.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use sandglass_engine::host::Host;
use sandglass_engine::{EngineInfo, Feature};
use sandglass_store::{CommandDefaults, SandboxRow, Store};
use sandglass_types::{Clock, Error, ErrorKind, NodeId, SandboxId};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::Config;
use crate::ahead::Ahead;
use crate::cold::Settled;
use crate::control::{AtWork, Collecting, Contents, Measured};
use crate::egress::Enforcers;
use crate::images::Images;
use crate::live::Live;
use crate::metrics::Metrics;
use crate::owner::{Asked, Begin, Handle, Owner};
use crate::pools::Pools;
use crate::room::Promises;
use crate::runs::Runs;
use crate::stale::Stale;
use crate::template::Template;

/// The sandboxes that can be reached now.
#[derive(Debug, Default)]
pub(crate) struct LiveMap(RwLock<HashMap<SandboxId, Arc<Live>>>);

impl LiveMap {
    pub(crate) fn insert(&self, live: Arc<Live>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(live.id().clone(), live);
    }

    pub(crate) fn remove(&self, id: &SandboxId) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Option<Arc<Live>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Live>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}

pub(crate) struct Shared {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) host: Host,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) config: Config,
    pub(crate) engine: EngineInfo,
    pub(crate) node: NodeId,
    pub(crate) live: LiveMap,
    /// What is enforced on the sandboxes that run.
    pub(crate) enforcers: Enforcers,
    /// Who uses an image that sandboxes are made from.
    pub(crate) images: Images,
    /// Whose content is asked for.
    pub(crate) contents: Contents,
    /// Whose files are read from outside.
    pub(crate) collecting: Collecting,
    /// Which volumes are being made or removed.
    pub(crate) volumes: AtWork,
    /// Cold snapshots of which all is done.
    pub(crate) settled: Settled,
    /// Templates whose images are to be made anew.
    pub(crate) stale: Stale,
    /// Which paused sandboxes have their next computer made ahead.
    pub(crate) ahead: Arc<Ahead>,
    /// Room that is somebody's and of which no row tells yet.
    pub(crate) promises: Arc<Promises>,
    /// Sandboxes that nobody has used yet.
    pub(crate) pools: Pools,
    /// Runs that have a task.
    pub(crate) runs: Arc<Runs>,
    pub(crate) metrics: Metrics,
    /// What all images took on the disk.
    pub(crate) measured: Measured,
    pub(crate) tasks: TaskTracker,
    /// What is left of the connections into sandboxes that there may be.
    pub(crate) connections: Arc<Semaphore>,
    /// Fires when this server stops. Sandboxes run on.
    pub(crate) stop: CancellationToken,
    owners: Mutex<HashMap<SandboxId, Handle>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        host: Host,
        clock: Arc<dyn Clock>,
        config: Config,
        engine: EngineInfo,
        node: NodeId,
    ) -> Self {
        let (live, owners) = (LiveMap::default(), Mutex::default());
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let connections = Arc::new(Semaphore::new(config.budgets.connections));
        let (metrics, images, stale) = (Metrics::new(), Images::default(), Stale::default());
        let ahead = Arc::new(Ahead::new(config.budgets.ahead));
        Self {
            store,
            host,
            clock,
            config,
            engine,
            node,
            live,
            enforcers: Enforcers::default(),
            images,
            contents: Contents::default(),
            collecting: Collecting::default(),
            volumes: AtWork::default(),
            settled: Settled::default(),
            stale,
            ahead,
            promises: Arc::default(),
            pools: Pools::default(),
            runs: Arc::default(),
            metrics,
            measured: Measured::default(),
            tasks,
            connections,
            stop,
            owners,
        }
    }

    /// The host as the maker of sockets in airlocks; `None` if the engine says that it has no airlocks. Whatever else
    /// goes wrong with them is a failure.
    pub(crate) fn airlocks(&self) -> Option<&Host> {
        (!self.engine.refuses(Feature::Airlock)).then_some(&self.host)
    }

    /// Whether sandboxes can be paused here.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`].
    pub(crate) fn can_pause(&self) -> Result<(), Error> {
        if !self.engine.refuses(Feature::Checkpoint) {
            return Ok(());
        }
        let message = format!("the engine '{}' can't pause sandboxes", self.engine.name);
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// The template of this name.
    pub(crate) fn template(&self, name: &str) -> Result<&Template, Error> {
        let unknown = || Error::new(ErrorKind::NotFound, format!("template '{name}' not found"));
        self.config.templates.get(name).ok_or_else(unknown)
    }

    /// What commands in a sandbox have that say nothing else, if this is what it says of them itself, and it is of the
    /// template of this name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: it says nothing, and the server has no such template of its own any more.
    pub(crate) fn defaults(
        &self,
        own: Option<&CommandDefaults>,
        template: &str,
    ) -> Result<CommandDefaults, Error> {
        match own {
            Some(own) => Ok(own.clone()),
            None => Ok(self.template(template)?.defaults()),
        }
    }

    /// Claims a sandbox for a task of this process, or `None` if one has it already.
    pub(crate) fn claim(self: &Arc<Self>, id: &SandboxId) -> Option<Claim> {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        if owners.contains_key(id) {
            return None;
        }
        let (handle, requests) = Handle::new();
        owners.insert(id.clone(), handle);
        Some(Claim { shared: Arc::clone(self), id: id.clone(), requests })
    }

    /// The way to a sandbox's owner, if it has one here.
    pub(crate) fn owner(&self, id: &SandboxId) -> Option<Handle> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// The sandboxes that have an owner here.
    pub(crate) fn owned(&self) -> BTreeSet<SandboxId> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }
}

/// The right to be the one owner of a sandbox; given back when dropped.
pub(crate) struct Claim {
    shared: Arc<Shared>,
    id: SandboxId,
    requests: mpsc::Receiver<Asked>,
}

impl Claim {
    /// Of which one.
    pub(crate) const fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Starts the task that owns the sandbox from now on.
    pub(crate) fn own(mut self, row: SandboxRow, begin: Begin) {
        let (shared, tasks) = (Arc::clone(&self.shared), self.shared.tasks.clone());
        let span = tracing::info_span!(parent: None, "sandbox", sandbox = %row.id, team = %row.team);
        let owning = async move { Owner::new(shared, row, &mut self.requests).run(begin).await };
        tasks.spawn(owning.instrument(span));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.shared.owners.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}
