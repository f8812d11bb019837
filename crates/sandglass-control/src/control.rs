//! The verbs of the product, as the API calls them.

mod assignments;
mod broker;
mod cold;
mod collect;
mod config;
mod connections;
mod content;
mod create;
mod logs;
mod models;
mod pools;
mod reconciling;
mod runs;
mod samples;
mod secrets;
mod snapshots;
mod storage;
mod templates;
mod volumes;

use self::create::random_token;

pub use self::assignments::CameBy;
pub use self::broker::{Broker, MAX_GRANTED, OwnConnection};
pub(crate) use self::collect::Collecting;
pub(crate) use self::collect::collect_at_end;
pub use self::collect::{CollectFiles, Collection, Found, FoundFile};
pub use self::config::{Config, Patience};
pub use self::connections::KnownConnection;
pub use self::content::Content;
pub(crate) use self::content::{Contents, marks_of};
pub use self::logs::{LogEntry, LogLevel};
pub(crate) use self::models::outcome as granted;
pub use self::models::{GrantRequest, GrantedModels, Models, Purse};
pub use self::pools::MAX_POOL;
pub(crate) use self::runs::not_found_run;
pub use self::runs::{MAX_RUN_EVENTS, RunDetail};
pub use self::snapshots::{ListSnapshots, MAX_CHILDREN};
pub use self::storage::DiskUse;
pub(crate) use self::storage::{ImageKind, Measured};
pub use self::templates::KnownTemplate;
pub(crate) use self::volumes::AtWork;
pub use self::volumes::VolumesConfig;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sandglass_egress::policy::{Effective, Policy, Warning};
use sandglass_engine::engine::Lack;
use sandglass_engine::host::Host;
use sandglass_engine::{EngineInfo, Stats};
use sandglass_store::{
    ApiKey, AuditEntry, Event, Identity, ListFilter, ListPage, SandboxRow, Store, StoreError,
};
use sandglass_types::error::Chain;
use sandglass_types::{
    Clock, Error, ErrorKind, PauseMode, ResumeMode, SandboxId, SandboxState, TeamId, Timestamp,
};
use tokio::time::timeout;

use crate::egress::services;
use crate::live::Live;
use crate::metrics::{Now, STORE_FAILURES};
use crate::owner::{ASKED, Handle};
use crate::request::{BUILD_LABEL, check_timeout};
use crate::shared::Shared;

/// How long a server that starts waits for the sandboxes that it takes up.
const ADOPTION_PATIENCE: Duration = Duration::from_secs(10);

/// How long a sandbox waits for the room of others that are being removed, which takes some dozens of milliseconds.
pub(crate) const REMOVAL_PATIENCE: Duration = Duration::from_secs(5);

/// How often a sandbox is resumed that others pause at the same time.
pub(crate) const CONNECT_ATTEMPTS: u32 = 3;

/// How long an agent may take to say for how long nobody has used its sandbox.
const UNUSED_PATIENCE: Duration = Duration::from_secs(2);

/// The wait between two looks whether they are gone.
pub(crate) const REMOVAL_CHECK: Duration = Duration::from_millis(50);

/// The product. Clones share everything.
#[derive(Debug, Clone)]
pub struct Control(Arc<Shared>);

pub(crate) fn not_found(id: &SandboxId) -> Error {
    Error::new(ErrorKind::NotFound, format!("sandbox '{id}' not found"))
}

/// What keys of its team are told of a sandbox. What a template is built in can be reached by nobody but who builds it, who was
/// told its token when it was made: what happens there happens in the sandboxes of all teams.
fn told(mut row: SandboxRow) -> SandboxRow {
    if row.metadata.contains_key(BUILD_LABEL) {
        row.access_token = None;
    }
    row
}

/// Why a sandbox on the way to a pause or back can't do what one does that runs.
pub(crate) fn in_between(state: SandboxState) -> Option<Error> {
    let doing = match state {
        SandboxState::Pausing => "paused",
        SandboxState::Resuming => "resumed",
        _ => return None,
    };
    Some(Error::new(ErrorKind::Conflict, format!("the sandbox is being {doing}: try again when it is")))
}

