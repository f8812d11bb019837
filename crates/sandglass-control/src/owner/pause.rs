//! Writing a sandbox to an image and letting nothing else of it be, and the way back.
//!
//! A sandbox that is paused has one image, which has its id. It is removed when the sandbox runs again, for it goes on
//! from there. Whatever fails on the way to an image leaves the sandbox running, and on the way back, paused: neither its
//! memory nor its files are given up before the other is complete.

use std::sync::Arc;
use std::time::Duration;

use sandglass_engine::Keep;
use sandglass_engine::host::{Host, HostError, RefusalKind};
use sandglass_store::{Resume, Resumed};
use sandglass_types::budget::Amount;
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, PauseMode, SandboxId, SandboxState};
use tokio::time::{Instant, sleep};
use tokio_util::task::TaskTracker;
use tracing::{Instrument as _, Span};

use super::ahead::{self, Fate, Successor};
use super::auto_pause::Hindrance;
use super::bring_up::Origin;
use super::request::Reply;
use super::{ASKED, Owner, Pauses, Request, answer, in_between};
use crate::admission;
use crate::control::{REMOVAL_CHECK, REMOVAL_PATIENCE};
use crate::lifecycle::{self, Event, Next};
use crate::live::Live;
use crate::room;
use crate::shared::Shared;
use crate::volume_marks;

/// Whom a resume is for, and from what.
type Asker = (Span, Reply, Origin);

/// What `runsc` says of a program that holds a file open that was deleted. Checkpoints of it are refused.
const DELETED: &str = "deleted and invalidated dentries";

/// How often it is tried to store that a sandbox is paused before who asked for it hears of it. The tries go on.
const STORE_TRIES: u32 = 5;

/// That somebody ended a sandbox while its image was written.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Who did, where it could not be stored yet.
    pub(super) unanswered: Option<Reply>,
}

/// How a pause went.
#[derive(Debug)]
pub(super) enum Pausing {
    /// Its image is complete. Who wants to hear when nothing else of it is left.
    Imaged(Vec<Reply>),
    /// It could not be paused, for this reason, and who wanted it knows.
    RunsOn(Hindrance, String),
    /// Somebody ended it meanwhile, and knows that unless it could not be stored.
    Killed(Option<Reply>),
}

