//! Sandboxes of a warm pool: from asking for one to the first output of a command in it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err as fs;
use tokio::task::JoinSet;

use super::millis;
use super::report::{Bound, Report};
use super::server::{Endpoint, Server};
use super::wire::Connection;
use crate::cli;
use crate::client::Reach;

/// The template, and how many of it are kept ready.
const TEMPLATE: &str = "bench";
const SIZE: usize = 20;

const COMMAND: &str = "echo hi";
const OUTPUT: &[u8] = b"hi\n";

/// What the first command of a sandbox may take, in milliseconds: over the same in one that runs, in all, and at worst.
const MAX_ADDED: f64 = 6.0;
const MAX_P50: f64 = 25.0;
const MAX_P99: f64 = 60.0;

/// The same when as many ask at once as are ready.
const MAX_BURST: f64 = 200.0;

/// By how much the slowest commands of others may take longer while a pool is filled.
const MAX_DISTURBED: f64 = 2.0;

/// How long the pool may take to be full.
const PATIENCE: Duration = Duration::from_secs(120);

/// The settings of the server.
pub(super) fn settings() -> toml::Table {
    let pool = toml::Table::from_iter([("pool".to_owned(), toml::Value::Integer(SIZE as i64))]);
    let templates = toml::Table::from_iter([(TEMPLATE.to_owned(), toml::Value::Table(pool))]);
    toml::Table::from_iter([("templates".to_owned(), toml::Value::Table(templates))])
}

pub(crate) async fn run(
    server: &Server,
    endpoint: &Endpoint,
    samples: &cli::bench::Samples,
    report: &mut Report,
) -> anyhow::Result<()> {
    build(server, endpoint)?;
    let mut connection = Connection::open(&endpoint.url).await?;
    let running = connection.create(&endpoint.key).await?;
    let (mut first, mut created, mut commands) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..samples.warmup + samples.n {
        server.pool_is_full(endpoint).await?;
        let ours = report.keep(one(endpoint).await);
        let again = report.keep(command(&mut connection, &running).await);
        if round >= samples.warmup {
            created.extend(ours.as_ref().map(|ours| millis(ours.created)));
            first.extend(ours.as_ref().map(|ours| millis(ours.first_output)));
            commands.extend(again.map(millis));
        }
        if let Some(ours) = ours {
            endpoint.api()?.kill(&ours.id).await?;
            server.settle(&ours.id).await?;
        }
    }
    server.pool_is_full(endpoint).await?;
    let mut all = JoinSet::new();
    for _ in 0..SIZE {
        let endpoint = endpoint.clone();
        all.spawn(async move { one(&endpoint).await });
    }
    let burst: Vec<_> = all.join_all().await.into_iter().filter_map(|one| report.keep(one)).collect();
    for one in &burst {
        endpoint.api()?.kill(&one.id).await?;
        server.settle(&one.id).await?;
    }
    let mut disturbed = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while !is_full(endpoint).await? {
        if Instant::now() > deadline {
            bail!("the pool is not full after {} s", PATIENCE.as_secs());
        }
        disturbed.push(millis(command(&mut connection, &running).await?));
    }
    endpoint.api()?.kill(&running.id).await?;
    report.keep(endpoint.api()?.delete_template(TEMPLATE).await);
    let first = report.series("create to first output", "ms", first);
    report.series("of it, create", "ms", created);
    let commands = report.series("reference: in a sandbox that runs", "ms", commands);
    let added = first.zip(commands).map(|(first, commands)| first.p50 - commands.p50);
    report.target("p50 over the reference's", Bound::AtMost, MAX_ADDED, "ms", added);
    report.target("p50", Bound::AtMost, MAX_P50, "ms", first.map(|first| first.p50));
    report.target("p99", Bound::AtMost, MAX_P99, "ms", first.map(|first| first.p99));
    let burst = burst.iter().map(|one| millis(one.first_output)).collect();
    let burst = report.series("the same of 20 at once", "ms", burst);
    report.target("p50 of 20 at once", Bound::AtMost, MAX_BURST, "ms", burst.map(|burst| burst.p50));
    let disturbed = report.series("reference's commands while the pool is filled", "ms", disturbed);
    let times = disturbed.zip(commands).map(|(disturbed, quiet)| disturbed.p99 / quiet.p99);
    report.target("p99 of them against the reference's", Bound::AtMost, MAX_DISTURBED, "times", times);
    Ok(())
}

/// Builds the template, as its author would.
fn build(server: &Server, endpoint: &Endpoint) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("template.toml"), format!("name = \"{TEMPLATE}\"\n"))?;
    let said = Command::new(server.program())
        .args(["template", "build"])
        .arg::<&Path>(folder.path())
        .env("E2B_API_URL", &endpoint.url)
        .env("E2B_API_KEY", &endpoint.key)
        .stdin(Stdio::null())
        .output()?;
    if !said.status.success() {
        bail!("the template was not built: {}", String::from_utf8_lossy(&said.stderr).trim_end());
    }
    Ok(())
}

struct One {
    id: String,
    created: Duration,
    first_output: Duration,
}

/// One sandbox, over a new connection.
async fn one(endpoint: &Endpoint) -> anyhow::Result<One> {
    let started = Instant::now();
    let mut connection = Connection::open(&endpoint.url).await?;
    let sandbox = connection.create_of(&endpoint.key, TEMPLATE).await?;
    let created = started.elapsed();
    command(&mut connection, &sandbox).await?;
    Ok(One { id: sandbox.id, created, first_output: started.elapsed() })
}

/// A command, to its first output.
async fn command(connection: &mut Connection, sandbox: &Reach) -> anyhow::Result<Duration> {
    let started = Instant::now();
    let mut events = connection.shell(sandbox, COMMAND).await?;
    let output = events.first_stdout().await?;
    let took = started.elapsed();
    if output != OUTPUT {
        bail!("the command wrote {:?}", String::from_utf8_lossy(&output));
    }
    events.end().await?;
    events.drain().await?;
    Ok(took)
}

/// Whether all that shall be ready is.
async fn is_full(endpoint: &Endpoint) -> anyhow::Result<bool> {
    let wanted = format!("sandglass_pool_sandboxes {SIZE}");
    let mut connection = Connection::open(&endpoint.url).await?;
    let text = connection.text(&endpoint.key, "/metrics").await.context("the server has no metrics")?;
    Ok(text.lines().any(|line| line == wanted))
}

impl Server {
    /// Waits until all that shall be ready is.
    async fn pool_is_full(&self, endpoint: &Endpoint) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if is_full(endpoint).await? {
                return self.rest().await;
            }
            if Instant::now() > deadline {
                bail!("the pool is not full after {} s", PATIENCE.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
