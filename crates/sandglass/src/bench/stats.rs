//! Numbers about samples: pure.

use serde::Serialize;

/// What is told about a series of samples. All are values that were measured, but the mean.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) n: usize,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
    pub(crate) mean: f64,
}

impl Summary {
    /// `None` without samples. Samples must be numbers.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let max = *sorted.last()?;
        let count = f64::from(u32::try_from(sorted.len()).ok()?);
        Some(Self {
            n: sorted.len(),
            p50: nearest_rank(&sorted, 50)?,
            p95: nearest_rank(&sorted, 95)?,
            p99: nearest_rank(&sorted, 99)?,
            max,
            mean: sorted.iter().sum::<f64>() / count,
        })
    }
}

/// The smallest sample that at least `percent` of all are not above: the nearest rank, without interpolation, so that a
/// percentile is always something that happened. Of fewer than 100 samples the 99th is the largest.
fn nearest_rank(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: u32) -> Vec<f64> {
        // Not in order: 1 to n, the odd ones first.
        (1..=n).filter(|i| i % 2 == 1).chain((1..=n).filter(|i| i % 2 == 0)).map(f64::from).collect()
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let of_100 = Summary::of(&numbers(100)).unwrap();
        assert_eq!((of_100.p50, of_100.p95, of_100.p99, of_100.max), (50.0, 95.0, 99.0, 100.0));
        // The example of the method's usual description: of five, the 50th is the third.
        let of_5 = Summary::of(&[15.0, 20.0, 35.0, 40.0, 50.0]).unwrap();
        assert_eq!((of_5.p50, of_5.p95, of_5.p99, of_5.max, of_5.mean), (35.0, 50.0, 50.0, 50.0, 32.0));
        let of_1000 = Summary::of(&numbers(1000)).unwrap();
        assert_eq!((of_1000.n, of_1000.p50, of_1000.p99), (1000, 500.0, 990.0));
    }

    #[test]
    fn few_samples_are_samples_too() {
        assert_eq!(Summary::of(&[]), None);
        let one = Summary::of(&[7.0]).unwrap();
        assert_eq!((one.n, one.p50, one.p95, one.p99, one.max, one.mean), (1, 7.0, 7.0, 7.0, 7.0, 7.0));
        let two = Summary::of(&[2.0, 1.0]).unwrap();
        assert_eq!((two.p50, two.p95, two.max), (1.0, 2.0, 2.0));
    }
}
