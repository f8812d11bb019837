//! From what a guest was promised to what its sandbox may use on the host.

use sandglass_linux::cgroup::Ceiling;
use sandglass_types::Limits;

/// Length of the period in which the CPU quota is handed out to a guest, in microseconds. With the kernel's default of
/// 100 ms, a guest that used up its quota answers nothing for up to that long.
const RUN_PERIOD_MICROS: u64 = 10_000;

/// Length of the period while a sandbox is made, the longest there is. The share is the same, but all that `runsc`
/// needs fits into one period, so it is not held up although it runs on more cores at a time than the guest may.
const MAKE_PERIOD_MICROS: u64 = 1_000_000;

/// What the engine's own processes need besides the guest's memory, measured as what the control group was charged
/// beyond the guest's `used`: 14 MiB for sentry and gofer after the start; 45 MiB with 100 processes in the guest, which
/// are stub processes, page tables and kernel stacks on the host. So a base with some room, and a share per process.
const ENGINE_BASE_KIB: u64 = 32 * 1024;
const ENGINE_PER_PROCESS_KIB: u64 = 256;

/// The limits of a sandbox's control group before its guest runs.
pub(super) fn while_made(limits: Limits) -> Ceiling {
    ceiling(limits, MAKE_PERIOD_MICROS)
}

/// The limits of a sandbox's control group from then on.
pub(super) fn while_running(limits: Limits) -> Ceiling {
    ceiling(limits, RUN_PERIOD_MICROS)
}

fn ceiling(limits: Limits, cpu_period_micros: u64) -> Ceiling {
    let engine_kib = ENGINE_BASE_KIB + ENGINE_PER_PROCESS_KIB * u64::from(limits.processes());
    Ceiling {
        cpu_quota_micros: cpu_period_micros * u64::from(limits.cpus()),
        cpu_period_micros,
        memory_bytes: (u64::from(limits.memory_mib()) << 20) + (engine_kib << 10),
        processes: host_processes(limits.processes()),
    }
}

/// How many host threads a sandbox may have, given how many the guest may: gVisor uses about two per guest process
/// and some tens of its own. The engine dies when it hits this, so it is a backstop: the agent sets the real limit.
fn host_processes(guest: u32) -> u64 {
    u64::from(guest) * 22 / 10 + 100
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_s_own_needs_come_on_top() {
        let ceiling = while_running(Limits::default());
        assert_eq!((ceiling.cpu_quota_micros, ceiling.cpu_period_micros), (20_000, 10_000));
        assert_eq!(ceiling.memory_bytes, (1024 + 32 + 128) * 1024 * 1024);
        assert_eq!(ceiling.processes, 1226);
        let longer = Ceiling { cpu_quota_micros: 2_000_000, cpu_period_micros: 1_000_000, ..ceiling };
        assert_eq!(while_made(Limits::default()), longer);
    }
}
