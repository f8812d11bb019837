//! What the sandbox of a run costs.

use std::time::Duration;

use sandglass_store::Compute;
use sandglass_types::limits::Unchecked;
use sandglass_types::{Limits, Micros};

/// Prices in billionths of a dollar. Nothing, by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Prices {
    /// Of a second of one processor.
    pub cpu_second_nanos: u64,
    /// Of a GiB of memory for a second, whether it is used or not.
    pub gib_second_nanos: u64,
}

/// What a sandbox used that had these limits for so long. Nothing of it is charged yet.
pub(super) fn used(cpu_micros: u64, limits: Limits, lived: Duration) -> Compute {
    let Unchecked { memory_mib, .. } = limits.into();
    let gib_millis = u128::from(memory_mib) * lived.as_millis() / 1024;
    Compute {
        cpu_millis: cpu_micros.div_ceil(1000),
        gib_millis: u64::try_from(gib_millis).unwrap_or(u64::MAX),
        charged: Micros::ZERO,
    }
}

impl Prices {
    /// What that costs, rounded up once.
    pub(super) fn cost(&self, used: &Compute) -> Micros {
        // Thousandths of a second at billionths of a dollar are millionths of a millionth.
        let pair = |count: u64, price: u64| u128::from(count) * u128::from(price);
        let cpu = pair(used.cpu_millis, self.cpu_second_nanos);
        let all = cpu.saturating_add(pair(used.gib_millis, self.gib_second_nanos));
        Micros(u64::try_from(all.div_ceil(1_000_000)).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_and_memory_are_charged_to_the_last_millisecond() {
        let limits = Limits::try_from(Unchecked { memory_mib: 512, ..Limits::default().into() }).unwrap();
        let used = used(1_500_001, limits, Duration::from_secs(10));
        assert_eq!((used.cpu_millis, used.gib_millis), (1501, 5000));
        let prices = Prices { cpu_second_nanos: 14_000, gib_second_nanos: 4_500 };
        // 1.501 s at 14 micro-dollars and 5 GiB·s at 4.5: 21.014 + 22.5.
        assert_eq!(prices.cost(&used), Micros(44));
        assert_eq!(Prices::default().cost(&used), Micros::ZERO);
        let most = Compute { cpu_millis: u64::MAX, gib_millis: u64::MAX, charged: Micros::ZERO };
        assert_eq!(Prices { cpu_second_nanos: u64::MAX, ..prices }.cost(&most), Micros(u64::MAX));
    }
}
