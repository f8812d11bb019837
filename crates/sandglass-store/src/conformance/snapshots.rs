//! Images that sandboxes are made from.

use std::sync::Arc;

use sandglass_types::budget::{Amount, Excess, Resource};
use sandglass_types::{
    EndReason, Generation, Limits, NodeId, SandboxId, SandboxState as S, SnapshotId, TeamId,
};

use super::{all_of, at, digest, end, insert, odd_defaults, sandbox_of, team};
use crate::{
    Admitted, Created, Finished, ImageState, MadeFrom, NewSandbox, NewSnapshot, Purpose, SnapshotFilter,
    SnapshotKey, SnapshotName, SnapshotRow, Store, TemplateSpec,
};

pub(super) fn snapshot_of(team: TeamId, created: i64) -> NewSnapshot {
    NewSnapshot {
        id: SnapshotId::random(),
        node: NodeId::random(),
        team,
        purpose: Purpose::Snapshot,
        name: None,
        template: "base".into(),
        defaults: None,
        rootfs: digest(7),
        limits: Limits::default(),
        source: SandboxId::random(),
        generation: Generation(2),
        volumes: Vec::new(),
        created_at: at(created),
        quota: Amount::UNBOUNDED,
        capacity: Amount::UNBOUNDED,
    }
}

fn named(name: &str, tag: &str) -> Option<SnapshotName> {
    Some(SnapshotName { name: name.into(), tag: tag.into() })
}

fn key(text: &str, tag: Option<&str>) -> SnapshotKey {
    SnapshotKey { id: text.parse().ok(), name: text.into(), tag: tag.map(Into::into) }
}

fn everything(team: TeamId) -> SnapshotFilter {
    SnapshotFilter { team, source: None, key: None, after: None, limit: 100 }
}

async fn begin(store: &dyn Store, new: &NewSnapshot) {
    assert_eq!(store.insert_snapshot(new, &[]).await.unwrap(), Admitted::Inserted);
}

async fn ready(store: &dyn Store, new: &NewSnapshot) {
    begin(store, new).await;
    assert_eq!(store.snapshot_ready(&new.id, None).await.unwrap(), Finished::Ready);
}

async fn ids(store: &dyn Store, filter: &SnapshotFilter) -> Vec<SnapshotId> {
    store.list_snapshots(filter).await.unwrap().rows.into_iter().map(|row| row.id).collect()
}

/// Nothing is lost or changed between insert and read, and every step is one way.
pub async fn an_image_comes_back_as_it_was_stored(store: Arc<dyn Store>) {
    let store = &*store;
    let team = store.create_team("Acme & Sons", at(0)).await.unwrap().id;
    let new =
        NewSnapshot { name: named("nightly", "v1"), defaults: Some(odd_defaults()), ..snapshot_of(team, 5) };
    begin(store, &new).await;
    assert!(store.insert_snapshot(&new, &[]).await.is_err(), "an id is used once");
    let row = async || store.snapshots_on_node(new.node).await.unwrap().pop();
    let expected = SnapshotRow {
        id: new.id.clone(),
        node: new.node,
        team,
        namespace: "acme---sons".into(),
        purpose: Purpose::Snapshot,
        name: new.name.clone(),
        template: new.template.clone(),
        defaults: Some(odd_defaults()),
        rootfs: new.rootfs,
        limits: new.limits,
        source: new.source.clone(),
        volumes: Vec::new(),
        generation: Generation(2),
        state: ImageState::Writing,
        created_at: at(5),
    };
    assert_eq!(row().await, Some(expected.clone()));
    assert_eq!(expected.full_name().as_deref(), Some("acme---sons/nightly:v1"));
    assert_eq!(store.snapshots_on_node(NodeId::random()).await.unwrap(), []);
    assert_eq!(store.snapshot_ready(&new.id, None).await.unwrap(), Finished::Ready);
    assert_eq!(row().await, Some(SnapshotRow { state: ImageState::Ready, ..expected }));
    assert_eq!(store.snapshot_ready(&new.id, None).await.unwrap(), Finished::NotWriting);
    store.forget_snapshot(&new.id).await.unwrap();
    assert!(row().await.is_some(), "it is not being deleted");
    assert!(store.begin_snapshot_deletion(&new.id).await.unwrap());
    assert!(!store.begin_snapshot_deletion(&new.id).await.unwrap());
    assert_eq!(store.snapshot_ready(&new.id, None).await.unwrap(), Finished::NotWriting);
    assert_eq!(row().await.map(|row| row.state), Some(ImageState::Deleting));
    store.forget_snapshot(&new.id).await.unwrap();
    store.forget_snapshot(&new.id).await.unwrap();
    assert_eq!(row().await, None);
    assert!(!store.begin_snapshot_deletion(&new.id).await.unwrap());
}

