//! What the faces need of the product, as traits: [`Control`] is the one implementation outside tests.

mod credentials;
mod runs;

pub(crate) use credentials::Credentials;
pub(crate) use runs::RunBackend;

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sandglass_control::{
    CameBy, CollectFiles, Collection, Control, CreateSandbox, DialError, DiskUse, GrantRequest,
    GrantedModels, KnownTemplate, ListSnapshots, Live, LogEntry, NewKey, Sleeper, TemplateDefinition,
    TrafficToken,
};
use sandglass_egress::policy::{Effective, Policy, RequestHost, Warning};
use sandglass_engine::EngineInfo;
use sandglass_engine::engine::Stats;
use sandglass_store::{
    ApiKey, Assignment, AuditEntry, BudgetRow, CallRow, Event, Identity, ListFilter, ListPage, Sample,
    SandboxRow, SnapshotPage, SnapshotRow, Team, TeamSample, VolumeRow,
};
use sandglass_types::{
    BudgetId, Error, KeyId, Limits, Name, PauseMode, Reference, ResumeMode, SandboxId, SnapshotId, TeamId,
    Timestamp, UserName, VolumeId, VolumeName,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use crate::e2b::content::Talk;

/// The verbs of [`Control`] that the faces call.
#[async_trait]
pub(crate) trait Backend: Credentials + RunBackend {
    fn engine(&self) -> &EngineInfo;
    fn domain(&self) -> Option<&str>;
    async fn authenticate(&self, secret: &str) -> Result<Identity, Error>;
    async fn audit(&self, entry: AuditEntry);
    async fn metrics(&self, text: &mut String) -> Result<(), Error>;
    async fn create(&self, team: TeamId, request: CreateSandbox) -> Result<SandboxRow, Error>;
    async fn sandbox(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error>;
    async fn standing(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error>;
    async fn record(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error>;
    async fn pause(&self, team: TeamId, id: &SandboxId, mode: PauseMode) -> Result<(), Error>;
    async fn resume(
        &self,
        team: TeamId,
        id: &SandboxId,
        timeout: Duration,
        mode: ResumeMode,
    ) -> Result<SandboxRow, Error>;
    async fn connect(
        &self,
        team: TeamId,
        id: &SandboxId,
        timeout: Duration,
        mode: ResumeMode,
    ) -> Result<(SandboxRow, bool), Error>;
    async fn snapshot(
        &self,
        team: TeamId,
        id: &SandboxId,
        name: Option<&Reference>,
    ) -> Result<SnapshotRow, Error>;
    async fn snapshots(&self, team: TeamId, wanted: ListSnapshots) -> Result<SnapshotPage, Error>;
    async fn find_snapshot(&self, team: TeamId, reference: &Reference) -> Result<SnapshotRow, Error>;
    async fn disk_use(&self, images: &[SnapshotId]) -> Result<BTreeMap<SnapshotId, DiskUse>, Error>;
    async fn tree_of_template(&self, name: &str) -> Result<u64, Error>;
    async fn tree_of_sandbox(&self, team: TeamId, id: &SandboxId) -> Result<u64, Error>;
    async fn delete_snapshot(&self, team: TeamId, reference: &Reference) -> Result<(), Error>;
    async fn delete_snapshot_of_any(&self, id: &SnapshotId) -> Result<(), Error>;
    async fn fork(
        &self,
        team: TeamId,
        id: &SandboxId,
        count: usize,
        lives: Duration,
    ) -> Result<Vec<Result<SandboxRow, Error>>, Error>;
    async fn create_volume(
        &self,
        team: TeamId,
        name: VolumeName,
        size_mib: Option<u32>,
    ) -> Result<VolumeRow, Error>;
    async fn volumes(&self, team: TeamId) -> Result<Vec<VolumeRow>, Error>;
    async fn volume(&self, team: TeamId, id: &VolumeId) -> Result<VolumeRow, Error>;
    async fn delete_volume(&self, team: TeamId, id: &VolumeId) -> Result<(), Error>;
    async fn content(&self, id: &VolumeId, token: &str) -> Result<Box<dyn Talk>, Error>;
    async fn collect(&self, team: TeamId, id: &SandboxId, wanted: &CollectFiles)
    -> Result<Collection, Error>;
    async fn begin_template(
        &self,
        team: TeamId,
        definition: &TemplateDefinition,
    ) -> Result<SandboxRow, Error>;
    async fn finish_template(
        &self,
        team: TeamId,
        id: &SandboxId,
        definition: &TemplateDefinition,
    ) -> Result<KnownTemplate, Error>;
    async fn templates(&self) -> Result<Vec<KnownTemplate>, Error>;
    async fn template(&self, name: &str) -> Result<KnownTemplate, Error>;
    async fn delete_template(&self, name: &str) -> Result<(), Error>;
    async fn list(&self, filter: ListFilter) -> Result<ListPage, Error>;
    async fn assign(
        &self,
        team: TeamId,
        user: &UserName,
        request: CreateSandbox,
    ) -> Result<(SandboxRow, CameBy), Error>;
    async fn assignments(&self, team: TeamId, user: &UserName) -> Result<Vec<Assignment>, Error>;
    async fn release(&self, team: TeamId, user: &UserName) -> Result<(), Error>;
    async fn kill(&self, team: TeamId, id: &SandboxId) -> Result<(), Error>;
    async fn set_timeout(&self, team: TeamId, id: &SandboxId, from_now: Duration)
    -> Result<Timestamp, Error>;
    async fn extend(&self, team: TeamId, id: &SandboxId, from_now: Duration) -> Result<SandboxRow, Error>;
    async fn events(&self, team: TeamId, id: &SandboxId) -> Result<Vec<Event>, Error>;
    async fn stats(&self, team: TeamId, id: &SandboxId) -> Result<Stats, Error>;
    async fn logs(&self, team: TeamId, id: &SandboxId) -> Result<Vec<LogEntry>, Error>;
    async fn samples(
        &self,
        team: TeamId,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<(Limits, Vec<Sample>), Error>;
    async fn last_samples(&self, team: TeamId, ids: &[SandboxId]) -> Result<Vec<(Limits, Sample)>, Error>;
    async fn team_samples(
        &self,
        team: TeamId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<TeamSample>, Error>;
    async fn team(&self, team: TeamId) -> Result<Team, Error>;
    async fn keys(&self, team: TeamId) -> Result<Vec<ApiKey>, Error>;
    async fn create_key(&self, by: &Identity, name: Name) -> Result<NewKey, Error>;
    async fn rename_key(&self, by: &Identity, id: KeyId, name: &Name) -> Result<ApiKey, Error>;
    async fn end_key(&self, by: &Identity, id: KeyId) -> Result<(), Error>;

    async fn grant_models(
        &self,
        team: TeamId,
        id: &SandboxId,
        request: GrantRequest,
    ) -> Result<GrantedModels, Error>;
    async fn budget(&self, team: TeamId, id: &BudgetId) -> Result<(BudgetRow, Vec<CallRow>), Error>;
    async fn close_budget(&self, team: TeamId, id: &BudgetId) -> Result<BudgetRow, Error>;

    /// How long nobody has used it, if that is known.
    async fn unused(&self, team: TeamId, id: &SandboxId) -> Result<Option<Duration>, Error>;
    async fn set_policy(
        &self,
        team: TeamId,
        id: &SandboxId,
        policy: Policy,
        allow_internet_access: Option<bool>,
    ) -> Result<(), Error>;
    fn effective(&self, row: &SandboxRow) -> Result<(Effective, Vec<Warning>), Error>;
    async fn receipts(&self, team: TeamId, id: &SandboxId, limit: usize) -> Result<Vec<String>, Error>;
    fn live(&self, id: &SandboxId) -> Option<Arc<dyn Upstream>>;
    async fn sleeper(&self, id: &SandboxId) -> Result<Option<Sleeper>, Error>;
    async fn wake(&self, sleeper: &Sleeper) -> Result<Arc<dyn Upstream>, Error>;
}

/// One connection into a sandbox.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// The way into one running sandbox.
#[async_trait]
pub(crate) trait Upstream: Send + Sync {
    /// Fires when the sandbox stops being reachable.
    fn gone(&self) -> &CancellationToken;
    /// Whose it is.
    fn team(&self) -> TeamId;
    /// What opens its ports, the guest API's aside; `None` if they are open to everybody.
    fn traffic_token(&self) -> Option<&TrafficToken>;
    /// The Host header that programs inside see, if it is not to be the client's.
    fn request_host(&self) -> Option<&RequestHost>;
    /// Connects to the guest API.
    async fn guest_api(&self) -> Result<Box<dyn Stream>, DialError>;
    /// Connects to a port of the user's.
    async fn dial(&self, port: NonZeroU16) -> Result<Box<dyn Stream>, DialError>;
}

#[async_trait]
impl Backend for Control {
    fn engine(&self) -> &EngineInfo {
        Self::engine(self)
    }

    fn domain(&self) -> Option<&str> {
        Self::domain(self)
    }

    async fn authenticate(&self, secret: &str) -> Result<Identity, Error> {
        Self::authenticate(self, secret).await
    }

    async fn audit(&self, entry: AuditEntry) {
        Self::audit(self, entry).await;
    }

    async fn metrics(&self, text: &mut String) -> Result<(), Error> {
        Self::metrics(self, text).await
    }

    async fn create(&self, team: TeamId, request: CreateSandbox) -> Result<SandboxRow, Error> {
        Self::create(self, team, request).await
    }

    async fn sandbox(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        Self::sandbox(self, team, id).await
    }

    async fn standing(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        Self::standing(self, team, id).await
    }

    async fn pause(&self, team: TeamId, id: &SandboxId, mode: PauseMode) -> Result<(), Error> {
        Self::pause(self, team, id, mode).await
    }

    async fn resume(
        &self,
        team: TeamId,
        id: &SandboxId,
        timeout: Duration,
        mode: ResumeMode,
    ) -> Result<SandboxRow, Error> {
        Self::resume(self, team, id, timeout, mode).await
    }

    async fn connect(
        &self,
        team: TeamId,
        id: &SandboxId,
        timeout: Duration,
        mode: ResumeMode,
    ) -> Result<(SandboxRow, bool), Error> {
        Self::connect(self, team, id, timeout, mode).await
    }

    async fn snapshot(
        &self,
        team: TeamId,
        id: &SandboxId,
        name: Option<&Reference>,
    ) -> Result<SnapshotRow, Error> {
        Self::snapshot(self, team, id, name).await
    }

    async fn snapshots(&self, team: TeamId, wanted: ListSnapshots) -> Result<SnapshotPage, Error> {
        Self::snapshots(self, team, wanted).await
    }

    async fn find_snapshot(&self, team: TeamId, reference: &Reference) -> Result<SnapshotRow, Error> {
        Self::find_snapshot(self, team, reference).await
    }

    async fn disk_use(&self, images: &[SnapshotId]) -> Result<BTreeMap<SnapshotId, DiskUse>, Error> {
        Self::disk_use(self, images).await
    }

    async fn tree_of_template(&self, name: &str) -> Result<u64, Error> {
        Self::tree_of_template(self, name).await
    }

    async fn tree_of_sandbox(&self, team: TeamId, id: &SandboxId) -> Result<u64, Error> {
        Self::tree_of_sandbox(self, team, id).await
    }

    async fn delete_snapshot(&self, team: TeamId, reference: &Reference) -> Result<(), Error> {
        Self::delete_snapshot(self, team, reference).await
    }

    async fn delete_snapshot_of_any(&self, id: &SnapshotId) -> Result<(), Error> {
        Self::delete_snapshot_of_any(self, id).await
    }

    async fn fork(
        &self,
        team: TeamId,
        id: &SandboxId,
        count: usize,
        lives: Duration,
    ) -> Result<Vec<Result<SandboxRow, Error>>, Error> {
        Self::fork(self, team, id, count, lives).await
    }

    async fn create_volume(
        &self,
        team: TeamId,
        name: VolumeName,
        size_mib: Option<u32>,
    ) -> Result<VolumeRow, Error> {
        Self::create_volume(self, team, name, size_mib).await
    }

    async fn volumes(&self, team: TeamId) -> Result<Vec<VolumeRow>, Error> {
        Self::volumes(self, team).await
    }

    async fn volume(&self, team: TeamId, id: &VolumeId) -> Result<VolumeRow, Error> {
        Self::volume(self, team, id).await
    }

    async fn content(&self, id: &VolumeId, token: &str) -> Result<Box<dyn Talk>, Error> {
        Ok(Box::new(Self::content(self, id, token).await?))
    }

    async fn collect(
        &self,
        team: TeamId,
        id: &SandboxId,
        wanted: &CollectFiles,
    ) -> Result<Collection, Error> {
        Self::collect(self, team, id, wanted).await
    }

    async fn delete_volume(&self, team: TeamId, id: &VolumeId) -> Result<(), Error> {
        Self::delete_volume(self, team, id).await
    }

    async fn grant_models(
        &self,
        team: TeamId,
        id: &SandboxId,
        request: GrantRequest,
    ) -> Result<GrantedModels, Error> {
        Self::grant_models(self, team, id, request).await
    }

    async fn budget(&self, team: TeamId, id: &BudgetId) -> Result<(BudgetRow, Vec<CallRow>), Error> {
        Self::budget(self, team, id).await
    }

    async fn close_budget(&self, team: TeamId, id: &BudgetId) -> Result<BudgetRow, Error> {
        Self::close_budget(self, team, id).await
    }

    async fn begin_template(
        &self,
        team: TeamId,
        definition: &TemplateDefinition,
    ) -> Result<SandboxRow, Error> {
        Self::begin_template(self, team, definition).await
    }

    async fn finish_template(
        &self,
        team: TeamId,
        id: &SandboxId,
        definition: &TemplateDefinition,
    ) -> Result<KnownTemplate, Error> {
        Self::finish_template(self, team, id, definition).await
    }

    async fn templates(&self) -> Result<Vec<KnownTemplate>, Error> {
        Self::templates(self).await
    }

    async fn template(&self, name: &str) -> Result<KnownTemplate, Error> {
        Self::template(self, name).await
    }

    async fn delete_template(&self, name: &str) -> Result<(), Error> {
        Self::delete_template(self, name).await
    }

    async fn record(&self, team: TeamId, id: &SandboxId) -> Result<SandboxRow, Error> {
        Self::record(self, team, id).await
    }

    async fn list(&self, filter: ListFilter) -> Result<ListPage, Error> {
        Self::list(self, filter).await
    }

    async fn assign(
        &self,
        team: TeamId,
        user: &UserName,
        request: CreateSandbox,
    ) -> Result<(SandboxRow, CameBy), Error> {
        Self::assign(self, team, user, request).await
    }

    async fn assignments(&self, team: TeamId, user: &UserName) -> Result<Vec<Assignment>, Error> {
        Self::assignments(self, team, user).await
    }

    async fn release(&self, team: TeamId, user: &UserName) -> Result<(), Error> {
        Self::release(self, team, user).await
    }

    async fn kill(&self, team: TeamId, id: &SandboxId) -> Result<(), Error> {
        Self::kill(self, team, id).await
    }

    async fn set_timeout(
        &self,
        team: TeamId,
        id: &SandboxId,
        from_now: Duration,
    ) -> Result<Timestamp, Error> {
        Self::set_timeout(self, team, id, from_now).await
    }

    async fn extend(&self, team: TeamId, id: &SandboxId, from_now: Duration) -> Result<SandboxRow, Error> {
        Self::extend(self, team, id, from_now).await
    }

    async fn events(&self, team: TeamId, id: &SandboxId) -> Result<Vec<Event>, Error> {
        Self::events(self, team, id).await
    }

    async fn stats(&self, team: TeamId, id: &SandboxId) -> Result<Stats, Error> {
        Self::stats(self, team, id).await
    }

    async fn logs(&self, team: TeamId, id: &SandboxId) -> Result<Vec<LogEntry>, Error> {
        Self::logs(self, team, id).await
    }

    async fn samples(
        &self,
        team: TeamId,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<(Limits, Vec<Sample>), Error> {
        Self::samples(self, team, id, from, to).await
    }

    async fn last_samples(&self, team: TeamId, ids: &[SandboxId]) -> Result<Vec<(Limits, Sample)>, Error> {
        Self::last_samples(self, team, ids).await
    }

    async fn team_samples(
        &self,
        team: TeamId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<TeamSample>, Error> {
        Self::team_samples(self, team, from, to).await
    }

    async fn team(&self, team: TeamId) -> Result<Team, Error> {
        Self::team(self, team).await
    }

    async fn keys(&self, team: TeamId) -> Result<Vec<ApiKey>, Error> {
        Self::keys(self, team).await
    }

    async fn create_key(&self, by: &Identity, name: Name) -> Result<NewKey, Error> {
        Self::create_key(self, by, name).await
    }

    async fn rename_key(&self, by: &Identity, id: KeyId, name: &Name) -> Result<ApiKey, Error> {
        Self::rename_key(self, by, id, name).await
    }

    async fn end_key(&self, by: &Identity, id: KeyId) -> Result<(), Error> {
        Self::end_key(self, by, id).await
    }

    async fn unused(&self, team: TeamId, id: &SandboxId) -> Result<Option<Duration>, Error> {
        Self::unused(self, team, id).await
    }

    async fn set_policy(
        &self,
        team: TeamId,
        id: &SandboxId,
        policy: Policy,
        allow_internet_access: Option<bool>,
    ) -> Result<(), Error> {
        Self::set_policy(self, team, id, policy, allow_internet_access).await
    }

    fn effective(&self, row: &SandboxRow) -> Result<(Effective, Vec<Warning>), Error> {
        Self::effective(self, row)
    }

    async fn receipts(&self, team: TeamId, id: &SandboxId, limit: usize) -> Result<Vec<String>, Error> {
        Self::receipts(self, team, id, limit).await
    }

    fn live(&self, id: &SandboxId) -> Option<Arc<dyn Upstream>> {
        Self::live(self, id).map(|live| live as Arc<dyn Upstream>)
    }

    async fn sleeper(&self, id: &SandboxId) -> Result<Option<Sleeper>, Error> {
        Self::sleeper(self, id).await
    }

    async fn wake(&self, sleeper: &Sleeper) -> Result<Arc<dyn Upstream>, Error> {
        Ok(Self::wake(self, sleeper).await?)
    }
}

#[async_trait]
impl Upstream for Live {
    fn gone(&self) -> &CancellationToken {
        Self::gone(self)
    }

    fn team(&self) -> TeamId {
        Self::team(self)
    }

    fn traffic_token(&self) -> Option<&TrafficToken> {
        Self::traffic_token(self)
    }

    fn request_host(&self) -> Option<&RequestHost> {
        Self::request_host(self)
    }

    async fn guest_api(&self) -> Result<Box<dyn Stream>, DialError> {
        Ok(Box::new(Self::guest_api(self).await?))
    }

    async fn dial(&self, port: NonZeroU16) -> Result<Box<dyn Stream>, DialError> {
        Ok(Box::new(Self::dial(self, port).await?))
    }
}
