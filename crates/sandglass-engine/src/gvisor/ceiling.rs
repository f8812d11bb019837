//! From what a guest was promised to what its sandbox may use on the host.

use sandglass_linux::cgroup::Ceiling;
use sandglass_types::Limits;

/// Length of the period in which the CPU quota is handed out, in microseconds. With the kernel's default of 100 ms, a
/// guest that used up its quota answers nothing for up to that long. It is the same from the first instruction of
/// `runsc` on: a change from a longer period takes effect only when that one ends, and until then the group has no more
/// than one short period's share (seen on Linux 6.18, control groups of version 1: half a second of silence).
const PERIOD_MICROS: u64 = 10_000;

/// What the engine's own processes need besides the guest's memory, measured as what the control group was charged
/// beyond the guest's `used`: 14 MiB for sentry and gofer after the start; 45 MiB with 100 processes in the guest, which
/// are stub processes, page tables and kernel stacks on the host. So a base with some room, and a share per process.
const ENGINE_BASE_KIB: u64 = 32 * 1024;
const ENGINE_PER_PROCESS_KIB: u64 = 256;

/// The limits of a sandbox's control group.
#[must_use]
pub fn of(limits: Limits) -> Ceiling {
    let engine_kib = ENGINE_BASE_KIB + ENGINE_PER_PROCESS_KIB * u64::from(limits.processes());
    Ceiling {
        cpu_quota_micros: PERIOD_MICROS * u64::from(limits.cpus()),
        cpu_period_micros: PERIOD_MICROS,
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
        let ceiling = of(Limits::default());
        assert_eq!((ceiling.cpu_quota_micros, ceiling.cpu_period_micros), (20_000, 10_000));
        assert_eq!(ceiling.memory_bytes, (1024 + 32 + 128) * 1024 * 1024);
        assert_eq!(ceiling.processes, 1226);
    }
}
