//! Runs, as the API calls them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use sandglass_egress::policy::Policy;
use sandglass_models::price::Prices;
use sandglass_store::{
    Artifact, BudgetRow, CallRow, NewBudget, NewRun, RunAdmitted, RunEventRow, RunFilter, RunPage, RunRow,
    SandboxRow, Source,
};
use sandglass_types::error::Chain;
use sandglass_types::run::{Retention, RunSpec, Turn};
use sandglass_types::{BudgetId, Error, ErrorKind, Micros, RunId, RunStatus, StopReason, TeamId};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::{Control, stored};
use crate::request::CreateSandbox;
use crate::runs::{CreateRun, Job, event, globs, kept, policy, stop_for_restart};

/// How much of a sandbox's longest life is left for what comes before and after a run.
const AROUND: Duration = Duration::from_secs(60);

/// How long a run that is out of money may go on, so that its agent can say so.
const SPENT_GRACE: Duration = Duration::from_secs(5);

/// Most events that are told at once.
pub const MAX_RUN_EVENTS: u32 = 1000;

/// A run, with its money.
#[derive(Debug, Clone)]
pub struct RunDetail {
    /// It.
    pub row: RunRow,
    /// Its budget.
    pub budget: BudgetRow,
    /// What that was spent on, oldest first.
    pub calls: Vec<CallRow>,
}

