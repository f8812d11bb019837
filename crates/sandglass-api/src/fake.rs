//! A product in memory, for tests of the faces.

mod credentials;
mod models;
mod net;
mod runs;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use sandglass_control::{
    AskedVolume, CameBy, CollectFiles, Collection, CreateSandbox, DialError, DiskUse, GrantRequest,
    GrantedModels, KnownConnection, KnownTemplate, ListSnapshots, LogEntry, LogLevel, NewKey, Sleeper,
    TemplateDefinition, TrafficToken,
};
use sandglass_egress::policy::{Effective, Operator, Policy, RequestHost, Surroundings, Warning};
use sandglass_engine::engine::{Feature, Isolation};
use sandglass_engine::{EngineInfo, Footprint, Stats};
use sandglass_store::{
    ApiKey, Assignment, AuditEntry, BudgetRow, CallRow, CommandDefaults, Event, Identity, ImageState,
    ListFilter, ListPage, MadeFrom, Order, PageCursor, Purpose, Sample, SandboxRow, SecretRow, SnapshotName,
    SnapshotPage, SnapshotRow, Team, TeamSample, TemplateSpec, VolumeRow, VolumeState,
};
use sandglass_types::{
    BudgetId, Error, ErrorKind, KeyId, Lifetime, Limits, Name, OnTimeout, PauseMode, Reference, ResumeMode,
    SandboxId, SandboxState, SnapshotId, TeamId, Timestamp, UserName, VolumeId, VolumeMount, VolumeName,
};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::backend::{Backend, Stream, Upstream};
use crate::e2b::content::Talk;
use crate::e2b::wire::tests::row;

pub(crate) use net::{Guest, PATIENCE, Served, Wire};

/// The keys of two teams. The first one is an operator's.
pub(crate) const KEY: &str = "e2b_0123456789012345678901234567890123456789";
pub(crate) const OTHER_KEY: &str = "e2b_9999999999999999999999999999999999999999";

/// A template whose sandboxes make the handler panic, one for each kind of failure, or that takes long.
pub(crate) const PANIC: &str = "panic";

pub(crate) struct Fake {
    engine: EngineInfo,
    identities: [Identity; 2],
    pub(crate) audit: Mutex<Vec<AuditEntry>>,
    keys: Mutex<Vec<ApiKey>>,
    domain: Option<String>,
    rows: Mutex<Vec<SandboxRow>>,
    snapshots: Mutex<Vec<SnapshotRow>>,
    volumes: Mutex<Vec<VolumeRow>>,
    secrets: Mutex<Vec<SecretRow>>,
    connections: Mutex<Vec<(TeamId, KnownConnection)>>,
    budgets: models::Budgets,
    idempotent: Mutex<HashMap<String, (sandglass_types::Digest, SandboxId)>>,
    live: Mutex<HashMap<SandboxId, Arc<FakeLive>>>,
    /// Those that a request wakes, and what it then finds.
    sleeping: Mutex<HashMap<SandboxId, Sleeping>>,
}

/// A sandbox that a request wakes, and what it then finds.
type Sleeping = (Sleeper, Result<Arc<FakeLive>, ErrorKind>);

/// A sandbox whose ports are TCP servers of the test.
pub(crate) struct FakeLive {
    pub(crate) gone: CancellationToken,
    ports: Mutex<HashMap<u16, SocketAddr>>,
    team: TeamId,
    traffic_token: Option<TrafficToken>,
    request_host: Option<RequestHost>,
}

fn not_found() -> Error {
    Error::new(ErrorKind::NotFound, "sandbox not found")
}

impl Fake {
    pub(crate) fn new() -> Arc<Self> {
        let identity = |operator| Identity { team: TeamId::random(), key: KeyId::random(), operator };
        Arc::new(Self {
            engine: EngineInfo {
                name: "fake".into(),
                version: "1".into(),
                agent: None,
                isolation: Isolation::None,
                refuses: BTreeSet::from([Feature::Checkpoint]),
            },
            identities: [identity(true), identity(false)],
            audit: Mutex::default(),
            keys: Mutex::default(),
            domain: Some("sbx.test".into()),
            rows: Mutex::default(),
            snapshots: Mutex::default(),
            volumes: Mutex::default(),
            secrets: Mutex::default(),
            connections: Mutex::default(),
            budgets: models::Budgets::default(),
            idempotent: Mutex::default(),
            live: Mutex::default(),
            sleeping: Mutex::default(),
        })
    }

