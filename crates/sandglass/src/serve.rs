//! `sandglass serve`: starts as root, starts its privileged half, gives up all privilege, and only then reads a byte
//! that somebody else sent.

use std::collections::HashMap;
use std::io::{ErrorKind, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sandglass_api::{Plain, Tls};
use sandglass_connections::Connections;
use sandglass_control::metrics::Probes;
use sandglass_control::{Broker, Control, Egress, Patience, template};
use sandglass_egress::proxy::{Callers, Direct};
use sandglass_egress::resolver::{FixedNames, HostResolver, Resolve};
use sandglass_engine::gvisor::HostPaths;
use sandglass_engine::host::Host;
use sandglass_linux::process::{SHORTEST_SLICE, set_slice};
use sandglass_store::{SqliteStore, Store};
use sandglass_types::error::Chain;
use sandglass_types::net::Hostname;
use sandglass_types::{Clock as _, SystemClock};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::certificate::Shown;
use crate::cli::Engine;
use crate::client::trust;
use crate::config::Config;
use crate::config::budgets::{self, Machine};
use crate::data_dir::DataDir;
use crate::models::Calls;
use crate::startup::{Reason, StartupError};
use crate::{admin, certificate, cli, doctor, guest_binary, master_key, models, privileged};

/// How long the privileged half may take to clear its spare network slots when the server stops.
const HOST_PATIENCE: Duration = Duration::from_secs(10);

/// Descriptors for each half: two for each of the most connections that clients may have, and some for each sandbox.
const OPEN_FILES: u64 = 64 << 10;

/// How often memory is looked for that nobody uses any more.
const GIVE_BACK_EVERY: Duration = Duration::from_secs(5);

/// What may stay unused, in bytes: the next transfers want it again.
const UNUSED: usize = 32 << 20;

/// What a person may paste into Python next, with the E2B SDK installed and the variables set.
const EXAMPLE: &str = r#"# in Python, with the E2B SDK (pip install e2b):
from e2b import Sandbox
sandbox = Sandbox.create(timeout=60)
print(sandbox.commands.run("echo hello from $(hostname); whoami; pwd").stdout)
print(sandbox.commands.run("curl -sS -m 8 https://example.com || true").stderr)
sandbox.kill()
"#;

/// Serves until a signal, or until the privileged half is gone.
pub(crate) fn run(args: &cli::Serve) -> anyhow::Result<()> {
    let root = rustix::process::geteuid().is_root();
    let config = Config::resolve(args, root)?;
    if !root && config.engine != Engine::Fake {
        return Err(StartupError::new(Reason::NotRoot, "sandboxes need root to be made").into());
    }
    raise_open_files()?;
    // Sandboxes have it from here as well. So whoever wakes up gets its turn at once, however busy others are.
    if let Err(error) = set_slice(SHORTEST_SLICE) {
        tracing::info!(%error, "the kernel gives no shorter slices of time, so busy sandboxes slow others down more");
    }
    let (data, lock) = DataDir::open_or_create(&config.data_dir, config.engine)?;
    let listener = listen(config.listen)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runsc = match config.engine {
        Engine::Gvisor => {
            let runsc = find_runsc(config.runsc.as_deref())?;
            doctor::before_start(&data, &config.cache_dir, &runsc)?;
            Some(runsc)
        }
        Engine::Fake => {
            tracing::warn!(
                "NOTHING ISOLATES THE SANDBOXES OF THIS SERVER: what runs in them can read, change and reach all that \
                 you can; this is for development alone"
            );
            None
        }
    };
    let paths = HostPaths { data: data.host(), cache: config.cache_dir.clone() };
    let machine = Machine::look(&[paths.sandboxes(), paths.images(), paths.volumes()], data.path())?;
    let budgets = budgets::in_force(config.quota, config.volumes, config.host, machine);
    tracing::info!(?budgets, "what sandboxes may use together");
    let guest_folder = match config.engine {
        Engine::Gvisor => &config.cache_dir,
        // It runs from there for as long as there are sandboxes, and an instance without layers has no word in the cache folder.
        Engine::Fake => &paths.data,
    };
    let guest = guest_binary::install(guest_folder, args.guest.as_deref())?;
    let base = match config.engine {
        Engine::Gvisor => template::prepare(&config.cache_dir, "base", |line| tracing::info!("{line}")),
        Engine::Fake => template::unbuilt("base"),
    };
    let base = base.map_err(StartupError::from)?;
    for warning in config.egress.operator.warnings() {
        tracing::warn!("egress in the configuration: {warning}");
    }
    // Read now: this half will see no file of the machine any more.
    let resolver: Arc<dyn Resolve> = match HostResolver::of_this_machine() {
        Ok(resolver) => Arc::new(resolver),
        Err(error) => {
            let error = Chain(&error);
            tracing::warn!(%error, "sandboxes can resolve no names, whatever they are allowed");
            Arc::new(FixedNames::default())
        }
    };
    let calls = config.models.as_ref().map(|models| models::prepare(models, &data, &resolver)).transpose()?;
    let together = calls.as_ref().map_or(1, |calls| calls.together);
    let (dial, callers) = Direct::new(budgets.connections, together);
    let domain = config.domain.as_deref();
    let shown = match domain {
        Some(domain) => certificate::arrange(&config.tls.source, domain, &data)?,
        None => None,
    };
    // Read now: this half will see no file of the machine any more.
    let key = master_key::read_or_make(config.master_key_file.as_deref(), data.path())?;
    let broker = Broker::new(&key, config.connections.clone());
    let system = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty());
    let services =
        Services { resolver: Arc::clone(&resolver), tls: trust::of_machine(system.map(Into::into))? };
    let front = Front { listener, callers, calls, services, shown, plain: config.tls.plain, address };
    let (mut host, line) = privileged::spawn(&data, &guest, runsc.as_deref(), &config, &lock)?;
    let probes = match Probes::open(host.id()) {
        Ok(probes) => Some(Arc::new(probes)),
        Err(error) => {
            tracing::warn!(%error, "the metrics will not tell how much memory there is");
            None
        }
    };
    let outcome = data.confine().map_err(Into::into).and_then(|cell| {
        match cell.walls {
            Some(walls) => tracing::info!(?walls, identity = ?data.identity(), "gave up all privilege"),
            None => tracing::warn!("not started as root, so this half has all the rights of its user"),
        }
        let templates = HashMap::from([(base.name.clone(), base)]);
        let control = sandglass_control::Config {
            templates,
            max_lifetime: config.max_lifetime,
            idle_timeout: config.idle_timeout,
            domain: config.domain.clone(),
            patience: Patience {
                heartbeat: config.agent_silence / 3,
                silence: config.agent_silence,
                ..Patience::default()
            },
            egress: Egress {
                caps: config.egress.caps(),
                dial: Arc::new(dial),
                domain: config.domain.as_deref().and_then(own_names),
                retention: config.egress.retention,
                operator: config.egress.operator,
                resolver,
                receipts: cell.receipts,
                totals: Arc::default(),
            },
            models: front.calls.as_ref().map(|calls| calls.control.clone()),
            broker,
            runs: config.runs,
            limits: config.limits,
            budgets,
            keep_audit: config.keep_audit,
            pools: config.pools,
            warm_up: true,
            keep_snapshots: config.keep_snapshots,
            compress_after: config.compress_after,
            probes,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(serve(control, &cell.store, front, line))
    });
    // The line is closed by now, so the other half is about to end.
    let ended = wait_for(&mut host);
    drop(lock);
    conclude(outcome, ended)
}

/// Of two halves that failed, the one says why that failed first: the other can only say that its peer is gone.
fn conclude(outcome: anyhow::Result<()>, host: Option<ExitStatus>) -> anyhow::Result<()> {
    if let Some(reason) = host.and_then(|status| status.code()).and_then(Reason::of_code) {
        return Err(StartupError::Reported(reason).into());
    }
    match (outcome, host) {
        (Err(error), Some(status)) if !status.success() && !error.is::<StartupError>() => {
            let what = format!("the privileged half ended ({status}), and nothing works without it");
            Err(StartupError::new(Reason::Host, what).into())
        }
        (outcome, _) => outcome,
    }
}

/// The name of a domain that may carry a port; `None` if it is none that DNS could have.
fn own_names(domain: &str) -> Option<Hostname> {
    domain.split(':').next()?.parse().ok()
}

fn listen(address: SocketAddr) -> Result<TcpListener, StartupError> {
    TcpListener::bind(address).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => {
            StartupError::new(Reason::PortTaken, format!("another program listens on {address}"))
        }
        _ => StartupError::new(Reason::NoSuchAddress, format!("{address} can't be listened on: {error}")),
    })
}

