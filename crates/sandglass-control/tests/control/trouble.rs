//! An engine whose verbs fail or hang as the test wants.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use sandglass_engine::collect::Tree;
use sandglass_engine::deadline::Deadline;
use sandglass_engine::engine::{AirlockSocket, Compression, Feature, Keep, Presence, SessionEnds};
use sandglass_engine::fake::FakeEngine;
use sandglass_engine::{Engine, EngineError, EngineInfo, Exit, Footprints, SandboxSpec, Stats};
use sandglass_types::{SandboxId, VolumeId};

#[derive(Default)]
struct State {
    failures: BTreeMap<&'static str, VecDeque<EngineError>>,
    held: BTreeSet<&'static str>,
    calls: BTreeMap<&'static str, usize>,
    claims_airlocks: bool,
}

/// What shall go wrong, and what was asked so far. Shared by the test and all engines of its world.
#[derive(Default)]
pub(crate) struct Trouble {
    state: Mutex<State>,
    changed: Condvar,
}

impl Trouble {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Lets the next calls of a verb fail, one for each error.
    pub(crate) fn fail(&self, verb: &'static str, errors: impl IntoIterator<Item = EngineError>) {
        self.state().failures.entry(verb).or_default().extend(errors);
    }

    /// Lets calls of a verb hang until the returned value is dropped.
    pub(crate) fn hold(self: &Arc<Self>, verb: &'static str) -> Held {
        self.state().held.insert(verb);
        Held(Arc::clone(self), verb)
    }

    /// How often a verb was called.
    pub(crate) fn calls(&self, verb: &'static str) -> usize {
        self.state().calls.get(verb).copied().unwrap_or(0)
    }

    /// Lets the engine say that it has airlocks, which it has not.
    pub(crate) fn claim_airlocks(&self) {
        self.state().claims_airlocks = true;
    }

    fn meet(&self, verb: &'static str) -> Result<(), EngineError> {
        let mut state = self.state();
        *state.calls.entry(verb).or_default() += 1;
        state = self.changed.wait_while(state, |state| state.held.contains(verb)).unwrap();
        state.failures.get_mut(verb).and_then(VecDeque::pop_front).map_or(Ok(()), Err)
    }
}

/// A verb hangs while this lives.
pub(crate) struct Held(Arc<Trouble>, &'static str);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.state().held.remove(self.1);
        self.0.changed.notify_all();
    }
}

/// A step that failed.
pub(crate) fn broken() -> EngineError {
    EngineError::Step { step: "do as the test wants", source: "it was to fail".into() }
}

/// The engine with its trouble.
pub(crate) struct Troubled {
    pub(crate) engine: FakeEngine,
    pub(crate) trouble: Arc<Trouble>,
}

impl Engine for Troubled {
    fn info(&self) -> EngineInfo {
        let mut info = self.engine.info();
        if self.trouble.state().claims_airlocks {
            info.refuses.remove(&Feature::Airlock);
        }
        info
    }

    fn create(&self, spec: &SandboxSpec) -> Result<(), EngineError> {
        self.trouble.meet("create")?;
        self.engine.create(spec)
    }

    fn start(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("start")?;
        self.engine.start(id)
    }

    fn pause(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("pause")?;
        self.engine.pause(id)
    }

    fn resume(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("resume")?;
        self.engine.resume(id)
    }

    fn checkpoint(&self, id: &SandboxId, image: &SandboxId, keep: Keep) -> Result<(), EngineError> {
        self.trouble.meet("checkpoint")?;
        self.engine.checkpoint(id, image, keep)
    }

    fn flush_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("flush_image")?;
        self.engine.flush_image(image)
    }

    fn compress_image(&self, image: &SandboxId) -> Result<Compression, EngineError> {
        self.trouble.meet("compress_image")?;
        self.engine.compress_image(image)
    }

    fn expand_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("expand_image")?;
        self.engine.expand_image(image)
    }

    fn restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("restore")?;
        self.engine.restore(spec, image)
    }

    fn prepare_restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("prepare_restore")?;
        self.engine.prepare_restore(spec, image)
    }

    fn keep_disk(&self, id: &SandboxId, image: &SandboxId) -> Result<(), EngineError> {
        self.engine.keep_disk(id, image)
    }

    fn boot(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("boot")?;
        self.engine.boot(spec, image)
    }

    fn create_volume(&self, id: &VolumeId, mib: u32) -> Result<(), EngineError> {
        self.trouble.meet("create_volume")?;
        self.engine.create_volume(id, mib)
    }

    fn remove_volume(&self, id: &VolumeId) -> Result<(), EngineError> {
        self.trouble.meet("remove_volume")?;
        self.engine.remove_volume(id)
    }

    fn open_volume(&self, id: &VolumeId) -> Result<OwnedFd, EngineError> {
        self.engine.open_volume(id)
    }

    fn collect(&self, id: &SandboxId, tree: Tree) -> Result<OwnedFd, EngineError> {
        self.trouble.meet("collect")?;
        self.engine.collect(id, tree)
    }

    fn volumes(&self) -> Result<Vec<VolumeId>, EngineError> {
        self.engine.volumes()
    }

    fn images(&self) -> Result<Vec<SandboxId>, EngineError> {
        self.engine.images()
    }

    fn footprints(&self, ids: &[SandboxId]) -> Result<Footprints, EngineError> {
        self.engine.footprints(ids)
    }

    fn remove_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("remove_image")?;
        self.engine.remove_image(image)
    }

    fn set_deadline(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<(), EngineError> {
        self.trouble.meet("set_deadline")?;
        self.engine.set_deadline(id, deadline)
    }

    fn destroy(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.trouble.meet("destroy")?;
        self.engine.destroy(id)
    }

    fn stats(&self, id: &SandboxId) -> Result<Stats, EngineError> {
        self.engine.stats(id)
    }

    fn list(&self) -> Result<Vec<(SandboxId, Presence)>, EngineError> {
        self.trouble.meet("list")?;
        self.engine.list()
    }

    fn hand_out(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<SessionEnds, EngineError> {
        self.trouble.meet("hand_out")?;
        self.engine.hand_out(id, deadline)
    }

    fn attach(&self, id: &SandboxId) -> Result<SessionEnds, EngineError> {
        self.trouble.meet("attach")?;
        self.engine.attach(id)
    }

    fn airlock_sockets(
        &self,
        id: &SandboxId,
        sockets: &[AirlockSocket],
    ) -> Result<Vec<OwnedFd>, EngineError> {
        self.trouble.meet("airlock_sockets")?;
        self.engine.airlock_sockets(id, sockets)
    }

    fn wait(&self, id: &SandboxId) -> Result<Exit, EngineError> {
        self.trouble.meet("wait")?;
        self.engine.wait(id)
    }
}
