//! Volumes: whose they are, what they may be together, and who needs them.

use std::sync::Arc;

use sandglass_types::budget::{Amount, Resource};
use sandglass_types::{SandboxState as S, SnapshotId, TeamId, VolumeId, VolumeMount};

use super::snapshots::snapshot_of;
use super::{at, insert, sandbox_of, step, team};
use crate::{
    Admitted, Created, NewSandbox, NewSnapshot, NewVolume, Store, VolumeAdmitted, VolumeDeletion,
    VolumeQuota, VolumeRow, VolumeState, VolumeUses,
};

fn volume_of(team: TeamId, name: &str, created: i64) -> NewVolume {
    NewVolume {
        id: VolumeId::random(),
        node: sandglass_types::NodeId::random(),
        team,
        name: name.parse().unwrap(),
        size_mib: 100,
        token: "5".repeat(64),
        created_at: at(created),
        quota: VolumeQuota::UNBOUNDED,
        capacity: Amount::UNBOUNDED,
    }
}

async fn ready(store: &dyn Store, new: &NewVolume) {
    assert_eq!(store.insert_volume(new).await.unwrap(), VolumeAdmitted::Inserted);
    assert!(store.volume_ready(&new.id).await.unwrap());
}

fn mounted(new: &NewVolume) -> Vec<VolumeMount> {
    vec![VolumeMount { id: new.id.clone(), name: new.name.clone(), path: "/mnt/\u{fc}".parse().unwrap() }]
}

/// Nothing is lost or changed between insert and read, and every step is one way.
pub async fn a_volume_comes_back_as_it_was_stored(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let new = volume_of(team, "data", 5);
    assert_eq!(store.insert_volume(&new).await.unwrap(), VolumeAdmitted::Inserted);
    let row = VolumeRow {
        id: new.id.clone(),
        node: new.node,
        team,
        name: new.name.clone(),
        size_mib: 100,
        token: new.token.clone(),
        state: VolumeState::Making,
        created_at: at(5),
    };
    assert!(!format!("{row:?}").contains(&new.token));
    assert_eq!(store.volumes_on_node(new.node).await.unwrap(), std::slice::from_ref(&row));
    assert_eq!(store.volume(&new.id).await.unwrap(), None, "nobody finds it yet");
    assert!(store.volume_ready(&new.id).await.unwrap() && !store.volume_ready(&new.id).await.unwrap());
    let row = VolumeRow { state: VolumeState::Ready, ..row };
    assert_eq!(store.volume(&new.id).await.unwrap().as_ref(), Some(&row));
    assert_eq!(store.volume_of_a_team_that_works(&new.id).await.unwrap().as_ref(), Some(&row));
    assert_eq!(store.volumes(team).await.unwrap(), [row]);
    store.forget_volume(&new.id).await.unwrap();
    assert!(store.volume(&new.id).await.unwrap().is_some(), "only what is being deleted is forgotten");
    assert_eq!(store.begin_volume_deletion(&new.id).await.unwrap(), VolumeDeletion::Begun);
    assert_eq!(store.begin_volume_deletion(&new.id).await.unwrap(), VolumeDeletion::NotThere);
    assert_eq!((store.volume(&new.id).await.unwrap(), store.volumes(team).await.unwrap().len()), (None, 0));
    assert_eq!(store.volumes_on_node(new.node).await.unwrap()[0].state, VolumeState::Deleting);
    store.forget_volume(&new.id).await.unwrap();
    assert_eq!(store.volumes_on_node(new.node).await.unwrap(), []);
}

/// Who has a volume's token has nothing of it once the team is revoked.
pub async fn a_team_that_was_revoked_has_no_content(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("another", at(0)).await.unwrap().id);
    let volumes = [volume_of(one, "data", 1), volume_of(other, "data", 1)];
    for new in &volumes {
        ready(store, new).await;
    }
    assert!(store.revoke_team(one, at(2)).await.unwrap());
    let found = [&volumes[0].id, &volumes[1].id].map(|id| store.volume_of_a_team_that_works(id));
    let [revoked, working] = found;
    assert_eq!(revoked.await.unwrap(), None);
    assert!(working.await.unwrap().is_some());
    assert!(store.volume(&volumes[0].id).await.unwrap().is_some(), "it is there");
}

/// A name is one volume's of each team, from before it is made until its end begins.
pub async fn a_name_is_that_of_one_volume_of_a_team(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("another", at(0)).await.unwrap().id);
    let first = volume_of(one, "data", 1);
    assert_eq!(store.insert_volume(&first).await.unwrap(), VolumeAdmitted::Inserted);
    let again = volume_of(one, "data", 2);
    assert_eq!(store.insert_volume(&again).await.unwrap(), VolumeAdmitted::NameTaken);
    ready(store, &volume_of(other, "data", 3)).await;
    ready(store, &volume_of(one, "Data", 4)).await;
    assert_eq!(store.begin_volume_deletion(&first.id).await.unwrap(), VolumeDeletion::Begun);
    ready(store, &again).await;
    let names = |rows: Vec<VolumeRow>| rows.into_iter().map(|row| row.id).collect::<Vec<_>>();
    assert_eq!(names(store.volumes(one).await.unwrap())[0], again.id);
}

