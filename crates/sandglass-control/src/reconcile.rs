//! Desired state is in the store, the truth is on the machine: what to do where they differ. Pure.

use std::collections::{BTreeMap, BTreeSet};

use sandglass_engine::engine::Presence;
use sandglass_store::{ImageState, Purpose, SandboxRow, SnapshotRow};
use sandglass_types::{OnTimeout, SandboxId, SandboxState, Timestamp};

use crate::lifecycle::Event;
use crate::request::BUILD_LABEL;

/// What brings one sandbox to what the store wants.
#[derive(Debug, PartialEq, Eq)]
pub enum Repair {
    /// Take up a running sandbox again: its agent's stream, its listeners, its timer.
    Adopt(Box<SandboxRow>),
    /// Keep it paused: nothing of it should be on the machine but its image.
    Rest(Box<SandboxRow>),
    /// Its end is due: it was half made, it is missing, or its end had begun. The event says which, where the end is new.
    End(Box<SandboxRow>, Event),
    /// The machine has it, the store has not (any more): remove it.
    Destroy(SandboxId),
}

/// Compares.
///
/// The order of reading matters: `on_machine` first, then `rows`, then `owned`. A sandbox is claimed by a task, then
/// stored, then made. So one that is on the machine and not in the later rows is wanted by nobody, and one in the rows
/// that nobody claims later was left by an earlier server. (Or its task has just finished; then the store says `Ended`
/// by now, and the repair finds nothing to do.) Of the `owned` nothing is said: their task takes care of them.
#[must_use]
pub fn plan(
    on_machine: &[(SandboxId, Presence)],
    images: &BTreeSet<SandboxId>,
    rows: Vec<SandboxRow>,
    owned: &BTreeSet<SandboxId>,
    now: Timestamp,
) -> Vec<Repair> {
    let present: BTreeMap<_, _> = on_machine.iter().map(|(id, presence)| (id, *presence)).collect();
    let wanted: BTreeSet<_> = rows.iter().map(|row| row.id.clone()).collect();
    let orphans = on_machine
        .iter()
        .map(|(id, _)| id)
        .filter(|id| !wanted.contains(*id) && !owned.contains(*id))
        .map(|id| Repair::Destroy(id.clone()));
    let repairs: Vec<_> = orphans.collect();
    let of_rows = rows.into_iter().filter(|row| !owned.contains(&row.id)).filter_map(|row| {
        let presence = present.get(&row.id).copied();
        match (row.state, presence) {
            (SandboxState::Ended, None) => None,
            (SandboxState::Ended, Some(_)) => Some(Repair::Destroy(row.id)),
            // Who built a template in it was cut off when its server ended, or was that server.
            (state, _) if state != SandboxState::Ending && row.metadata.contains_key(BUILD_LABEL) => {
                Some(Repair::End(Box::new(row), Event::Kill))
            }
            (SandboxState::Paused | SandboxState::Resuming, _) => Some(Repair::Rest(Box::new(row))),
            // All that it was is complete on the disk, whether its processes are gone yet or not: one that is to run on has
            // its image removed before.
            (SandboxState::Pausing, _) if images.contains(&row.id) => Some(Repair::Rest(Box::new(row))),
            (SandboxState::Running | SandboxState::Pausing, Some(Presence::Running | Presence::Paused)) => {
                Some(Repair::Adopt(Box::new(row)))
            }
            // The watchdog of the last host has ended it. Whatever else may have been first, it is all up by now.
            // One that is to be paused is nobody's to end: it was lost.
            (SandboxState::Running | SandboxState::Pausing, _)
                if row.end_at <= now && row.lifetime.on_timeout == OnTimeout::Kill =>
            {
                Some(Repair::End(Box::new(row), Event::TimeUp))
            }
            (
                SandboxState::Running | SandboxState::Pausing | SandboxState::Creating | SandboxState::Ending,
                _,
            ) => Some(Repair::End(Box::new(row), Event::Missing)),
        }
    });
    repairs.into_iter().chain(of_rows).collect()
}

/// The images that no row needs: all but those of sandboxes that are paused or on the way to it or from it, and those that
/// have rows of their own. To be read in the order of [`plan`], `images` first.
#[must_use]
pub fn unneeded(
    images: &BTreeSet<SandboxId>,
    rows: &[SandboxRow],
    snapshots: &[SnapshotRow],
    owned: &BTreeSet<SandboxId>,
) -> Vec<SandboxId> {
    let needed: BTreeSet<_> = rows
        .iter()
        .filter(|row| {
            matches!(row.state, SandboxState::Pausing | SandboxState::Paused | SandboxState::Resuming)
        })
        .map(|row| row.id.clone())
        .chain(snapshots.iter().map(|row| row.id.image()))
        .collect();
    images.iter().filter(|image| !needed.contains(image) && !owned.contains(*image)).cloned().collect()
}

