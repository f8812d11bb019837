//! `sandglass bench`: measures what is promised, against a reference of the same run.
//!
//! Each bench starts a server of its own (this very program on a folder of its own), takes samples of its subject and
//! of its reference in turns, because machines are noisy, ends everything, and asks the ledger whether something is
//! left. Nothing is prepared for a bench that a client would not have, too.

mod cold_create;
mod edge;
mod egress;
mod exec;
mod idle;
mod live;
mod pool;
pub(crate) mod proc;
mod report;
mod restore;
mod server;
mod soak;
mod stats;
mod transfer;
mod volume;
pub(crate) mod wire;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::bench::{Bench, Common, FileSystem, There, Which};
use report::Report;
use server::{Endpoint, PARENT, Server};
use volume::Volume;

/// What a run exits with in which something failed, and with `--check` one in which a target was missed.
const FAILED: u8 = 1;
const MISSED: u8 = 2;

/// Name, and what is wanted.
const TARGETS: [(&str, &str); 10] = [
    ("cold-create", "p50 of create to first output at most 1.0 times that of a bare `runsc run`"),
    ("exec", "p50 of `true` at most 2 ms over the same spawn inside, and at most 20 ms"),
    ("transfer", "100 MB at 200 MB/s or more with the Python SDK, at 500 MB/s or more with a plain client"),
    ("idle", "a sandbox at most 40 MB and 0.3 % of a core; both halves at most 80 MB with 20 sandboxes"),
    (
        "egress",
        "a TLS connection at half the rate of a bare copy loop or more, at most 2 ms later, 1,000 at a time, 64 KB for each",
    ),
    ("soak", "no failure, the ledger as at the start, and at most 10 % more memory"),
    (
        "restore",
        "create at most 1.0 and resume at most 0.5 times a bare `runsc restore`; fork at most 1.0 times that and a checkpoint, and its source stopped at most 1.3 times as long as for a bare one; 20 at once in 0.8 s",
    ),
    (
        "pool",
        "create to first output at most 6 ms over the command alone, p50 25 ms, p99 60 ms; of 20 at once p50 200 ms; p99 of other commands at most doubled by a refill",
    ),
    ("edge", "at most 0.3 ms more than a request from the airlock, and at least 0.7 times its rate"),
    ("live", "the echo of a key in 5 ms, word of a changed file in 20 ms, 100 streams at one time"),
];

/// Runs one bench and prints what it found.
pub(crate) fn run(args: &Bench) -> anyhow::Result<ExitCode> {
    let Some(which) = args.which.as_ref().filter(|_| !args.list) else {
        let mut out = std::io::stdout().lock();
        for (name, target) in TARGETS {
            writeln!(out, "{name:<12} {target}")?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    let (common, there) = which.common();
    let report = match which {
        Which::Egress { .. } => {
            let network = egress::Network::make()?;
            network.run(|| measure(which, Some(&network), Path::new(PARENT), common, there))?
        }
        Which::Pool { on, .. } | Which::Restore { on, .. } if on.file_system == FileSystem::Xfs => {
            let volume = Volume::make()?;
            volume.run(|| measure(which, None, volume.path(), common, there))?
        }
        _ => measure(which, None, Path::new(PARENT), common, there),
    }?;
    let out = &mut std::io::stdout().lock();
    if common.json {
        report.json(out)?;
    } else {
        report.text(out)?;
    }
    Ok(match (report.failed, common.check && report.missed()) {
        (0, false) => ExitCode::SUCCESS,
        (0, true) => ExitCode::from(MISSED),
        _ => ExitCode::from(FAILED),
    })
}

fn measure(
    which: &Which,
    network: Option<&egress::Network>,
    parent: &Path,
    common: &Common,
    there: Option<&There>,
) -> anyhow::Result<Report> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measured(which, network, parent, common, there))
}

