//! Volumes: rows and what is on the machine come and go together, and nothing goes that somebody needs.

use sandglass_control::{AskedVolume, CreateSandbox, VolumesConfig};
use sandglass_engine::Engine as _;
use sandglass_store::{StartPath, Store as _, VolumeQuota, VolumeRow};
use sandglass_types::{Error, ErrorKind, PauseMode, ResumeMode, SandboxId, VolumeId, VolumeMount};

use crate::fixture::{HOUR, Server, World, defaults, eventually, request, spec};
use crate::scripted::Manner;
use crate::trouble::broken;

async fn make(server: &Server, name: &str) -> Result<VolumeRow, Error> {
    server.control.create_volume(server.team, name.parse().unwrap(), None).await
}

fn with(name: &str, path: &str) -> CreateSandbox {
    let volumes = vec![AskedVolume { name: name.parse().unwrap(), path: path.parse().unwrap() }];
    CreateSandbox { volumes, ..request(HOUR) }
}

/// Store and machine know the same volumes.
async fn volumes_are(world: &World, server: &Server, expected: &[&VolumeRow]) {
    let engine = world.engine();
    let node = server.store.node().await.unwrap();
    eventually("store and machine have these volumes", async || {
        let rows = server.store.volumes_on_node(node).await.unwrap();
        let mut there = engine.volumes().unwrap();
        let mut wanted: Vec<_> = expected.iter().map(|row| row.id.clone()).collect();
        there.sort();
        wanted.sort();
        (there == wanted && rows.len() == wanted.len()).then_some(())
    })
    .await;
}

/// A store that was put back from a copy of yesterday costs nobody what is on a volume of today.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_the_store_does_not_know_stays() {
    let world = World::scripted(Manner::Obedient);
    let unknown: VolumeId = "unknown8901234567890".parse().unwrap();
    world.engine().create_volume(&unknown, 16).unwrap();
    let server = world.start().await.unwrap();
    let going = make(&server, "going").await.unwrap();
    world.trouble.fail("remove_volume", [broken()]);
    assert_eq!(kind(server.control.delete_volume(server.team, &going.id).await), ErrorKind::Internal);
    server.stop().await;
    let server = world.start().await.unwrap();
    // The reconciler has been there.
    eventually("what was being removed is gone", async || {
        (world.engine().volumes().unwrap() == [unknown.clone()]).then_some(())
    })
    .await;
    server.stop().await;
}

