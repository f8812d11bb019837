//! The host's loop: read a verb, do it on a thread of its own, answer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sandglass_linux::fdpass;

use super::protocol::{Answer, Call, RefusalKind, Reply, Verb};
use crate::engine::{Engine, SessionEnds, step};

/// Verbs under way at one time, [`Verb::Wait`] apart; one more is refused as busy.
pub(super) const MAX_UNDER_WAY: usize = 64;

/// [`Verb::Wait`] under way at one time: one a sandbox.
const MAX_WAITING: usize = 8192;

/// Stack of a thread that does a verb, in bytes. They only call the kernel and start processes.
const STACK: usize = 512 * 1024;

/// Stack of a thread that waits for a sandbox to end, in bytes.
const WAIT_STACK: usize = 64 * 1024;

/// How long verbs that are under way may take to finish once the line is closed.
const DRAIN: Duration = Duration::from_secs(10);

/// Serves `line` until its other end is closed, and then until the verbs that are under way are done, for a while: what
/// they leave half done, the next host finds and finishes.
///
/// # Errors
/// The socket failed.
pub fn run(line: OwnedFd, engine: &Arc<dyn Engine>) -> std::io::Result<()> {
    let line = Arc::new(line);
    let under_way = Arc::new(Places::new(MAX_UNDER_WAY));
    let waiting = Arc::new(Places::new(MAX_WAITING));
    let served = take_verbs(&line, engine, &under_way, &waiting);
    engine.leave_off();
    under_way.wait_until_free(DRAIN);
    served
}

fn take_verbs(
    line: &Arc<OwnedFd>,
    engine: &Arc<dyn Engine>,
    under_way: &Arc<Places>,
    waiting: &Arc<Places>,
) -> std::io::Result<()> {
    loop {
        let packet = match fdpass::recv(&**line) {
            // Descriptors are closed unseen: no verb carries any.
            Ok(Some(received)) => received.message,
            Ok(None) => return Ok(()),
            // The other half ended before it had read all answers.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                tracing::warn!(%error, "refused a packet");
                let reason = Answer::refusal(RefusalKind::NotAVerb, error.to_string());
                send(line, &Reply { seq: 0, answer: reason }, &[])?;
                continue;
            }
            Err(error) => return Err(error),
        };
        let call: Call = match serde_json::from_slice(&packet) {
            Ok(call) => call,
            Err(error) => {
                tracing::warn!(%error, "refused what is not a verb");
                let answer = Answer::refusal(RefusalKind::NotAVerb, format!("not a verb: {error}"));
                send(line, &Reply { seq: 0, answer }, &[])?;
                continue;
            }
        };
        let (places, stack) =
            if matches!(call.verb, Verb::Wait(_)) { (waiting, WAIT_STACK) } else { (under_way, STACK) };
        let Some(place) = places.take() else {
            let answer = Answer::refusal(RefusalKind::Busy, format!("{} verbs are under way", places.max));
            send(line, &Reply { seq: call.seq, answer }, &[])?;
            continue;
        };
        let seq = call.seq;
        let job = {
            let (line, engine) = (Arc::clone(line), Arc::clone(engine));
            move || {
                let _place = place;
                // A panic must not leave the asker waiting for ever.
                let performed = catch_unwind(AssertUnwindSafe(|| perform(&*engine, call.verb)));
                let (answer, descriptors) = performed.unwrap_or_else(|_| {
                    (Answer::refusal(RefusalKind::Failed, "the verb panicked".into()), Vec::new())
                });
                if let Err(error) = send(&line, &Reply { seq, answer }, &descriptors) {
                    tracing::debug!(%error, "the answer found no reader");
                }
            }
        };
        if let Err(error) = thread::Builder::new().stack_size(stack).spawn(job) {
            let answer = Answer::refused(&step("start a thread for the verb", error));
            send(line, &Reply { seq, answer }, &[])?;
        }
    }
}

