//! One call, from the first look at it to its settlement.

use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use sandglass_models::Dialect;
use sandglass_models::answer::Told;
use sandglass_models::plan::{Care, Plan, Unaffordable, plan};
use sandglass_models::price::{Model, Price};
use sandglass_models::refusal::Why;
use sandglass_models::request::Call;
use sandglass_models::token::TokenError;
use sandglass_store::{BudgetRow, Charge, Reservation, Reserved};
use sandglass_types::error::Chain;
use sandglass_types::{BudgetId, CallId, Micros};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::answer::{Answer, Body, no};
use crate::headers;
use crate::inlet::Room;
use crate::lanes::Turn;
use crate::provider::Sent;
use crate::relay::{Relay, WAITING};
use crate::serve::Inner;

/// Longest answer of a provider that is passed on as a whole, in bytes: an error, or a count.
const MAX_SHORT: usize = 64 << 10;

/// How often money is set aside anew because others were faster, where nobody has to be waited for.
const RACES: u32 = 16;

/// The waits between tries to write down what a call came to, in milliseconds.
const SETTLE_AGAIN: [u64; 6] = [0, 50, 200, 1000, 5000, 20_000];

/// Why a call is not made.
#[derive(Debug)]
pub(crate) struct No(pub(crate) Why, pub(crate) String);

impl No {
    pub(crate) fn new(why: Why, message: impl Into<String>) -> Self {
        Self(why, message.into())
    }

    /// Something of this server's does not work.
    fn ours(error: &(dyn std::error::Error + 'static)) -> Self {
        tracing::error!(error = %Chain(error), "a call could not be made");
        Self::new(Why::Upstream, "the server could not make this call; its log says why")
    }
}

impl From<TokenError> for No {
    fn from(error: TokenError) -> Self {
        let why = match error {
            TokenError::Unknown | TokenError::Expired | TokenError::Elsewhere => Why::Token,
            TokenError::Dialect | TokenError::Model => Why::Forbidden,
        };
        Self::new(why, error.to_string())
    }
}

/// A call that may be made, if there is money for it.
pub(crate) struct Ready {
    pub(crate) call: Call,
    pub(crate) budget: BudgetId,
    /// Its own name.
    pub(crate) name: String,
    pub(crate) model: Model,
    /// What the client sent and may go on.
    pub(crate) headers: HeaderMap,
    /// Whether the client asked for a beta of Anthropic's, which is said in the path.
    pub(crate) beta: bool,
    /// The memory that it takes.
    pub(crate) room: Room,
}

/// A call that money is set aside for.
struct Held<'a> {
    inner: &'a Inner,
    id: CallId,
    plan: Plan,
    price: Price,
}

impl Inner {
    /// Makes a call, and tells the client once it is known what. This goes on when nobody listens any more.
    pub(crate) async fn make(self: Arc<Self>, ready: Ready, turn: Turn, tell: oneshot::Sender<Answer>) {
        let dialect = ready.call.dialect();
        let plan = match self.set_aside(&ready, &turn).await {
            Ok((id, plan)) => Held { inner: &self, id, plan, price: ready.model.price },
            Err(no) => {
                let _gone = tell.send(self.refuse(dialect, &no));
                return;
            }
        };
        let _counted = self.totals.begin();
        plan.make(ready, tell).await;
        turn.lane.settled.notify_waiters();
    }

    pub(crate) fn refuse(&self, dialect: Dialect, No(why, message): &No) -> Answer {
        self.totals.refused(*why);
        no(dialect, *why, message)
    }

    /// Sets aside what a call can cost. The one statement of the store decides; what is looked at before only says how much to ask for.
    async fn set_aside(&self, ready: &Ready, turn: &Turn) -> Result<(CallId, Plan), No> {
        let until = Instant::now() + self.waits.turn;
        let mut races = 0;
        loop {
            // Before the look, so that no money that comes back in between is missed.
            let mut settled = pin!(turn.lane.settled.notified());
            settled.as_mut().enable();
            let row = self.store.budget(&ready.budget).await.map_err(|error| No::ours(&error))?;
            let row = row.filter(|row| row.closed_at.is_none()).ok_or_else(closed)?;
            // What was exceeded once is not believed again.
            let care = if row.overrun > Micros::ZERO { Care::Wary } else { Care::Usual };
            let planned = plan(ready.call.facts(), &ready.model.price, care, row.left(), self.limits.output);
            match planned {
                Ok(plan) => match self.reserve(ready, &row, plan).await? {
                    Some(id) => return Ok((id, plan)),
                    None if races < RACES => races += 1,
                    None => return Err(No::new(Why::Busy, "others are faster to spend this budget")),
                },
                Err(unaffordable @ Unaffordable::Budget { .. }) => {
                    // What others have set aside may come back.
                    if row.reserved == Micros::ZERO || timeout_at(until, settled).await.is_err() {
                        return Err(No::new(Why::Budget, unaffordable.to_string()));
                    }
                }
                Err(other) => return Err(No::new(Why::Request, other.to_string())),
            }
        }
    }

