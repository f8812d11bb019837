//! Sandboxes created, used, paused, resumed and ended, many at a time, and what is left of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::task::JoinSet;

use super::proc::{self, Halves};
use super::report::{Bound, Report};
use super::server::{Endpoint, Server};
use super::wire::{Connection, SANDBOX_TIMEOUT};
use super::{megabytes, millis};
use crate::client::Reach;

/// How long the machine may take to be as it was.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at what there is. Twice the same is called stable.
const INTERVAL: Duration = Duration::from_millis(500);

/// The most that the memory of a half of the server may grow, in percent.
const GROWTH: f64 = 10.0;

/// How many sandboxes there are, of which kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Created, used and ended.
    pub(crate) cycles: u32,
    /// Paused and resumed as well.
    pub(crate) pauses: u32,
    /// At a time.
    pub(crate) parallel: u32,
}

pub(crate) async fn run(
    server: &Server,
    endpoint: &Endpoint,
    options: Options,
    report: &mut Report,
) -> anyhow::Result<()> {
    let Options { cycles, pauses, parallel } = options;
    // What the server makes once and keeps is no leak.
    for kind in [Kind::Used, Kind::Paused] {
        for result in cycle_all(endpoint, kind, parallel, parallel).await? {
            report.keep(result.context("before the start"));
        }
    }
    let halves = Halves::of(server.pid())?;
    let before = stable(server, halves).await?;
    let memory = [proc::rss(halves.serve)?, proc::rss(halves.host)?];
    let started = Instant::now();
    for (kind, name, count) in [
        (Kind::Used, "create, run, kill", cycles),
        (Kind::Paused, "create, run, pause, resume, run, kill", pauses),
    ] {
        let results = cycle_all(endpoint, kind, count, parallel).await?;
        let times = results.into_iter().filter_map(|result| report.keep(result)).collect();
        report.series(name, "ms", times);
    }
    let took = started.elapsed();
    report.series("sandboxes", "per second", vec![f64::from(cycles + pauses) / took.as_secs_f64()]);
    report.keep(as_before(server, halves, &before).await);
    for (name, pid, before) in [
        ("memory that serve has more (RSS)", halves.serve, memory[0]),
        ("memory that host has more (RSS)", halves.host, memory[1]),
    ] {
        let before = megabytes(before);
        let growth = (megabytes(proc::rss(pid)?) - before) / before * 100.0;
        report.target(name, Bound::AtMost, GROWTH, "%", Some(growth));
    }
    let failed = u32::try_from(report.failed).unwrap_or(u32::MAX);
    report.target("failures", Bound::AtMost, 0.0, "", Some(f64::from(failed)));
    Ok(())
}

/// What happens to a sandbox between its start and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A command runs in it.
    Used,
    /// It is paused and resumed as well; every second one is paused when it is ended.
    Paused,
}

