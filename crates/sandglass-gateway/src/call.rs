//! One call, from the first look at it to its settlement.

mod errors;
mod owed;

use std::pin::pin;
use std::sync::Arc;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, Response};
use hyper::body::Incoming;
use sandglass_broker::redact::Redactor;
use sandglass_models::Dialect;
use sandglass_models::answer::Told;
use sandglass_models::plan::{Care, Facts, Plan, Unaffordable, plan};
use sandglass_models::price::{Model, Price};
use sandglass_models::refusal::Why;
use sandglass_models::request::Call;
use sandglass_models::token::TokenError;
use sandglass_store::{BudgetRow, Reservation, Reserved};
use sandglass_types::error::Chain;
use sandglass_types::{BudgetId, CallId, Micros};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use self::owed::Owed;
use crate::answer::{Answer, Body, Piece, no};
use crate::headers;
use crate::inlet::Room;
use crate::lanes::Turn;
use crate::provider::Sent;
use crate::relay::{self, Relay, WAITING};
use crate::serve::Inner;
use crate::witness::{Answered, Asked};

/// How often money is set aside anew because others were faster, where nobody has to be waited for.
const RACES: u32 = 16;

/// Why a call is not made.
#[derive(Debug)]
pub(crate) struct No {
    why: Why,
    message: String,
    /// Whether it may have cost all that was set aside.
    paid: bool,
}

impl No {
    pub(crate) fn new(why: Why, message: impl Into<String>) -> Self {
        Self { why, message: message.into(), paid: false }
    }

    /// As a client must hear it that would pay once more for asking again.
    fn paid(self) -> Self {
        Self { paid: true, ..self }
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
    /// Who pays.
    pub(crate) row: BudgetRow,
    /// Its own name.
    pub(crate) name: String,
    pub(crate) model: Model,
    /// What the client sent and may go on.
    pub(crate) headers: HeaderMap,
    /// Whether the client asked for a beta of Anthropic's, which is said in the path.
    pub(crate) beta: bool,
    /// How long its body was, in bytes.
    pub(crate) length: usize,
    /// The memory that it takes.
    pub(crate) room: Room,
}

/// A call that money is set aside for.
struct Held<'a> {
    inner: &'a Inner,
    turn: &'a Turn,
    owed: Owed,
    plan: Plan,
    price: Price,
    budget: BudgetId,
}

/// A call that has no answer.
struct Failed {
    no: No,
    /// What it is charged by; `None` if its provider can't have begun with it.
    told: Option<Told>,
}

impl Failed {
    fn before(no: No) -> Self {
        Self { no, told: None }
    }
}

impl Inner {
    /// Makes a call, and tells the client once it is known what. This goes on when nobody listens any more.
    pub(crate) async fn make(self: Arc<Self>, ready: Ready, turn: Turn, mut tell: oneshot::Sender<Answer>) {
        let dialect = ready.call.dialect();
        let held = match self.set_aside(&ready, &turn, &mut tell).await {
            Ok((owed, plan)) => Held {
                inner: &self,
                turn: &turn,
                owed,
                plan,
                price: ready.model.price,
                budget: ready.row.id.clone(),
            },
            Err(no) => {
                if matches!(no.why, Why::Budget) {
                    self.witness.spent(&ready.row.id);
                }
                let _gone = tell.send(self.refuse(dialect, &no));
                return;
            }
        };
        let _counted = self.totals.begin();
        held.make(ready, tell).await;
        turn.lane.settled.notify_waiters();
    }

    pub(crate) fn refuse(&self, dialect: Dialect, refused: &No) -> Answer {
        self.totals.refused(refused.why);
        no(dialect, refused.why, &refused.message, refused.paid)
    }