/// Allows both halves as many descriptors as clients and sandboxes may need. The usual soft limit, 1,024, is for
/// programs that still use `select`, and clients alone can use that up.
fn raise_open_files() -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    // None is no limit at all.
    let current = Some(limit.maximum.map_or(OPEN_FILES, |maximum| maximum.max(OPEN_FILES)));
    let raised = Rlimit { current, maximum: limit.maximum.and(current) };
    setrlimit(Resource::Nofile, raised)
        .or_else(|_not_allowed| {
            setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
        })
        .context("the limit of open files can't be raised")
}

/// Where clients and sandboxes come in, and what a client is told of that.
#[derive(Debug)]
struct Front {
    listener: TcpListener,
    callers: Callers,
    /// Who makes calls of models, if there are any.
    calls: Option<Calls>,
    services: Services,
    /// Its certificate, if there is TLS.
    shown: Option<Shown>,
    /// Who may go without.
    plain: Plain,
    address: SocketAddr,
}

/// What requests through connections are made of.
#[derive(Debug)]
struct Services {
    resolver: Arc<dyn Resolve>,
    /// Whom services may be vouched for by.
    tls: rustls::ClientConfig,
}

async fn serve(
    config: sandglass_control::Config,
    store: &Path,
    front: Front,
    line: std::os::fd::OwnedFd,
) -> anyhow::Result<()> {
    let domain = config.domain.clone();
    let tasks = TaskTracker::new();
    let shutdown = CancellationToken::new();
    let (host, answers) = Host::connect(line)?;
    let host_gone = CancellationToken::new();
    tasks.spawn({
        let gone = host_gone.clone().drop_guard();
        let shutdown = shutdown.clone();
        async move {
            answers.await;
            drop(gone);
            shutdown.cancel();
        }
    });
    let Front { listener, callers, calls, services, shown, plain, address } = front;
    let bundle = shown.as_ref().and_then(Shown::bundle);
    let tls = match shown {
        None => None,
        Some(shown) => {
            let (certificate, following) = certificate::follow(shown).await?;
            if let Some(following) = following {
                tasks.spawn(shutdown.clone().run_until_cancelled_owned(following));
            }
            Some(Tls { certificate, plain })
        }
    };
    let store = SqliteStore::open(store).await.map_err(StartupError::from)?;
    let store: Arc<dyn Store> = Arc::new(store);
    check_key(&*store, &config.broker).await?;
    let control = Control::start(config, Arc::clone(&store), host, Arc::new(SystemClock))
        .await
        .map_err(|error| anyhow::anyhow!("{}", sandglass_types::error::Chain(&error)))?;
    // What the last server had under way is charged by now.
    let calls = calls.map(|calls| {
        tasks.spawn(models::serve(
            calls,
            callers.models,
            Arc::clone(&store),
            control.clone(),
            shutdown.clone(),
        ))
    });
    let Services { resolver, tls: believed } = services;
    let grants = Arc::new(control.clone());
    let connections = Connections::new(grants, resolver, believed, tasks.clone(), shutdown.clone());
    tasks.spawn(connections.serve(callers.connections));
    // Only now, so that it is not lost with a start that fails: it is shown once and kept nowhere.
    let key = first_key(&*store).await?;
    // Before anybody is told that it runs: from then on a signal means an orderly stop.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let entrance =
        Entrance { address, tls: tls.as_ref(), bundle: bundle.as_deref(), domain: domain.as_deref() };
    announce(&entrance, key.as_deref(), &control)?;
    tasks.spawn({
        let shutdown = shutdown.clone();
        async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                () = shutdown.cancelled() => {}
            }
            shutdown.cancel();
        }
    });
    let giving_back = async {
        loop {
            tokio::time::sleep(GIVE_BACK_EVERY).await;
            // It may take a while where there is much. It can't fail.
            let _done = tokio::task::spawn_blocking(|| sandglass_linux::memory::give_back(UNUSED)).await;
        }
    };
    tasks.spawn(shutdown.clone().run_until_cancelled_owned(giving_back));
    let listener = tokio::net::TcpListener::from_std(listener)?;
    // On a worker, and not on this thread, which is none: each connection would have to be handed from here to one of them.
    tasks
        .spawn(sandglass_api::serve(listener, callers.edge, tls, control.clone(), shutdown.clone()))
        .await??;
    shutdown.cancel();
    control.stop().await;
    if let Some(calls) = calls {
        calls.await?;
    }
    if host_gone.is_cancelled() {
        bail!("the privileged half ended, and nothing works without it: start the server again");
    }
    tracing::info!("stopped; running sandboxes run on, and the next start takes them up");
    Ok(())
}

