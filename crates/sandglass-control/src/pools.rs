//! Sandboxes that are ready before anybody asks for one: copies of the running state of a template, each unused, each used
//! once.
//!
//! An entry has an id of its own and no row: it is this process's, which holds the right to own it. What a dead server left
//! of entries is on the machine without a row, so the next one removes it. It stands still, has no token and no route, and is
//! given up as soon as somebody who asks needs its room.

mod plan;
mod room;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandglass_types::budget::{Amount, admit};
use sandglass_types::error::Chain;
use sandglass_types::{Error, Limits, SandboxId, SnapshotId};
use tokio::sync::Notify;
use tokio::time::Instant;

pub(crate) use self::plan::{Wanted, plan, until_calm};
pub(crate) use self::room::in_use;
use crate::images::Lease;
use crate::shared::{Claim, Shared};

use self::plan::Demand;

/// How long a template is left alone of which no copy could be made, and all of them are where the machine lacks something.
const FAILED: Duration = Duration::from_secs(10);

/// One that is ready.
pub(crate) struct Entry {
    /// The right to own it, with its id.
    pub(crate) claim: Claim,
    /// The image that it is a copy of, which stays for as long as this does.
    pub(crate) lease: Lease,
    pub(crate) limits: Limits,
}

impl Entry {
    fn id(&self) -> &SandboxId {
        self.claim.id()
    }
}

/// All that are ready, and how many are wanted.
#[derive(Default)]
pub(crate) struct Pools {
    /// Oldest first.
    entries: Mutex<Vec<Entry>>,
    /// By template.
    demand: Mutex<BTreeMap<String, Demand>>,
    /// When somebody asked for one, first since the last was made, and last.
    asked: Mutex<Option<(Instant, Instant)>>,
    /// Images of which none could be made, and when that was.
    failed: Mutex<BTreeMap<SnapshotId, Instant>>,
    /// When they had to go because this machine lacked something.
    lacked: Mutex<Option<Instant>>,
    /// The one that is being made, or was given up half made.
    making: Mutex<Option<SandboxId>>,
    /// That there is something to do.
    pub(crate) changed: Notify,
}

impl Pools {
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An unused copy of this image, for one who asked for the template.
    pub(crate) fn take(&self, template: &str, image: &SnapshotId) -> Option<Entry> {
        let entry = {
            let mut entries = self.entries();
            let found = entries.iter().position(|entry| entry.lease.id() == image);
            found.map(|at| entries.remove(at))
        };
        let mut demand = self.demand.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(demand) = demand.get_mut(template) {
            let now = Instant::now();
            demand.asked(entry.is_some(), now);
            let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
            *asked = Some((asked.map_or(now, |(first, _)| first), now));
            self.changed.notify_one();
        }
        entry
    }

    /// How long it takes until the next may be made: not while many ask, unless that goes on for long.
    pub(crate) fn until_calm(&self) -> Option<Duration> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let lacked = *self.lacked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lacked) = lacked.filter(|at| now.duration_since(*at) < FAILED) {
            return Some(lacked + FAILED - now);
        }
        let wait = asked.and_then(|(first, last)| until_calm(first, last, now));
        if wait.is_none() {
            *asked = None;
        }
        wait
    }

    /// Puts one back that is unused after all, or adds a new one.
    pub(crate) fn put(&self, entry: Entry) {
        self.entries().push(entry);
        self.changed.notify_one();
    }

    /// The one that is being made, or was given up half made.
    pub(crate) fn making(&self) -> Option<SandboxId> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_making(&self, id: Option<SandboxId>) {
        *self.making.lock().unwrap_or_else(PoisonError::into_inner) = id;
    }

    /// Which copies there are, of which image.
    pub(crate) fn ready(&self) -> Vec<(SandboxId, SnapshotId)> {
        self.entries().iter().map(|entry| (entry.id().clone(), entry.lease.id().clone())).collect()
    }

    /// None could be made of this image.
    pub(crate) fn failed(&self, image: &SnapshotId) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.retain(|_, at| at.elapsed() < FAILED);
        failed.insert(image.clone(), Instant::now());
    }

    /// Whether it is time to make one of this image, if one could not be made before.
    pub(crate) fn can_be_filled(&self, image: &SnapshotId) -> bool {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get(image).is_none_or(|at| at.elapsed() >= FAILED)
    }

    /// How many a template should have of which the operator wants `size`, now.
    pub(crate) fn target(&self, template: &str, size: u32) -> u32 {
        let mut demand = self.demand.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        demand.entry(template.to_owned()).or_insert_with(|| Demand::new(now)).target(size, now)
    }

    /// Ends one, unless it was taken meanwhile. One that can't be ended has no owner any more, so the reconciler ends it.
    pub(crate) async fn give_up(&self, shared: &Shared, id: &SandboxId) {
        let entry = {
            let mut entries = self.entries();
            let found = entries.iter().position(|entry| entry.id() == id);
            found.map(|at| entries.remove(at))
        };
        if let Some(entry) = entry
            && let Err(error) = shared.host.destroy(entry.id()).await
        {
            tracing::error!(sandbox = %id, error = %Chain(&error), "an unused sandbox could not be removed yet");
        }
    }

    /// Ends all of them, because this machine lacks something. `false` if there was none. It is a while until the next is made.
    pub(crate) async fn make_room(&self, shared: &Shared) -> bool {
        *self.lacked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.give_up_all(shared).await
    }

    /// Ends all of them. `false` if there was none.
    pub(crate) async fn give_up_all(&self, shared: &Shared) -> bool {
        let all = self.ready();
        for (id, _) in &all {
            self.give_up(shared, id).await;
        }
        !all.is_empty()
    }

    /// Ends as many as it takes that what there are rows for has room: entries have none, and come after all that has.
    pub(crate) async fn yield_room(&self, shared: &Shared) -> Result<(), Error> {
        while let Some((newest, amount)) = self.all_together() {
            let capacity = &shared.config.budgets.capacity;
            if admit(capacity, &in_use(shared).await?, &amount).is_ok() {
                break;
            }
            tracing::info!(sandbox = %newest, "an unused sandbox makes room");
            self.give_up(shared, &newest).await;
        }
        Ok(())
    }

    /// The newest, and what all of them are promised.
    fn all_together(&self) -> Option<(SandboxId, Amount)> {
        let entries = self.entries();
        let amount = entries.iter().fold(Amount::default(), |sum, entry| sum.and(Amount::of(&entry.limits)));
        Some((entries.last()?.id().clone(), amount))
    }

    /// What all of them are promised.
    pub(crate) fn amount(&self) -> Amount {
        self.all_together().map_or_else(Amount::default, |(_, amount)| amount)
    }
}
