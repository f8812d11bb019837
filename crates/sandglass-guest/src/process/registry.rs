//! All processes that clients started, and how long an ended one is remembered.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandglass_proto::services::process::ProcessSelector;
use sandglass_proto::services::process::process_selector::Selector;
use tokio::time::Instant;

use super::live::Process;
use super::output::End;

/// How long a client may still learn how a process ended.
const RETENTION: Duration = Duration::from_secs(30);

/// Processes that run at one time.
const MAX_LIVE: usize = 1024;

/// Ended processes that are remembered for a server that comes back.
const MAX_ENDED: usize = 128;

/// Bytes of output of ended processes that are kept for a server that comes back.
const MAX_ENDED_OUTPUT: usize = 4 << 20;

/// A life of the session with the server: it ends when the server crashes, which nobody inside notices, and the
/// next begins when the server is back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epoch {
    /// Counts from 1; 0 before the first.
    pub number: u32,
    /// When it began.
    pub since: Instant,
}

/// Whether clients may still learn of an end. One from an earlier life of the session counts from the moment at
/// which the server was back.
fn is_visible(end: &End, epoch: Epoch, now: Instant) -> bool {
    let from = if end.epoch == epoch.number { end.at } else { epoch.since.max(end.at) };
    now.saturating_duration_since(from) < RETENTION
}

/// Whether no one can ever ask for it again.
fn is_useless(end: &End, epoch: Epoch, now: Instant) -> bool {
    end.epoch < epoch.number && !is_visible(end, epoch, now)
}

#[derive(Debug)]
struct State {
    processes: Vec<Arc<Process>>,
    epoch: Epoch,
    /// When one that is forgotten ended last; before the first, when this began.
    last_end: Instant,
}

/// All processes that clients started.
#[derive(Debug)]
pub(crate) struct Registry {
    state: Mutex<State>,
}

impl Registry {
    /// An empty one.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        let epoch = Epoch { number: 0, since: now };
        Self { state: Mutex::new(State { processes: Vec::new(), epoch, last_end: now }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present life of the session.
    pub(crate) fn epoch(&self) -> u32 {
        self.state().epoch.number
    }

    /// The server is there, for the first time or again.
    pub(crate) fn begin_epoch(&self) -> u32 {
        let mut state = self.state();
        let number = state.epoch.number.saturating_add(1);
        state.epoch = Epoch { number, since: Instant::now() };
        for process in &state.processes {
            process.output().forget_before(number);
        }
        number
    }

    /// Whether there is room for one more.
    pub(crate) fn has_room(&self) -> bool {
        self.state().processes.iter().filter(|process| process.output().end().is_none()).count() < MAX_LIVE
    }

    /// Adds a process that has just been started.
    pub(crate) fn add(&self, process: Arc<Process>) {
        let mut state = self.state();
        forget(&mut state);
        state.processes.push(process);
    }

    /// The processes that run.
    pub(crate) fn running(&self) -> Vec<Arc<Process>> {
        self.state().processes.iter().filter(|process| process.output().end().is_none()).cloned().collect()
    }

    /// How long none has run; zero while one does.
    pub(crate) fn idle(&self) -> Duration {
        let state = self.state();
        let mut last = state.last_end;
        for process in &state.processes {
            match process.output().end() {
                None => return Duration::ZERO,
                Some(end) => last = last.max(end.at),
            }
        }
        last.elapsed()
    }

    /// The process that is selected, running or ended a short while ago. A running one wins over an ended one,
    /// then the youngest.
    pub(crate) fn find(&self, selector: &ProcessSelector) -> Option<Arc<Process>> {
        let mut state = self.state();
        forget(&mut state);
        let now = Instant::now();
        let epoch = state.epoch;
        let matching = |process: &&Arc<Process>| match &selector.selector {
            Some(Selector::Pid(pid)) => process.pid() == *pid,
            Some(Selector::Tag(tag)) => process.tag() == Some(tag.as_str()),
            None => false,
        };
        let mut found = None;
        for process in state.processes.iter().rev().filter(matching) {
            match process.output().end() {
                None => return Some(Arc::clone(process)),
                Some(end) if found.is_none() && is_visible(&end, epoch, now) => found = Some(process),
                Some(_) => {}
            }
        }
        found.cloned()
    }

    /// The running process that is selected.
    pub(crate) fn find_running(&self, selector: &ProcessSelector) -> Option<Arc<Process>> {
        self.find(selector).filter(|process| process.output().end().is_none())
    }
}

/// Forgets what is useless, then the oldest of what is too much.
fn forget(state: &mut State) {
    let (epoch, now) = (state.epoch, Instant::now());
    let (mut count, mut bytes, mut last_end) = (0, 0, state.last_end);
    // From the youngest to the oldest.
    let mut keep: Vec<_> = state
        .processes
        .drain(..)
        .rev()
        .filter(|process| {
            let Some(end) = process.output().end() else { return true };
            last_end = last_end.max(end.at);
            count += 1;
            bytes += process.output().kept();
            count <= MAX_ENDED && bytes <= MAX_ENDED_OUTPUT && !is_useless(&end, epoch, now)
        })
        .collect();
    keep.reverse();
    (state.processes, state.last_end) = (keep, last_end);
}

#[cfg(test)]
mod tests {
    use super::super::output::Cause;
    use super::*;
    use crate::reaper::Status;

    #[test]
    fn an_end_is_remembered_for_30_seconds_in_which_someone_could_ask() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let end = End { status: Status::Exited(0), cause: Cause::Itself, at: at(100), epoch: 1 };
        let first = Epoch { number: 1, since: at(0) };
        assert!(is_visible(&end, first, at(129)));
        assert!(!is_visible(&end, first, at(130)));
        assert!(!is_useless(&end, first, at(1_000_000)), "the server may have crashed before it could ask");
        let second = Epoch { number: 2, since: at(500) };
        assert!(is_visible(&end, second, at(529)));
        assert!(!is_visible(&end, second, at(530)));
        assert!(is_useless(&end, second, at(530)));
    }
}