pub(crate) fn stored(error: StoreError) -> Error {
    STORE_FAILURES.fetch_add(1, Ordering::Relaxed);
    if matches!(error, StoreError::Full) {
        let message = format!("this machine is out of {}: try again when there is room", Lack::Disk);
        return Error::new(ErrorKind::Capacity, message).because(error);
    }
    Error::internal("the server's store failed; its log says why", error)
}

/// A step that a failpoint made fail.
pub(crate) fn injected(injected: sandglass_failpoint::Injected) -> Error {
    Error::internal("the server was told to fail here; its log says why", injected)
}

impl Control {
    /// Starts: takes up what an earlier server left, and keeps store and machine in step from then on.
    ///
    /// # Errors
    /// The host or the store does not answer.
    pub async fn start(
        config: Config,
        store: Arc<dyn Store>,
        host: Host,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, Error> {
        let engine = host.describe().await?;
        let node = store.node().await.map_err(stored)?;
        let control = Self(Arc::new(Shared::new(store, host, clock, config, engine, node)));
        control.take_up_money().await?;
        let adopted = control.reconcile().await?;
        // A client that was cut off by the last server's end finds its sandbox as soon as this one answers.
        let all = async {
            for adopted in adopted {
                let _failed = adopted.await;
            }
        };
        if timeout(ADOPTION_PATIENCE, all).await.is_err() {
            tracing::warn!("some sandboxes could not be taken up yet; that goes on");
        }
        control.take_up_runs().await?;
        let reconciler = control.clone();
        control.0.tasks.spawn(async move { reconciler.keep_reconciling().await });
        let keeper = control.clone();
        control.0.tasks.spawn(async move { keeper.keep_pools().await });
        let sampler = control.clone();
        control.0.tasks.spawn(async move { sampler.keep_sampling().await });
        let compressor = control.clone();
        control.0.tasks.spawn(async move { compressor.keep_compressing().await });
        Ok(control)
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }

    /// Stops this server's tasks and waits for them. Sandboxes run on.
    pub async fn stop(&self) {
        self.0.stop.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    /// What isolates the sandboxes.
    #[must_use]
    pub fn engine(&self) -> &EngineInfo {
        &self.0.engine
    }

    /// The domain under which clients reach sandboxes, if there is one.
    #[must_use]
    pub fn domain(&self) -> Option<&str> {
        self.0.config.domain.as_deref()
    }

    /// Whom the key with this secret acts for.
    ///
    /// # Errors
    /// [`ErrorKind::Unauthenticated`].
    pub async fn authenticate(&self, secret: &str) -> Result<Identity, Error> {
        let digest = ApiKey::digest_of(secret);
        let found = self.0.store.authenticate(&digest, self.0.clock.now()).await.map_err(stored)?;
        found.ok_or_else(|| {
            let message = "invalid API key: make one with `sandglass key create` and send it as X-API-Key";
            Error::new(ErrorKind::Unauthenticated, message)
        })
    }

    /// Writes down a call. What can't be stored is in the log, so that a full disk keeps nobody from emptying it.
    pub async fn audit(&self, entry: AuditEntry) {
        if let Err(error) = self.0.store.audit(&entry).await.map_err(stored) {
            tracing::error!(?entry, error = %Chain(&error), "a row of the audit could not be stored");
        }
    }

    /// Appends what an operator watches, in the text of OpenMetrics, without its end.
    ///
    /// # Errors
    /// The store failed.
    pub async fn metrics(&self, text: &mut String) -> Result<(), Error> {
        let sandboxes = self.0.store.count_on_node(self.0.node).await.map_err(stored)?;
        let config = &self.0.config;
        let images = self.image_totals().await?;
        let now = Now {
            sandboxes: &sandboxes,
            images: images.as_ref(),
            unused: self.0.pools.ready().len(),
            egress: &config.egress.totals,
            models: config.models.as_ref().map(|models| &*models.totals),
            probes: config.probes.as_deref(),
        };
        self.0
            .metrics
            .write(&now, text)
            .map_err(|error| Error::internal("the metrics can't be written", error))
    }

    /// A sandbox of this team that runs.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: unknown, another team's, paused, or at its end. [`ErrorKind::Conflict`]: on the way to a
    /// pause, or back.
    pub async fn sandbox(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        let row = self.row(id).await?;
        if row.team != team {
            return Err(not_found(id));
        }
        match row.state {
            SandboxState::Running => Ok(told(row)),
            state => Err(in_between(state).unwrap_or_else(|| not_found(id))),
        }
    }

    /// A sandbox of this team that runs, or is paused, or is on the way between the two.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: unknown, another team's, being made, or at its end.
    pub async fn standing(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        use SandboxState::{Paused, Pausing, Resuming, Running};
        let row = self.row(id).await?;
        let stands = matches!(row.state, Running | Pausing | Paused | Resuming);
        if row.team == team && stands { Ok(told(row)) } else { Err(not_found(id)) }
    }

    /// Writes a running sandbox, or only its files, to an image, and ends its processes. When this returns, it is paused.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Conflict`] if it is paused already, or holds something that can't be paused,
    /// and runs on; [`ErrorKind::Unsupported`] if the engine can't.
    pub async fn pause(&self, team: TeamId, id: &SandboxId, mode: PauseMode) -> Result<(), Error> {
        self.standing(team, id).await?;
        self.owner(team, id).await?.pause(id, mode).await
    }

    /// Lets a paused sandbox run again, for so long from now on: what it kept is as it was, unless `mode` gives its memory
    /// up.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Conflict`] if it runs, or is being paused; [`ErrorKind::Quota`] and [`ErrorKind::Capacity`] as at a
    /// creation. If it can't be resumed it is paused as before.
    pub async fn resume(
        &self,
        team: TeamId,
        id: &SandboxId,
        timeout: Duration,
        mode: ResumeMode,
    ) -> Result<SandboxRow, Error> {
        check_timeout(timeout, self.0.config.max_lifetime)?;
        match self.standing(team, id).await?.state {
            SandboxState::Running => {
                return Err(Error::new(ErrorKind::Conflict, "the sandbox is running already"));
            }
            state @ SandboxState::Pausing => return Err(in_between(state).unwrap_or_else(|| not_found(id))),
            _ => {}
        }
        self.owner(team, id).await?.resume(id, timeout, mode, ASKED).await?;
        self.sandbox(team, id).await
    }

    /// Makes sure that a sandbox runs, at least so long from now. `true` if it was resumed for that, in this mode.
    ///
    /// # Errors
    /// As [`Control::extend`] and [`Control::resume`].
    pub async fn connect(
        &self,
        team: TeamId,
        id: &SandboxId,
        timeout: Duration,
        mode: ResumeMode,
    ) -> Result<(SandboxRow, bool), Error> {
        check_timeout(timeout, self.0.config.max_lifetime)?;
        let mut resumed = false;
        for _ in 0..CONNECT_ATTEMPTS {
            if self.standing(team, id).await?.state != SandboxState::Running {
                self.owner(team, id).await?.resume(id, timeout, mode, ASKED).await?;
                resumed = true;
            }
            match self.extend(team, id, timeout).await {
                // Somebody paused it in between, or does so now.
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Conflict) => {}
                outcome => return Ok((outcome?, resumed)),
            }
        }
        Err(Error::new(ErrorKind::Conflict, "the sandbox is paused again and again: try again"))
    }

    /// A sandbox of this team in whatever state, also after its end.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn record(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        let row = self.row(id).await?;
        if row.team == team { Ok(told(row)) } else { Err(not_found(id)) }
    }