    /// Whom [`KEY`] and [`OTHER_KEY`] act for.
    pub(crate) fn identities(&self) -> [Identity; 2] {
        self.identities
    }

    /// Adds a running sandbox that nobody owns, with these ports.
    pub(crate) fn run(&self, ports: &[(u16, SocketAddr)]) -> (SandboxId, Arc<FakeLive>) {
        self.run_behind(ports, None, None)
    }

    /// The same, with what decides who reaches its ports, and as whom.
    pub(crate) fn run_behind(
        &self,
        ports: &[(u16, SocketAddr)],
        traffic_token: Option<TrafficToken>,
        request_host: Option<RequestHost>,
    ) -> (SandboxId, Arc<FakeLive>) {
        let id = SandboxId::random();
        let live = Arc::new(FakeLive {
            gone: CancellationToken::new(),
            ports: Mutex::new(ports.iter().copied().collect()),
            team: TeamId::random(),
            traffic_token,
            request_host,
        });
        self.live.lock().unwrap().insert(id.clone(), live.clone());
        (id, live)
    }

    /// Pauses it, so that a request wakes it that has these tokens, or finds this failure.
    pub(crate) fn put_to_sleep(&self, id: &SandboxId, tokens: [Option<&str>; 2], failure: Option<ErrorKind>) {
        let live = self.live.lock().unwrap().remove(id).unwrap();
        let [traffic_token, access_token] = tokens.map(|token| token.map(str::to_owned));
        let lifetime = Lifetime { on_timeout: OnTimeout::Pause { auto_resume: true }, ..row().lifetime };
        let row = SandboxRow {
            id: id.clone(),
            state: SandboxState::Paused,
            lifetime,
            traffic_token,
            access_token,
            ..row()
        };
        let sleeper = Sleeper::of(&row).unwrap();
        self.sleeping.lock().unwrap().insert(id.clone(), (sleeper, failure.map_or(Ok(live), Err)));
    }

    /// Ends it as the product does: not found first, then gone.
    pub(crate) fn end(&self, id: &SandboxId) {
        if let Some(live) = self.live.lock().unwrap().remove(id) {
            live.gone.cancel();
        }
    }

    pub(crate) fn row(&self, id: &str) -> Option<SandboxRow> {
        self.rows.lock().unwrap().iter().find(|row| row.id.as_str() == id).cloned()
    }

    fn change<T>(
        &self,
        team: TeamId,
        id: &SandboxId,
        change: impl FnOnce(&mut SandboxRow) -> T,
    ) -> Result<T, Error> {
        let mut rows = self.rows.lock().unwrap();
        let row = rows
            .iter_mut()
            .find(|row| row.id == *id && row.team == team && row.state == SandboxState::Running);
        row.map(change).ok_or_else(not_found)
    }

    /// Pauses or resumes.
    fn turn(&self, team: TeamId, id: &SandboxId, [from, to]: [SandboxState; 2]) -> Result<SandboxRow, Error> {
        let mut rows = self.rows.lock().unwrap();
        let row = rows.iter_mut().find(|row| row.id == *id && row.team == team).ok_or_else(not_found)?;
        if row.state != from {
            return Err(Error::new(ErrorKind::Conflict, "as it is already"));
        }
        row.state = to;
        Ok(row.clone())
    }
}

#[async_trait]
impl Backend for Fake {
    fn engine(&self) -> &EngineInfo {
        &self.engine
    }

    fn domain(&self) -> Option<&str> {
        self.domain.as_deref()
    }

    async fn authenticate(&self, secret: &str) -> Result<Identity, Error> {
        match secret {
            KEY => Ok(self.identities[0]),
            OTHER_KEY => Ok(self.identities[1]),
            _ => Err(Error::new(ErrorKind::Unauthenticated, "invalid API key")),
        }
    }

    async fn audit(&self, entry: AuditEntry) {
        self.audit.lock().unwrap().push(entry);
    }

    async fn metrics(&self, text: &mut String) -> Result<(), Error> {
        text.push_str("the_product_s_own 1\n");
        Ok(())
    }

