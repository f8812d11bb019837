//! Connections out of sandboxes, and what is asked on them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use sandglass_egress::proxy::Caller;
use sandglass_models::Dialect;
use sandglass_models::price::{Model, Prices};
use sandglass_models::refusal::Why;
use sandglass_models::request::Call;
use sandglass_models::token::{Claims, Signer};
use sandglass_models::totals::Totals;
use sandglass_store::{BudgetRow, SpendCaps, Store, StoreError};
use sandglass_types::error::Chain;
use sandglass_types::{Clock, SandboxId, TeamId};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::answer::{self, Answer};
use crate::call::{No, Ready, lost};
use crate::config::{Caps, Config, Limits, Waits};
use crate::headers;
use crate::inlet::{Inlet, NoBody, Read};
use crate::lanes::{Lane, Lanes, NoTurn};
use crate::patient::Patient;
use crate::pool::{Part, Pool};
use crate::provider::{BadProvider, Sent, Upstream};
use crate::route::{Route, route};
use crate::tables::Tables;
use crate::witness::Witness;

/// How long a client may take for the head of a request.
const HEAD: Duration = Duration::from_secs(10);

/// Most headers of a request, and the buffer for them, in bytes.
const MAX_HEADERS: usize = 100;
const MAX_BUF: usize = 64 << 10;

/// Bytes of memory that answers may take together while they are heard.
const ANSWERS: u64 = 512 << 20;

/// How much of the body of a call that is refused is heard out, in bytes, and for how long.
const HEARD_OUT: usize = 1 << 20;
const HEARD_OUT_FOR: Duration = Duration::from_secs(1);

/// Sandboxes whose teams are remembered.
const KNOWN: usize = 4096;

/// Makes the calls of sandboxes. Clones share everything.
#[derive(Debug, Clone)]
pub struct Gateway(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) upstream: Upstream,
    pub(crate) witness: Arc<dyn Witness>,
    pub(crate) limits: Limits,
    pub(crate) waits: Waits,
    pub(crate) totals: Arc<Totals>,
    /// Fires when this server ends.
    pub(crate) stop: CancellationToken,
    pub(crate) lanes: Lanes,
    pub(crate) inlet: Inlet,
    /// Memory for answers.
    pub(crate) answers: Arc<Pool>,
    pub(crate) tasks: TaskTracker,
    signer: Signer,
    caps: Caps,
    /// Places for connections.
    connections: Arc<Pool>,
    /// The teams of sandboxes, which they keep.
    teams: Mutex<HashMap<SandboxId, TeamId>>,
    tables: Tables,
}

/// Who asks, as its token says, and whose money it is.
struct Asker {
    claims: Claims,
    row: BudgetRow,
    lane: Arc<Lane>,
}

/// A model, and what it is called here.
struct Priced {
    name: String,
    model: Model,
}

