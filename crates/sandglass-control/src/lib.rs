//! The product: the life of sandboxes, templates, and the reconcilers.
//!
//! [`Control`] has the verbs. Each sandbox is owned by one task (`owner`), which moves it by the rule in
//! [`lifecycle`] and stores every move first; [`reconcile`] starts such tasks for what an earlier server left.
//! Nothing here knows HTTP or SQL, or has privilege: the machine is asked through the host.
#![forbid(unsafe_code)]

mod accounts;
mod admission;
mod agent;
mod ahead;
mod auto_resume;
mod cold;
mod command;
pub mod control;
mod definition;
mod egress;
mod governor;
mod images;
mod kept;
pub mod lifecycle;
pub mod live;
pub mod metrics;
mod owner;
mod pools;
pub mod reconcile;
pub mod request;
mod room;
mod runs;
mod secret;
mod shared;
mod stale;
pub mod template;
mod traffic;
mod volume_marks;

pub use admission::Budgets;
pub use auto_resume::Sleeper;
pub use control::{
    Broker, CameBy, CollectFiles, Collection, Config, Content, Control, DiskUse, Found, FoundFile,
    GrantRequest, GrantedModels, KnownConnection, KnownTemplate, ListSnapshots, LogEntry, LogLevel,
    MAX_CHILDREN, MAX_GRANTED, MAX_POOL, MAX_RUN_EVENTS, Models, OwnConnection, Patience, Purse, RunDetail,
    VolumesConfig,
};
pub(crate) use control::{granted, in_between, injected, not_found, stored};
pub use definition::TemplateDefinition;
pub use egress::Egress;
pub use kept::Kept;
pub use live::{DialError, GuestStream, Live};
pub use request::{AskedVolume, CreateSandbox};
pub use runs::{COMPUTE, CreateRun, Prices as ComputePrices, RunsConfig};
pub use secret::{NewKey, PREFIX as KEY_PREFIX, VALUE_LEN as KEY_VALUE_LEN};
pub use traffic::TrafficToken;
