//! Sandboxes that are ready before anybody asks for one: copies of the running state of a template, each unused, each used
//! once.
//!
//! An entry has an id of its own and no row: it is this process's, which holds the right to own it. What a dead server left
//! of entries is on the machine without a row, so the next one removes it. It stands still, has no token and no route, and is
//! given up as soon as somebody who asks needs its room ([`crate::room`]).

mod plan;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandglass_types::budget::Amount;
use sandglass_types::error::Chain;
use sandglass_types::{Limits, SandboxId, SnapshotId};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep};

pub(crate) use self::plan::{Wanted, plan, until_calm};
use crate::images::Lease;
use crate::room::{Amounts, Promise, Promises};
use crate::shared::{Claim, Shared};

use self::plan::Demand;

/// How long a template is left alone of which no copy could be made, and all of them are where the machine lacks something.
const FAILED: Duration = Duration::from_secs(10);

/// The wait after one could not be removed.
const AGAIN: Duration = Duration::from_secs(1);

/// How many are removed at one time.
const AT_ONCE: usize = 4;

/// One that is ready, or is being made.
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

    fn amount(&self) -> Amount {
        Amount::of(&self.limits)
    }
}

/// All that takes room.
#[derive(Default)]
struct Entries {
    /// The one that is being made, or was given up half made.
    making: Option<Entry>,
    /// Oldest first.
    ready: Vec<Entry>,
    /// What those take that are being removed, until nothing of them is left.
    ending: BTreeMap<SandboxId, Amount>,
}

/// All that are ready, and how many are wanted.
pub(crate) struct Pools {
    entries: Mutex<Entries>,
    /// The places of those that are removed now.
    removing: Semaphore,
    /// By template.
    demand: Mutex<BTreeMap<String, Demand>>,
    /// When somebody asked for one, first since the last was made, and last.
    asked: Mutex<Option<(Instant, Instant)>>,
    /// Images of which none could be made, and when that was.
    failed: Mutex<BTreeMap<SnapshotId, Instant>>,
    /// When they had to go because this machine lacked something.
    lacked: Mutex<Option<Instant>>,
    /// That there is something to do.
    pub(crate) changed: Notify,
    /// That there is something to do once nobody asks any more.
    asks: Notify,
}

impl Default for Pools {
    fn default() -> Self {
        Self {
            entries: Mutex::default(),
            removing: Semaphore::new(AT_ONCE),
            demand: Mutex::default(),
            asked: Mutex::default(),
            failed: Mutex::default(),
            lacked: Mutex::default(),
            changed: Notify::new(),
            asks: Notify::new(),
        }
    }
}

impl Pools {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An unused copy of this image, and that its room is who asks's until there is a row of it.
    pub(crate) fn take(&self, image: &SnapshotId, promises: &Arc<Promises>) -> Option<(Entry, Promise)> {
        let mut entries = self.entries();
        let at = entries.ready.iter().position(|entry| entry.lease.id() == image)?;
        // It counts as the one or the other all the time.
        let promise = promises.give(entries.ready[at].amount());
        Some((entries.ready.remove(at), promise))
    }

    /// Somebody asked for a copy of this template and gets one, which was `found` here or is made now.
    pub(crate) fn asked(&self, template: &str, found: bool) {
        let mut demand = self.demand.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(demand) = demand.get_mut(template) else { return };
        let now = Instant::now();
        demand.asked(found, now);
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        *asked = Some((asked.map_or(now, |(first, _)| first), now));
        self.asks.notify_one();
    }

