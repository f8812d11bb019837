//! Unused copies of a template's running state: each is handed out once, and none takes what somebody else needs.

use std::collections::{BTreeSet, HashMap};

use sandglass_engine::Engine as _;
use sandglass_engine::engine::{EngineError, Lack};
use sandglass_store::{SandboxRow, StartPath};
use sandglass_types::budget::Amount;
use sandglass_types::{Error, ErrorKind, PauseMode, SandboxId, SandboxState};

use crate::fixture::{HOUR, Server, World, defaults, eventually, request, spec, written};
use crate::scripted::{Manner, STOPPED};
use crate::trouble::broken;

/// A world in which the template `web` has a pool.
fn world(size: u32) -> World {
    let mut world = World::scripted(Manner::Obedient);
    world.pools = HashMap::from([("web".to_owned(), size)]);
    world
}

/// Makes the template of a new sandbox, and ends that.
async fn keep(server: &Server) {
    let id = server.create().await;
    server.control.keep_as_template(server.team, &id, "web", spec("base"), defaults(), None).await.unwrap();
    server.kill(&id).await;
    server.ended(&id).await;
}

async fn create(server: &Server) -> Result<SandboxRow, Error> {
    let request = sandglass_control::CreateSandbox { template: "web".into(), ..request(HOUR) };
    server.control.create(server.team, request).await
}

/// How many are ready.
async fn ready(server: &Server) -> u32 {
    let mut text = String::new();
    server.control.metrics(&mut text).await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("sandglass_pool_sandboxes "));
    line.unwrap().parse().unwrap()
}

/// Gives the pools time to be looked at.
async fn looked(server: &Server) {
    for _ in 0..100 {
        ready(server).await;
    }
}

async fn filled(server: &Server, size: u32) {
    eventually("the pool is full", async || (ready(server).await == size).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_is_handed_out_once_whoever_asks_at_the_same_time() {
    let world = world(8);
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 8).await;
    let asking: Vec<_> = (0..16)
        .map(|_| {
            let (control, team) = (server.control.clone(), server.team);
            let request = sandglass_control::CreateSandbox { template: "web".into(), ..request(HOUR) };
            tokio::spawn(async move { control.create(team, request).await })
        })
        .collect();
    let mut rows = Vec::new();
    for asked in asking {
        rows.push(asked.await.unwrap().unwrap());
    }
    assert_eq!(rows.iter().map(|row| row.id.clone()).collect::<BTreeSet<_>>().len(), 16);
    let pooled = rows.iter().filter(|row| row.start_path == StartPath::Pool).count();
    assert!(pooled >= 8, "{pooled} of 8 were handed out");
    for row in &rows {
        assert_eq!(row.state, SandboxState::Running);
        // It was told who it is before: when it was made for nobody.
        let generation = if row.start_path == StartPath::Pool { 3 } else { 2 };
        assert_eq!(row.generation.0, generation);
        let said = format!("{} {generation} None\n", row.id);
        assert_eq!(written(&world.home(&row.id).join("identity")).await, said);
        assert!(
            world.kept(&row.id).is_some_and(|left| left > 1800),
            "it keeps the deadline of an unused one"
        );
    }
    for row in &rows {
        server.kill(&row.id).await;
    }
    server.stop().await;
    // An unused one is of no use to the next server.
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_not_fit_for_use_is_made_from_the_image_instead() {
    let world = world(1);
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 1).await;
    world.trouble.fail("hand_out", [broken()]);
    let row = create(&server).await.unwrap();
    assert_eq!((row.state, row.start_path), (SandboxState::Running, StartPath::Restore));
    let events = server.control.events(server.team, &row.id).await.unwrap();
    let said = events.iter().any(|event| event.detail.contains("could not be handed out"));
    assert!(said, "{events:?}");
    assert_eq!(written(&world.home(&row.id).join("identity")).await, format!("{} 3 None\n", row.id));
    server.kill(&row.id).await;
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_takes_one_waits_for_nothing_else() {
    let world = world(2);
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 2).await;
    let calls =
        || ["hand_out", "attach", "set_deadline", "list", "restore"].map(|verb| world.trouble.calls(verb));
    let before = calls();
    let row = create(&server).await.unwrap();
    // It was so quick that its time is as it was asked for, in the store and with the host.
    assert_eq!(row.end_at, row.created_at.plus(HOUR));
    looked(&server).await;
    assert_eq!(calls(), [before[0] + 1, before[1], before[2], before[3], before[4]]);
    // The pool is looked at when nobody asks any more.
    filled(&server, 2).await;
    server.kill(&row.id).await;
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_nobody_gets_is_put_back() {
    let mut world = world(1);
    world.budgets.quota = Amount { sandboxes: 1, ..Amount::UNBOUNDED };
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 1).await;
    let (first, ready_one) = (server.create().await, world.engine().list().unwrap());
    assert_eq!(create(&server).await.unwrap_err().kind(), ErrorKind::Quota);
    assert_eq!(ready(&server).await, 1);
    server.kill(&first).await;
    let row = create(&server).await.unwrap();
    assert_eq!(row.start_path, StartPath::Pool);
    assert!(ready_one.iter().any(|(id, _)| *id == row.id), "it is the same");
    for id in server.in_state(SandboxState::Running).await {
        server.kill(&id).await;
    }
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn they_give_way_to_who_asks() {
    let mut world = world(2);
    world.budgets.capacity = Amount { memory_mib: 3 * 1024, ..Amount::UNBOUNDED };
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 2).await;
    let mut ids = Vec::new();
    for left in [2, 1, 0] {
        ids.push(server.create().await);
        eventually("they make room", async || (ready(&server).await == left).then_some(())).await;
    }
    let full = server.control.create(server.team, request(HOUR)).await.unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Capacity);
    for id in &ids {
        server.kill(id).await;
    }
    filled(&server, 2).await;
    server.stop().await;
    world.nothing_left().await;
}