    async fn create(&self, team: TeamId, request: CreateSandbox) -> Result<SandboxRow, Error> {
        assert_ne!(request.template, PANIC, "as the test wanted");
        let kind = match request.template.as_str() {
            "quota" => Some(ErrorKind::Quota),
            "full" => Some(ErrorKind::Capacity),
            "missing" => Some(ErrorKind::NotFound),
            "busy" => Some(ErrorKind::IdempotencyInProgress),
            _ => None,
        };
        if let Some(kind) = kind {
            return Err(Error::new(kind, "as the test wanted"));
        }
        if let Some((key, digest)) = &request.idempotency
            && let Some((before, id)) = self.idempotent.lock().unwrap().get(key.as_str())
        {
            return if before == digest {
                self.row(id.as_str()).ok_or_else(not_found)
            } else {
                Err(Error::new(ErrorKind::IdempotencyMismatch, "another request"))
            };
        }
        let mut rows = self.rows.lock().unwrap();
        let created_at = Timestamp::from_millis(i64::try_from(rows.len()).unwrap() * 1000);
        let row = SandboxRow {
            id: SandboxId::random(),
            team,
            template: request.template,
            access_token: request.secured.then(|| "token".to_owned()),
            metadata: request.metadata,
            env: request.env,
            allow_internet_access: request.allow_internet_access,
            policy: request.policy,
            traffic_token: (!request.ingress.public).then(|| "traffic".to_owned()),
            request_host: request.ingress.request_host,
            lifetime: request.lifetime,
            volumes: request
                .volumes
                .into_iter()
                .map(|AskedVolume { name, path }| VolumeMount { id: VolumeId::random(), name, path })
                .collect(),
            created_at,
            end_at: created_at.plus(request.lifetime.timeout),
            connections: request.connections,
            ..row()
        };
        if let Some((key, digest)) = request.idempotency {
            self.idempotent.lock().unwrap().insert(key.as_str().into(), (digest, row.id.clone()));
        }
        rows.push(row.clone());
        Ok(row)
    }

    async fn sandbox(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        self.change(team, id, |row| row.clone())
    }

    async fn standing(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        let row = self.record(team, id).await?;
        if row.state == SandboxState::Ended { Err(not_found()) } else { Ok(row) }
    }

    async fn pause(&self, team: TeamId, id: &SandboxId, mode: PauseMode) -> Result<(), Error> {
        self.change(team, id, |row| row.pause_mode = mode)?;
        self.turn(team, id, [SandboxState::Running, SandboxState::Paused]).map(drop)
    }

    async fn resume(
        &self,
        team: TeamId,
        id: &SandboxId,
        _: Duration,
        _: ResumeMode,
    ) -> Result<SandboxRow, Error> {
        self.turn(team, id, [SandboxState::Paused, SandboxState::Running])
    }

    async fn connect(
        &self,
        team: TeamId,
        id: &SandboxId,
        timeout: Duration,
        mode: ResumeMode,
    ) -> Result<(SandboxRow, bool), Error> {
        let resumed = self.resume(team, id, timeout, mode).await.is_ok();
        Ok((self.extend(team, id, timeout).await?, resumed))
    }

    async fn snapshot(
        &self,
        team: TeamId,
        id: &SandboxId,
        name: Option<&Reference>,
    ) -> Result<SnapshotRow, Error> {
        let source = self.sandbox(team, id).await?;
        let mut snapshots = self.snapshots.lock().unwrap();
        let name = name
            .map(|name| SnapshotName { name: name.name().to_owned(), tag: name.tag_or_default().to_owned() });
        let row = SnapshotRow {
            id: SnapshotId::random(),
            node: source.node,
            team,
            namespace: "default".into(),
            purpose: Purpose::Snapshot,
            name,
            template: source.template,
            defaults: None,
            rootfs: source.rootfs,
            limits: source.limits,
            source: source.id,
            generation: source.generation,
            volumes: source.volumes,
            state: ImageState::Ready,
            created_at: Timestamp::from_millis(i64::try_from(snapshots.len()).unwrap()),
        };
        snapshots.push(row.clone());
        Ok(row)
    }