/// Runs all cycles, so many at a time; how long each took, in milliseconds.
async fn cycle_all(
    endpoint: &Endpoint,
    kind: Kind,
    cycles: u32,
    parallel: u32,
) -> anyhow::Result<Vec<anyhow::Result<f64>>> {
    let next = Arc::new(AtomicU32::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..parallel {
        let (endpoint, next) = (endpoint.clone(), Arc::clone(&next));
        workers.spawn(async move {
            let mut results = Vec::new();
            loop {
                let turn = next.fetch_add(1, Ordering::Relaxed);
                if turn >= cycles {
                    break;
                }
                results.push(cycle(&endpoint, kind, turn).await);
            }
            results
        });
    }
    let mut all = Vec::new();
    while let Some(results) = workers.join_next().await {
        all.extend(results?);
    }
    Ok(all)
}

/// One sandbox from its start to its end, over a connection of its own.
async fn cycle(endpoint: &Endpoint, kind: Kind, turn: u32) -> anyhow::Result<f64> {
    let started = Instant::now();
    let mut connection = Connection::open(&endpoint.url).await?;
    let sandbox = connection.create(&endpoint.key).await.context("create")?;
    let used = async {
        says(&mut connection, &sandbox, "echo hi | tee /dev/shm/said").await?;
        if kind == Kind::Paused {
            let api = endpoint.api()?;
            api.pause(&sandbox.id, true).await.context("pause")?;
            api.resume(&sandbox.id, SANDBOX_TIMEOUT, true).await.context("resume")?;
            // The server drops a client's connections into a sandbox that stops.
            let mut connection = Connection::open(&endpoint.url).await?;
            says(&mut connection, &sandbox, "cat /dev/shm/said").await.context("after the pause")?;
            if turn.is_multiple_of(2) {
                api.pause(&sandbox.id, true).await.context("pause again")?;
            }
        }
        anyhow::Ok(())
    }
    .await;
    let killed = endpoint.api()?.kill(&sandbox.id).await;
    used.context("run")?;
    killed.context("kill")?;
    Ok(millis(started.elapsed()))
}

/// Runs a command that is to say hi.
async fn says(connection: &mut Connection, sandbox: &Reach, command: &str) -> anyhow::Result<()> {
    let output = connection.shell(sandbox, command).await?.end().await?;
    if output != b"hi\n" {
        bail!("the command wrote {:?}", String::from_utf8_lossy(&output));
    }
    Ok(())
}

/// What there is of each kind: by the ledger, and by the descriptors of both halves.
type Counts = BTreeMap<String, u64>;

fn counts(server: &Server, halves: Halves) -> anyhow::Result<Counts> {
    let ledger = server.ledger()?;
    let kinds = ledger["counts"].as_object().context("the ledger counts nothing")?;
    let mut counts: Counts = kinds
        .iter()
        .map(|(kind, count)| {
            let all = ["owned", "spare", "left_over"].map(|field| count[field].as_u64().unwrap_or_default());
            (kind.clone(), all.iter().sum())
        })
        .collect();
    counts.insert("sandboxes".into(), ledger["sandboxes"].as_u64().unwrap_or_default());
    for (half, pid) in [("serve", halves.serve), ("host", halves.host)] {
        let open = proc::descriptors(pid)?;
        counts.extend(open.into_iter().map(|(kind, count)| (format!("{half} has open: {kind}"), count)));
    }
    Ok(counts)
}

/// The counts, when nothing is being made or removed any more.
async fn stable(server: &Server, halves: Halves) -> anyhow::Result<Counts> {
    let deadline = Instant::now() + PATIENCE;
    let mut last = None;
    loop {
        let now = counts(server, halves)?;
        if last.as_ref() == Some(&now) && now["sandboxes"] == 0 {
            return Ok(now);
        }
        if Instant::now() > deadline {
            bail!("the server does not come to rest: {now:?}");
        }
        last = Some(now);
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Waits until there is no more of anything than before.
async fn as_before(server: &Server, halves: Halves, before: &Counts) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = counts(server, halves)?;
        let more = growth(before, &now);
        if more.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("more is there than at the start: {}", more.join(", "));
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

fn growth(before: &Counts, after: &Counts) -> Vec<String> {
    let was = |kind: &String| before.get(kind).copied().unwrap_or_default();
    let more = after.iter().filter(|(kind, count)| **count > was(kind));
    more.map(|(kind, count)| format!("{kind}: {} before, {count} now", was(kind))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_grew_is_told() {
        let counts = |pairs: &[(&str, u64)]| -> Counts {
            pairs.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect()
        };
        let before = counts(&[("file", 2), ("mount", 1)]);
        assert_eq!(growth(&before, &before), [""; 0]);
        assert_eq!(growth(&before, &counts(&[("file", 1)])), [""; 0]);
        let after = counts(&[("file", 3), ("mount", 1), ("process", 4)]);
        assert_eq!(growth(&before, &after), ["file: 2 before, 3 now", "process: 0 before, 4 now"]);
    }
}
