//! `sandglass host`: the privileged half, and how the other half starts it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use sandglass_egress::policy::Openings;
use sandglass_engine::Engine;
use sandglass_engine::fake::{FakeConfig, FakeEngine};
use sandglass_engine::gvisor::{Driver, GvisorConfig, GvisorEngine, HostPaths};
use sandglass_engine::network::{Assignments, DEFAULT_SIZE, Filter, try_log};
use sandglass_linux::fdpass;
use sandglass_linux::lock::FolderLock;
use sandglass_types::error::Chain;

use crate::cli;
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::startup::{Reason, StartupError};
use crate::watchdog::Watched;

/// How long what no server needs stays in the cache folder after it was last touched. What is there is touched by who starts a
/// server, which says soon afterwards itself what it needs.
const KEEP_UNNEEDED: Duration = Duration::from_secs(24 * 3600);

/// Starts the privileged half. Returns this half's end of the line to it.
///
/// The line is its standard input, and the lock on the data folder its standard output: so the folder stays locked for as
/// long as either half lives, and no descriptor needs a number. A group of its own keeps the terminal's Ctrl-C
/// from it and from the sandboxes: it ends when the line is closed.
pub(crate) fn spawn(
    data: &DataDir,
    guest: &Path,
    runsc: Option<&Path>,
    config: &Config,
    lock: &FolderLock,
) -> anyhow::Result<(Child, OwnedFd)> {
    let (ours, theirs) = fdpass::pair().context("no line to the privileged half")?;
    let program = std::env::current_exe().context("this program can't find itself")?;
    let mut host = Command::new(program);
    host.arg("host")
        .arg("--data-dir")
        .arg(data.path())
        .arg("--cache-dir")
        .arg(&config.cache_dir)
        .arg("--guest")
        .arg(guest)
        .arg("--engine")
        .arg(match data.engine() {
            cli::Engine::Gvisor => "gvisor",
            cli::Engine::Fake => "fake",
        });
    if let Some(runsc) = runsc {
        host.arg("--runsc").arg(runsc);
    }
    for range in Vec::from(config.egress.operator.openings().clone()) {
        host.arg("--open-private").arg(range.to_string());
    }
    host.arg("--connections").arg(config.egress.tracked_connections().to_string());
    host.arg("--connections-per-second").arg(config.egress.per_second.to_string());
    host.arg("--log-format").arg(match config.log_format {
        cli::LogFormat::Text => "text",
        cli::LogFormat::Json => "json",
    });
    let host = host
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::from(lock.as_fd().try_clone_to_owned()?))
        .process_group(0)
        .spawn()
        .context("the privileged half could not be started")?;
    Ok((host, ours))
}

/// Is the privileged half until the line is closed.
pub(crate) fn run(args: cli::Host) -> anyhow::Result<()> {
    let line = std::io::stdin().as_fd().try_clone_to_owned()?;
    let data = DataDir::open(&args.data_dir)?;
    let Started { engine, airlocks } = start(&data, args)?;
    let watched = Watched::start(&data)?;
    let served = sandglass_engine::host::server::run(line, &engine);
    watched.end();
    if let Some(airlocks) = airlocks {
        airlocks.close();
    }
    served.context("the line to the other half failed")
}

/// What the verbs are done with.
struct Started {
    engine: Arc<dyn Engine>,
    /// The network of its sandboxes, if it gives them one.
    airlocks: Option<Arc<Assignments>>,
}

fn start(data: &DataDir, args: cli::Host) -> Result<Started, StartupError> {
    sandglass_linux::process::adopt_orphans()
        .map_err(|error| StartupError::new(Reason::Host, format!("orphans can't be adopted: {error}")))?;
    let runsc = match (args.engine, args.runsc) {
        (cli::Engine::Gvisor, Some(runsc)) => runsc,
        (cli::Engine::Gvisor, None) => return Err(StartupError::new(Reason::NoRunsc, "no runsc was named")),
        (cli::Engine::Fake, _) => {
            let engine = FakeEngine::open(FakeConfig {
                data: data.host(),
                instance: data.instance().clone(),
                agent: args.guest,
                agent_args: vec!["unsealed".into()],
            })?;
            return Ok(Started { engine: Arc::new(engine), airlocks: None });
        }
    };
    let openings = Openings::try_from(args.open_private)
        .map_err(|error| StartupError::new(Reason::Config, format!("--open-private: {error}")))?;
    let log = try_log().inspect_err(|error| {
        let error = Chain(error);
        tracing::warn!(%error, "what packet filters hold up gets no receipt: the kernel can't log it");
    });
    let filter = Filter {
        log: log.is_ok(),
        connections: args.connections,
        per_second: args.connections_per_second,
        ..Filter::new(&openings)
    };
    let airlocks = Arc::new(Assignments::open(&data.host(), data.instance(), filter, DEFAULT_SIZE)?);
    let engine = GvisorEngine::open(GvisorConfig {
        paths: HostPaths { data: data.host(), cache: args.cache_dir },
        instance: data.instance().clone(),
        runsc,
        guest: args.guest,
        guest_args: vec!["init".into()],
        airlocks: Some(Arc::clone(&airlocks) as _),
        driver: Driver::default(),
        keep_unneeded: KEEP_UNNEEDED,
        worker_program: "/proc/self/exe".into(),
    })
    .inspect_err(|_| airlocks.close())?;
    Ok(Started { engine: Arc::new(engine), airlocks: Some(airlocks) })
}