    async fn snapshots(&self, team: TeamId, wanted: ListSnapshots) -> Result<SnapshotPage, Error> {
        let mut rows = self.snapshots.lock().unwrap().clone();
        rows.retain(|row| {
            row.team == team
                && wanted.source.as_ref().is_none_or(|source| row.source == *source)
                && wanted
                    .name
                    .as_ref()
                    .is_none_or(|name| row.name.as_ref().is_some_and(|own| own.name == name.name()))
                && wanted.after.as_ref().is_none_or(|after| row.created_at < after.created_at)
        });
        rows.reverse();
        let more = rows.len() > wanted.limit as usize;
        rows.truncate(wanted.limit as usize);
        let cursor = |row: &SnapshotRow| PageCursor { created_at: row.created_at, id: row.id.clone() };
        let next = rows.last().filter(|_| more).map(cursor);
        Ok(SnapshotPage { rows, next })
    }

    async fn find_snapshot(&self, team: TeamId, reference: &Reference) -> Result<SnapshotRow, Error> {
        let snapshots = self.snapshots.lock().unwrap();
        let meant = |row: &&SnapshotRow| row.team == team && row.id.as_str() == reference.name();
        snapshots.iter().find(meant).cloned().ok_or_else(not_found)
    }

    /// The first of them is in use, and the last is gone.
    async fn disk_use(&self, images: &[SnapshotId]) -> Result<BTreeMap<SnapshotId, DiskUse>, Error> {
        let snapshots = self.snapshots.lock().unwrap();
        let footprint = Footprint { bytes: 4096, unique_bytes: 1024, exact: true, compressed: false };
        let found = images.iter().filter_map(|id| {
            let at = snapshots.iter().position(|row| row.id == *id)?;
            (at < 2).then(|| (id.clone(), DiskUse { footprint, in_use: at == 0 }))
        });
        Ok(found.collect())
    }

    async fn tree_of_template(&self, _: &str) -> Result<u64, Error> {
        Err(not_found())
    }

    async fn tree_of_sandbox(&self, team: TeamId, id: &SandboxId) -> Result<u64, Error> {
        self.record(team, id).await.map(|_| 8192)
    }

    async fn delete_snapshot(&self, team: TeamId, reference: &Reference) -> Result<(), Error> {
        let mut snapshots = self.snapshots.lock().unwrap();
        let meant = |row: &SnapshotRow| {
            row.team == team
                && (row.id.as_str() == reference.name() || row.full_name() == Some(reference.to_string()))
        };
        let at = snapshots.iter().position(meant).ok_or_else(not_found)?;
        snapshots.remove(at);
        Ok(())
    }

    async fn delete_snapshot_of_any(&self, id: &SnapshotId) -> Result<(), Error> {
        let mut snapshots = self.snapshots.lock().unwrap();
        let at = snapshots.iter().position(|row| row.id == *id).ok_or_else(not_found)?;
        snapshots.remove(at);
        Ok(())
    }

    async fn fork(
        &self,
        team: TeamId,
        id: &SandboxId,
        count: usize,
        lives: Duration,
    ) -> Result<Vec<Result<SandboxRow, Error>>, Error> {
        let source = self.sandbox(team, id).await?;
        let mut made = Vec::new();
        for number in 0..count {
            let id = SandboxId::random();
            let end_at = source.created_at.plus(lives);
            let made_from = MadeFrom::Fork(source.id.clone());
            let child = SandboxRow { id, end_at, made_from, ..source.clone() };
            // The last of many fails.
            made.push(match number {
                2.. => Err(Error::new(ErrorKind::Capacity, "as the test wanted")),
                _ => Ok(child.clone()),
            });
            self.rows.lock().unwrap().push(child);
        }
        Ok(made)
    }

    async fn create_volume(
        &self,
        team: TeamId,
        name: VolumeName,
        size_mib: Option<u32>,
    ) -> Result<VolumeRow, Error> {
        let mut volumes = self.volumes.lock().unwrap();
        if volumes.iter().any(|row| row.team == team && row.name == name) {
            return Err(Error::new(ErrorKind::Conflict, "taken"));
        }
        let row = VolumeRow {
            id: VolumeId::random(),
            node: row().node,
            team,
            name,
            size_mib: size_mib.unwrap_or(1024),
            token: "f".repeat(64),
            state: VolumeState::Ready,
            created_at: row().created_at,
        };
        volumes.push(row.clone());
        Ok(row)
    }

    async fn volumes(&self, team: TeamId) -> Result<Vec<VolumeRow>, Error> {
        Ok(self.volumes.lock().unwrap().iter().filter(|row| row.team == team).cloned().collect())
    }

