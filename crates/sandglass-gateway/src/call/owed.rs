//! Money that is set aside for a call, until what the call came to is written down.

use std::sync::Arc;
use std::time::Duration;

use sandglass_store::Charge;
use sandglass_types::error::Chain;
use sandglass_types::{CallId, Micros};
use tokio::runtime::Handle;
use tokio::time::sleep;

use crate::serve::Inner;

/// The waits between tries to write it down while a client waits for it, in milliseconds.
const AGAIN: [u64; 4] = [0, 50, 200, 1000];

/// The wait between tries once nobody waits for it.
const LATER: Duration = Duration::from_secs(20);

/// What a call owes. It is paid whatever becomes of the one who has this: where it is dropped before, it is written down later, unless the
/// server stops; then the next start charges all that was set aside.
#[derive(Debug)]
#[must_use = "it is paid as it stands when this is dropped"]
pub(super) struct Owed {
    inner: Arc<Inner>,
    due: Charge,
    paid: bool,
}

impl Owed {
    /// Nothing, for a call of which it is not known yet whether something is set aside for it.
    pub(super) fn of(inner: Arc<Inner>, call: CallId) -> Self {
        let at = inner.clock.now();
        Self {
            inner,
            due: Charge { call, cost: Micros::ZERO, estimated: false, usage: None, at },
            paid: false,
        }
    }

    /// All that was set aside, as long as nobody says something else.
    pub(super) fn all_of(mut self, reserved: Micros) -> Self {
        (self.due.cost, self.due.estimated) = (reserved, true);
        self
    }

    /// Nothing was set aside.
    pub(super) fn never(mut self) {
        self.paid = true;
    }

    pub(super) const fn call(&self) -> CallId {
        self.due.call
    }

    /// Writes down what it came to. If the store does not take it, that is done later.
    pub(super) async fn pay(mut self, cost: Micros, estimated: bool, usage: Option<String>) {
        self.due = Charge { call: self.due.call, cost, estimated, usage, at: self.inner.clock.now() };
        for wait in AGAIN {
            sleep(Duration::from_millis(wait)).await;
            if write(&self.inner, &self.due).await {
                self.paid = true;
                return;
            }
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if self.paid || self.inner.stop.is_cancelled() || Handle::try_current().is_err() {
            return;
        }
        let (inner, due) = (Arc::clone(&self.inner), self.due.clone());
        self.inner.tasks.spawn(async move {
            let tries = async {
                while !write(&inner, &due).await {
                    sleep(LATER).await;
                }
            };
            inner.stop.run_until_cancelled(tries).await;
        });
    }
}

/// `false` if the store failed.
async fn write(inner: &Inner, charge: &Charge) -> bool {
    let charged = async {
        sandglass_failpoint::hit_async("gateway.call.charge").await.map_err(|error| error.to_string())?;
        inner.store.charge(charge).await.map_err(|error| Chain(&error).to_string())
    };
    match charged.await {
        Ok(true) => true,
        Ok(false) => {
            tracing::info!(call = %charge.call, "a call's budget was closed before its end, and paid what was set aside");
            true
        }
        Err(error) => {
            tracing::error!(call = %charge.call, error, "what a call came to can't be written down");
            false
        }
    }
}
