//! The `Range` header of a download.

use std::ops::RangeInclusive;

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Everything; also if the header can't be understood or names several ranges, as RFC 9110 allows.
    All,
    /// These bytes.
    Part(RangeInclusive<u64>),
    /// Nothing that the file has.
    Unsatisfiable,
}

/// Reads a `Range` header against a file of `len` bytes.
pub(super) fn parse(header: Option<&str>, len: u64) -> Wanted {
    let Some((first, last)) = header
        .and_then(|header| header.trim().strip_prefix("bytes="))
        .filter(|ranges| !ranges.contains(','))
        .and_then(|range| range.split_once('-'))
    else {
        return Wanted::All;
    };
    let number = |text: &str| {
        let text = text.trim();
        if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse::<u64>().ok() } else { None }
    };
    match (first.trim(), last.trim()) {
        ("", suffix) => match number(suffix) {
            None => Wanted::All,
            Some(0) => Wanted::Unsatisfiable,
            Some(_) if len == 0 => Wanted::Unsatisfiable,
            Some(n) => Wanted::Part(len.saturating_sub(n)..=len - 1),
        },
        (first, last) => {
            let Some(first) = number(first) else { return Wanted::All };
            let last = if last.is_empty() { Some(u64::MAX) } else { number(last) };
            match last {
                Some(last) if first <= last => {
                    if first < len {
                        Wanted::Part(first..=last.min(len - 1))
                    } else {
                        Wanted::Unsatisfiable
                    }
                }
                _ => Wanted::All,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn understands_single_ranges() {
        for (header, wanted) in [
            ("bytes=0-4", Wanted::Part(0..=4)),
            ("bytes=5-", Wanted::Part(5..=9)),
            ("bytes=-3", Wanted::Part(7..=9)),
            ("bytes=-30", Wanted::Part(0..=9)),
            ("bytes=8-100", Wanted::Part(8..=9)),
            ("bytes=10-", Wanted::Unsatisfiable),
            ("bytes=-0", Wanted::Unsatisfiable),
            ("bytes=4-2", Wanted::All),
            ("bytes=0-1,3-4", Wanted::All),
            ("bytes=x-", Wanted::All),
            ("bytes=+1-2", Wanted::All),
            ("items=0-1", Wanted::All),
        ] {
            assert_eq!(parse(Some(header), 10), wanted, "{header}");
        }
        assert_eq!(parse(None, 10), Wanted::All);
        assert_eq!(parse(Some("bytes=0-"), 0), Wanted::Unsatisfiable);
    }

    proptest! {
        #[test]
        fn parts_lie_within_the_file(header in "bytes=[0-9]{0,20}-[0-9]{0,20}", len: u64) {
            if let Wanted::Part(range) = parse(Some(&header), len) {
                prop_assert!(range.start() <= range.end() && *range.end() < len);
            }
        }
    }
}
