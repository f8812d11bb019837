//! The verbs of the product, as the API calls them.

mod cold;
mod logs;
mod pools;
mod samples;
mod snapshots;
mod storage;
mod templates;

use self::snapshots::Model;

pub use self::logs::{LogEntry, LogLevel};
pub use self::pools::MAX_POOL;
pub use self::snapshots::{ListSnapshots, MAX_CHILDREN};
pub use self::storage::DiskUse;
pub(crate) use self::storage::{ImageKind, Measured};
pub use self::templates::KnownTemplate;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rand::RngExt as _;
use sandglass_egress::policy::{Effective, Policy, Warning};
use sandglass_engine::engine::Lack;
use sandglass_engine::host::Host;
use sandglass_engine::{EngineInfo, Stats};
use sandglass_store::{
    ApiKey, AuditEntry, Created, Event, Identity, ListFilter, ListPage, NewSandbox, SandboxRow, Store,
    StoreError,
};
use sandglass_types::error::Chain;
use sandglass_types::{
    Clock, Error, ErrorKind, Lifetime, Limits, PauseMode, ResumeMode, SandboxId, SandboxState, TeamId,
    Timestamp, UserName,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::admission::{self, Budgets};
use crate::egress::Egress;
use crate::kept::Kept;
use crate::live::Live;
use crate::metrics::{Now, Probes, STORE_FAILURES};
use crate::owner::{ASKED, Begin, Handle, Origin};
use crate::reconcile::{self, Repair};
use crate::request::{BUILD_LABEL, CreateSandbox, check_env_together, check_timeout, idle_window};
use crate::shared::Shared;
use crate::template::Template;

mod assignments;

pub use assignments::CameBy;

/// How often the store and the machine are compared.
const RECONCILE_EVERY: Duration = Duration::from_secs(30);

/// How often receipts that are not to be kept any longer are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(5 * 60);

/// How long a server that starts waits for the sandboxes that it takes up.
const ADOPTION_PATIENCE: Duration = Duration::from_secs(10);

/// How long an idempotency key keeps its answer.
const IDEMPOTENCY_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// How long a sandbox waits for the room of others that are being removed, which takes some dozens of milliseconds.
pub(crate) const REMOVAL_PATIENCE: Duration = Duration::from_secs(5);

/// How often a sandbox is resumed that others pause at the same time.
pub(crate) const CONNECT_ATTEMPTS: u32 = 3;

/// How long an agent may take to say for how long nobody has used its sandbox.
const UNUSED_PATIENCE: Duration = Duration::from_secs(2);

/// The wait between two looks whether they are gone.
pub(crate) const REMOVAL_CHECK: Duration = Duration::from_millis(50);

/// What an operator decides.
#[derive(Debug, Clone)]
pub struct Config {
    /// Templates by name.
    pub templates: HashMap<String, Template>,
    /// How many unused copies of a template's running state are kept ready, where that is not as the template says.
    pub pools: HashMap<String, u32>,
    /// Whether such a copy runs two login shells before it is handed out. Agents that are scripts can't.
    pub warm_up: bool,
    /// The longest that a sandbox may live, from its creation or from when it was last resumed.
    pub max_lifetime: Duration,
    /// How long nobody may use a sandbox whose client did not say, if that is bounded.
    pub idle_timeout: Option<Duration>,
    /// The domain under which clients reach sandboxes, if there is one.
    pub domain: Option<String>,
    /// How long to wait before something is done.
    pub patience: Patience,
    /// What sandboxes may reach.
    pub egress: Egress,
    /// What each of them may use.
    pub limits: Limits,
    /// What they may use together.
    pub budgets: Budgets,
    /// How long rows of the audit are kept.
    pub keep_audit: Duration,
    /// Which snapshots are kept that have no name.
    pub keep_snapshots: Kept,
    /// How long nobody has used a snapshot when it is compressed, if that is done at all.
    pub compress_after: Option<Duration>,
    /// Where the memory of the machine and of this server is read, for who watches it.
    pub probes: Option<Arc<Probes>>,
}

/// How long the owner of a sandbox waits. The defaults are for real machines; tests have less time.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// How often an agent is asked for a sign of life: every 10 s.
    pub heartbeat: Duration,
    /// How long it may take to give one: 30 s, for a machine may be busy elsewhere.
    pub silence: Duration,
    /// The longest sleep before the wall clock is read again, because clocks jump and machines sleep: 5 s.
    pub clock_check: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let [heartbeat, silence, clock_check] = [10, 30, 5].map(Duration::from_secs);
        Self { heartbeat, silence, clock_check }
    }
}

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
            probes: config.probes.as_deref(),
        };
        self.0
            .metrics
            .write(&now, text)
            .map_err(|error| Error::internal("the metrics can't be written", error))
    }

    /// Makes a sandbox, and answers when commands can run in it.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`], [`ErrorKind::NotFound`] for the template, [`ErrorKind::IdempotencyMismatch`],
    /// [`ErrorKind::IdempotencyInProgress`], [`ErrorKind::Quota`], [`ErrorKind::Capacity`], or what went wrong.
    pub async fn create(&self, team: TeamId, request: CreateSandbox) -> Result<SandboxRow, Error> {
        let started = Instant::now();
        let outcome = self.make(team, request, None).await;
        // Nobody has one for nobody.
        let outcome = outcome.and_then(|row| row.ok_or_else(|| Error::new(ErrorKind::Conflict, "try again")));
        self.0.metrics.created(&outcome, started.elapsed());
        outcome
    }

    /// Makes a sandbox that is this user's from its first row on. `None` if they have one.
    async fn create_for(
        &self,
        team: TeamId,
        user: &UserName,
        request: CreateSandbox,
    ) -> Result<Option<SandboxRow>, Error> {
        let started = Instant::now();
        let outcome = self.make(team, request, Some(user.clone())).await.transpose();
        if let Some(outcome) = &outcome {
            self.0.metrics.created(outcome, started.elapsed());
        }
        outcome.transpose()
    }

    /// `None` if the user that it is for has one.
    async fn make(
        &self,
        team: TeamId,
        request: CreateSandbox,
        assign_to: Option<UserName>,
    ) -> Result<Option<SandboxRow>, Error> {
        // The first answer, also where what that was made of is not there any more.
        if let Some(key) = &request.idempotency
            && let Some(earlier) = self.0.store.earlier(team, key).await.map_err(stored)?
        {
            return self.not_inserted(team, earlier).await;
        }
        request.check(self.0.config.max_lifetime)?;
        let model = self.model(team, &request.template).await?;
        self.make_of(team, request, model, assign_to).await
    }

    /// The same of what is given, by a request that was checked.
    async fn make_of(
        &self,
        team: TeamId,
        request: CreateSandbox,
        mut model: Model,
        assign_to: Option<UserName>,
    ) -> Result<Option<SandboxRow>, Error> {
        let shared = &self.0;
        // Before anything is made, so that the client hears of it.
        shared.config.egress.effective(&request.policy)?;
        let defaults = shared.defaults(model.defaults.as_ref(), &model.template)?;
        check_env_together(&defaults.env, &request.env)?;
        if request.lifetime.on_timeout.pause().is_some() {
            shared.can_pause()?;
        }
        if shared.connections.available_permits() == 0 {
            return Err(admission::no_connection(shared.config.budgets.connections));
        }
        // One that is dropped on the way has no owner, and so is removed.
        let pooled = matches!(model.origin, Origin::Template(..));
        let mut unused = self.take_unused(&mut model);
        let now = shared.clock.now();
        let id = unused.as_ref().map_or_else(SandboxId::random, |(entry, _)| entry.claim.id().clone());
        tracing::Span::current().record("sandbox", tracing::field::display(&id));
        let new = NewSandbox {
            id,
            node: shared.node,
            team,
            template: model.template,
            rootfs: model.rootfs,
            limits: model.limits,
            defaults: model.defaults,
            start_path: model.start_path,
            access_token: request.secured.then(random_token),
            metadata: request.metadata,
            env: request.env,
            allow_internet_access: request.allow_internet_access,
            policy: request.policy,
            traffic_token: (!request.ingress.public).then(random_token),
            request_host: request.ingress.request_host,
            lifetime: Lifetime {
                idle: idle_window(request.lifetime.idle, shared.config.idle_timeout),
                ..request.lifetime
            },
            made_from: model.made_from,
            generation: model.generation,
            created_at: now,
            end_at: now.plus(request.lifetime.timeout),
            max_end_at: now.plus(shared.config.max_lifetime),
            idempotency: request.idempotency,
            assign_to,
            quota: shared.config.budgets.quota,
            capacity: shared.config.budgets.capacity,
        };
        // Before the row is there, so that the reconciler never takes it for one that nobody owns.
        let claim = if unused.is_some() { None } else { shared.claim(&new.id) };
        sandglass_failpoint::hit_async("control.create.insert").await.map_err(injected)?;
        let inserted = self.insert(&new).await;
        if !matches!(inserted, Ok(Created::Inserted))
            && let Some((entry, _promise)) = unused.take()
        {
            shared.pools.put(entry);
        }
        match inserted? {
            Created::Inserted if pooled => shared.pools.asked(&new.template, unused.is_some()),
            Created::Inserted => {}
            refused => return self.not_inserted(team, refused).await,
        }
        let claim = unused.map(|(entry, _promise)| entry.claim).or(claim);
        let claim = claim.ok_or_else(|| Error::new(ErrorKind::Conflict, "try again"))?;
        let row = self.row(&new.id).await?;
        sandglass_failpoint::hit_async("control.create.own").await.map_err(injected)?;
        let (made, outcome) = oneshot::channel();
        claim.own(row, Begin::Create(tracing::Span::current(), made, model.origin));
        let stopping = || Error::new(ErrorKind::Capacity, "the server is stopping; try again");
        outcome.await.map_err(|_| stopping())??;
        let row = self.row(&new.id).await?;
        shared.metrics.started(row.start_path);
        Ok(Some(row))
    }

    /// What a client gets where no sandbox was inserted; `None` if the user that it was for has one.
    async fn not_inserted(&self, team: TeamId, why: Created) -> Result<Option<SandboxRow>, Error> {
        Err(match why {
            Created::Replay(id) => {
                return self.standing(team, &id).await.map(Some).map_err(|_| outcome_gone());
            }
            Created::Inserted | Created::Assigned(_) => return Ok(None),
            Created::InProgress => {
                let message = "the first request with this idempotency key is still running; try again";
                Error::new(ErrorKind::IdempotencyInProgress, message)
            }
            Created::Mismatch => {
                let message = "this idempotency key came with another request before; use a new one";
                Error::new(ErrorKind::IdempotencyMismatch, message)
            }
            Created::OverQuota(excess) => admission::over_quota(excess),
            Created::OverCapacity { excess, .. } => admission::over_capacity(excess),
        })
    }

    /// Inserts a sandbox, if there is room for it. Where there will be as soon as others are removed whose end has begun,
    /// it waits for that: whoever ends one sandbox and asks for another has done all that can be done.
    async fn insert(&self, new: &NewSandbox) -> Result<Created, Error> {
        let deadline = Instant::now() + REMOVAL_PATIENCE;
        loop {
            match self.0.store.insert_sandbox(new).await.map_err(stored)? {
                Created::OverCapacity { soon: true, .. } if Instant::now() < deadline => {
                    sleep(REMOVAL_CHECK).await;
                }
                outcome => return Ok(outcome),
            }
        }
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
        self.0.config.egress.effective(&row.policy)
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

    async fn keep_reconciling(&self) {
        let mut ticks = interval(RECONCILE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        let mut swept: Option<Instant> = None;
        while self.0.stop.run_until_cancelled(ticks.tick()).await.is_some() {
            if let Err(error) = self.reconcile().await {
                tracing::error!(error = %Chain(&error), "store and machine could not be compared");
            }
            self.renew_templates();
            let before = self.0.clock.now().minus(IDEMPOTENCY_RETENTION);
            if let Err(error) = self.0.store.purge_idempotency(before).await {
                tracing::error!(error = %Chain(&error), "old idempotency keys could not be forgotten");
            }
            let before = self.0.clock.now().minus(self.0.config.keep_audit);
            if let Err(error) = self.0.store.purge_audit(before).await {
                tracing::error!(error = %Chain(&error), "old rows of the audit could not be removed");
            }
            if swept.is_none_or(|at| at.elapsed() >= SWEEP_EVERY) {
                self.0.config.egress.sweep(&self.0).await;
                self.sweep_snapshots().await;
                self.tidy_cache().await;
                swept = Some(Instant::now());
            }
        }
    }

    /// Repairs what differs. Returns what tells when each sandbox that is taken up can be reached, or can't.
    async fn reconcile(&self) -> Result<Vec<oneshot::Receiver<Result<(), Error>>>, Error> {
        let mut adopted = Vec::new();
        // In this order: see `reconcile::plan`.
        let on_machine = self.0.host.list().await?;
        let images = self.0.host.images().await?.into_iter().collect();
        sandglass_failpoint::hit_async("control.reconcile.list").await.map_err(injected)?;
        let rows = self.0.store.on_node(self.0.node, &SandboxState::NOT_ENDED).await.map_err(stored)?;
        let snapshots = self.0.store.snapshots_on_node(self.0.node).await.map_err(stored)?;
        sandglass_failpoint::hit_async("control.reconcile.rows").await.map_err(injected)?;
        let owned = self.0.owned();
        for image in reconcile::unneeded(&images, &rows, &snapshots, &owned) {
            tracing::info!(%image, "removing an image that nobody needs");
            if let Err(error) = self.0.host.remove_image(&image).await {
                tracing::error!(%image, error = %Chain(&error), "it could not be removed");
            }
        }
        self.clear_images(&snapshots).await?;
        for repair in reconcile::plan(&on_machine, &images, rows, &owned, self.0.clock.now()) {
            tracing::info!(?repair, "reconciling");
            sandglass_failpoint::hit_async("control.reconcile.repair").await.map_err(injected)?;
            match repair {
                Repair::Adopt(row) => {
                    let (reply, outcome) = oneshot::channel();
                    self.take_up(*row, Begin::Adopt(reply));
                    adopted.push(outcome);
                }
                Repair::Rest(row) => self.take_up(*row, Begin::Rest),
                Repair::End(row, event) => self.take_up(*row, Begin::End(event)),
                Repair::Destroy(id) => self.destroy_orphan(id),
            }
        }
        Ok(adopted)
    }

    fn take_up(&self, row: SandboxRow, begin: Begin) {
        if let Some(claim) = self.0.claim(&row.id) {
            claim.own(row, begin);
        }
    }

    /// Off the reconciler's path: one that can't be removed must not keep the others from being repaired.
    fn destroy_orphan(&self, id: SandboxId) {
        let host = self.0.host.clone();
        self.0.tasks.spawn(self.0.stop.clone().run_until_cancelled_owned(async move {
            if let Err(error) = host.destroy(&id).await {
                tracing::error!(sandbox = %id, error = %Chain(&error), "an orphan could not be removed");
            }
        }));
    }
}

fn outcome_gone() -> Error {
    Error::new(ErrorKind::Conflict, "the sandbox that this idempotency key made has ended; use a new key")
}

/// 256 random bits.
fn random_token() -> String {
    data_encoding::HEXLOWER.encode(&rand::rng().random::<[u8; 32]>())
}
