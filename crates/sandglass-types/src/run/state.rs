//! Where a run is, and which event leads where. Pure; the task of a run acts on it.
//!
//! ```text
//!            TakenUp                 Begin                  Check
//!   Queued ───────────► Provisioning ─────► Running ◄────────────────► Verifying
//!     │                     │               │  ▲ ▲  Begin (repair)        │
//!     │                     │               │  │ └─────── Begin ──────┐   │
//!     │                     │               │  │         (next turn)  │   │
//!     │                     │               └──┼────────────────► Waiting ◄
//!     │ Stop                │ Stop             │        Hold          │
//!     ▼                     ▼                  ▼ Stop                 ▼ Stop
//!   Finalizing ◄──────────────────────────────────────────────────────┘
//!     │ Settled
//!     ├──► Completed   it stopped since its turn had ended
//!     ├──► Cancelled   somebody wanted that
//!     └──► Failed      whatever else
//! ```
//!
//! The sandbox of a run has a state of its own. A run is settled only when that says that nothing is left of it, or that it can't
//! be removed, and somebody must look.

use serde::{Deserialize, Serialize};

/// Where a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// It is stored, and its money is set aside.
    Queued,
    /// Its sandbox is being made, and its files are put there.
    Provisioning,
    /// Its agent works.
    Running,
    /// Its checks run.
    Verifying,
    /// Its turn has ended, and its sandbox is kept for the next one.
    Waiting,
    /// It has stopped: what it made is collected, its sandbox destroyed, its money settled.
    Finalizing,
    /// It did what was asked, as far as its checks can tell.
    Completed,
    /// It did not.
    Failed,
    /// Somebody wanted it to end.
    Cancelled,
}

impl RunStatus {
    /// All of them, in the order of a life.
    pub const ALL: [Self; 9] = [
        Self::Queued,
        Self::Provisioning,
        Self::Running,
        Self::Verifying,
        Self::Waiting,
        Self::Finalizing,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    /// Whether nothing follows.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// As it is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Provisioning => "provisioning",
            Self::Running => "running",
            Self::Verifying => "verifying",
            Self::Waiting => "waiting",
            Self::Finalizing => "finalizing",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// What [`Self::as_str`] wrote.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.as_str() == text)
    }
}

/// Where the sandbox of a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunSandbox {
    /// There is none yet.
    None,
    /// It is being made.
    Booting,
    /// Commands can run in it.
    Ready,
    /// Its end was decided; what it made is collected before it is removed.
    Destroying,
    /// Nothing of it is left.
    Destroyed,
    /// It could not be removed for a long time. The server goes on trying.
    DestroyFailed,
}

impl RunSandbox {
    /// All of them, in the order of a life.
    pub const ALL: [Self; 6] =
        [Self::None, Self::Booting, Self::Ready, Self::Destroying, Self::Destroyed, Self::DestroyFailed];

    /// Whether a run whose sandbox is there may be settled.
    #[must_use]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::None | Self::Destroyed | Self::DestroyFailed)
    }

    /// Whether the state may become that one. It is stored only if so.
    #[must_use]
    pub const fn leads_to(self, to: Self) -> bool {
        matches!(
            (self, to),
            (Self::None, Self::Booting)
                | (Self::Booting, Self::Ready | Self::Destroying | Self::None)
                | (Self::Ready, Self::Destroying)
                | (Self::Destroying, Self::Destroyed | Self::DestroyFailed)
                | (Self::DestroyFailed, Self::Destroyed)
        )
    }

    /// As it is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Booting => "booting",
            Self::Ready => "ready",
            Self::Destroying => "destroying",
            Self::Destroyed => "destroyed",
            Self::DestroyFailed => "destroy_failed",
        }
    }

    /// What [`Self::as_str`] wrote.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.as_str() == text)
    }
}

