//! The end of a sandbox: everything that it owned is removed, however often that takes.

use std::sync::Arc;
use std::time::Duration;

use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, SandboxId, SandboxState};
use tokio::time::{Instant, sleep};

use super::request::Reply;
use super::{Owner, Pauses, Request};
use crate::lifecycle::Event;
use crate::runs;

impl Owner<'_> {
    /// The end that could not be stored. Mostly the disk is full, perhaps with what this very sandbox wrote, so it goes
    /// first and makes room. Should this server die before the end is stored, the next one finds a sandbox without
    /// processes, and ends it as well.
    pub(super) async fn remove_and_settle(&mut self, event: Event, why: &str, mut killer: Option<Reply>) {
        let (mut removed, mut pauses) = (false, Pauses::new());
        loop {
            removed = removed || self.remove().await;
            let stored = self.settle(event, why).await;
            if let Some(killer) = killer.take_if(|_| removed || stored) {
                let _gone = killer.send(Ok(()));
            }
            if stored {
                return;
            }
            self.answer_for(pauses.next()).await;
        }
    }

    /// Lets time pass. Requests are answered meanwhile.
    pub(super) async fn answer_for(&mut self, pause: Duration) {
        let mut passed = std::pin::pin!(sleep(pause));
        loop {
            tokio::select! {
                () = &mut passed => return,
                Some((_, request)) = self.next_request() => answer_at_end(&self.row.id, request),
            }
        }
    }

    /// Removes all that it owns, however often that takes.
    pub(super) async fn end(&mut self) {
        self.make_unreachable();
        let (started, mut pauses) = (Instant::now(), Pauses::new());
        loop {
            if self.remove().await && self.remove_image().await {
                self.settle(Event::Removed, "nothing of it is left").await;
            }
            if self.row.state == SandboxState::Ended {
                if self.row.models.is_some()
                    && let Err(error) = self.shared.store.close_unheld_budgets(self.shared.clock.now()).await
                {
                    // The reconciler does it as well.
                    tracing::error!(sandbox = %self.row.id, error = %Chain(&error), "its budget could not be closed yet");
                }
                self.shared.metrics.removed(started.elapsed());
                return;
            }
            self.answer_for(pauses.next()).await;
        }
    }

    /// Removes the image that it may have been paused to. `true` if there is none any more.
    pub(super) async fn remove_image(&self) -> bool {
        let removed = self.shared.host.remove_image(&self.row.id).await;
        if let Err(error) = &removed {
            tracing::error!(sandbox = %self.row.id, error = %Chain(error), "its image could not be removed yet");
        }
        removed.is_ok()
    }

    /// One try. Requests are answered meanwhile.
    pub(super) async fn remove(&mut self) -> bool {
        let mut destroying = Box::pin({
            let (shared, row) = (Arc::clone(&self.shared), self.row.clone());
            async move {
                runs::before_it_goes(&shared, &row).await;
                sandglass_failpoint::hit_async("control.end.destroy").await.map_err(crate::injected)?;
                shared.host.destroy(&row.id).await.map_err(Error::from)
            }
        });
        loop {
            tokio::select! {
                outcome = &mut destroying => {
                    if let Err(error) = &outcome {
                        tracing::error!(sandbox = %self.row.id, error = %Chain(error), "could not be removed yet");
                    }
                    return outcome.is_ok();
                }
                Some((_, request)) = self.next_request() => answer_at_end(&self.row.id, request),
            }
        }
    }
}

/// What is answered once the end has begun.
fn answer_at_end(id: &SandboxId, request: Request) {
    match request {
        Request::Kill(reply) => drop(reply.send(Ok(()))),
        Request::Capture { reply, .. } => {
            drop(reply.send(Err(Error::new(ErrorKind::Conflict, "the sandbox is being ended"))));
        }
        request => request.refuse(crate::not_found(id)),
    }
}