    async fn volume(&self, team: TeamId, id: &VolumeId) -> Result<VolumeRow, Error> {
        let volumes = self.volumes.lock().unwrap();
        volumes.iter().find(|row| row.team == team && row.id == *id).cloned().ok_or_else(not_found)
    }

    async fn content(&self, id: &VolumeId, token: &str) -> Result<Box<dyn Talk>, Error> {
        let volumes = self.volumes.lock().unwrap();
        let known = volumes.iter().any(|row| row.id == *id && row.token == token);
        let kind = if known { ErrorKind::Unsupported } else { ErrorKind::Unauthenticated };
        Err(Error::new(kind, "as the test wanted"))
    }

    async fn collect(&self, team: TeamId, id: &SandboxId, _: &CollectFiles) -> Result<Collection, Error> {
        self.standing(team, id).await?;
        Err(Error::new(ErrorKind::Unsupported, "as the test wanted"))
    }

    async fn grant_models(
        &self,
        team: TeamId,
        id: &SandboxId,
        request: GrantRequest,
    ) -> Result<GrantedModels, Error> {
        self.sandbox(team, id).await?;
        self.budgets.grant(team, &request)
    }

    async fn budget(&self, team: TeamId, id: &BudgetId) -> Result<(BudgetRow, Vec<CallRow>), Error> {
        self.budgets.find(team, id)
    }

    async fn close_budget(&self, team: TeamId, id: &BudgetId) -> Result<BudgetRow, Error> {
        self.budgets.close(team, id)
    }

    async fn delete_volume(&self, team: TeamId, id: &VolumeId) -> Result<(), Error> {
        self.volume(team, id).await?;
        self.volumes.lock().unwrap().retain(|row| row.id != *id);
        Ok(())
    }

    async fn begin_template(
        &self,
        team: TeamId,
        definition: &TemplateDefinition,
    ) -> Result<SandboxRow, Error> {
        let row = SandboxRow { id: SandboxId::random(), team, template: definition.base().into(), ..row() };
        self.rows.lock().unwrap().push(row.clone());
        Ok(row)
    }

    async fn finish_template(
        &self,
        team: TeamId,
        id: &SandboxId,
        definition: &TemplateDefinition,
    ) -> Result<KnownTemplate, Error> {
        self.sandbox(team, id).await?;
        self.template(&definition.name).await
    }

    async fn templates(&self) -> Result<Vec<KnownTemplate>, Error> {
        Ok(vec![template("base", None), template("node", Some(SnapshotId::random())), template("py", None)])
    }

    async fn template(&self, name: &str) -> Result<KnownTemplate, Error> {
        self.templates().await?.into_iter().find(|template| template.name == name).ok_or_else(not_found)
    }

    async fn delete_template(&self, _: &str) -> Result<(), Error> {
        Err(not_found())
    }

    async fn assign(
        &self,
        team: TeamId,
        _: &UserName,
        request: CreateSandbox,
    ) -> Result<(SandboxRow, CameBy), Error> {
        Ok((self.create(team, request).await?, CameBy::Created))
    }

    async fn assignments(&self, _: TeamId, _: &UserName) -> Result<Vec<Assignment>, Error> {
        Ok(Vec::new())
    }

    async fn release(&self, _: TeamId, _: &UserName) -> Result<(), Error> {
        Err(not_found())
    }

    async fn record(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        let rows = self.rows.lock().unwrap();
        rows.iter().find(|row| row.id == *id && row.team == team).cloned().ok_or_else(not_found)
    }

    async fn list(&self, filter: ListFilter) -> Result<ListPage, Error> {
        let mut rows = self.rows.lock().unwrap().clone();
        rows.retain(|row| {
            row.team == filter.team
                && filter.states.contains(&row.state)
                && filter.metadata.iter().all(|(k, v)| row.metadata.get(k) == Some(v))
                && filter.template.as_ref().is_none_or(|template| row.template == *template)
                && filter.created_from.is_none_or(|from| row.created_at >= from)
        });
        let key = |row: &SandboxRow| PageCursor { created_at: row.created_at, id: row.id.clone() };
        rows.sort_by_key(key);
        if filter.order == Order::Descending {
            rows.reverse();
        }
        rows.retain(|row| match (&filter.after, filter.order) {
            (None, _) => true,
            (Some(after), Order::Ascending) => key(row) > *after,
            (Some(after), Order::Descending) => key(row) < *after,
        });
        let limit = filter.limit as usize;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = if more { rows.last().map(key) } else { None };
        Ok(ListPage { rows, next })
    }

