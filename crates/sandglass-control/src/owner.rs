//! The task that owns one sandbox: it alone moves it through its states.
//!
//! Everything that happens to a sandbox meets here: what clients want, the wall clock, the end of its processes.
//! Each step is stored before it is acted on, so the task may die at any moment: the reconciler starts another
//! one that takes up what the store says. An end that can't be stored is the exception: it comes true all the same.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use sandglass_egress::enforcer::Enforcer;
use sandglass_egress::policy::Policy;
use sandglass_engine::Exit;
use sandglass_engine::engine::Pace;
use sandglass_engine::host::HostError;
use sandglass_store::{ModelGrant, Money, SandboxRow, Transition};
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, PauseMode, SandboxState};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument as _, Span};

use self::auto_pause::Tries;
pub(crate) use self::bring_up::Origin;
use self::bring_up::{CameUp, Means, bring_up, exit_of, keep_deadline};
pub(crate) use self::capture::{Captured, Wanted};
use self::lease::budget;
use self::pause::{Ended, Pausing};
use self::request::Reply;
pub(crate) use self::request::{Asked, Handle, Request};
pub(crate) use self::unused::make_unused;
use self::window::Window;
use crate::egress;
use crate::governor;
use crate::lifecycle::{self, Event, Next};
use crate::live::Live;
use crate::room::Promise;
use crate::shared::Shared;

mod ahead;
mod auto_pause;
mod bring_up;
mod capture;
mod end;
mod idle;
mod lease;
mod pause;
mod request;
mod unused;
mod window;

/// The waits between tries of something that must succeed in the end: each is twice as long as the one before.
#[derive(Debug)]
struct Pauses(Duration);

impl Pauses {
    const FIRST: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(10);

    const fn new() -> Self {
        Self(Self::FIRST)
    }

    fn next(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(Self::LONGEST);
        pause
    }
}

/// What the history says of what a client wanted.
pub(crate) const ASKED: &str = "a client asked for it";

/// The part of its time that one from an image may lose while it comes up.
const NEGLIGIBLE: u32 = 100;

/// How long the end of a sandbox's processes may be known after the end of its session.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

/// How long the tasks of a sandbox that is gone may take to end.
const TASKS_PATIENCE: Duration = Duration::from_secs(10);

/// Where the task begins.
#[derive(Debug)]
pub(crate) enum Begin {
    /// Make it of this, in the span of who asks. The answer is sent when it runs, or can't.
    Create(Span, Reply, Origin),
    /// It can't be made, for this reason.
    Fail(String),
    /// It runs already: a server before this one made it. The answer is sent when it can be reached again, or can't.
    Adopt(Reply),
    /// It is paused, or was being paused or resumed when an earlier server ended, and nothing of it runs.
    Rest,
    /// Its end is due. What to store of it, if it has not begun.
    End(Event),
}

pub(crate) struct Owner<'a> {
    shared: Arc<Shared>,
    row: SandboxRow,
    requests: &'a mut mpsc::Receiver<Asked>,
    /// Requests that could not be answered when they came, oldest first.
    deferred: VecDeque<Asked>,
    /// Fires when it can't be reached any more, or when this server stops.
    gone: CancellationToken,
    /// The tasks that serve it until then.
    tasks: TaskTracker,
    /// When its time is up by a clock that nobody sets: a wall clock that is set back must not give it more.
    ends: Instant,
    /// How long it may run once it is made from an image.
    lease: Duration,
    /// Whether its processes may be stopped for an image, and must run on.
    stopped: bool,
    /// The room of its image, until it is paused, or runs on.
    image_room: Option<Promise>,
    /// Set once it is being brought up, if its engine has airlocks.
    enforcer: Option<Arc<Enforcer>>,
}

