//! Tables of prices, as budgets began with them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_models::price::Prices;
use sandglass_store::Store;
use sandglass_types::Digest;
use sandglass_types::error::Chain;

/// Most tables that are remembered: one for each change of the configuration while budgets are open.
const MOST: usize = 64;

/// Those that were asked for.
#[derive(Debug, Default)]
pub(crate) struct Tables(Mutex<HashMap<Digest, Arc<Prices>>>);

impl Tables {
    /// The table of this digest; `None` if it can't be had, so that nothing can be charged by it.
    pub(crate) async fn of(&self, store: &dyn Store, digest: Digest) -> Option<Arc<Prices>> {
        if let Some(known) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&digest) {
            return Some(Arc::clone(known));
        }
        let text = match store.prices(digest).await {
            Ok(text) => text?,
            Err(error) => {
                tracing::error!(error = %Chain(&error), "a table of prices can't be read");
                return None;
            }
        };
        let prices = match Prices::kept(&text) {
            Ok(prices) => Arc::new(prices),
            Err(error) => {
                tracing::error!(%digest, error = %Chain(&error), "a table of prices can't be used");
                return None;
            }
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(digest, Arc::clone(&prices));
        Some(prices)
    }
}