    /// Sets aside what a call can cost. The one statement of the store decides; what is looked at before only says how much to ask for.
    async fn set_aside(
        self: &Arc<Self>,
        ready: &Ready,
        turn: &Turn,
        tell: &mut oneshot::Sender<Answer>,
    ) -> Result<(Owed, Plan), No> {
        let until = Instant::now() + self.waits.money;
        let mut races = 0;
        loop {
            // Before the look, so that no money that comes back in between is missed.
            let mut settled = pin!(turn.lane.settled.notified());
            settled.as_mut().enable();
            let row = self.store.budget(&ready.row.id).await.map_err(|error| No::ours(&error))?;
            let row = row.filter(|row| row.closed_at.is_none()).ok_or_else(closed)?;
            // What was exceeded once is not believed again.
            let care = if row.overrun > Micros::ZERO { Care::Wary } else { Care::Usual };
            let with = |left| plan(ready.call.facts(), &ready.model.price, care, left, self.limits.output);
            match with(row.left()) {
                Ok(plan) => match self.reserve(ready, &row, plan).await? {
                    Some(owed) => return Ok((owed, plan)),
                    None if races < RACES => races += 1,
                    None => return Err(No::new(Why::Busy, "others are faster to spend this budget")),
                },
                Err(unaffordable @ Unaffordable::Budget { .. }) => {
                    // What others have set aside may come back, nearly all of it. Only if that would not do either, this is the end.
                    if with(row.left().and(row.reserved)).is_err() {
                        return Err(No::new(Why::Budget, unaffordable.to_string()));
                    }
                    let waited = tokio::select! {
                        waited = timeout_at(until, settled) => waited.is_ok(),
                        () = tell.closed() => false,
                    };
                    if !waited {
                        let message = format!("{unaffordable}; other calls have set aside the rest for now");
                        return Err(No::new(Why::Busy, message));
                    }
                }
                Err(other) => return Err(No::new(Why::Request, other.to_string())),
            }
        }
    }

    /// `None` if somebody else was faster.
    async fn reserve(
        self: &Arc<Self>,
        ready: &Ready,
        row: &BudgetRow,
        plan: Plan,
    ) -> Result<Option<Owed>, No> {
        sandglass_failpoint::hit_async("gateway.call.reserve").await.map_err(|error| No::ours(&error))?;
        let wanted = Reservation {
            call: CallId::random(),
            budget: row.id.clone(),
            model: ready.name.clone(),
            amount: plan.reserved,
            at: self.clock.now(),
            caps: self.caps(row.team).await.map_err(|error| No::ours(&error))?,
        };
        // Also if it is not known what became of it: then there is nothing to be paid, and it must not stay set aside.
        let owed = Owed::of(Arc::clone(self), wanted.call);
        match self.store.reserve(&wanted).await.map_err(|error| No::ours(&error))? {
            Reserved::Held => {
                let owed = owed.all_of(plan.reserved);
                let asked = Asked { call: owed.call(), model: &ready.name, reserved: plan.reserved };
                self.witness.asked(&row.id, &asked).await;
                return Ok(Some(owed));
            }
            Reserved::Budget(_) => {
                owed.never();
                return Ok(None);
            }
            Reserved::Closed => Err(closed()),
            Reserved::Day => Err(No::new(Why::Budget, "the team may spend no more today")),
            Reserved::Month => Err(No::new(Why::Budget, "the team may spend no more this month")),
        }
        .inspect_err(|_| owed.never())
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
        let (provider, team, length) = (ready.model.provider.clone(), ready.row.team, ready.length);
        let stripped = ready.call.stripped();
        if !stripped.is_empty() {
            tracing::debug!(call = %self.owed.call(), ?stripped, "tools that the provider would run are left out");
        }
        let answer = match self.send(ready).await {
            Ok(answer) => answer,
            Err(Failed { no, told }) => {
                match told {
                    Some(told) => self.settle(&facts, &told).await,
                    None => self.release().await,
                }
                let _gone = tell.send(inner.refuse(dialect, &no));
                return;
            }
        };
        let (head, body) = answer.into_parts();
        if !head.status.is_success() {
            inner.lanes.in_vain(&self.turn.lane);
            // Before its words are read, which a provider may take its time with.
            self.release().await;
            let said = inner.provider_error(dialect, &provider, head.status, &head.headers, body).await;
            let _gone = tell.send(said);
            return;
        }
        if head.headers.contains_key(CONTENT_ENCODING) {
            // It was asked not to: what it says can't be read, so all that it can have cost is charged.
            self.settle(&facts, &Told::default()).await;
            let no = No::new(Why::Upstream, "the provider's answer can't be read").paid();
            let _gone = tell.send(inner.refuse(dialect, &no));
            return;
        }
        let (client, pieces) = mpsc::channel(WAITING);
        let mut response = Response::new(Body::Pieces(pieces));
        *response.status_mut() = head.status;
        *response.headers_mut() = headers::into(&head.headers);
        // Whether anybody hears it or not.
        let _gone = tell.send(response);
        let relay = Relay {
            waits: &inner.waits,
            stop: &inner.stop,
            redactor: Redactor::new(inner.upstream.search(&provider)),
            inlet: &inner.inlet,
            room: inner.answers.nothing(team),
            most: relay::most(dialect, length, self.plan.output),
        };
        // Some answer as a whole what was asked for piece by piece.
        let streamed = streamed && !is_json(&head.headers);
        let heard = relay.carry(body, client, dialect, streamed, wants_usage).await;
        // Before the client hears the end: its next call finds the money that came back.
        self.settle(&facts, &heard.told).await;
        let Some((client, rest)) = heard.rest else { return };
        let end = async {
            if !rest.is_empty() {
                let _gone = client.send(Piece::Data(rest)).await;
            }
            client.send(Piece::End).await
        };
        let _gone = tokio::time::timeout(inner.waits.client, end).await;
    }

