//! Work on threads that end with it.

use std::io;
use std::thread;

/// Runs `work` on a thread that ends with it, so that what it changes of that thread changes no other; a panic goes on
/// in the caller.
pub(crate) fn on_fresh_thread<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(name.into()).spawn_scoped(scope, work)?;
        Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}
