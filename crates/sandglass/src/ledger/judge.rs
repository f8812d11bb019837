//! The comparison: pure.

use std::collections::{BTreeMap, BTreeSet};

use sandglass_types::{SandboxId, SandboxState};
use serde::Serialize;

use super::claim::Claim;
use super::owners::Owner;
use crate::cli::Engine;

/// What kinds of things an instance makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    Process,
    Mount,
    LoopDevice,
    Namespace,
    Link,
    Cgroup,
    File,
    Descriptor,
}

/// What every running sandbox of this engine has at least one of.
const fn required(engine: Engine) -> &'static [Kind] {
    match engine {
        Engine::Gvisor => &[Kind::Process, Kind::LoopDevice, Kind::Namespace, Kind::Cgroup, Kind::File],
        Engine::Fake => &[Kind::Process, Kind::File],
    }
}

impl Kind {
    /// For people.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Mount => "mount",
            Self::LoopDevice => "loop device",
            Self::Namespace => "namespace",
            Self::Link => "link",
            Self::Cgroup => "control group",
            Self::File => "file",
            Self::Descriptor => "descriptor",
        }
    }
}

/// One thing that carries the instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) kind: Kind,
    /// Enough to find it by hand.
    pub(super) name: String,
    pub(super) claim: Claim,
}

/// All that the machine shows of an instance.
#[derive(Debug, Default)]
pub(super) struct Observed {
    pub(super) objects: Vec<Object>,
    /// Sandboxes that were made for nobody yet: the reserve of a running server.
    pub(super) unused: BTreeSet<SandboxId>,
    /// Whether a server holds the lock of the data folder.
    pub(super) server: bool,
    /// What could not be looked at, and so may hide something.
    pub(super) unreadable: Vec<String>,
}

/// What the store says.
#[derive(Debug, Default)]
pub(super) struct Expected {
    /// Sandboxes that may own something.
    live: BTreeSet<SandboxId>,
    /// Sandboxes that must be whole.
    running: BTreeSet<SandboxId>,
}

impl Expected {
    /// From the answers before and after the machine was looked at: what either claims is owned, what both call running
    /// was so all the time.
    pub(super) fn new(before: &[Owner], after: &[Owner]) -> Self {
        let live = |owners: &[Owner]| -> BTreeSet<SandboxId> {
            owners.iter().filter(|one| one.state != SandboxState::Ended).map(|one| one.id.clone()).collect()
        };
        let running = |owners: &[Owner]| -> BTreeSet<SandboxId> {
            owners.iter().filter(|one| one.state == SandboxState::Running).map(|one| one.id.clone()).collect()
        };
        Self { live: &live(before) | &live(after), running: &running(before) & &running(after) }
    }
}

/// How many things of one kind there are, by what was found about them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(super) struct Count {
    pub(super) owned: usize,
    pub(super) spare: usize,
    pub(super) left_over: usize,
}

/// A running sandbox lacks something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Missing {
    pub(super) sandbox: SandboxId,
    pub(super) kind: Kind,
}

/// The outcome.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) server: bool,
    pub(super) sandboxes: usize,
    pub(super) counts: BTreeMap<Kind, Count>,
    pub(super) left_over: Vec<Object>,
    pub(super) missing: Vec<Missing>,
    pub(super) unreadable: Vec<String>,
}

impl Verdict {
    /// Nothing is left over or missing, and nothing could hide.
    pub(super) fn clean(&self) -> bool {
        self.left_over.is_empty() && self.missing.is_empty() && self.unreadable.is_empty()
    }
}

