//! What all calls of a server came to together, for who watches it.

use std::sync::atomic::{AtomicU64, Ordering};

use sandglass_types::Micros;

use crate::answer::Settlement;
use crate::refusal::Why;
use crate::usage::Usage;

/// Counts since the server started. They only grow, but for the calls that are under way.
#[derive(Debug, Default)]
pub struct Totals {
    under_way: AtomicU64,
    settled: AtomicU64,
    estimated: AtomicU64,
    released: AtomicU64,
    refused: [AtomicU64; 7],
    read: AtomicU64,
    written: AtomicU64,
    charged: AtomicU64,
    overrun: AtomicU64,
}

/// All reasons to refuse a call, with what they are called.
pub const REASONS: [(Why, &str); 7] = [
    (Why::Budget, "budget"),
    (Why::Token, "token"),
    (Why::Forbidden, "forbidden"),
    (Why::Model, "model"),
    (Why::Request, "request"),
    (Why::Busy, "busy"),
    (Why::Upstream, "upstream"),
];

/// A call that is under way, until this is dropped.
#[derive(Debug)]
pub struct UnderWay<'a>(&'a Totals);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Totals {
    /// Counts a call that was sent to its provider, for as long as it is under way.
    #[must_use]
    pub fn begin(&self) -> UnderWay<'_> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        UnderWay(self)
    }

    /// Counts what a call came to.
    pub fn settled(&self, settlement: &Settlement, usage: Option<&Usage>) {
        self.settled.fetch_add(1, Ordering::Relaxed);
        self.estimated.fetch_add(u64::from(settlement.estimated), Ordering::Relaxed);
        self.charged.fetch_add(settlement.charged.0, Ordering::Relaxed);
        self.overrun.fetch_add(settlement.overrun.0, Ordering::Relaxed);
        if let Some(usage) = usage {
            self.read.fetch_add(usage.read(), Ordering::Relaxed);
            self.written.fetch_add(usage.output.saturating_add(usage.image_output), Ordering::Relaxed);
        }
    }

    /// Counts a call that cost nothing, since its provider did not begin with it.
    pub fn released(&self) {
        self.released.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a call that was refused.
    pub fn refused(&self, why: Why) {
        if let Some(place) = REASONS.iter().position(|(known, _)| *known == why) {
            self.refused[place].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Calls that are under way.
    #[must_use]
    pub fn under_way(&self) -> u64 {
        self.under_way.load(Ordering::Relaxed)
    }

    /// Calls by what became of them: those that were charged by what the provider said, those that were charged by an estimate, and those
    /// that cost nothing.
    #[must_use]
    pub fn calls(&self) -> [(&'static str, u64); 3] {
        let estimated = self.estimated.load(Ordering::Relaxed);
        let settled = self.settled.load(Ordering::Relaxed);
        [
            ("charged", settled.saturating_sub(estimated)),
            ("estimated", estimated),
            ("released", self.released.load(Ordering::Relaxed)),
        ]
    }

    /// Calls that were refused, by why.
    #[must_use]
    pub fn refusals(&self) -> [(&'static str, u64); 7] {
        std::array::from_fn(|place| (REASONS[place].1, self.refused[place].load(Ordering::Relaxed)))
    }

    /// Tokens that models read, and that they wrote, as far as providers said.
    #[must_use]
    pub fn tokens(&self) -> [(&'static str, u64); 2] {
        [("read", self.read.load(Ordering::Relaxed)), ("written", self.written.load(Ordering::Relaxed))]
    }

    /// What budgets paid.
    #[must_use]
    pub fn charged(&self) -> Micros {
        Micros(self.charged.load(Ordering::Relaxed))
    }

    /// What the operator paid, because providers billed more than was set aside.
    #[must_use]
    pub fn overrun(&self) -> Micros {
        Micros(self.overrun.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_counted_where_it_belongs() {
        let totals = Totals::default();
        let call = totals.begin();
        assert_eq!(totals.under_way(), 1);
        drop(call);
        assert_eq!(totals.under_way(), 0);
        let usage = Usage { input: 3, cache_read: 4, output: 5, ..Usage::default() };
        let told = Settlement { charged: Micros(7), overrun: Micros(2), estimated: false };
        totals.settled(&told, Some(&usage));
        totals.settled(&Settlement { estimated: true, overrun: Micros::ZERO, ..told }, None);
        totals.released();
        assert_eq!(totals.calls(), [("charged", 1), ("estimated", 1), ("released", 1)]);
        assert_eq!(totals.tokens(), [("read", 7), ("written", 5)]);
        assert_eq!((totals.charged(), totals.overrun()), (Micros(14), Micros(2)));
        for (why, name) in REASONS {
            totals.refused(why);
            assert!(totals.refusals().contains(&(name, 1)));
        }
    }
}
