//! Ends a storm of processes before it silences the sandbox.
//!
//! A limit on processes alone does not help against a fork bomb: whatever ends makes room for the next fork, and
//! each fork is expensive for the kernel in user space, so everything else waits, the agent included. So when the
//! limit is nearly reached *and* the agent itself is slow, several times in a row, the largest group of processes
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
const SLOW: Duration = Duration::from_millis(30);

/// How often in a row it must look like a storm.
const STRIKES: u32 = 3;

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
    let near = usize::try_from(look.limit).unwrap_or(usize::MAX).saturating_mul(9) / 10;
    look.processes >= near.max(32) && look.delay >= SLOW
}

/// Watches on a thread of its own for as long as the agent lives.
///
/// # Errors
/// The thread can't be started.
pub(crate) fn start(agent: Arc<Agent>, runtime: Handle) -> std::io::Result<()> {
    std::thread::Builder::new().name("guard".into()).stack_size(64 * 1024).spawn(move || {
        let mut strikes = 0;
        loop {
            // Without a group nothing can storm, and an idle sandbox is not woken.
            agent.jobs.wait_for_any();
            std::thread::sleep(PERIOD);
            let Some(look) = look(&agent, &runtime) else { return };
            strikes = if is_storm(&look) { strikes + 1 } else { 0 };
            if strikes >= STRIKES {
                strikes = 0;
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
        assert!(is_storm(&look(270, 300, 30)));
        assert!(is_storm(&look(1000, 300, 500)));
        assert!(!is_storm(&look(269, 300, 500)));
        assert!(!is_storm(&look(300, 300, 29)));
        assert!(!is_storm(&look(10, 10, 500)), "small limits are reached by small things");
    }
}