impl Owner<'_> {
    /// Writes it to an image, or says why not; then it runs on. Once the image is complete, [`Owner::rest`] ends the rest.
    pub(super) async fn pause(
        &mut self,
        live: &Arc<Live>,
        mode: PauseMode,
        why: &str,
        mut pausers: Vec<Reply>,
    ) -> Pausing {
        let error = match self.write(live, mode, why, &mut pausers).await {
            Ok(None) => return Pausing::Imaged(pausers),
            Ok(Some(Ended { unanswered })) => {
                answer(&mut pausers, Err(Error::new(ErrorKind::Conflict, "the sandbox was ended")));
                return Pausing::Killed(unanswered);
            }
            Err(error) => error,
        };
        self.settle_image_room();
        tracing::warn!(sandbox = %self.row.id, error = %Chain(&error), "it could not be paused, and runs on");
        let reason = Chain(&error).to_string();
        let hindrance = if error.kind() == ErrorKind::Conflict { Hindrance::Own } else { Hindrance::Other };
        answer(&mut pausers, Err(error));
        Pausing::RunsOn(hindrance, reason)
    }

    /// Writes it to an image, unless it is ended meanwhile. After a failure it runs on.
    async fn write(
        &mut self,
        live: &Arc<Live>,
        mode: PauseMode,
        why: &str,
        pausers: &mut Vec<Reply>,
    ) -> Result<Option<Ended>, Error> {
        self.shared.can_pause()?;
        // The image comes on top of what the sandbox has now, until that is gone.
        self.image_room = Some(self.shared.promises.give(Amount::of(&self.row.limits).as_image()));
        // Before anybody can take it for the one that is to come: a server may have died right after a resume.
        self.shared.host.remove_image(&self.row.id).await?;
        if !self.settle_as(Event::Pause, Some(mode), why).await {
            return Err(Error::new(ErrorKind::Internal, "the sandbox could not be stored as paused"));
        }
        // Who comes now finds it paused; who is there already waits, and goes on if it can't be.
        self.shared.live.remove(&self.row.id);
        let writing = write_image(Arc::clone(&self.shared), Arc::clone(live), mode);
        let (outcome, ended) = self.answer_during(writing, pausers).await;
        if ended.is_some() {
            return Ok(ended);
        }
        let Err(error) = outcome else { return Ok(None) };
        self.run_on(&format!("it could not be paused: {}", Chain(&error))).await;
        if let Err(error) = live.thaw().await {
            tracing::warn!(sandbox = %self.row.id, error = %Chain(&error), "its agent does not speak again yet");
        }
        self.shared.live.insert(Arc::clone(live));
        Err(error)
    }

    /// Waits for an image. Who wants the same joins, who wants it to run waits, and who wants it gone does not: what is
    /// under way in the host comes to its end all the same, so that nothing is removed under it.
    async fn answer_during<T>(
        &mut self,
        writing: impl Future<Output = T>,
        pausers: &mut Vec<Reply>,
    ) -> (T, Option<Ended>) {
        let mut writing = std::pin::pin!(writing);
        let mut ended: Option<Ended> = None;
        loop {
            let (span, request) = tokio::select! {
                written = &mut writing => return (written, ended),
                asked = self.requests.recv() => match asked {
                    Some(asked) => asked,
                    // Every handle is gone, so this server stops.
                    None => std::future::pending().await,
                },
            };
            match request {
                Request::Kill(reply) => self.end_during(&mut ended, reply).instrument(span).await,
                request if ended.is_some() => request.refuse(crate::not_found(&self.row.id)),
                Request::Pause { mode, reply, .. } => self.join(mode, reply, pausers),
                resume @ Request::Resume { .. } => self.deferred.push_back((span, resume)),
                request => request.refuse(in_between(&self.row)),
            }
        }
    }

    /// Who wants what is being kept waits for it. Who wants more must not take it for that.
    fn join(&self, mode: PauseMode, reply: Reply, pausers: &mut Vec<Reply>) {
        if mode == PauseMode::Full && self.row.pause_mode == PauseMode::Filesystem {
            let message = "the sandbox is being paused with its files alone, by somebody else or because its \
                           memory could not be kept";
            drop(reply.send(Err(Error::new(ErrorKind::Conflict, message))));
        } else {
            pausers.push(reply);
        }
    }

    /// Ends it while its image is written.
    pub(super) async fn end_during(&mut self, ended: &mut Option<Ended>, reply: Reply) {
        let ended = ended.get_or_insert_default();
        if self.settle(Event::Kill, ASKED).await {
            // Before who asked hears of it, nobody gets in any more.
            self.make_unreachable();
            let _gone = reply.send(Ok(()));
        } else {
            ended.unanswered = Some(reply);
        }
    }

    /// Lets a sandbox run on that was to be paused. Where that can't be done, or can't be stored, it stays `Pausing`, and who
    /// waits for its end tries again.
    pub(super) async fn run_on(&mut self, why: &str) {
        let (host, id) = (self.shared.host.clone(), self.row.id.clone());
        // First, so that it is never taken for what the sandbox was when it ended.
        if !self.remove_image().await {
            return;
        }
        match host.resume(&id).await {
            Ok(()) => {}
            // It was not paused yet, or is gone: who waits for its end finds that.
            Err(HostError::Refused { kind: RefusalKind::WrongState | RefusalKind::NotFound, .. }) => {}
            Err(error) => {
                tracing::error!(sandbox = %id, error = %Chain(&error), "it could not be made to run on");
                return;
            }
        }
        self.settle(Event::Failed, why).await;
    }

    /// Keeps it paused until somebody wants it to run, and says who; or until somebody ends it. It may be on the way here:
    /// `Pausing` with its image complete, which `pausers` wait for, or `Resuming` with no hope of it.
    pub(super) async fn rest(&mut self, mut pausers: Vec<Reply>) -> Option<Asker> {
        self.end_tasks().await;
        self.gone = self.shared.stop.child_token();
        self.tasks = TaskTracker::new();
        let (mut removed, mut pauses, mut failures) = (false, Pauses::new(), 0);
        // Only of one that was paused just now: after a start there may be many that nobody will ask for.
        let mut to_prepare = self.row.state == SandboxState::Pausing;
        let mut successor: Option<Successor> = None;
        // One that must go has its place until nothing of it is there any more.
        let mut lost: Option<Successor> = None;
        loop {
            // What it used is free before anybody counts on that.
            removed = removed || self.destroy().await;
            if removed {
                drop(lost.take());
            }
            match self.row.state {
                SandboxState::Pausing if removed => {
                    let stored = self.settle(Event::Imaged, "its image is complete").await;
                    failures += u32::from(!stored);
                    if failures == STORE_TRIES {
                        let message = "the sandbox is paused, but that could not be stored yet";
                        answer(&mut pausers, Err(Error::new(ErrorKind::Internal, message)));
                    }
                }
                SandboxState::Resuming => {
                    self.settle(Event::Failed, "it could not be resumed, and is as it was").await;
                }
                _ => {}
            }
            let at_rest = removed && self.row.state == SandboxState::Paused;
            if at_rest {
                answer(&mut pausers, Ok(()));
                if std::mem::take(&mut to_prepare) {
                    successor = self.prepare().await;
                }
            }
            let asked = tokio::select! {
                asked = self.next_request() => asked,
                fate = ahead::fate(&mut successor) => {
                    if fate == Fate::Lost {
                        (removed, lost) = (false, successor.take());
                    }
                    continue;
                }
                () = sleep(pauses.next()), if !at_rest => continue,
            };
            let Some((span, request)) = asked else {
                // Every handle is gone, so this server stops.
                return std::future::pending().await;
            };
            match request {
                Request::Kill(reply) => {
                    let stored = self.settle(Event::Kill, ASKED).instrument(span).await;
                    if !stored {
                        ahead::settled(&mut successor).await;
                        self.remove_and_settle(Event::Kill, ASKED, Some(reply)).await;
                        return None;
                    }
                    if self.row.state == SandboxState::Ending {
                        let _gone = reply.send(Ok(()));
                        ahead::settled(&mut successor).await;
                        return None;
                    }
                    // The store knew another state, which is this task's now.
                    drop(reply.send(Err(Error::new(ErrorKind::Conflict, "the sandbox changed: try again"))));
                }
                // Who asked has given up.
                Request::Resume { reply, .. } if reply.is_closed() => {}
                Request::Resume { timeout, mode, why, reply } => {
                    let origin = Origin::of(self.row.pause_mode, mode);
                    // It is good for all that there is in the image, and for nothing else.
                    let made = ahead::settled(&mut successor).await;
                    if made == Some(Fate::Lost) || made.is_some() && !matches!(origin, Origin::Image) {
                        removed = self.destroy().await;
                        lost = successor.take().filter(|_| !removed);
                    }
                    match self.begin_resume(timeout, why, removed).instrument(span.clone()).await {
                        Ok(()) => return Some((span, reply, origin)),
                        Err(error) => drop(reply.send(Err(error))),
                    }
                }
                Request::Pause { mode, reply, .. } if self.row.state == SandboxState::Pausing => {
                    self.join(mode, reply, &mut pausers);
                }
                Request::Pause { reply, .. } => {
                    drop(reply.send(Err(Error::new(ErrorKind::Conflict, "the sandbox is already paused"))));
                }
                Request::Capture { reply, .. } => {
                    let message = "the sandbox was paused just now: resume it first";
                    drop(reply.send(Err(Error::new(ErrorKind::Conflict, message))));
                }
                request => request.refuse(in_between(&self.row)),
            }
        }
    }

    /// Removes what is left of it on the machine, its image apart. `true` once nothing is.
    async fn destroy(&self) -> bool {
        let destroyed = self.shared.host.destroy(&self.row.id).await;
        if let Err(error) = &destroyed {
            tracing::error!(sandbox = %self.row.id, error = %Chain(error), "what it was made of is still there");
        }
        destroyed.is_ok()
    }

    /// Stores that it shall run again, if there is room for it.
    async fn begin_resume(&mut self, timeout: Duration, why: &str, removed: bool) -> Result<(), Error> {
        let next = lifecycle::next(self.row.state, Event::Resume);
        if !removed || !matches!(next, Next::Move(SandboxState::Resuming, _)) {
            let message = "what the sandbox was before its pause is still being removed: try again";
            return Err(Error::new(ErrorKind::Capacity, message));
        }
        let config = &self.shared.config;
        if self.shared.connections.available_permits() == 0 {
            return Err(admission::no_connection(config.budgets.connections));
        }
        let now = self.shared.clock.now();
        let resume = Resume {
            at: now,
            end_at: now.plus(timeout),
            max_end_at: now.plus(config.max_lifetime),
            quota: config.budgets.quota,
            capacity: config.budgets.capacity,
            detail: why.to_owned(),
        };
        sandglass_failpoint::hit_async("control.resume.store").await.map_err(crate::injected)?;
        let deadline = Instant::now() + REMOVAL_PATIENCE;
        self.row = loop {
            match self.shared.store.resume(&self.row.id, &resume).await.map_err(crate::stored)? {
                Resumed::Begun(row) => break *row,
                Resumed::NotPaused => {
                    return Err(Error::new(ErrorKind::Conflict, "the sandbox is not paused: try again"));
                }
                Resumed::OverQuota(excess) => return Err(admission::over_quota(excess)),
                Resumed::OverCapacity { soon: true, .. } if Instant::now() < deadline => {
                    sleep(REMOVAL_CHECK).await;
                }
                Resumed::OverCapacity { excess, .. } => return Err(admission::over_capacity(excess)),
            }
        };
        (self.ends, self.lease) = (Instant::now() + timeout, timeout);
        tracing::info!(sandbox = %self.row.id, generation = self.row.generation.0, "is resumed");
        Ok(())
    }
}

