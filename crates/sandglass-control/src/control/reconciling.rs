//! Store and machine are compared, and what differs is repaired.

use std::time::Duration;

use sandglass_store::SandboxRow;
use sandglass_types::error::Chain;
use sandglass_types::{Error, SandboxId, SandboxState};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{Control, injected, stored};
use crate::owner::Begin;
use crate::reconcile::{self, Repair};

/// How often the store and the machine are compared.
const RECONCILE_EVERY: Duration = Duration::from_secs(30);

/// How often receipts that are not to be kept any longer are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(5 * 60);

/// How long an idempotency key keeps its answer.
const IDEMPOTENCY_RETENTION: Duration = Duration::from_secs(24 * 3600);

impl Control {
    pub(super) async fn keep_reconciling(&self) {
        let mut ticks = interval(RECONCILE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        let mut swept: Option<Instant> = None;
        while self.0.stop.run_until_cancelled(ticks.tick()).await.is_some() {
            if let Err(error) = self.reconcile().await {
                tracing::error!(error = %Chain(&error), "store and machine could not be compared");
            }
            self.renew_templates();
            let before = self.0.clock.now().minus(IDEMPOTENCY_RETENTION);
            if let Err(error) = self.0.store.purge_idempotency(before).await {
                tracing::error!(error = %Chain(&error), "old idempotency keys could not be forgotten");
            }
            self.close_unheld_budgets().await;
            self.forget_runs().await;
            let before = self.0.clock.now().minus(self.0.config.keep_audit);
            if let Err(error) = self.0.store.purge_audit(before).await {
                tracing::error!(error = %Chain(&error), "old rows of the audit could not be removed");
            }
            if swept.is_none_or(|at| at.elapsed() >= SWEEP_EVERY) {
                self.0.config.egress.sweep(&self.0).await;
                self.sweep_snapshots().await;
                self.tidy_cache().await;
                swept = Some(Instant::now());
            }
        }
    }

    /// Repairs what differs. Returns what tells when each sandbox that is taken up can be reached, or can't.
    pub(super) async fn reconcile(&self) -> Result<Vec<oneshot::Receiver<Result<(), Error>>>, Error> {
        let mut adopted = Vec::new();
        // In this order: see `reconcile::plan`.
        let on_machine = self.0.host.list().await?;
        let images = self.0.host.images().await?.into_iter().collect();
        sandglass_failpoint::hit_async("control.reconcile.list").await.map_err(injected)?;
        let rows = self.0.store.on_node(self.0.node, &SandboxState::NOT_ENDED).await.map_err(stored)?;
        let snapshots = self.0.store.snapshots_on_node(self.0.node).await.map_err(stored)?;
        sandglass_failpoint::hit_async("control.reconcile.rows").await.map_err(injected)?;
        let owned = self.0.owned();
        for image in reconcile::unneeded(&images, &rows, &snapshots, &owned) {
            tracing::info!(%image, "removing an image that nobody needs");
            if let Err(error) = self.0.host.remove_image(&image).await {
                tracing::error!(%image, error = %Chain(&error), "it could not be removed");
            }
        }
        self.clear_images(&snapshots).await?;
        // Off this path: what somebody still has mounted is waited for.
        self.0.tasks.spawn(self.0.stop.clone().run_until_cancelled_owned(self.clone().reconcile_volumes()));
        for repair in reconcile::plan(&on_machine, &images, rows, &owned, self.0.clock.now()) {
            tracing::info!(?repair, "reconciling");
            sandglass_failpoint::hit_async("control.reconcile.repair").await.map_err(injected)?;
            match repair {
                Repair::Adopt(row) => {
                    let (reply, outcome) = oneshot::channel();
                    self.take_up(*row, Begin::Adopt(reply));
                    adopted.push(outcome);
                }
                Repair::Rest(row) => self.take_up(*row, Begin::Rest),
                Repair::End(row, event) => self.take_up(*row, Begin::End(event)),
                Repair::Destroy(id) => self.destroy_orphan(id),
            }
        }
        Ok(adopted)
    }

    pub(super) fn take_up(&self, row: SandboxRow, begin: Begin) {
        if let Some(claim) = self.0.claim(&row.id) {
            claim.own(row, begin);
        }
    }

    /// Off the reconciler's path: one that can't be removed must not keep the others from being repaired.
    fn destroy_orphan(&self, id: SandboxId) {
        let host = self.0.host.clone();
        self.0.tasks.spawn(self.0.stop.clone().run_until_cancelled_owned(async move {
            if let Err(error) = host.destroy(&id).await {
                tracing::error!(sandbox = %id, error = %Chain(&error), "an orphan could not be removed");
            }
        }));
    }
}