/// Checks that what teams keep was sealed with this key.
async fn check_key(store: &dyn Store, broker: &Broker) -> anyhow::Result<()> {
    let kept = store.mark_key(&broker.mark()?).await.map_err(StartupError::from)?;
    if broker.made(&kept) {
        return Ok(());
    }
    let what = "what teams keep was sealed with another master key than this one";
    Err(StartupError::new(Reason::MasterKey, what).into())
}

/// The name of the team that the first start makes.
const FIRST_TEAM: &str = "default";

/// Makes a key if there never was one, for who runs this server, and a team for it if need be, and returns the key's secret: nobody could do
/// anything without.
async fn first_key(store: &dyn Store) -> anyhow::Result<Option<String>> {
    if !store.keys(None).await?.is_empty() {
        return Ok(None);
    }
    let now = SystemClock.now();
    let team = match store.teams().await?.into_iter().find(|team| team.name == FIRST_TEAM) {
        None => store.create_team(FIRST_TEAM, now).await?,
        Some(team) if team.revoked_at.is_some() => return Ok(None),
        Some(team) => team,
    };
    Ok(Some(admin::new_key(store, &team, "first", true, now).await?.secret))
}

/// What clients are told of where they come in.
struct Entrance<'a> {
    address: SocketAddr,
    tls: Option<&'a Tls>,
    /// What to trust, if it is this server's own authority.
    bundle: Option<&'a Path>,
    domain: Option<&'a str>,
}

