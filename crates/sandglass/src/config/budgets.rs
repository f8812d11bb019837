//! What sandboxes may use together: the quota of each team, and what this machine gives.

use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use sandglass_control::{Budgets, VolumesConfig};
use sandglass_store::VolumeQuota;
use sandglass_types::Limits;
use sandglass_types::budget::Amount;
use sandglass_types::limits::Unchecked;
use sandglass_types::volume::{MAX_VOLUME_MIB, MIN_VOLUME_MIB};
use serde::Deserialize;

const MIB: u64 = 1 << 20;

/// What of a machine's memory sandboxes are promised unless the operator says otherwise, in per cent. The rest is for
/// their engines, this server, and what else runs there.
const MEMORY_SHARE: u64 = 80;

/// The same of what is free of the data folder's file system.
const DISK_SHARE: u64 = 90;

/// How often each core is promised unless the operator says otherwise: sandboxes mostly wait.
const CPU_OVERCOMMIT: u64 = 16;

/// Sandboxes that have a disk, each on a loop device, unless the operator says otherwise.
const LOOP_DEVICES: u64 = 1024;

/// What one connection into a sandbox may cost this server in the worst case, in bytes. A body that nobody takes fills the
/// five buffers of 256 KiB on its way: what was read, what is handed over, what waits to be written on the other side,
/// what the session holds of it, and what is there of the answer.
const CONNECTION_COST: u64 = (5 * 256) << 10;

/// What of a machine's memory connections may take unless the operator says otherwise, in per cent.
const CONNECTIONS_SHARE: u64 = 5;

/// Connections that make sense without being asked for.
const CONNECTIONS: RangeInclusive<u64> = 128..=4096;

/// Paused sandboxes whose next computer is made ahead, unless the operator says otherwise, and at most: some 15 MB of memory
/// each, and a loop device.
const AHEAD: u64 = 4;
const MAX_AHEAD: u64 = 1024;

/// What any of these numbers may be.
const RANGE: RangeInclusive<u64> = 1..=1_000_000_000;

/// What each team may have at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Quota {
    sandboxes: u64,
    cpus: u64,
    memory_mib: u64,
    volumes: u64,
    volumes_mib: u64,
}

impl Default for Quota {
    fn default() -> Self {
        let VolumeQuota { count, mib } = VolumesConfig::default().quota;
        Self { sandboxes: 50, cpus: 100, memory_mib: 50 << 10, volumes: count, volumes_mib: mib }
    }
}

/// What volumes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Volumes {
    /// Size of one whose client does not say.
    default_mib: u32,
}

impl Default for Volumes {
    fn default() -> Self {
        Self { default_mib: VolumesConfig::default().default_mib }
    }
}

impl Volumes {
    /// Checks that every number is in range.
    pub(super) fn check(self) -> anyhow::Result<()> {
        if !(MIN_VOLUME_MIB..=MAX_VOLUME_MIB).contains(&self.default_mib) {
            bail!(
                "volumes.default_mib must be between {MIN_VOLUME_MIB} and {MAX_VOLUME_MIB}, not {}",
                self.default_mib
            );
        }
        Ok(())
    }
}

/// What each sandbox may use; what is not said is as [`Limits::default`] has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Sandbox {
    /// How long nobody may use one whose client did not say, in seconds; 0 is for ever.
    idle_timeout_seconds: u64,
    cpus: Option<u32>,
    memory_mib: Option<u32>,
    disk_mib: Option<u32>,
    processes: Option<u32>,
}

impl Sandbox {
    /// How long nobody may use a sandbox, if that is bounded.
    pub(super) fn idle_timeout(self) -> Option<Duration> {
        (self.idle_timeout_seconds > 0).then(|| Duration::from_secs(self.idle_timeout_seconds))
    }