impl<'a> Owner<'a> {
    pub(crate) fn new(shared: Arc<Shared>, row: SandboxRow, requests: &'a mut mpsc::Receiver<Asked>) -> Self {
        let gone = shared.stop.child_token();
        let ends = Instant::now() + budget(&row, shared.clock.now());
        let lease = row.end_at.since(row.created_at);
        Self {
            shared,
            row,
            requests,
            deferred: VecDeque::new(),
            gone,
            tasks: TaskTracker::new(),
            ends,
            lease,
            stopped: false,
            image_room: None,
            enforcer: None,
        }
    }

    /// The next request; `None` when every handle is gone, which is when this server stops.
    async fn next_request(&mut self) -> Option<Asked> {
        match self.deferred.pop_front() {
            Some(asked) => Some(asked),
            None => self.requests.recv().await,
        }
    }

    /// How much time it has left.
    fn left(&self) -> Duration {
        let by_the_wall = self.row.end_at.since(self.shared.clock.now());
        by_the_wall.min(self.ends.saturating_duration_since(Instant::now()))
    }

    /// Owns the sandbox until nothing of it is left, or this server stops.
    pub(crate) async fn run(mut self, begin: Begin) {
        let stop = self.shared.stop.clone();
        // A stopping server leaves the sandbox as it is; the next one takes it up.
        let _stopped = stop.run_until_cancelled(self.live_and_end(begin)).await;
        self.end_tasks().await;
    }

    /// Makes it unreachable, and waits for what served it, so that the next who does finds what it wrote.
    async fn end_tasks(&mut self) {
        self.make_unreachable();
        self.enforcer = None;
        self.shared.enforcers.remove(&self.row.id);
        self.tasks.close();
        if timeout(TASKS_PATIENCE, self.tasks.wait()).await.is_err() {
            tracing::error!(sandbox = %self.row.id, "tasks that served it go on, though it is gone");
        }
    }

    /// In this order: a client whose connection breaks must find the sandbox gone when it asks again.
    fn make_unreachable(&self) {
        self.shared.live.remove(&self.row.id);
        self.gone.cancel();
    }

    async fn live_and_end(&mut self, begin: Begin) {
        let (mut event, mut reason) = (Event::Missing, None);
        let mut life = match begin {
            Begin::Create(span, reply, origin) => self.live(origin, span, reply).await,
            Begin::Adopt(reply) => {
                if self.row.state == SandboxState::Pausing {
                    self.run_on("the server ended while it was being paused").await;
                }
                // The server may have ended while an image of it was made.
                self.stopped = self.row.state == SandboxState::Running;
                self.go_on(None).await;
                self.live(Origin::Found, Span::current(), reply).await
            }
            Begin::Fail(why) => {
                (event, reason) = (Event::Failed, Some(why));
                Life::Ends
            }
            Begin::Rest => Life::Rests(Vec::new()),
            Begin::End(due) => {
                event = due;
                Life::Ends
            }
        };
        while let Life::Rests(pausers) = life {
            life = match self.rest(pausers).await {
                Some((span, reply, origin)) => self.live(origin, span, reply).await,
                None => Life::Ends,
            };
        }
        let lives =
            matches!(self.row.state, SandboxState::Creating | SandboxState::Running | SandboxState::Pausing);
        // Also the way of a half-made one that a crashed server left behind.
        if lives || event == Event::Kill {
            let why = reason.as_deref().unwrap_or(match (self.row.state, event) {
                (_, Event::Kill) => "a template was being built in it when the server ended",
                (SandboxState::Creating, _) => {
                    "its creation was interrupted: the server or its client went away"
                }
                (_, Event::TimeUp) => "its time was up while no server ran",
                _ => "its processes were gone when the server looked",
            });
            if !self.settle(event, why).await {
                self.remove_and_settle(event, why, None).await;
            }
        }
        self.end().await;
    }

