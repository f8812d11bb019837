//! What others may want of a sandbox, and the way to its owner.

use std::time::Duration;

use sandglass_egress::policy::Policy;
use sandglass_store::{ModelGrant, Money};
use sandglass_types::{Error, PauseMode, ResumeMode, SandboxId, SnapshotId, Timestamp};
use tokio::sync::{mpsc, oneshot};
use tracing::Span;

use super::capture::{Captured, Wanted};

/// Who asks, and hears when it is done.
pub(crate) type Reply<T = ()> = oneshot::Sender<Result<T, Error>>;

/// What others want of the sandbox, and the span of who asks: what is done for it is logged there.
pub(crate) type Asked = (Span, Request);

/// What others want of the sandbox.
#[derive(Debug)]
pub(crate) enum Request {
    /// End it. Answered when its end is stored.
    Kill(Reply),
    /// Write it to an image and end its processes. Answered when it is paused, or runs on.
    Pause {
        /// What is kept.
        mode: PauseMode,
        /// Who asks.
        reply: Reply,
    },
    /// Write it to an image, and let it run on. Answered when it does.
    Capture {
        /// Whose image it will be.
        image: SnapshotId,
        /// What it must be.
        wanted: Wanted,
        /// Who asks.
        reply: Reply<Captured>,
    },
    /// Let it run again, if it is paused. Answered when it can be reached.
    Resume {
        /// How long it may run from now on.
        timeout: Duration,
        /// From what.
        mode: ResumeMode,
        /// What its history says of it.
        why: &'static str,
        /// Who asks.
        reply: Reply,
    },
    /// Move its end. Answered with the end in force.
    SetEnd {
        /// The wanted end.
        end_at: Timestamp,
        /// Never move it forward in time.
        only_later: bool,
        /// Who asks.
        reply: Reply<Timestamp>,
    },
    /// Replace what it asks to reach. Answered when that is in force.
    SetPolicy {
        /// All that it asks for from now on.
        policy: Policy,
        /// As the client said.
        allow_internet_access: Option<bool>,
        /// Who asks.
        reply: Reply,
    },
    /// Let it call models. Answered when it can.
    GrantModels {
        /// With whose money.
        money: Money,
        /// Who asks.
        reply: Reply<ModelGrant>,
    },
}

impl Request {
    /// Whether it is for a sandbox that runs, and for no other.
    pub(crate) const fn needs_it_running(&self) -> bool {
        matches!(self, Self::SetEnd { .. } | Self::SetPolicy { .. } | Self::GrantModels { .. })
    }

    /// Answers that it is not done.
    pub(crate) fn refuse(self, why: Error) {
        match self {
            Self::Kill(reply)
            | Self::Pause { reply, .. }
            | Self::Resume { reply, .. }
            | Self::SetPolicy { reply, .. } => {
                drop(reply.send(Err(why)));
            }
            Self::SetEnd { reply, .. } => drop(reply.send(Err(why))),
            Self::Capture { reply, .. } => drop(reply.send(Err(why))),
            Self::GrantModels { reply, .. } => drop(reply.send(Err(why))),
        }
    }
}

/// The way to an owner task.
#[derive(Debug, Clone)]
pub(crate) struct Handle(mpsc::Sender<Asked>);

impl Handle {
    /// A handle, and the other end for the task. At most 16 requests wait; one more waits for a place.
    pub(crate) fn new() -> (Self, mpsc::Receiver<Asked>) {
        let (sender, receiver) = mpsc::channel(16);
        (Self(sender), receiver)
    }

    async fn ask<T>(&self, id: &SandboxId, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.0.send((Span::current(), request(reply))).await.map_err(|_| crate::not_found(id))?;
        answer.await.map_err(|_| crate::not_found(id))?
    }

    pub(crate) async fn kill(&self, id: &SandboxId) -> Result<(), Error> {
        self.ask(id, Request::Kill).await
    }

    pub(crate) async fn pause(&self, id: &SandboxId, mode: PauseMode) -> Result<(), Error> {
        self.ask(id, |reply| Request::Pause { mode, reply }).await
    }

    pub(crate) async fn capture(
        &self,
        id: &SandboxId,
        image: &SnapshotId,
        wanted: Wanted,
    ) -> Result<Captured, Error> {
        self.ask(id, |reply| Request::Capture { image: image.clone(), wanted, reply }).await
    }

    pub(crate) async fn resume(
        &self,
        id: &SandboxId,
        timeout: Duration,
        mode: ResumeMode,
        why: &'static str,
    ) -> Result<(), Error> {
        self.ask(id, |reply| Request::Resume { timeout, mode, why, reply }).await
    }

    pub(crate) async fn set_policy(
        &self,
        id: &SandboxId,
        policy: Policy,
        allow_internet_access: Option<bool>,
    ) -> Result<(), Error> {
        self.ask(id, |reply| Request::SetPolicy { policy, allow_internet_access, reply }).await
    }

    pub(crate) async fn grant_models(&self, id: &SandboxId, money: Money) -> Result<ModelGrant, Error> {
        self.ask(id, |reply| Request::GrantModels { money, reply }).await
    }

    pub(crate) async fn set_end(
        &self,
        id: &SandboxId,
        end_at: Timestamp,
        only_later: bool,
    ) -> Result<Timestamp, Error> {
        self.ask(id, |reply| Request::SetEnd { end_at, only_later, reply }).await
    }
}