impl Gateway {
    /// One that spends what is in this store, and tells the `witness` of it. Its work is done by `tasks`, and cut short when `stop` fires.
    ///
    /// # Errors
    /// A provider can't be called as it is configured.
    pub fn new(
        config: Config,
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        witness: Arc<dyn Witness>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Result<Self, BadProvider> {
        let upstream = Upstream::new(&config)?;
        Ok(Self(Arc::new(Inner {
            store,
            clock,
            upstream,
            witness,
            limits: config.limits,
            waits: config.waits,
            totals: config.totals,
            stop,
            signer: config.signer,
            caps: config.caps,
            lanes: Lanes::new(config.limits),
            inlet: Inlet::new(),
            answers: Pool::new(ANSWERS),
            tasks,
            connections: Pool::new(u64::try_from(config.limits.together).unwrap_or(u64::MAX)),
            teams: Mutex::default(),
            tables: Tables::default(),
        })))
    }

    /// Serves whoever comes, until nobody can come any more or the server ends.
    pub async fn serve(self, mut callers: mpsc::Receiver<Caller>) {
        let inner = self.0;
        while let Some(Some(caller)) = inner.stop.run_until_cancelled(callers.recv()).await {
            let serving = Arc::clone(&inner).connection(caller);
            inner.tasks.spawn(inner.stop.clone().run_until_cancelled_owned(serving));
        }
    }
}

impl Inner {
    async fn connection(self: Arc<Self>, Caller { sandbox, stream, place }: Caller) {
        let Some(_taken) = self.share(&sandbox).await else {
            tracing::debug!(%sandbox, "its team has its share of connections for models, or it may call none");
            return;
        };
        let sandbox = Arc::new(sandbox);
        let service = service_fn(|request| {
            let (inner, sandbox) = (Arc::clone(&self), Arc::clone(&sandbox));
            async move { Ok::<_, Infallible>(inner.answer(&sandbox, request).await) }
        });
        let waits = &self.waits;
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .keep_alive(false)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_BUF)
            .serve_connection(TokioIo::new(Patient::new(stream, waits.client)), service);
        // All that one request may take. Whoever takes their answer a byte at a time does not have their place for ever.
        let most =
            HEAD + waits.body + waits.turn * 3 + waits.money + waits.provider + waits.call + waits.client;
        match tokio::time::timeout(most, served).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%sandbox, %error, "a connection for models failed"),
            Err(_) => tracing::debug!(%sandbox, "a connection for models took too long"),
        }
        drop(place);
    }

    /// A place of a sandbox's team, if it has one left.
    async fn share(&self, sandbox: &SandboxId) -> Option<Part> {
        let known = || self.teams.lock().unwrap_or_else(PoisonError::into_inner);
        let team = known().get(sandbox).copied();
        let team = match team {
            Some(team) => team,
            None => {
                let found = self.store.spender(sandbox).await;
                let (_, row) = found.inspect_err(|error| drop(unreadable(error))).ok()??;
                let mut known = known();
                if known.len() >= KNOWN {
                    known.clear();
                }
                known.insert(sandbox.clone(), row.team);
                row.team
            }
        };
        self.connections.take(team, 1)
    }

    async fn answer(self: Arc<Self>, sandbox: &SandboxId, request: Request<Incoming>) -> Answer {
        let Some(route) = route(request.method(), request.uri().path()) else {
            let message = "there is no such route here: models are called at /v1/messages, /v1/chat/completions, \
                           /v1/responses and /v1/images/generations";
            return answer::json(StatusCode::NOT_FOUND, &not_found(message));
        };
        let dialect = match &route {
            Route::Call(dialect) => *dialect,
            Route::Count => Dialect::Messages,
            Route::List | Route::Model(_) if speaks_anthropic(&request) => Dialect::Messages,
            Route::List | Route::Model(_) => Dialect::Chat,
        };
        let answered = match route {
            Route::Call(dialect) => Arc::clone(&self).call(sandbox, dialect, request).await,
            Route::Count => self.count(sandbox, request).await,
            Route::List => self.list(sandbox, dialect, &request).await,
            Route::Model(called) => self.model(sandbox, dialect, &request, &called).await,
        };
        answered.unwrap_or_else(|no| self.refuse(dialect, &no))
    }

    /// Who asks. The token must be one of this sandbox's grant, and the grant in force.
    async fn asker(&self, sandbox: &SandboxId, headers: &http::HeaderMap) -> Result<Asker, No> {
        let token = headers::token(headers).ok_or_else(|| {
            No::new(Why::Token, "send the sandbox's token, as x-api-key or as a bearer token")
        })?;
        // Whoever has no token of this server's costs no look into the store, and whoever has one costs few.
        let opened = self.signer.open(token, self.clock.now())?;
        self.lanes.knock(sandbox)?;
        let found = self.store.spender(sandbox).await.map_err(|error| unreadable(&error))?;
        let none = || No::new(Why::Token, "this sandbox may call no models");
        let (grant, row) = found.ok_or_else(none)?;
        let claims = opened.of(&grant.origin)?;
        if claims.budget != grant.budget || row.closed_at.is_some() {
            return Err(No::new(Why::Token, "this token's budget is closed"));
        }
        let lane = self.lanes.pass(&row.id)?;
        Ok(Asker { claims, row, lane })
    }

    /// The same for a request with a body, which is heard out before it is refused: a client that is still sending when its connection
    /// is closed may never read why.
    async fn asker_of(
        &self,
        sandbox: &SandboxId,
        headers: &http::HeaderMap,
        mut body: Incoming,
    ) -> Result<(Asker, Incoming), No> {
        match self.asker(sandbox, headers).await {
            Ok(asker) => Ok((asker, body)),
            Err(no) => {
                let heard = async {
                    let mut left = HEARD_OUT;
                    while let Some(Ok(frame)) = body.frame().await {
                        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
                        if left == 0 {
                            break;
                        }
                    }
                };
                let _longer = tokio::time::timeout(HEARD_OUT_FOR, heard).await;
                Err(no)
            }
        }
    }

    async fn prices(&self, row: &BudgetRow) -> Result<Arc<Prices>, No> {
        let lost = || No::new(Why::Upstream, "the prices of this budget can't be read");
        self.tables.of(&*self.store, row.prices).await.ok_or_else(lost)
    }

    async fn call(
        self: Arc<Self>,
        sandbox: &SandboxId,
        dialect: Dialect,
        request: Request<Incoming>,
    ) -> Result<Answer, No> {
        let (head, body) = request.into_parts();
        let (asker, body) = self.asker_of(sandbox, &head.headers, body).await?;
        let (read, priced) = self.read(&asker, dialect, &head.headers, body).await?;
        let Asker { row, lane, .. } = asker;
        // Not before the body is there: who sends it slowly has nobody's place.
        let turn = self.lanes.enter(lane, row.team, self.waits.turn).await?;
        let ready = Ready {
            call: read.what,
            row,
            name: priced.name,
            model: priced.model,
            headers: headers::out(&head.headers),
            beta: dialect == Dialect::Messages && head.uri.query() == Some("beta=true"),
            length: read.length,
            room: read.room,
        };
        let (tell, told) = oneshot::channel();
        self.tasks.spawn(Arc::clone(&self).make(ready, turn, tell));
        told.await.map_err(|_| lost())
    }

    /// Reads a call, and finds its model: one that the asker may use in this protocol.
    async fn read(
        &self,
        asker: &Asker,
        dialect: Dialect,
        headers: &http::HeaderMap,
        body: Incoming,
    ) -> Result<(Read<Call>, Priced), No> {
        let parse = move |bytes: &[u8]| Call::parse(dialect, bytes);
        let read = self.inlet.read(asker.row.team, headers, body, self.waits.body, parse).await?;
        self.lanes.weigh(&asker.lane, read.length)?;
        let prices = self.prices(&asker.row).await?;
        let called = read.what.model();
        let (name, model) = prices.model(called).ok_or_else(|| unknown(called))?;
        asker.claims.allow(dialect, name)?;
        match self.upstream.speaks(&model.provider, dialect) {
            Some(true) => {}
            Some(false) => {
                let message = format!("the provider of {name} does not speak this protocol");
                return Err(No::new(Why::Model, message));
            }
            None => return Err(No::new(Why::Model, format!("the provider of {name} is not there any more"))),
        }
        let priced = Priced { name: name.to_owned(), model: model.clone() };
        Ok((read, priced))
    }

    /// How long a call would be. It costs nothing, so nothing is set aside.
    async fn count(&self, sandbox: &SandboxId, request: Request<Incoming>) -> Result<Answer, No> {
        let (head, body) = request.into_parts();
        let (asker, body) = self.asker_of(sandbox, &head.headers, body).await?;
        let (read, priced) = self.read(&asker, Dialect::Messages, &head.headers, body).await?;
        let Asker { row, lane, .. } = asker;
        let _turn = self.lanes.enter(lane, row.team, self.waits.turn).await?;
        let Priced { name, model } = priced;
        let Read { what: call, length, room } = read;
        let Model { provider, upstream, .. } = model;
        let write = move || call.into_count(upstream.as_deref().unwrap_or(&name));
        let body = self.inlet.work_on(length, write).await.ok_or_else(lost)?;
        let body = body.map_err(|error| No::new(Why::Request, error.to_string()))?;
        let sent = Sent {
            provider: &provider,
            dialect: Dialect::Messages,
            path: "/v1/messages/count_tokens",
            headers: headers::out(&head.headers),
            streamed: false,
            body,
        };
        let passed = self.pass_count(sent).await;
        drop(room);
        passed
    }

    /// Models that the token may use, with their own names.
    async fn usable(
        &self,
        sandbox: &SandboxId,
        headers: &http::HeaderMap,
    ) -> Result<Vec<(String, String)>, No> {
        let Asker { claims, row, .. } = self.asker(sandbox, headers).await?;
        let prices = self.prices(&row).await?;
        let usable = prices.models().filter(|(name, _)| claims.models.iter().any(|model| model == name));
        Ok(usable.map(|(name, model)| (name.to_owned(), model.provider.clone())).collect())
    }

    async fn list(
        &self,
        sandbox: &SandboxId,
        dialect: Dialect,
        request: &Request<Incoming>,
    ) -> Result<Answer, No> {
        let usable = self.usable(sandbox, request.headers()).await?;
        let data: Vec<_> = usable.iter().map(|(name, owner)| about(dialect, name, owner)).collect();
        let list = if dialect == Dialect::Messages {
            let id = |model: Option<&(String, String)>| model.map(|(name, _)| name.clone());
            json!({"data": data, "has_more": false, "first_id": id(usable.first()), "last_id": id(usable.last())})
        } else {
            json!({"object": "list", "data": data})
        };
        Ok(answer::json(StatusCode::OK, &list))
    }

    async fn model(
        &self,
        sandbox: &SandboxId,
        dialect: Dialect,
        request: &Request<Incoming>,
        called: &str,
    ) -> Result<Answer, No> {
        let usable = self.usable(sandbox, request.headers()).await?;
        let found = usable.iter().find(|(name, _)| name == called).ok_or_else(|| unknown(called))?;
        Ok(answer::json(StatusCode::OK, &about(dialect, &found.0, &found.1)))
    }

    /// The most that a team may spend.
    pub(crate) async fn caps(&self, team: TeamId) -> Result<SpendCaps, StoreError> {
        if self.caps.teams.is_empty() {
            return Ok(self.caps.each);
        }
        let teams = self.store.teams().await?;
        let name = teams.iter().find(|one| one.id == team).map(|one| one.name.as_str());
        let own = name.and_then(|name| self.caps.teams.get(name));
        Ok(own.copied().unwrap_or(self.caps.each))
    }
}