async fn write_image(shared: Arc<Shared>, live: Arc<Live>, mode: PauseMode) -> Result<(), Error> {
    let (host, id) = (&shared.host, live.id());
    room::yield_room(&shared).await?;
    sandglass_failpoint::hit_async("control.pause.freeze").await.map_err(crate::injected)?;
    let in_use = live.freeze(mode).await?;
    sandglass_failpoint::hit_async("control.pause.host").await.map_err(crate::injected)?;
    host.pause(id).await?;
    if mode == PauseMode::Full {
        volume_marks::note(&shared, id, id, &in_use).await?;
    }
    sandglass_failpoint::hit_async("control.pause.image").await.map_err(crate::injected)?;
    let memory = match mode {
        PauseMode::Full => Some(Keep::Flushed),
        PauseMode::Filesystem => None,
    };
    written(&shared, id, id, memory).await.map(drop)
}

/// Writes an image of what stands still, with its memory or without. Where this machine lacks something for it, what was made
/// for nobody makes room first.
pub(super) async fn written(
    shared: &Arc<Shared>,
    id: &SandboxId,
    image: &SandboxId,
    memory: Option<Keep>,
) -> Result<(), Error> {
    match write(&shared.host, id, image, memory).await {
        Err(error)
            if matches!(error.refusal(), Some(RefusalKind::NoRoom(_))) && room::make_room(shared).await =>
        {
            tracing::info!(sandbox = %id, error = %Chain(&error), "made room for its image");
            write(&shared.host, id, image, memory).await.map_err(unwritten)
        }
        written => written.map_err(unwritten),
    }
}

async fn write(
    host: &Host,
    id: &SandboxId,
    image: &SandboxId,
    memory: Option<Keep>,
) -> Result<(), HostError> {
    match memory {
        Some(keep) => host.checkpoint(id, image, keep).await,
        None => host.keep_disk(id, image).await,
    }
}

/// Why no image could be written.
fn unwritten(error: HostError) -> Error {
    match &error {
        HostError::Refused { message, .. } if message.contains(DELETED) => {
            let message = "no image can be made of the sandbox as it is, and it runs on: a program has a file open that \
                 was deleted";
            Error::new(ErrorKind::Conflict, message).because(error)
        }
        _ => Error::from(error),
    }
}
