//! Work that waits for the kernel, on threads of its own: the one thread that answers requests must not wait.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// Threads for such work.
pub(crate) const THREADS: usize = 16;

/// Runs blocking work, as much at one time as there are threads.
#[derive(Debug, Clone)]
pub(crate) struct Blocking(Arc<Semaphore>);

impl Default for Blocking {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(THREADS)))
    }
}

impl Blocking {
    /// Runs `work` and returns what it returns. It runs to its end even if the caller is cancelled.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        // The semaphore is never closed, and the work can't panic: a panic ends the agent.
        let permit = Arc::clone(&self.0).acquire_owned().await;
        let result = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        match result.await {
            Ok(result) => result,
            Err(error) => std::panic::resume_unwind(Box::new(error.to_string())),
        }
    }
}
