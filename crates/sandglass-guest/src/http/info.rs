//! What the sandbox says about itself.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::{Extension, Json};
use serde::Serialize;

use crate::agent::Agent;
use crate::journal::Entry;
use crate::memory::meminfo;
use crate::settings::Settings;

/// Environment of every process.
pub(super) async fn envs(Extension(settings): Extension<Arc<Settings>>) -> Json<BTreeMap<String, String>> {
    Json(settings.env())
}

/// Use of the sandbox's resources, in bytes and per cent.
#[derive(Debug, Serialize)]
pub(super) struct Metrics {
    ts: u64,
    cpu_count: usize,
    cpu_used_pct: f32,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Busy and total time of all processors since the start, from `/proc/stat`.
pub(crate) fn cpu_times(text: &str) -> (u64, u64) {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or("");
    let times: Vec<u64> = line.split_whitespace().take(8).filter_map(|n| n.parse().ok()).collect();
    let total = times.iter().fold(0_u64, |sum, n| sum.saturating_add(*n));
    let idle = times.iter().skip(3).take(2).fold(0_u64, |sum, n| sum.saturating_add(*n));
    (total.saturating_sub(idle), total)
}

/// Per cent of the time between two looks at [`cpu_times`].
fn cpu_percent(before: (u64, u64), now: (u64, u64)) -> f32 {
    let total = now.1.saturating_sub(before.1);
    if total == 0 {
        return 0.0;
    }
    let per_mille = now.0.saturating_sub(before.0).saturating_mul(1000) / total;
    f32::from(u16::try_from(per_mille.min(1000)).unwrap_or(1000)) / 10.0
}

pub(super) async fn metrics(State(agent): State<Arc<Agent>>) -> Json<Metrics> {
    let reader = Arc::clone(&agent);
    Json(agent.blocking.run(move || read_metrics(&reader)).await)
}

fn read_metrics(agent: &Agent) -> Metrics {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let cpu = cpu_times(&std::fs::read_to_string("/proc/stat").unwrap_or_default());
    let disk = rustix::fs::statvfs(&agent.root).ok();
    let (total, free) = (meminfo(&memory, "MemTotal"), meminfo(&memory, "MemFree"));
    let cache = meminfo(&memory, "Cached");
    let used = total.saturating_sub(free).saturating_sub(cache);
    let blocks = |count: fn(&rustix::fs::StatVfs) -> u64| {
        disk.as_ref().map_or(0, |disk| count(disk).saturating_mul(disk.f_frsize))
    };
    Metrics {
        ts: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
        cpu_used_pct: cpu_percent(agent.last_cpu_times(cpu), cpu),
        mem_total: total,
        mem_used: used,
        mem_cache: cache,
        mem_total_mib: total >> 20,
        mem_used_mib: used >> 20,
        disk_used: blocks(|disk| disk.f_blocks.saturating_sub(disk.f_bfree)),
        disk_total: blocks(|disk| disk.f_blocks),
    }
}

/// What became of commands, oldest first.
pub(super) async fn logs(State(agent): State<Arc<Agent>>) -> Json<Vec<Entry>> {
    Json(agent.journal.all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernel_s_tables() {
        let text = "MemTotal:        1024 kB\nMemFree: 512 kB\nMemFreeX: 1 kB\n";
        assert_eq!(
            (meminfo(text, "MemTotal"), meminfo(text, "MemFree"), meminfo(text, "None")),
            (1 << 20, 1 << 19, 0)
        );
        assert_eq!(cpu_times("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1 1 1 1\n"), (20, 100));
        assert_eq!(cpu_times(""), (0, 0));
    }

    #[test]
    fn per_cent_are_those_between_two_looks() {
        assert!((cpu_percent((0, 0), (25, 100)) - 25.0).abs() < 0.01);
        assert!((cpu_percent((50, 100), (50, 100))).abs() < 0.01);
        assert!((cpu_percent((0, 0), (200, 100)) - 100.0).abs() < 0.01);
    }
}