    /// What the client hears of a provider's error: its own words if they are of the protocol, without what is nobody's business.
    async fn provider_error(
        &self,
        dialect: Dialect,
        provider: &str,
        status: StatusCode,
        headers: &HeaderMap,
        body: Incoming,
    ) -> Answer {
        tracing::info!(provider, %status, "a provider refused a call");
        if [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN].contains(&status) {
            tracing::error!(provider, %status, "a provider does not take this server's key, or does not let it do this");
            return self.refuse(
                dialect,
                &No::new(Why::Upstream, "the model's provider does not let this server call it"),
            );
        }
        let said = self.read_short(provider, body).await;
        let error = said.filter(|said: &Value| said.get("error").is_some_and(Value::is_object));
        let mut answer = match error {
            Some(said) if status.is_client_error() || status.is_server_error() => {
                crate::answer::json(status, &said)
            }
            _ => {
                let message = format!("the model's provider answered {}", status.as_u16());
                self.refuse(dialect, &No::new(Why::Upstream, message))
            }
        };
        let mut passed = headers::into(headers);
        passed.remove(http::header::CONTENT_TYPE);
        answer.headers_mut().extend(passed);
        answer
    }

    /// A short answer in JSON, without the provider's key.
    async fn read_short(&self, provider: &str, body: Incoming) -> Option<Value> {
        let read = tokio::time::timeout(self.waits.body, Limited::new(body, MAX_SHORT).collect()).await;
        let said = String::from_utf8(read.ok()?.ok()?.to_bytes().into()).ok()?;
        serde_json::from_str(&self.upstream.redact(provider, &said)).ok()
    }

    /// Asks a provider how long a call would be.
    pub(crate) async fn pass_count(&self, sent: Sent<'_>) -> Result<Answer, No> {
        let provider = sent.provider;
        let answer = tokio::time::timeout(self.waits.body, self.upstream.send(sent)).await;
        let Ok(Ok(answer)) = answer else {
            return Err(No::new(Why::Upstream, "the model's provider does not answer"));
        };
        let (head, body) = answer.into_parts();
        if !head.status.is_success() {
            return Ok(self
                .provider_error(Dialect::Messages, provider, head.status, &head.headers, body)
                .await);
        }
        let said = self.read_short(provider, body).await;
        let said = said.ok_or_else(|| No::new(Why::Upstream, "the provider's answer can't be read"))?;
        Ok(crate::answer::json(head.status, &said))
    }

    /// `None` if somebody else was faster.
    async fn reserve(&self, ready: &Ready, row: &BudgetRow, plan: Plan) -> Result<Option<CallId>, No> {
        sandglass_failpoint::hit_async("gateway.call.reserve").await.map_err(|error| No::ours(&error))?;
        let wanted = Reservation {
            call: CallId::random(),
            budget: ready.budget.clone(),
            model: ready.name.clone(),
            amount: plan.reserved,
            at: self.clock.now(),
            caps: self.caps(row.team).await.map_err(|error| No::ours(&error))?,
        };
        match self.store.reserve(&wanted).await.map_err(|error| No::ours(&error))? {
            Reserved::Held => Ok(Some(wanted.call)),
            Reserved::Budget(_) => Ok(None),
            Reserved::Closed => Err(closed()),
            Reserved::Day => Err(No::new(Why::Budget, "the team may spend no more today")),
            Reserved::Month => Err(No::new(Why::Budget, "the team may spend no more this month")),
        }
    }
}

fn closed() -> No {
    No::new(Why::Token, "this token's budget is closed")
}