/// By id and by name, by source, and never what is half written, for a fork, or another team's.
pub async fn clients_find_what_is_ready_and_their_own(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let other = store.create_team("other", at(0)).await.unwrap().id;
    let a = NewSnapshot { name: named("nightly", "default"), ..snapshot_of(team, 1) };
    let b = NewSnapshot { name: named("nightly", "v2"), source: a.source.clone(), ..snapshot_of(team, 2) };
    let c = snapshot_of(team, 3);
    let theirs = NewSnapshot { name: named("nightly", "default"), ..snapshot_of(other, 4) };
    let fork = NewSnapshot { purpose: Purpose::Fork, ..snapshot_of(team, 5) };
    for new in [&a, &b, &c, &theirs, &fork] {
        ready(store, new).await;
    }
    let writing = NewSnapshot { name: named("writing", "default"), ..snapshot_of(team, 6) };
    begin(store, &writing).await;
    let all = everything(team);
    assert_eq!(ids(store, &all).await, [c.id.clone(), b.id.clone(), a.id.clone()]);
    let of = |source: &SandboxId| SnapshotFilter { source: Some(source.clone()), ..everything(team) };
    assert_eq!(ids(store, &of(&a.source)).await, [b.id.clone(), a.id.clone()]);
    assert_eq!(ids(store, &of(&theirs.source)).await, []);
    let called = |key| SnapshotFilter { key: Some(key), ..everything(team) };
    assert_eq!(ids(store, &called(key("nightly", None))).await, [b.id.clone(), a.id.clone()]);
    assert_eq!(ids(store, &called(key("nightly", Some("v2")))).await, std::slice::from_ref(&b.id));
    assert_eq!(ids(store, &called(key("night", None))).await, []);
    assert_eq!(ids(store, &called(key(c.id.as_str(), None))).await, std::slice::from_ref(&c.id));
    let found = async |team, key| store.snapshot(team, &key).await.unwrap().map(|row| row.id);
    assert_eq!(found(team, key("nightly", Some("default"))).await, Some(a.id.clone()));
    assert_eq!(found(other, key("nightly", Some("default"))).await, Some(theirs.id.clone()));
    assert_eq!(found(team, key(c.id.as_str(), Some("default"))).await, Some(c.id.clone()));
    for hidden in [&theirs.id, &fork.id, &writing.id] {
        assert_eq!(found(team, key(hidden.as_str(), None)).await, None);
    }
    assert_eq!(found(team, key("writing", None)).await, None);
    assert!(store.begin_snapshot_deletion(&c.id).await.unwrap());
    assert_eq!(found(team, key(c.id.as_str(), None)).await, None);
    assert_eq!(ids(store, &all).await, [b.id.clone(), a.id.clone()]);
    // What is called as the id of another is found by that id no more than any other.
    let odd = NewSnapshot { name: named(a.id.as_str(), "default"), ..snapshot_of(team, 9) };
    ready(store, &odd).await;
    assert_eq!(found(team, key(a.id.as_str(), Some("default"))).await, Some(a.id));
}

/// The one before keeps its id and has no name any more; a name is free again when its snapshot is gone.
pub async fn a_name_is_that_of_the_newest(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let new = |created| NewSnapshot { name: named("nightly", "default"), ..snapshot_of(team, created) };
    let (first, second) = (new(1), new(2));
    begin(store, &first).await;
    begin(store, &second).await;
    let found = async || store.snapshot(team, &key("nightly", None)).await.unwrap().map(|row| row.id);
    assert_eq!(store.snapshot_ready(&first.id, None).await.unwrap(), Finished::Ready);
    assert_eq!(found().await, Some(first.id.clone()), "until the next one is ready");
    assert_eq!(store.snapshot_ready(&second.id, None).await.unwrap(), Finished::Ready);
    assert_eq!(found().await, Some(second.id.clone()));
    let row = store.snapshot(team, &key(first.id.as_str(), None)).await.unwrap().unwrap();
    assert_eq!(row.name, None);
    assert_eq!(ids(store, &everything(team)).await.len(), 2);
    assert!(store.begin_snapshot_deletion(&second.id).await.unwrap());
    assert_eq!(found().await, None);
    let third = new(3);
    ready(store, &third).await;
    assert_eq!(found().await, Some(third.id));
}