/// Why a run stopped. It is said once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// Its agent ended its turn, and its checks passed.
    EndTurn,
    /// Its money is spent.
    BudgetExhausted,
    /// Its time was up.
    Timeout,
    /// Somebody wanted that.
    Cancelled,
    /// Its agent failed.
    AgentError,
    /// Its model failed.
    ModelError,
    /// Its sandbox could not be made, or ended before it.
    SandboxError,
    /// Its checks failed, and no repair is left.
    VerificationFailed,
    /// It did what it must not.
    PolicyViolation,
    /// The server ended while it was on its way.
    HostRestart,
}

impl StopReason {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::EndTurn,
        Self::BudgetExhausted,
        Self::Timeout,
        Self::Cancelled,
        Self::AgentError,
        Self::ModelError,
        Self::SandboxError,
        Self::VerificationFailed,
        Self::PolicyViolation,
        Self::HostRestart,
    ];

    /// As it is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::EndTurn => "end_turn",
            Self::BudgetExhausted => "budget_exhausted",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::AgentError => "agent_error",
            Self::ModelError => "model_error",
            Self::SandboxError => "sandbox_error",
            Self::VerificationFailed => "verification_failed",
            Self::PolicyViolation => "policy_violation",
            Self::HostRestart => "host_restart",
        }
    }

    /// What [`Self::as_str`] wrote.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.as_str() == text)
    }

    /// How a run ends that stopped for this.
    #[must_use]
    pub const fn ends(self) -> Ends {
        match self {
            Self::EndTurn => Ends::Completed,
            Self::Cancelled => Ends::Cancelled,
            _ => Ends::Failed,
        }
    }
}

/// How a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    /// As [`RunStatus::Completed`].
    Completed,
    /// As [`RunStatus::Failed`].
    Failed,
    /// As [`RunStatus::Cancelled`].
    Cancelled,
}

impl From<Ends> for RunStatus {
    fn from(ends: Ends) -> Self {
        match ends {
            Ends::Completed => Self::Completed,
            Ends::Failed => Self::Failed,
            Ends::Cancelled => Self::Cancelled,
        }
    }
}

/// What happened to a run, or is wanted of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEvent {
    /// Its task began.
    TakenUp,
    /// A turn begins: the first, a repair, or one that was waited for.
    Begin,
    /// Its turn has ended, and its checks begin.
    Check,
    /// Its turn has ended, and its sandbox is kept.
    Hold,
    /// It stops.
    Stop(StopReason),
    /// Nothing of its sandbox is left, and its money is settled, for a run that stopped like this.
    Settled(Ends),
}

/// What an event does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The run moves to this status; the reason is there when it stops.
    Move(RunStatus, Option<StopReason>),
    /// Nothing: it came too late.
    Stay,
    /// It can't happen, so whoever sent it is wrong.
    Impossible,
}

