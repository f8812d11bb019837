//! What this instance needs of the cache folder: so much of it stays there.

use std::collections::BTreeSet;
use std::path::Path;

use sandglass_types::error::Chain;
use sandglass_types::{Digest, SandboxId};

use super::cache::{self, Entry, Held};
use super::image::{Image, Source};
use super::record::{Pinned, Record};
use super::{GvisorEngine, layer};
use crate::engine::{EngineError, SandboxSpec, step};
use crate::files::ids_in;
use crate::locks::lock;
use crate::record as records;

impl GvisorEngine {
    /// What a sandbox is made with, unless its image was made with something else. One that comes back with its memory has
    /// the agent that runs in it, if that is still in the cache folder; every other has today's. It stays there at least until
    /// the sandbox has a record.
    pub(super) fn pinned(
        &self,
        spec: &SandboxSpec,
        source: &Source,
    ) -> Result<(Pinned, Held<'_>), EngineError> {
        let own = source.agent()?;
        let agents = [Some(self.layer.digest), own].into_iter().flatten().map(Entry::Agent);
        let held = self.hold(agents.chain([Entry::Rootfs(spec.rootfs)]))?;
        let own = own.filter(|agent| layer::path(&self.holdings.paths, agent).is_dir());
        let agent = own.unwrap_or(self.layer.digest);
        let pinned = Pinned { rootfs: spec.rootfs, agent, runsc: self.runsc.version.clone() };
        source.check(&pinned, spec.limits)?;
        Ok((pinned, held))
    }

    /// Pins what is about to be used. Whether it is there is to be looked at afterwards.
    pub(super) fn hold(&self, entries: impl IntoIterator<Item = Entry>) -> Result<Held<'_>, EngineError> {
        self.pins.hold(entries).map_err(|error| step("say what is needed of the cache folder", error))
    }

    /// What is needed of the cache folder for new agents, sandboxes and images, and whether that is certainly all. Images are
    /// listed last: what goes from a sandbox to an image meanwhile is seen in one of them, and what goes the other way is held
    /// by who does that.
    pub(super) fn needed(&self) -> (BTreeSet<Entry>, bool) {
        let mut needed = BTreeSet::from([Entry::Agent(self.layer.digest)]);
        let mut all = true;
        let mut add = |pinned: &Pinned| {
            needed.extend([Entry::Agent(pinned.agent), Entry::Rootfs(pinned.rootfs)]);
        };
        let paths = &self.holdings.paths;
        for id in listed(&paths.sandboxes(), &mut all) {
            match records::read::<Record>(&paths.sandbox(&id).record(), &id) {
                Some(record) => add(&record.pinned),
                // It is being made, or removed, or its record is damaged.
                None => all &= !paths.sandbox(&id).dir().exists(),
            }
        }
        for id in listed(&paths.images(), &mut all) {
            match Image::at(paths.image(&id)).meta() {
                Ok(meta) => add(&meta.pinned),
                Err(error) if paths.image(&id).exists() => {
                    tracing::warn!(image = %id, error = %Chain(&error), "what it needs can't be read");
                    all = false;
                }
                Err(_) => {}
            }
        }
        (needed, all)
    }

    /// Says what is needed, and removes what no instance needs.
    pub(super) fn tidy(&self, rootfs: &[Digest]) -> Result<(), EngineError> {
        let _alone = lock(&self.tidying);
        self.pins.begin();
        let (mut needed, all) = self.needed();
        needed.extend(rootfs.iter().copied().map(Entry::Rootfs));
        self.hold(needed.iter().copied())?;
        if all {
            self.pins
                .settle(&needed)
                .map_err(|error| step("say what is needed of the cache folder", error))?;
        }
        let removed = cache::sweep(&self.holdings.paths.cache, self.keep_unneeded)
            .map_err(|error| step("tidy the cache folder", error))?;
        for entry in removed {
            tracing::info!(%entry, "removed from the cache folder what no instance needs any more");
        }
        Ok(())
    }
}

fn listed(folder: &Path, all: &mut bool) -> Vec<SandboxId> {
    ids_in(folder).unwrap_or_else(|error| {
        tracing::warn!(%error, "what is needed of the cache folder can't be read");
        *all = false;
        Vec::new()
    })
}
