//! What runs may be, and what they cost.

use anyhow::bail;
use sandglass_control::{ComputePrices, RunsConfig};
use sandglass_types::Micros;
use serde::Deserialize;

/// The most that a second of anything can cost, in billionths of a dollar: a dollar.
const MAX_NANOS: u64 = 1_000_000_000;

/// The most that one run can be allowed to cost, in millionths of a dollar: a million dollars.
const MAX_MICROS: u64 = 1_000_000_000_000;

/// The most runs of a team that can be under way.
const MAX_UNDER_WAY: u32 = 100_000;

/// The table `[runs]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    /// What a second of one processor costs, in billionths of a dollar.
    #[serde(default)]
    cpu_second_nanos: u64,
    /// What a GiB of memory for a second costs, in billionths of a dollar.
    #[serde(default)]
    gib_second_nanos: u64,
    /// The most that one run may cost, in millionths of a dollar.
    max_cost_micros: Option<u64>,
    /// How many runs of a team may be under way.
    under_way: Option<u32>,
}

impl File {
    pub(super) fn resolve(self) -> anyhow::Result<RunsConfig> {
        let default = RunsConfig::default();
        for (key, nanos) in
            [("cpu_second_nanos", self.cpu_second_nanos), ("gib_second_nanos", self.gib_second_nanos)]
        {
            if nanos > MAX_NANOS {
                bail!("runs.{key} must be between 0 and {MAX_NANOS}, not {nanos}");
            }
        }
        let most = self.max_cost_micros.unwrap_or(default.most.0);
        if !(1..=MAX_MICROS).contains(&most) {
            bail!("runs.max_cost_micros must be between 1 and {MAX_MICROS}, not {most}");
        }
        let under_way = self.under_way.unwrap_or(default.under_way);
        if !(1..=MAX_UNDER_WAY).contains(&under_way) {
            bail!("runs.under_way must be between 1 and {MAX_UNDER_WAY}, not {under_way}");
        }
        let prices = ComputePrices {
            cpu_second_nanos: self.cpu_second_nanos,
            gib_second_nanos: self.gib_second_nanos,
        };
        Ok(RunsConfig { prices, most: Micros(most), under_way })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<RunsConfig, String> {
        toml::from_str::<File>(text)
            .map_err(|error| error.to_string())?
            .resolve()
            .map_err(|error| error.to_string())
    }

    #[test]
    fn prices_and_bounds_are_in_range() {
        assert_eq!(read(""), Ok(RunsConfig::default()));
        let all = "cpu_second_nanos = 14000\ngib_second_nanos = 4500\nmax_cost_micros = 7\nunder_way = 2";
        let read_all = read(all).unwrap();
        assert_eq!(
            (read_all.prices.cpu_second_nanos, read_all.most, read_all.under_way),
            (14_000, Micros(7), 2)
        );
        for bad in [
            "cpu_second_nanos = 1000000001",
            "max_cost_micros = 0",
            "under_way = 0",
            "price = 1",
            "gib_second_nanos = -1",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