/// The rule.
#[must_use]
pub const fn next(status: RunStatus, event: RunEvent) -> Next {
    use RunStatus as S;
    match (status, event) {
        (S::Queued, RunEvent::TakenUp) => Next::Move(S::Provisioning, None),
        (S::Provisioning | S::Verifying | S::Waiting, RunEvent::Begin) => Next::Move(S::Running, None),
        (S::Running, RunEvent::Check) => Next::Move(S::Verifying, None),
        (S::Running | S::Verifying, RunEvent::Hold) => Next::Move(S::Waiting, None),
        (S::Queued | S::Provisioning | S::Running | S::Verifying | S::Waiting, RunEvent::Stop(reason)) => {
            Next::Move(S::Finalizing, Some(reason))
        }
        (S::Finalizing, RunEvent::Settled(ends)) => match ends {
            Ends::Completed => Next::Move(S::Completed, None),
            Ends::Failed => Next::Move(S::Failed, None),
            Ends::Cancelled => Next::Move(S::Cancelled, None),
        },
        (S::Finalizing | S::Completed | S::Failed | S::Cancelled, _) => Next::Stay,
        _ => Next::Impossible,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pair, written out: a change of the rule is a change of this table.
    #[test]
    fn the_table() {
        use Next::{Impossible as No, Stay};
        use RunStatus::{
            Cancelled, Completed, Failed, Finalizing, Provisioning, Running, Verifying, Waiting,
        };
        let to = |status| Next::Move(status, None);
        let stop = Next::Move(Finalizing, Some(StopReason::Timeout));
        #[rustfmt::skip]
        let table = [
            // event                                   Queued             Provisioning  Running        Verifying    Waiting      Finalizing      terminal
            (RunEvent::TakenUp,                       [to(Provisioning),  No,           No,            No,          No,          Stay,           Stay]),
            (RunEvent::Begin,                         [No,                to(Running),  No,            to(Running), to(Running), Stay,           Stay]),
            (RunEvent::Check,                         [No,                No,           to(Verifying), No,          No,          Stay,           Stay]),
            (RunEvent::Hold,                          [No,                No,           to(Waiting),   to(Waiting), No,          Stay,           Stay]),
            (RunEvent::Stop(StopReason::Timeout),     [stop,              stop,         stop,          stop,        stop,        Stay,           Stay]),
            (RunEvent::Settled(Ends::Completed),      [No,                No,           No,            No,          No,          to(Completed),  Stay]),
            (RunEvent::Settled(Ends::Failed),         [No,                No,           No,            No,          No,          to(Failed),     Stay]),
            (RunEvent::Settled(Ends::Cancelled),      [No,                No,           No,            No,          No,          to(Cancelled),  Stay]),
        ];
        for (event, row) in table {
            for status in RunStatus::ALL {
                let column = RunStatus::ALL.iter().position(|one| *one == status).unwrap().min(6);
                assert_eq!(next(status, event), row[column], "{status:?} on {event:?}");
            }
        }
        assert!(
            RunStatus::ALL.iter().all(|status| status.is_terminal() == RunStatus::ALL[6..].contains(status))
        );
    }

    #[test]
    fn a_sandbox_goes_one_way() {
        use RunSandbox::{Booting, DestroyFailed, Destroyed, Destroying, None, Ready};
        let moves = [
            (None, Booting),
            (Booting, None),
            (Booting, Ready),
            (Booting, Destroying),
            (Ready, Destroying),
            (Destroying, Destroyed),
            (Destroying, DestroyFailed),
            (DestroyFailed, Destroyed),
        ];
        for from in RunSandbox::ALL {
            for to in RunSandbox::ALL {
                assert_eq!(from.leads_to(to), moves.contains(&(from, to)), "{from:?} to {to:?}");
            }
        }
        assert!(
            RunSandbox::ALL.iter().all(|one| one.is_over() == [None, Destroyed, DestroyFailed].contains(one))
        );
    }

    #[test]
    fn a_run_ends_as_it_stopped() {
        for reason in StopReason::ALL {
            let ends = match reason {
                StopReason::EndTurn => RunStatus::Completed,
                StopReason::Cancelled => RunStatus::Cancelled,
                _ => RunStatus::Failed,
            };
            assert_eq!(RunStatus::from(reason.ends()), ends);
        }
    }

    #[test]
    fn words_are_those_of_the_wire() {
        for (text, json) in RunStatus::ALL.map(|one| (one.as_str(), serde_json::to_value(one).unwrap())) {
            assert_eq!((json.as_str(), RunStatus::of(text).is_some()), (Some(text), true));
        }
        for (text, json) in RunSandbox::ALL.map(|one| (one.as_str(), serde_json::to_value(one).unwrap())) {
            assert_eq!((json.as_str(), RunSandbox::of(text).is_some()), (Some(text), true));
        }
        for (text, json) in StopReason::ALL.map(|one| (one.as_str(), serde_json::to_value(one).unwrap())) {
            assert_eq!((json.as_str(), StopReason::of(text).is_some()), (Some(text), true));
        }
        assert_eq!(
            (RunStatus::of(""), RunSandbox::of("gone"), StopReason::of("End_turn")),
            (None, None, None)
        );
    }
}
