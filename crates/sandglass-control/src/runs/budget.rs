//! The money of a run: what its sandbox cost is charged, and the rest is given back.

use sandglass_store::{BudgetRow, Charge, Compute, Reservation, Reserved, RunRow, SpendCaps};
use sandglass_types::{CallId, Error};
use serde_json::json;

use crate::Control;
use crate::control::{not_found_run, stored};

/// What the charge of a sandbox is called among the calls of models.
pub const COMPUTE: &str = "compute";

impl Control {
    /// Charges what the sandbox of a run came to, as far as there is money for it, and closes the budget. It may be called again.
    pub(super) async fn settle_run(
        &self,
        row: &RunRow,
        used: Compute,
    ) -> Result<(BudgetRow, Compute), Error> {
        let shared = self.shared();
        let calls = shared.store.calls(&row.budget).await.map_err(stored)?;
        let mut compute = row.compute.unwrap_or(used);
        let earlier = calls.iter().find(|call| call.model == COMPUTE);
        match earlier {
            Some(call) => {
                let charge = Charge {
                    call: call.id,
                    cost: call.reserved,
                    estimated: false,
                    usage: None,
                    at: shared.clock.now(),
                };
                // By a server that died in between.
                if call.settled_at.is_none() {
                    shared.store.charge(&charge).await.map_err(stored)?;
                }
                compute.charged = call.charged.unwrap_or(call.reserved);
            }
            None => compute.charged = self.charge_compute(row, &compute).await?,
        }
        let closed = shared.store.close_budget(&row.budget, shared.clock.now()).await.map_err(stored)?;
        Ok((closed.ok_or_else(|| not_found_run(&row.id))?, compute))
    }

    async fn charge_compute(&self, row: &RunRow, used: &Compute) -> Result<sandglass_types::Micros, Error> {
        let shared = self.shared();
        let mut cost = shared.config.runs.prices.cost(used);
        let call = CallId::random();
        // What is left may become less once, by a call that is settled meanwhile; it never becomes less twice without an end.
        for _ in 0..8 {
            if cost.0 == 0 {
                break;
            }
            let wanted = Reservation {
                call,
                budget: row.budget.clone(),
                model: COMPUTE.to_owned(),
                amount: cost,
                at: shared.clock.now(),
                caps: SpendCaps::default(),
            };
            match shared.store.reserve(&wanted).await.map_err(stored)? {
                Reserved::Held => {
                    let usage =
                        json!({ "cpu_millis": used.cpu_millis, "gib_millis": used.gib_millis }).to_string();
                    let at = shared.clock.now();
                    let charge = Charge { call, cost, estimated: false, usage: Some(usage), at };
                    shared.store.charge(&charge).await.map_err(stored)?;
                    return Ok(cost);
                }
                Reserved::Budget(left) => cost = left,
                Reserved::Closed | Reserved::Day | Reserved::Month => break,
            }
        }
        Ok(sandglass_types::Micros::ZERO)
    }
}
