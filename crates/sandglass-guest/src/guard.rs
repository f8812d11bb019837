//! Ends what would silence or end the sandbox: a storm of processes, and who uses up its memory.

mod memory;
mod storm;

use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Handle;

use crate::agent::Agent;
use crate::log;
use memory::Gauge;
use storm::Storm;

/// Watches on a thread of its own for as long as the agent lives.
///
/// # Errors
/// The thread can't be started, or the kernel does not say how much memory there is.
pub(crate) fn start(agent: Arc<Agent>, runtime: Handle) -> std::io::Result<()> {
    let gauge = Gauge::open()?;
    std::thread::Builder::new().name("guard".into()).stack_size(64 * 1024).spawn(move || {
        let (mut storm, mut next_storm) = (Storm::default(), Instant::now());
        loop {
            // Without a group nothing can grow, and an idle sandbox is not woken.
            agent.jobs.wait_for_any();
            let memory = gauge.read();
            if memory.is_short() {
                memory::relieve(&agent, &gauge);
                continue;
            }
            std::thread::sleep(memory.next_look());
            if Instant::now() >= next_storm {
                next_storm = Instant::now() + storm::PERIOD;
                let Some(look) = storm::look(&agent, &runtime) else { return };
                if storm.lasts(&look, Instant::now()) {
                    let ended = agent.jobs.end_largest();
                    log::line(&format!(
                        "{} processes made the sandbox slow; the largest group was ended: {ended:?}",
                        look.processes
                    ));
                }
            }
        }
    })?;
    Ok(())
}