fn kind<T: std::fmt::Debug>(outcome: Result<T, Error>) -> ErrorKind {
    outcome.unwrap_err().kind()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_stays_while_a_sandbox_or_a_snapshot_has_it_and_copies_have_it_too() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let volume = make(&server, "data").await.unwrap();
    assert_eq!(volume.size_mib, VolumesConfig::default().default_mib);
    assert_eq!(kind(make(&server, "data").await), ErrorKind::Conflict);
    assert_eq!(kind(server.control.create(server.team, with("other", "/mnt/v")).await), ErrorKind::NotFound);
    let row = server.control.create(server.team, with("data", "/mnt/v")).await.unwrap();
    let mounts =
        [VolumeMount { id: volume.id.clone(), name: volume.name.clone(), path: "/mnt/v".parse().unwrap() }];
    assert_eq!(row.volumes, mounts);
    let delete = async || server.control.delete_volume(server.team, &volume.id).await;
    let refusal = delete().await.unwrap_err();
    assert_eq!(refusal.kind(), ErrorKind::Conflict);
    assert!(refusal.to_string().contains(row.id.as_str()), "{refusal}");
    // Paused it has it as well, and when it comes back.
    server.control.pause(server.team, &row.id, PauseMode::Full).await.unwrap();
    assert_eq!(kind(delete().await), ErrorKind::Conflict);
    server.control.resume(server.team, &row.id, HOUR, ResumeMode::Restore).await.unwrap();
    let snapshot = server.control.snapshot(server.team, &row.id, None).await.unwrap();
    let copies = server.control.fork(server.team, &row.id, 1, HOUR).await.unwrap();
    let fork = copies.into_iter().next().unwrap().unwrap();
    let of_snapshot = CreateSandbox { template: snapshot.id.to_string(), ..request(HOUR) };
    let copy = server.control.create(server.team, of_snapshot).await.unwrap();
    assert_eq!((&fork.volumes[..], &copy.volumes[..]), (&mounts[..], &mounts[..]));
    let others = CreateSandbox { template: snapshot.id.to_string(), ..with("data", "/mnt/w") };
    assert_eq!(kind(server.control.create(server.team, others).await), ErrorKind::Invalid);
    for id in [row.id, fork.id, copy.id] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    let refusal = delete().await.unwrap_err();
    assert!(refusal.to_string().contains(&format!("snapshots {}", snapshot.id)), "{refusal}");
    server.control.delete_snapshot(server.team, &snapshot.id.as_str().parse().unwrap()).await.unwrap();
    eventually("it can be deleted", async || delete().await.is_ok().then_some(())).await;
    assert_eq!(kind(delete().await), ErrorKind::NotFound);
    volumes_are(&world, &server, &[]).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_one_team_s() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let volume = make(&server, "data").await.unwrap();
    let other = server.store.create_team("other", volume.created_at).await.unwrap().id;
    assert_eq!(kind(server.control.volume(other, &volume.id).await), ErrorKind::NotFound);
    assert_eq!(kind(server.control.delete_volume(other, &volume.id).await), ErrorKind::NotFound);
    assert!(server.control.volumes(other).await.unwrap().is_empty());
    assert_eq!(kind(server.control.create(other, with("data", "/mnt/v")).await), ErrorKind::NotFound);
    let theirs = server.control.create_volume(other, "data".parse().unwrap(), Some(16)).await.unwrap();
    assert_ne!(theirs.token, volume.token);
    for size in [0, 15, u32::MAX] {
        let made = server.control.create_volume(other, "x".parse().unwrap(), Some(size)).await;
        assert_eq!(kind(made), ErrorKind::Invalid);
    }
    volumes_are(&world, &server, &[&volume, &theirs]).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_volumes_may_be_together_is_bounded() {
    let mut world = World::scripted(Manner::Obedient);
    world.budgets.volumes = VolumesConfig { default_mib: 100, quota: VolumeQuota { count: 2, mib: 150 } };
    let server = world.start().await.unwrap();
    let first = make(&server, "a").await.unwrap();
    let refusal = make(&server, "b").await.unwrap_err();
    assert_eq!(refusal.kind(), ErrorKind::Quota);
    assert!(refusal.to_string().contains("quota.volumes_mib"), "{refusal}");
    let second = server.control.create_volume(server.team, "b".parse().unwrap(), Some(50)).await.unwrap();
    let refusal = make(&server, "c").await.unwrap_err();
    assert!(refusal.to_string().ends_with("quota.volumes"), "{refusal}");
    volumes_are(&world, &server, &[&first, &second]).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_made_with_a_volume_is_no_copy_of_a_template_s_running_state() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let kept = server.control.keep_as_template(server.team, &id, "web", spec("base"), defaults(), None).await;
    kept.unwrap();
    make(&server, "data").await.unwrap();
    let plain = CreateSandbox { template: "web".into(), ..request(HOUR) };
    assert_eq!(server.control.create(server.team, plain).await.unwrap().start_path, StartPath::Restore);
    let with = CreateSandbox { template: "web".into(), ..with("data", "/mnt/v") };
    let row = server.control.create(server.team, with).await.unwrap();
    assert_eq!((row.start_path, row.volumes.len()), (StartPath::Cold, 1));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_or_was_left_half_way_leaves_nothing() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    world.trouble.fail("create_volume", [broken()]);
    assert_eq!(kind(make(&server, "data").await), ErrorKind::Internal);
    volumes_are(&world, &server, &[]).await;
    let kept = make(&server, "data").await.unwrap();
    let row = server.control.create(server.team, with("data", "/mnt/v")).await.unwrap();
    let going = make(&server, "going").await.unwrap();
    // It is gone for clients, and is removed when that works.
    world.trouble.fail("remove_volume", [broken()]);
    assert_eq!(kind(server.control.delete_volume(server.team, &going.id).await), ErrorKind::Internal);
    assert_eq!(kind(server.control.volume(server.team, &going.id).await), ErrorKind::NotFound);
    assert!(world.engine().volumes().unwrap().contains(&going.id));
    server.stop().await;
    let server = world.start().await.unwrap();
    volumes_are(&world, &server, &[&kept]).await;
    let ids = |row: &VolumeRow| row.id.clone();
    assert_eq!(
        server.control.volumes(server.team).await.unwrap().iter().map(ids).collect::<Vec<_>>(),
        [kept.id]
    );
    let id: &SandboxId = &row.id;
    server.kill(id).await;
    server.stop().await;
}
