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

/// How long one is that is made.
const MADE: Duration = Duration::from_secs(1);

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

    /// Somebody asks something of it.
    pub(super) fn asked(&self, id: &SandboxId, leaf: &Leaf) {
        self.favour(id, leaf, ASKED);
    }

    fn favour(&self, id: &SandboxId, leaf: &Leaf, time: Duration) {
        let favour = Favour { id: id.clone(), leaf: leaf.clone(), until: Instant::now() + time };
        // Without the thread, which ends with this alone, nobody is favoured.
        let _gone = self.0.send(favour);
    }
}

/// Keeps the order until nobody can ask any more.
fn keep(asked: &Receiver<Favour>) {
    if let Err(error) = become_urgent() {
        tracing::info!(%error, "no thread can be urgent here: on a busy machine, sandboxes may go first for longer");
    }
    let mut favoured: HashMap<SandboxId, Favour> = HashMap::new();
    loop {
        let next = favoured.values().map(|favour| favour.until).min();
        let received = match next {
            None => asked.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(next) => asked.recv_timeout(next.saturating_duration_since(Instant::now())),
        };
        match received {
            Ok(favour) => match favoured.get_mut(&favour.id) {
                Some(before) => before.until = before.until.max(favour.until),
                None => {
                    take(&favour.leaf, Turn::First);
                    favoured.insert(favour.id.clone(), favour);
                }
            },
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        favoured.retain(|_, favour| {
            let goes_on = favour.until > now;
            if !goes_on {
                last(&favour.leaf);
            }
            goes_on
        });
    }
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