    /// Sends it.
    async fn send(&self, ready: Ready) -> Result<Response<Incoming>, Failed> {
        let inner = self.inner;
        let Ready { call, model, name, mut headers, beta, length, mut room, .. } = ready;
        headers::keep_price(&mut headers, &model.price);
        let (dialect, streamed, output) = (call.dialect(), call.is_streamed(), self.plan.output);
        let Model { provider, upstream, cap, .. } = model;
        let write = move || call.into_upstream(upstream.as_deref().unwrap_or(&name), cap, output);
        let body = inner.inlet.work_on(length, write).await;
        let body = body.ok_or_else(|| Failed::before(lost()))?;
        let body = body.map_err(|error| Failed::before(No::ours(&error)))?;
        room.shrink_to(body.len());
        let path = dialect.path();
        let path = if beta { format!("{path}?beta=true") } else { path.to_owned() };
        let sent = Sent { provider: &provider, dialect, path: &path, headers, streamed, body };
        sandglass_failpoint::hit_async("gateway.call.send")
            .await
            .map_err(|error| Failed::before(No::ours(&error)))?;
        let answer = tokio::select! {
            answer = tokio::time::timeout(inner.waits.provider, inner.upstream.send(sent)) => answer,
            () = inner.stop.cancelled() => {
                let no = No::new(Why::Upstream, "the server is stopping").paid();
                return Err(Failed { no, told: Some(Told::default()) });
            }
        };
        match answer {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(None)) => {
                Err(Failed::before(No::new(Why::Model, "this model's provider is not there any more")))
            }
            Ok(Err(Some(error))) => {
                let began = !error.is_connect();
                tracing::warn!(provider, error = %Chain(&error), began, "a provider gave no answer");
                let no = No::new(Why::Upstream, "the model's provider does not answer");
                Err(match (began, streamed) {
                    (false, _) => Failed::before(no),
                    // What is written piece by piece begins before its first word, and of this there was not even a beginning.
                    (true, true) => Failed { no, told: Some(Told::unheard(true, 0)) },
                    // It may have been written to its end, of which nothing arrived.
                    (true, false) => Failed { no: no.paid(), told: Some(Told::default()) },
                })
            }
            Err(_) => {
                let no = No::new(Why::Upstream, "the model's provider took too long").paid();
                Err(Failed { no, told: Some(Told::default()) })
            }
        }
    }

    /// Gives back all that was set aside.
    async fn release(self) {
        self.inner.totals.released();
        self.pay(Micros::ZERO, Micros::ZERO, false, None).await;
    }

    /// Charges what it came to.
    async fn settle(self, facts: &Facts, told: &Told) {
        let settlement = told.settle(facts, &self.plan, &self.price);
        self.inner.totals.settled(&settlement, told.usage.as_ref());
        if settlement.overrun > Micros::ZERO {
            tracing::error!(
                call = %self.owed.call(), reserved = %self.plan.reserved, overrun = %settlement.overrun,
                "a provider billed more than a call could cost: the operator pays the rest"
            );
        }
        if told.beyond {
            tracing::error!(
                call = %self.owed.call(),
                "a provider says that a call used something that no price is for: the operator pays it"
            );
        }
        let usage = told.usage.and_then(|usage| serde_json::to_string(&usage).ok());
        self.pay(settlement.charged, settlement.overrun, settlement.estimated, usage).await;
    }

    async fn pay(self, charged: Micros, overrun: Micros, estimated: bool, usage: Option<String>) {
        let call = self.owed.call();
        self.owed.pay(charged.and(overrun), estimated, usage.clone()).await;
        let answered = Answered { call, charged, estimated, usage: usage.as_deref() };
        self.inner.witness.answered(&self.budget, &answered).await;
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(http::HeaderValue::as_bytes).unwrap_or_default();
    kind.get(..16).is_some_and(|kind| kind.eq_ignore_ascii_case(b"application/json"))
}

/// What a client hears where the task of its call is gone.
pub(crate) fn lost() -> No {
    No::new(Why::Upstream, "the call was cut off")
}