/// A walk over all pages sees each once, newest first, also those of one millisecond.
pub async fn pages_of_snapshots_are_stable(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let mut expected = Vec::new();
    for created in [1, 2, 2, 2, 3] {
        let new = snapshot_of(team, created);
        ready(store, &new).await;
        expected.push((created, new.id));
    }
    expected.sort();
    expected.reverse();
    let mut filter = SnapshotFilter { limit: 2, ..everything(team) };
    let mut seen = Vec::new();
    loop {
        let page = store.list_snapshots(&filter).await.unwrap();
        seen.extend(page.rows.into_iter().map(|row| row.id));
        let Some(next) = page.next else { break };
        filter.after = Some(next);
        ready(store, &snapshot_of(team, 9)).await;
    }
    assert_eq!(seen, expected.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
    for limit in [0, 1] {
        assert_eq!(ids(store, &SnapshotFilter { limit, ..everything(team) }).await.len(), 1);
    }
}

/// An image holds room on its machine's disk for its files and its memory, until its row is gone.
pub async fn images_are_room_on_the_disk(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let node = NodeId::random();
    // An image of the default limits takes 4096 + 1024 MiB.
    let capacity = Amount { disk_mib: 9215, ..Amount::UNBOUNDED };
    let first = NewSnapshot { node, capacity, ..snapshot_of(team, 1) };
    begin(store, &first).await;
    let second = NewSnapshot { node, capacity, ..snapshot_of(team, 2) };
    let excess = |asked| Excess { resource: Resource::Disk, budget: 9215, in_use: 5120, asked };
    let full = Admitted::OverCapacity { excess: excess(5120), soon: false };
    assert_eq!(store.insert_snapshot(&second, &[]).await.unwrap(), full);
    assert_eq!(store.snapshot_ready(&first.id, None).await.unwrap(), Finished::Ready);
    assert_eq!(store.insert_snapshot(&second, &[]).await.unwrap(), full);
    let new = || NewSandbox { node, capacity, ..sandbox_of(team, 3) };
    let full = Created::OverCapacity { excess: excess(4096), soon: false };
    assert_eq!(store.insert_sandbox(&new()).await.unwrap(), full);
    assert!(store.begin_snapshot_deletion(&first.id).await.unwrap());
    let soon = Created::OverCapacity { excess: excess(4096), soon: true };
    assert_eq!(store.insert_sandbox(&new()).await.unwrap(), soon);
    store.forget_snapshot(&first.id).await.unwrap();
    insert(store, &new()).await;
    // A team's quota is for what runs.
    let quota = Amount::default();
    begin(store, &NewSnapshot { quota, ..snapshot_of(team, 4) }).await;
    assert_eq!(store.snapshots_on_node(node).await.unwrap(), []);
}

/// Those that are ready, were made before a moment, and from which nothing was made since then.
pub async fn snapshots_are_cold_that_nobody_has_used_since(store: Arc<dyn Store>) {
    let store = &*store;
    let (team, node) = (team(store).await, NodeId::random());
    let new = |created| NewSnapshot { node, ..snapshot_of(team, created) };
    let [old, used, young] = [new(1000), new(2000), new(3000)];
    for new in [&old, &used, &young] {
        ready(store, new).await;
    }
    ready(store, &snapshot_of(team, 1)).await;
    begin(store, &new(1)).await;
    begin(store, &NewSnapshot { purpose: Purpose::Fork, ..new(1) }).await;
    let cold = async |before| {
        let rows = store.cold_snapshots(node, at(before)).await.unwrap();
        rows.into_iter().map(|row| row.id).collect::<Vec<_>>()
    };
    assert_eq!(cold(1000).await, []);
    assert_eq!(cold(1001).await, std::slice::from_ref(&old.id));
    assert_eq!(cold(9000).await, [old.id.clone(), used.id.clone(), young.id.clone()]);
    // One that was made from another thing says nothing of it, whatever its id is.
    let of = |made_from, created| NewSandbox { node, made_from, ..sandbox_of(team, created) };
    insert(store, &of(MadeFrom::Fork(used.id.image()), 5000)).await;
    let child = of(MadeFrom::Snapshot(used.id.clone()), 4000);
    insert(store, &child).await;
    assert_eq!(cold(4000).await, [old.id.clone(), young.id.clone()]);
    assert_eq!(cold(4001).await, [old.id.clone(), used.id.clone(), young.id.clone()]);
    // It was used, whatever became of that.
    end(store, &child.id, S::Creating, EndReason::CreateFailed).await;
    assert_eq!(cold(3500).await, [old.id.clone(), young.id.clone()]);
    assert!(store.begin_snapshot_deletion(&old.id).await.unwrap());
    assert_eq!(cold(3500).await, [young.id]);
}

/// Of a fork there is everything or nothing.
pub async fn children_of_a_fork_are_admitted_together_or_not_at_all(store: Arc<dyn Store>) {
    let store = &*store;
    let team = team(store).await;
    let node = NodeId::random();
    insert(store, &NewSandbox { node, ..sandbox_of(team, 0) }).await;
    let fork = |sandboxes, disk_mib| NewSnapshot {
        purpose: Purpose::Fork,
        node,
        quota: Amount { sandboxes, ..Amount::UNBOUNDED },
        capacity: Amount { disk_mib, ..Amount::UNBOUNDED },
        ..snapshot_of(team, 1)
    };
    let source = SandboxId::random();
    let made_from = MadeFrom::Fork(source.clone());
    let children: Vec<_> = (0..3)
        .map(|_| NewSandbox {
            node,
            made_from: made_from.clone(),
            generation: Generation(3),
            ..sandbox_of(team, 1)
        })
        .collect();
    let count = async || {
        let rows = store.list(&all_of(team)).await.unwrap().rows.len();
        (rows, store.snapshots_on_node(node).await.unwrap().len())
    };
    let outcome = store.insert_snapshot(&fork(3, u64::MAX), &children).await.unwrap();
    let excess = Excess { resource: Resource::Sandboxes, budget: 3, in_use: 1, asked: 3 };
    assert_eq!(outcome, Admitted::OverQuota(excess));
    // Four disks of 4096 MiB, and the image.
    let room = 4 * 4096 + 5120;
    let outcome = store.insert_snapshot(&fork(4, room - 1), &children).await.unwrap();
    let excess = Excess { resource: Resource::Disk, budget: room - 1, in_use: 4096, asked: room - 4096 };
    assert_eq!(outcome, Admitted::OverCapacity { excess, soon: false });
    assert_eq!(count().await, (1, 0), "what was refused left something");
    let new = fork(4, room);
    assert_eq!(store.insert_snapshot(&new, &children).await.unwrap(), Admitted::Inserted);
    assert_eq!(count().await, (4, 1));
    let all = Amount { sandboxes: 4, cpus: 8, memory_mib: 4096, disk_mib: room };
    assert_eq!(store.in_use(node).await.unwrap(), all);
    assert_eq!(store.in_use(NodeId::random()).await.unwrap(), Amount::default());
    for child in &children {
        let row = store.sandbox(&child.id).await.unwrap().unwrap();
        assert_eq!((row.state, row.generation), (S::Creating, Generation(3)));
        assert_eq!(row.made_from, MadeFrom::Fork(source.clone()));
        assert_eq!(store.events(&child.id).await.unwrap().len(), 1);
        end(store, &child.id, S::Creating, EndReason::CreateFailed).await;
    }
    // An id that is used already takes the rest with it.
    assert!(store.insert_snapshot(&fork(9, u64::MAX), &children[..1]).await.is_err());
    assert_eq!(count().await, (4, 1));
}

/// The newest that is complete; the one before is to be removed from then on, and other machines have their own.
pub async fn a_template_has_one_image_on_each_machine(store: Arc<dyn Store>) {
    let store = &*store;
    let (team, node) = (team(store).await, NodeId::random());
    let spec = TemplateSpec {
        base: "base".into(),
        start: Some("server --port '80'".into()),
        ready: None,
        ready_timeout: 60,
        pool: 3,
        agent: None,
        inherited: Vec::new(),
    };
    let purpose = Purpose::Template(Box::new(spec));
    let new = |name: &str, node, created| NewSnapshot {
        purpose: purpose.clone(),
        template: name.into(),
        node,
        ..snapshot_of(team, created)
    };
    let found = async |node, name| store.template(node, name).await.unwrap();
    let (first, second, other) = (new("web", node, 1), new("web", node, 2), new("api", node, 3));
    let elsewhere = new("web", NodeId::random(), 4);
    begin(store, &first).await;
    assert_eq!(found(node, "web").await, None, "it is not complete");
    for new in [&first, &other, &elsewhere] {
        store.insert_snapshot(new, &[]).await.ok();
        assert_eq!(store.snapshot_ready(&new.id, None).await.unwrap(), Finished::Ready);
    }
    let row = found(node, "web").await.unwrap();
    assert_eq!((row.id, row.purpose), (first.id.clone(), purpose.clone()));
    begin(store, &second).await;
    assert_eq!(found(node, "web").await.unwrap().id, first.id, "until the next one is complete");
    assert_eq!(store.snapshot_ready(&second.id, None).await.unwrap(), Finished::Ready);
    assert_eq!(found(node, "web").await.unwrap().id, second.id);
    let states = async || {
        let rows = store.snapshots_on_node(node).await.unwrap();
        rows.into_iter().map(|row| (row.id, row.state)).collect::<Vec<_>>()
    };
    let expected = [
        (first.id.clone(), ImageState::Deleting),
        (second.id.clone(), ImageState::Ready),
        (other.id.clone(), ImageState::Ready),
    ];
    assert_eq!(states().await, expected);
    assert_eq!(found(elsewhere.node, "web").await.unwrap().id, elsewhere.id);
    // No client takes it for a snapshot of its team, and a snapshot of that template is none of it.
    assert_eq!(ids(store, &everything(team)).await, []);
    assert_eq!(store.snapshot(team, &key(second.id.as_str(), None)).await.unwrap(), None);
    ready(store, &NewSnapshot { template: "web".into(), node, ..snapshot_of(team, 5) }).await;
    assert_eq!(found(node, "web").await.unwrap().id, second.id);
    // One that was made for the place of another one does not take that of a third.
    for (replaced, finished) in [(&first, Finished::Outdated), (&second, Finished::Ready)] {
        let renewed = new("web", node, 6);
        begin(store, &renewed).await;
        let outcome = store.snapshot_ready(&renewed.id, Some(&replaced.id)).await.unwrap();
        assert_eq!(outcome, finished);
        let serves = if finished == Finished::Ready { &renewed.id } else { &second.id };
        assert_eq!(found(node, "web").await.unwrap().id, *serves);
    }
    let last = found(node, "web").await.unwrap().id;
    assert!(store.begin_snapshot_deletion(&last).await.unwrap());
    assert_eq!(found(node, "web").await, None);
    let late = new("web", node, 7);
    begin(store, &late).await;
    let outcome = store.snapshot_ready(&late.id, Some(&last)).await.unwrap();
    assert_eq!(outcome, Finished::Outdated, "it was deleted meanwhile");
}

/// Who comes second is refused, whichever tag it has and whoever's it is; a template that is there already goes on.
pub async fn a_name_is_a_template_s_or_a_snapshot_s(store: Arc<dyn Store>) {
    let store = &*store;
    let (team, node) = (team(store).await, NodeId::random());
    let spec = TemplateSpec {
        base: "base".into(),
        start: None,
        ready: None,
        ready_timeout: 60,
        pool: 0,
        agent: None,
        inherited: Vec::new(),
    };
    let purpose = Purpose::Template(Box::new(spec));
    let template = |name: &str| NewSnapshot {
        purpose: purpose.clone(),
        template: name.into(),
        node,
        ..snapshot_of(team, 1)
    };
    let snapshot = |name: &str| NewSnapshot { name: named(name, "v2"), node, ..snapshot_of(team, 2) };
    let finish = async |new: NewSnapshot| {
        begin(store, &new).await;
        store.snapshot_ready(&new.id, None).await.unwrap()
    };
    assert_eq!(finish(template("web")).await, Finished::Ready);
    assert_eq!(finish(snapshot("web")).await, Finished::NameTaken);
    assert_eq!(finish(snapshot("mine")).await, Finished::Ready);
    assert_eq!(finish(template("mine")).await, Finished::NameTaken);
    assert_eq!(finish(template("web")).await, Finished::Ready, "its next image");
    // What has no name is in nobody's way, except by its id.
    let plain = NewSnapshot { node, ..snapshot_of(team, 3) };
    assert_eq!(finish(plain.clone()).await, Finished::Ready);
    assert_eq!(finish(template("base")).await, Finished::Ready);
    assert_eq!(finish(template(plain.id.as_str())).await, Finished::NameTaken);
    let fork = NewSnapshot { purpose: Purpose::Fork, template: "web".into(), node, ..snapshot_of(team, 4) };
    assert_eq!(finish(fork).await, Finished::Ready);
}
