//! Runs: an agent does one job in a sandbox of its own, and what it made is taken out of that.
//!
//! A run has a task ([`task`]) for as long as this server lives: it makes the sandbox, has the agent work, checks what came of it, and
//! clears up ([`finish`]). What it has done is in the store before it goes on, and prompts and files are in its memory alone; so
//! a run whose server has died is one that the next server ends, with what is there of it.

mod agent;
mod budget;
mod checks;
mod collect;
mod compute;
mod finish;
mod inputs;
mod lines;
mod note;
mod stop;
mod task;
mod turn;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandglass_store::IdempotencyKey;
use sandglass_types::run::{RunSpec, Turn};
use sandglass_types::{BudgetId, Digest, Micros, RunId, StopReason};
use tokio::sync::{mpsc, watch};

pub(crate) use self::collect::{before_it_goes, globs};
pub(crate) use self::note::{event, kept};
pub(crate) use self::stop::Stopper;
pub(crate) use self::task::{Job, policy};

pub use self::budget::COMPUTE;
pub use self::compute::Prices;

/// Why a run stops whose server has died: for that, unless it was to be stopped already.
pub(crate) fn stop_for_restart(cancelled: bool) -> task::Stop {
    task::Stop::of(if cancelled { StopReason::Cancelled } else { StopReason::HostRestart })
}

/// The label of a run's sandbox, with the run's id. Only the server gives it.
pub(crate) const RUN_LABEL: &str = "sandglass.run";

/// How many events a run has of calls of models, at most: an agent may call in a loop.
const MAX_CALL_EVENTS: u32 = 20_000;

/// What an operator decides of runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunsConfig {
    /// What the sandbox of a run costs its budget.
    pub prices: Prices,
    /// The most that one run may cost.
    pub most: Micros,
    /// How many runs of a team may be under way.
    pub under_way: u32,
}

impl Default for RunsConfig {
    fn default() -> Self {
        Self { prices: Prices::default(), most: Micros(100_000_000), under_way: 50 }
    }
}

/// A run that is asked for, parsed but not yet checked against what this server allows.
#[derive(Debug, Clone)]
pub struct CreateRun {
    /// What is asked for.
    pub spec: RunSpec,
    /// Its first turn.
    pub turn: Turn,
    /// The client's key for this request, and a digest of the request.
    pub idempotency: Option<(IdempotencyKey, Digest)>,
}

/// The way to the task of a run.
#[derive(Debug)]
pub(crate) struct Handle {
    /// Whose money it spends.
    pub(crate) budget: BudgetId,
    /// Says that it shall stop.
    pub(crate) stop: Arc<Stopper>,
    /// Brings the next turn, while it waits for one.
    pub(crate) turns: mpsc::Sender<Turn>,
    /// Whether a call of a model was refused for want of money.
    pub(crate) spent: AtomicBool,
    /// How many events it may still have of calls.
    pub(crate) call_events: AtomicU32,
    /// Changes whenever there are new events.
    pub(crate) news: watch::Sender<()>,
}

/// The runs that have a task here.
#[derive(Debug, Default)]
pub(crate) struct Runs(Mutex<HashMap<RunId, Arc<Handle>>>);

impl Runs {
    pub(crate) fn get(&self, id: &RunId) -> Option<Arc<Handle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// The run that spends this budget.
    pub(crate) fn of_budget(&self, budget: &BudgetId) -> Option<(RunId, Arc<Handle>)> {
        let runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        runs.iter().find(|(_, run)| run.budget == *budget).map(|(id, run)| (id.clone(), Arc::clone(run)))
    }

    /// Whoever waits for news of a run looks again.
    pub(crate) fn tell(&self, id: &RunId) {
        if let Some(run) = self.get(id) {
            run.news.send_replace(());
        }
    }

    /// Claims a run for a task; `None` if it has one. With where its next turns come from.
    pub(crate) fn claim(
        self: &Arc<Self>,
        id: &RunId,
        budget: &BudgetId,
        lasts: Duration,
    ) -> Option<(Claim, mpsc::Receiver<Turn>)> {
        let mut runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if runs.contains_key(id) {
            return None;
        }
        let (turns, next) = mpsc::channel(1);
        let handle = Arc::new(Handle {
            budget: budget.clone(),
            stop: Arc::new(Stopper::new(lasts)),
            turns,
            spent: AtomicBool::new(false),
            call_events: AtomicU32::new(MAX_CALL_EVENTS),
            news: watch::Sender::new(()),
        });
        runs.insert(id.clone(), Arc::clone(&handle));
        Some((Claim { runs: Arc::clone(self), id: id.clone(), handle }, next))
    }
}

/// The right to move a run; given back when dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    runs: Arc<Runs>,
    id: RunId,
    pub(crate) handle: Arc<Handle>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.runs.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        // Whoever waits sees that it has ended.
        self.handle.news.send_replace(());
    }
}
