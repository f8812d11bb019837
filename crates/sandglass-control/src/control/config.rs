//! What an operator decides of the product.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use sandglass_types::Limits;

use super::broker::Broker;
use super::models::Models;
use crate::admission::Budgets;
use crate::egress::Egress;
use crate::kept::Kept;
use crate::metrics::Probes;
use crate::runs::RunsConfig;
use crate::template::Template;

/// What an operator decides.
#[derive(Debug, Clone)]
pub struct Config {
    /// Templates by name.
    pub templates: HashMap<String, Template>,
    /// How many unused copies of a template's running state are kept ready, where that is not as the template says.
    pub pools: HashMap<String, u32>,
    /// Whether such a copy runs two login shells before it is handed out. Agents that are scripts can't.
    pub warm_up: bool,
    /// The longest that a sandbox may live, from its creation or from when it was last resumed.
    pub max_lifetime: Duration,
    /// How long nobody may use a sandbox whose client did not say, if that is bounded.
    pub idle_timeout: Option<Duration>,
    /// The domain under which clients reach sandboxes, if there is one.
    pub domain: Option<String>,
    /// How long to wait before something is done.
    pub patience: Patience,
    /// What sandboxes may reach.
    pub egress: Egress,
    /// Which models they may be granted, if there are any.
    pub models: Option<Models>,
    /// What they may use with credentials that they never see.
    pub broker: Broker,
    /// What runs may be.
    pub runs: RunsConfig,
    /// What each of them may use.
    pub limits: Limits,
    /// What they may use together.
    pub budgets: Budgets,
    /// How long rows of the audit are kept.
    pub keep_audit: Duration,
    /// Which snapshots are kept that have no name.
    pub keep_snapshots: Kept,
    /// How long nobody has used a snapshot when it is compressed, if that is done at all.
    pub compress_after: Option<Duration>,
    /// Where the memory of the machine and of this server is read, for who watches it.
    pub probes: Option<Arc<Probes>>,
}

/// How long the owner of a sandbox waits. The defaults are for real machines; tests have less time.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// How often an agent is asked for a sign of life: every 10 s.
    pub heartbeat: Duration,
    /// How long it may take to give one: 30 s, for a machine may be busy elsewhere.
    pub silence: Duration,
    /// The longest sleep before the wall clock is read again, because clocks jump and machines sleep: 5 s.
    pub clock_check: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let [heartbeat, silence, clock_check] = [10, 30, 5].map(Duration::from_secs);
        Self { heartbeat, silence, clock_check }
    }
}
