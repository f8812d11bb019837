//! Snapshots that nobody has used for long.

use std::time::Duration;

use sandglass_control::CreateSandbox;
use sandglass_engine::engine::{Engine as _, EngineError, Lack};
use sandglass_store::SnapshotRow;
use sandglass_types::{Error, ErrorKind, Reference, SandboxId, SandboxState};

use crate::fixture::{HOUR, Server, World, eventually, request, written};
use crate::scripted::Manner;

const AFTER: Duration = Duration::from_millis(400);

/// A little more than that.
const LONG: Duration = Duration::from_millis(401);

fn world() -> World {
    let mut world = World::scripted(Manner::Obedient);
    world.compress_after = Some(AFTER);
    world
}

fn is_compressed(world: &World, snapshot: &SnapshotRow) -> Option<bool> {
    let id = snapshot.id.image();
    let measured = world.engine().footprints(std::slice::from_ref(&id)).unwrap();
    measured.each.get(&id).map(|footprint| footprint.compressed)
}

async fn gets_compressed(world: &World, snapshot: &SnapshotRow) {
    world.clock.advance(LONG);
    eventually("it is compressed", async || (is_compressed(world, snapshot) == Some(true)).then_some(()))
        .await;
}

async fn create_of(server: &Server, snapshot: &SnapshotRow) -> Result<SandboxId, Error> {
    let request = CreateSandbox { template: snapshot.id.to_string(), ..request(HOUR) };
    server.control.create(server.team, request).await.map(|row| row.id)
}

#[tokio::test(flavor = "multi_thread")]
async fn they_are_compressed_and_expanded_once_for_all_who_want_them() {
    let world = world();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let cold = server.control.snapshot(server.team, &id, None).await.unwrap();
    gets_compressed(&world, &cold).await;
    world.clock.advance(Duration::from_millis(1));
    let young = server.control.snapshot(server.team, &id, None).await.unwrap();
    let told = server.control.disk_use(&[cold.id.clone(), young.id.clone()]).await.unwrap();
    assert!(told[&cold.id].footprint.compressed && !told[&young.id].footprint.compressed);

    let asked = world.trouble.calls("expand_image");
    let held = world.trouble.hold("expand_image");
    let one = || create_of(&server, &cold);
    let all = async { tokio::join!(one(), one(), one(), one(), one()).into() };
    let release = async {
        eventually("one asks for it", async || (world.trouble.calls("expand_image") > asked).then_some(()))
            .await;
        drop(held);
    };
    let (children, ()): ([_; 5], ()) = tokio::join!(all, release);
    for child in children {
        let child = child.unwrap();
        assert_eq!(written(&world.home(&child).join("identity")).await, format!("{child} 2 None\n"));
        server.kill(&child).await;
    }
    assert_eq!(world.trouble.calls("expand_image"), asked + 1);
    assert_eq!(is_compressed(&world, &cold), Some(false));
    // Until nobody has used it for long again.
    let compressions = world.trouble.calls("compress_image");
    tokio::time::sleep(AFTER * 3).await;
    assert_eq!(is_compressed(&world, &cold), Some(false));
    assert_eq!(world.trouble.calls("compress_image"), compressions, "neither was unused for so long");
    for snapshot in [&cold, &young] {
        gets_compressed(&world, snapshot).await;
    }
    // What is as it should be is left alone.
    let compressions = world.trouble.calls("compress_image");
    tokio::time::sleep(AFTER * 3).await;
    assert_eq!(world.trouble.calls("compress_image"), compressions);
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_can_t_be_expanded_says_why_and_stays() {
    let world = world();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let cold = server.control.snapshot(server.team, &id, None).await.unwrap();
    gets_compressed(&world, &cold).await;
    let full = || EngineError::NoRoom { lack: Lack::Disk, step: "expand the image", source: "full".into() };
    let damaged = || EngineError::Damaged { what: "0.zst: it has another length".into() };
    for (errors, kind, words) in [
        ([full(), full()].into_iter().collect::<Vec<_>>(), ErrorKind::Capacity, "out of disk space"),
        (vec![damaged()], ErrorKind::Internal, "is damaged"),
    ] {
        world.trouble.fail("expand_image", errors);
        let restored = world.trouble.calls("restore");
        let error = create_of(&server, &cold).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(world.trouble.calls("restore"), restored, "something was started");
        assert_eq!(is_compressed(&world, &cold), Some(true));
        // What was told but not asked for again is none of the next one's.
        while create_of(&server, &cold).await.is_err() {}
        gets_compressed(&world, &cold).await;
    }
    for id in server.in_state(SandboxState::Running).await {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_being_compressed_can_be_used_and_deleted() {
    let world = world();
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let cold = server.control.snapshot(server.team, &id, None).await.unwrap();
    let held = world.trouble.hold("compress_image");
    world.clock.advance(LONG);
    eventually("it is at it", async || (world.trouble.calls("compress_image") > 0).then_some(())).await;
    let told = server.control.disk_use(std::slice::from_ref(&cold.id)).await.unwrap();
    assert!(!told[&cold.id].in_use, "what nobody waits for defers no deletion");
    let child = create_of(&server, &cold).await.unwrap();
    let reference: Reference = cold.id.as_str().parse().unwrap();
    server.control.delete_snapshot(server.team, &reference).await.unwrap();
    assert_eq!(world.engine().images().unwrap(), []);
    drop(held);
    for id in [id, child] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_it_can_t_be_done_it_is_not_tried_again() {
    let world = world();
    let unsupported = EngineError::Unsupported { engine: "fake", verb: "compress" };
    world.trouble.fail("compress_image", [unsupported]);
    let server = world.start().await.unwrap();
    let id = server.create().await;
    let cold = server.control.snapshot(server.team, &id, None).await.unwrap();
    world.clock.advance(LONG);
    eventually("it was tried", async || (world.trouble.calls("compress_image") > 0).then_some(())).await;
    tokio::time::sleep(AFTER * 3).await;
    assert_eq!((world.trouble.calls("compress_image"), is_compressed(&world, &cold)), (1, Some(false)));
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}