pub(crate) fn not_found_run(id: &RunId) -> Error {
    Error::new(ErrorKind::NotFound, format!("run '{id}' not found"))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

impl Control {
    /// Makes a run, and answers at once. `true` if the same request had made it before.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] with the field, [`ErrorKind::NotFound`] for the template or the model, [`ErrorKind::Unsupported`] for a
    /// model where there are none, [`ErrorKind::Quota`], [`ErrorKind::IdempotencyMismatch`].
    pub async fn create_run(&self, team: TeamId, request: CreateRun) -> Result<(RunRow, bool), Error> {
        let shared = self.shared();
        let CreateRun { spec, turn, idempotency } = request;
        spec.check().and_then(|()| turn.check()).map_err(|error| invalid(error.to_string()))?;
        self.check_run(team, &spec).await?;
        let now = shared.clock.now();
        let id = RunId::random();
        let budget = self.budget_for_run(team, spec.most)?;
        let full = spec.retention == Retention::Full;
        let host = |kind, data| kept(spec.retention, event(now, Source::Host, kind, data));
        let new = NewRun {
            id: id.clone(),
            node: shared.node,
            team,
            spec: spec.kept(),
            prompt: full.then(|| turn.prompt.as_str().to_owned()),
            prompt_bytes: u64::try_from(turn.prompt.as_str().len()).unwrap_or(u64::MAX),
            created_at: now,
            forget_at: now
                .plus(spec.timeout + Duration::from_secs(u64::from(spec.retention_days) * 24 * 3600)),
            idempotency,
            most_under_way: shared.config.runs.under_way,
            events: vec![
                host(
                    "run.queued",
                    json!({ "files": turn.files.len(), "prompt_bytes": turn.prompt.as_str().len() }),
                ),
                host("budget.reserved", json!({ "budget": budget.id, "most_micros": budget.most })),
            ],
            budget,
        };
        // Before the row is there, so that nobody takes it for one without a task.
        let claim = shared.runs.claim(&id, &new.budget.id, spec.timeout);
        let claim = claim.ok_or_else(|| Error::new(ErrorKind::Conflict, "try again"))?;
        sandglass_failpoint::hit_async("control.run.insert").await.map_err(crate::injected)?;
        match shared.store.insert_run(&new).await.map_err(stored)? {
            RunAdmitted::Inserted => {}
            RunAdmitted::Replay(earlier) => return Ok((self.own_run(team, &earlier).await?, true)),
            RunAdmitted::Mismatch => {
                let message = "this idempotency key came with another request before; use a new one";
                return Err(Error::new(ErrorKind::IdempotencyMismatch, message));
            }
            RunAdmitted::TooMany(most) => {
                let message =
                    format!("your team may have {most} runs under way: wait for one to end, or cancel it");
                return Err(Error::new(ErrorKind::Quota, message));
            }
        }
        let row = self.own_run(team, &id).await?;
        let job = Job::new(self.clone(), claim, id, team, spec);
        shared.tasks.spawn(job.run(turn));
        Ok((row, false))
    }

    /// Checks what only this server can say.
    async fn check_run(&self, team: TeamId, spec: &RunSpec) -> Result<(), Error> {
        let config = &self.shared().config;
        let longest = config.max_lifetime.saturating_sub(AROUND);
        if spec.timeout > longest {
            return Err(invalid(format!(
                "timeout_seconds must be at most {} on this server",
                longest.as_secs()
            )));
        }
        let most =
            config.models.as_ref().map_or(config.runs.most, |models| models.most.min(config.runs.most));
        if spec.most > most {
            return Err(invalid(format!("max_cost_micros must be at most {} on this server", most.0)));
        }
        let policy: Policy = policy(&spec.web)?;
        config.egress.effective(&policy, BTreeSet::new())?;
        self.model(team, &spec.template).await?;
        globs(&spec.outputs)?;
        let Some(model) = &spec.model else { return Ok(()) };
        let Some(models) = &config.models else {
            let message = "this server has no models: the operator can configure some in [models]";
            return Err(Error::new(ErrorKind::Unsupported, message));
        };
        if models.prices.model(model.as_str()).is_none() {
            let message = format!("no model is called '{}' here, or it has no price", model.as_str());
            return Err(Error::new(ErrorKind::NotFound, message));
        }
        Ok(())
    }

    fn budget_for_run(&self, team: TeamId, most: Micros) -> Result<NewBudget, Error> {
        let shared = self.shared();
        let none = || {
            let none = Prices::new(BTreeMap::new());
            none.map(|none| none.snapshot())
                .map_err(|error| Error::internal("there is no table of no prices", error))
        };
        let prices =
            shared.config.models.as_ref().map_or_else(none, |models| Ok(models.prices.snapshot()))?;
        let created_at = shared.clock.now();
        Ok(NewBudget { id: BudgetId::random(), team, most, prices, with_sandboxes: false, created_at })
    }

    /// Makes the sandbox of a run.
    pub(crate) async fn make_for_run(
        &self,
        team: TeamId,
        request: CreateSandbox,
    ) -> Result<SandboxRow, Error> {
        let model = self.model(team, &request.template).await?;
        let made = self.make_of(team, request, model, None).await?;
        made.ok_or_else(|| Error::new(ErrorKind::Conflict, "try again"))
    }

    async fn own_run(&self, team: TeamId, id: &RunId) -> Result<RunRow, Error> {
        let row = self.shared().store.run(id).await.map_err(stored)?;
        row.filter(|row| row.team == team).ok_or_else(|| not_found_run(id))
    }

    /// A run of this team.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn run(&self, team: TeamId, id: &RunId) -> Result<RunDetail, Error> {
        let row = self.own_run(team, id).await?;
        let store = &self.shared().store;
        let budget = store.budget(&row.budget).await.map_err(stored)?.ok_or_else(|| not_found_run(id))?;
        let calls = store.calls(&row.budget).await.map_err(stored)?;
        Ok(RunDetail { row, budget, calls })
    }

    /// A page of runs.
    ///
    /// # Errors
    /// The store failed.
    pub async fn runs(&self, filter: RunFilter) -> Result<RunPage, Error> {
        self.shared().store.runs(&filter).await.map_err(stored)
    }

    /// Events of a run of this team with numbers above `after`, at most [`MAX_RUN_EVENTS`]. If there is none yet, it waits so long for
    /// one. And whether the run had ended with the last of them.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn run_events(
        &self,
        team: TeamId,
        id: &RunId,
        after: u64,
        wait: Duration,
    ) -> Result<(Vec<RunEventRow>, bool), Error> {
        let shared = self.shared();
        let looking = async {
            loop {
                // In this order: what comes in between is news.
                let news = shared.runs.get(id).map(|run| run.news.subscribe());
                let row = self.own_run(team, id).await?;
                let events = shared.store.run_events(id, after, MAX_RUN_EVENTS).await.map_err(stored)?;
                let last = events.last().map_or(after, |row| row.seq);
                let over = row.status.is_terminal() && last >= row.last_seq;
                if !events.is_empty() || row.status.is_terminal() {
                    return Ok((events, over));
                }
                match news {
                    // Its task is gone a moment before or after its end is stored.
                    None => sleep(Duration::from_millis(100)).await,
                    Some(mut news) => drop(news.changed().await),
                }
            }
        };
        if wait.is_zero() {
            let row = self.own_run(team, id).await?;
            let events = shared.store.run_events(id, after, MAX_RUN_EVENTS).await.map_err(stored)?;
            let last = events.last().map_or(after, |row| row.seq);
            return Ok((events, row.status.is_terminal() && last >= row.last_seq));
        }
        match timeout(wait, shared.stop.run_until_cancelled(looking)).await {
            Ok(Some(found)) => found,
            Ok(None) => Err(Error::new(ErrorKind::Capacity, "the server is stopping; try again")),
            Err(_) => Ok((Vec::new(), false)),
        }
    }

    /// Wants a run of this team to end. It does so soon; one that has ended is as it was.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn cancel_run(&self, team: TeamId, id: &RunId) -> Result<RunRow, Error> {
        let row = self.own_run(team, id).await?;
        let shared = self.shared();
        let wanted = event(shared.clock.now(), Source::Host, "run.cancel_requested", json!({}));
        shared.store.cancel_run(id, &wanted).await.map_err(stored)?;
        if let Some(run) = shared.runs.get(id) {
            run.stop.stop(StopReason::Cancelled);
            run.news.send_replace(());
        }
        if row.status.is_terminal() { Ok(row) } else { self.own_run(team, id).await }
    }

    /// Brings a run of this team its next turn, if it waits for one.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Invalid`]; [`ErrorKind::Conflict`] if it does not wait.
    pub async fn next_turn(&self, team: TeamId, id: &RunId, turn: Turn) -> Result<RunRow, Error> {
        turn.check().map_err(|error| invalid(error.to_string()))?;
        let row = self.own_run(team, id).await?;
        let busy = || Error::new(ErrorKind::Conflict, "the run does not wait for a turn");
        if row.status != RunStatus::Waiting {
            return Err(busy());
        }
        let run = self.shared().runs.get(id).ok_or_else(busy)?;
        run.turns.try_send(turn).map_err(|_| busy())?;
        self.own_run(team, id).await
    }

    /// What a run of this team left.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn artifacts(&self, team: TeamId, id: &RunId) -> Result<Vec<Artifact>, Error> {
        self.own_run(team, id).await?;
        self.shared().store.artifacts(id).await.map_err(stored)
    }

    /// A piece of the content of something that a run of this team left, from 0 on; `None` after the last.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn artifact_piece(
        &self,
        team: TeamId,
        id: &RunId,
        number: u32,
        piece: u32,
    ) -> Result<Option<Vec<u8>>, Error> {
        self.own_run(team, id).await?;
        self.shared().store.artifact_piece(id, number, piece).await.map_err(stored)
    }

    /// Tells the run that spends a budget of a call of a model, if a run does.
    pub async fn tell_run_of_call(&self, budget: &BudgetId, kind: &str, data: Value) {
        let shared = self.shared();
        let Some((id, run)) = shared.runs.of_budget(budget) else { return };
        let one_less = |left: u32| left.checked_sub(1);
        if run.call_events.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err() {
            return;
        }
        // What it says is of the server's own words, models and numbers.
        let said = event(shared.clock.now(), Source::Gateway, kind, data);
        if let Err(error) = shared.store.note_run(&id, &[said]).await {
            tracing::error!(run = %id, error = %Chain(&error), "a call of a run could not be noted");
        }
        run.news.send_replace(());
    }

    /// Ends the run that spends a budget, if a run does: a call was refused for want of money. Its agent has a moment to say so.
    pub fn money_is_spent(&self, budget: &BudgetId) {
        let shared = self.shared();
        let Some((_, run)) = shared.runs.of_budget(budget) else { return };
        if run.spent.swap(true, Ordering::Relaxed) {
            return;
        }
        let ending = async move {
            sleep(SPENT_GRACE).await;
            run.stop.stop(StopReason::BudgetExhausted);
        };
        shared.tasks.spawn(shared.stop.clone().run_until_cancelled_owned(ending));
    }

    /// Ends the runs that an earlier server left, with what is there of them.
    pub(super) async fn take_up_runs(&self) -> Result<(), Error> {
        let shared = self.shared();
        for row in shared.store.runs_under_way(shared.node).await.map_err(stored)? {
            let Some((claim, _)) = shared.runs.claim(&row.id, &row.budget, Duration::ZERO) else { continue };
            let (control, id, stop) = (self.clone(), row.id, stop_for_restart(row.cancelled_at.is_some()));
            tracing::info!(run = %id, status = row.status.as_str(), "ending a run that an earlier server left");
            let ending = async move {
                control.finish_run(&id, stop).await;
                drop(claim);
            };
            shared.tasks.spawn(shared.stop.clone().run_until_cancelled_owned(ending));
        }
        Ok(())
    }

    /// Removes runs whose time has come. What fails is done the next time.
    pub(super) async fn forget_runs(&self) {
        match self.shared().store.forget_runs(self.shared().clock.now()).await {
            Ok(0) => {}
            Ok(forgotten) => tracing::info!(forgotten, "runs are not kept any longer"),
            Err(error) => tracing::error!(error = %Chain(&error), "runs could not be forgotten"),
        }
    }
}
