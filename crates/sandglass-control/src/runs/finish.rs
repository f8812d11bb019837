//! The end of a run: its sandbox is destroyed, its money settled, and only then is it over. Each step is done by what the store says,
//! and again if it fails or the server dies.

use std::time::Duration;

use sandglass_store::{Compute, ListFilter, Order, RunChange, RunRow, SandboxRow};
use sandglass_types::error::Chain;
use sandglass_types::run::{Ends, Next, RunEvent, next};
use sandglass_types::{EndReason, Error, ErrorKind, RunId, RunSandbox, RunStatus, SandboxState, StopReason};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::task::Stop;
use super::{RUN_LABEL, compute, event, kept};
use crate::Control;
use crate::control::{not_found_run, stored};

/// How long the sandbox of a run may take to be removed before the run says that it could not be.
const DESTROY: Duration = Duration::from_secs(300);

/// How long is waited for why a sandbox ended that nobody answers for any more.
const WHY: Duration = Duration::from_secs(2);

/// The wait between two looks.
const CHECK: Duration = Duration::from_millis(20);

/// The longest wait between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Control {
    /// Ends a run, however often that takes.
    pub(crate) async fn finish_run(&self, id: &RunId, stop: Stop) {
        let mut pause = CHECK;
        loop {
            match self.try_to_finish(id, &stop).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(run = %id, error = %Chain(&error), "a run could not be ended yet");
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn try_to_finish(&self, id: &RunId, stop: &Stop) -> Result<(), Error> {
        let row = self.run_row(id).await?;
        if row.status.is_terminal() {
            return Ok(());
        }
        let sandbox = self.sandbox_of_run(&row).await?;
        let sandbox = match sandbox {
            Some(found) if stop.reason == StopReason::SandboxError => Some(self.when_it_ends(found).await?),
            other => other,
        };
        let row = if row.status == RunStatus::Finalizing {
            row
        } else {
            self.begin_to_finish(&row, sandbox.as_ref(), stop).await?
        };
        sandglass_failpoint::hit_async("control.run.destroy").await.map_err(crate::injected)?;
        let (over, used) = self.destroy_for_run(&row, sandbox).await?;
        sandglass_failpoint::hit_async("control.run.settle").await.map_err(crate::injected)?;
        let row = self.run_row(id).await?;
        let (budget, compute) = self.settle_run(&row, used).await?;
        sandglass_failpoint::hit_async("control.run.end").await.map_err(crate::injected)?;
        let reason = row.stop_reason.unwrap_or(stop.reason);
        self.end_run(&row, over, reason, compute, &budget).await
    }

    /// The sandbox of a run, if it ever had one: by its id, or by its label where the server died before it stored that.
    async fn sandbox_of_run(&self, row: &RunRow) -> Result<Option<SandboxRow>, Error> {
        let store = &self.shared().store;
        if let Some(id) = &row.sandbox_id {
            return store.sandbox(id).await.map_err(stored);
        }
        let filter = ListFilter {
            team: row.team,
            states: SandboxState::NOT_ENDED.into(),
            metadata: [(RUN_LABEL.to_owned(), row.id.to_string())].into(),
            template: None,
            created_from: None,
            order: Order::Descending,
            after: None,
            limit: 1,
        };
        Ok(store.list(&filter).await.map_err(stored)?.rows.pop())
    }

    /// The same sandbox once it is known why it ended, or after a while.
    async fn when_it_ends(&self, row: SandboxRow) -> Result<SandboxRow, Error> {
        let until = Instant::now() + WHY;
        loop {
            let now = self.shared().store.sandbox(&row.id).await.map_err(stored)?;
            let Some(now) = now else { return Ok(row) };
            if now.end_reason.is_some() || Instant::now() >= until {
                return Ok(now);
            }
            sleep(CHECK).await;
        }
    }

    /// Stores that the run stops, and why.
    async fn begin_to_finish(
        &self,
        row: &RunRow,
        sandbox: Option<&SandboxRow>,
        stop: &Stop,
    ) -> Result<RunRow, Error> {
        let Stop { reason, detail } = told(stop, sandbox.and_then(|row| row.end_reason));
        let Next::Move(to, Some(reason)) = next(row.status, RunEvent::Stop(reason)) else {
            return Err(Error::internal("the run can't stop", format!("it is {:?}", row.status)));
        };
        let now = self.shared().clock.now();
        let noted =
            |kind, data| kept(row.spec.retention, event(now, sandglass_store::Source::Host, kind, data));
        let mut events = Vec::new();
        if reason == StopReason::BudgetExhausted {
            events.push(noted("budget.exhausted", json!({})));
        }
        events.push(noted("run.stopping", json!({ "reason": reason.as_str(), "detail": detail })));
        let there = matches!(row.sandbox, RunSandbox::Booting | RunSandbox::Ready);
        let to_sandbox = if !there {
            None
        } else if sandbox.is_some() || row.sandbox == RunSandbox::Ready {
            events.push(noted("sandbox.destroying", json!({})));
            Some(RunSandbox::Destroying)
        } else {
            Some(RunSandbox::None)
        };
        // What a command wrote may be in it.
        let detail = if row.spec.retention == sandglass_types::run::Retention::Full {
            detail
        } else {
            reason.as_str().to_owned()
        };
        let change = RunChange {
            stop: Some((reason, detail)),
            sandbox: to_sandbox,
            sandbox_id: sandbox.map(|row| row.id.clone()),
            events,
            ..RunChange::between(row.status, to, now)
        };
        self.shared().store.change_run(&row.id, &change).await.map_err(stored)?;
        self.shared().runs.tell(&row.id);
        self.run_row(&row.id).await
    }

    /// Has the sandbox removed, and waits for that. What it made is collected by its owner before anything of it goes.
    async fn destroy_for_run(
        &self,
        row: &RunRow,
        sandbox: Option<SandboxRow>,
    ) -> Result<(RunSandbox, Compute), Error> {
        let Some(sandbox) = sandbox else { return Ok((row.sandbox, Compute::default())) };
        let used = match row.compute {
            Some(used) => used,
            None => self.used_by(&sandbox).await?,
        };
        if row.compute.is_none() {
            let now = self.shared().clock.now();
            let change = RunChange { compute: Some(used), ..RunChange::within(row.status, now) };
            self.shared().store.change_run(&row.id, &change).await.map_err(stored)?;
        }
        let until = Instant::now() + DESTROY;
        loop {
            let now = self.shared().store.sandbox(&sandbox.id).await.map_err(stored)?;
            match now.map_or(SandboxState::Ended, |now| now.state) {
                SandboxState::Ended => return Ok((RunSandbox::Destroyed, used)),
                SandboxState::Ending => {}
                _ => match self.kill(row.team, &sandbox.id).await {
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                    _ => {}
                },
            }
            if Instant::now() >= until {
                tracing::error!(run = %row.id, sandbox = %sandbox.id, "the sandbox of a run is still there; its removal goes on");
                return Ok((RunSandbox::DestroyFailed, used));
            }
            sleep(CHECK).await;
        }
    }

    /// What a sandbox used, as far as that can still be said.
    async fn used_by(&self, sandbox: &SandboxRow) -> Result<Compute, Error> {
        let shared = self.shared();
        let cpu = match shared.host.stats(&sandbox.id).await {
            Ok(stats) => stats.cpu_micros,
            Err(error) => {
                tracing::debug!(sandbox = %sandbox.id, error = %Chain(&error), "it can't be measured any more");
                0
            }
        };
        let events = shared.store.events(&sandbox.id).await.map_err(stored)?;
        let ended = events.iter().find(|event| event.state == SandboxState::Ending).map(|event| event.at);
        let until = ended.unwrap_or_else(|| shared.clock.now());
        Ok(compute::used(cpu, sandbox.limits, until.since(sandbox.created_at)))
    }

    async fn end_run(
        &self,
        row: &RunRow,
        over: RunSandbox,
        reason: StopReason,
        compute: Compute,
        budget: &sandglass_store::BudgetRow,
    ) -> Result<(), Error> {
        let ends: Ends = reason.ends();
        let Next::Move(to, _) = next(row.status, RunEvent::Settled(ends)) else {
            return Err(Error::internal("the run can't end", format!("it is {:?}", row.status)));
        };
        let now = self.shared().clock.now();
        let noted =
            |kind, data| kept(row.spec.retention, event(now, sandglass_store::Source::Host, kind, data));
        let mut events = Vec::new();
        if over != row.sandbox {
            let kind =
                if over == RunSandbox::Destroyed { "sandbox.destroyed" } else { "sandbox.destroy_failed" };
            events.push(noted(kind, json!({})));
        }
        let left = budget.most.without(budget.charged);
        events.push(noted(
            "budget.charged",
            json!({
                "charged_micros": budget.charged, "compute_micros": compute.charged, "cpu_millis": compute.cpu_millis,
                "gib_millis": compute.gib_millis, "overrun_micros": budget.overrun,
            }),
        ));
        events.push(noted("budget.released", json!({ "released_micros": left })));
        let last = format!("run.{}", to.as_str());
        events.push(noted(&last, json!({ "stop_reason": reason.as_str() })));
        let change = RunChange {
            sandbox: (over != row.sandbox).then_some(over),
            compute: Some(compute),
            events,
            ..RunChange::between(row.status, to, now)
        };
        if !self.shared().store.change_run(&row.id, &change).await.map_err(stored)? {
            return Err(Error::internal("the run could not be ended", format!("{change:?}")));
        }
        self.shared().runs.tell(&row.id);
        Ok(())
    }

    async fn run_row(&self, id: &RunId) -> Result<RunRow, Error> {
        self.shared().store.run(id).await.map_err(stored)?.ok_or_else(|| not_found_run(id))
    }
}

/// Why a run stops whose sandbox ended like this.
fn told(stop: &Stop, ended: Option<EndReason>) -> Stop {
    if stop.reason != StopReason::SandboxError {
        return stop.clone();
    }
    let detail = match ended {
        Some(EndReason::OutOfMemory) => "its sandbox was out of memory",
        Some(EndReason::Processes) => "its sandbox had too many processes",
        Some(EndReason::Crashed) => "its sandbox crashed",
        Some(EndReason::Killed) => "somebody ended its sandbox",
        Some(EndReason::Lost) => "its sandbox was lost",
        Some(EndReason::Timeout) => return Stop::of(StopReason::Timeout),
        Some(EndReason::CreateFailed) | None => return stop.clone(),
    };
    Stop { reason: StopReason::SandboxError, detail: detail.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_sandbox_ended_says_more_than_a_stream_that_broke_off() {
        let broken = Stop { reason: StopReason::SandboxError, detail: "the stream ended".into() };
        assert_eq!(told(&broken, None), broken);
        assert!(told(&broken, Some(EndReason::OutOfMemory)).detail.contains("out of memory"));
        assert_eq!(told(&broken, Some(EndReason::Timeout)).reason, StopReason::Timeout);
        let cancelled = Stop::of(StopReason::Cancelled);
        assert_eq!(told(&cancelled, Some(EndReason::Killed)), cancelled);
    }
}