/// Up to each bound and not beyond.
pub async fn what_a_team_and_a_machine_may_have(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("another", at(0)).await.unwrap().id);
    let quota = VolumeQuota { count: 2, mib: 250 };
    let of = |team, name, size_mib| NewVolume { quota, size_mib, ..volume_of(team, name, 1) };
    ready(store, &of(one, "a", 100)).await;
    let too_large = store.insert_volume(&of(one, "b", 151)).await.unwrap();
    assert_eq!(too_large, VolumeAdmitted::TooLarge { most: 250, in_use: 100 });
    let second = of(one, "b", 150);
    ready(store, &second).await;
    assert_eq!(store.insert_volume(&of(one, "c", 1)).await.unwrap(), VolumeAdmitted::TooMany { most: 2 });
    ready(store, &of(other, "c", 1)).await;
    assert_eq!(store.begin_volume_deletion(&second.id).await.unwrap(), VolumeDeletion::Begun);
    ready(store, &of(one, "c", 1)).await;
    // A volume takes room of the machine that sandboxes can't have, until nothing of it is left.
    let capacity = Amount { disk_mib: 4240, ..Amount::UNBOUNDED };
    let node = second.node;
    assert_eq!(store.in_use(node).await.unwrap().disk_mib, 150);
    let sandbox = || NewSandbox { node, capacity, ..sandbox_of(one, 3) };
    let refused = store.insert_sandbox(&sandbox()).await.unwrap();
    let Created::OverCapacity { excess, .. } = refused else { panic!("{refused:?}") };
    assert_eq!((excess.resource, excess.in_use), (Resource::Disk, 150));
    store.forget_volume(&second.id).await.unwrap();
    insert(store, &sandbox()).await;
    let volume = NewVolume { node, capacity, size_mib: 145, ..volume_of(other, "d", 4) };
    let refused = store.insert_volume(&volume).await.unwrap();
    let VolumeAdmitted::OverCapacity(excess) = refused else { panic!("{refused:?}") };
    assert_eq!((excess.in_use, excess.asked), (4096, 145));
    ready(store, &NewVolume { size_mib: 144, ..volume }).await;
}

/// A sandbox has volumes that are there, and while it or an image has one, that stays.
pub async fn a_volume_stays_while_somebody_needs_it(store: Arc<dyn Store>) {
    let store = &*store;
    let (one, other) = (team(store).await, store.create_team("another", at(0)).await.unwrap().id);
    let volume = volume_of(one, "data", 1);
    assert_eq!(store.insert_volume(&volume).await.unwrap(), VolumeAdmitted::Inserted);
    let sandbox = |team| NewSandbox { volumes: mounted(&volume), ..sandbox_of(team, 2) };
    let missing = Created::NoVolume(volume.name.clone());
    assert_eq!(store.insert_sandbox(&sandbox(one)).await.unwrap(), missing, "it is not ready");
    assert!(store.volume_ready(&volume.id).await.unwrap());
    assert_eq!(store.insert_sandbox(&sandbox(other)).await.unwrap(), missing, "it is another team's");
    let new = sandbox(one);
    insert(store, &new).await;
    let row = store.sandbox(&new.id).await.unwrap().unwrap();
    assert_eq!(row.volumes, mounted(&volume));
    let snapshot = NewSnapshot { volumes: mounted(&volume), ..snapshot_of(one, 3) };
    assert_eq!(store.insert_snapshot(&snapshot, &[]).await.unwrap(), Admitted::Inserted);
    assert_eq!(store.snapshots_on_node(snapshot.node).await.unwrap()[0].volumes, mounted(&volume));
    let deletion = async || store.begin_volume_deletion(&volume.id).await.unwrap();
    let uses = |sandboxes: &[_], snapshots: &[SnapshotId]| {
        VolumeDeletion::InUse(VolumeUses { sandboxes: sandboxes.to_vec(), snapshots: snapshots.to_vec() })
    };
    assert_eq!(deletion().await, uses(std::slice::from_ref(&new.id), std::slice::from_ref(&snapshot.id)));
    assert!(store.transition(&new.id, &step(S::Creating, S::Ending, 4)).await.unwrap());
    assert_eq!(deletion().await, uses(std::slice::from_ref(&new.id), std::slice::from_ref(&snapshot.id)));
    assert!(store.transition(&new.id, &step(S::Ending, S::Ended, 5)).await.unwrap());
    assert!(store.begin_snapshot_deletion(&snapshot.id).await.unwrap());
    assert_eq!(
        deletion().await,
        uses(&[], std::slice::from_ref(&snapshot.id)),
        "its image may still be there"
    );
    store.forget_snapshot(&snapshot.id).await.unwrap();
    assert_eq!(deletion().await, VolumeDeletion::Begun);
    assert_eq!(store.insert_sandbox(&sandbox(one)).await.unwrap(), missing);
}

/// The last word about an image counts, and goes with it.
pub async fn marks_are_kept_while_their_image_may_be_there(store: Arc<dyn Store>) {
    let store = &*store;
    let new = sandbox_of(team(store).await, 1);
    insert(store, &new).await;
    assert_eq!(store.marks(&new.id).await.unwrap(), None);
    for marks in ["[]", "[1]"] {
        store.note_marks(&new.id, marks).await.unwrap();
        assert_eq!(store.marks(&new.id).await.unwrap().as_deref(), Some(marks));
    }
    assert!(store.transition(&new.id, &step(S::Creating, S::Ending, 4)).await.unwrap());
    assert!(store.transition(&new.id, &step(S::Ending, S::Ended, 5)).await.unwrap());
    store.note_marks(&sandglass_types::SandboxId::random(), "[]").await.unwrap();
    assert_eq!(store.marks(&new.id).await.unwrap(), None);
}