fn perform(engine: &dyn Engine, verb: Verb) -> (Answer, Vec<OwnedFd>) {
    let (began, name) = (Instant::now(), verb.name());
    let done = |()| (Answer::Done, Vec::new());
    let ends = |ends: SessionEnds| (Answer::Done, vec![ends.to_agent, ends.from_agent]);
    let outcome = match verb {
        Verb::Describe => Ok((Answer::Info(engine.info()), Vec::new())),
        Verb::Create(spec) => engine.create(&spec).map(done),
        Verb::Start(id) => engine.start(&id).map(done),
        Verb::Pause(id) => engine.pause(&id).map(done),
        Verb::Resume(id) => engine.resume(&id).map(done),
        Verb::Checkpoint { id, image, keep } => engine.checkpoint(&id, &image, keep).map(done),
        Verb::FlushImage(image) => engine.flush_image(&image).map(done),
        Verb::CompressImage(image) => {
            engine.compress_image(&image).map(|outcome| (Answer::Compression(outcome), Vec::new()))
        }
        Verb::ExpandImage(image) => engine.expand_image(&image).map(done),
        Verb::Restore { spec, image } => engine.restore(&spec, &image).map(done),
        Verb::PrepareRestore { spec, image } => engine.prepare_restore(&spec, &image).map(done),
        Verb::KeepDisk { id, image } => engine.keep_disk(&id, &image).map(done),
        Verb::Boot { spec, image } => engine.boot(&spec, &image).map(done),
        Verb::Images => engine.images().map(|all| (Answer::Images(all), Vec::new())),
        Verb::RemoveImage(image) => engine.remove_image(&image).map(done),
        Verb::CreateVolume { id, mib } => engine.create_volume(&id, mib).map(done),
        Verb::RemoveVolume(id) => engine.remove_volume(&id).map(done),
        Verb::OpenVolume(id) => engine.open_volume(&id).map(|socket| (Answer::Done, vec![socket])),
        Verb::Collect { id, tree } => engine.collect(&id, tree).map(|socket| (Answer::Done, vec![socket])),
        Verb::Volumes => engine.volumes().map(|all| (Answer::Volumes(all), Vec::new())),
        Verb::Footprints(ids) => engine.footprints(&ids).map(|all| (Answer::Footprints(all), Vec::new())),
        Verb::TidyCache(rootfs) => engine.tidy_cache(&rootfs).map(done),
        Verb::SetDeadline { id, deadline } => engine.set_deadline(&id, deadline).map(done),
        Verb::Destroy(id) => engine.destroy(&id).map(done),
        Verb::Stats(id) => engine.stats(&id).map(|stats| (Answer::Stats(stats), Vec::new())),
        Verb::List => engine.list().map(|all| (Answer::List(all), Vec::new())),
        Verb::HandOut { id, deadline } => engine.hand_out(&id, deadline).map(ends),
        Verb::Attach(id) => engine.attach(&id).map(ends),
        Verb::AirlockSockets { id, sockets } if sockets.len() <= fdpass::MAX_FDS => {
            engine.airlock_sockets(&id, &sockets).map(|sockets| (Answer::Done, sockets))
        }
        Verb::AirlockSockets { .. } => {
            return (Answer::refusal(RefusalKind::NotAVerb, "too many sockets".into()), Vec::new());
        }
        Verb::Pace { id, pace } => engine.pace(&id, pace).map(done),
        Verb::Favour(id) => engine.favour(&id).map(done),
        Verb::Wait(id) => engine.wait(&id).map(|exit| (Answer::Exit(exit), Vec::new())),
    };
    tracing::debug!(verb = name, micros = began.elapsed().as_micros(), "performed");
    outcome.unwrap_or_else(|error| {
        let answer = Answer::refused(&error);
        tracing::debug!(?answer, "a verb was refused");
        (answer, Vec::new())
    })
}

fn send(line: &OwnedFd, reply: &Reply, descriptors: &[OwnedFd]) -> std::io::Result<()> {
    let packet = serde_json::to_vec(reply)?;
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    fdpass::send(line, &packet, &borrowed)
}

/// A bounded number of verbs under way.
struct Places {
    max: usize,
    taken: Mutex<usize>,
    freed: Condvar,
}

impl Places {
    const fn new(max: usize) -> Self {
        Self { max, taken: Mutex::new(0), freed: Condvar::new() }
    }

    fn take(self: &Arc<Self>) -> Option<Place> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if *taken == self.max {
            return None;
        }
        *taken += 1;
        Some(Place(Arc::clone(self)))
    }

    fn wait_until_free(&self, patience: Duration) {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let _outcome = self.freed.wait_timeout_while(taken, patience, |taken| *taken > 0);
    }
}

/// One verb under way; gives its place back when dropped, also when the verb panics.
struct Place(Arc<Places>);

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_all();
    }
}