    async fn kill(&self, team: TeamId, id: &SandboxId) -> Result<(), Error> {
        let _resumed = self.resume(team, id, Duration::ZERO, ResumeMode::Restore).await;
        self.change(team, id, |row| row.state = SandboxState::Ended)
    }

    async fn set_timeout(
        &self,
        team: TeamId,
        id: &SandboxId,
        from_now: Duration,
    ) -> Result<Timestamp, Error> {
        self.change(team, id, |row| {
            row.end_at = row.created_at.plus(from_now);
            row.end_at
        })
    }

    async fn extend(&self, team: TeamId, id: &SandboxId, from_now: Duration) -> Result<SandboxRow, Error> {
        self.change(team, id, |row| {
            row.end_at = row.end_at.max(row.created_at.plus(from_now));
            row.clone()
        })
    }

    async fn events(&self, team: TeamId, id: &SandboxId) -> Result<Vec<Event>, Error> {
        self.change(team, id, |row| {
            vec![Event {
                seq: 1,
                at: row.created_at,
                state: SandboxState::Creating,
                end_reason: None,
                detail: "asked for".into(),
            }]
        })
    }

    async fn stats(&self, team: TeamId, id: &SandboxId) -> Result<Stats, Error> {
        self.change(team, id, |_| Stats { cpu_micros: 7, ..Stats::default() })
    }

    async fn logs(&self, team: TeamId, id: &SandboxId) -> Result<Vec<LogEntry>, Error> {
        self.change(team, id, |row| {
            vec![LogEntry {
                at: row.created_at,
                level: LogLevel::Info,
                logger: "sandglass",
                message: "running".into(),
                fields: BTreeMap::from([("state".into(), "running".into())]),
            }]
        })
    }