    /// The limits, if every number is in range.
    pub(super) fn limits(self) -> anyhow::Result<Limits> {
        let usual = Unchecked::from(Limits::default());
        let limits = Unchecked {
            cpus: self.cpus.unwrap_or(usual.cpus),
            memory_mib: self.memory_mib.unwrap_or(usual.memory_mib),
            disk_mib: self.disk_mib.unwrap_or(usual.disk_mib),
            processes: self.processes.unwrap_or(usual.processes),
        };
        Limits::try_from(limits).context("sandbox")
    }
}

/// What this machine gives; what is not said is derived from it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Host {
    memory_mib: Option<u64>,
    cpu_overcommit: Option<u64>,
    disk_mib: Option<u64>,
    loop_devices: Option<u64>,
    connections: Option<u64>,
    ahead: Option<u64>,
}

impl Quota {
    /// Checks that every number is in range.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let Self { sandboxes, cpus, memory_mib, volumes, volumes_mib } = *self;
        in_range([
            ("quota.sandboxes", Some(sandboxes)),
            ("quota.cpus", Some(cpus)),
            ("quota.memory_mib", Some(memory_mib)),
            ("quota.volumes", Some(volumes)),
            ("quota.volumes_mib", Some(volumes_mib)),
        ])
    }
}

impl Host {
    /// Checks that every number is in range.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let Self { memory_mib, cpu_overcommit, disk_mib, loop_devices, connections, ahead } = *self;
        if let Some(ahead) = ahead.filter(|ahead| *ahead > MAX_AHEAD) {
            bail!("host.ahead must be at most {MAX_AHEAD}, not {ahead}");
        }
        in_range([
            ("host.memory_mib", memory_mib),
            ("host.cpu_overcommit", cpu_overcommit),
            ("host.disk_mib", disk_mib),
            ("host.loop_devices", loop_devices),
            ("host.connections", connections),
        ])
    }
}

fn in_range<const N: usize>(values: [(&str, Option<u64>); N]) -> anyhow::Result<()> {
    for (key, value) in values {
        if let Some(value) = value.filter(|value| !RANGE.contains(value)) {
            bail!("{key} must be between {} and {}, not {value}", RANGE.start(), RANGE.end());
        }
    }
    Ok(())
}

/// What there is on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Machine {
    memory_mib: u64,
    cores: u64,
    /// What is free where the disks of sandboxes are, and what those take that are there.
    disk_mib: u64,
}

impl Machine {
    /// Looks at the one that this runs on. `disks` are the folders of all sandboxes, of all images, and of all volumes.
    ///
    /// # Errors
    /// The kernel does not say.
    pub(crate) fn look(disks: &[PathBuf], data: &Path) -> anyhow::Result<Self> {
        let meminfo = fs_err::read_to_string("/proc/meminfo")?;
        let cores = std::thread::available_parallelism().context("the cores can't be counted")?.get();
        let system =
            rustix::fs::statvfs(data).with_context(|| format!("{} can't be looked at", data.display()))?;
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        Ok(Self {
            memory_mib: total_memory_mib(&meminfo)
                .context("the kernel does not say how much memory there is")?,
            cores: u64::try_from(cores)?,
            disk_mib: disks.iter().fold(free, |sum, folder| sum.saturating_add(taken(folder, DEPTH))) / MIB,
        })
    }
}

/// How deep files of a sandbox or an image lie below the folder of all of them.
const DEPTH: u32 = 3;

/// What the files of sandboxes or images take that are there, in bytes.
fn taken(folder: &Path, depth: u32) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| {
        let metadata = std::fs::symlink_metadata(entry.path()).ok()?;
        // `st_blocks` counts units of 512 bytes whatever the block size is.
        let own = metadata.blocks().saturating_mul(512);
        let below = if metadata.is_dir() && depth > 1 { taken(&entry.path(), depth - 1) } else { 0 };
        Some(own.saturating_add(below))
    });
    sizes.fold(0, u64::saturating_add)
}

fn total_memory_mib(meminfo: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(rest.trim().strip_suffix(" kB")?.parse::<u64>().ok()? >> 10)
}