/// The one that there is.
fn only(world: &World) -> SandboxId {
    let there = world.engine().list().unwrap();
    assert_eq!(there.len(), 1, "{there:?}");
    there[0].0.clone()
}

fn is_there(world: &World, id: &SandboxId) -> bool {
    world.engine().list().unwrap().iter().any(|(one, _)| one == id)
}

#[tokio::test(flavor = "multi_thread")]
async fn they_give_way_to_an_image_that_is_written() {
    // An image of one is 5 GiB, and so is that of the template; one that runs is 4 GiB.
    for (disk_gib, what) in [(15, "pause"), (15, "snapshot"), (19, "fork"), (40, "snapshot")] {
        let mut world = world(1);
        world.budgets.capacity = Amount { disk_mib: disk_gib << 10, ..Amount::UNBOUNDED };
        let server = world.start().await.unwrap();
        keep(&server).await;
        filled(&server, 1).await;
        let unused = only(&world);
        let id = server.create().await;
        assert!(is_there(&world, &unused), "there is room for both");
        let held = world.trouble.hold("checkpoint");
        let (restored, before) = (world.trouble.calls("restore"), world.trouble.calls("checkpoint"));
        let asked = async {
            match what {
                "pause" => server.control.pause(server.team, &id, PauseMode::Full).await.unwrap(),
                "snapshot" => drop(server.control.snapshot(server.team, &id, None).await.unwrap()),
                _ => drop(server.control.fork(server.team, &id, 1, HOUR).await.unwrap()),
            }
        };
        let writing = async {
            eventually("it is written", async || (world.trouble.calls("checkpoint") > before).then_some(()))
                .await;
            assert_eq!(is_there(&world, &unused), disk_gib == 40, "{what} with {disk_gib} GiB");
            // The pool looks again as soon as something of it has gone.
            looked(&server).await;
            assert_eq!(world.trouble.calls("restore"), restored, "{what} with {disk_gib} GiB");
            drop(held);
        };
        tokio::join!(asked, writing);
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_under_way_has_room_for_its_image_beside_another() {
    // Two that run are 8 GiB, the image of the template is 5 GiB, each copy 4 GiB. With one image of 5 GiB there is room for
    // one copy, and with two for none.
    let mut world = world(1);
    world.budgets.capacity = Amount { disk_mib: 22 << 10, ..Amount::UNBOUNDED };
    let server = world.start().await.unwrap();
    keep(&server).await;
    let ids = [server.create().await, server.create().await];
    filled(&server, 1).await;
    let unused = {
        let there = world.engine().list().unwrap();
        there.into_iter().map(|(id, _)| id).find(|id| !ids.contains(id)).unwrap()
    };
    let (held, before) = (world.trouble.hold("checkpoint"), world.trouble.calls("checkpoint"));
    let pause = |id: &SandboxId| {
        let (control, team, id) = (server.control.clone(), server.team, id.clone());
        tokio::spawn(async move { control.pause(team, &id, PauseMode::Full).await })
    };
    let written = async |count| {
        eventually("it is written", async || {
            (world.trouble.calls("checkpoint") == before + count).then_some(())
        })
        .await;
    };
    let first = pause(&ids[0]);
    written(1).await;
    assert!(is_there(&world, &unused), "there is room for one image");
    let second = pause(&ids[1]);
    written(2).await;
    assert!(!is_there(&world, &unused), "there is none for two");
    drop(held);
    for pausing in [first, second] {
        pausing.await.unwrap().unwrap();
    }
    for id in &ids {
        server.kill(id).await;
    }
    filled(&server, 1).await;
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn they_make_room_where_the_machine_has_none_for_an_image() {
    let world = world(2);
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 2).await;
    let id = server.create().await;
    let full = || EngineError::NoRoom { lack: Lack::Disk, step: "write the image", source: "none".into() };
    world.trouble.fail("checkpoint", [full()]);
    server.control.snapshot(server.team, &id, None).await.unwrap();
    assert_eq!(world.engine().list().unwrap().len(), 1, "the others have made room");
    // Where there is nothing that could, it is refused.
    world.trouble.fail("checkpoint", [full()]);
    let refused = server.control.pause(server.team, &id, PauseMode::Full).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Capacity);
    server.kill(&id).await;
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_goes_has_its_room_until_it_is_gone() {
    let mut world = world(1);
    world.budgets.capacity = Amount { memory_mib: 1024, ..Amount::UNBOUNDED };
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 1).await;
    let (unused, made) = (only(&world), world.trouble.calls("create"));
    // It is tried again until it is gone.
    world.trouble.fail("destroy", [broken()]);
    let (held, before) = (world.trouble.hold("destroy"), world.trouble.calls("destroy"));
    let asked = server.create();
    let ends = async {
        eventually("it is to go", async || (world.trouble.calls("destroy") > before).then_some(())).await;
        assert_eq!(ready(&server).await, 0);
        assert_eq!(world.trouble.calls("create"), made, "it is still there");
        drop(held);
    };
    let (id, ()) = tokio::join!(asked, ends);
    assert!(!is_there(&world, &unused) && world.trouble.calls("destroy") > before + 1);
    server.kill(&id).await;
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_being_made_takes_room_too() {
    let mut world = world(1);
    world.budgets.capacity = Amount { memory_mib: 1024, ..Amount::UNBOUNDED };
    let server = world.start().await.unwrap();
    let (held, made) = (world.trouble.hold("restore"), world.trouble.calls("restore"));
    keep(&server).await;
    eventually("it is being made", async || (world.trouble.calls("restore") > made).then_some(())).await;
    let before = world.trouble.calls("create");
    let asked = server.create();
    let ends = async {
        // Both have rows by now, or are counted; the one that asks waits until the other is gone.
        eventually("it is admitted", async || {
            (server.in_state(SandboxState::Creating).await.len() == 1).then_some(())
        })
        .await;
        assert_eq!(world.trouble.calls("create"), before, "there is no room for both");
        drop(held);
    };
    let (id, ()) = tokio::join!(asked, ends);
    assert_eq!(only(&world), id);
    server.kill(&id).await;
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_refused_makes_no_pool_grow() {
    for refused in [true, false] {
        let mut world = world(1);
        world.budgets.quota = Amount { sandboxes: if refused { 1 } else { 4 }, ..Amount::UNBOUNDED };
        let server = world.start().await.unwrap();
        keep(&server).await;
        filled(&server, 1).await;
        create(&server).await.unwrap();
        // The pool is empty while these come.
        let held = world.trouble.hold("attach");
        let asking: Vec<_> = (0..3)
            .map(|_| {
                let (control, team) = (server.control.clone(), server.team);
                let request = sandglass_control::CreateSandbox { template: "web".into(), ..request(HOUR) };
                tokio::spawn(async move { control.create(team, request).await })
            })
            .collect();
        if refused {
            for asked in asking {
                assert_eq!(asked.await.unwrap().unwrap_err().kind(), ErrorKind::Quota);
            }
            drop(held);
        } else {
            drop(held);
            for asked in asking {
                asked.await.unwrap().unwrap();
            }
        }
        filled(&server, if refused { 1 } else { 2 }).await;
        for id in server.in_state(SandboxState::Running).await {
            server.kill(&id).await;
        }
        server.create().await;
        assert_eq!(ready(&server).await, if refused { 1 } else { 2 });
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn time_limits_stand_still_with_it() {
    let world = world(1);
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 1).await;
    let stopped = world.home(&only(&world)).join(STOPPED);
    assert!(stopped.exists(), "its agent's clock goes on");
    let row = create(&server).await.unwrap();
    assert_eq!((row.start_path, world.home(&row.id).join(STOPPED)), (StartPath::Pool, stopped.clone()));
    assert!(!stopped.exists(), "its agent's clock does not go on");
    server.kill(&row.id).await;
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_image_of_the_template_has_a_new_pool() {
    let world = world(1);
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 1).await;
    let before = world.engine().list().unwrap();
    keep(&server).await;
    eventually("it is another one", async || {
        let now = world.engine().list().unwrap();
        (ready(&server).await == 1 && now.len() == 1 && now != before).then_some(())
    })
    .await;
    server.stop().await;
    world.nothing_left().await;
}