/// Prints what a client needs, ready to paste.
fn announce(entrance: &Entrance<'_>, key: Option<&str>, control: &Control) -> anyhow::Result<()> {
    let &Entrance { mut address, tls, bundle, domain } = entrance;
    if address.ip().is_unspecified() {
        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    }
    let url = format!("http://{address}");
    let mut out = std::io::stdout().lock();
    if let Some(key) = key {
        writeln!(out, "export E2B_API_KEY={key}")?;
    }
    // What is printed first works as it is, and the rest is a comment.
    let plain = match tls {
        None => true,
        Some(Tls { plain: Plain::Loopback, .. }) => address.ip().is_loopback(),
        Some(Tls { plain, .. }) => *plain == Plain::Everybody,
    };
    let begin = if plain { "# " } else { "" };
    if plain {
        writeln!(out, "export E2B_API_URL={url}\nexport E2B_SANDBOX_URL={url}")?;
    }
    if let Some(domain) = domain.filter(|_| tls.is_some()) {
        writeln!(out, "\n# where that name and all below it lead here:\n{begin}export E2B_DOMAIN={domain}")?;
    }
    if let Some(bundle) = bundle {
        let bundle = bundle.display();
        writeln!(out, "{begin}export SSL_CERT_FILE={bundle} NODE_EXTRA_CA_CERTS={bundle}")?;
    }
    writeln!(out, "\n{EXAMPLE}")?;
    out.flush()?;
    tracing::info!(%address, engine = control.engine().name, version = control.engine().version, "ready");
    Ok(())
}