    /// A page of sandboxes.
    ///
    /// # Errors
    /// The store failed.
    pub async fn list(&self, filter: ListFilter) -> Result<ListPage, Error> {
        self.0.store.list(&filter).await.map_err(stored)
    }

    /// Ends a sandbox. It can't be reached any more when this returns; its removal goes on.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn kill(&self, team: TeamId, id: &SandboxId) -> Result<(), Error> {
        sandglass_failpoint::hit_async("control.kill.receive").await.map_err(injected)?;
        self.owner(team, id).await?.kill(id).await?;
        sandglass_failpoint::hit_async("control.kill.answer").await.map_err(injected)
    }

    /// Makes the time of a running sandbox be up so long from now: earlier or later than before, zero is now. Returns when.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Invalid`].
    pub async fn set_timeout(
        &self,
        team: TeamId,
        id: &SandboxId,
        from_now: Duration,
    ) -> Result<Timestamp, Error> {
        self.set_end(team, id, from_now, false).await
    }

    /// Makes sure that a running sandbox lives at least so long from now.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Invalid`].
    pub async fn extend(
        &self,
        team: TeamId,
        id: &SandboxId,
        from_now: Duration,
    ) -> Result<SandboxRow, Error> {
        self.set_end(team, id, from_now, true).await?;
        self.sandbox(team, id).await
    }

    async fn set_end(
        &self,
        team: TeamId,
        id: &SandboxId,
        from_now: Duration,
        only_later: bool,
    ) -> Result<Timestamp, Error> {
        check_timeout(from_now, self.0.config.max_lifetime)?;
        self.sandbox(team, id).await?;
        let end_at = self.0.clock.now().plus(from_now);
        self.owner(team, id).await?.set_end(id, end_at, only_later).await
    }

    /// Replaces what a running sandbox asks to reach. In force when this returns; connections that are not allowed any
    /// more end within a second.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Invalid`].
    pub async fn set_policy(
        &self,
        team: TeamId,
        id: &SandboxId,
        policy: Policy,
        allow_internet_access: Option<bool>,
    ) -> Result<(), Error> {
        self.sandbox(team, id).await?;
        self.owner(team, id).await?.set_policy(id, policy, allow_internet_access).await
    }

    /// The policy of a sandbox as it is in force, and what its author should know about it.
    ///
    /// # Errors
    /// The operator's configuration lacks what it needs, or the addresses of this machine can't be read.
    pub fn effective(&self, row: &SandboxRow) -> Result<(Effective, Vec<Warning>), Error> {
        self.0.config.egress.effective(&row.policy, services(row))
    }

    /// The last receipts of a sandbox of this team, also of one that ended: at most `limit` lines, oldest first.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or they can't be read.
    pub async fn receipts(&self, team: TeamId, id: &SandboxId, limit: usize) -> Result<Vec<String>, Error> {
        self.record(team, id).await?;
        self.0.config.egress.receipts(id, limit).await
    }

    /// The history of a sandbox of this team, also of one that ended.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn events(&self, team: TeamId, id: &SandboxId) -> Result<Vec<Event>, Error> {
        self.record(team, id).await?;
        self.0.store.events(id).await.map_err(stored)
    }

    /// What a running sandbox uses.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn stats(&self, team: TeamId, id: &SandboxId) -> Result<Stats, Error> {
        self.sandbox(team, id).await?;
        Ok(self.0.host.stats(id).await?)
    }

    /// How long nobody has used a sandbox that runs, as far as this server knows, or since when it is paused; `None` in all
    /// other states, and where its agent can't say.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or the store failed.
    pub async fn unused(&self, team: TeamId, id: &SandboxId) -> Result<Option<Duration>, Error> {
        let state = self.record(team, id).await?.state;
        match (state, self.live(id)) {
            (SandboxState::Running, Some(live)) => match timeout(UNUSED_PATIENCE, live.unused()).await {
                Ok(Ok(unused)) => Ok(Some(unused)),
                Ok(Err(error)) => {
                    tracing::debug!(sandbox = %id, error = %Chain(&error), "it does not say how long nobody has used it");
                    Ok(None)
                }
                Err(_) => Ok(None),
            },
            (SandboxState::Paused, _) => {
                let last = self.events(team, id).await?.pop();
                Ok(last.map(|event| self.0.clock.now().since(event.at)))
            }
            _ => Ok(None),
        }
    }

    /// A sandbox that can be reached here and now, whoever asks: the guest has its own tokens.
    #[must_use]
    pub fn live(&self, id: &SandboxId) -> Option<Arc<Live>> {
        self.0.live.get(id)
    }

    async fn row(&self, id: &SandboxId) -> Result<SandboxRow, Error> {
        self.0.store.sandbox(id).await.map_err(stored)?.ok_or_else(|| not_found(id))
    }

    async fn owner(&self, team: TeamId, id: &SandboxId) -> Result<Handle, Error> {
        let row = self.row(id).await?;
        let ours = row.team == team && row.state != SandboxState::Ended;
        if ours { self.0.owner(id).ok_or_else(|| not_found(id)) } else { Err(not_found(id)) }
    }
}