    /// Brings it up, and keeps it until its end is stored, or until it is to rest.
    async fn live(&mut self, origin: Origin, span: Span, asker: Reply) -> Life {
        let mut askers = vec![asker];
        let mut killed_in = Span::current();
        if self.shared.airlocks().is_some() {
            let enforcer = egress::enforcer(&self.shared, &self.row, &self.tasks).await;
            let folder = self.shared.config.egress.receipts.join(self.row.id.as_str());
            let remembering = egress::remember(Arc::clone(&enforcer), folder, self.gone.clone());
            self.tasks.spawn(remembering);
            self.shared.enforcers.insert(&enforcer);
            self.enforcer = Some(enforcer);
        }
        if matches!(origin, Origin::Found) {
            keep_deadline(&self.shared.host, &self.row, self.ends).await;
        }
        let means = Means {
            shared: Arc::clone(&self.shared),
            row: self.row.clone(),
            ends: self.ends,
            enforcer: self.enforcer.clone(),
            gone: self.gone.clone(),
            tasks: self.tasks.clone(),
        };
        let (of_image, resumed) = (origin.is_of_image(), origin.is_resumed());
        let coming_up = bring_up(means, origin).instrument(span.clone());
        let mut coming_up = Some(Box::pin(coming_up));
        let (mut exited, mut cut_off, mut killer) = (None, None, None);
        let patience = self.shared.config.patience;
        let listen = |live: Arc<Live>| Box::pin(async move { live.cut_off(patience).await });
        let (on_timeout, mut tries) = (self.row.lifetime.on_timeout.pause(), Tries::default());
        // Once it can be reached.
        let mut live: Option<Arc<Live>> = None;
        let mut window: Option<Window> = None;
        let (event, why) = loop {
            // The time of one that is resumed, or is a copy, begins when it runs. One that is to be paused must run first.
            let resuming = resumed && coming_up.is_some();
            let must_come_up = (of_image || on_timeout.is_some()) && coming_up.is_some();
            let mut left = if must_come_up { Duration::MAX } else { self.left() };
            let mut cause = "its time is up".to_owned();
            if let (Some(window), Some(live)) = (&mut window, &live)
                && !left.is_zero()
                && self.row.state == SandboxState::Running
            {
                if window.is_over(live).await {
                    (left, cause) = (Duration::ZERO, window.idle.why());
                } else {
                    left = left.min(window.idle.wait(Instant::now()));
                }
            }
            // However many ask for something that takes its time, its own time is up when it is.
            match (on_timeout, &live) {
                _ if !left.is_zero() => tries = Tries::default(),
                (Some(wanted), Some(live)) => {
                    left = tries.wait(Instant::now());
                    if self.row.state != SandboxState::Running {
                        left = patience.clock_check;
                    } else if left.is_zero() {
                        let (live, mode) = (Arc::clone(live), tries.mode(wanted, Instant::now()));
                        let why = tries.why(&cause, wanted, mode);
                        match self.pause(&live, mode, &why, Vec::new()).await {
                            Pausing::Imaged(pausers) => return Life::Rests(pausers),
                            Pausing::RunsOn(hindrance, reason) => {
                                tries.failed(Instant::now(), mode, hindrance, &reason);
                                // It was silent for as long as that took.
                                cut_off = Some(listen(live));
                            }
                            Pausing::Killed(unanswered) => {
                                killer = unanswered;
                                break (Event::Kill, ASKED.into());
                            }
                        }
                        continue;
                    }
                }
                _ => break (Event::TimeUp, cause),
            }
            break tokio::select! {
                outcome = output_of(&mut coming_up) => {
                    coming_up = None;
                    let (outcome, why) = match self.arrived(outcome, of_image, resumed).instrument(span.clone()).await {
                        Ok(arrived) => {
                            live = Some(Arc::clone(&arrived));
                            window = Window::of(&self.row, &arrived);
                            let (host, id) = (self.shared.host.clone(), self.row.id.clone());
                            exited = Some(Box::pin(async move { exit_of(&host, &id).await }));
                            cut_off = Some(listen(arrived));
                            (Ok(()), None)
                        }
                        Err(error) => {
                            let why = Chain(&error).to_string();
                            (Err(error), Some(why))
                        }
                    };
                    answer(&mut askers, outcome);
                    let Some(why) = why else { continue };
                    (Event::Failed, why)
                }
                closed = output_of(&mut cut_off) => {
                    // What ends the agent mostly ends the sandbox, and that says more.
                    match timeout(EXIT_PATIENCE, output_of(&mut exited)).await {
                        Ok(Ok(exit)) => (Event::Exited(exit), format!("its processes are gone: {exit:?}")),
                        // One that could not be paused, and that does not run on either.
                        _ if self.row.state == SandboxState::Pausing => {
                            (Event::Exited(Exit::Ended), format!("its agent can't be heard any more: {}", Chain(&closed)))
                        }
                        _ => (Event::Failed, format!("its agent can't be heard any more: {}", Chain(&closed))),
                    }
                }
                exit = output_of(&mut exited) => {
                    exited = None;
                    match exit {
                        Ok(exit) => (Event::Exited(exit), format!("its processes are gone: {exit:?}")),
                        // Without the host this server is about to end.
                        Err(HostError::Gone) => continue,
                        Err(error) => (Event::Missing, Chain(&error).to_string()),
                    }
                }
                request = self.next_request() => match request {
                    Some((_, request)) if resuming && request.needs_it_running() => {
                        request.refuse(in_between(&self.row));
                        continue;
                    }
                    Some((span, Request::SetEnd { end_at, only_later, reply })) => {
                        let _gone = reply.send(self.set_end(end_at, only_later).instrument(span).await);
                        continue;
                    }
                    Some((span, Request::SetPolicy { policy, allow_internet_access, reply })) => {
                        let set = self.set_policy(policy, allow_internet_access).instrument(span);
                        let _gone = reply.send(set.await);
                        continue;
                    }
                    Some((span, Request::GrantModels { money, reply })) => {
                        let _gone = reply.send(self.grant_models(&money).instrument(span).await);
                        continue;
                    }
                    Some((span, Request::Pause { mode, reply })) => {
                        let Some(live) = &live else {
                            let message = "the sandbox is still being started";
                            let _gone = reply.send(Err(Error::new(ErrorKind::Conflict, message)));
                            continue;
                        };
                        let paused = self.pause(live, mode, ASKED, vec![reply]).instrument(span).await;
                        // It could give no sign of life meanwhile.
                        cut_off = Some(listen(Arc::clone(live)));
                        match paused {
                            Pausing::Imaged(pausers) => return Life::Rests(pausers),
                            Pausing::RunsOn(..) => continue,
                            Pausing::Killed(unanswered) => {
                                killer = unanswered;
                                (Event::Kill, ASKED.into())
                            }
                        }
                    }
                    Some((span, Request::Capture { image, wanted, reply })) => {
                        let Some(live) = &live else {
                            let message = "the sandbox is still being started";
                            let _gone = reply.send(Err(Error::new(ErrorKind::Conflict, message)));
                            continue;
                        };
                        let captured = self.capture(live, &image, &wanted).instrument(span).await;
                        cut_off = Some(listen(Arc::clone(live)));
                        let (outcome, ended) = captured;
                        let _gone = reply.send(outcome);
                        let Some(Ended { unanswered }) = ended else { continue };
                        killer = unanswered;
                        (Event::Kill, ASKED.into())
                    }
                    Some((_, Request::Resume { reply, .. })) => {
                        if live.is_some() {
                            let _gone = reply.send(Ok(()));
                        } else {
                            askers.push(reply);
                        }
                        continue;
                    }
                    Some((span, Request::Kill(reply))) => {
                        killed_in = span;
                        killer = Some(reply);
                        (Event::Kill, ASKED.into())
                    }
                    // Every handle is gone, so this server stops.
                    None => std::future::pending().await,
                },
                () = sleep(left.min(patience.clock_check)) => {
                    // It runs on after a pause that failed, and that could not be stored.
                    if self.row.state == SandboxState::Pausing {
                        self.run_on("it could not be paused").await;
                    }
                    self.go_on(live.as_ref()).await;
                    continue
                }
            };
        };
        let stored = self.settle(event, &why).instrument(killed_in).await;
        self.make_unreachable();
        if let Some(killer) = killer.take_if(|_| stored) {
            let _gone = killer.send(Ok(()));
        }
        answer(
            &mut askers,
            Err(Error::new(
                ErrorKind::Conflict,
                "the sandbox was ended, or its time was up, before it was ready",
            )),
        );
        // A verb that is under way in the host must not come after the one that removes.
        if let Some(coming_up) = coming_up {
            let _abandoned = coming_up.await;
        }
        // One that could not be resumed is paused, whether that is stored or not.
        if matches!(self.row.state, SandboxState::Paused | SandboxState::Resuming)
            && !matches!(event, Event::Kill)
        {
            return Life::Rests(Vec::new());
        }
        if !stored {
            self.remove_and_settle(event, &why, killer).await;
        }
        Life::Ends
    }