pub(crate) fn find_runsc(configured: Option<&Path>) -> Result<PathBuf, StartupError> {
    if let Some(path) = configured {
        return Ok(path.to_owned());
    }
    doctor::in_path("runsc").ok_or_else(|| StartupError::new(Reason::NoRunsc, "runsc is not installed"))
}

/// How the privileged half ended; `None` if it takes its time.
fn wait_for(host: &mut Child) -> Option<ExitStatus> {
    let deadline = Instant::now() + HOST_PATIENCE;
    while Instant::now() < deadline {
        match host.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            Ok(Some(status)) => return Some(status),
            Err(error) => {
                tracing::error!(%error, "how the privileged half ended can't be found out");
                return None;
            }
        }
    }
    tracing::warn!("the privileged half still works on something; it ends by itself");
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_half_that_failed_first_is_the_one_that_is_heard() {
        use std::os::unix::process::ExitStatusExt as _;
        let exited = |code: i32| Some(ExitStatus::from_raw(code << 8));
        let concluded = |outcome, host| conclude(outcome, host).unwrap_err().downcast::<StartupError>();
        let gone = || Err(anyhow::anyhow!("the privileged half is gone"));
        let reported = concluded(gone(), exited(Reason::NoCgroups.code().into())).unwrap();
        assert!(matches!(reported, StartupError::Reported(Reason::NoCgroups)), "{reported}");
        let killed = concluded(gone(), Some(ExitStatus::from_raw(9))).unwrap();
        assert_eq!(killed.reason(), Reason::Host);
        assert!(killed.to_string().contains("signal: 9"), "{killed}");
        let ours = Err(StartupError::new(Reason::NewerSchema, "x").into());
        assert_eq!(concluded(ours, exited(1)).unwrap().reason(), Reason::NewerSchema);
        assert!(concluded(Err(anyhow::anyhow!("x")), exited(0)).is_err(), "no reason of the list");
        assert!(conclude(Ok(()), None).is_ok() && conclude(Ok(()), exited(0)).is_ok());
    }

    async fn store(folder: &tempfile::TempDir) -> SqliteStore {
        SqliteStore::open(&folder.path().join("store.db")).await.unwrap()
    }

    #[test]
    fn clients_cannot_use_up_the_descriptors() {
        let before = getrlimit(Resource::Nofile);
        let low = Rlimit { current: Some(256), maximum: before.maximum };
        setrlimit(Resource::Nofile, low).unwrap();
        raise_open_files().unwrap();
        let after = getrlimit(Resource::Nofile);
        assert!(after.current.is_none_or(|current| current > 8192), "{after:?}");
        assert!(after.maximum.is_none_or(|after| before.maximum.is_some_and(|before| after >= before)));
    }

    #[tokio::test]
    async fn the_first_start_makes_a_key_and_no_later_one() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let secret = first_key(&store).await.unwrap().unwrap();
        assert!(secret.starts_with("e2b_"));
        assert_eq!(first_key(&store).await.unwrap(), None);
        let key = store.keys(None).await.unwrap().remove(0);
        store.revoke_key(key.id, SystemClock.now()).await.unwrap();
        assert_eq!(first_key(&store).await.unwrap(), None, "who revokes the last key wants none");
    }

    #[tokio::test]
    async fn a_first_start_that_failed_half_way_does_not_lose_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let team = store.create_team(FIRST_TEAM, SystemClock.now()).await.unwrap();
        assert!(first_key(&store).await.unwrap().is_some());
        assert_eq!(store.keys(None).await.unwrap()[0].team, team.id);
        assert_eq!(store.teams().await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_revoked_team_gets_no_key() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        let team = store.create_team(FIRST_TEAM, SystemClock.now()).await.unwrap();
        store.revoke_team(team.id, SystemClock.now()).await.unwrap();
        assert_eq!(first_key(&store).await.unwrap(), None);
    }
}
