//! One turn of an agent: its program is started, heard, and ended when the run shall stop.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sandglass_models::Dialect;
use sandglass_store::Source;
use sandglass_types::run::{PROJECT, Web};
use sandglass_types::{Error, StopReason};
use serde_json::json;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::agent::{self, Execution, TurnOf};
use super::lines::Lines;
use super::task::{Inside, Job, Stop};
use crate::command::{Ended, Program, Running, Told, put_file, signal};

/// How long a program may go on that was asked to end.
const GRACE: Duration = Duration::from_secs(5);

/// How long what a worker says may wait to be stored.
const FLUSH: Duration = Duration::from_millis(50);

/// How many events are stored at once.
const BATCH: usize = 64;

impl Job {
    /// Has the agent work. Returns when its turn has ended well.
    pub(super) async fn work_once(
        &mut self,
        inside: &Inside,
        name: &str,
        number: u32,
        prompt: &str,
    ) -> Result<(), Stop> {
        let stop = self.stopper();
        let left = stop.left();
        let dialect = self.dialect();
        let models = inside.models.as_ref().map(|models| (models, dialect));
        let run = self.id.clone();
        let turn = TurnOf { run: &run, name, number, prompt, seconds: left.as_secs().max(1), models };
        let execution = agent::execution(&self.spec, &turn);
        let words: Vec<&str> = execution.words.iter().map(String::as_str).collect();
        let program = Program {
            words: &words,
            env: execution.env.clone(),
            folder: Some(PROJECT),
            // The run's own deadline comes first, and is told better.
            limit: left + 2 * GRACE,
            ..Program::default()
        };
        let Inside { live, row, .. } = inside;
        let started = async {
            put_file(live, row, "root", &execution.file, execution.input.clone().into_bytes()).await?;
            sandglass_failpoint::hit_async("control.run.agent").await.map_err(crate::injected)?;
            Running::start(live, row, &program).await
        };
        let running = tokio::select! {
            started = started => started?,
            reason = stop.stopped() => return Err(Stop::of(reason)),
        };
        let began = Instant::now();
        self.note(Source::Host, "worker.started", self.how(name, number)).await?;
        let heard = self.hear(running, inside, &execution).await;
        let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (ended, stopped) = heard?;
        let code = ended.as_ref().and_then(|ended| ended.code);
        let data = json!({ "exit_code": code, "duration_ms": took, "killed": code.is_none() });
        self.note(Source::Host, "worker.exited", data).await?;
        if let Some(reason) = stopped {
            return Err(Stop::of(reason));
        }
        let Some(reason) = agent::outcome(&self.spec.agent, code) else { return Ok(()) };
        // Whether there was no money is not for the agent to say.
        let spent = self.claim.handle.spent.load(Ordering::Relaxed);
        let reason = match reason {
            _ if spent => StopReason::BudgetExhausted,
            StopReason::BudgetExhausted => StopReason::AgentError,
            other => other,
        };
        let how = code.map_or_else(|| "was killed".to_owned(), |code| format!("ended with code {code}"));
        Err(Stop { reason, detail: format!("the agent {how}") })
    }

    fn how(&self, name: &str, number: u32) -> serde_json::Value {
        json!({
            "agent": self.agent_name(), "name": name, "turn": number, "shell": self.spec.shell, "web": self.spec.web != Web::Off,
        })
    }

    /// Hears a program to its end, or until it was asked to end and its time for that is over.
    async fn hear(
        &mut self,
        mut running: Running,
        inside: &Inside,
        execution: &Execution,
    ) -> Result<(Option<Ended>, Option<StopReason>), Error> {
        let stop = self.stopper();
        let mut lines = Lines::new(execution.speaks, self.worker_events);
        let mut flush = interval(FLUSH);
        flush.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut pid, mut stopping) = (None, None::<(StopReason, Instant)>);
        let mut waiting = Vec::new();
        let ended = loop {
            let grace = stopping.map_or_else(Instant::now, |(_, until)| until);
            tokio::select! {
                told = running.next() => match told {
                    Ok(Some(Told::Began(number))) => pid = Some(number),
                    Ok(Some(Told::Out(bytes))) => lines.output(&bytes, self.now()),
                    Ok(Some(Told::Err(bytes))) => lines.errors(&bytes, self.now()),
                    Ok(None) => break true,
                    Err(_) if stopping.is_some() => break false,
                    Err(error) => return Err(error),
                },
                _ = flush.tick() => {
                    waiting.extend(lines.drain(self.now()));
                    self.note_all(std::mem::take(&mut waiting)).await?;
                    continue;
                }
                reason = stop.stopped(), if stopping.is_none() => {
                    stopping = Some((reason, Instant::now() + GRACE));
                    let Some(pid) = pid else { continue };
                    // It has no more time to be asked than it has to obey.
                    match timeout(GRACE, signal(&inside.live, &inside.row, pid)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => {
                            tracing::debug!(run = %self.id, %error, "the agent could not be asked to end");
                        }
                        Err(_) => tracing::debug!(run = %self.id, "the agent did not hear that it should end"),
                    }
                }
                () = sleep_until(grace), if stopping.is_some() => break false,
            }
            waiting.extend(lines.drain(self.now()));
            if waiting.len() >= BATCH {
                self.note_all(std::mem::take(&mut waiting)).await?;
            }
        };
        lines.end(self.now());
        waiting.extend(lines.drain(self.now()));
        self.worker_events = lines.spent();
        self.note_all(waiting).await?;
        let ended = if ended { Some(running.finish()?) } else { None };
        Ok((ended, stopping.map(|(reason, _)| reason)))
    }

    /// The protocol of the agent.
    fn dialect(&self) -> Dialect {
        match self.spec.agent {
            sandglass_types::run::Agent::Codex => Dialect::Responses,
            _ => Dialect::Messages,
        }
    }
}
