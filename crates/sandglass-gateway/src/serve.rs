//! Connections out of sandboxes, and what is asked on them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use sandglass_egress::proxy::Caller;
use sandglass_models::Dialect;
use sandglass_models::price::Prices;
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
use crate::inlet::{Inlet, NoBody};
use crate::lanes::{Lanes, NoTurn};
use crate::provider::{BadProvider, Sent, Upstream};
use crate::route::{Route, route};
use crate::tables::Tables;

/// How long a client may take for the head of a request.
const HEAD: Duration = Duration::from_secs(10);

/// Most headers of a request, and the buffer for them, in bytes.
const MAX_HEADERS: usize = 100;
const MAX_BUF: usize = 64 << 10;

/// Makes the calls of sandboxes. Clones share everything.
#[derive(Debug, Clone)]
pub struct Gateway(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) upstream: Upstream,
    pub(crate) limits: Limits,
    pub(crate) waits: Waits,
    pub(crate) totals: Arc<Totals>,
    /// Fires when this server ends.
    pub(crate) stop: CancellationToken,
    signer: Signer,
    caps: Caps,
    lanes: Lanes,
    inlet: Inlet,
    tables: Tables,
    tasks: TaskTracker,
}

/// Who asks, as its token says, and whose money it is.
struct Asker {
    claims: Claims,
    row: BudgetRow,
}

impl Gateway {
    /// One that spends what is in this store. Its work is done by `tasks`, and cut short when `stop` fires.
    ///
    /// # Errors
    /// A provider can't be called as it is configured.
    pub fn new(
        config: Config,
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Result<Self, BadProvider> {
        let upstream = Upstream::new(&config)?;
        Ok(Self(Arc::new(Inner {
            store,
            clock,
            upstream,
            limits: config.limits,
            waits: config.waits,
            totals: config.totals,
            stop,
            signer: config.signer,
            caps: config.caps,
            lanes: Lanes::new(config.limits),
            inlet: Inlet::new(),
            tables: Tables::default(),
            tasks,
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
        let sandbox = Arc::new(sandbox);
        let service = service_fn(|request| {
            let (inner, sandbox) = (Arc::clone(&self), Arc::clone(&sandbox));
            async move { Ok::<_, Infallible>(inner.answer(&sandbox, request).await) }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .keep_alive(false)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_BUF)
            .serve_connection(TokioIo::new(stream), service)
            .await;
        if let Err(error) = served {
            tracing::debug!(%sandbox, %error, "a connection for models failed");
        }
        drop(place);
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
        let found = self.store.spender(sandbox).await.map_err(|error| unreadable(&error))?;
        let none = || No::new(Why::Token, "this sandbox may call no models");
        let (grant, row) = found.ok_or_else(none)?;
        let claims = self.signer.open(token, &grant.origin, self.clock.now())?;
        if claims.budget != grant.budget || row.closed_at.is_some() {
            return Err(No::new(Why::Token, "this token's budget is closed"));
        }
        Ok(Asker { claims, row })
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
        let Asker { claims, row } = self.asker(sandbox, &head.headers).await?;
        let turn = self.lanes.enter(&row.id, self.waits.turn).await?;
        let read = self.inlet.read(&head.headers, body, self.waits.body).await?;
        let call =
            Call::parse(dialect, &read.bytes).map_err(|error| No::new(Why::Request, error.to_string()))?;
        drop(read.bytes);
        let prices = self.prices(&row).await?;
        let (name, model) = prices.model(call.model()).ok_or_else(|| unknown(call.model()))?;
        claims.allow(dialect, name)?;
        match self.upstream.speaks(&model.provider, dialect) {
            Some(true) => {}
            Some(false) => {
                let message = format!("the provider of {name} does not speak this protocol");
                return Err(No::new(Why::Model, message));
            }
            None => return Err(No::new(Why::Model, format!("the provider of {name} is not there any more"))),
        }
        let ready = Ready {
            call,
            budget: row.id,
            name: name.to_owned(),
            model: model.clone(),
            headers: headers::out(&head.headers),
            beta: dialect == Dialect::Messages && head.uri.query() == Some("beta=true"),
            room: read.room,
        };
        let (tell, told) = oneshot::channel();
        self.tasks.spawn(Arc::clone(&self).make(ready, turn, tell));
        told.await.map_err(|_| lost())
    }

    /// How long a call would be. It costs nothing, so nothing is set aside.
    async fn count(&self, sandbox: &SandboxId, request: Request<Incoming>) -> Result<Answer, No> {
        let (head, body) = request.into_parts();
        let Asker { claims, row } = self.asker(sandbox, &head.headers).await?;
        let _turn = self.lanes.enter(&row.id, self.waits.turn).await?;
        let read = self.inlet.read(&head.headers, body, self.waits.body).await?;
        let call = Call::parse(Dialect::Messages, &read.bytes)
            .map_err(|error| No::new(Why::Request, error.to_string()))?;
        let prices = self.prices(&row).await?;
        let (name, model) = prices.model(call.model()).ok_or_else(|| unknown(call.model()))?;
        claims.allow(Dialect::Messages, name)?;
        let upstream = model.upstream.as_deref().unwrap_or(name);
        let body = call.into_count(upstream).map_err(|error| No::new(Why::Request, error.to_string()))?;
        let sent = Sent {
            provider: &model.provider,
            dialect: Dialect::Messages,
            path: "/v1/messages/count_tokens",
            headers: headers::out(&head.headers),
            streamed: false,
            body,
        };
        self.pass_count(sent).await
    }

    /// Models that the token may use, with their own names.
    async fn usable(
        &self,
        sandbox: &SandboxId,
        headers: &http::HeaderMap,
    ) -> Result<Vec<(String, String)>, No> {
        let Asker { claims, row } = self.asker(sandbox, headers).await?;
        self.lanes.pass(&row.id)?;
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