/// Whether the row of an image is there only for as long as somebody uses it.
#[must_use]
pub fn is_passing(row: &SnapshotRow) -> bool {
    match (&row.purpose, row.state) {
        (Purpose::Snapshot | Purpose::Template(_), ImageState::Ready) => false,
        (Purpose::Fork, _) | (_, ImageState::Writing | ImageState::Deleting) => true,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use std::time::Duration;

    use sandglass_store::TemplateSpec;
    use sandglass_types::{
        Digest, Generation, Lifetime, Limits, NodeId, PauseMode, SnapshotId, TeamId, Timestamp,
    };

    use super::*;

    /// A row in this state.
    pub(crate) fn row(id: &SandboxId, state: SandboxState) -> SandboxRow {
        SandboxRow {
            id: id.clone(),
            node: NodeId::random(),
            team: TeamId::random(),
            template: "base".into(),
            rootfs: Digest::from_bytes([0; 32]),
            limits: Limits::default(),
            access_token: None,
            metadata: BTreeMap::new(),
            env: BTreeMap::new(),
            allow_internet_access: None,
            policy: Default::default(),
            traffic_token: None,
            request_host: None,
            lifetime: Lifetime::of(Duration::from_secs(1)),
            pause_mode: PauseMode::Full,
            made_from: Default::default(),
            start_path: Default::default(),
            defaults: None,
            volumes: Vec::new(),
            models: None,
            connections: Vec::new(),
            state,
            generation: Generation::FIRST,
            created_at: Timestamp::from_millis(0),
            end_at: Timestamp::from_millis(1000),
            max_end_at: Timestamp::from_millis(0),
            ended_at: None,
            end_reason: None,
        }
    }

    #[test]
    fn every_pair_of_stored_and_found() {
        use Presence::{Created, Paused, Remains, Running};
        let id = SandboxId::random();
        let adopt = |state| Some(Repair::Adopt(Box::new(row_of(&id, state))));
        let end = |state| Some(Repair::End(Box::new(row_of(&id, state)), Event::Missing));
        fn row_of(id: &SandboxId, state: SandboxState) -> SandboxRow {
            SandboxRow {
                node: "01890000-0000-7000-8000-000000000000".parse().unwrap(),
                ..fixed(row(id, state))
            }
        }
        fn fixed(row: SandboxRow) -> SandboxRow {
            SandboxRow { team: "01890000-0000-7000-8000-000000000000".parse().unwrap(), ..row }
        }
        let destroy = || Some(Repair::Destroy(id.clone()));
        let found = [None, Some(Created), Some(Running), Some(Paused), Some(Remains)];
        for presence in found {
            let on_machine: Vec<_> = presence.map(|presence| (id.clone(), presence)).into_iter().collect();
            let planned_at = |state: Option<SandboxState>, now| {
                let rows = state.map(|state| row_of(&id, state)).into_iter().collect();
                let (images, now) = (BTreeSet::new(), Timestamp::from_millis(now));
                let mut repairs = plan(&on_machine, &images, rows, &BTreeSet::new(), now);
                assert!(repairs.len() <= 1);
                repairs.pop()
            };
            let planned = |state| planned_at(state, 999);
            let rest = |state| Some(Repair::Rest(Box::new(row_of(&id, state))));
            let alive = matches!(presence, Some(Running | Paused));
            assert_eq!(planned(None), presence.and_then(|_| destroy()), "{presence:?}");
            assert_eq!(planned(Some(SandboxState::Ended)), presence.and_then(|_| destroy()));
            assert_eq!(planned(Some(SandboxState::Creating)), end(SandboxState::Creating));
            assert_eq!(planned(Some(SandboxState::Ending)), end(SandboxState::Ending));
            let running = SandboxState::Running;
            assert_eq!(planned(Some(running)), if alive { adopt(running) } else { end(running) });
            for state in [SandboxState::Paused, SandboxState::Resuming] {
                assert_eq!(planned(Some(state)), rest(state));
            }
            let pausing = SandboxState::Pausing;
            assert_eq!(planned(Some(pausing)), if alive { adopt(pausing) } else { end(pausing) });
            // Whether its processes are gone or not, what they were is there.
            let images = BTreeSet::from([id.clone()]);
            let now = Timestamp::from_millis(999);
            let repairs = plan(&on_machine, &images, vec![row_of(&id, pausing)], &BTreeSet::new(), now);
            assert_eq!(repairs, rest(pausing).into_iter().collect::<Vec<_>>());
            // Of one that is there, its owner says that its time is up.
            let up = Some(Repair::End(Box::new(row_of(&id, running)), Event::TimeUp));
            assert_eq!(planned_at(Some(running), 1000), if alive { adopt(running) } else { up });
            assert_eq!(planned_at(Some(SandboxState::Creating), 1000), end(SandboxState::Creating));
            // Nobody has ended one that was to be paused.
            let mut pausing = row_of(&id, running);
            pausing.lifetime.on_timeout = OnTimeout::Pause { auto_resume: false };
            let expected = if alive {
                Repair::Adopt(Box::new(pausing.clone()))
            } else {
                Repair::End(Box::new(pausing.clone()), Event::Missing)
            };
            let (none, now) = (BTreeSet::new(), Timestamp::from_millis(1000));
            assert_eq!(plan(&on_machine, &none, vec![pausing], &none, now), [expected]);
        }
    }

    #[test]
    fn what_a_template_was_being_built_in_ends_with_its_server() {
        use Presence::{Paused, Running};
        use SandboxState as S;
        let none = BTreeSet::new();
        for presence in [None, Some(Running), Some(Paused)] {
            for state in [S::Creating, S::Running, S::Pausing, S::Paused, S::Resuming] {
                let mut row = row(&SandboxId::random(), state);
                row.metadata.insert(BUILD_LABEL.into(), "web".into());
                let there: Vec<_> = presence.map(|presence| (row.id.clone(), presence)).into_iter().collect();
                let planned =
                    |owned| plan(&there, &none, vec![row.clone()], owned, Timestamp::from_millis(0));
                assert_eq!(planned(&none), [Repair::End(Box::new(row.clone()), Event::Kill)]);
                assert_eq!(planned(&BTreeSet::from([row.id.clone()])), [], "its server lives");
            }
        }
    }

    #[test]
    fn what_a_task_owns_is_left_to_it() {
        let id = SandboxId::random();
        let rows = vec![row(&id, SandboxState::Creating)];
        let on_machine = [(id.clone(), Presence::Created)];
        let now = Timestamp::from_millis(0);
        let (owned, none) = (BTreeSet::from([id.clone()]), BTreeSet::new());
        assert_eq!(plan(&on_machine, &none, rows, &owned, now), []);
        assert_eq!(plan(&on_machine, &none, vec![], &owned, now), []);
        assert_eq!(unneeded(&owned, &[], &[], &owned), []);
    }

    #[test]
    fn an_image_is_needed_by_who_is_paused_or_nearly() {
        use SandboxState::{Creating, Ended, Ending, Paused, Pausing, Resuming, Running};
        let id = SandboxId::random();
        let images = BTreeSet::from([id.clone()]);
        let unneeded_by = |state| !unneeded(&images, &[row(&id, state)], &[], &BTreeSet::new()).is_empty();
        let states = [Creating, Running, Pausing, Paused, Resuming, Ending, Ended];
        assert_eq!(states.map(unneeded_by), [true, true, false, false, false, true, true]);
        assert_eq!(unneeded(&images, &[], &[], &BTreeSet::new()), std::slice::from_ref(&id));
    }

    #[test]
    fn an_image_with_a_row_is_needed_and_a_row_may_be_there_only_in_passing() {
        use ImageState::{Deleting, Ready, Writing};
        let id = SnapshotId::random();
        let images = BTreeSet::from([id.image()]);
        let spec = TemplateSpec {
            base: "base".into(),
            start: None,
            ready: None,
            ready_timeout: 0,
            pool: 0,
            agent: None,
            inherited: Vec::new(),
        };
        for (purpose, passing) in [
            (Purpose::Snapshot, [true, false, true]),
            (Purpose::Fork, [true, true, true]),
            (Purpose::Template(Box::new(spec)), [true, false, true]),
        ] {
            for (state, passing) in [Writing, Ready, Deleting].into_iter().zip(passing) {
                let source = row(&SandboxId::random(), SandboxState::Ended);
                let image = SnapshotRow {
                    id: id.clone(),
                    node: source.node,
                    team: source.team,
                    namespace: "default".into(),
                    purpose: purpose.clone(),
                    name: None,
                    template: source.template,
                    defaults: None,
                    volumes: Vec::new(),
                    rootfs: source.rootfs,
                    limits: source.limits,
                    source: source.id,
                    generation: source.generation,
                    state,
                    created_at: source.created_at,
                };
                assert_eq!(is_passing(&image), passing, "{purpose:?} {state:?}");
                assert_eq!(unneeded(&images, &[], &[image], &BTreeSet::new()), []);
            }
        }
    }
}