    async fn arrived(
        &mut self,
        outcome: Result<CameUp, Error>,
        of_image: bool,
        resumed: bool,
    ) -> Result<Arc<Live>, Error> {
        let CameUp { live, path, why } = outcome?;
        self.row.start_path = path;
        // A server before this one may have slowed it.
        let found = matches!(self.row.state, SandboxState::Running | SandboxState::Pausing);
        let pace = if found { Pace::Idle } else { Pace::Full };
        if !self.settle(Event::Ready, &why).await {
            return Err(Error::new(ErrorKind::Internal, "the sandbox could not be stored as running"));
        }
        sandglass_failpoint::hit_async("control.create.reachable").await.map_err(crate::injected)?;
        self.shared.live.insert(Arc::clone(&live));
        let end = self.shared.clock.now().plus(self.lease);
        // Its time was counted from when it was asked for, and may be up: it begins only now, unless it lost too little for that.
        if of_image
            && end.since(self.row.end_at) * NEGLIGIBLE > self.lease
            && let Err(error) = self.set_end_of(end, true, self.row.created_at).await
        {
            tracing::warn!(sandbox = %self.row.id, error = %Chain(&error), "it lives shorter than was asked for");
        }
        // It has gone on from there; what is left by a failure is removed before the next one is made. Only now, or it might
        // be taken for one whose time is up by whoever comes after a crash.
        if resumed {
            self.remove_image().await;
        }
        let governing = governor::govern(self.shared.host.clone(), Arc::clone(&live), pace);
        self.tasks.spawn(self.gone.clone().run_until_cancelled_owned(governing));
        let favouring = governor::favour(self.shared.host.clone(), Arc::clone(&live));
        self.tasks.spawn(self.gone.clone().run_until_cancelled_owned(favouring));
        Ok(live)
    }