impl Which {
    /// Its index in [`TARGETS`] is that of the variant.
    const fn name(&self) -> &'static str {
        let index = match self {
            Self::ColdCreate { .. } => 0,
            Self::Exec { .. } => 1,
            Self::Transfer { .. } => 2,
            Self::Idle { .. } => 3,
            Self::Egress { .. } => 4,
            Self::Soak { .. } => 5,
            Self::Restore { .. } => 6,
            Self::Pool { .. } => 7,
            Self::Edge { .. } => 8,
            Self::Live { .. } => 9,
        };
        TARGETS[index].0
    }

    const fn common(&self) -> (&Common, Option<&There>) {
        match self {
            Self::ColdCreate { common, .. }
            | Self::Idle { common, .. }
            | Self::Egress { common, .. }
            | Self::Restore { common, .. }
            | Self::Pool { common, .. }
            | Self::Edge { common, .. }
            | Self::Soak { common, .. } => (common, None),
            Self::Exec { common, there, .. }
            | Self::Live { common, there, .. }
            | Self::Transfer { common, there, .. } => (common, Some(there)),
        }
    }
}

/// A server, the bench, and the end of both; a signal ends the bench only.
async fn measured(
    which: &Which,
    network: Option<&egress::Network>,
    parent: &Path,
    common: &Common,
    there: Option<&There>,
) -> anyhow::Result<Report> {
    let mut signals = Signals::new()?;
    if let Some(There { url: Some(url), api_key: Some(key) }) = there {
        let endpoint = Endpoint { url: url.trim_end_matches('/').to_owned(), key: key.clone() };
        return signals.interrupt(bench(which, network, None, &endpoint)).await;
    }
    if !rustix::process::geteuid().is_root() {
        bail!("a bench needs root to start a server of its own");
    }
    let settings = match which {
        Which::Pool { .. } => pool::settings(),
        _ => network.map_or_else(toml::Table::new, |_| egress::settings()),
    };
    let mut server = Server::spawn(common, parent, settings)?;
    let outcome = signals
        .interrupt(async {
            let endpoint = server.ready().await?;
            bench(which, network, Some(&server), &endpoint).await
        })
        .await;
    let ledger = server.stop().await;
    let mut report = outcome?;
    report.ledger = report.keep(ledger);
    Ok(report)
}

async fn bench(
    which: &Which,
    network: Option<&egress::Network>,
    server: Option<&Server>,
    endpoint: &Endpoint,
) -> anyhow::Result<Report> {
    let own = || server.context("this bench needs a server of its own");
    let mut report = Report::new(which.name());
    match which {
        Which::ColdCreate { common, samples } => {
            cold_create::run(own()?, endpoint, common, samples, &mut report).await
        }
        Which::Pool { samples, .. } => pool::run(own()?, endpoint, samples, &mut report).await,
        Which::Restore { common, samples, .. } => {
            restore::run(own()?, endpoint, common, samples, &mut report).await
        }
        Which::Exec { samples, .. } => exec::run(endpoint, samples, &mut report).await,
        Which::Live { samples, .. } => live::run(endpoint, samples, &mut report).await,
        Which::Edge { samples, .. } => edge::run(own()?, endpoint, samples, &mut report).await,
        Which::Transfer { n, python, .. } => {
            transfer::run(endpoint, *n, python.as_deref(), &mut report).await
        }
        Which::Idle { count, settle, window, .. } => {
            let [settle, window] = [settle, window].map(|seconds| Duration::from_secs(*seconds));
            let options = idle::Options { count: *count, settle, window };
            idle::run(own()?, endpoint, &options, &mut report).await
        }
        Which::Egress { n, .. } => {
            let network = network.context("this bench needs a network of its own")?;
            egress::run(own()?, endpoint, network, *n, &mut report).await
        }
        Which::Soak { cycles, pauses, parallel, .. } => {
            let options = soak::Options { cycles: *cycles, pauses: *pauses, parallel: *parallel };
            soak::run(own()?, endpoint, options, &mut report).await
        }
    }?;
    Ok(report)
}

/// From now on a signal is an answer to a question, and no end.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The work, to its end or to a signal.
    async fn interrupt<T>(&mut self, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        tokio::select! {
            outcome = work => outcome,
            Some(()) = self.interrupt.recv() => bail!("interrupted"),
            Some(()) = self.terminate.recv() => bail!("interrupted"),
        }
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Millions of bytes.
fn megabytes(bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "the memory of a machine is far below 2^53 bytes")]
    let bytes = bytes as f64;
    bytes / 1e6
}
