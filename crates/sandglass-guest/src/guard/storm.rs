//! Many processes, and an agent that they make slow.
//!
//! A limit on processes alone does not help against a fork bomb: whatever ends makes room for the next fork, and
//! each fork is expensive for the kernel in user space, so everything else waits, the agent included. So when the
//! limit is nearly reached *and* the agent itself is slow, for a while, the largest group of processes
//! is ended, as the kernel ends the largest process when memory runs out. Many processes alone are no reason.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::agent::Agent;
use crate::settings::DEFAULT_MAX_PROCESSES;

/// Time between two looks.
pub(super) const PERIOD: Duration = Duration::from_millis(250);

/// A task of the agent that starts later than this is slow. Usually it takes some microseconds.
const SLOW: Duration = Duration::from_millis(50);

/// How long every look must show a storm. In one, two looks take longer than this.
const LASTING: Duration = Duration::from_millis(750);

/// What was seen at one look.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    /// Processes and threads in the sandbox.
    pub(super) processes: usize,
    /// Processes of one user that are allowed.
    limit: u32,
    /// How long the agent needed to start a task.
    delay: Duration,
}

/// A storm that may be going on.
#[derive(Debug, Default)]
pub(super) struct Storm {
    began: Option<Instant>,
}

impl Storm {
    /// Whether there has been a storm for a while, with this look.
    pub(super) fn lasts(&mut self, look: &Look, now: Instant) -> bool {
        if !look.is_storm() {
            self.began = None;
            return false;
        }
        let began = *self.began.get_or_insert(now);
        let lasts = now.saturating_duration_since(began) >= LASTING;
        if lasts {
            self.began = None;
        }
        lasts
    }
}

impl Look {
    /// Whether it looks like a storm.
    fn is_storm(&self) -> bool {
        let near = usize::try_from(self.limit).unwrap_or(usize::MAX).saturating_mul(4) / 5;
        self.processes >= near.max(32) && self.delay >= SLOW
    }
}

/// Looks; `None` if the agent is ending.
pub(super) fn look(agent: &Agent, runtime: &Handle) -> Option<Look> {
    let asked = Instant::now();
    // All processes of the sandbox; counting those of each group is slow when it matters.
    let processes = usize::from(rustix::system::sysinfo().procs);
    let limit = agent.settings.get().map_or(DEFAULT_MAX_PROCESSES, |settings| settings.max_processes());
    let mut look = Look { processes, limit, delay: asked.elapsed() };
    // Waking the agent costs something, so only if it matters.
    if (Look { delay: SLOW, ..look }).is_storm() {
        let (sender, receiver) = mpsc::channel();
        agent.tasks.spawn_on(async move { sender.send(Instant::now()) }, runtime);
        receiver.recv().ok()?;
        look.delay = asked.elapsed();
    }
    Some(look)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(processes: usize, limit: u32, millis: u64) -> Look {
        Look { processes, limit, delay: Duration::from_millis(millis) }
    }

    #[test]
    fn only_many_processes_and_a_slow_agent_are_a_storm() {
        assert!(look(240, 300, 50).is_storm());
        assert!(look(1000, 300, 500).is_storm());
        assert!(!look(239, 300, 500).is_storm());
        assert!(!look(300, 300, 49).is_storm());
        assert!(!look(10, 10, 500).is_storm(), "small limits are reached by small things");
    }

    #[test]
    fn it_must_last() {
        let start = Instant::now();
        let mut storm = Storm::default();
        let mut at =
            |millis, delay| storm.lasts(&look(300, 300, delay), start + Duration::from_millis(millis));
        assert!(!at(0, 500) && !at(700, 500) && !at(800, 0));
        assert!(!at(900, 500) && !at(1600, 500) && at(1700, 500));
        assert!(!at(1800, 500), "after it was ended, it starts anew");
    }
}