impl Held<'_> {
    async fn make(self, ready: Ready, tell: oneshot::Sender<Answer>) {
        let inner = self.inner;
        let (dialect, streamed, wants_usage) =
            (ready.call.dialect(), ready.call.is_streamed(), ready.call.wants_usage());
        let facts = *ready.call.facts();
        let provider = ready.model.provider.clone();
        let stripped = ready.call.stripped();
        if !stripped.is_empty() {
            tracing::debug!(call = %self.id, ?stripped, "tools that the provider would run are left out");
        }
        let answer = match self.send(ready).await {
            Ok(answer) => answer,
            Err((no, began)) => {
                if began {
                    self.settle(&facts, &Told::default()).await;
                } else {
                    self.release().await;
                }
                let _gone = tell.send(inner.refuse(dialect, &no));
                return;
            }
        };
        let (head, body) = answer.into_parts();
        if !head.status.is_success() {
            let said = inner.provider_error(dialect, &provider, head.status, &head.headers, body).await;
            self.release().await;
            let _gone = tell.send(said);
            return;
        }
        if head.headers.contains_key(http::header::CONTENT_ENCODING) {
            // It was asked not to: what it says can't be read, so all that it can have cost is charged.
            self.settle(&facts, &Told::default()).await;
            let no = No::new(Why::Upstream, "the provider's answer can't be read");
            let _gone = tell.send(inner.refuse(dialect, &no));
            return;
        }
        let (client, pieces) = mpsc::channel(WAITING);
        let mut response = Response::new(Body::Pieces(pieces));
        *response.status_mut() = head.status;
        *response.headers_mut() = headers::into(&head.headers);
        // Whether anybody hears it or not.
        let _gone = tell.send(response);
        let relay = Relay { waits: &inner.waits, stop: &inner.stop, client: &client };
        let heard = relay.carry(body, dialect, streamed, wants_usage).await;
        // Before the client hears the end: its next call finds the money that came back.
        self.settle(&facts, &heard.told).await;
        let rest = heard.rest.map(Bytes::from);
        if rest.as_ref().map_or(true, |rest| !rest.is_empty()) {
            let _gone = tokio::time::timeout(inner.waits.client, client.send(rest)).await;
        }
    }

    /// Sends it. An error says whether the provider may have begun with it.
    async fn send(&self, ready: Ready) -> Result<Response<Incoming>, (No, bool)> {
        let inner = self.inner;
        let Ready { call, model, name, headers, beta, mut room, .. } = ready;
        let (dialect, streamed) = (call.dialect(), call.is_streamed());
        let upstream = model.upstream.as_deref().unwrap_or(&name);
        let body = call
            .into_upstream(upstream, model.cap, self.plan.output)
            .map_err(|error| (No::ours(&error), false))?;
        room.shrink_to(body.len());
        let path = dialect.path();
        let path = if beta { format!("{path}?beta=true") } else { path.to_owned() };
        let sent = Sent { provider: &model.provider, dialect, path: &path, headers, streamed, body };
        sandglass_failpoint::hit_async("gateway.call.send")
            .await
            .map_err(|error| (No::ours(&error), false))?;
        let answer = tokio::select! {
            answer = tokio::time::timeout(inner.waits.provider, inner.upstream.send(sent)) => answer,
            () = inner.stop.cancelled() => {
                return Err((No::new(Why::Upstream, "the server is stopping"), true));
            }
        };
        match answer {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(None)) => Err((No::new(Why::Model, "this model's provider is not there any more"), false)),
            Ok(Err(Some(error))) => {
                let began = !error.is_connect();
                tracing::warn!(provider = model.provider, error = %Chain(&error), began, "a provider gave no answer");
                Err((No::new(Why::Upstream, "the model's provider does not answer"), began))
            }
            Err(_) => Err((No::new(Why::Upstream, "the model's provider took too long"), true)),
        }
    }

    /// Gives back all that was set aside.
    async fn release(&self) {
        self.inner.totals.released();
        self.charge(Micros::ZERO, false, None).await;
    }

    /// Charges what it came to.
    async fn settle(&self, facts: &sandglass_models::plan::Facts, told: &Told) {
        let settlement = told.settle(facts, &self.plan, &self.price);
        self.inner.totals.settled(&settlement, told.usage.as_ref());
        if settlement.overrun > Micros::ZERO {
            tracing::error!(
                call = %self.id, reserved = %self.plan.reserved, overrun = %settlement.overrun,
                "a provider billed more than a call could cost: the operator pays the rest"
            );
        }
        if told.beyond {
            tracing::error!(
                call = %self.id,
                "a provider says that a call used something that no price is for: the operator pays it"
            );
        }
        let usage = told.usage.and_then(|usage| serde_json::to_string(&usage).ok());
        self.charge(settlement.charged.and(settlement.overrun), settlement.estimated, usage).await;
    }

    async fn charge(&self, cost: Micros, estimated: bool, usage: Option<String>) {
        for wait in SETTLE_AGAIN {
            tokio::time::sleep(std::time::Duration::from_millis(wait)).await;
            let charge =
                Charge { call: self.id, cost, estimated, usage: usage.clone(), at: self.inner.clock.now() };
            let charged = async {
                sandglass_failpoint::hit_async("gateway.call.charge")
                    .await
                    .map_err(|error| error.to_string())?;
                self.inner.store.charge(&charge).await.map_err(|error| Chain(&error).to_string())
            };
            match charged.await {
                Ok(true) => return,
                Ok(false) => {
                    tracing::info!(call = %self.id, "a call's budget was closed before its end, and paid what was set aside");
                    return;
                }
                Err(error) => {
                    tracing::error!(call = %self.id, error, "what a call came to can't be written down");
                }
            }
        }
        // It stays set aside, and is charged as a whole when its budget is closed or the server starts anew.
    }
}

/// What a client hears where the task of its call is gone.
pub(crate) fn lost() -> No {
    No::new(Why::Upstream, "the call was cut off")
}