    /// Stores what the event leads to. `true` once it is stored, or if there is nothing to store.
    async fn settle(&mut self, event: Event, why: &str) -> bool {
        self.settle_as(event, None, why).await
    }

    /// The same, and what is kept if it is to be paused.
    async fn settle_as(&mut self, event: Event, pause_mode: Option<PauseMode>, why: &str) -> bool {
        let Next::Move(to, end_reason) = lifecycle::next(self.row.state, event) else { return true };
        let failpoint = match to {
            SandboxState::Creating | SandboxState::Running => "control.store.running",
            SandboxState::Pausing => "control.store.pausing",
            SandboxState::Paused | SandboxState::Resuming => "control.store.paused",
            SandboxState::Ending => "control.store.ending",
            SandboxState::Ended => "control.store.ended",
        };
        let change = Transition {
            from: self.row.state,
            to,
            pause_mode,
            end_reason,
            at: self.shared.clock.now(),
            detail: why.to_owned(),
        };
        let stored = async {
            sandglass_failpoint::hit_async(failpoint).await.map_err(crate::injected)?;
            self.shared.store.transition(&self.row.id, &change).await.map_err(crate::stored)
        };
        match stored.await {
            Ok(true) => {
                tracing::info!(sandbox = %self.row.id, from = ?self.row.state, ?to, ?end_reason, why, "moved");
                self.row.state = to;
                self.row.pause_mode = pause_mode.unwrap_or(self.row.pause_mode);
                self.row.end_reason = end_reason.or(self.row.end_reason);
                if let Some(reason) = end_reason {
                    self.shared.metrics.ended(reason);
                }
                self.settle_image_room();
                true
            }
            Ok(false) => {
                // Nobody else may move it; take the store's word and do not fight over it.
                tracing::error!(sandbox = %self.row.id, ?change, "the store has another state");
                if let Ok(Some(row)) = self.shared.store.sandbox(&self.row.id).await {
                    self.row = row;
                }
                true
            }
            Err(error) => {
                tracing::error!(sandbox = %self.row.id, error = %Chain(&error), "a step could not be stored");
                false
            }
        }
    }

