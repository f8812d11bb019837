//! Two things at the same time, where both mostly wait for the kernel.

use std::sync::Mutex;
use std::thread;

use sandglass_types::error::Chain;

use crate::engine::EngineError;
use crate::locks::lock;

/// Does `beside` on another thread and `here` on this one; one after the other if the machine has no room for a thread.
///
/// # Panics
/// As either of them does.
pub(crate) fn side_by_side<A: Send, B>(
    beside: impl FnOnce() -> A + Send,
    here: impl FnOnce() -> B,
) -> (A, B) {
    // Whoever comes first takes it: the thread, or this one if there is none.
    let beside = Mutex::new(Some(beside));
    let run = || lock(&beside).take().map(|beside| beside());
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, run);
        let here = here();
        let beside = match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_no_room) => run(),
        };
        (beside.unwrap_or_else(|| unreachable!("it is taken once")), here)
    })
}

/// Both results, or the first failure. A second one goes to the log, because it may have a reason of its own.
pub(crate) fn both<A, B>(
    first: Result<A, EngineError>,
    second: Result<B, EngineError>,
) -> Result<(A, B), EngineError> {
    match (first, second) {
        (Ok(first), Ok(second)) => Ok((first, second)),
        (Err(first), Err(second)) => {
            tracing::warn!(error = %Chain(&second), "another step failed as well");
            Err(first)
        }
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_done() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (beside, here) = side_by_side(move || receiver.recv(), || sender.send(7));
        assert_eq!((beside, here), (Ok(7), Ok(())));
    }
}