/// What is in force on a machine.
pub(crate) fn in_force(quota: Quota, volumes: Volumes, host: Host, machine: Machine) -> Budgets {
    let overcommit = host.cpu_overcommit.unwrap_or(CPU_OVERCOMMIT);
    let connections = host.connections.unwrap_or_else(|| {
        let affordable = machine.memory_mib * MIB / 100 * CONNECTIONS_SHARE / CONNECTION_COST;
        affordable.clamp(*CONNECTIONS.start(), *CONNECTIONS.end())
    });
    Budgets {
        quota: Amount {
            sandboxes: quota.sandboxes,
            cpus: quota.cpus,
            memory_mib: quota.memory_mib,
            ..Amount::UNBOUNDED
        },
        capacity: Amount {
            sandboxes: host.loop_devices.unwrap_or(LOOP_DEVICES),
            cpus: machine.cores.saturating_mul(overcommit),
            memory_mib: host.memory_mib.unwrap_or(machine.memory_mib * MEMORY_SHARE / 100),
            disk_mib: host.disk_mib.unwrap_or(machine.disk_mib * DISK_SHARE / 100),
        },
        connections: usize::try_from(connections).unwrap_or(usize::MAX),
        ahead: usize::try_from(host.ahead.unwrap_or(AHEAD)).unwrap_or(usize::MAX),
        volumes: VolumesConfig {
            default_mib: volumes.default_mib,
            quota: VolumeQuota { count: quota.volumes, mib: quota.volumes_mib },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Machine = Machine { memory_mib: 20_000, cores: 4, disk_mib: 100_000 };

    #[test]
    fn what_is_not_said_is_derived_from_the_machine() {
        let budgets = in_force(Quota::default(), Volumes::default(), Host::default(), MACHINE);
        let capacity = Amount { sandboxes: 1024, cpus: 64, memory_mib: 16_000, disk_mib: 90_000 };
        assert_eq!(budgets.capacity, capacity);
        assert_eq!((budgets.connections, budgets.ahead), (800, 4));
        let quota = Amount { sandboxes: 50, cpus: 100, memory_mib: 51_200, disk_mib: u64::MAX };
        assert_eq!(budgets.quota, quota);
        let tiny = in_force(
            Quota::default(),
            Volumes::default(),
            Host::default(),
            Machine { memory_mib: 500, ..MACHINE },
        );
        assert_eq!(tiny.connections, 128);
    }

    #[test]
    fn what_is_said_is_in_force() {
        let host = Host {
            memory_mib: Some(1),
            cpu_overcommit: Some(2),
            disk_mib: Some(3),
            loop_devices: Some(4),
            connections: Some(5),
            ahead: Some(0),
        };
        let budgets = in_force(
            Quota { sandboxes: 6, cpus: 7, memory_mib: 8, volumes: 9, volumes_mib: 10 },
            Volumes { default_mib: 11 },
            host,
            MACHINE,
        );
        assert_eq!(budgets.capacity, Amount { sandboxes: 4, cpus: 8, memory_mib: 1, disk_mib: 3 });
        assert_eq!((budgets.connections, budgets.ahead), (5, 0));
        let volumes = VolumesConfig { default_mib: 11, quota: VolumeQuota { count: 9, mib: 10 } };
        assert_eq!(budgets.volumes, volumes);
        let quota = Amount { sandboxes: 6, cpus: 7, memory_mib: 8, disk_mib: u64::MAX };
        assert_eq!(budgets.quota, quota);
    }

    #[test]
    fn a_machine_is_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        let empty = Machine::look(&[folder.path().to_owned()], folder.path()).unwrap();
        assert!(empty.memory_mib > 100 && empty.cores > 0, "{empty:?}");
        let sandbox = folder.path().join("a");
        std::fs::create_dir(&sandbox).unwrap();
        std::fs::write(sandbox.join("disk.img"), vec![1; 3 << 20]).unwrap();
        std::fs::File::open(sandbox.join("disk.img")).unwrap().sync_all().unwrap();
        assert!(taken(folder.path(), DEPTH) >= 3 << 20);
        assert_eq!(taken(Path::new("/nowhere"), DEPTH), 0);
    }
}
