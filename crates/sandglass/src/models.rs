//! Calls of models: what is read for them before this half sees no file any more, and who makes them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sandglass_control::Control;
use sandglass_egress::proxy::Caller;
use sandglass_egress::resolver::Resolve;
use sandglass_gateway::{Answered, Asked, BadProvider, Config, Gateway, Waits, Witness};
use sandglass_models::token::Signer;
use sandglass_models::totals::Totals;
use sandglass_store::{SpendCaps, Store};
use sandglass_types::{BudgetId, SystemClock};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::client::trust;
use crate::config::models::Models;
use crate::data_dir::DataDir;
use crate::startup::{Reason, StartupError};

/// How long calls that are under way may take to be settled when the server stops.
const SETTLE: Duration = Duration::from_secs(2);

/// What it takes to make calls.
#[derive(Debug)]
pub(crate) struct Calls {
    config: Config,
    /// How many at a time.
    pub(crate) together: usize,
    /// What the rest of the server knows of it.
    pub(crate) control: sandglass_control::Models,
}

/// Reads keys, and whom providers are vouched for by.
pub(crate) fn prepare(
    models: &Models,
    data: &DataDir,
    resolver: &Arc<dyn Resolve>,
) -> Result<Calls, StartupError> {
    let wrong = |error: anyhow::Error| StartupError::new(Reason::Config, format!("{error:#}"));
    let signer = Signer::new(data.models_key()?);
    let totals = Arc::new(Totals::default());
    let system = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty());
    let config = Config {
        providers: models.providers().map_err(wrong)?,
        signer: signer.clone(),
        limits: models.limits,
        caps: models.caps.clone(),
        waits: Waits::default(),
        resolver: Arc::clone(resolver),
        tls: trust::of_machine(system.map(Into::into)).map_err(wrong)?,
        totals: Arc::clone(&totals),
    };
    if models.caps.each == SpendCaps::default() {
        tracing::warn!(
            "no team has a cap on what it spends on models: set models.team_day_micros or models.team_month_micros"
        );
    }
    config.check().map_err(|error: BadProvider| wrong(error.into()))?;
    let control =
        sandglass_control::Models { prices: Arc::clone(&models.prices), signer, most: models.most, totals };
    Ok(Calls { config, together: models.limits.together, control })
}

/// Makes calls until the server stops, and settles then what is under way.
pub(crate) async fn serve(
    calls: Calls,
    callers: mpsc::Receiver<Caller>,
    store: Arc<dyn Store>,
    control: Control,
    stop: CancellationToken,
) {
    let tasks = TaskTracker::new();
    let gateway = Gateway::new(
        calls.config,
        store,
        Arc::new(SystemClock),
        Arc::new(Timeline(control)),
        tasks.clone(),
        stop,
    );
    match gateway {
        Ok(gateway) => gateway.serve(callers).await,
        Err(error) => tracing::error!(%error, "no models can be called"),
    }
    tasks.close();
    if tokio::time::timeout(SETTLE, tasks.wait()).await.is_err() {
        tracing::warn!(
            "calls of models that are under way are charged as they were set aside, by the next start"
        );
    }
}

/// Tells runs of their calls.
#[derive(Debug)]
struct Timeline(Control);

#[async_trait]
impl Witness for Timeline {
    async fn asked(&self, budget: &BudgetId, asked: &Asked<'_>) {
        let data = json!({ "call_id": asked.call, "model": asked.model, "reserved_micros": asked.reserved });
        self.0.tell_run_of_call(budget, "model.request", data).await;
    }

    async fn answered(&self, budget: &BudgetId, answered: &Answered<'_>) {
        let usage = answered.usage.and_then(|usage| serde_json::from_str::<serde_json::Value>(usage).ok());
        let data = json!({
            "call_id": answered.call, "charged_micros": answered.charged, "estimated": answered.estimated, "usage": usage,
        });
        self.0.tell_run_of_call(budget, "model.response", data).await;
    }

    fn spent(&self, budget: &BudgetId) {
        self.0.money_is_spent(budget);
    }
}
