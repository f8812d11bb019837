//! The task of a run: it moves it from one status to the next, and stores each move before it goes on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sandglass_egress::policy::{Ingress, Network, Policy, from_e2b};
use sandglass_store::{NewRunEvent, RunChange, SandboxRow, Source};
use sandglass_types::run::{Agent, Prompt, RunEvent, RunSpec, Turn, Web, next};
use sandglass_types::{
    BudgetId, Error, ErrorKind, Lifetime, RunId, RunSandbox, RunStatus, StopReason, TeamId, Timestamp,
};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::{Claim, RUN_LABEL, Stopper, checks, event, inputs, kept};
use crate::Control;
use crate::control::{GrantRequest, GrantedModels, Purse, stored};
use crate::live::Live;
use crate::request::CreateSandbox;

/// How long one step may take that has nothing to wait for. A busy machine is slow.
pub(super) const STEP: Duration = Duration::from_secs(60);

/// How long a run may wait for room on the machine, and for its sandbox.
const PROVISION: Duration = Duration::from_secs(300);

/// The wait between two looks whether there is room.
const ROOM_CHECK: Duration = Duration::from_millis(200);

/// How much longer its sandbox lives than a run may take: what comes before and after that. It ends what nobody else ends.
const MARGIN: Duration = Duration::from_secs(600);

/// Why a run stops, and the same in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stop {
    pub(crate) reason: StopReason,
    pub(crate) detail: String,
}

impl Stop {
    /// One that says it all.
    pub(super) fn of(reason: StopReason) -> Self {
        let detail = match reason {
            StopReason::EndTurn => "its turn has ended",
            StopReason::BudgetExhausted => "its money is spent",
            StopReason::Timeout => "its time was up",
            StopReason::Cancelled => "somebody wanted that",
            StopReason::AgentError => "its agent failed",
            StopReason::ModelError => "its model failed",
            StopReason::SandboxError => "its sandbox failed",
            StopReason::VerificationFailed => "its checks failed",
            StopReason::PolicyViolation => "it did what it must not",
            StopReason::HostRestart => "the server ended while it was on its way",
        };
        Self { reason, detail: detail.to_owned() }
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self { reason: StopReason::SandboxError, detail: error.to_string() }
    }
}

/// The sandbox of a run.
pub(super) struct Inside {
    pub(super) row: SandboxRow,
    pub(super) live: Arc<Live>,
    /// Who works there.
    pub(super) user: String,
    /// What its agent calls models with.
    pub(super) models: Option<GrantedModels>,
}

/// What a run's task has.
pub(crate) struct Job {
    pub(super) control: Control,
    pub(super) claim: Claim,
    pub(super) next: mpsc::Receiver<Turn>,
    pub(super) id: RunId,
    pub(super) team: TeamId,
    pub(super) budget: BudgetId,
    pub(super) spec: RunSpec,
    pub(super) status: RunStatus,
    /// How many turns began.
    pub(super) turns: u32,
    /// How many events its worker has had.
    pub(super) worker_events: u32,
}

impl Job {
    pub(crate) fn new(
        control: Control,
        (claim, next): (Claim, mpsc::Receiver<Turn>),
        id: RunId,
        team: TeamId,
        spec: RunSpec,
    ) -> Self {
        let budget = claim.handle.budget.clone();
        Self {
            control,
            claim,
            next,
            id,
            team,
            budget,
            spec,
            status: RunStatus::Queued,
            turns: 0,
            worker_events: 0,
        }
    }

    /// Does it all. If this server stops meanwhile, the next one ends the run.
    pub(crate) async fn run(mut self, first: Turn) {
        let stopping = self.control.shared().stop.clone();
        let worked = stopping.run_until_cancelled(self.work(first)).await;
        let Some(stop) = worked else { return };
        tracing::info!(run = %self.id, reason = stop.reason.as_str(), detail = stop.detail, "a run stops");
        let ending = self.control.finish_run(&self.id, stop);
        stopping.run_until_cancelled(ending).await;
    }

    pub(super) fn stopper(&self) -> Arc<Stopper> {
        Arc::clone(&self.claim.handle.stop)
    }

    pub(super) fn now(&self) -> Timestamp {
        self.control.shared().clock.now()
    }

