//! Who goes first when sandboxes want more of the processors than there is.
//!
//! A sandbox that has just been asked for something goes before one that works on something by itself: a client waits for
//! the one, and nobody knows who waits for the other. So each is favoured for a moment when it is made and whenever
//! somebody asks, and has its turn behind the favoured ones otherwise.
//!
//! The end of a favour has to come also where the sandbox leaves nobody else a processor (see [`Leaf::take_turn`]). So one
//! thread decides that, and it is urgent.

use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use sandglass_linux::cgroup::{CgroupError, Cgroups, Leaf, Turn};
use sandglass_linux::process::become_urgent;
use sandglass_types::SandboxId;

/// How long a sandbox is favoured that somebody asked for something. A command that only tells something is through by then.
const ASKED: Duration = Duration::from_millis(400);

/// How long one is that is made, or that is written to an image.
const MADE: Duration = Duration::from_secs(1);

/// How much CPU time a sandbox may use while it is favoured, before it has to wait for more.
const PURSE: Duration = Duration::from_secs(10);

/// How much time has to pass until it may use one unit of time more: it can be first with half a core for ever.
const GAIN: u32 = 2;

/// The order of the sandboxes of one host.
#[derive(Debug)]
pub(super) struct Turns(Sender<Favour>);

#[derive(Debug)]
struct Favour {
    id: SandboxId,
    leaf: Leaf,
    until: Instant,
}

impl Turns {
    /// Starts the thread, and ends what an earlier host began.
    ///
    /// # Errors
    /// The control groups can't be read, or there can be no thread.
    pub(super) fn open(cgroups: &Cgroups) -> Result<Self, CgroupError> {
        for name in cgroups.children()? {
            last(&cgroups.leaf(&name)?);
        }
        let (favours, asked) = channel();
        std::thread::Builder::new().name("turns".into()).spawn(move || keep(&asked))?;
        Ok(Self(favours))
    }

    /// It was just made.
    pub(super) fn made(&self, id: &SandboxId, leaf: &Leaf) {
        self.favour(id, leaf, MADE);
    }

    /// It is being made for nobody yet.
    #[expect(clippy::unused_self, reason = "whoever has the order decides it")]
    pub(super) fn nobody_waits(&self, leaf: &Leaf) {
        last(leaf);
    }

    /// Somebody asks something of it.
    pub(super) fn asked(&self, id: &SandboxId, leaf: &Leaf) {
        self.favour(id, leaf, ASKED);
    }

    /// All that its user runs stands still until this is done, which mostly takes no longer than it is favoured.
    pub(super) fn stands_still(&self, id: &SandboxId, leaf: &Leaf) {
        self.favour(id, leaf, MADE);
    }

    fn favour(&self, id: &SandboxId, leaf: &Leaf, time: Duration) {
        let favour = Favour { id: id.clone(), leaf: leaf.clone(), until: Instant::now() + time };
        // Without the thread, which ends with this alone, nobody is favoured.
        let _gone = self.0.send(favour);
    }
}

/// What a sandbox may still use while it is favoured: whoever asks without end shares with the others again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Purse {
    left: Duration,
    /// What it has used beyond that: it is not cut off to the moment.
    owed: Duration,
    at: Instant,
}

impl Purse {
    const fn full(now: Instant) -> Self {
        Self { left: PURSE, owed: Duration::ZERO, at: now }
    }

    /// What is in it now, after this was used.
    fn spend(&mut self, used: Duration, now: Instant) {
        let has = self.left + now.saturating_duration_since(self.at) / GAIN;
        let owes = self.owed + used;
        *self = Self { left: has.saturating_sub(owes).min(PURSE), owed: owes.saturating_sub(has), at: now };
    }
}

/// One that is favoured.
#[derive(Debug)]
struct Favoured {
    leaf: Leaf,
    until: Instant,
    /// CPU time that it had used when that was last counted.
    counted: Duration,
}

impl Favoured {
    /// What it has used since that was last counted.
    fn used(&mut self) -> Duration {
        let now = used(&self.leaf).unwrap_or(self.counted);
        now.saturating_sub(std::mem::replace(&mut self.counted, now))
    }
}

/// Keeps the order until nobody can ask any more.
fn keep(asked: &Receiver<Favour>) {
    if let Err(error) = become_urgent() {
        tracing::info!(%error, "no thread can be urgent here: on a busy machine, sandboxes may go first for longer");
    }
    let mut favoured: HashMap<SandboxId, Favoured> = HashMap::new();
    let mut purses: HashMap<SandboxId, Purse> = HashMap::new();
    loop {
        let next = favoured.values().map(|favoured| favoured.until).min();
        let received = match next {
            None => asked.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(next) => asked.recv_timeout(next.saturating_duration_since(Instant::now())),
        };
        let now = Instant::now();
        match received {
            Ok(Favour { id, leaf, until }) => {
                let purse = purses.entry(id.clone()).or_insert_with(|| Purse::full(now));
                match favoured.get_mut(&id) {
                    Some(before) => before.until = before.until.max(until),
                    None => {
                        purse.spend(Duration::ZERO, now);
                        if !purse.left.is_zero() {
                            take(&leaf, Turn::First);
                            let counted = used(&leaf).unwrap_or_default();
                            favoured.insert(id, Favoured { leaf, until, counted });
                        }
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        favoured.retain(|id, favoured| {
            let purse = purses.entry(id.clone()).or_insert_with(|| Purse::full(now));
            purse.spend(favoured.used(), now);
            let goes_on = favoured.until > now && !purse.left.is_zero();
            if !goes_on {
                last(&favoured.leaf);
            }
            goes_on
        });
        // One that has been left alone for so long is full again.
        purses.retain(|_, purse| now.saturating_duration_since(purse.at) < PURSE * GAIN);
    }
}

/// CPU time that a sandbox has used. `None` if it is gone.
fn used(leaf: &Leaf) -> Option<Duration> {
    leaf.cpu_micros().ok().map(Duration::from_micros)
}

fn last(leaf: &Leaf) {
    take(leaf, Turn::Last);
}

fn take(leaf: &Leaf, turn: Turn) {
    match leaf.take_turn(turn) {
        // It has come to its end meanwhile.
        Err(CgroupError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::debug!(%error, "a sandbox keeps its turn"),
        Ok(()) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asks_without_end_is_first_with_a_part_of_a_core() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut purse = Purse::full(start);
        let mut first = Duration::ZERO;
        for turn in 1..=100 {
            // With two cores, as long as it is favoured.
            let used = if purse.left.is_zero() { Duration::ZERO } else { second * 2 };
            first += used;
            purse.spend(used, start + second * turn);
        }
        assert!(first >= PURSE && first <= PURSE + second * (100 / GAIN + 2), "{first:?}");
        // Who has waited has as much as at first.
        purse.spend(Duration::ZERO, start + second * 200);
        assert_eq!(purse.left, PURSE);
    }
}