    async fn samples(
        &self,
        team: TeamId,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<(Limits, Vec<Sample>), Error> {
        let asked =
            from.unwrap_or(Timestamp::from_millis(0))..=to.unwrap_or(Timestamp::from_millis(i64::MAX));
        self.change(team, id, |row| {
            let used = sample(row);
            (row.limits, Vec::from_iter(asked.contains(&used.at).then_some(used)))
        })
    }

    async fn last_samples(&self, team: TeamId, ids: &[SandboxId]) -> Result<Vec<(Limits, Sample)>, Error> {
        let seen = |id: &SandboxId| self.change(team, id, |row| (row.limits, sample(row))).ok();
        Ok(ids.iter().filter_map(seen).collect())
    }

    async fn team_samples(
        &self,
        team: TeamId,
        from: Option<Timestamp>,
        _: Option<Timestamp>,
    ) -> Result<Vec<TeamSample>, Error> {
        let count = self.rows.lock().unwrap().iter().filter(|row| row.team == team).count();
        let at = from.unwrap_or(Timestamp::from_millis(60_500));
        let concurrent = u32::try_from(count).unwrap();
        Ok(vec![TeamSample { at, concurrent, made: 3, span: Duration::from_secs(60) }])
    }

    async fn team(&self, team: TeamId) -> Result<Team, Error> {
        let created_at = Timestamp::from_millis(0);
        Ok(Team { id: team, name: "acme".into(), created_at, revoked_at: None })
    }

    async fn keys(&self, team: TeamId) -> Result<Vec<ApiKey>, Error> {
        let keys = self.keys.lock().unwrap();
        Ok(keys.iter().filter(|key| key.team == team).cloned().collect())
    }

    async fn create_key(&self, by: &Identity, name: Name) -> Result<NewKey, Error> {
        let now = Timestamp::from_millis(0);
        let new = NewKey::random(by.team, name, false, Some(by.key), now)?;
        self.keys.lock().unwrap().push(new.key.clone());
        Ok(new)
    }

    async fn rename_key(&self, by: &Identity, id: KeyId, name: &Name) -> Result<ApiKey, Error> {
        let mut keys = self.keys.lock().unwrap();
        let found = keys.iter_mut().find(|key| key.id == id && key.team == by.team).ok_or_else(not_found)?;
        found.name = name.to_string();
        Ok(found.clone())
    }

    async fn end_key(&self, by: &Identity, id: KeyId) -> Result<(), Error> {
        let mut keys = self.keys.lock().unwrap();
        let at = keys.iter().position(|key| key.id == id && key.team == by.team).ok_or_else(not_found)?;
        keys.remove(at);
        Ok(())
    }

    async fn unused(&self, team: TeamId, id: &SandboxId) -> Result<Option<Duration>, Error> {
        self.change(team, id, |_| Some(Duration::from_millis(90_500)))
    }

    async fn set_policy(
        &self,
        team: TeamId,
        id: &SandboxId,
        policy: Policy,
        allow_internet_access: Option<bool>,
    ) -> Result<(), Error> {
        self.change(team, id, |row| (row.policy, row.allow_internet_access) = (policy, allow_internet_access))
    }

    fn effective(&self, row: &SandboxRow) -> Result<(Effective, Vec<Warning>), Error> {
        let ceiling = serde_json::json!({"ceiling": [{"allow": "*.example.com"}]});
        let operator: Operator = serde_json::from_value(ceiling).unwrap();
        Ok(Effective::new(&row.policy, &operator, Surroundings::default()).unwrap())
    }

    async fn receipts(&self, team: TeamId, id: &SandboxId, limit: usize) -> Result<Vec<String>, Error> {
        let lines = ["{\"number\": 0}", "{\"number\": 1}"];
        let kept = lines.len().saturating_sub(limit);
        self.change(team, id, |_| lines[kept..].iter().map(ToString::to_string).collect())
    }

    async fn sleeper(&self, id: &SandboxId) -> Result<Option<Sleeper>, Error> {
        Ok(self.sleeping.lock().unwrap().get(id).map(|(sleeper, _)| sleeper.clone()))
    }

    async fn wake(&self, sleeper: &Sleeper) -> Result<Arc<dyn Upstream>, Error> {
        let id = sleeper.id();
        let (_, found) = self.sleeping.lock().unwrap().remove(id).ok_or_else(not_found)?;
        let live = found.map_err(|kind| Error::new(kind, "as the test wanted"))?;
        self.live.lock().unwrap().insert(id.clone(), live.clone());
        Ok(live)
    }

    fn live(&self, id: &SandboxId) -> Option<Arc<dyn Upstream>> {
        self.live.lock().unwrap().get(id).map(|live| live.clone() as Arc<dyn Upstream>)
    }
}

#[async_trait]
impl Upstream for FakeLive {
    fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    fn team(&self) -> TeamId {
        self.team
    }

    fn traffic_token(&self) -> Option<&TrafficToken> {
        self.traffic_token.as_ref()
    }

    fn request_host(&self) -> Option<&RequestHost> {
        self.request_host.as_ref()
    }

    async fn guest_api(&self) -> Result<Box<dyn Stream>, DialError> {
        self.dial(NonZeroU16::new(49983).unwrap()).await
    }

    async fn dial(&self, port: NonZeroU16) -> Result<Box<dyn Stream>, DialError> {
        let address = self.ports.lock().unwrap().get(&port.get()).copied().ok_or(DialError::Refused)?;
        Ok(Box::new(TcpStream::connect(address).await.map_err(DialError::Unreachable)?))
    }
}

/// A template that starts something with a secret in it.
fn template(name: &str, image: Option<SnapshotId>) -> KnownTemplate {
    let SandboxRow { limits, rootfs, .. } = row();
    KnownTemplate {
        name: name.into(),
        spec: TemplateSpec {
            base: "base".into(),
            start: Some("serve --password hunter2".into()),
            ready: None,
            ready_timeout: 1,
            pool: 3,
            agent: None,
            inherited: Vec::new(),
        },
        defaults: CommandDefaults { user: "user".into(), workdir: String::new(), env: BTreeMap::new() },
        limits,
        rootfs,
        image: image.map(|image| (image, Timestamp::from_millis(1_770_000_000_000))),
    }
}

/// What a sandbox used five seconds after its creation.
fn sample(row: &SandboxRow) -> Sample {
    Sample {
        sandbox: row.id.clone(),
        at: row.created_at.plus(Duration::from_secs(5)),
        cpu_per_mille: 125,
        // More than it may use, with what its engine needs.
        memory_bytes: 1 << 40,
        disk_bytes: 4096,
    }
}
