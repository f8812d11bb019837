//! Slots that are ready before they are asked for: starting `nft` takes longer than all else.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sandglass_linux::namespace::PinFolder;
use sandglass_types::InstanceId;

use super::{Filter, NetworkError, Slot, SlotName, step};

/// How many slots are kept ready unless the operator says otherwise.
pub const DEFAULT_SIZE: usize = 4;

/// How long nobody must have taken a slot before one is made in advance, unless they run low: while a sandbox comes up,
/// that needs the processors, and waits for the same locks of the kernel.
const REST: Duration = Duration::from_millis(500);

/// How long a slot that is being made may take to be finished when the pool ends.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// How long the pool waits after a failure before it tries again on its own.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Keeps slots ready. Each is given out once; what comes back from a sandbox is destroyed, not reused.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    pins: Arc<PinFolder>,
    instance: InstanceId,
    filter: Filter,
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ready: Vec<Slot>,
    last_taken: Option<Instant>,
    stopping: bool,
    /// Set by the thread when it makes no more.
    ended: bool,
}

impl Pool {
    /// Removes every slot of `instance` that is not in `owned`, as a server that died leaves them, and starts to
    /// make `size` new ones behind `filter`.
    ///
    /// # Errors
    /// A leftover can't be removed, or there is no thread.
    pub fn start(
        pins: Arc<PinFolder>,
        instance: InstanceId,
        filter: Filter,
        size: usize,
        owned: &BTreeSet<SlotName>,
    ) -> Result<Self, NetworkError> {
        for name in Slot::list(&pins, &instance)? {
            if !owned.contains(&name) {
                tracing::info!(slot = %name, "removing a network slot that no sandbox owns");
                Slot::named(&pins, name).destroy()?;
            }
        }
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { pins, instance, filter, size, state, changed });
        let filler = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("network-pool".into())
            .spawn(move || {
                filler.fill();
                filler.lock().ended = true;
                filler.changed.notify_all();
            })
            .map_err(step::<io::Error>("start the pool"))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// A slot that no sandbox has used: a ready one, or one made now.
    ///
    /// # Errors
    /// As [`Slot::create`].
    pub fn take(&self) -> Result<Slot, NetworkError> {
        let ready = {
            let mut state = self.shared.lock();
            state.last_taken = Some(Instant::now());
            state.ready.pop()
        };
        self.shared.changed.notify_all();
        ready.map_or_else(|| self.shared.make(), Ok)
    }

    /// The names of the slots that are ready and belong to no sandbox yet.
    #[must_use]
    pub fn ready(&self) -> Vec<SlotName> {
        self.shared.lock().ready.iter().map(|slot| slot.name().clone()).collect()
    }

    /// Stops making slots and removes those that were not used. Slots that were taken are not touched.
    pub fn shutdown(&self) {
        self.shared.lock().stopping = true;
        self.shared.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(thread) = thread else { return };
        let busy = |state: &mut State| !state.ended && !thread.is_finished();
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), END_PATIENCE, busy);
        // The next server removes what this one leaves, so nobody need wait for it for ever.
        if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            tracing::warn!("a network slot is not finished, and is left to the next server");
        } else if thread.join().is_err() {
            tracing::error!("the thread of the network pool panicked");
        }
        let unused = std::mem::take(&mut self.shared.lock().ready);
        unused.iter().for_each(discard);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    /// Nothing in here panics half way through a change.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self) -> Result<Slot, NetworkError> {
        Slot::create(&self.pins, &self.instance, &self.filter)
    }

    /// Waits until a slot is wanted; `false` when the pool ends.
    fn wanted(&self) -> bool {
        let mut state = self.lock();
        loop {
            if state.stopping {
                return false;
            }
            let rested = state.last_taken.map_or(REST, |last| last.elapsed());
            state = match state.ready.len() {
                few if few < self.size.div_ceil(2) => return true,
                some if some < self.size => match REST.checked_sub(rested) {
                    None | Some(Duration::ZERO) => return true,
                    Some(rest) => {
                        self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0
                    }
                },
                _enough => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn fill(&self) {
        while self.wanted() {
            let made = self.make();
            let mut state = self.lock();
            match made {
                Ok(slot) if state.stopping => {
                    drop(state);
                    discard(&slot);
                }
                Ok(slot) => {
                    state.ready.push(slot);
                    self.changed.notify_all();
                }
                Err(error) => {
                    tracing::warn!(error = %sandglass_types::error::Chain(&error), "no network slot could be made");
                    let go_on = |state: &mut State| !state.stopping;
                    drop(self.changed.wait_timeout_while(state, RETRY_INTERVAL, go_on));
                }
            }
        }
    }
}

fn discard(slot: &Slot) {
    if let Err(error) = slot.destroy() {
        let error = sandglass_types::error::Chain(&error);
        tracing::warn!(slot = %slot.name(), %error, "a network slot could not be removed");
    }
}
