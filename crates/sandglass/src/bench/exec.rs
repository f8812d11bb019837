//! One command in a sandbox that runs.

use std::time::Instant;

use anyhow::Context as _;

use super::millis;
use super::report::{Bound, Report};
use super::server::Endpoint;
use super::wire::Connection;
use crate::cli;
use crate::client::Reach;

/// What spawns inside, and prints how long each spawn took in nanoseconds, as a JSON list.
const SPAWN: &str = include_str!("../../../../benches/spawn.py");

/// Samples of one kind before the other has its turn: the process inside is started once a block.
const BLOCK: u32 = 5;

/// How much may be added to the spawn inside, in milliseconds.
const MAX_ADDED: f64 = 2.0;

/// How long it may take, in milliseconds.
const MAX_P50: f64 = 20.0;

pub(crate) async fn run(
    endpoint: &Endpoint,
    samples: &cli::bench::Samples,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut connection = Connection::open(&endpoint.url).await?;
    let sandbox = connection.create(&endpoint.key).await?;
    for _ in 0..samples.warmup {
        request(&mut connection, &sandbox).await?;
    }
    let (mut requests, mut spawns) = (Vec::new(), Vec::new());
    let mut left = samples.n;
    while left > 0 {
        let block = left.min(BLOCK);
        left -= block;
        // The first of a block is not counted on either side.
        report.keep(request(&mut connection, &sandbox).await);
        for _ in 0..block {
            let result = request(&mut connection, &sandbox).await;
            if result.is_err() {
                // It may be in the middle of something.
                connection = Connection::open(&endpoint.url).await?;
            }
            requests.extend(report.keep(result));
        }
        let result = inside(&mut connection, &sandbox, block).await;
        spawns.extend(report.keep(result).into_iter().flatten());
    }
    endpoint.api()?.kill(&sandbox.id).await?;
    let ours = report.series("request to end", "ms", requests);
    let inside = report.series("reference: spawn inside", "ms", spawns);
    let added = ours.zip(inside).map(|(ours, inside)| ours.p50 - inside.p50);
    report.target("p50 over the reference's", Bound::AtMost, MAX_ADDED, "ms", added);
    report.target("p50", Bound::AtMost, MAX_P50, "ms", ours.map(|ours| ours.p50));
    Ok(())
}

/// `commands.run("true")`.
async fn request(connection: &mut Connection, sandbox: &Reach) -> anyhow::Result<f64> {
    let started = Instant::now();
    let mut events = connection.shell(sandbox, "true").await?;
    events.end().await?;
    let took = started.elapsed();
    events.drain().await?;
    Ok(millis(took))
}

async fn inside(connection: &mut Connection, sandbox: &Reach, count: u32) -> anyhow::Result<Vec<f64>> {
    let count = count.to_string();
    let mut events = connection.start(sandbox, "/usr/bin/python3", &["-c", SPAWN, &count]).await?;
    let output = events.end().await?;
    events.drain().await?;
    let nanos: Vec<u32> = serde_json::from_slice(&output).context("the process inside printed no samples")?;
    Ok(nanos.into_iter().map(|nanos| f64::from(nanos) / 1e6).collect())
}
