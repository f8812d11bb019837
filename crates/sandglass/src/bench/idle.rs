//! What sandboxes cost in which nothing happens.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use sandglass_linux::cgroup::{self, Cgroups, Leaf};

use super::megabytes;
use super::proc::{self, CpuTimes, Halves};
use super::report::{Bound, Report};
use super::server::{Endpoint, Server};
use super::wire::Connection;

/// Most memory of a sandbox, in MB.
const MAX_PSS: f64 = 40.0;

/// Most CPU of a sandbox, in percent of a core.
const MAX_CPU: f64 = 0.3;

/// Most memory of both halves of the server, in MB, with so many sandboxes.
const MAX_RSS: f64 = 80.0;
const RSS_AT: u32 = 20;

pub(crate) struct Options {
    pub(crate) count: u32,
    pub(crate) settle: Duration,
    pub(crate) window: Duration,
}

pub(crate) async fn run(
    server: &Server,
    endpoint: &Endpoint,
    options: &Options,
    report: &mut Report,
) -> anyhow::Result<()> {
    let halves = Halves::of(server.pid())?;
    let cgroups = Cgroups::detect(Path::new(cgroup::ROOT), server.instance()?.as_str())?;
    let before = proc::available()?;
    let mut leaves = Vec::new();
    for _ in 0..options.count {
        // Nobody holds a connection to an idle sandbox.
        let created = Connection::open(&endpoint.url).await?.create(&endpoint.key).await;
        if let Some(sandbox) = report.keep(created) {
            leaves.push(cgroups.leaf(&sandbox.id)?);
        }
    }
    tokio::time::sleep(options.settle).await;

    let look = || leaves.iter().map(Look::at_group).collect::<anyhow::Result<Vec<_>>>();
    let look_at_halves = || [halves.serve, halves.host].map(|pid| Look::at(&[pid]));
    let (first, first_halves) = (look()?, look_at_halves());
    tokio::time::sleep(options.window).await;
    let (second, second_halves) = (look()?, look_at_halves());

    let percents = first.iter().zip(&second).map(|(first, second)| second.percent_since(first)).collect();
    let cpu = report.series("CPU of a sandbox", "% of a core", percents);
    let charged = first.iter().zip(&second).map(|(first, second)| second.charged_since(first)).collect();
    report.series("the same, by its control group", "% of a core", charged);
    let memory = leaves.iter().map(memory_of).collect::<anyhow::Result<Vec<_>>>()?;
    let memory = report.series("memory of a sandbox (PSS)", "MB", memory);
    // It is less than nothing if others gave back more meanwhile.
    let taken = megabytes(before) - megabytes(proc::available()?);
    if !leaves.is_empty() {
        let each = taken / f64::from(options.count);
        report.series("memory that the machine lost for each", "MB", vec![each]);
    }
    let mut rss = 0.0;
    for (index, (memory, cpu, pid)) in [
        ("memory of serve (RSS)", "CPU of serve", halves.serve),
        ("memory of host (RSS)", "CPU of host", halves.host),
    ]
    .into_iter()
    .enumerate()
    {
        let own = megabytes(proc::rss(pid)?);
        rss += own;
        report.series(memory, "MB", vec![own]);
        if let (Ok(first), Ok(second)) = (&first_halves[index], &second_halves[index]) {
            report.series(cpu, "% of a core", vec![second.percent_since(first)]);
        }
    }
    report.target("CPU of a sandbox, mean", Bound::AtMost, MAX_CPU, "% of a core", cpu.map(|cpu| cpu.mean));
    report.target("memory of a sandbox, mean", Bound::AtMost, MAX_PSS, "MB", memory.map(|pss| pss.mean));
    if options.count <= RSS_AT {
        report.target("memory of both halves", Bound::AtMost, MAX_RSS, "MB", Some(rss));
    } else {
        report.note(format!("both halves have {rss:.1} MB; the target is for {RSS_AT} sandboxes"));
    }
    Ok(())
}

/// The CPU time of some processes at one moment.
struct Look {
    at: Instant,
    times: CpuTimes,
    /// What a control group was charged, if they are one's, in microseconds.
    charged: u64,
}

impl Look {
    fn at(pids: &[i32]) -> anyhow::Result<Self> {
        Ok(Self { at: Instant::now(), times: proc::cpu_times(pids)?, charged: 0 })
    }

    fn at_group(leaf: &Leaf) -> anyhow::Result<Self> {
        let charged = leaf.usage().context("a sandbox has ended")?.cpu_micros;
        Ok(Self { charged, ..Self::at(&leaf.processes()?)? })
    }

    fn percent_since(&self, before: &Self) -> f64 {
        percent(proc::ran(&before.times, &self.times), self.at - before.at)
    }

    fn charged_since(&self, before: &Self) -> f64 {
        percent(self.charged.saturating_sub(before.charged) * 1000, self.at - before.at)
    }
}

/// Nanoseconds of CPU time in a stretch of time, in percent of a core.
fn percent(ran: u64, time: Duration) -> f64 {
    100.0 * Duration::from_nanos(ran).as_secs_f64() / time.as_secs_f64()
}

fn memory_of(leaf: &Leaf) -> anyhow::Result<f64> {
    let each = leaf.processes()?.into_iter().map(proc::pss).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(megabytes(each.into_iter().sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_core() {
        assert!((percent(90_000_000, Duration::from_secs(30)) - 0.3).abs() < 1e-9);
        assert!((percent(2_000_000_000, Duration::from_secs(1)) - 200.0).abs() < 1e-9);
    }
}