    /// How long it takes until the next may be made: not while many ask, unless that goes on for long.
    pub(crate) fn until_calm(&self) -> Option<Duration> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(short) = self.until_plenty() {
            return Some(short);
        }
        let wait = asked.and_then(|(first, last)| until_calm(first, last, now));
        if wait.is_none() {
            *asked = None;
        }
        wait
    }

    /// Returns when somebody has asked, and the next may be made.
    pub(crate) async fn calm_again(&self) {
        self.asks.notified().await;
        while let Some(wait) = self.until_calm() {
            sleep(wait).await;
        }
    }

    /// Puts one back that is unused after all.
    pub(crate) fn put(&self, entry: Entry) {
        self.entries().ready.push(entry);
        self.changed.notify_one();
    }

    /// This one is about to be made, and takes room from now on.
    pub(crate) fn begin(&self, entry: Entry) {
        self.entries().making = Some(entry);
    }

    /// It is not: nothing of it was made yet.
    pub(crate) fn refrain(&self) {
        self.entries().making = None;
    }

    /// The one that was being made is ready.
    pub(crate) fn made(&self) {
        let mut entries = self.entries();
        let made = entries.making.take();
        entries.ready.extend(made);
    }

    /// Which copies there are, of which image.
    pub(crate) fn ready(&self) -> Vec<(SandboxId, SnapshotId)> {
        self.entries().ready.iter().map(|entry| (entry.id().clone(), entry.lease.id().clone())).collect()
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

    /// This machine lacks something: it is a while until the next is made.
    pub(crate) fn lacked(&self) {
        *self.lacked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// How long it takes until anything may be made again for nobody, if this machine lacked something just now.
    pub(crate) fn until_plenty(&self) -> Option<Duration> {
        let lacked = *self.lacked.lock().unwrap_or_else(PoisonError::into_inner);
        FAILED.checked_sub(lacked?.elapsed()).filter(|wait| !wait.is_zero())
    }

    /// How many a template should have of which the operator wants `size`, now.
    pub(crate) fn target(&self, template: &str, size: u32) -> u32 {
        let mut demand = self.demand.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        demand.entry(template.to_owned()).or_insert_with(|| Demand::new(now)).target(size, now)
    }

    /// Those that are being made or removed, and those that are ready, newest first, with what each takes.
    pub(crate) fn amounts(&self) -> (Amounts<SandboxId>, Amounts<SandboxId>) {
        let entries = self.entries();
        let of = |entry: &Entry| (entry.id().clone(), entry.amount());
        let ending = entries.ending.iter().map(|(id, amount)| (id.clone(), *amount));
        let ready = entries.ready.iter().rev().map(of);
        (ending.chain(entries.making.iter().map(of)).collect(), ready.collect())
    }

    /// Begins to end one, unless it was taken meanwhile.
    pub(crate) fn give_up(&self, shared: &Arc<Shared>, id: &SandboxId) {
        let mut entries = self.entries();
        let found = entries.ready.iter().position(|entry| entry.id() == id);
        let entry = found.map(|at| entries.ready.remove(at));
        end(shared, &mut entries, entry);
    }

    /// The same of the one that was being made, and can't be.
    pub(crate) fn give_up_making(&self, shared: &Arc<Shared>) {
        let mut entries = self.entries();
        let making = entries.making.take();
        end(shared, &mut entries, making);
    }

    /// The same of all.
    pub(crate) fn give_up_all(&self, shared: &Arc<Shared>) {
        self.give_up_making(shared);
        for (id, _) in self.ready() {
            self.give_up(shared, &id);
        }
    }
}

/// Removes one, however often that takes; it takes room until then.
fn end(shared: &Arc<Shared>, entries: &mut Entries, entry: Option<Entry>) {
    let Some(entry) = entry else { return };
    entries.ending.insert(entry.id().clone(), entry.amount());
    let of = Arc::clone(shared);
    shared.tasks.spawn(async move {
        let id = entry.id();
        loop {
            let place = of.pools.removing.acquire().await;
            let Err(error) = of.host.destroy(id).await else { break };
            drop(place);
            tracing::error!(sandbox = %id, error = %Chain(&error), "an unused sandbox could not be removed yet");
            // The next server removes what has no row.
            if of.stop.run_until_cancelled(sleep(AGAIN)).await.is_none() {
                break;
            }
        }
        of.pools.entries().ending.remove(id);
        of.pools.changed.notify_one();
    });
}