/// Decides about every object.
pub(super) fn judge(observed: Observed, expected: &Expected, engine: Engine) -> Verdict {
    let Observed { objects, unused, server, unreadable } = observed;
    let mut verdict = Verdict { server, sandboxes: expected.live.len(), unreadable, ..Verdict::default() };
    let mut present: BTreeSet<(&SandboxId, Kind)> = BTreeSet::new();
    for object in &objects {
        let count = verdict.counts.entry(object.kind).or_default();
        let owned = match &object.claim {
            Claim::Sandbox(id) if server && unused.contains(id) && !expected.live.contains(id) => {
                count.spare += 1;
                continue;
            }
            Claim::Sandbox(id) => {
                present.insert((id, object.kind));
                expected.live.contains(id)
            }
            Claim::Slot(_) if server => {
                count.spare += 1;
                continue;
            }
            Claim::Instance => server || !expected.live.is_empty(),
            Claim::Slot(_) | Claim::Nobody => false,
        };
        if owned {
            count.owned += 1;
        } else {
            count.left_over += 1;
            verdict.left_over.push(object.clone());
        }
    }
    for sandbox in &expected.running {
        for &kind in required(engine) {
            if !present.contains(&(sandbox, kind)) {
                verdict.missing.push(Missing { sandbox: sandbox.clone(), kind });
            }
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge_gvisor(observed: Observed, expected: &Expected) -> Verdict {
        judge(observed, expected, Engine::Gvisor)
    }

    const A: &str = "aaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbb";

    fn owner(id: &str, state: SandboxState) -> Owner {
        Owner { id: id.parse().unwrap(), state }
    }

    fn object(kind: Kind, claim: Claim) -> Object {
        Object { kind, name: format!("{kind:?}"), claim }
    }

    fn whole(id: &str) -> Vec<Object> {
        let claim = Claim::Sandbox(id.parse().unwrap());
        required(Engine::Gvisor).iter().map(|&kind| object(kind, claim.clone())).collect()
    }

    fn same(owners: &[Owner]) -> Expected {
        Expected::new(owners, owners)
    }

    #[test]
    fn nothing_is_clean() {
        assert!(judge_gvisor(Observed::default(), &Expected::default()).clean());
    }

    #[test]
    fn live_sandboxes_own_their_things_and_ended_ones_nothing() {
        use SandboxState as S;
        for (state, owned) in [(S::Creating, 5), (S::Running, 5), (S::Ending, 5), (S::Ended, 0)] {
            let observed = Observed { objects: whole(A), ..Observed::default() };
            let verdict = judge_gvisor(observed, &same(&[owner(A, state)]));
            assert_eq!(verdict.counts.values().map(|count| count.owned).sum::<usize>(), owned, "{state:?}");
            assert_eq!(verdict.left_over.len(), 5 - owned, "{state:?}");
            assert_eq!(verdict.clean(), owned == 5, "{state:?}");
        }
        let unknown = judge_gvisor(Observed { objects: whole(B), ..Observed::default() }, &same(&[]));
        assert_eq!(unknown.left_over.len(), 5);
    }

    #[test]
    fn only_running_sandboxes_must_be_whole() {
        use SandboxState as S;
        for (state, missing) in [(S::Creating, 0), (S::Running, 1), (S::Ending, 0), (S::Ended, 0)] {
            let mut objects = whole(A);
            objects.retain(|object| object.kind != Kind::LoopDevice);
            let observed = Observed { objects, ..Observed::default() };
            assert_eq!(judge_gvisor(observed, &same(&[owner(A, state)])).missing.len(), missing, "{state:?}");
        }
        let lost = judge_gvisor(Observed::default(), &same(&[owner(A, S::Running)]));
        assert_eq!(lost.missing.len(), required(Engine::Gvisor).len());
        assert!(!lost.clean());
    }

    #[test]
    fn a_sandbox_that_nothing_isolates_has_less() {
        let claim = Claim::Sandbox(A.parse().unwrap());
        let objects = [Kind::Process, Kind::File].map(|kind| object(kind, claim.clone())).to_vec();
        let expected = same(&[owner(A, SandboxState::Running)]);
        let observed = || Observed { objects: objects.clone(), ..Observed::default() };
        assert!(judge(observed(), &expected, Engine::Fake).clean());
        assert_eq!(judge(observed(), &expected, Engine::Gvisor).missing.len(), 3);
        assert_eq!(judge(Observed::default(), &expected, Engine::Fake).missing.len(), 2);
    }

    #[test]
    fn what_changes_meanwhile_is_no_mistake() {
        use SandboxState as S;
        let (none, running) = ([], [owner(A, S::Running)]);
        let (creating, ended) = ([owner(A, S::Creating)], [owner(A, S::Ended)]);
        for (before, after) in [
            (&none[..], &running[..]),
            (&none[..], &creating[..]),
            (&creating[..], &running[..]),
            (&running[..], &ended[..]),
            (&running[..], &none[..]),
        ] {
            let expected = Expected::new(before, after);
            assert!(judge_gvisor(Observed::default(), &expected).clean());
            assert!(judge_gvisor(Observed { objects: whole(A), ..Observed::default() }, &expected).clean());
        }
    }

    #[test]
    fn a_running_server_keeps_spare_slots_and_a_dead_one_nothing() {
        let objects = || {
            vec![
                object(Kind::Namespace, Claim::Slot("x".into())),
                object(Kind::Cgroup, Claim::Instance),
                object(Kind::Mount, Claim::Instance),
            ]
        };
        let alive =
            judge_gvisor(Observed { objects: objects(), server: true, ..Observed::default() }, &same(&[]));
        assert!(alive.clean());
        assert_eq!(alive.counts[&Kind::Namespace], Count { spare: 1, ..Count::default() });
        let dead = judge_gvisor(Observed { objects: objects(), ..Observed::default() }, &same(&[]));
        assert_eq!(dead.left_over.len(), 3);
        let survivors = same(&[owner(A, SandboxState::Ending)]);
        let dead = judge_gvisor(Observed { objects: objects(), ..Observed::default() }, &survivors);
        assert_eq!(dead.left_over.len(), 1, "the sandboxes of a dead server still need what they share");
    }

    #[test]
    fn a_running_server_keeps_unused_sandboxes_and_a_dead_one_none() {
        let unused = || BTreeSet::from([A.parse().unwrap()]);
        let observed =
            |server| Observed { objects: whole(A), unused: unused(), server, ..Observed::default() };
        let alive = judge_gvisor(observed(true), &same(&[]));
        assert!(alive.clean());
        assert_eq!(alive.counts[&Kind::Process], Count { spare: 1, ..Count::default() });
        assert_eq!(judge_gvisor(observed(false), &same(&[])).left_over.len(), 5);
        // One that somebody has taken is as any other.
        let taken = judge_gvisor(observed(true), &same(&[owner(A, SandboxState::Running)]));
        assert_eq!(taken.counts[&Kind::Process], Count { owned: 1, ..Count::default() });
    }

    #[test]
    fn what_nobody_owns_is_left_over_also_under_a_running_server() {
        let objects = vec![object(Kind::File, Claim::Nobody)];
        assert!(!judge_gvisor(Observed { objects, server: true, ..Observed::default() }, &same(&[])).clean());
    }

    #[test]
    fn what_could_not_be_read_is_not_clean() {
        let observed = Observed { unreadable: vec!["process 7".into()], ..Observed::default() };
        assert!(!judge_gvisor(observed, &same(&[])).clean());
    }
}