    pub(super) const fn agent_name(&self) -> &'static str {
        match self.spec.agent {
            Agent::Builtin => "builtin",
            Agent::Codex => "codex",
            Agent::ClaudeCode => "claude-code",
            Agent::Command(_) => "command",
        }
    }

    async fn work(&mut self, first: Turn) -> Stop {
        match self.turns(first).await {
            Ok(stop) | Err(stop) => stop,
        }
    }

    async fn turns(&mut self, first: Turn) -> Result<Stop, Stop> {
        let stop = self.stopper();
        let booting = [self.event("sandbox.booting", json!({}))];
        self.advance(RunEvent::TakenUp, Some(RunSandbox::Booting), booting.into()).await?;
        let provisioned = tokio::select! {
            inside = timeout(PROVISION, self.provision()) => inside,
            reason = stop.stopped() => return Err(Stop::of(reason)),
        };
        let inside = provisioned.map_err(|_| Stop {
            reason: StopReason::SandboxError,
            detail: format!("its sandbox was not there within {} s", PROVISION.as_secs()),
        })??;
        stop.begin();
        let mut turn = first;
        loop {
            let hold = turn.hold;
            self.turn(&inside, turn).await?;
            if !hold {
                return Ok(Stop::of(StopReason::EndTurn));
            }
            self.advance(RunEvent::Hold, None, vec![self.event("turn.awaited", json!({}))]).await?;
            tokio::select! {
                next = self.next.recv() => match next {
                    Some(next) => turn = next,
                    None => return Ok(Stop::of(StopReason::EndTurn)),
                },
                reason = stop.stopped() => return Err(match reason {
                    // Nothing was cut short.
                    StopReason::Timeout => Stop { reason: StopReason::EndTurn, detail: "no other turn came in its time".into() },
                    reason => Stop::of(reason),
                }),
            }
        }
    }

    /// One turn, with its files, its checks, and its repairs.
    async fn turn(&mut self, inside: &Inside, turn: Turn) -> Result<(), Stop> {
        let Turn { prompt, files, .. } = turn;
        let stop = self.stopper();
        if !files.is_empty() {
            tokio::select! {
                put = inputs::put(&inside.live, &inside.row, &inside.user, files) => put?,
                reason = stop.stopped() => return Err(Stop::of(reason)),
            }
        }
        let name = if self.turns == 0 { "build".to_owned() } else { format!("turn-{}", self.turns + 1) };
        self.attempt(inside, &name, prompt.as_str()).await?;
        let checks = std::mem::take(&mut self.spec.checks);
        let mended = self.mend(inside, &checks, &prompt).await;
        self.spec.checks = checks;
        mended
    }

    /// One time that the agent works.
    async fn attempt(&mut self, inside: &Inside, name: &str, prompt: &str) -> Result<(), Stop> {
        let number = self.turns + 1;
        let about = json!({ "name": name, "number": number });
        let mut events = vec![self.event("turn.started", about.clone())];
        if number == 1 {
            events.insert(0, self.event("run.started", json!({})));
        }
        self.advance(RunEvent::Begin, None, events).await?;
        self.turns = number;
        self.work_once(inside, name, number, prompt).await?;
        self.note(Source::Host, "turn.ended", about).await?;
        Ok(())
    }

    /// Checks what came of a turn, and has the agent mend it.
    async fn mend(
        &mut self,
        inside: &Inside,
        checks: &[sandglass_types::run::Check],
        prompt: &Prompt,
    ) -> Result<(), Stop> {
        let stop = self.stopper();
        let mut repairs = 0;
        while !checks.is_empty() {
            self.advance(RunEvent::Check, None, Vec::new()).await?;
            sandglass_failpoint::hit_async("control.run.verify").await.map_err(crate::injected)?;
            let longest = checks::longest(checks) + STEP;
            let failure = tokio::select! {
                verified = timeout(longest, self.verify(&inside.live, &inside.row, checks)) => {
                    verified.map_err(|_| Stop::of(StopReason::SandboxError))??
                }
                reason = stop.stopped() => return Err(Stop::of(reason)),
            };
            let Some(failure) = failure else {
                self.note(Source::Verifier, "verify.passed", json!({ "repairs": repairs })).await?;
                return Ok(());
            };
            self.note(Source::Verifier, "verify.failed", json!({ "repairs": repairs })).await?;
            if repairs >= self.spec.max_repairs {
                return Err(Stop { reason: StopReason::VerificationFailed, detail: failure.detail() });
            }
            repairs += 1;
            self.attempt(inside, &format!("repair-{repairs}"), &failure.prompt(prompt.as_str())).await?;
        }
        Ok(())
    }

    /// Makes the sandbox, and the folder of the project in it.
    async fn provision(&mut self) -> Result<Inside, Stop> {
        let began = Instant::now();
        let row = loop {
            sandglass_failpoint::hit_async("control.run.create").await.map_err(crate::injected)?;
            match self.control.make_for_run(self.team, self.request()?).await {
                Err(error) if matches!(error.kind(), ErrorKind::Capacity | ErrorKind::Quota) => {
                    sleep(ROOM_CHECK).await;
                }
                made => break made?,
            }
        };
        sandglass_failpoint::hit_async("control.run.ready").await.map_err(crate::injected)?;
        let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let about = json!({
            "sandbox_id": row.id, "start_path": row.start_path.as_str(), "duration_ms": took,
        });
        let ready = RunChange {
            sandbox: Some(RunSandbox::Ready),
            sandbox_id: Some(row.id.clone()),
            events: vec![self.event("sandbox.ready", about)],
            ..RunChange::within(self.status, self.now())
        };
        self.change(&ready).await?;
        let live = self.control.live(&row.id).ok_or_else(|| crate::not_found(&row.id))?;
        let user = self.control.shared().defaults(row.defaults.as_ref(), &row.template)?.user;
        inputs::prepare(&live, &row, &user).await?;
        let models = match &self.spec.model {
            Some(model) => {
                let request = GrantRequest {
                    purse: Purse::Open(self.budget.clone()),
                    models: vec![model.as_str().to_owned()],
                    dialects: Vec::new(),
                    expires: self.now().plus(self.spec.timeout + Duration::from_secs(60)),
                };
                Some(self.control.grant_models(self.team, &row.id, request).await?)
            }
            None => None,
        };
        Ok(Inside { row, live, user, models })
    }

    /// The sandbox that this run asks for.
    fn request(&self) -> Result<CreateSandbox, Error> {
        let lives = (self.spec.timeout + MARGIN).min(self.control.shared().config.max_lifetime);
        Ok(CreateSandbox {
            template: self.spec.template.clone(),
            lifetime: Lifetime { idle: Some(Duration::ZERO), ..Lifetime::of(lives) },
            secured: true,
            metadata: BTreeMap::from([(RUN_LABEL.to_owned(), self.id.to_string())]),
            env: BTreeMap::new(),
            allow_internet_access: Some(self.spec.web != Web::Off),
            policy: policy(&self.spec.web)?,
            ingress: Ingress { public: false, request_host: None },
            volumes: Vec::new(),
            connections: Vec::new(),
            idempotency: None,
        })
    }

    /// An event of the server's about this run, as it may be stored.
    pub(super) fn event(&self, kind: &str, data: Value) -> NewRunEvent {
        kept(self.spec.retention, event(self.now(), Source::Host, kind, data))
    }

    /// Stores one.
    pub(super) async fn note(&self, source: Source, kind: &str, data: Value) -> Result<(), Error> {
        self.note_all(vec![event(self.now(), source, kind, data)]).await
    }

    /// Stores some.
    pub(super) async fn note_all(&self, events: Vec<NewRunEvent>) -> Result<(), Error> {
        if events.is_empty() {
            return Ok(());
        }
        let events: Vec<_> = events.into_iter().map(|event| kept(self.spec.retention, event)).collect();
        self.control.shared().store.note_run(&self.id, &events).await.map_err(stored)?;
        self.claim.handle.news.send_replace(());
        Ok(())
    }

    /// Moves the run by the rule.
    async fn advance(
        &mut self,
        event: RunEvent,
        sandbox: Option<RunSandbox>,
        events: Vec<NewRunEvent>,
    ) -> Result<(), Error> {
        let sandglass_types::run::Next::Move(to, _) = next(self.status, event) else {
            return Err(Error::internal(
                "the run can't go on",
                format!("{event:?} while it is {:?}", self.status),
            ));
        };
        let begins = to == RunStatus::Running;
        let change = RunChange { sandbox, begins, events, ..RunChange::between(self.status, to, self.now()) };
        self.change(&change).await?;
        self.status = to;
        Ok(())
    }

    async fn change(&self, change: &RunChange) -> Result<(), Error> {
        let done = self.control.shared().store.change_run(&self.id, change).await.map_err(stored)?;
        self.claim.handle.news.send_replace(());
        if done {
            return Ok(());
        }
        Err(Error::internal("the run is not where its task left it", format!("{change:?}")))
    }
}

/// What a run asks to reach.
pub(crate) fn policy(web: &Web) -> Result<Policy, Error> {
    let (network, internet) = match web {
        Web::Off => (Network::default(), false),
        Web::On => (Network::default(), true),
        Web::Only(hosts) => {
            let all = Some(vec!["0.0.0.0/0".to_owned()]);
            (Network { allow_out: Some(hosts.clone()), deny_out: all, ..Network::default() }, true)
        }
    };
    from_e2b(&network, Some(internet))
        .map_err(|error| Error::new(ErrorKind::Invalid, format!("web: {error}")))
}
