//! What one sandbox may use.

use serde::{Deserialize, Serialize};

/// Hard limits of one sandbox. Every field has a range; a value outside it is refused at the edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked", into = "Unchecked")]
pub struct Limits {
    cpus: u32,
    memory_mib: u32,
    disk_mib: u32,
    processes: u32,
}

/// A limit outside its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be between {min} and {max}, not {value}")]
pub struct OutOfRange {
    field: &'static str,
    min: u32,
    max: u32,
    value: u32,
}

/// [`Limits`] as they come from outside.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Unchecked {
    /// Whole cores.
    pub cpus: u32,
    /// Memory that programs inside can use, in MiB.
    pub memory_mib: u32,
    /// Size of the writable disk, in MiB.
    pub disk_mib: u32,
    /// Processes and threads inside at one time.
    pub processes: u32,
}

impl Limits {
    /// Whole cores: a hard ceiling, kept by the CFS quota.
    #[must_use]
    pub const fn cpus(&self) -> u32 {
        self.cpus
    }

    /// Memory that programs inside can use, in MiB; what the engine itself needs comes on top.
    #[must_use]
    pub const fn memory_mib(&self) -> u32 {
        self.memory_mib
    }

    /// Size of the writable disk over the read-only template, in MiB.
    #[must_use]
    pub const fn disk_mib(&self) -> u32 {
        self.disk_mib
    }

    /// Processes and threads of one user inside at one time.
    #[must_use]
    pub const fn processes(&self) -> u32 {
        self.processes
    }
}

impl Default for Limits {
    /// 2 cores, 1 GiB of memory, 4 GiB of disk, 512 processes.
    fn default() -> Self {
        Self { cpus: 2, memory_mib: 1024, disk_mib: 4096, processes: 512 }
    }
}

impl TryFrom<Unchecked> for Limits {
    type Error = OutOfRange;

    fn try_from(raw: Unchecked) -> Result<Self, OutOfRange> {
        let check = |field, value, min, max| {
            if (min..=max).contains(&value) { Ok(value) } else { Err(OutOfRange { field, min, max, value }) }
        };
        Ok(Self {
            cpus: check("cpus", raw.cpus, 1, 64)?,
            memory_mib: check("memory_mib", raw.memory_mib, 128, 262_144)?,
            disk_mib: check("disk_mib", raw.disk_mib, 64, 1_048_576)?,
            processes: check("processes", raw.processes, 16, 16_384)?,
        })
    }
}

impl From<Limits> for Unchecked {
    fn from(limits: Limits) -> Self {
        let Limits { cpus, memory_mib, disk_mib, processes } = limits;
        Self { cpus, memory_mib, disk_mib, processes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_hold_when_deserialised() {
        let ok = r#"{"cpus":1,"memory_mib":512,"disk_mib":1024,"processes":100}"#;
        assert!(serde_json::from_str::<Limits>(ok).is_ok());
        let zero = ok.replace("\"cpus\":1", "\"cpus\":0");
        let error = serde_json::from_str::<Limits>(&zero).unwrap_err().to_string();
        assert!(error.starts_with("cpus must be between 1 and 64, not 0"), "{error}");
    }
}
