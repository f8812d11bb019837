//! Ends a storm of processes before it silences the sandbox.
//!
//! A limit on processes alone does not help against a fork bomb: whatever ends makes room for the next fork, and
//! each fork is expensive for the kernel in user space, so everything else waits, the agent included. So when the
//! limit is nearly reached *and* the agent itself is slow, for a while, the largest group of processes
//! is ended, as the kernel ends the largest process when memory runs out. Many processes alone are no reason.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::agent::Agent;
use crate::log;
use crate::settings::DEFAULT_MAX_PROCESSES;

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(250);

/// A task of the agent that starts later than this is slow. Usually it takes some microseconds.
const SLOW: Duration = Duration::from_millis(50);

/// How long every look must show a storm. In one, two looks take longer than this.
const LASTING: Duration = Duration::from_millis(750);

/// What was seen at one look.
#[derive(Debug, Clone, Copy)]
struct Look {
    /// Processes and threads in the sandbox.
    processes: usize,
    /// Processes of one user that are allowed.
    limit: u32,
    /// How long the agent needed to start a task.
    delay: Duration,
}

/// Whether it looks like a storm.
fn is_storm(look: &Look) -> bool {
    let near = usize::try_from(look.limit).unwrap_or(usize::MAX).saturating_mul(4) / 5;
    look.processes >= near.max(32) && look.delay >= SLOW
}

/// Whether a storm has lasted. `since` is when it began.
fn lasts(since: &mut Option<Instant>, storm: bool, now: Instant) -> bool {
    if !storm {
        *since = None;
        return false;
    }
    let began = *since.get_or_insert(now);
    let lasts = now.saturating_duration_since(began) >= LASTING;
    if lasts {
        *since = None;
    }
    lasts
}

/// Watches on a thread of its own for as long as the agent lives.
///
/// # Errors
/// The thread can't be started.
pub(crate) fn start(agent: Arc<Agent>, runtime: Handle) -> std::io::Result<()> {
    std::thread::Builder::new().name("guard".into()).stack_size(64 * 1024).spawn(move || {
        let mut since = None;
        loop {
            // Without a group nothing can storm, and an idle sandbox is not woken.
            agent.jobs.wait_for_any();
            std::thread::sleep(PERIOD);
            let Some(look) = look(&agent, &runtime) else { return };
            if lasts(&mut since, is_storm(&look), Instant::now()) {
                let ended = agent.jobs.end_largest();
                log::line(&format!(
                    "{} processes made the sandbox slow; the largest group was ended: {ended:?}",
                    look.processes
                ));
            }
        }
    })?;
    Ok(())
}

/// Looks; `None` if the agent is ending.
fn look(agent: &Agent, runtime: &Handle) -> Option<Look> {
    let asked = Instant::now();
    // All processes of the sandbox; counting those of each group is slow when it matters.
    let processes = usize::from(rustix::system::sysinfo().procs);
    let limit = agent.settings.get().map_or(DEFAULT_MAX_PROCESSES, |settings| settings.max_processes());
    let mut look = Look { processes, limit, delay: asked.elapsed() };
    // Waking the agent costs something, so only if it matters.
    if is_storm(&Look { delay: SLOW, ..look }) {
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

    #[test]
    fn only_many_processes_and_a_slow_agent_are_a_storm() {
        let look = |processes, limit, millis| Look { processes, limit, delay: Duration::from_millis(millis) };
        assert!(is_storm(&look(240, 300, 50)));
        assert!(is_storm(&look(1000, 300, 500)));
        assert!(!is_storm(&look(239, 300, 500)));
        assert!(!is_storm(&look(300, 300, 49)));
        assert!(!is_storm(&look(10, 10, 500)), "small limits are reached by small things");
    }

    #[test]
    fn it_must_last() {
        let start = Instant::now();
        let mut since = None;
        let mut look = |millis, storm| lasts(&mut since, storm, start + Duration::from_millis(millis));
        assert!(!look(0, true) && !look(700, true) && !look(800, false));
        assert!(!look(900, true) && !look(1600, true) && look(1700, true));
        assert!(!look(1800, true), "after it was ended, it starts anew");
    }
}
