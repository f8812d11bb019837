//! Which snapshots are kept without anybody asking for it. Pure.
//!
//! Whoever names a snapshot means to come back to it, so it stays until it is deleted. Of the others, the last ones of each
//! sandbox stay for a time: enough for whoever goes back a step, and no disk fills for ever.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::time::Duration;

use sandglass_store::{ImageState, Purpose, SnapshotRow};
use sandglass_types::{SandboxId, SnapshotId, Timestamp};

/// How many snapshots without a name are kept, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Of one sandbox.
    pub last: NonZeroU32,
    /// From when they were made.
    pub time: Duration,
}

impl Kept {
    /// The snapshots that are not kept any longer, of all of a machine, in the order in which these were made.
    pub(crate) fn surplus(self, rows: &[SnapshotRow], now: Timestamp) -> Vec<SnapshotId> {
        let unnamed = |row: &&SnapshotRow| {
            row.purpose == Purpose::Snapshot && row.state == ImageState::Ready && row.name.is_none()
        };
        let mut newer: HashMap<&SandboxId, u32> = HashMap::new();
        let mut surplus: Vec<_> = rows
            .iter()
            .rev()
            .filter(unnamed)
            .filter(|row| {
                let newer = newer.entry(&row.source).or_default();
                *newer += 1;
                *newer > self.last.get() || now.since(row.created_at) >= self.time
            })
            .map(|row| row.id.clone())
            .collect();
        surplus.reverse();
        surplus
    }
}

#[cfg(test)]
mod tests {
    use sandglass_store::{SnapshotName, TemplateSpec};
    use sandglass_types::{Digest, Generation, Limits, NodeId, TeamId};

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn row(source: &SandboxId, made: Timestamp) -> SnapshotRow {
        SnapshotRow {
            id: SnapshotId::random(),
            node: NodeId::random(),
            team: TeamId::random(),
            namespace: "team".into(),
            purpose: Purpose::Snapshot,
            name: None,
            template: "base".into(),
            defaults: None,
            rootfs: Digest::from_bytes([1; 32]),
            limits: Limits::default(),
            source: source.clone(),
            generation: Generation(1),
            volumes: Vec::new(),
            state: ImageState::Ready,
            created_at: made,
        }
    }

    #[test]
    fn the_last_ones_of_each_sandbox_are_kept_for_a_time() {
        let now = Timestamp::from_millis(1_764_424_800_000);
        let [one, two] = [SandboxId::random(), SandboxId::random()];
        // From the oldest to the newest, as the store lists them.
        let rows = [
            row(&one, now.minus(DAY * 9)),
            row(&two, now.minus(DAY * 8)),
            row(&one, now.minus(DAY)),
            row(&one, now.minus(DAY / 2)),
            row(&one, now),
        ];
        let surplus = |last, days: u32| {
            let kept = Kept { last: NonZeroU32::new(last).unwrap(), time: DAY * days };
            let surplus = kept.surplus(&rows, now);
            rows.iter().map(|row| surplus.contains(&row.id)).collect::<Vec<_>>()
        };
        assert_eq!(surplus(4, 10), [false; 5]);
        assert_eq!(surplus(2, 10), [true, false, true, false, false]);
        assert_eq!(surplus(4, 9), [true, false, false, false, false], "at its time");
        assert_eq!(surplus(1, 8), [true, true, true, true, false]);
    }

    #[test]
    fn what_has_a_name_or_another_purpose_or_is_not_ready_is_none_of_them() {
        let source = SandboxId::random();
        let long_ago = row(&source, Timestamp::from_millis(0));
        let now = Timestamp::from_millis(1_764_424_800_000);
        let template = TemplateSpec {
            base: "base".into(),
            start: None,
            ready: None,
            ready_timeout: 1,
            pool: 0,
            agent: None,
            inherited: Vec::new(),
        };
        let template = Box::new(template);
        let name = Some(SnapshotName { name: "mine".into(), tag: "default".into() });
        let rows = [
            SnapshotRow { name, ..long_ago.clone() },
            SnapshotRow { purpose: Purpose::Fork, ..long_ago.clone() },
            SnapshotRow { purpose: Purpose::Template(template), ..long_ago.clone() },
            SnapshotRow { state: ImageState::Writing, ..long_ago.clone() },
            SnapshotRow { state: ImageState::Deleting, ..long_ago.clone() },
            long_ago,
        ];
        let kept = Kept { last: NonZeroU32::MIN, time: DAY };
        assert_eq!(kept.surplus(&rows, now), [rows[5].id.clone()]);
    }
}