impl From<NoTurn> for No {
    fn from(error: NoTurn) -> Self {
        Self::new(Why::Busy, error.to_string())
    }
}

impl From<NoBody> for No {
    fn from(error: NoBody) -> Self {
        let why = if matches!(error, NoBody::Full) { Why::Busy } else { Why::Request };
        Self::new(why, error.to_string())
    }
}

fn unreadable(error: &StoreError) -> No {
    tracing::error!(error = %Chain(error), "who may call models can't be read");
    No::new(Why::Upstream, "the server's store failed; its log says why")
}

fn unknown(called: &str) -> No {
    let called: String = called.chars().take(100).collect();
    No::new(Why::Model, format!("no model is called '{called}' here, or it has no price"))
}

/// Whether a client of a route that both families have is one of Anthropic's.
fn speaks_anthropic(request: &Request<Incoming>) -> bool {
    request.headers().contains_key("anthropic-version")
}

/// What both families read.
fn not_found(message: &str) -> Value {
    json!({"type": "error", "error": {"type": "not_found_error", "code": "not_found", "message": message, "param": null}})
}

/// A model, as a list has it.
fn about(dialect: Dialect, name: &str, owner: &str) -> Value {
    if dialect == Dialect::Messages {
        json!({"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"})
    } else {
        json!({"id": name, "object": "model", "created": 0, "owned_by": owner})
    }
}
