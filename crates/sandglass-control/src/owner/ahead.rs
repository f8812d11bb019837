//! The computer that a paused sandbox will be resumed in, made before anybody asks for it.
//!
//! It carries the sandbox's id, stands still, and can be thrown away at any time: without it, a resume makes one. What a dead
//! server left of it is removed by the next one, which finds a paused sandbox with something on the machine.

use std::pin::Pin;
use std::time::Duration;

use sandglass_engine::deadline::Deadline;
use sandglass_engine::host::{Host, HostError};
use sandglass_engine::{Feature, SandboxSpec};
use sandglass_types::error::Chain;
use sandglass_types::{Error, PauseMode, SandboxId};

use super::Owner;
use crate::ahead::Place;
use crate::room;

/// How old it is when the watchdog ends it where no server could use it. A server ends none for its age.
const ALONE: Duration = Duration::from_secs(600);

type Making = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// One computer that is made ahead.
pub(super) struct Successor {
    id: SandboxId,
    place: Place,
    /// Until it is made.
    making: Option<Making>,
}

/// What happened to it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is there.
    Made,
    /// It could not be made, or is to be given up: what there is of it must go.
    Lost,
}

impl Owner<'_> {
    /// Begins to make it, if this one is among those that have one, and there is room for it.
    pub(super) async fn prepare(&self) -> Option<Successor> {
        let shared = &self.shared;
        if self.row.pause_mode != PauseMode::Full || shared.engine.refuses(Feature::PrepareRestore) {
            return None;
        }
        // Whoever asked for room just now would have to take it away again.
        if shared.pools.until_plenty().is_some() {
            return None;
        }
        // It takes room from here on, so that of several none is overlooked.
        let place = shared.ahead.place(&self.row.limits)?;
        if !room::is_enough_for(shared, &place).await.unwrap_or(false) {
            return None;
        }
        place.settle();
        let after_millis = u64::try_from(ALONE.as_millis()).unwrap_or(u64::MAX);
        let deadline = Some(Deadline { at: shared.clock.now().plus(ALONE), after_millis });
        let (id, rootfs, limits) = (self.row.id.clone(), self.row.rootfs, self.row.limits);
        let making = make(
            shared.host.clone(),
            SandboxSpec {
                id: id.clone(),
                rootfs,
                limits,
                deadline,
                unused: false,
                volumes: self.row.volumes.clone(),
            },
        );
        Some(Successor { id, place, making: Some(Box::pin(making)) })
    }
}

async fn make(host: Host, spec: SandboxSpec) -> Result<(), Error> {
    sandglass_failpoint::hit_async("control.prepare.host").await.map_err(crate::injected)?;
    let image = spec.id.clone();
    host.prepare_restore(spec, &image).await.map_err(HostError::into)
}

impl Successor {
    /// What happens to it next. May be dropped and called again.
    pub(super) async fn next(&mut self) -> Fate {
        match &mut self.making {
            // To its end, whoever wants the place: what is under way in the host is not to be overtaken.
            Some(making) => {
                let made = making.await;
                self.making = None;
                match made {
                    Ok(()) => Fate::Made,
                    Err(error) => {
                        tracing::warn!(sandbox = %self.id, error = %Chain(&error), "it will be resumed from scratch");
                        Fate::Lost
                    }
                }
            }
            None => {
                self.place.wanted().await;
                Fate::Lost
            }
        }
    }
}

/// Waits until nothing of one is under way any more: what removes it must not be overtaken. What has become of it, if there is
/// one.
pub(super) async fn settled(successor: &mut Option<Successor>) -> Option<Fate> {
    let successor = successor.as_mut()?;
    Some(if successor.making.is_some() { successor.next().await } else { Fate::Made })
}

/// What happens next to one that may not be there; without one, nothing does.
pub(super) async fn fate(successor: &mut Option<Successor>) -> Fate {
    match successor {
        Some(successor) => successor.next().await,
        None => std::future::pending().await,
    }
}
