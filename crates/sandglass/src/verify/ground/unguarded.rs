//! A server that lets everything out of its sandboxes, the metadata endpoints included. It is made of values in this
//! process: no server can be told to be so.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use sandglass_control::{Budgets, Control, Egress, Patience, template};
use sandglass_egress::policy::{Barrier, Openings, Operator};
use sandglass_egress::proxy::Caps;
use sandglass_egress::resolver::HostResolver;
use sandglass_egress::retention::Retention;
use sandglass_engine::Engine;
use sandglass_engine::gvisor::{Driver, GvisorConfig, GvisorEngine, HostPaths};
use sandglass_engine::host::Host;
use sandglass_engine::network::{Assignments, Filter};
use sandglass_linux::fdpass;
use sandglass_store::{SqliteStore, Store};
use sandglass_types::error::Chain;
use sandglass_types::{Clock as _, SystemClock};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::super::server::Endpoint;
use super::super::stage::Plan;
use crate::admin;
use crate::cli;
use crate::data_dir::DataDir;

/// How long its sandboxes may live.
const LIFETIME: Duration = Duration::from_secs(3600);

/// How much of their receipts is kept, in bytes.
const RECEIPTS: u64 = 64 << 20;

/// Starts it. It ends with its tasks.
pub(super) async fn start(folder: &Path, plan: &Plan) -> anyhow::Result<(Endpoint, JoinSet<()>)> {
    let (data, lock) = DataDir::open_or_create(&folder.join("data"), cli::Engine::Gvisor)?;
    // As long as this process lives.
    std::mem::forget(lock);
    let filter = Filter { barrier: Barrier::default(), ..Filter::new(&Openings::default()) };
    let airlocks = Arc::new(Assignments::open(&data.host(), data.instance(), filter)?);
    let engine = GvisorEngine::open(GvisorConfig {
        paths: HostPaths { data: data.host(), cache: plan.cache.clone() },
        instance: data.instance().clone(),
        runsc: plan.runsc.clone(),
        guest: plan.guest.clone(),
        guest_args: vec!["init".into()],
        airlocks: Some(airlocks),
        driver: Driver::default(),
    })?;
    let engine: Arc<dyn Engine> = Arc::new(engine);
    let (ours, theirs) = fdpass::pair()?;
    std::thread::spawn(move || sandglass_engine::host::server::run(theirs, &engine));
    let (host, answers) = Host::connect(ours)?;
    let mut tasks = JoinSet::new();
    tasks.spawn(answers);
    let store = SqliteStore::open(&data.path().join("store.db")).await?;
    let now = SystemClock.now();
    let team = store.create_team("default", now).await?;
    let (_, key) = admin::new_key(&store, &team, "verify", now).await?;
    let base = template::prepare(&plan.cache, "base", |_| {})?;
    let config = sandglass_control::Config {
        templates: HashMap::from([(base.name.clone(), base)]),
        max_lifetime: LIFETIME,
        domain: None,
        patience: Patience::default(),
        egress: Egress {
            operator: Operator::unguarded(),
            resolver: Arc::new(HostResolver::of_this_machine()?),
            receipts: data.path().join("receipts"),
            retention: Retention { age: LIFETIME, bytes: RECEIPTS },
            caps: Caps::default(),
            totals: Arc::default(),
        },
        budgets: Budgets::UNBOUNDED,
    };
    let control = Control::start(config, Arc::new(store), host, Arc::new(SystemClock))
        .await
        .map_err(|error| anyhow::anyhow!("{}", Chain(&error)))?;
    let listener = TcpListener::bind("127.0.0.1:0").await.context("no port for a server of the stage")?;
    let url = format!("http://{}", listener.local_addr()?);
    tasks.spawn(async move {
        // It has no errors.
        let _ended = sandglass_api::serve(listener, control, CancellationToken::new()).await;
    });
    Ok((Endpoint { url, key }, tasks))
}
