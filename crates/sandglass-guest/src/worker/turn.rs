//! The loop: the model says what it wants, the tools do it, until it wants nothing more.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use super::End;
use super::dialect::{Answer, Question, Stop};
use super::event::{Events, pieces};
use super::gateway::Gateway;
use super::job::Job;
use super::talk::{Entry, Outcome, Talk};
use super::tools::Tools;
use crate::log;

/// Tools that one answer may use; more are refused one by one.
const MAX_USES: usize = 16;

/// Pieces of what the model says at one time that are told.
const MAX_PIECES: usize = 8;

/// Tokens of the tools and of what the model is told first, or more.
const OVERHEAD: u64 = 2000;

/// What a turn used.
#[derive(Debug, Default)]
pub(super) struct Spent {
    calls: AtomicU64,
    read: AtomicU64,
    cached: AtomicU64,
    written: AtomicU64,
}

impl Spent {
    /// One more call.
    pub(super) fn add(&self, answer: &Answer) {
        let tokens = answer.tokens;
        for (sum, more) in [
            (&self.calls, 1),
            (&self.read, tokens.read),
            (&self.cached, tokens.cached),
            (&self.written, tokens.written),
        ] {
            sum.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// What it comes to, for a person: what is paid is counted elsewhere.
    pub(super) fn told(&self) -> Value {
        let number = |sum: &AtomicU64| sum.load(Ordering::Relaxed);
        json!({
            "calls": number(&self.calls), "input_tokens": number(&self.read),
            "cached_tokens": number(&self.cached), "output_tokens": number(&self.written),
        })
    }
}

/// What the model is told before anything else.
fn system(job: &Job) -> String {
    let commands = if job.tools.shell { "You can run commands." } else { "You can't run commands." };
    let network = if job.tools.web {
        "Of the network, only what the user allowed can be reached."
    } else {
        "There is no network: nothing can be downloaded or installed from elsewhere."
    };
    format!(
        "You do a task alone, in a disposable Linux computer; there is nobody to ask. Its folder is {folder}: only what is in it \
         is kept when you are done. {commands} {network}\n\
         Look at what is there before you change it. Work in small steps with the tools until the task is done, and try out \
         what you made. Then answer without using a tool: say in a few sentences what you did, and plainly what does not work \
         or was not done. The task is not done before that, and cannot be continued after it.",
        folder = job.folder.display(),
    )
}

/// One turn.
pub(super) async fn run(job: &Job, gateway: &Gateway, events: &Events, spent: &Spent) -> End {
    if let Err(error) = fs::create_dir_all(&job.folder) {
        log::line(&format!("{}: {error}", job.folder.display()));
    }
    let mut talk = begin(job);
    let (system, tools) = (system(job), Tools::new(job, events));
    let list = tools.list();
    let most = job.window.saturating_sub(job.max_output + OVERHEAD);
    for _ in 0..job.steps {
        talk.condense(most);
        keep(job, &talk);
        let question = Question {
            model: &job.model,
            system: &system,
            talk: &talk,
            tools: &list,
            max_output: job.max_output,
            plain: false,
        };
        let answer = match gateway.ask(job.dialect, &job.dialect.ask(&question)).await {
            Ok(answer) => answer,
            Err(failure) => return failure.into(),
        };
        spent.add(&answer);
        tell(events, &answer.text);
        let Answer { text, uses, kept, stop, .. } = answer;
        let says_something = !text.trim().is_empty() || !uses.is_empty();
        let wanted = uses.clone();
        if says_something {
            talk.say(Entry::Model { text, uses, kept });
        }
        if stop == Stop::Refusal {
            keep(job, &talk);
            return End::Model("the model refused to go on".into());
        }
        if !wanted.is_empty() {
            let mut outcomes = Vec::new();
            for (at, one) in wanted.iter().enumerate() {
                outcomes.push(if at < MAX_USES {
                    tools.apply(one).await
                } else {
                    Outcome { id: one.id.clone(), text: "too many tools at one time".into(), failed: true }
                });
            }
            talk.say(Entry::Tools { outcomes });
        } else if stop == Stop::Length {
            talk.say(Entry::User {
                text: "Your answer was cut off, because it got too long. Go on, in smaller steps.".into(),
            });
        } else {
            keep(job, &talk);
            return End::Done;
        }
    }
    keep(job, &talk);
    End::Steps
}

/// What was said in turns before, and what the user says now.
fn begin(job: &Job) -> Talk {
    let before = job.history.as_deref().map(|path| Talk::load(path, job.dialect));
    let mut talk = match before {
        Some(Ok(talk)) => talk,
        Some(Err(error)) => {
            log::line(&format!("what was said before is lost: {error}"));
            Talk::new(job.dialect)
        }
        None => Talk::new(job.dialect),
    };
    talk.say(Entry::User { text: job.prompt.clone() });
    talk
}

fn keep(job: &Job, talk: &Talk) {
    if let Some(Err(error)) = job.history.as_deref().map(|path| talk.save(path)) {
        log::line(&format!("what was said can't be kept: {error}"));
    }
}

/// Tells what the model says to the user.
pub(super) fn tell(events: &Events, text: &str) {
    let pieces = pieces(text.trim());
    for piece in pieces.iter().take(MAX_PIECES) {
        events.say("worker.message", &json!({"text": piece, "truncated": pieces.len() > MAX_PIECES}));
    }
}
