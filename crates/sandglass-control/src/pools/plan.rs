//! How many are wanted, and what to do about it. Pure.

use std::time::Duration;

use sandglass_types::{SandboxId, SnapshotId};
use tokio::time::Instant;

/// For how long nobody must have asked before a pool is as large as it was meant to be.
const QUIET: Duration = Duration::from_secs(60);

/// For how long nobody asks before the next is made, and for how long that is waited for.
const CALM: Duration = Duration::from_millis(500);
const AT_LAST: Duration = Duration::from_secs(5);

/// How long it takes until the next may be made, after somebody asked `first` and then until `last`.
pub(crate) fn until_calm(first: Instant, last: Instant, now: Instant) -> Option<Duration> {
    let due = (last + CALM).min(first + AT_LAST);
    (due > now).then(|| due - now)
}

/// How much a pool has grown because it was empty when somebody asked.
#[derive(Debug)]
pub(crate) struct Demand {
    grown: u32,
    asked_at: Instant,
}

impl Demand {
    pub(crate) const fn new(now: Instant) -> Self {
        Self { grown: 0, asked_at: now }
    }

    /// Somebody asked, and one was there or not.
    pub(crate) fn asked(&mut self, found: bool, now: Instant) {
        self.grown = self.grown.saturating_add(u32::from(!found));
        self.asked_at = now;
    }

    /// How many there should be of which `size` are meant to be: at most twice as many.
    pub(crate) fn target(&mut self, size: u32, now: Instant) -> u32 {
        if now.duration_since(self.asked_at) >= QUIET {
            self.grown = 0;
        }
        self.grown = self.grown.min(size);
        size.saturating_add(self.grown)
    }
}

/// What is wanted of one template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Its name.
    pub(crate) template: String,
    /// The image of its running state.
    pub(crate) image: SnapshotId,
    /// How many copies should be ready.
    pub(crate) target: u32,
}

/// What to do next.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Those that are of no use.
    pub(crate) give_up: Vec<SandboxId>,
    /// The template that lacks most.
    pub(crate) make: Option<String>,
}

/// Compares. `ready` is oldest first.
pub(crate) fn plan(wanted: &[Wanted], ready: &[(SandboxId, SnapshotId)]) -> Plan {
    let of = |image: &SnapshotId| ready.iter().filter(|(_, of)| of == image).count();
    let mut give_up = Vec::new();
    for (at, (id, image)) in ready.iter().enumerate() {
        let before = ready[..at].iter().filter(|(_, of)| of == image).count();
        let target = wanted.iter().find(|wanted| wanted.image == *image).map_or(0, |wanted| wanted.target);
        if before >= usize::try_from(target).unwrap_or(usize::MAX) {
            give_up.push(id.clone());
        }
    }
    let lack = |wanted: &Wanted| {
        usize::try_from(wanted.target).unwrap_or(usize::MAX).saturating_sub(of(&wanted.image))
    };
    let most = wanted.iter().max_by_key(|wanted| lack(wanted)).filter(|wanted| lack(wanted) > 0);
    Plan { give_up, make: most.map(|wanted| wanted.template.clone()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_grows_by_who_finds_it_empty_and_shrinks_when_nobody_asks() {
        let start = Instant::now();
        let mut demand = Demand::new(start);
        assert_eq!(demand.target(3, start), 3);
        demand.asked(true, start);
        assert_eq!(demand.target(3, start), 3);
        demand.asked(false, start);
        assert_eq!(demand.target(3, start), 4);
        for _ in 0..10 {
            demand.asked(false, start);
        }
        assert_eq!(demand.target(3, start), 6, "at most twice as many");
        assert_eq!(demand.target(3, start + QUIET - Duration::from_millis(1)), 6);
        assert_eq!(demand.target(3, start + QUIET), 3);
        assert_eq!(demand.target(0, start), 0, "none is none");
    }

    #[test]
    fn the_next_is_made_when_nobody_asks_or_at_last() {
        let start = Instant::now();
        assert_eq!(until_calm(start, start, start), Some(CALM));
        assert_eq!(until_calm(start, start, start + CALM), None);
        let last = start + AT_LAST - CALM / 4;
        assert_eq!(until_calm(start, last, last), Some(CALM / 4));
        assert_eq!(until_calm(start, start + AT_LAST, start + AT_LAST), None);
    }

    #[test]
    fn what_is_of_no_use_goes_and_what_lacks_most_comes_first() {
        let [a, b, old] = [(); 3].map(|()| SnapshotId::random());
        let ids = [(); 4].map(|()| SandboxId::random());
        let wanted = |image: &SnapshotId, target| Wanted {
            template: if *image == a { "a".into() } else { "b".into() },
            image: image.clone(),
            target,
        };
        let ready: Vec<_> = ids.iter().cloned().zip([&a, &old, &a, &b].map(Clone::clone)).collect();
        // The newest of those that are too many, and all of an image that the template has no more.
        let both = [wanted(&a, 1), wanted(&b, 3)];
        let expected = Plan { give_up: vec![ids[1].clone(), ids[2].clone()], make: Some("b".into()) };
        assert_eq!(plan(&both, &ready), expected);
        assert_eq!(plan(&[wanted(&a, 5), wanted(&b, 3)], &ready).make, Some("a".into()));
        let enough = plan(&[wanted(&a, 2), wanted(&b, 1)], &ready);
        assert_eq!((enough.give_up, enough.make), (vec![ids[1].clone()], None));
        assert_eq!(plan(&[], &ready).give_up.len(), 4);
        assert_eq!(plan(&[], &[]), Plan::default());
    }
}