    /// Gives the room of its image back, if its row tells by now what it takes.
    fn settle_image_room(&mut self) {
        if !matches!(self.row.state, SandboxState::Pausing | SandboxState::Ending) {
            self.image_room = None;
        }
    }

    async fn grant_models(&mut self, money: &Money) -> Result<ModelGrant, Error> {
        let granted = self.shared.store.grant_models(&self.row.id, money).await;
        let grant = crate::granted(&self.row.id, granted.map_err(crate::stored)?)?;
        self.row.models = Some(grant.clone());
        let granted = egress::services(&self.row);
        let (effective, _) = self.shared.config.egress.effective(&self.row.policy, granted)?;
        if let Some(enforcer) = &self.enforcer {
            enforcer.set_policy(effective);
        }
        Ok(grant)
    }

    async fn set_policy(&mut self, policy: Policy, internet: Option<bool>) -> Result<(), Error> {
        let (effective, _) = self.shared.config.egress.effective(&policy, egress::services(&self.row))?;
        let stored = self.shared.store.set_policy(&self.row.id, &policy, internet).await;
        if !stored.map_err(crate::stored)? {
            return Err(crate::not_found(&self.row.id));
        }
        (self.row.policy, self.row.allow_internet_access) = (policy, internet);
        if let Some(enforcer) = &self.enforcer {
            enforcer.set_policy(effective);
        }
        Ok(())
    }
}

impl Drop for Owner<'_> {
    /// Also after a panic: the reconciler gives the sandbox another owner, and its session must have no two readers.
    fn drop(&mut self) {
        self.make_unreachable();
    }
}

/// What is answered to who wants something of a sandbox that is on the way to a pause or back.
fn in_between(row: &SandboxRow) -> Error {
    crate::in_between(row.state).unwrap_or_else(|| crate::not_found(&row.id))
}

/// How the life of a sandbox on the machine is over.
enum Life {
    /// For good.
    Ends,
    /// It is an image now, or still. Who wants to hear when nothing else of it is left.
    Rests(Vec<Reply>),
}

/// Tells all who wait how it went; the first of them hears the cause, too.
fn answer(askers: &mut Vec<Reply>, outcome: Result<(), Error>) {
    let others = outcome.as_ref().err().map(|error| (error.kind(), error.to_string()));
    let mut outcome = Some(outcome);
    for asker in askers.drain(..) {
        let first = outcome.take();
        let answer = first.unwrap_or_else(|| match &others {
            None => Ok(()),
            Some((kind, message)) => Err(Error::new(*kind, message.clone())),
        });
        let _gone = asker.send(answer);
    }
}

/// The output of a future that may not be there; without one it never comes.
async fn output_of<F: Future + Unpin>(future: &mut Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound() {
        let mut pauses = Pauses::new();
        let first: Vec<_> = (0..9).map(|_| pauses.next().as_millis()).collect();
        assert_eq!(first, [50, 100, 200, 400, 800, 1600, 3200, 6400, 10_000]);
        assert_eq!(pauses.next(), Pauses::LONGEST);
    }
}
