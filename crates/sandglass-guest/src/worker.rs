//! The agent that every sandbox has: a model, a few tools, and a loop. `guest worker` does one turn of a run.
//!
//! The job comes as JSON on standard input, and what happens goes as lines of JSON to standard output: [`job`] and [`event`] say
//! how both look. The model is reached over plain HTTP at `SANDGLASS_MODEL_URL` with what `SANDGLASS_MODEL_TOKEN` holds, and
//! the machine outside sees to it that this reaches a model and what it costs. It is an ordinary process of an ordinary
//! user: what it says is believed by nobody.

mod command;
mod dialect;
mod event;
mod excerpt;
mod gateway;
mod job;
mod names;
mod sse;
mod talk;
mod tools;
mod turn;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{self, Read as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;

use self::event::Events;
use self::gateway::{Failure, Gateway};
use self::job::{Job, Mode};
use self::turn::Spent;
use crate::log;

/// Where the gateway is.
const URL: &str = "SANDGLASS_MODEL_URL";

/// What it wants to see.
const TOKEN: &str = "SANDGLASS_MODEL_TOKEN";

/// How often it says that it is there.
const BEAT: Duration = Duration::from_secs(10);

/// How a turn ended.
#[derive(Debug)]
enum End {
    /// The model said that it is done.
    Done,
    /// There was no money left for another call.
    Budget(String),
    /// The model gave no answer that could be used.
    Model(String),
    /// The model went on for as many calls as a turn may have.
    Steps,
    /// The time was over.
    Time,
}

impl End {
    /// What the process ends with. 1 is left to crashes, and 4 to jobs that are none.
    const fn code(&self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Budget(_) => 2,
            Self::Model(_) => 3,
            Self::Steps | Self::Time => 5,
        }
    }

    const fn reason(&self) -> &'static str {
        match self {
            Self::Done => "end_turn",
            Self::Budget(_) => "budget_exhausted",
            Self::Model(_) => "model_error",
            Self::Steps => "too_many_steps",
            Self::Time => "timeout",
        }
    }

    fn message(&self) -> Option<&str> {
        match self {
            Self::Budget(message) | Self::Model(message) => Some(message),
            Self::Done | Self::Steps | Self::Time => None,
        }
    }
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Money(message) => Self::Budget(message),
            other => Self::Model(other.to_string()),
        }
    }
}

/// What a job that can't be done ends with.
const BAD_JOB: u8 = 4;

/// Does the job on standard input.
pub(crate) fn main(mut args: impl Iterator<Item = String>) -> ExitCode {
    let job = if args.next().is_some() {
        Err("usage: sandglass-guest worker, with a job on standard input".into())
    } else {
        read()
    };
    let outcome = job.and_then(|(job, gateway)| {
        let runtime = crate::agent::runtime().map_err(|error| format!("no runtime: {error}"))?;
        Ok(runtime.block_on(work(&job, &gateway, &Events::to_stdout())))
    });
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(message) => {
            log::line(&message);
            ExitCode::from(BAD_JOB)
        }
    }
}

fn read() -> Result<(Job, Gateway), String> {
    let mut text = Vec::new();
    let input = io::stdin().lock().take(job::MAX_LEN + 1).read_to_end(&mut text);
    input.map_err(|error| format!("the job can't be read: {error}"))?;
    let job = Job::parse(&text)?;
    let env = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set"));
    let gateway = Gateway::new(&env(URL)?, env(TOKEN)?)?;
    Ok((job, gateway))
}

/// The whole job: the code that the process ends with.
async fn work(job: &Job, gateway: &Gateway, events: &Events) -> u8 {
    let tools = BTreeMap::from([("shell", job.tools.shell), ("web", job.tools.web)]);
    let started = json!({"model": job.model, "dialect": job.dialect, "mode": job.mode, "tools": tools});
    events.say("worker.started", &started);
    events.say("turn.started", &json!({"name": job.turn.name, "number": job.turn.number}));
    let spent = Spent::default();
    let end = tokio::select! {
        end = turn(job, gateway, events, &spent) => end,
        never = beat(events, &spent) => match never {},
        () = tokio::time::sleep(job.time()) => End::Time,
    };
    if let Some(message) = end.message() {
        log::line(message);
    }
    let (name, number) = (&job.turn.name, job.turn.number);
    let mut ended = json!({"name": name, "number": number, "reason": end.reason(), "used": spent.told()});
    if let Some(message) = end.message() {
        ended["message"] = event::clip(message).into();
    }
    events.say("turn.ended", &ended);
    events.say("worker.exited", &json!({"code": end.code()}));
    end.code()
}

async fn turn(job: &Job, gateway: &Gateway, events: &Events, spent: &Spent) -> End {
    match job.mode {
        Mode::Agent => Box::pin(turn::run(job, gateway, events, spent)).await,
        Mode::Command => Box::pin(command::run(job, gateway, events, spent)).await,
    }
}

/// Says again and again that it is there, and what it has used.
async fn beat(events: &Events, spent: &Spent) -> Infallible {
    let started = Instant::now();
    loop {
        tokio::time::sleep(BEAT).await;
        events
            .say("worker.heartbeat", &json!({"seconds": started.elapsed().as_secs(), "used": spent.told()}));
    }
}

#[cfg(test)]
mod tests;
