//! Runs, what happened to them, and what they left.

use sandglass_types::run::RunSpec;
use sandglass_types::{
    BudgetId, Digest, Micros, NodeId, RunId, RunSandbox, RunStatus, SandboxId, StopReason, TeamId, Timestamp,
};
use serde::{Deserialize, Serialize};

use super::{IdempotencyKey, NewBudget, PageCursor};

/// Content of artifacts is kept in pieces of so many bytes.
pub const PIECE: usize = 1 << 20;

/// Who says that something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The server: to be believed.
    Host,
    /// The server, of calls of models: to be believed.
    Gateway,
    /// A program in the sandbox: worth as much as its word.
    Worker,
    /// The server, of checks that it ran.
    Verifier,
}

impl Source {
    /// As it is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gateway => "gateway",
            Self::Worker => "worker",
            Self::Verifier => "verifier",
        }
    }

    /// What [`Self::as_str`] wrote.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        [Self::Host, Self::Gateway, Self::Worker, Self::Verifier].into_iter().find(|one| one.as_str() == text)
    }
}

/// Something that happened to a run, to be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRunEvent {
    /// When.
    pub at: Timestamp,
    /// Who says so.
    pub source: Source,
    /// What.
    pub kind: String,
    /// More of it: a JSON object.
    pub data: serde_json::Value,
}

/// Something that happened to a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunEventRow {
    /// Its number, from 1 on, without gaps.
    pub seq: u64,
    /// It.
    pub event: NewRunEvent,
}

/// A run that is to be stored, as [`RunStatus::Queued`].
#[derive(Debug, Clone)]
pub struct NewRun {
    /// Fresh id.
    pub id: RunId,
    /// The machine that it is for.
    pub node: NodeId,
    /// Whose it is.
    pub team: TeamId,
    /// Its money, which is opened with it.
    pub budget: NewBudget,
    /// What of it may be kept.
    pub spec: RunSpec,
    /// What its agent shall do, if that may be kept.
    pub prompt: Option<String>,
    /// How long that is.
    pub prompt_bytes: u64,
    /// When.
    pub created_at: Timestamp,
    /// When nothing of it is to be left.
    pub forget_at: Timestamp,
    /// The client's key for this request, and a digest of the request.
    pub idempotency: Option<(IdempotencyKey, Digest)>,
    /// How many runs the team may have that have not ended, with this one.
    pub most_under_way: u32,
    /// Its first events.
    pub events: Vec<NewRunEvent>,
}

/// What became of a [`NewRun`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunAdmitted {
    /// It is there.
    Inserted,
    /// The same request came before and made this one.
    Replay(RunId),
    /// Another request came before under this key.
    Mismatch,
    /// The team has so many that have not ended, and may have no more.
    TooMany(u32),
}

/// What the sandbox of a run came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Compute {
    /// Time of processors, in milliseconds.
    pub cpu_millis: u64,
    /// Memory over time: thousandths of a GiB for a second.
    pub gib_millis: u64,
    /// What of that was charged.
    pub charged: Micros,
}

/// A run as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRow {
    /// Which one.
    pub id: RunId,
    /// The machine that it is for.
    pub node: NodeId,
    /// Whose it is.
    pub team: TeamId,
    /// Where it is.
    pub status: RunStatus,
    /// Where its sandbox is.
    pub sandbox: RunSandbox,
    /// Which one that is.
    pub sandbox_id: Option<SandboxId>,
    /// Why it stopped.
    pub stop_reason: Option<StopReason>,
    /// The same in words.
    pub detail: Option<String>,
    /// Its money.
    pub budget: BudgetId,
    /// What was asked for, as far as it is kept.
    pub spec: RunSpec,
    /// What its agent was to do, if that is kept.
    pub prompt: Option<String>,
    /// How long that was, in bytes.
    pub prompt_bytes: u64,
    /// How many turns began.
    pub turns: u32,
    /// What its sandbox came to, once that is known.
    pub compute: Option<Compute>,
    /// The number of its last event.
    pub last_seq: u64,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When its agent first began.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// When somebody first wanted it to end.
    pub cancelled_at: Option<Timestamp>,
    /// When what it left was collected, or given up.
    pub collected_at: Option<Timestamp>,
}

/// A change of a run, with the events that tell of it.
#[derive(Debug, Clone)]
pub struct RunChange {
    /// The status in which it is made, and in no other.
    pub from: RunStatus,
    /// The status that follows; it may be the same.
    pub to: RunStatus,
    /// When.
    pub at: Timestamp,
    /// Why it stops, and the same in words.
    pub stop: Option<(StopReason, String)>,
    /// Where its sandbox is from now on, which follows where it is now.
    pub sandbox: Option<RunSandbox>,
    /// Which sandbox that is.
    pub sandbox_id: Option<SandboxId>,
    /// Whether a turn begins.
    pub begins: bool,
    /// What its sandbox came to.
    pub compute: Option<Compute>,
    /// Whether what it left is collected, or given up.
    pub collected: bool,
    /// What happened.
    pub events: Vec<NewRunEvent>,
}

impl RunChange {
    /// One that leaves the status as it is.
    #[must_use]
    pub const fn within(status: RunStatus, at: Timestamp) -> Self {
        Self::between(status, status, at)
    }

    /// One that moves the run.
    #[must_use]
    pub const fn between(from: RunStatus, to: RunStatus, at: Timestamp) -> Self {
        Self {
            from,
            to,
            at,
            stop: None,
            sandbox: None,
            sandbox_id: None,
            begins: false,
            compute: None,
            collected: false,
            events: Vec::new(),
        }
    }
}

/// Which runs to list, newest first.
#[derive(Debug, Clone)]
pub struct RunFilter {
    /// Of this team.
    pub team: TeamId,
    /// In one of these; none is in any.
    pub statuses: Vec<RunStatus>,
    /// After this one.
    pub after: Option<PageCursor<RunId>>,
    /// At most so many, 1 to 100.
    pub limit: u32,
}

/// A page of runs.
#[derive(Debug, Clone)]
pub struct RunPage {
    /// They.
    pub rows: Vec<RunRow>,
    /// Where the next page starts, if there is one.
    pub next: Option<PageCursor<RunId>>,
}

/// Something that a run left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Artifact {
    /// Its number in the run, from 1 on.
    pub number: u32,
    /// Where it was, below the project's folder; `None` if that is not kept.
    pub path: Option<String>,
    /// Its permission bits.
    pub mode: u32,
    /// Its size, in bytes.
    pub size: u64,
    /// What is in it; `None` if that is not kept.
    pub sha256: Option<Digest>,
}
