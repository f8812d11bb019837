//! A product in memory, for tests of the faces.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use sandglass_control::{CreateSandbox, DialError};
use sandglass_engine::engine::Isolation;
use sandglass_engine::{EngineInfo, Stats};
use sandglass_store::{Event, ListFilter, ListPage, Order, PageCursor, SandboxRow, Team};
use sandglass_types::{Error, ErrorKind, SandboxId, SandboxState, TeamId, Timestamp};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::backend::{Backend, Stream, Upstream};
use crate::e2b::wire::tests::row;

/// The keys of two teams.
pub(crate) const KEY: &str = "e2b_0123456789012345678901234567890123456789";
pub(crate) const OTHER_KEY: &str = "e2b_9999999999999999999999999999999999999999";

/// A template whose sandboxes make the handler panic, one for each kind of failure, or that takes long.
pub(crate) const PANIC: &str = "panic";

pub(crate) struct Fake {
    engine: EngineInfo,
    teams: [Team; 2],
    domain: Option<String>,
    rows: Mutex<Vec<SandboxRow>>,
    idempotent: Mutex<HashMap<String, (sandglass_types::Digest, SandboxId)>>,
    live: Mutex<HashMap<SandboxId, Arc<FakeLive>>>,
}

/// A sandbox whose ports are TCP servers of the test.
pub(crate) struct FakeLive {
    pub(crate) gone: CancellationToken,
    ports: Mutex<HashMap<u16, SocketAddr>>,
}

fn not_found() -> Error {
    Error::new(ErrorKind::NotFound, "sandbox not found")
}

impl Fake {
    pub(crate) fn new() -> Arc<Self> {
        let team = |name: &str| Team {
            id: TeamId::random(),
            name: name.into(),
            created_at: Timestamp::from_millis(0),
            revoked_at: None,
        };
        Arc::new(Self {
            engine: EngineInfo {
                name: "fake".into(),
                version: "1".into(),
                isolation: Isolation::None,
                checkpoint: false,
            },
            teams: [team("one"), team("two")],
            domain: Some("sbx.test".into()),
            rows: Mutex::default(),
            idempotent: Mutex::default(),
            live: Mutex::default(),
        })
    }

    /// Adds a running sandbox that nobody owns, with these ports.
    pub(crate) fn run(&self, ports: &[(u16, SocketAddr)]) -> (SandboxId, Arc<FakeLive>) {
        let id = SandboxId::random();
        let live = Arc::new(FakeLive {
            gone: CancellationToken::new(),
            ports: Mutex::new(ports.iter().copied().collect()),
        });
        self.live.lock().unwrap().insert(id.clone(), live.clone());
        (id, live)
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
}

#[async_trait]
impl Backend for Fake {
    fn engine(&self) -> &EngineInfo {
        &self.engine
    }

    fn domain(&self) -> Option<&str> {
        self.domain.as_deref()
    }

    async fn authenticate(&self, secret: &str) -> Result<Team, Error> {
        match secret {
            KEY => Ok(self.teams[0].clone()),
            OTHER_KEY => Ok(self.teams[1].clone()),
            _ => Err(Error::new(ErrorKind::Unauthenticated, "invalid API key")),
        }
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
            created_at,
            end_at: created_at.plus(request.timeout),
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

    fn live(&self, id: &SandboxId) -> Option<Arc<dyn Upstream>> {
        self.live.lock().unwrap().get(id).map(|live| live.clone() as Arc<dyn Upstream>)
    }
}

#[async_trait]
impl Upstream for FakeLive {
    fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    async fn guest_api(&self) -> Result<Box<dyn Stream>, DialError> {
        self.dial(NonZeroU16::new(49983).unwrap()).await
    }

    async fn dial(&self, port: NonZeroU16) -> Result<Box<dyn Stream>, DialError> {
        let address = self.ports.lock().unwrap().get(&port.get()).copied().ok_or(DialError::Refused)?;
        Ok(Box::new(TcpStream::connect(address).await.map_err(DialError::Unreachable)?))
    }
}
